# SPDX-License-Identifier: Apache-2.0
"""``make install`` on a host: its requirements, its files, and their removal by ``make uninstall``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "packaging" / "check-host"
# A dpkg-query of a host that has every package.
COMPLETE = """\
#!/bin/sh
for package; do :; done
case $3$package in
*Version*) echo 257.8 ;;
*python3-resctrlmond) ;;
*) echo installed ;;
esac
"""


def check(
    directory: Path, release: str, dpkg_query: str = COMPLETE, compiler: str = "cc"
) -> subprocess.CompletedProcess[str]:
    """Run the check with the given os-release file and dpkg-query in the place of the host's."""
    (directory / "os-release").write_text(release)
    (directory / "dpkg-query").write_text(dpkg_query)
    (directory / "dpkg-query").chmod(0o755)
    environment = {"PATH": f"{directory}:/usr/bin:/bin", "CC": compiler}
    command = [str(CHECK), str(directory / "os-release")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("release", ['ID=debian\nVERSION_ID="13"\n', "ID=debian\nVERSION_CODENAME=forky\n"])
def test_debian_13_and_later_with_every_package_can_install(tmp_path: Path, release: str) -> None:
    done = check(tmp_path, release)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("release", "name"),
    [
        (
            'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
            "Debian GNU/Linux 12 (bookworm)",
        ),
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="26.04"\nPRETTY_NAME="Ubuntu 26.04 LTS"\n', "Ubuntu 26.04 LTS"),
    ],
)
def test_another_system_is_refused_with_one_sentence(tmp_path: Path, release: str, name: str) -> None:
    done = check(tmp_path, release)
    assert done.returncode == 1
    assert done.stderr == (
        "resctrlmond cannot be installed: "
        f"it needs Debian 13 or later with systemd 253 or later, and this is {name}.\n"
    )


def test_missing_debian_packages_are_named(tmp_path: Path) -> None:
    done = check(
        tmp_path, "ID=debian\nVERSION_ID=13\n", COMPLETE.replace("*) echo in", "*msgspec | *yaml) ;;\n*) echo in")
    )
    assert done.returncode == 1
    assert done.stderr.endswith("Install them with: apt install python3-msgspec python3-yaml\n")


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_missing_compiler_is_named(tmp_path: Path, compiler: str) -> None:
    """A compiler without the headers of the C library fails."""
    done = check(tmp_path, "ID=debian\nVERSION_ID=13\n", compiler=compiler)
    assert done.returncode == 1
    assert done.stderr == (
        "resctrlmond cannot be installed: Debian packages are missing. Install them with: apt install gcc libc6-dev\n"
    )


def test_older_systemd_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "ID=debian\nVERSION_ID=13\n", COMPLETE.replace("257.8", "252.39-1~deb12u1"))
    assert done.returncode == 1
    assert "it needs systemd 253 or later, and this host has 252.39-1~deb12u1." in done.stderr


def test_installed_debian_package_is_not_overwritten(tmp_path: Path) -> None:
    done = check(tmp_path, "ID=debian\nVERSION_ID=13\n", COMPLETE.replace("*python3-resctrlmond) ;;\n", ""))
    assert done.returncode == 1
    assert "the Debian package python3-resctrlmond has the same files" in done.stderr


def test_every_python_dependency_is_checked() -> None:
    """Names in pyproject.toml differ from those of Debian packages only by case and the prefix "python3-"."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|nri|exporter) = \[(.*?)\]", project, re.DOTALL | re.MULTILINE)
    names = {re.sub("^py", "", name.lower()) for name in re.findall(r'"([A-Za-z-]+)>=', "".join(lists))}
    assert len(lists) == 3
    assert names
    assert {f"python3-{name}" for name in names} <= set(CHECK.read_text(encoding="utf-8").split())


def test_make_uninstall_removes_what_make_install_installed(tmp_path: Path) -> None:
    def make(target: str) -> list[str]:
        command = ["make", "-C", str(ROOT), target, f"DESTDIR={tmp_path}"]
        subprocess.run(command, capture_output=True, timeout=300, check=True)
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    first = make("install")
    assert {"usr/bin/resctrlmond", "usr/lib/systemd/system/resctrlmond.service"} <= set(first)
    # The simulator needs a library that Debian does not have, and every installed command must start.
    assert not [name for name in first if "resctrlmond-sim" in name or "/sim/" in name]
    (tmp_path / "usr/lib/python3/dist-packages/resctrlmond/of_an_earlier_version.py").touch()
    assert make("install") == first
    assert make("uninstall") == []

    make("install")
    (tmp_path / "etc/resctrlmond/resctrlmond.yaml").write_text("log_level: debug\n")
    make("install")
    assert make("uninstall") == ["etc/resctrlmond/resctrlmond.yaml"]
    assert (tmp_path / "etc/resctrlmond/resctrlmond.yaml").read_text() == "log_level: debug\n"


def test_examples_that_the_pages_name_are_installed(tmp_path: Path) -> None:
    command = ["make", "-C", str(ROOT), "install-files", f"DESTDIR={tmp_path}"]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    examples = tmp_path / "usr/share/doc/resctrlmond/examples"
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "man").glob("*.scd"))
    # Without the "_" that ends an underlined text, and a full stop.
    named = {name.rstrip("_.") for name in re.findall(r"/usr/share/doc/resctrlmond/examples([\w./-]*)", text)}
    assert {"/fleet", "/resctrlmon-otlp.service"} <= named
    assert not [name for name in named if not Path(f"{examples}{name}").exists()]
    assert (examples / "fleet" / "convert-values").stat().st_mode & 0o777 == 0o755
    assert (examples / "profiles.yaml").stat().st_mode & 0o777 == 0o644


def test_installed_hook_runs(tmp_path: Path) -> None:
    command = ["make", "-C", str(ROOT), "install-files", f"DESTDIR={tmp_path}"]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    hook = tmp_path / "usr/libexec/resctrlmon-oci-hook"
    assert hook.read_bytes().startswith(b"\x7fELF")
    state, paths = b'{"id":"x"}', ["--socket", f"{tmp_path}/none", "--journal", f"{tmp_path}/none"]
    assert subprocess.run([hook, "createRuntime", *paths], input=state, check=False).returncode == 0


def test_nothing_is_installed_without_a_compiler(tmp_path: Path) -> None:
    root, program = tmp_path / "root", f"HOOK={tmp_path / 'hook'}"
    command = ["make", "-C", str(ROOT), "install-files", f"DESTDIR={root}", "CC=false", program]
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 2
    assert not root.exists()


@pytest.mark.parametrize("compiler", ["clang", "no-such-compiler", "false"])
def test_witness_is_left_out_without_clang(tmp_path: Path, compiler: str) -> None:
    witness = f"WITNESS={tmp_path / 'compiled'}"
    command = ["make", "-C", str(ROOT), "install-files", f"DESTDIR={tmp_path}", f"CLANG={compiler}", witness]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (tmp_path / "usr/bin/resctrlmond-witness").exists() is (compiler == "clang")
    left_out = "the witness is left out: it needs the Debian packages clang and libbpf-dev"
    assert (left_out in done.stderr) is (compiler != "clang")


def test_hook_is_replaced_by_a_rename(tmp_path: Path) -> None:
    """install(1) unlinks a file before it writes the new one, and a runtime can execute the hook at that moment."""
    install = tmp_path / "install"
    install.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nexec install -p "$@"\n')
    install.chmod(0o755)
    root = tmp_path / "root"
    command = ["make", "-C", str(ROOT), "install-files", f"DESTDIR={root}", f"INSTALL={install}"]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    hook = root / "usr/libexec/resctrlmon-oci-hook"
    links = root / "usr/share/resctrlmond/hooks.d"
    assert hook.stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in hook.parent.iterdir()) == [hook.name, "resctrlmon-unit-exec"]
    assert {path.suffix for path in links.iterdir()} == {".json"}
    written = {word for line in (tmp_path / "calls").read_text().splitlines() for word in line.split()}
    assert not written & {str(hook), str(links), *map(str, links.iterdir())}


def test_make_uninstall_stops_if_the_hooks_stay_enabled(tmp_path: Path) -> None:
    """A runtime that calls a hook that is missing starts no container."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, status in (("resctrlctl", 1), ("systemctl", 0), ("resctrlmond", 0), ("journalctl", 0)):
        (commands / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/calls\nexit {status}\n")
        (commands / name).chmod(0o755)
    command = ["make", "-C", str(ROOT), "uninstall", f"PREFIX={tmp_path}", "MAKE=false"]
    environment = {"PATH": f"{commands}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode
    assert "nothing was removed" in done.stderr
    assert (tmp_path / "calls").read_text().split() == ["resctrlctl"]
