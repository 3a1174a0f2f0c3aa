# SPDX-License-Identifier: Apache-2.0
"""Find the tasks that another program has moved into a class or group.

An inotify event names the tasks file that was written to, but not the task that was moved. So each directory is
listed again after a write, and compared with its previous list. A task that is in the new list only was moved there,
unless it was forked there or the daemon moved it.

Limits: a task that has ended is not found, and a thread that was started less than a second before the previous list
may have been missing in it. A task is taken for forked in the directory if its parent (for a thread: its process) is
there and did not arrive itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable

import msgspec

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import NoSuchGroup, NoSuchProcess, NotMounted
from resctrlmond.resctrl.foreign_writes import boot_ticks
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import TICKS_PER_S
from resctrlmond.resctrl.tree import Tree

# A thread that is forked while the kernel lists the tasks is older than the list, and may be missing in it.
_FORK_TICKS = TICKS_PER_S
# Each candidate costs several system calls. A write to the root, which has most of a host's threads, costs 0.1 s.
_MAX_CANDIDATES = 1000
_GROUPS = "mon_groups/"


class Arrival(msgspec.Struct, frozen=True):
    """A thread that was moved and has not ended: its process, start time (clock ticks since boot) and membership."""

    tid: int
    pid: int
    start_time: int
    where: Membership


class _Listing(msgspec.Struct):
    """The threads in a directory at a time (clock ticks since boot).

    ``has_all_older``: the directory was not listed, and each thread that had started by then counts as listed.
    """

    at: int
    tids: set[int]
    has_all_older: bool = False


class Arrivals:
    """Keeps the last list of each class and group, by the directory's path in the tree. Thread-safe.

    As in the kernel, the list of a class includes the tasks of its groups.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._guard = threading.Lock()
        # Held for moments only, never while the kernel lists tasks.
        self._changing = threading.Lock()
        self._listings: dict[str, _Listing] = {}

    def __len__(self) -> int:
        return len(self._listings)

    def begin(self, directory: str) -> None:
        """List a directory: the tasks that it has now are not arrivals."""
        with self._guard:
            self._list(directory)

    def begin_unread(self, directory: str) -> None:
        """Begin without listing the directory: threads that have started by now are not arrivals."""
        with self._changing:
            self._listings[directory] = _Listing(boot_ticks(), set(), has_all_older=True)

    def begin_empty(self, directory: str) -> None:
        """Begin with an empty list for a new directory, which is watched already. Does not wait for other lists."""
        with self._changing:
            self._listings[directory] = _Listing(boot_ticks(), set())

    def keep(self, watched: Callable[[], Container[str]]) -> None:
        """Drop the lists of all directories except the watched ones."""
        with self._guard, self._changing:
            # Not before: another thread may have begun the list of a new directory since.
            directories = watched()
            for directory in [known for known in self._listings if known not in directories]:
                del self._listings[directory]

    def find(self, directory: str) -> list[Arrival]:
        """List a directory again, and return the threads that were moved there since the previous list.

        Raises NotRead.
        """
        with self._guard:
            before = self._listings.get(directory) or _Listing(0, set())
            now = self._list(directory)
            if now is None:
                return []
            with self._changing:
                others = self._listings.copy()
            arrived = _Comparison(self._tree, directory, before, others).arrivals(now.tids)
            for name, other in others.items():
                membership = membership_of(name)
                other.tids -= {arrival.tid for arrival in arrived if not _includes(membership, arrival.where)}
            return arrived

    def _list(self, directory: str) -> _Listing | None:
        at, known = boot_ticks(), self._listings.get(directory)
        try:
            listed = _Listing(at, set(self._tree.tasks(directory)))
        except (NoSuchGroup, NotMounted):
            with self._changing:
                # Not the list of a directory that was created there meanwhile.
                if known is not None and self._listings.get(directory) is known:
                    del self._listings[directory]
            return None
        with self._changing:
            self._listings[directory] = listed
        return listed


class _Comparison:
    """Compares the tasks of one directory with its list ``before``."""

    def __init__(self, tree: Tree, directory: str, before: _Listing, listings: dict[str, _Listing]) -> None:
        self.tree = tree
        self.directory = directory
        self.before = before
        self.membership = membership_of(directory)
        self.known: dict[int, Arrival | None] = {}
        # The threads that were in another class, and, if the directory is a class, those in its groups.
        self.in_other_classes: set[int] = set()
        self.in_own_groups: set[int] = set()
        for name, other in listings.items():
            membership = membership_of(name)
            if membership.class_ != self.membership.class_:
                self.in_other_classes |= other.tids
            elif membership.group and not self.membership.group:
                self.in_own_groups |= other.tids

    def arrivals(self, now: Iterable[int]) -> list[Arrival]:
        """Return the threads of the list ``now`` that were moved to the directory."""
        regrouped = [tid for tid in now if tid in self.before.tids and tid in self.in_own_groups]
        # The newest threads have the highest numbers. Of these the oldest first: they have started the others.
        new = sorted(tid for tid in now if tid not in self.before.tids)[-_MAX_CANDIDATES:]
        found = [self._from_own_group(tid) for tid in regrouped] + [self._from_elsewhere(tid) for tid in new]
        return [arrival for arrival in found if arrival is not None]

    def _from_own_group(self, tid: int) -> Arrival | None:
        arrival = self._moved_by_others(tid)
        return arrival if arrival is not None and arrival.where == self.membership else None

    def _from_elsewhere(self, tid: int) -> Arrival | None:
        if tid not in self.known:
            self.known[tid] = None  # ends the recursion if reused numbers form a circle
            arrival = self._moved_by_others(tid)
            if arrival is not None and not self._was_forked_here(arrival):
                self.known[tid] = arrival
        return self.known[tid]

    def _moved_by_others(self, tid: int) -> Arrival | None:
        """Return the thread if it is in the directory now and the daemon did not move it there."""
        thread = processes.stat(tid)
        if thread is None or thread.is_exiting:
            return None
        if self.tree.own_writes.moved_since(tid, self.before.at, self.directory):
            return None
        try:
            where = self.tree.membership(tid)
        except NoSuchProcess:
            return None
        if not _includes(self.membership, where):
            return None
        return Arrival(tid, processes.leader(tid), thread.start_time, where)

    def _was_forked_here(self, arrival: Arrival) -> bool:
        """Whether the thread may have started in the directory, because its parent or process is there."""
        tid = arrival.tid
        if self.before.has_all_older and arrival.start_time < self.before.at:
            return True
        if tid in self.in_other_classes or arrival.start_time < self.before.at - _FORK_TICKS:
            return False  # it was elsewhere when the directory was listed
        origin = arrival.pid
        if origin == tid:
            thread = processes.stat(tid)
            origin = thread.parent if thread is not None else 0
        if origin in self.before.tids:
            return True
        try:
            is_here = _includes(self.membership, self.tree.membership(origin))
        except NoSuchProcess:
            return False
        # An arrival's children may have been moved with it, so they are arrivals too.
        return is_here and self._from_elsewhere(origin) is None


def membership_of(directory: str) -> Membership:
    """Return the class and group whose directory has this path in the tree; "" is the root."""
    class_, _, name = directory.rpartition(_GROUPS)
    return Membership(class_.rstrip("/"), name) if class_ or directory.startswith(_GROUPS) else Membership(name, "")


def _includes(listed: Membership, membership: Membership) -> bool:
    """Return whether the tasks file of the group ``listed`` includes a task with a membership."""
    return membership == listed or (not listed.group and membership.class_ == listed.class_)
