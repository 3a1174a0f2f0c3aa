# SPDX-License-Identifier: Apache-2.0
"""Install the packages of a Debian suite into a root filesystem, as a tar archive, with mmdebstrap. Needs no root."""

from __future__ import annotations

import os
from pathlib import Path

from . import cache
from .sources import mirror
from .tools import tool

SUITE, UNSTABLE = "trixie", "sid"
PACKAGES = (
    *("systemd", "systemd-sysv", "libpam-systemd", "dbus", "dbus-bin", "udev"),
    *("kmod", "procps", "iproute2", "util-linux", "strace", "busybox-static", "zstd"),
    *("podman", "crun", "runc", "conmon", "catatonit", "containerd", "netavark", "iptables", "nftables"),
    *("python3", "python3-msgspec", "python3-dbus-fast", "python3-sdnotify", "python3-yaml", "python3-rich"),
    *("python3-protobuf", "python3-grpcio", "python3-pytest", "python3-pytest-timeout", "python3-hypothesis"),
    *("python3-prometheus-client", "openssh-client", "openssh-server"),
)
# Not in Debian 13.
MORE = {UNSTABLE: ("systemd-report",)}
# Tests in the guest read no documentation.
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")


def debian(suite: str) -> Path:
    """Return the path of root.tar.zst, which has the owners and modes of Debian's packages."""
    return cache.artifact("debian", debian_key(suite), lambda place: _build(place, suite)) / "root.tar.zst"


def debian_key(suite: str) -> str:
    """Return a hash of this file, which has the list of packages."""
    return cache.key(Path(__file__), suite)


def _build(place: Path, suite: str) -> None:
    cache.progress("building the guest, which takes two minutes on an idle host; later runs use it again")
    packages = PACKAGES + MORE.get(suite, ())
    cache.progress(f"fetching Debian {suite} with {len(packages)} named packages")
    tool(
        [
            "mmdebstrap",
            "--mode=root" if os.geteuid() == 0 else "--mode=unshare",
            "--variant=minbase",
            "--format=tar",
            '--aptopt=APT::Install-Recommends "false"',
            '--aptopt=Acquire::Languages "none"',
            *(f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT),
            f"--include={','.join(packages)}",
            suite,
            place / "root.tar.zst",
            mirror().line(suite),
        ]
    )
