# SPDX-License-Identifier: Apache-2.0
"""The control groups of the host (cgroups(7), version 2), and their CPU time."""

from __future__ import annotations

import os

from resctrlmond.resctrl.mounts import mounts
from resctrlmond.sim.kernel.tasks import Cgroups


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
    """The mount of cgroup v2. Without one, nothing is known."""

    def __init__(self) -> None:
        self._top = next((mount.point for mount in mounts() if (mount.fstype, mount.root) == ("cgroup2", "/")), "")

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
        try:
            return tuple(os.stat("/".join((self._top, *names[:depth]))).st_ino for depth in range(len(names), -1, -1))
        except (OSError, ValueError):  # ValueError: a NUL
            return ()

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
            lines = _read(f"{path}/cpu.stat").split("\n")
            found[chain] = next((_number(line) for line in lines if line.startswith("usage_usec ")), 0) * 1000
        return found
