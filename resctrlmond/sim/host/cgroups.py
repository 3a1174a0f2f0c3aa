# SPDX-License-Identifier: Apache-2.0
"""The control groups of the host (cgroups(7), version 2), and their CPU time."""

from __future__ import annotations

import os

from resctrlmond.resctrl.mounts import mounts
from resctrlmond.sim.kernel.tasks import Cgroups, RemovedCgroup


def _read(path: str) -> str:
    """Read a file. Return "" if it does not exist, or its task or control group does not exist any more."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _number(line: str) -> int:
    word = line.partition(" ")[2]
    return int(word) if word.isascii() and word.isdigit() else 0


class CgroupTree:
    """The mount of cgroup v2. Without one, nothing is known.

    Each control group that a method has returned is known until its removal is found.
    """

    def __init__(self) -> None:
        self._top = next((mount.point for mount in mounts() if (mount.fstype, mount.root) == ("cgroup2", "/")), "")
        # Inode number -> path, and the inode number of the parent. A control group of v2 cannot be renamed.
        self._known: dict[int, tuple[str, int]] = {}

    def of_task(self, tid: int) -> Cgroups:
        """Return the control groups of a thread; () if it has ended, or its control group was removed."""
        lines = _read(f"/proc/{tid}/cgroup").split("\n")
        path = next((line[3:] for line in lines if line.startswith("0::/")), "")
        return self._chain(path) if path else ()

    def at(self, path: str) -> Cgroups:
        """Return the control group with that directory, and those above it; () if there is none."""
        inside = os.path.normpath(path) == self._top or path.startswith(f"{self._top}/")
        return self._chain(path[len(self._top) :]) if inside else ()

    def _chain(self, path: str) -> Cgroups:
        names = [name for name in path.split("/") if name]
        if not self._top or ".." in names:
            return ()
        paths = ["/".join((self._top, *names[:depth])) for depth in range(len(names), -1, -1)]
        try:
            chain = tuple(os.stat(path).st_ino for path in paths)
        except (OSError, ValueError):  # ValueError: a NUL
            return ()
        self._known.update(zip(chain, zip(paths, chain[1:], strict=False), strict=False))
        return chain

    def usage(self) -> dict[Cgroups, int]:
        """Return the CPU time of every control group with all below it, in ns."""
        found: dict[Cgroups, int] = {}
        # Not os.walk(): control groups may be nested deeper than Python calls (1000), where it is recursive.
        waiting: list[tuple[str, Cgroups]] = [(self._top, ())] if self._top else []
        while waiting:
            path, above = waiting.pop()
            try:
                chain = (os.stat(path).st_ino, *above)
                with os.scandir(path) as entries:
                    waiting += [(entry.path, chain) for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            if above:
                self._known[chain[0]] = path, above[0]
            lines = _read(f"{path}/cpu.stat").split("\n")
            found[chain] = next((_number(line) for line in lines if line.startswith("usage_usec ")), 0) * 1000
        return found

    def removed(self) -> list[RemovedCgroup]:
        """Return the known control groups whose directory does not exist any more, or is another one. Forget them."""
        found = []
        for inode, (path, parent) in list(self._known.items()):
            try:
                is_there = os.stat(path).st_ino == inode
            except OSError:
                is_there = False
            if not is_there:
                del self._known[inode]
                found.append(RemovedCgroup(inode, parent, os.path.basename(path)))
        return found
