# SPDX-License-Identifier: Apache-2.0
"""Tasks that exist only in the simulation: exact and repeatable."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterable, Mapping

from resctrlmond.sim.host.procs import ProcTable
from resctrlmond.sim.kernel.tasks import Cgroups, Exit, Fork, RemovedCgroup, TaskStat
from resctrlmond.sim.kernel.tree import error

FIRST_TID = 100


@dataclasses.dataclass(slots=True)
class VirtualTask:
    """One thread; ``start`` is the number of forks before it. ``cgroups`` are set, or were those of its process."""

    tid: int
    tgid: int
    forker: int
    start: int
    cpu_ns: int = 0
    cpu: int = 0
    uid: int = 0
    cgroups: Cgroups = ()
    is_placed: bool = False  # by an order


class VirtualTasks:
    """A task table: task 1 exists from the start, and an existing task forks every other one.

    ``reports_forks``: forks and exits are reported, as by the kernel; otherwise they have to be found by polling.
    Methods raise ESRCH for a thread that does not exist, EEXIST for a number in use, EINVAL for a CPU that does not
    exist.

    A real process of ``host`` with the number of a virtual one represents it in control groups.
    """

    def __init__(self, cpus: int = 2, *, reports_forks: bool = True, host: ProcTable | None = None) -> None:
        self.cpus = cpus
        self.reports_forks = reports_forks
        self._represented = host
        self.tasks = {1: VirtualTask(1, 1, 0, 0)}
        self.unread_forks: list[Fork] = []
        self._exits: list[Exit] = []
        self._births = 0
        self._last_tid = FIRST_TID - 1
        self._host = dict.fromkeys(range(cpus), 0)

    def fork(self, forker: int = 1, *, thread: bool = False, uid: int | None = None, tid: int = 0) -> int:
        """Fork a process from ``forker``, or start a thread in its process. The user is the forker's by default."""
        parent = self._task(forker)
        if tid in self.tasks:
            raise error(errno.EEXIST)
        self._births += 1
        tid = tid or self._free_number()
        tgid = parent.tgid if thread else tid
        owner = parent.uid if uid is None else uid
        made = VirtualTask(
            tid, tgid, forker, self._births, uid=owner, cgroups=parent.cgroups, is_placed=parent.is_placed
        )
        self.tasks[tid] = made
        # The kernel reports the parent of the process for a new thread.
        reported = self.tasks[tgid].forker if thread and tgid in self.tasks else forker
        self.unread_forks.append(Fork(reported, tid, tgid, parent.cpu))
        return tid

    def _free_number(self) -> int:
        """Return the next unused number: none is reused unless it is requested."""
        self._last_tid += 1
        while self._last_tid in self.tasks:
            self._last_tid += 1
        return self._last_tid

    def exit(self, tid: int) -> None:
        """End the thread. Task 1 does not end (EPERM)."""
        task = self._task(tid)
        if tid == 1:
            raise error(errno.EPERM)
        del self.tasks[tid]
        self._exits.append(Exit(tid, task.cpu_ns))

    def run(self, tid: int, ns: int, cpu: int = 0) -> None:
        """Let the thread use CPU time, all of it now."""
        task = self._task(tid)
        if cpu not in self._host:
            raise error(errno.EINVAL)
        task.cpu_ns += ns
        task.cpu = cpu
        self._host[cpu] += ns

    def set_cgroup(self, tid: int, cgroup: str | list[int]) -> None:
        """Move the thread to the control group of a directory, or to one of these inode numbers, nearest first.

        [] is that of its process. Raises ENOENT if the directory does not exist.
        """
        task = self._task(tid)
        if isinstance(cgroup, list):
            found = tuple(cgroup)
        else:
            found = self._represented.cgroup_tree.at(cgroup) if self._represented else ()
            if not found:
                raise error(errno.ENOENT)
        task.cgroups, task.is_placed = found, bool(found)

    def _task(self, tid: int) -> VirtualTask:
        if tid not in self.tasks:
            raise error(errno.ESRCH)
        return self.tasks[tid]

    def forks(self) -> list[Fork] | None:
        """Return all forks since the last call, in order; None if they are not reported."""
        forks, self.unread_forks = self.unread_forks, []
        return forks if self.reports_forks else None

    def exits(self) -> list[Exit]:
        """Return all exits since the last call; none if they are not reported."""
        exits, self._exits = self._exits, []
        return exits if self.reports_forks else []

    @property
    def inexact(self) -> str:
        """Return "": nothing is missing, because every fork and exit is an order."""
        return ""

    def last_born(self) -> int:
        """Return the number of forks."""
        return self._births

    def threads(self) -> Mapping[int, int]:
        """Return every thread: thread ID -> thread group ID."""
        return {task.tid: task.tgid for task in self.tasks.values()}

    def stat(self, tid: int) -> TaskStat | None:
        """Return one thread; None if it has ended."""
        task = self.tasks.get(tid)
        if task is None:
            return None
        forker = self.tasks.get(task.forker)
        return TaskStat(tid, forker.tgid if forker else 1, task.start, task.cpu_ns, task.cpu)

    def credentials(self, tid: int) -> tuple[int, int] | None:
        """Return (uid, saved uid) of a thread."""
        task = self.tasks.get(tid)
        return (task.uid, task.uid) if task else None

    def euid(self, tid: int) -> int | None:  # noqa: ARG002 - every system call has its own
        """Return None: unknown."""
        return None

    def named(self, number: int, asking: int) -> int | None:  # noqa: ARG002 - all share one namespace
        """Return the same number."""
        return number

    def seen(self, tids: Iterable[int], asking: int) -> list[int]:  # noqa: ARG002
        """Return the same numbers."""
        return list(tids)

    def forker(self, child: int, candidates: list[int]) -> int | None:
        """Return the one of these threads that forked ``child``."""
        forker = self.tasks[child].forker
        return forker if forker in candidates else None

    def cgroups(self, tid: int) -> Cgroups:
        """Return the control groups of a thread: those that an order has set, or those of its process."""
        task = self.tasks.get(tid)
        if task is None:
            return ()
        if self._represented and not task.is_placed:
            task.cgroups = self._represented.cgroups(tid) or task.cgroups
        return task.cgroups

    def cgroup_usage(self) -> Mapping[Cgroups, int]:
        """Return nothing: every use is an order."""
        return {}

    def removed_cgroups(self) -> list[RemovedCgroup]:
        """Return the control groups whose removal was found since the last call. Those without a directory stay."""
        return self._represented.removed_cgroups() if self._represented else []

    def start_ns(self, stat: TaskStat) -> int:
        """Return the start of the thread's process, or its own if there is none."""
        real = self._represented and self._represented.stat(stat.tid)
        return self._represented.start_ns(real) if self._represented and real else stat.start

    def caller(self, tid: int) -> tuple[int, bytes]:
        """Return the process and the name of a virtual thread, or of a real one."""
        task = self.tasks.get(tid)
        if task or not self._represented:
            return (task.tgid if task else tid), b""
        return self._represented.caller(tid)

    def host_cpu_ns(self) -> Mapping[int, int]:
        """Return CPU number -> all CPU time used there."""
        return self._host
