# SPDX-License-Identifier: Apache-2.0
"""Which thread is in which group: joining by number, inheriting at fork, leaving at exit, CPU time on the way."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol


class Ids(NamedTuple):
    """What the kernel keeps in every task: the control group's CLOSID and the monitoring group's RMID."""

    closid: int
    rmid: int


DEFAULT = Ids(0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class TaskStat:
    """One thread at one look. ``start`` tells a reused number from the old task, in any unit that does."""

    tid: int
    ppid: int  # thread group id of the parent
    start: int
    cpu_ns: int  # CPU time used since birth
    cpu: int  # the CPU it ran on last
    running: bool = True  # or ready to


class Fork(NamedTuple):
    """A birth: ``parent`` is the thread that forked, where ``child`` is a process; of a new thread nobody tells."""

    parent: int
    child: int
    tgid: int
    cpu: int  # where it was forked


class Exit(NamedTuple):
    """A death, and all the CPU time that the thread used in its life."""

    tid: int
    cpu_ns: int


class TaskTable(Protocol):
    """Where tasks come from: the host's /proc, or a table that a test drives."""

    cpus: int  # how many CPUs there are; they are numbered from 0

    def forks(self) -> list[Fork] | None:
        """All births since the last call, in order; None where they have to be found by looking at ``threads``."""

    def exits(self) -> list[Exit]:
        """The deaths since the last call, as far as anybody tells of them."""

    @property
    def inexact(self) -> str:
        """Why what tasks used may be missing from their groups, "" if nothing can be."""

    def last_born(self) -> int:
        """A number that is another one after every fork; while it stays, there is no new thread to look for."""

    def threads(self) -> Mapping[int, int]:
        """Every thread there is now, zombies included: thread id -> thread group id."""

    def stat(self, tid: int) -> TaskStat | None:
        """One thread; None if it is gone."""

    def credentials(self, tid: int) -> tuple[int, int] | None:
        """(uid, saved uid) of a thread; None if it is gone."""

    def euid(self, tid: int) -> int | None:
        """The effective uid of a thread; None where only that of a system call is known."""

    def named(self, number: int, asking: int) -> int | None:
        """The thread that has this number in the PID namespace of the thread ``asking``; None if none has."""

    def seen(self, tids: Iterable[int], asking: int) -> list[int]:
        """The numbers that these threads have there; who is not in that namespace is left out."""

    def forker(self, child: int, candidates: list[int]) -> int | None:
        """Which of these threads, all of one process, forked the process ``child``; None where nobody can tell."""

    def host_cpu_ns(self) -> Mapping[int, int]:
        """CPU number -> the CPU time that all tasks and the kernel have used there."""


@dataclasses.dataclass(slots=True)
class Member:
    """A thread outside the default group, as last seen. ``start`` is 0 if nobody ever saw it alive."""

    tid: int
    ids: Ids
    start: int
    cpu_ns: int
    cpu: int
    sampled: float  # when ``cpu_ns`` was looked at
    overlooked: bool = False  # by the next rmdir


# Takes a member, the CPU time that it used since it was sampled before, and when that was.
Charge = Callable[[Member, int, float], None]


class Tasks:
    """Every thread's group. Only threads outside the default group are kept; the others need no watching.

    ``charge`` is called with what members use, and ``bury`` with members that are gone. ``now`` is the clock.

    A new thread counts as made by its process's first thread. Where the table cannot tell of forks, a process
    whose parent died between two looks counts as the child of whoever inherited it; where it cannot tell of
    exits, what a thread used between its last sample and its death is charged to nobody here (so to root).
    """

    def __init__(
        self, table: TaskTable, charge: Charge, bury: Callable[[Member], None], now: Callable[[], float]
    ) -> None:
        self._table = table
        self._charge = charge
        self._bury = bury
        self._now = now
        self._members: dict[int, Member] = {}
        # Threads that are gone, but of which the next look may tell: forks of theirs, and what they used at last.
        self._ghosts: dict[int, Member] = {}
        # Every thread of the last listing, and the last fork before it; stale while there is no member.
        self._known: set[int] = set()
        self._last_born = -1

    def __len__(self) -> int:
        return len(self._members) + len(self._ghosts)

    def look(self) -> None:
        """Gives threads that are new since the last look their groups, and those that ended their last CPU time."""
        # Deaths first: all whom they concern are then born by the forks, which come after.
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
                # None of it was used since: whoever is dead has pushed all its counts.
                self._charge(member, cpu_ns - member.cpu_ns, float("-inf"))
                member.cpu_ns = cpu_ns
        for ghost in ghosts.values():
            self._bury(ghost)

    def _be_forked(self, fork: Fork, ghosts: dict[int, Member]) -> None:
        parent = fork.parent if fork.child == fork.tgid else fork.tgid
        ghost = ghosts.get(parent) or self._ghosts.get(parent)
        ids = ghost.ids if ghost else self.ids(parent)
        for forgotten in (ghosts, self._ghosts, self._members):
            if before := forgotten.pop(fork.child, None):  # the number is another thread's from here on
                self._bury(before)
        self._bear(fork.child, ids, fork.cpu)

    def _look_around(self) -> None:
        last_born = self._table.last_born()
        if self._members and last_born == self._last_born:
            return
        threads = self._table.threads()
        if self._members:
            self._inherit(threads)
        self._known, self._last_born = set(threads), last_born

    def _bear(self, tid: int, ids: Ids, cpu: int = 0) -> None:
        """A new thread begins in that group."""
        if ids == DEFAULT:
            return
        stat = self._table.stat(tid)
        now = self._now()
        if stat is None:
            self._ghosts[tid] = Member(tid, ids, 0, 0, cpu, now)
            return
        # All it ever used, it used as a member.
        member = Member(tid, ids, stat.start, stat.cpu_ns, stat.cpu, now)
        self._members[tid] = member
        self._charge(member, stat.cpu_ns, now)

    def sample(self, rmids: Collection[int] | None = None) -> None:
        """Charges the CPU time of the threads with these RMIDs (None: all) and forgets those that are gone."""
        for member in list(self._members.values()):
            if rmids is None or member.ids.rmid in rmids:
                self._sample(member)
        if self._ghosts:
            # What has just been found gone told of its end before it went.
            self.look()

    def check(self, tid: int) -> None:
        """Samples one thread, so that a number that was used again is not taken for the member that had it."""
        if tid in self._members:
            self._sample(self._members[tid])

    def ids(self, tid: int) -> Ids:
        """The group of a thread, as of the last look and sample."""
        member = self._members.get(tid)
        return member.ids if member else DEFAULT

    def join(self, tid: int, ids: Ids) -> bool:
        """Puts one thread, and only that one, into a group. False if it is gone."""
        stat = self._table.stat(tid)
        if stat is None:
            return False
        member = self._members.pop(tid, None)
        if member and member.start == stat.start:
            self._count(member, stat)
        if ids != DEFAULT:
            self._members[tid] = Member(tid, ids, stat.start, stat.cpu_ns, stat.cpu, self._now())
        self._known.add(tid)
        return True

    def regroup(self, before: Ids, after: Ids) -> None:
        """Moves all threads of a group, as rmdir and rename do; who is to be overlooked stays, once."""
        for member in [member for member in self._members.values() if member.ids == before]:
            if member.overlooked:
                member.overlooked = False
            elif after == DEFAULT:
                del self._members[member.tid]
            else:
                member.ids = after
        for ghost in self._ghosts.values():
            if ghost.ids == before:
                ghost.ids = after

    def overlook(self, tid: int) -> bool:
        """The next ``regroup`` leaves this thread where it is, as one that was forked meanwhile. False: no member.

        rdt_move_group_tasks() walks the list of tasks (fs/resctrl/rdtgroup.c); a child that is put there behind its
        back has the ids of its parent, and keeps an RMID that is free, and then another group's.
        """
        if tid in self._members:
            self._members[tid].overlooked = True
        return tid in self._members

    def members(self) -> Iterator[Member]:
        """The threads outside the default group."""
        return iter(self._members.values())

    def live(self, node_of: Callable[[int], int]) -> Mapping[tuple[int, int], int]:
        """(rmid, node) -> how many threads outside the default group ran there last."""
        return collections.Counter((m.ids.rmid, node_of(m.cpu)) for m in self._members.values())

    def _sample(self, member: Member) -> None:
        """Charges a member's CPU time since the last look, or forgets it if it is gone or another one by now."""
        stat = self._table.stat(member.tid)
        if stat is None or stat.start != member.start:
            del self._members[member.tid]
            self._known.discard(member.tid)
            self._ghosts[member.tid] = member
            return
        self._count(member, stat)

    def _count(self, member: Member, stat: TaskStat) -> None:
        used = max(0, stat.cpu_ns - member.cpu_ns)
        # Who sleeps may have used it all long ago.
        since = member.sampled if stat.running else float("-inf")
        member.cpu_ns += used
        member.cpu, member.sampled = stat.cpu, self._now()
        self._charge(member, used, since)

    def _inherit(self, threads: Mapping[int, int]) -> None:
        """Gives every thread that is new since the last look the group of the one that forked it."""
        pending = set(threads) - self._known
        if not pending:
            return
        of_process: dict[int, list[int]] = collections.defaultdict(list)
        for tid, tgid in threads.items():
            of_process[tgid].append(tid)
        while pending:
            self._settle(min(pending), threads, of_process, pending)

    def _settle(
        self, tid: int, threads: Mapping[int, int], of_process: Mapping[int, list[int]], pending: set[int]
    ) -> None:
        """Finds the group of one new thread, after those of the new threads that it may descend from."""
        pending.discard(tid)
        stat = self._table.stat(tid)
        if stat is None:
            return
        tgid = threads[tid]
        parents = [tgid] if tgid != tid else list(of_process.get(stat.ppid, ()))
        for parent in parents:
            if parent in pending:
                self._settle(parent, threads, of_process, pending)
        self._bear(tid, self._group_of_forker(tid, stat.ppid if tgid == tid else tgid, parents))

    def _group_of_forker(self, tid: int, leader: int, parents: list[int]) -> Ids:
        groups = {self.ids(parent) for parent in parents}
        if len(groups) > 1:
            forker = self._table.forker(tid, parents)
            return self.ids(leader if forker is None else forker)
        return groups.pop() if groups else DEFAULT
