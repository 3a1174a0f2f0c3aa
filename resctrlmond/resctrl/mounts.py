# SPDX-License-Identifier: Apache-2.0
"""Read the kernel's table of mounts, /proc/self/mountinfo."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import uuid

import msgspec

from resctrlmond.resctrl.errors import reading


class Mount(msgspec.Struct, frozen=True):
    """One line of mountinfo (proc_pid_mountinfo(5)): ``root`` is the part of the filesystem that is mounted.

    ``device`` is the st_dev of its files.
    """

    mount_id: int
    device: int
    root: str
    point: str
    fstype: str
    options: frozenset[str]


def mounts() -> list[Mount]:
    """List every mount of this process's mount namespace, in the order of creation. Raises NotRead."""
    return [parse(line) for line in _lines()]


def _lines() -> list[str]:
    path = "/proc/self/mountinfo"
    with reading("list the mounts", path), open(path, "rb") as table:
        text = os.fsdecode(table.read())
    return [line for line in text.split("\n") if line]


def parse(line: str) -> Mount:
    """Parse one line of mountinfo, without its newline.

    The kernel escapes space, tab, newline and backslash. Users choose the names of volumes, so a path may contain any
    other character, such as a carriage return or a Unicode space. Only the space separates fields.
    """
    before, _, after = line.partition(" - ")
    number, _, device, root, point, *_ = before.split(" ")
    major, _, minor = device.partition(":")
    fstype, _, options, *_ = after.split(" ")
    return Mount(
        mount_id=int(number),
        device=os.makedev(int(major), int(minor)),
        root=_unescape(root),
        point=_unescape(point),
        fstype=fstype,
        options=frozenset(options.split(",")),
    )


def mount_of(fd: int) -> Mount | None:
    """Return the mount of an open file; None if it was unmounted meanwhile. Raises NotRead."""
    path = f"/proc/self/fdinfo/{fd}"
    with reading("list the mounts", path), open(path, encoding="ascii") as lines:
        number = next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))
    # Parse only this line: a host with many containers has thousands.
    return next((parse(line) for line in _lines() if line.startswith(f"{number} ")), None)


def fstype_of(path: str) -> str:
    """Return the type of the path's filesystem; "" if it was unmounted meanwhile. Raises NotRead."""
    with reading("find out which filesystem it is on", path):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mount = mount_of(fd)
    finally:
        os.close(fd)
    return mount.fstype if mount else ""


# The identity of a mount. Compare for equality only.
Mounting = tuple[int, int]

# statx(2): struct statx has 256 bytes, stx_mask at 0 and stx_mnt_id at 144. Linux 6.8 and later have an ID
# that is unique since boot; the ID in mountinfo is reused.
_AT_FDCWD = -100
_STATX_MNT_ID_UNIQUE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


def mounting_at(path: str) -> Mounting:
    """Return the identity of the mount at ``path``; (0, 0) if it is unknown.

    Before Linux 6.8 this is the device and the ctime of the root directory: device, inodes and mount ID repeat after
    an unmount, but each mount creates a new kernfs root. If a program has changed the attributes of the root
    directory, its ctime also changes with each class that is created or removed.
    """
    buffer = ctypes.create_string_buffer(256)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_MNT_ID_UNIQUE, buffer) == 0:
        (mask,) = struct.unpack_from("I", buffer, 0)
        if mask & _STATX_MNT_ID_UNIQUE:
            return struct.unpack_from("Q", buffer, 144)[0], 0
    return superblock_at(path)


def superblock_at(path: str) -> Mounting:
    """Return the identity of the filesystem at ``path``, the same in all mount namespaces; (0, 0) if it is unknown.

    See ``mounting_at`` for its limit.
    """
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ctime_ns


def boot_id() -> str:
    """Return the random ID of the running kernel, which is new at each boot. Raises NotRead."""
    # ProcSubset=pid of the unit hides /proc/sys; the unit sets this variable instead.
    if value := os.environ.get("RESCTRLMOND_BOOT_ID"):
        return str(uuid.UUID(value))
    path = "/proc/sys/kernel/random/boot_id"
    with reading("read the boot ID", path), open(path, encoding="ascii") as file:
        return file.read().strip()


def _unescape(text: str) -> str:
    # Three octal digits (seq_path_root(), mangle_path()).
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), text)
