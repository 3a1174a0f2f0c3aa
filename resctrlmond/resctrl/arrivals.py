# SPDX-License-Identifier: Apache-2.0
"""The living tasks that writes to a tasks file have moved to its directory.

An event of inotify(7) names the file, but not the task that was moved. A task that lives is found: it is in the
directory now, was not in it when the directory was listed last, and was not forked in it.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable
from dataclasses import dataclass

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import NoSuchGroup, NoSuchProcess, NotMounted
from resctrlmond.resctrl.foreign_writes import boot_ticks
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import TICKS_PER_S
from resctrlmond.resctrl.tree import Tree

# A thread that is forked while the tasks are listed started before, and may be missing in the list.
_FORK_TICKS = TICKS_PER_S
# Each is looked at by several system calls: a write to the root, where most of a host's threads are, takes 0.1 s.
_MOST_LOOKED_AT = 1000
_GROUPS = "mon_groups/"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A living thread that was moved: its process, its start time (clock ticks since boot), and where it is."""

    tid: int
    pid: int
    start_time: int
    where: Membership


@dataclass(slots=True)
class _List:
    """The threads in a directory at a time (clock ticks since boot).

    ``has_all_older``: it was not read, and stands for every thread that had started by then.
    """

    at: int
    tids: set[int]
    has_all_older: bool = False


class Arrivals:
    """Lists the directories of a tree, classes and groups, by their path in it. For any thread.

    The list of a class has the tasks of its groups too, as in the kernel.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._guard = threading.Lock()
        self._lists: dict[str, _List] = {}

    def __len__(self) -> int:
        return len(self._lists)

    def begin(self, directory: str) -> None:
        """List a directory that stands: the tasks in it now have not been moved there since."""
        with self._guard:
            self._listed(directory)

    def begin_unread(self, directory: str) -> None:
        """As ``begin``, without listing: a thread that is older than this call has not been moved there since."""
        self._lists[directory] = _List(boot_ticks(), set(), has_all_older=True)

    def begin_empty(self, directory: str) -> None:
        """Keep an empty list for a new directory. Waits for nothing."""
        self._lists[directory] = _List(boot_ticks(), set())

    def keep(self, directories: Container[str]) -> None:
        """Forget all other directories."""
        with self._guard:
            self._lists = {name: known for name, known in self._lists.copy().items() if name in directories}

    def look(self, directory: str) -> list[Arrival]:
        """List a directory, and return the living threads that came to it since it was listed last.

        Raises NotRead.
        """
        with self._guard:
            before = self._lists.get(directory) or _List(0, set())
            now = self._listed(directory)
            if now is None:
                return []
            others = self._lists.copy()
            arrived = _Look(self._tree, directory, before, others).arrivals(now.tids)
            for name, other in others.items():
                place = place_of(name)
                other.tids -= {arrival.tid for arrival in arrived if not _holds(place, arrival.where)}
            return arrived

    def _listed(self, directory: str) -> _List | None:
        at = boot_ticks()
        try:
            self._lists[directory] = _List(at, set(self._tree.tasks_in(directory)))
        except (NoSuchGroup, NotMounted):
            self._lists.pop(directory, None)
        return self._lists.get(directory)


class _Look:
    """Tells which threads of one directory came to it since the list ``before``."""

    def __init__(self, tree: Tree, directory: str, before: _List, lists: dict[str, _List]) -> None:
        self.tree = tree
        self.directory = directory
        self.before = before
        self.place = place_of(directory)
        self.known: dict[int, Arrival | None] = {}
        # The threads that were in another class, or, for a class, in a group of it.
        self.of_others: set[int] = set()
        self.of_own_groups: set[int] = set()
        for name, other in lists.items():
            place = place_of(name)
            if place.class_ != self.place.class_:
                self.of_others |= other.tids
            elif place.group and not self.place.group:
                self.of_own_groups |= other.tids

    def arrivals(self, now: Iterable[int]) -> list[Arrival]:
        left = [tid for tid in now if tid in self.before.tids and tid in self.of_own_groups]
        # The newest have the highest numbers. The oldest of these first: they have started others.
        new = sorted(tid for tid in now if tid not in self.before.tids)[-_MOST_LOOKED_AT:]
        found = [self._left_a_group(tid) for tid in left] + [self._came(tid) for tid in new]
        return [arrival for arrival in found if arrival is not None]

    def _left_a_group(self, tid: int) -> Arrival | None:
        arrival = self._living(tid)
        return arrival if arrival is not None and arrival.where == self.place else None

    def _came(self, tid: int) -> Arrival | None:
        if tid not in self.known:
            self.known[tid] = None  # a number that is used again could close a circle
            arrival = self._living(tid)
            if arrival is not None and not self._was_forked_here(arrival):
                self.known[tid] = arrival
        return self.known[tid]

    def _living(self, tid: int) -> Arrival | None:
        """The thread, if it lives in the directory and the daemon did not move it there."""
        thread = processes.stat(tid)
        if thread is None or thread.is_exiting:
            return None
        if self.tree.own_writes.moved_since(tid, self.before.at, self.directory):
            return None
        try:
            where = self.tree.membership(tid)
        except NoSuchProcess:
            return None
        return Arrival(tid, processes.leader(tid), thread.start_time, where) if _holds(self.place, where) else None

    def _was_forked_here(self, arrival: Arrival) -> bool:
        """Whether the thread may be in the directory since before, or because the thread that started it is."""
        tid = arrival.tid
        if self.before.has_all_older and arrival.start_time < self.before.at:
            return True
        if tid in self.of_others or arrival.start_time < self.before.at - _FORK_TICKS:
            return False  # it was elsewhere at a time when it ran already
        origin = arrival.pid
        if origin == tid:
            thread = processes.stat(tid)
            origin = thread.parent if thread is not None else 0
        if origin in self.before.tids:
            return True
        try:
            is_here = _holds(self.place, self.tree.membership(origin))
        except NoSuchProcess:
            return False
        # What an arrival starts here comes with it.
        return is_here and self._came(origin) is None


def place_of(directory: str) -> Membership:
    """The membership of the tasks in a directory whose path in the tree is given; "" is the root."""
    class_, _, name = directory.rpartition(_GROUPS)
    return Membership(class_.rstrip("/"), name) if class_ or directory.startswith(_GROUPS) else Membership(name, "")


def _holds(place: Membership, where: Membership) -> bool:
    """Whether the list of tasks at ``place`` has a task that is at ``where``."""
    return where == place or (not place.group and where.class_ == place.class_)
