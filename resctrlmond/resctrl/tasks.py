# SPDX-License-Identifier: Apache-2.0
"""Move all threads of a process, process tree or control group into a monitoring group, until none is outside."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    KernelRefused,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    PermissionDenied,
    ProcessChanged,
    ResctrlError,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import GroupRef, Tree

# The next pass finds a thread that was started between the listing and the write. After this many passes, a process
# that starts threads faster than they can be moved is given up, and the result has the threads that are left.
MAX_PASSES = 10
# How long to wait for the end of a fork, before each of MAX_PASSES.
_FORK_S = 0.001
# The start time of each thread that was moved, and where it was before, by its number: for put_back().
Origins = dict[int, tuple[int, Membership]]


def take_out(tree: Tree, ref: GroupRef, tids: Iterable[int]) -> int:
    """Move threads out of a group, each to the default group of its class. Return how many were not skipped.

    Skips a thread that has ended, is in another group by now, or cannot be moved.
    """
    moved = 0
    for tid in tids:
        with contextlib.suppress(NoSuchProcess, NoSuchClass, PermissionDenied, KernelRefused):
            tree.take_out(ref, tid)
            moved += 1
    return moved


def empty(tree: Tree, ref: GroupRef) -> tuple[int, int]:
    """Move all threads out of a group, until none is left. Return how many were moved, and how many may be left.

    A thread that forks while it is moved leaves its child in the group, and the child is in no list at first.
    """
    moved, left, forking, passes = 0, tree.tasks(ref), set[int](), 0
    while (left or forking) and passes < MAX_PASSES:
        moved += take_out(tree, ref, left)
        if not left:
            time.sleep(_FORK_S)
        forking = {tid for tid in (*left, *forking) if processes.may_be_forking(tid)}
        left, passes = tree.tasks(ref), passes + 1
    return moved, len(left) + len(forking)


class Elsewhere(enum.Enum):
    """The treatment, by a move, of a thread that is in another monitoring group."""

    OUTSIDE = "it stays there, and is reported as outside"
    LEAVE = "it stays there, because it is counted there, and is not a part of the move"
    TAKE = "it is moved like a thread in no group"


class Moved(msgspec.Struct, frozen=True):
    """The result of a move: the number of ``moved`` threads and of ``passes``, and the threads that are outside.

    ``in_other_groups``: threads in other monitoring groups (Elsewhere.OUTSIDE), which are moved only with
    ``may_take``. ``not_moved``: threads that are outside after the last pass. ``in_other_classes``: threads of other
    classes, by class, with ``among``.
    """

    moved: int
    passes: int
    in_other_groups: frozenset[int] = frozenset()
    not_moved: frozenset[int] = frozenset()
    in_other_classes: Mapping[str, frozenset[int]] = msgspec.field(default_factory=dict)

    @property
    def outside(self) -> int:
        """The number of threads outside the group."""
        return len(self.not_moved.union(self.in_other_groups, *self.in_other_classes.values()))


class MoveOptions(msgspec.Struct, frozen=True):
    """Options of a move into a group.

    ``may_take``: move threads of other monitoring groups too, if this returns true for the group; None leaves it to
    ``elsewhere``, which decides by the group.
    ``own``: the groups of the workload itself, whose threads are moved like threads in no group.
    ``through_class``: first write each thread to the group's class, which changes its allocation; without it the
    kernel refuses a thread of another class (ClassMismatch).
    ``among``: the groups of one workload, in several classes. Threads in any of these stay there, and threads in
    other classes are returned in ``Moved.in_other_classes`` instead of raising. ``before_first`` is called before the
    first thread is moved, if there is one. ``origins`` receives each moved thread, for ``put_back``.
    ``waits_for``: a thread that is outside stays there for now if this returns true, and is not reported: its own
    call moves it.
    """

    may_take: Callable[[Membership], bool] | None = None
    elsewhere: Callable[[Membership], Elsewhere] = lambda _where: Elsewhere.OUTSIDE
    own: Collection[Membership] = frozenset()
    through_class: bool = False
    among: Collection[GroupRef] | None = None
    before_first: Callable[[], object] | None = None
    origins: Origins | None = None
    waits_for: Callable[[int], bool] = lambda _tid: False


NO_OPTIONS = MoveOptions()


class Tasks(Protocol):
    """The threads of a process, process tree or control group."""

    def threads(self) -> list[int]:
        """List the current thread IDs. Raises NotRead."""

    def holds(self, tid: int, /) -> bool:
        """Whether the thread is one of them now. Raises NotRead."""

    def ended(self) -> str:
        """Return the name of their process if it has ended, else ""."""


class ProcessTasks(msgspec.Struct, frozen=True):
    """The threads of ``process``, and of its descendants if ``with_descendants``.

    A descendant whose parent has ended is not found. The daemon itself is not one of them.
    """

    process: Process
    with_descendants: bool = False

    def threads(self) -> list[int]:
        """List the current thread IDs; [] if the process has ended. Raises NotRead."""
        pid, below = self.process.pid, list[int]()
        if self.with_descendants:
            below = [descendant for descendant in processes.descendants(pid) if descendant != os.getpid()]
        return [tid for one in (pid, *below) for tid in processes.threads(one)]

    def holds(self, tid: int, /) -> bool:
        """Whether the thread is one of them now. Raises NotRead."""
        is_own = os.path.exists(f"/proc/{self.process.pid}/task/{tid}")
        is_below = not is_own and self.with_descendants and processes.is_descendant(tid, self.process.pid)
        return (is_own or is_below) and not self.process.has_ended()

    def ended(self) -> str:
        """Return the name of the process if it has ended, else ""."""
        return f"process {self.process.pid}" if self.process.has_ended() else ""


@dataclass(frozen=True)
class CgroupTasks:
    """The threads of the control group ``path`` and all below it."""

    path: str

    @functools.cached_property
    def holds(self) -> Callable[[int], bool]:
        """The test whether a thread is one of them now.

        Created only if a task is outside: this reads the table of mounts, which has thousands of lines on a host with
        hundreds of containers, and each of them is swept every few seconds.
        """
        return cgroups.member_test(self.path)

    def threads(self) -> list[int]:
        """List the current thread IDs. Raises NotRead."""
        return cgroups.tasks(self.path)

    def ended(self) -> str:
        """Return "", because a control group may be empty or removed."""
        return ""


def move(tree: Tree, tasks: Tasks, ref: GroupRef, options: MoveOptions = NO_OPTIONS) -> Moved:
    """Move the threads into the group.

    Continue until nothing new is found: a child that is forked meanwhile starts in its parent's group, or is found by
    the next pass. Raises NoSuchProcess if the process ended before anything was moved, ProcessChanged if it ended
    meanwhile.
    """
    moved, number, run = 0, 1, _Move(tree, ref, tasks, options)
    while (outside := run.outside()) and number <= MAX_PASSES:
        if number == 1 and options.before_first is not None:
            options.before_first()
        moved += sum(run.move(tid, before) for tid, before in outside.items())
        number += 1
    if ended := tasks.ended():
        kind = ProcessChanged if moved else NoSuchProcess
        raise kind(f"{ended} ended while it was moved", path=tree.full_path(ref))
    in_other_classes = {class_: frozenset(tids) for class_, tids in run.in_other_classes.items()}
    return Moved(moved, min(number, MAX_PASSES), frozenset(run.in_other_groups), frozenset(outside), in_other_classes)


def put_back(tree: Tree, origins: Origins, own: Collection[Membership]) -> bool:
    """Undo moves as far as possible: move each thread of ``origins`` back to its former group.

    ``own`` are the memberships of the groups into which the threads were moved. A thread in another group stays
    there: another call has taken it meanwhile. Returns whether a thread may have run in the group; it has not if the
    kernel refused all moves. Does not raise, because the caller reports the error for which it undoes the moves.
    """
    may_have_run = False
    for tid, (start_time, before) in origins.items():
        was_moved = True
        with contextlib.suppress(ResctrlError):
            is_same = processes.is_same(tid, start_time)
            where = tree.membership(tid)
            was_moved = not is_same or where != before
            is_ours = not where.group or where in own
            if is_same and was_moved and is_ours and tree.write_task_from(where, before.class_, tid) and before.group:
                home = GroupRef(before.class_, before.group).path
                tree.write_task_from(Membership(before.class_, ""), home, tid)
        may_have_run |= was_moved
    return may_have_run


class _Move(msgspec.Struct):
    """A move into the group ``ref``."""

    tree: Tree
    ref: GroupRef
    tasks: Tasks
    options: MoveOptions
    in_other_groups: set[int] = msgspec.field(default_factory=set)
    in_other_classes: dict[str, set[int]] = msgspec.field(default_factory=dict)

    def outside(self) -> dict[int, Membership]:
        """Return the threads to move, with their memberships; sort the others into the two fields."""
        found = {}
        targets = {Membership(home.class_, home.name) for home in (self.ref, *(self.options.among or ()))}
        self.in_other_groups = set()
        self.in_other_classes = {}
        for tid in self.tasks.threads():
            try:
                where = self.tree.membership(tid)
            except NoSuchProcess:
                continue
            if where in targets or self.options.waits_for(tid):
                continue
            is_elsewhere = where.group and where not in self.options.own and self.options.may_take is None
            kind = self.options.elsewhere(where) if is_elsewhere else Elsewhere.TAKE
            if kind is Elsewhere.LEAVE:
                continue
            if kind is Elsewhere.OUTSIDE:
                self.in_other_groups.add(tid)
            elif self.options.among is not None and where.class_ != self.ref.class_:
                self.in_other_classes.setdefault(where.class_, set()).add(tid)
            else:
                found[tid] = where
        return found

    def move(self, tid: int, before: Membership) -> bool:
        # The number must belong to the same thread before and after the write. That of a process that is held by its
        # pidfd does until the process has ended. Otherwise the start time shows it: a reuse within one clock tick
        # would need 2^22 forks in 10 ms.
        process = self.held(tid)
        if process is not None:
            start_time = process.start_time
            is_there = not process.has_ended()
        else:
            first = processes.stat(tid)
            start_time = first.start_time if first is not None else 0
            is_there = first is not None and self.tasks.holds(tid)
        if not is_there:
            return False
        if before.group and before not in self.options.own and not self.may_leave(before):
            return False
        origins = self.options.origins
        is_first = origins is not None and tid not in origins
        if origins is not None and is_first:
            origins[tid] = (start_time, before)
        try:
            if not self.write(tid, before):
                if origins is not None and is_first:
                    del origins[tid]
                return False
        except NoSuchProcess:
            return False
        except ClassMismatch:
            if self.options.among is None:
                raise
            return False  # it has changed class meanwhile; the next pass finds it
        if process is not None and not process.has_ended():
            return True
        last = processes.stat(tid)
        if last is None or last.start_time == start_time or self.tasks.holds(tid):
            return True
        self.give_back(tid, last)
        return False

    def may_leave(self, before: Membership) -> bool:
        """Return whether threads may be moved out of another group."""
        may_take = self.options.may_take
        return may_take is None or may_take(before)

    def held(self, tid: int) -> Process | None:
        """Return the process of which the thread is the first one, if the tasks are those of a process."""
        process = self.tasks.process if isinstance(self.tasks, ProcessTasks) else None
        return process if process is not None and process.pid == tid else None

    def write(self, tid: int, before: Membership) -> bool:
        """Write the thread to the group; return False if another call has moved it since it was listed.

        Then it stays there until the next pass, which finds it in its new group.
        """
        directories = [self.ref.path]
        if self.options.through_class and before.class_ != self.ref.class_:
            directories.insert(0, self.ref.class_)
        for directory in directories:
            if not self.tree.write_task_from(before, directory, tid):
                return False
            before = Membership(self.ref.class_, "")
        return True

    def give_back(self, tid: int, stranger: processes.Stat) -> None:
        """Move a thread that got the number before the write back to its parent's group, where clone had put it."""
        leader = processes.leader(tid)
        try:
            home = self.tree.membership(stranger.parent if leader in (0, tid) else leader)
        except NoSuchProcess:
            home = Membership(self.ref.class_, "")
        # If its group was removed, it belongs in the class, where rmdir would have moved it.
        with contextlib.suppress(NoSuchProcess, NoSuchGroup):
            self.tree.write_task(home.class_, tid)
            if home.group:
                self.tree.write_task(GroupRef(home.class_, home.group).path, tid)
