# SPDX-License-Identifier: Apache-2.0
"""Read the class and group of a task from the task itself, in constant time, and not from a tasks file."""

from __future__ import annotations

import errno
import os
import re
from typing import Protocol

import msgspec

from resctrlmond.resctrl.errors import KernelRefused, NoSuchProcess, NotMounted, from_oserror

_GROUPS = "mon_groups/"


class Membership(msgspec.Struct, frozen=True):
    """The class ("" is the root) and monitoring group ("" is none) of one thread."""

    class_: str
    group: str


def membership_of(directory: str) -> Membership:
    """Return the class and group whose directory has this path in the tree; "" is the root."""
    class_, _, name = directory.rpartition(_GROUPS)
    return Membership(class_.rstrip("/"), name) if class_ or directory.startswith(_GROUPS) else Membership(name, "")


class MembershipReader(Protocol):
    """Reads the membership of a thread, from the kernel or from the simulator."""

    def of(self, tid: int) -> Membership:
        """Return the membership of a thread. Raises NoSuchProcess."""


class KernelMembership:
    """Reads /proc/TID/cpu_resctrl_groups (fs/resctrl/rdtgroup.c, proc_resctrl_show())."""

    def of(self, tid: int) -> Membership:
        """Return the membership of a thread. Raises NoSuchProcess; NotMounted if both lines are empty."""
        path = f"/proc/{tid}/cpu_resctrl_groups"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(fd, 4096)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESRCH):
                raise NoSuchProcess("no such task", path=path, errno=error.errno) from error
            raise from_oserror(error, "read the task's resctrl groups", path) from error
        return parse(text, path)


class SimulatedMembership:
    """Reads an extended attribute of the simulator's root, because a filesystem cannot add a file to /proc."""

    def __init__(self, root: str) -> None:
        self._root = root

    def of(self, tid: int) -> Membership:
        """Return the membership of a thread in the simulated tree. Raises NoSuchProcess."""
        name = f"user.resctrlmond.task.{tid}"
        try:
            text = os.getxattr(self._root, name)
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise NoSuchProcess(f"no such task: {tid}", path=self._root) from error
            raise from_oserror(error, f"ask the simulator for task {tid}", self._root) from error
        return parse(text, f"{self._root} ({name})")


# A group's name may contain any byte; a newline only after a rename. A class cannot be renamed.
_LINES = re.compile(rb"res:([^\n]*)\nmon:(.*)\n", re.DOTALL)


def parse(text: bytes, path: str) -> Membership:
    """Parse the lines ``res:CLASS`` and ``mon:GROUP``; the root class is "/"."""
    lines = _LINES.fullmatch(text)
    if lines is None:
        raise KernelRefused(f"cannot read the task's groups from the text {text!r}", path=path)
    class_, group = os.fsdecode(lines[1]), os.fsdecode(lines[2])
    if not class_:
        raise NotMounted("resctrl is not mounted: the task is in no class", path=path)
    return Membership("" if class_ == "/" else class_, group)
