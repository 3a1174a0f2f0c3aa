# SPDX-License-Identifier: Apache-2.0
"""The group of each thread: moves by number, inheritance at fork, exits, and CPU time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol


class Ids(NamedTuple):
    """The kernel's fields in every task: the control group's CLOSID and the monitoring group's RMID."""

    closid: int
    rmid: int


DEFAULT = Ids(0, 0)

# The inode numbers of a control group and of those above it, nearest first.
Cgroups = tuple[int, ...]
ROOT: Cgroups = (1,)  # the root control group


class RemovedCgroup(NamedTuple):
    """A control group that was removed: its inode number, that of its parent, and its name."""

    inode: int
    parent: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class TaskStat:
    """One sample of a thread. ``start`` distinguishes reused numbers, in any suitable unit."""

    tid: int
    ppid: int  # thread group id of the parent
    start: int
    cpu_ns: int  # CPU time used since birth
    cpu: int  # the CPU it ran on last
    running: bool = True  # or ready to
    has_ended: bool = False  # a zombie


class Fork(NamedTuple):
    """A fork. ``parent`` is the thread that forked if ``child`` is a process; unknown for a new thread."""

    parent: int
    child: int
    tgid: int
    cpu: int  # where it was forked


class Exit(NamedTuple):
    """An exit, and all CPU time of the thread."""

    tid: int
    cpu_ns: int


class TaskTable(Protocol):
    """The source of tasks: the host's /proc, or a table that a test controls."""

    cpus: int  # the number of CPUs, which are numbered from 0

    def forks(self) -> list[Fork] | None:
        """Return all forks since the last call, in order; None if they have to be found in ``threads``."""

    def exits(self) -> list[Exit]:
        """Return the exits since the last call, as far as they are reported."""

    @property
    def inexact(self) -> str:
        """Return why the use of tasks may be missing from their groups, "" if nothing can be missing."""

    def last_born(self) -> int:
        """Return a number that changes with every fork; while it stays the same, there is no new thread."""

    def threads(self) -> Mapping[int, int]:
        """Return every current thread, including zombies: thread ID -> thread group ID."""

    def stat(self, tid: int) -> TaskStat | None:
        """Return one thread; None if it has ended."""

    def credentials(self, tid: int) -> tuple[int, int] | None:
        """Return (uid, saved uid) of a thread."""

    def euid(self, tid: int) -> int | None:
        """Return the effective uid of a thread; None if only that of a system call is known."""

    def named(self, number: int, asking: int) -> int | None:
        """Return the thread with this number in the PID namespace of the thread ``asking``; None if there is none."""

    def seen(self, tids: Iterable[int], asking: int) -> list[int]:
        """Return the numbers of those threads that are in the PID namespace of the thread ``asking``."""

    def forker(self, child: int, candidates: list[int]) -> int | None:
        """Return the one of these threads, all of one process, that forked the process ``child``; None if unknown."""

    def host_cpu_ns(self) -> Mapping[int, int]:
        """Return CPU number -> the CPU time of all tasks and the kernel there."""

    def cgroups(self, tid: int) -> Cgroups:
        """Return the control groups of a thread; () if they are not known."""

    def cgroup_usage(self) -> Mapping[Cgroups, int]:
        """Return the CPU time of every control group with all below it, in ns; nothing if all use is charged."""

    def removed_cgroups(self) -> list[RemovedCgroup]:
        """Return the known control groups whose removal was found since the last call."""

    def start_ns(self, stat: TaskStat) -> int:
        """Return the boot time at which a thread started."""

    def caller(self, tid: int) -> tuple[int, bytes]:
        """Return the process and the name of a thread that made a system call."""


@dataclasses.dataclass(slots=True)
class Member:
    """A thread outside the default group, as of the last sample. ``start`` is 0 if it was never seen alive."""

    tid: int
    ids: Ids
    start: int
    cpu_ns: int
    cpu: int
    sampled: float  # the time of the sample of ``cpu_ns``
    overlooked: bool = False  # by the next rmdir
    cgroups: Cgroups = ROOT  # as of the last use
    uncharged: int = 0  # CPU time that the witness has not charged


# Takes a member, its CPU time since the previous sample, and the time of that sample.
Charge = Callable[[Member, int, float], None]


class Tasks:
    """The group of every thread. Only threads outside the default group are kept.

    ``charge`` is called with the use of members, ``leave`` with members that change their group or control group, and
    ``bury`` with members that have ended. ``now`` is the clock.

    A new thread counts as created by its process's first thread. If the table does not report forks, a process whose
    parent ended between two samples counts as the child of its new parent; if it does not report exits, the use of a
    thread between its last sample and its end is not charged here (and so to root).
    """

    def __init__(
        self,
        table: TaskTable,
        charge: Charge,
        leave: Callable[[Member], None],
        bury: Callable[[Member], None],
        now: Callable[[], float],
    ) -> None:
        self._table = table
        self._charge = charge
        self._leave = leave
        self._bury = bury
        self._now = now
        self._members: dict[int, Member] = {}
        # Ended threads that the next events may mention: their forks, and their last CPU time.
        self._ghosts: dict[int, Member] = {}
        # The threads of the last listing, and the last fork before it; out of date while there is no member.
        self._known: set[int] = set()
        self._last_born = -1

    def __len__(self) -> int:
        return len(self._members) + len(self._ghosts)

    def look(self) -> None:
        """Add new threads since the last call to their groups, and charge ended ones with their last CPU time."""
        # Read exits first: the forks that are read after them include all parents of these threads.
        exits = self._table.exits()
        forks = self._table.forks()
        ghosts, self._ghosts = self._ghosts, {}
        if forks is None:
            self._look_around()
        for fork in forks or ():
            self._be_forked(fork, ghosts)
        for tid, cpu_ns in exits:
            member = self._members.get(tid) or self._ghosts.get(tid) or ghosts.get(tid)
            if member and cpu_ns > member.cpu_ns:
                self._find(member)
                # All of it is old: the hardware has pushed the counts of an ended thread.
                self._charge(member, cpu_ns - member.cpu_ns, float("-inf"))
                member.cpu_ns = cpu_ns
        for ghost in ghosts.values():
            self._bury(ghost)

    def skip(self) -> None:
        """Drop the reports of forks and exits until now, while there is no member."""
        self._table.exits()
        self._table.forks()

    def _be_forked(self, fork: Fork, ghosts: dict[int, Member]) -> None:
        parent = fork.parent if fork.child == fork.tgid else fork.tgid
        ghost = ghosts.get(parent) or self._ghosts.get(parent)
        forker = ghost or self._members.get(parent)
        if forker and not ghost:
            self._find(forker)
        for forgotten in (ghosts, self._ghosts, self._members):
            if before := forgotten.pop(fork.child, None):  # the number belongs to another thread from here on
                self._bury(before)
        if forker:
            self._bear(fork.child, forker.ids, fork.cpu, forker.cgroups)

    def _look_around(self) -> None:
        last_born = self._table.last_born()
        if self._members and last_born == self._last_born:
            return
        threads = self._table.threads()
        if self._members:
            self._inherit(threads)
        self._known, self._last_born = set(threads), last_born

    def _bear(self, tid: int, ids: Ids, cpu: int = 0, cgroups: Cgroups = ROOT) -> None:
        """Add a new thread to that group. ``cgroups`` are those of its parent."""
        if ids == DEFAULT:
            return
        stat = self._table.stat(tid)
        now = self._now()
        if stat is None:
            self._ghosts[tid] = Member(tid, ids, 0, 0, cpu, now, cgroups=cgroups)
            return
        # It was a member for its whole life.
        cgroups = self._table.cgroups(tid) or cgroups
        member = Member(tid, ids, stat.start, stat.cpu_ns, stat.cpu, now, cgroups=cgroups)
        self._members[tid] = member
        self._charge(member, stat.cpu_ns, now)

    def sample(self, rmids: Collection[int] | None = None) -> None:
        """Charge the CPU time of the threads with these RMIDs (None: all), and drop ended ones."""
        for member in list(self._members.values()):
            if rmids is None or member.ids.rmid in rmids:
                self._sample(member)
        if self._ghosts:
            # A thread that is found to have ended has reported its exit before.
            self.look()

    def check(self, tid: int) -> None:
        """Sample one thread, so that a reused number is not mistaken for the member that had it."""
        if tid in self._members:
            self._sample(self._members[tid])

    def ids(self, tid: int) -> Ids:
        """Return the group of a thread, as of the last ``look`` and ``sample``."""
        member = self._members.get(tid)
        return member.ids if member else DEFAULT

    def join(self, tid: int, ids: Ids) -> bool:
        """Move one thread into a group. Return False if it has ended."""
        stat = self._table.stat(tid)
        if stat is None:
            return False
        member = self._members.pop(tid, None)
        if member and member.start == stat.start:
            self._count(member, stat)
        if member:
            self._leave(member)
        if ids != DEFAULT:
            cgroups = self._table.cgroups(tid) or ROOT
            self._members[tid] = Member(tid, ids, stat.start, stat.cpu_ns, stat.cpu, self._now(), cgroups=cgroups)
        self._known.add(tid)
        return True

    def regroup(self, before: Ids, after: Ids) -> None:
        """Move all threads of a group, as rmdir and rename do, except for those to overlook, once."""
        for member in [member for member in self._members.values() if member.ids == before]:
            if member.overlooked:
                member.overlooked = False
                continue
            self._leave(member)
            if after == DEFAULT:
                del self._members[member.tid]
            else:
                member.ids = after
        for ghost in self._ghosts.values():
            if ghost.ids == before:
                self._leave(ghost)
                ghost.ids = after

    def overlook(self, tid: int) -> bool:
        """Let the next ``regroup`` miss this thread, like one that is being forked. Return False if not a member.

        rdt_move_group_tasks() walks the list of tasks (fs/resctrl/rdtgroup.c); a child that is added behind its
        position has the IDs of its parent, and keeps an RMID that is free, and then another group's.
        """
        if tid in self._members:
            self._members[tid].overlooked = True
        return tid in self._members

    def members(self) -> Iterator[Member]:
        """Return the threads outside the default group."""
        return iter(self._members.values())

    def live(self, node_of: Callable[[int], int]) -> Mapping[tuple[int, int], int]:
        """Return (rmid, node) -> the number of threads outside the default group that ran there last."""
        return collections.Counter((m.ids.rmid, node_of(m.cpu)) for m in self._members.values())

    def locate(self, tid: int, start: int) -> Member | None:
        """Return the member with this number and start, in its current control group; None if it is not a member."""
        member = self._members.get(tid)
        if member is None or member.start != start:
            return None
        self._find(member)
        return member

    def _find(self, member: Member) -> None:
        """Look up the control group of a member, which stays the last one if it is not known."""
        cgroups = self._table.cgroups(member.tid)
        if cgroups and cgroups != member.cgroups:
            self._leave(member)
            member.cgroups = cgroups

    def _sample(self, member: Member) -> None:
        """Charge a member's CPU time since the last sample, or drop it if it has ended or its number was reused."""
        stat = self._table.stat(member.tid)
        if stat is None or stat.start != member.start:
            del self._members[member.tid]
            self._known.discard(member.tid)
            self._ghosts[member.tid] = member
            return
        self._count(member, stat)

    def _count(self, member: Member, stat: TaskStat) -> None:
        used = max(0, stat.cpu_ns - member.cpu_ns)
        # A sleeping thread may have used it all long ago.
        since = member.sampled if stat.running else float("-inf")
        if used:
            self._find(member)
        member.cpu_ns += used
        member.cpu, member.sampled = stat.cpu, self._now()
        self._charge(member, used, since)

    def _inherit(self, threads: Mapping[int, int]) -> None:
        """Add every thread that is new since the last call to the group of its parent."""
        pending = set(threads) - self._known
        if not pending:
            return
        of_process: dict[int, list[int]] = collections.defaultdict(list)
        for tid, tgid in threads.items():
            of_process[tgid].append(tid)
        while pending:
            self._add_with_ancestors(min(pending), threads, of_process, pending)

    def _add_with_ancestors(
        self, tid: int, threads: Mapping[int, int], of_process: Mapping[int, list[int]], pending: set[int]
    ) -> None:
        """Find the group of one new thread, after those of its possible ancestors among the new threads."""
        pending.discard(tid)
        stat = self._table.stat(tid)
        if stat is None:
            return
        tgid = threads[tid]
        parents = [tgid] if tgid != tid else list(of_process.get(stat.ppid, ()))
        for parent in parents:
            if parent in pending:
                self._add_with_ancestors(parent, threads, of_process, pending)
        self._bear(tid, self._group_of_forker(tid, stat.ppid if tgid == tid else tgid, parents))

    def _group_of_forker(self, tid: int, leader: int, parents: list[int]) -> Ids:
        groups = {self.ids(parent) for parent in parents}
        if len(groups) > 1:
            forker = self._table.forker(tid, parents)
            return self.ids(leader if forker is None else forker)
        return groups.pop() if groups else DEFAULT
