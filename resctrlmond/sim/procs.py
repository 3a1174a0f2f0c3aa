# SPDX-License-Identifier: Apache-2.0
"""The host's own tasks, read from /proc: real numbers, real CPU time, real ancestry."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Self

from resctrlmond.sim.exits import ExitRecords
from resctrlmond.sim.forks import ForkEvents
from resctrlmond.sim.pidns import PidNamespaces
from resctrlmond.sim.tasks import Exit, Fork, TaskStat

_NOT_TOLD = (
    "the kernel does not tell the simulator of {} here (that takes root, and the host's PID and network namespaces), "
    "so it finds tasks by looking, and the first or last CPU time of a task may be missing"
)
_MISSED = "the kernel told of more {} at once than the simulator could take, so CPU time of a task may be missing"
_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str | None:
    """A file of /proc; None if its task is gone, before or during the read (ENOENT, ESRCH)."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None


class ProcTable:
    """Tasks of this PID namespace. CPU time is what the scheduler counted, in nanoseconds (proc_pid_schedstat(5)).

    Without ``fork_events``, forks have to be found by listing all threads. Which thread of a process forked a child
    is then told by ``/proc/PID/task/TID/children``, and by nobody on a kernel without CONFIG_PROC_CHILDREN.
    Without ``exit_records`` nobody tells what a task used between the last look at it and its end. ``cpus``: how many
    there are instead of the host's own; of more than that the numbers begin at 0 again.
    """

    def __init__(
        self,
        fork_events: ForkEvents | None = None,
        exit_records: ExitRecords | None = None,
        cpus: int | None = None,
    ) -> None:
        self.cpus = cpus or os.cpu_count() or 1
        self._fork_events = fork_events
        self._exit_records = exit_records
        self._namespaces = PidNamespaces()

    @classmethod
    def open(cls, cpus: int | None = None) -> Self:
        """With all that the kernel tells us."""
        return cls(ForkEvents.open(), ExitRecords.open(), cpus)

    def close(self) -> None:
        """Ends the subscriptions."""
        for subscription in (self._fork_events, self._exit_records):
            if subscription:
                subscription.close()

    def forks(self) -> list[Fork] | None:
        """Every fork since the last call; None without ``fork_events``."""
        return self._fork_events.drain() if self._fork_events else None

    def exits(self) -> list[Exit]:
        """Every exit since the last call; none without ``exit_records``."""
        return self._exit_records.drain() if self._exit_records else []

    @property
    def inexact(self) -> str:
        """Why CPU time may be missing, "" while the kernel tells of every fork and exit."""
        for what, subscription in (("forks", self._fork_events), ("exits", self._exit_records)):
            if subscription is None:
                return _NOT_TOLD.format(what)
            if subscription.has_missed:
                return _MISSED.format(what)
        return ""

    def last_born(self) -> int:
        """The last process or thread number given out in this PID namespace (proc_loadavg(5))."""
        return int((_read("/proc/loadavg") or "-1").split()[-1])

    def threads(self) -> Mapping[int, int]:
        """Every thread: thread id -> thread group id."""
        found: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found.update(dict.fromkeys(map(int, os.listdir(f"/proc/{entry}/task")), int(entry)))
        return found

    def stat(self, tid: int) -> TaskStat | None:
        """One thread (proc_pid_stat(5): fields 3, 4, 22, 39), its CPU time as exactly as the kernel shows it."""
        # /proc/TID/stat has the sums of the whole process; the thread's own are one level down.
        text = _read(f"/proc/{tid}/task/{tid}/stat")
        if not text:
            return None
        # The command's name stands in parentheses and may have any byte in it, also ")".
        fields = text[text.rindex(")") + 2 :].split()
        # Kernels without CONFIG_SCHED_INFO have only clock ticks of user and system time.
        run, _, _ = (_read(f"/proc/{tid}/task/{tid}/schedstat") or "").partition(" ")
        cpu_ns = int(run or 0) or (int(fields[11]) + int(fields[12])) * _NS_PER_TICK
        cpu = int(fields[36]) % self.cpus
        return TaskStat(tid, int(fields[1]), int(fields[19]), cpu_ns, cpu, running=fields[0] == "R")

    def credentials(self, tid: int) -> tuple[int, int] | None:
        """(real uid, saved uid) of a thread."""
        uids = self._status_line(tid, "Uid:")
        return (uids[0], uids[2]) if uids else None

    def euid(self, tid: int) -> int | None:
        """The effective uid of a thread; None if it is gone, or in no namespace that we see."""
        uids = self._status_line(tid, "Uid:")
        return uids[1] if uids else None

    def groups(self, tid: int) -> frozenset[int]:
        """The supplementary groups of a thread; none if it is gone."""
        return frozenset(self._status_line(tid, "Groups:"))

    def named(self, number: int, asking: int) -> int | None:
        """The thread that has this number in the PID namespace of the thread ``asking``; None if none has."""
        return self._namespaces.named(number, self.threads, asking)

    def seen(self, tids: Iterable[int], asking: int) -> list[int]:
        """The numbers of threads in the PID namespace of the thread ``asking``, of those that are in it."""
        return self._namespaces.seen(tids, asking)

    def forker(self, child: int, candidates: list[int]) -> int | None:
        """The thread whose list of children has ``child``."""
        for tid in candidates:
            if str(child) in (_read(f"/proc/{tid}/task/{tid}/children") or "").split():
                return tid
        return None

    def host_cpu_ns(self) -> Mapping[int, int]:
        """CPU time per CPU: user, nice, system, irq and softirq (proc_stat(5))."""
        busy: collections.Counter[int] = collections.Counter()
        for line in (_read("/proc/stat") or "").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu":
                ticks = [int(field) for field in fields]
                busy[int(name[3:]) % self.cpus] += (sum(ticks[:3]) + sum(ticks[5:7])) * _NS_PER_TICK
        return busy

    def _status_line(self, tid: int, label: str) -> list[int]:
        for line in (_read(f"/proc/{tid}/status") or "").splitlines():
            if line.startswith(label):
                return [int(number) for number in line.split()[1:]]
        return []
