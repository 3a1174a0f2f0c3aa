# SPDX-License-Identifier: Apache-2.0
"""Every way to install that README.md names, in a Debian that has nothing of what resctrlmond needs."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from . import builder
from .build import packages
from .readme import commands
from .source import PARTS, PROJECT

# A first run fetches the Debians.
pytestmark = pytest.mark.timeout(1800)
# apt asks no questions; and an archive of packages may be older than its signature allows.
PREPARE = """\
mkdir out; export DEBIAN_FRONTEND=noninteractive
everything() {
    find /etc /usr /var/lib '(' -name __pycache__ -o -path /var/lib/apt -o -path /var/lib/dpkg ')' -prune -o \\
        '(' -type f -o -type l ')' -print | grep -vx '/etc/g.*-' | sort
}
fails() { if "$@"; then echo "did not fail: $*"; exit 1; fi; }
apt() { command apt -q -y -o APT::Sandbox::User=root "$@"; }
starts() {
    resctrlmond --version; resctrlctl --version; resctrlmon-nri --version; resctrlmon-exporter --version
    getent group resctrlmon resctrlmon-read
    status=0; resctrlmond || status=$?; test $status -eq 69
    status=0; resctrlctl status || status=$?; test $status -eq 3
}
"""
MAKE_INSTALL = f"""\
{PREPARE}
make install >refused 2>&1 && exit 1
cat refused; fails test -e /usr/bin/resctrlmond
apt update; apt install $(sed -n 's/.*Install them with: apt install//p' refused)
everything >before
make install; starts
make install; starts
make uninstall
everything >after; diff before after
make install; echo 'log_level: debug' >/etc/resctrlmond/resctrlmond.yaml
make install; make uninstall; cat /etc/resctrlmond/resctrlmond.yaml
echo done
"""
APT = f"""\
{PREPARE}
apt update
make() {{ test "$*" = deb; }}
@README@
starts
fails command make install
apt remove resctrlmond; fails test -e /usr/bin/resctrlmond
echo done
"""
OLD = f"""\
{PREPARE}
apt update
everything >before
fails make install
fails apt install ./build/deb/*.deb
everything >after; diff before after
echo done
"""


def tree(with_packages: bool) -> bytes:
    """The source tree, and the packages in build/deb where ``make deb`` puts them."""
    inside = io.BytesIO()
    with tarfile.open(fileobj=inside, mode="w") as archive:
        for part in PARTS:
            archive.add(PROJECT / part, part)
        if with_packages:
            archive.add(packages(), "build/deb")
    return inside.getvalue()


def run(place: Path, suite: str, script: str, with_packages: bool = True) -> str:
    """Return the output of the script in a root with make, and otherwise only the packages of every Debian."""
    root = builder.root(suite, ["make"])
    return builder.run(place, tree(with_packages), f"({script}) 2>&1", archive=root, is_root=True, network=True)


def test_make_install_lists_missing_packages_and_works_with_them_and_uninstall_leaves_nothing(tmp_path: Path) -> None:
    output = run(tmp_path, "trixie", MAKE_INSTALL, with_packages=False)
    assert "Debian packages are missing" in output
    assert "log_level: debug" in output
    assert output.endswith("done\n"), output[-4000:]


@pytest.mark.parametrize("suite", ["trixie", "sid"])
def test_the_line_of_the_readme_installs_commands_that_start(tmp_path: Path, suite: str) -> None:
    line = commands("A first session on a host with the hardware").splitlines()[0]
    assert line == "make deb && apt install ./build/deb/*.deb"
    output = run(tmp_path, suite, APT.replace("@README@", line))
    assert "the Debian package python3-resctrlmond has the same files" in output
    assert output.endswith("done\n"), output[-4000:]


def test_debian_12_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    output = run(tmp_path, "bookworm", OLD)
    assert "it needs Debian 13 or later with systemd 253 or later, and this is Debian GNU/Linux 12" in output
    assert "systemd (>= 253)" in output
    assert output.endswith("done\n"), output[-4000:]
