# SPDX-License-Identifier: Apache-2.0
"""The packages: their files, the report of lintian, and that a second build has the same bytes."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.machine.tools import tool

from . import builder
from .build import BUILD, build, packages
from .source import PROJECT, changelog, next_entry, version

# A first run fetches a Debian to build in.
pytestmark = pytest.mark.timeout(1800)
# Also the findings that are information, pedantic or experimental.
OPTIONS = "--display-info --display-experimental --pedantic --show-overrides"
LINTIAN = f"mkdir out; cd in; lintian {OPTIONS} *.changes 2>&1 || :"


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder with the packages of this tree."""
    return packages()


def deb(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"{name}_*.deb")
    return found


def files(package: Path) -> set[str]:
    """The paths of a package's files, without folders."""
    lines = tool(["dpkg-deb", "--contents", package]).splitlines()
    return {line.split()[5].removeprefix(".") for line in lines if not line.startswith("d")}


def control(package: Path, name: str, place: Path) -> str:
    """A file of the package's control archive, "" if it has none of that name."""
    shutil.rmtree(place, ignore_errors=True)
    tool(["dpkg-deb", "--control", package, place])
    return (place / name).read_text() if (place / name).exists() else ""


def test_source_and_packages_exist(built: Path) -> None:
    now = version(changelog())
    names = {file.name.replace(now, "V") for file in built.iterdir()}
    machine = tool(["dpkg", "--print-architecture"]).strip()
    assert {f"resctrlmond_V_{machine}.deb", "python3-resctrlmond_V_all.deb", "resctrlmond_V.dsc"} <= names
    assert {
        "resctrlmond_V.debian.tar.xz",
        f"resctrlmond_{now.rpartition('-')[0]}.orig.tar.xz",
    } <= names


def test_files_of_each_package(built: Path) -> None:
    daemon, modules = files(deb(built, "resctrlmond")), files(deb(built, "python3-resctrlmond"))
    wanted = {
        *("/usr/bin/resctrlmond", "/usr/bin/resctrlctl", "/usr/libexec/resctrlmon-oci-hook"),
        "/usr/libexec/resctrlmon-unit-exec",
        *(f"/usr/lib/systemd/system/resctrlmond.{kind}" for kind in ("service", "socket")),
        *("/usr/lib/systemd/system/sys-fs-resctrl.mount", "/usr/lib/sysusers.d/resctrlmond.conf"),
        *("/usr/share/dbus-1/system.d/org.resctrlmon1.conf", "/etc/resctrlmond/resctrlmond.yaml"),
        "/usr/share/resctrlmond/hooks.d/resctrlmon-createRuntime.json",
        *("/usr/share/man/man8/resctrlmond.8.gz", "/usr/share/bash-completion/completions/resctrlctl"),
        *("/usr/share/zsh/vendor-completions/_resctrlctl", "/usr/share/fish/vendor_completions.d/resctrlctl.fish"),
    }
    assert wanted <= daemon
    assert not [path for path in daemon if "/dist-packages/" in path]
    below = "/usr/lib/python3/dist-packages"
    assert {f"{below}/resctrlmond/api/org.resctrlmon.Manager.varlink", f"{below}/resctrlctl/__main__.py"} <= modules
    assert not [path for path in modules if "/sim/" in path or path.endswith(".pyc")]


def test_hook_of_the_package_is_compiled(built: Path, tmp_path: Path) -> None:
    tool(["dpkg-deb", "--extract", deb(built, "resctrlmond"), tmp_path])
    assert (tmp_path / "usr/libexec/resctrlmon-oci-hook").read_bytes().startswith(b"\x7fELF")
    depends = tool(["dpkg-deb", "--field", deb(built, "resctrlmond"), "Depends"])
    assert re.search(r"\blibc6\b", depends)
    # The program for services contains the C library.
    assert (tmp_path / "usr/libexec/resctrlmon-unit-exec").read_bytes().startswith(b"\x7fELF")
    sources = tool(["dpkg-deb", "--field", deb(built, "resctrlmond"), "Built-Using"])
    assert re.fullmatch(r"glibc \(= [^)]+\)", sources.strip())


def test_every_page_unit_and_command_is_in_a_package(built: Path) -> None:
    everywhere = set().union(*(files(package) for package in built.glob("*.deb")))
    pages = {page.stem for page in (PROJECT / "man").glob("*.scd")} - {"resctrlmond-sim.1"}
    assert {f"/usr/share/man/man{page[-1]}/{page}.gz" for page in pages} == {
        path for path in everywhere if path.startswith("/usr/share/man/")
    }
    units = {
        file.name for file in (PROJECT / "systemd").iterdir() if file.suffix in (".service", ".socket", ".mount")
    }
    assert {f"/usr/lib/systemd/system/{unit}" for unit in units} <= everywhere
    assert "/usr/lib/systemd/catalog/resctrlmond.catalog" in everywhere
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"].keys()
    commands = {path.removeprefix("/usr/bin/") for path in everywhere if path.startswith("/usr/bin/")}
    assert commands == scripts - {"resctrlmond-sim"} | {"resctrlmond-witness"}


def test_every_example_is_in_a_package_unchanged(built: Path, tmp_path: Path) -> None:
    tool(["dpkg-deb", "--extract", deb(built, "resctrlmond"), tmp_path])
    installed, examples = tmp_path / "usr/share/doc/resctrlmond/examples", PROJECT / "packaging" / "examples"
    assert contents(installed) == contents(examples)


def contents(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Return the content of each file below, and whether it is a program."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_no_file_is_in_two_packages(built: Path) -> None:
    counts = Counter(path for package in built.glob("*.deb") for path in files(package))
    assert [path for path, count in counts.items() if count > 1] == []


def test_only_the_configuration_is_a_conffile(built: Path, tmp_path: Path) -> None:
    for package, name in (("resctrlmond", "resctrlmond.yaml"), ("resctrlmon-nri", "nri.yaml")):
        text = control(deb(built, package), "conffiles", tmp_path / "control")
        assert text.split() == [f"/etc/resctrlmond/{name}"]


def test_no_maintainer_script_starts_the_daemon_or_touches_the_mount(built: Path, tmp_path: Path) -> None:
    scripts = {name: control(deb(built, "resctrlmond"), name, tmp_path / "control") for name in SCRIPTS}
    called = [line for text in scripts.values() for line in text.splitlines() if "deb-systemd-invoke" in line]
    assert [line.split()[1:-2] for line in called] == [
        ["try-restart", "resctrlmond.service"],
        ["stop", "resctrlmond.socket", "resctrlmond-unit.socket", "resctrlmond.service"],
    ]
    for text in scripts.values():
        assert not re.search(r"\bu?mount\b(?!')", re.sub(r"#.*|sys-fs-resctrl\.mount", "", text))


SCRIPTS = ("preinst", "postinst", "prerm", "postrm")


def test_lintian_finds_nothing_without_an_override(built: Path, tmp_path: Path) -> None:
    inside = io.BytesIO()
    with tarfile.open(fileobj=inside, mode="w") as archive:
        archive.add(built, "in")
    output = builder.run(tmp_path, inside.getvalue(), LINTIAN)
    assert not re.findall(r"^[EWIPX]: .*", output, re.MULTILINE), output
    # A lintian that does not start finds nothing, not even what is overridden.
    assert "\nO: resctrlmond: shared-library-lacks-prerequisites" in output, output


def test_second_build_has_the_same_bytes(built: Path, again: Path) -> None:
    for name in ("resctrlmond", "python3-resctrlmond", "resctrlmond-witness"):
        assert deb(again, name).read_bytes() == deb(built, name).read_bytes(), name
    for kind in ("*.dsc", "*.tar.xz"):
        assert {file.name: file.read_bytes() for file in again.glob(kind)} == {
            file.name: file.read_bytes() for file in built.glob(kind)
        }


# From the source package, because the tree may have changed since. In another folder, with another language, zone,
# umask and home; another run has another time and host name by itself.
ELSEWHERE = f"""\
mkdir -p other/place; cd other/place; dpkg-source --extract ../../in/*.dsc
export TZ=Pacific/Auckland LC_ALL=C HOME=/nonexistent USER=other; umask 027
{BUILD}
mv out /build/out
"""


@pytest.fixture
def again(built: Path, tmp_path: Path) -> Iterator[Path]:
    """Another build, under other circumstances; the tests that the first one ran are not run again."""
    inside = io.BytesIO()
    with tarfile.open(fileobj=inside, mode="w") as archive:
        archive.add(built, "in")
    build(tmp_path, inside.getvalue(), "nocheck", ELSEWHERE)
    yield tmp_path / "out"


# As a distribution's machines run them: the packages are installed with apt, and each test is started by the runner.
# The test that needs a machine runs in a guest, with the other tests of an installed package.
AUTOPKGTEST = """\
mkdir out
status=0; autopkgtest --output-dir /tmp/results in/*.deb in/*.dsc -- null >log 2>&1 || status=$?
cat log /tmp/results/summary
test $status -eq 0 || test $status -eq 2
"""


@pytest.mark.parametrize("suite", ["trixie", "sid"])
def test_autopkgtest_passes_with_packages_of_one_debian_only(built: Path, tmp_path: Path, suite: str) -> None:
    own = {"resctrlmond", "python3-resctrlmond", "resctrlmon-nri", "resctrlmon-exporter", "resctrlmond-witness"}
    depends = {
        re.split(r"[ :(]", word.strip())[0]
        for package in built.glob("*.deb")
        for word in tool(["dpkg-deb", "--field", package, "Depends"]).split(",")
    }
    tools = {"autopkgtest", "apt-utils", "systemd", "python3-hypothesis", "python3-pytest", "python3-pytest-timeout"}
    inside = io.BytesIO()
    with tarfile.open(fileobj=inside, mode="w") as archive:
        archive.add(built, "in")
    place = builder.root(suite, sorted(depends - own | tools))
    output = builder.run(tmp_path, inside.getvalue(), AUTOPKGTEST, archive=place, is_root=True)
    summary = dict(re.findall(r"^(\w+) +(PASS|FAIL|SKIP)\b", output, re.MULTILINE))
    assert summary == {"commands": "PASS", "modules": "PASS", "service": "SKIP"}, output[-8000:]


def test_a_later_version_is_later() -> None:
    text = next_entry(changelog(), "+next")
    assert text.endswith(changelog())
    order = ["dpkg", "--compare-versions", version(text), "gt", version(changelog())]
    assert subprocess.run(order, check=False).returncode == 0
