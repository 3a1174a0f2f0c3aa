# SPDX-License-Identifier: Apache-2.0
"""Moving a process with all its threads, or a control group, into a monitoring group, until nothing new is found."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import ClassMismatch, KernelRefused, NoSuchGroup, NoSuchProcess, ProcessChanged
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import GroupRef, Tree

# A thread made between the listing and the write is found by the next pass; a process that makes threads faster
# than they can be moved ends the passes here, and the rest is told.
MAX_PASSES = 10


@dataclass(frozen=True, slots=True)
class Moved:
    """The outcome of a sweep: ``moved`` threads written, ``passes`` made, and who stayed outside.

    ``elsewhere`` are threads in other monitoring groups, which are not taken over unasked; ``left`` those that are
    outside even after the last pass.
    """

    moved: int
    passes: int
    elsewhere: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()


def move_process(
    tree: Tree, process: Process, ref: GroupRef, *, take_over: bool = False, through_class: bool = False
) -> Moved:
    """Move every thread of ``process`` into the group.

    ``take_over``: also threads in other monitoring groups. ``through_class``: first write each thread to the group's
    class, which changes its allocation; without it the kernel refuses a thread of another class (ClassMismatch).
    Raises NoSuchProcess if the process ended before anything was moved, ProcessChanged if it ended meanwhile.
    """

    def belongs(tid: int) -> bool:
        return os.path.exists(f"/proc/{process.pid}/task/{tid}") and not process.has_ended()

    sweep = _Sweep(tree, ref, belongs, take_over, through_class)
    moved = sweep.run(process.threads)
    if process.has_ended():
        kind = ProcessChanged if moved.moved else NoSuchProcess
        raise kind(f"process {process.pid} ended while it was moved", path=tree.full_path(ref))
    return moved


def move_cgroup(
    tree: Tree, cgroup: str, ref: GroupRef, *, take_over: bool = False, through_class: bool = False
) -> Moved:
    """Move every thread of the control group, and of all below it, into the group; it may be empty or gone."""
    sweep = _Sweep(tree, ref, cgroups.member_test(cgroup), take_over, through_class)
    return sweep.run(lambda: cgroups.tasks(cgroup))


class _Sweep:
    def __init__(
        self, tree: Tree, ref: GroupRef, belongs: Callable[[int], bool], take_over: bool, through_class: bool
    ) -> None:
        self.tree = tree
        self.ref = ref
        self.belongs = belongs
        self.take_over = take_over
        self.through_class = through_class
        self.here = Membership(ref.class_, ref.name)
        self.elsewhere: set[int] = set()

    def run(self, listing: Callable[[], Collection[int]]) -> Moved:
        moved = 0
        for number in range(1, MAX_PASSES + 1):
            outside = self.outside(listing())
            if not outside:
                return Moved(moved, number, frozenset(self.elsewhere))
            moved += sum(self.move(tid, before) for tid, before in outside.items())
        left = frozenset(self.outside(listing()))
        return Moved(moved, MAX_PASSES, frozenset(self.elsewhere), left)

    def outside(self, tids: Collection[int]) -> dict[int, Membership]:
        """Those of the threads that are to be moved, with where they are; the rest are here or elsewhere."""
        found = {}
        self.elsewhere = set()
        for tid in tids:
            try:
                where = self.tree.membership(tid)
            except NoSuchProcess:
                continue
            if where == self.here:
                continue
            if where.group and not self.take_over:
                self.elsewhere.add(tid)
            else:
                found[tid] = where
        return found

    def move(self, tid: int, before: Membership) -> bool:
        # The number must belong to the same thread before and after the write. Its start time tells: two threads
        # that follow each other under one number within a clock tick would need 2^22 forks in 10 ms.
        first = processes.stat(tid)
        if first is None or not self.belongs(tid):
            return False
        try:
            if self.through_class and before.class_ != self.ref.class_:
                self.tree.write_task(self.ref.class_, tid)
            self.tree.write_task(self.ref.path, tid)
        except NoSuchProcess:
            return False
        except KernelRefused as error:
            if error.errno == errno.EINVAL and self.tree.membership(tid).class_ != self.ref.class_:
                # Somebody else's command, or even a read of some files, took the kernel's words away before we read
                # them: this is what they were about.
                raise ClassMismatch(
                    f"cannot move task {tid} to another class than its own", path=error.path, errno=error.errno
                ) from error
            raise
        last = processes.stat(tid)
        if last is None or last.start_time == first.start_time or self.belongs(tid):
            return True
        self.give_back(tid, last)
        return False

    def give_back(self, tid: int, stranger: processes.Stat) -> None:
        """A stranger got the number between our look and our write: put it where clone had it, with its maker."""
        leader = processes.leader(tid)
        try:
            home = self.tree.membership(stranger.parent if leader in (0, tid) else leader)
        except NoSuchProcess:
            home = Membership(self.ref.class_, "")
        # Its group may be gone by now: then its class is where rmdir would have put it.
        with contextlib.suppress(NoSuchProcess, NoSuchGroup):
            self.tree.write_task(home.class_, tid)
            if home.group:
                self.tree.write_task(GroupRef(home.class_, home.group).path, tid)
