# SPDX-License-Identifier: Apache-2.0
"""The host's own tasks, read from /proc: real numbers, real CPU time, real ancestry."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Self

from resctrlmond.sim.host.cgroups import CgroupTree
from resctrlmond.sim.host.exits import ExitRecords
from resctrlmond.sim.host.forks import ForkEvents
from resctrlmond.sim.host.pidns import PidNamespaces
from resctrlmond.sim.kernel.tasks import Cgroups, Exit, Fork, RemovedCgroup, TaskStat

_NOT_REPORTED = (
    "the kernel does not report {} to the simulator (this needs root, and the host's PID and network namespaces), "
    "so it finds tasks by looking, and the first or last CPU time of a task may be missing"
)
_MISSED = "the kernel reported more {} at once than the simulator could read, so CPU time of a task may be missing"
_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str | None:
    """Read a file of /proc. Return None if its task ends before or during the read (ENOENT, ESRCH)."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None


class ProcTable:
    """Tasks of this PID namespace. CPU time is the scheduler's, in nanoseconds (proc_pid_schedstat(5)).

    Without ``fork_events``, forks are found by a list of all threads. The thread that forked a child is then found in
    ``/proc/PID/task/TID/children``, and unknown on a kernel without CONFIG_PROC_CHILDREN. Without ``exit_records``,
    the use of a task between the last sample and its end is unknown. ``cpus``: the number of CPUs instead of that of
    the host; additional ones are counted as CPU 0, 1 and so on.
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
        self.cgroup_tree = CgroupTree()

    @classmethod
    def open(cls, cpus: int | None = None) -> Self:
        """Open the table with all subscriptions that the kernel allows."""
        return cls(ForkEvents.open(), ExitRecords.open(), cpus)

    def close(self) -> None:
        """End the subscriptions."""
        for subscription in (self._fork_events, self._exit_records):
            if subscription:
                subscription.close()

    def forks(self) -> list[Fork] | None:
        """Return every fork since the last call; None without ``fork_events``."""
        return self._fork_events.drain() if self._fork_events else None

    def exits(self) -> list[Exit]:
        """Return every exit since the last call; none without ``exit_records``."""
        return self._exit_records.drain() if self._exit_records else []

    @property
    def inexact(self) -> str:
        """Return why CPU time may be missing, "" while the kernel reports every fork and exit."""
        for what, subscription in (("forks", self._fork_events), ("exits", self._exit_records)):
            if subscription is None:
                return _NOT_REPORTED.format(what)
            if subscription.has_missed:
                return _MISSED.format(what)
        return ""

    def last_born(self) -> int:
        """Return the number of the last process or thread in this PID namespace (proc_loadavg(5))."""
        return int((_read("/proc/loadavg") or "-1").split()[-1])

    def threads(self) -> Mapping[int, int]:
        """Return every thread: thread ID -> thread group ID."""
        found: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found.update(dict.fromkeys(map(int, os.listdir(f"/proc/{entry}/task")), int(entry)))
        return found

    def stat(self, tid: int) -> TaskStat | None:
        """Return one thread (proc_pid_stat(5): fields 3, 4, 22, 39), with the most exact CPU time of the kernel."""
        # /proc/TID/stat has the sums of the whole process; those of the thread are one level down.
        text = _read(f"/proc/{tid}/task/{tid}/stat")
        if not text:
            return None
        # The command's name is in parentheses and may contain any byte, also ")".
        fields = text[text.rindex(")") + 2 :].split()
        # Kernels without CONFIG_SCHED_INFO have only clock ticks of user and system time.
        run, _, _ = (_read(f"/proc/{tid}/task/{tid}/schedstat") or "").partition(" ")
        cpu_ns = int(run or 0) or (int(fields[11]) + int(fields[12])) * _NS_PER_TICK
        cpu = int(fields[36]) % self.cpus
        state = fields[0]
        return TaskStat(tid, int(fields[1]), int(fields[19]), cpu_ns, cpu, state == "R", has_ended=state in "ZX")

    def credentials(self, tid: int) -> tuple[int, int] | None:
        """Return (real uid, saved uid) of a thread."""
        uids = self._status_line(tid, "Uid:")
        return (uids[0], uids[2]) if uids else None

    def euid(self, tid: int) -> int | None:
        """Return the effective uid of a thread; None if it has ended or is in an unknown namespace."""
        uids = self._status_line(tid, "Uid:")
        return uids[1] if uids else None

    def groups(self, tid: int) -> frozenset[int]:
        """Return the supplementary groups of a thread; none if it has ended."""
        return frozenset(self._status_line(tid, "Groups:"))

    def named(self, number: int, asking: int) -> int | None:
        """Return the thread with this number in the PID namespace of the thread ``asking``; None if there is none."""
        return self._namespaces.named(number, self.threads, asking)

    def seen(self, tids: Iterable[int], asking: int) -> list[int]:
        """Return the numbers of those threads that are in the PID namespace of the thread ``asking``."""
        return self._namespaces.seen(tids, asking)

    def forker(self, child: int, candidates: list[int]) -> int | None:
        """Return the thread whose list of children has ``child``."""
        for tid in candidates:
            if str(child) in (_read(f"/proc/{tid}/task/{tid}/children") or "").split():
                return tid
        return None

    def host_cpu_ns(self) -> Mapping[int, int]:
        """Return the CPU time of each CPU: user, nice, system, irq and softirq (proc_stat(5))."""
        busy: collections.Counter[int] = collections.Counter()
        for line in (_read("/proc/stat") or "").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu":
                ticks = [int(field) for field in fields]
                busy[int(name[3:]) % self.cpus] += (sum(ticks[:3]) + sum(ticks[5:7])) * _NS_PER_TICK
        return busy

    def cgroups(self, tid: int) -> Cgroups:
        """Return the control groups of a thread; () if they are not known."""
        return self.cgroup_tree.of_task(tid)

    def cgroup_usage(self) -> Mapping[Cgroups, int]:
        """Return the CPU time of every control group with all below it, in ns."""
        return self.cgroup_tree.usage()

    def removed_cgroups(self) -> list[RemovedCgroup]:
        """Return the control groups whose removal was found since the last call."""
        return self.cgroup_tree.removed()

    def start_ns(self, stat: TaskStat) -> int:
        """Return the boot time at which a thread started."""
        return stat.start * _NS_PER_TICK

    def caller(self, tid: int) -> tuple[int, bytes]:
        """Return the process and the name of a thread; its own number and no name if it has ended."""
        tgids = self._status_line(tid, "Tgid:")
        try:
            with open(f"/proc/{tid}/comm", "rb") as file:
                name = file.read().removesuffix(b"\n")
        except OSError:
            name = b""
        return (tgids[0] if tgids else tid), name

    def _status_line(self, tid: int, label: str) -> list[int]:
        for line in (_read(f"/proc/{tid}/status") or "").splitlines():
            if line.startswith(label):
                return [int(number) for number in line.split()[1:]]
        return []
