# SPDX-License-Identifier: Apache-2.0
"""What is mounted where: read from the kernel's own table, /proc/self/mountinfo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo (proc_pid_mountinfo(5)): ``root`` is the part of the filesystem that is mounted."""

    mount_id: int
    root: str
    point: str
    fstype: str
    options: frozenset[str]


def mounts() -> Iterator[Mount]:
    """Every mount of this process's mount namespace, in the order they were made."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            before, after = left.split(), right.split()
            yield Mount(
                mount_id=int(before[0]),
                root=_unescape(before[3]),
                point=_unescape(before[4]),
                fstype=after[0],
                options=frozenset(after[2].split(",") if len(after) > 2 else ()),
            )


def mount_of(fd: int) -> Mount | None:
    """The mount that the open file is on; None if it was unmounted since."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        number = next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))
    return next((mount for mount in mounts() if mount.mount_id == number), None)


def boot_id() -> str:
    """The running kernel's random id: two times with the same id are in the same boot."""
    fd = os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 64).decode("ascii").strip()
    finally:
        os.close(fd)


def _unescape(text: str) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escape, character)
    return text
