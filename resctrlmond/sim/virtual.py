# SPDX-License-Identifier: Apache-2.0
"""Tasks that exist only in the simulation: exact and repeatable."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterable, Mapping

from resctrlmond.sim.tasks import Exit, Fork, TaskStat
from resctrlmond.sim.tree import error

FIRST_TID = 100


@dataclasses.dataclass(slots=True)
class VirtualTask:
    """One thread; ``start`` counts the births before it."""

    tid: int
    tgid: int
    forker: int
    start: int
    cpu_ns: int = 0
    cpu: int = 0
    uid: int = 0


class VirtualTasks:
    """A task table: task 1 is there from the start, every other one is forked by one that is there.

    ``tells_forks``: births and deaths are told, as the kernel does; otherwise they have to be found by looking.
    Methods raise ESRCH for a thread that is not there, EEXIST for a number that is taken, EINVAL for a CPU that
    does not exist.
    """

    def __init__(self, cpus: int = 2, *, tells_forks: bool = True) -> None:
        self.cpus = cpus
        self.tells_forks = tells_forks
        self.tasks = {1: VirtualTask(1, 1, 0, 0)}
        self.told: list[Fork] = []
        self._exits: list[Exit] = []
        self._births = 0
        self._last_tid = FIRST_TID - 1
        self._host = dict.fromkeys(range(cpus), 0)

    def fork(self, forker: int = 1, *, thread: bool = False, uid: int | None = None, tid: int = 0) -> int:
        """``forker`` forks a process, or starts a thread in its own; its user is the forker's unless given."""
        parent = self._task(forker)
        if tid in self.tasks:
            raise error(errno.EEXIST)
        self._births += 1
        tid = tid or self._free_number()
        tgid = parent.tgid if thread else tid
        self.tasks[tid] = VirtualTask(tid, tgid, forker, self._births, uid=parent.uid if uid is None else uid)
        # Of a thread the kernel names its process's parent.
        told = self.tasks[tgid].forker if thread and tgid in self.tasks else forker
        self.told.append(Fork(told, tid, tgid, parent.cpu))
        return tid

    def _free_number(self) -> int:
        """The next number that nobody has: none is used again unless somebody asks for it."""
        self._last_tid += 1
        while self._last_tid in self.tasks:
            self._last_tid += 1
        return self._last_tid

    def exit(self, tid: int) -> None:
        """The thread ends. Task 1 does not (EPERM)."""
        task = self._task(tid)
        if tid == 1:
            raise error(errno.EPERM)
        del self.tasks[tid]
        self._exits.append(Exit(tid, task.cpu_ns))

    def run(self, tid: int, ns: int, cpu: int = 0) -> None:
        """The thread uses CPU time, all of it now."""
        task = self._task(tid)
        if cpu not in self._host:
            raise error(errno.EINVAL)
        task.cpu_ns += ns
        task.cpu = cpu
        self._host[cpu] += ns

    def _task(self, tid: int) -> VirtualTask:
        if tid not in self.tasks:
            raise error(errno.ESRCH)
        return self.tasks[tid]

    def forks(self) -> list[Fork] | None:
        """All births since the last call, in order; None where nobody tells."""
        told, self.told = self.told, []
        return told if self.tells_forks else None

    def exits(self) -> list[Exit]:
        """All deaths since the last call; none where nobody tells."""
        told, self._exits = self._exits, []
        return told if self.tells_forks else []

    @property
    def inexact(self) -> str:
        """Nothing is missing: every birth and death is an order."""
        return ""

    def last_born(self) -> int:
        """How many were born."""
        return self._births

    def threads(self) -> Mapping[int, int]:
        """Every thread: thread id -> thread group id."""
        return {task.tid: task.tgid for task in self.tasks.values()}

    def stat(self, tid: int) -> TaskStat | None:
        """One thread; None if it is gone."""
        task = self.tasks.get(tid)
        if task is None:
            return None
        forker = self.tasks.get(task.forker)
        return TaskStat(tid, forker.tgid if forker else 1, task.start, task.cpu_ns, task.cpu)

    def credentials(self, tid: int) -> tuple[int, int] | None:
        """(uid, saved uid) of a thread; None if it is gone."""
        task = self.tasks.get(tid)
        return (task.uid, task.uid) if task else None

    def euid(self, tid: int) -> int | None:  # noqa: ARG002 - the caller says who it is
        """Nobody knows."""
        return None

    def named(self, number: int, asking: int) -> int | None:  # noqa: ARG002 - they all share one namespace
        """The same number."""
        return number

    def seen(self, tids: Iterable[int], asking: int) -> list[int]:  # noqa: ARG002
        """The same numbers."""
        return list(tids)

    def forker(self, child: int, candidates: list[int]) -> int | None:
        """Which of these threads forked ``child``."""
        forker = self.tasks[child].forker
        return forker if forker in candidates else None

    def host_cpu_ns(self) -> Mapping[int, int]:
        """CPU number -> all CPU time used there."""
        return self._host
