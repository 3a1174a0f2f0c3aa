# SPDX-License-Identifier: Apache-2.0
"""Debian roots to build and to test in: made once by mmdebstrap, unpacked afresh for each use, root or not."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tests.kernel.machine import cache
from tests.kernel.machine.debian import SUITE
from tests.kernel.machine.packages import require
from tests.kernel.machine.sources import mirror
from tests.kernel.machine.tools import tool

from .source import DEBIAN

# In addition to the build dependencies of debian/control: programs that check the packages.
LOOKED_AT_WITH = ("lintian", "systemd", "python3-protobuf", "python3-prometheus-client")

# The host's own requirements: no virtual machine.
PROGRAMS = ("mmdebstrap", "zstd", "tar")

# As in a package's installation the owners matter, so a user runs this with his ids mapped to the root's. The script
# itself is a plain user's or root's, in an empty /proc of its own.
RUN = """\
archive=$1 work=$2 uid=$3 network=$4 script=$5 root=$(mktemp -d "$2/root.XXXXXX"); shift 5
# Never rm -r: while a process that a test has left uses one of them, the host's /sys and /dev are mounted below.
trap 'umount --recursive --lazy "$root"; rmdir "$root"' EXIT
mount -t tmpfs -o mode=755 none "$root"
tar -xp --zstd --numeric-owner --exclude='./dev/*' -C "$root" -f "$archive"
mount -t proc proc "$root/proc"
for node in null zero full random urandom; do
    touch "$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"
done
if [ "$uid" = 0 ]; then
    mount --rbind /sys "$root/sys"
    if [ -e /dev/fuse ]; then touch "$root/dev/fuse"; mount --bind /dev/fuse "$root/dev/fuse"; fi
fi
if [ "$network" = yes ]; then cp -L --remove-destination /etc/resolv.conf "$root/etc/resolv.conf"; fi
ln -s /proc/self/fd "$root/dev/fd"; mkdir -m 1777 "$root/dev/shm"
mkdir "$root/dev/pts"; mount -t devpts -o newinstance,ptmxmode=666 none "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mkdir -m 755 "$root/build"; chown "$uid:$uid" "$root/build"
printf 'builder:x:1000:1000::/build:/bin/sh\\n' >>"$root/etc/passwd"; printf 'builder:x:1000:\\n' >>"$root/etc/group"
ip link set lo up 2>/dev/null || :
# Child processes inherit ignored signals, and the build's tests send signals.
clean="env --default-signal -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/build LC_ALL=C.UTF-8"
user() { chroot --userspec="$uid:$uid" "$root" $clean "$@"; }
user tar -x -C /build <"$work/in.tar"
user sh -eu -c "cd /build; $script" build "$@"
user tar -c -C /build/out . >"$work/out.tar"
"""


def packages() -> list[str]:
    """Return the Build-Depends of debian/control, and the packages that the tests need."""
    control = (DEBIAN / "control").read_text(encoding="utf-8")
    field = re.search(r"^Build-Depends:(.*(?:\n[ \t].*)*)", control, re.MULTILINE)
    assert field, "debian/control has no Build-Depends"
    names = [re.match(r"\s*([a-z0-9.+-]+)", dependency) for dependency in field[1].split(",")]
    # debhelper-compat is a name for a version of debhelper.
    return sorted({name[1].replace("debhelper-compat", "debhelper") for name in names if name} | {*LOOKED_AT_WITH})


def root(suite: str, names: Sequence[str]) -> Path:
    """A Debian of that suite with these packages, as an archive root.tar.zst; fetched on first use."""
    key = cache.key(suite, *names)
    return cache.artifact(f"root-of-{suite}", key, lambda place: _build(place, suite, names)) / "root.tar.zst"


def builder() -> Path:
    """The root that the packages are built in."""
    return root(SUITE, packages())


def run(
    work: Path,
    source: bytes,
    script: str,
    *arguments: str,
    archive: Path | None = None,
    is_root: bool = False,
    network: bool = False,
    is_apart: bool = True,
) -> str:
    """Unpack *source* (a tar archive) in /build and run a shell script there.

    It runs in the builder, or in the root *archive*, as a user or as root, with or without the host's network.
    Without ``is_apart``, which needs root, it has the host's namespaces, except that of the mounts. The files in
    /build/out are copied to *work*/out. Returns its output; BuildError with its end if it fails.
    """
    require(PROGRAMS)
    (work / "in.tar").write_bytes(source)
    own = ("--mount", *(("--pid", "--fork", "--uts", "--ipc") if is_apart else ()))
    own += ("--net",) if is_apart and not network else ()
    mapped: tuple[str, ...] = () if os.geteuid() == 0 else ("--map-root-user", "--map-auto")
    uid = "0" if is_root else "1000"
    shell = ("bash", "-eu", "-o", "pipefail", "-c", RUN, "run")
    words = (archive or builder(), work, uid, "yes" if network else "no", script, *arguments)
    output = tool(["unshare", *own, *mapped, "--", *shell, *words])
    (work / "out").mkdir()
    tool(["tar", "-x", "-C", work / "out", "-f", work / "out.tar"])
    for name in ("in.tar", "out.tar"):
        (work / name).unlink()
    return output


def _build(place: Path, suite: str, names: Sequence[str]) -> None:
    require(PROGRAMS)
    cache.progress(f"fetching a Debian {suite} for the packages, a minute or two on an idle host; it is kept")
    tool(
        [
            "mmdebstrap",
            "--mode=root" if os.geteuid() == 0 else "--mode=unshare",
            "--variant=buildd",
            "--format=tar",
            '--aptopt=APT::Install-Recommends "false"',
            '--aptopt=Acquire::Languages "none"',
            f"--include={','.join(names)}",
            suite,
            place / "root.tar.zst",
            mirror().line(suite),
        ]
    )
