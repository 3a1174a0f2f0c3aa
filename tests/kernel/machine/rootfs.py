# SPDX-License-Identifier: Apache-2.0
"""The guest's root disk: Debian, the kernel's modules and the agent as an ext4 image, and the initramfs."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from . import cache, initramfs
from .debian import debian, debian_key
from .kernel import kernel, kernel_key, module
from .tools import tool

AGENT = Path(__file__).parent / "inside" / "agent.py"
SIZE = "3G"

FILES = {
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n",
    "etc/fstab": "",
    "etc/resolv.conf": "",
    "etc/machine-id": "0123456789abcdef0123456789abcdef\n",  # otherwise each boot is a first boot
    "etc/systemd/system/test-agent.service": """\
[Unit]
Description=Run the commands of tests

[Service]
Type=exec
ExecStart=/usr/bin/python3 -u /usr/local/lib/test-agent.py
Environment=HOME=/root
KillMode=process
TasksMax=infinity
""",
}
# Each daemon-reload runs these. They take two seconds of an emulated CPU and find nothing in this guest.
GENERATORS = (
    *("podman-system-generator", "systemd-debug-generator", "systemd-getty-generator", "systemd-gpt-auto-generator"),
    *("systemd-hibernate-resume-generator", "systemd-rc-local-generator", "systemd-run-generator"),
    *("systemd-ssh-generator", "systemd-system-update-generator", "systemd-sysv-generator", "systemd-tpm2-generator"),
)
LINKS = {
    **{f"etc/systemd/system-generators/{generator}": "/dev/null" for generator in GENERATORS},
    "etc/systemd/system/multi-user.target.wants/test-agent.service": "../test-agent.service",
    # Units that would start when the restored guest's clock is set, or that write to the console.
    **{
        f"etc/systemd/system/{unit}": "/dev/null"
        for unit in (
            "apt-daily.timer",
            "apt-daily-upgrade.timer",
            "dpkg-db-backup.timer",
            "e2scrub_all.timer",
            "fstrim.timer",
            "podman-auto-update.timer",
            "systemd-tmpfiles-clean.timer",
            "getty.target",
            "serial-getty@ttyS0.service",
        )
    },
}
# Tests start these if they need them.
NOT_AT_BOOT = ("containerd.service", "podman.socket", "podman.service", "podman-restart.service", "ssh.service")

# The owners of the files matter, so a user other than root runs this with mapped ids.
ASSEMBLE = """\
archive=$1 extra=$2 modules=$3 release=$4 place=$5 size=$6; shift 6; root=$place/root
mkdir "$root"; trap 'rm -rf "$root"' EXIT
tar -xp --zstd --numeric-owner --exclude='./dev/*' -C "$root" -f "$archive"
tar -xp --numeric-owner --no-overwrite-dir -C "$root" -f "$extra"
for unit in "$@"; do rm -f "$root"/etc/systemd/system/*.wants/"$unit"; done
mkdir -p "$root/usr/lib/modules/$release"
cp -r "$modules/." "$root/usr/lib/modules/$release/"
depmod -b "$root" "$release"
mke2fs -q -t ext4 -O ^has_journal -E root_owner=0:0 -d "$root" "$place/root.ext4" "$size"
cp "$root/usr/bin/busybox" "$place/busybox"
"""


def rootfs(line: str, suite: str) -> Path:
    """Return the folder with initrd and root.ext4, which are only read, because a guest writes to an overlay.

    There is one for each series of kernels and each suite, because the disk has the kernel's modules.
    """
    return cache.artifact("root", rootfs_key(line, suite), lambda place: _build(place, line, suite))


def rootfs_key(line: str, suite: str) -> str:
    """Return a hash of this file and of the inputs of the image."""
    return cache.key(Path(__file__), Path(initramfs.__file__), AGENT, debian_key(suite), kernel_key(line))


def _build(place: Path, line: str, suite: str) -> None:
    archive, linux = debian(suite), kernel(line)
    cache.progress("building the root disk")
    extra = place / "extra.tar"
    extra.write_bytes(_extra())
    mapped = () if os.geteuid() == 0 else ("unshare", "--map-root-user", "--map-auto", "--")
    release = (linux / "release").read_text().strip()
    what = (archive, extra, linux / "modules", release, place, SIZE, *NOT_AT_BOOT)
    tool([*mapped, "bash", "-eu", "-o", "pipefail", "-c", ASSEMBLE, "assemble", *what])
    busybox = place / "busybox"
    (place / "initrd").write_bytes(initramfs.initramfs(busybox.read_bytes(), module(line, "virtio_blk")))
    (place / "root.ext4").chmod(0o444)
    extra.unlink()
    busybox.unlink()


def _extra() -> bytes:
    """Return a tar archive of the files that the guest has in addition to Debian's, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in {**FILES, "usr/local/lib/test-agent.py": AGENT.read_text()}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
        for name, target in LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
            archive.addfile(entry)
    return buffer.getvalue()
