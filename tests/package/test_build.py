# SPDX-License-Identifier: Apache-2.0
"""The packages as files: what they hold, what lintian says, and that a second build is the same to the byte."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.machine.tools import tool

from . import builder
from .build import build, packages
from .source import changelog, next_entry, source, version

# A first run fetches a Debian to build in.
pytestmark = pytest.mark.timeout(1800)
LINTIAN = "mkdir out; cd in; lintian --fail-on error,warning --info *.changes 2>&1"


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


def test_source_and_packages_are_there(built: Path) -> None:
    now = version(changelog())
    names = {file.name.replace(now, "V") for file in built.iterdir()}
    assert {"resctrlmond_V_all.deb", "python3-resctrlmond_V_all.deb", "resctrlmond_V.dsc"} <= names
    assert {
        "resctrlmond_V.debian.tar.xz",
        f"resctrlmond_{now.rpartition('-')[0]}.orig.tar.xz",
    } <= names


def test_who_has_what(built: Path) -> None:
    daemon, modules = files(deb(built, "resctrlmond")), files(deb(built, "python3-resctrlmond"))
    wanted = {
        *("/usr/bin/resctrlmond", "/usr/bin/resctrlctl", "/usr/libexec/resctrlmon-oci-hook"),
        *(f"/usr/lib/systemd/system/resctrlmond.{kind}" for kind in ("service", "socket")),
        *("/usr/lib/systemd/system/sys-fs-resctrl.mount", "/usr/lib/sysusers.d/resctrlmond.conf"),
        *("/usr/share/dbus-1/system.d/org.resctrlmon1.conf", "/etc/resctrlmond/resctrlmond.yaml"),
        *(f"/usr/share/resctrlmond/hooks.d/resctrlmon-{stage}.json" for stage in ("createRuntime", "poststop")),
        *("/usr/share/man/man8/resctrlmond.8.gz", "/usr/share/bash-completion/completions/resctrlctl"),
    }
    assert wanted <= daemon
    assert not [path for path in daemon if "/dist-packages/" in path]
    below = "/usr/lib/python3/dist-packages"
    assert {f"{below}/resctrlmond/api/org.resctrlmon.Manager.varlink", f"{below}/resctrlctl/__main__.py"} <= modules
    assert not [path for path in modules if "/sim/" in path or path.endswith(".pyc")]


def test_only_the_configuration_is_a_conffile(built: Path, tmp_path: Path) -> None:
    text = control(deb(built, "resctrlmond"), "conffiles", tmp_path / "control")
    assert text.split() == ["/etc/resctrlmond/resctrlmond.yaml"]


def test_no_maintainer_script_starts_the_daemon_or_touches_the_mount(built: Path, tmp_path: Path) -> None:
    scripts = {name: control(deb(built, "resctrlmond"), name, tmp_path / "control") for name in SCRIPTS}
    called = [line for text in scripts.values() for line in text.splitlines() if "deb-systemd-invoke" in line]
    assert [line.split()[1:-2] for line in called] == [
        ["try-restart", "resctrlmond.service"],
        ["stop", "resctrlmond.socket", "resctrlmond.service"],
    ]
    for text in scripts.values():
        assert not re.search(r"\bu?mount\b(?!')", re.sub(r"#.*|sys-fs-resctrl\.mount", "", text))


SCRIPTS = ("preinst", "postinst", "prerm", "postrm")


def test_lintian_finds_no_error_and_no_warning(built: Path, tmp_path: Path) -> None:
    inside = io.BytesIO()
    with tarfile.open(fileobj=inside, mode="w") as archive:
        archive.add(built, "in")
    said = builder.run(tmp_path, inside.getvalue(), LINTIAN)
    assert not re.findall(r"^[EW]: .*", said, re.MULTILINE)


def test_a_second_build_is_the_same_to_the_byte(built: Path, again: Path) -> None:
    for name in ("resctrlmond", "python3-resctrlmond"):
        assert deb(again, name).read_bytes() == deb(built, name).read_bytes(), name
    for kind in ("*.dsc", "*.tar.xz"):
        assert {file.name: file.read_bytes() for file in again.glob(kind)} == {
            file.name: file.read_bytes() for file in built.glob(kind)
        }


@pytest.fixture
def again(tmp_path: Path) -> Iterator[Path]:
    """Another build, not taken from the cache; the tests that the first one ran are not run again."""
    build(tmp_path, source(changelog()), options="nocheck")
    yield tmp_path / "out"


def test_a_later_version_is_later() -> None:
    text = next_entry(changelog(), "+next")
    assert text.endswith(changelog())
    order = ["dpkg", "--compare-versions", version(text), "gt", version(changelog())]
    assert subprocess.run(order, check=False).returncode == 0
