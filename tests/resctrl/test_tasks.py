# SPDX-License-Identifier: Apache-2.0
"""Moving a process with all its threads, or a control group, until nothing new is found."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pytest

from resctrlmond.resctrl import tasks
from resctrlmond.resctrl.errors import ClassMismatch, NoSuchGroup, NoSuchProcess, ProcessChanged
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import CgroupTasks, Moved, MoveOptions, ProcessTasks, move
from resctrlmond.resctrl.tree import GroupRef, Tree

from .conftest import Make
from .places import KERNEL, Place
from .puppets import Puppet

HERE = Membership("", "a")


def where(tree: Tree, tids: set[int]) -> set[Membership]:
    return {tree.membership(tid) for tid in tids}


def enter(cgroup: str, pid: int) -> None:
    with open(f"{cgroup}/cgroup.procs", "w") as procs:
        procs.write(str(pid))


# -- a process


def test_all_threads_of_a_process_are_moved(tree: Tree, make: Make, puppet: Puppet, held: Process) -> None:
    threads = {puppet.make("thread") for _ in range(8)}
    assert move(tree, ProcessTasks(held), make("a")) == Moved(9, 2)
    assert where(tree, {puppet.pid, *threads}) == {HERE}
    assert set(tree.tasks(GroupRef("", "a"))) == {puppet.pid, *threads}


def test_moving_again_moves_nothing(tree: Tree, make: Make, held: Process) -> None:
    ref = make("a")
    move(tree, ProcessTasks(held), ref)
    assert move(tree, ProcessTasks(held), ref) == Moved(0, 1)


def test_thread_that_is_taken_out_is_in_no_group(tree: Tree, make: Make, puppet: Puppet, held: Process) -> None:
    ref = make("a")
    move(tree, ProcessTasks(held), ref)
    tree.take_out(ref, puppet.pid)
    assert tree.membership(puppet.pid) == Membership("", "")
    tree.write_task(make("b").path, puppet.pid)
    tree.take_out(ref, puppet.pid)
    assert tree.membership(puppet.pid) == Membership("", "b")


def test_concurrent_move_of_a_thread_that_is_taken_out_prevails(
    tree: Tree, make: Make, puppet: Puppet, held: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = make("a"), make("b")
    move(tree, ProcessTasks(held), ref)
    mover = threading.Thread(target=tree.write_task, args=(other.path, puppet.pid))
    membership = tree.membership

    def after_a_move(tid: int) -> Membership:
        found = membership(tid)
        monkeypatch.undo()
        mover.start()
        mover.join(0.2)  # it moves the thread now, or waits for the end of this call
        return found

    monkeypatch.setattr(tree, "membership", after_a_move)
    tree.take_out(ref, puppet.pid)
    mover.join()
    assert tree.membership(puppet.pid) == Membership("", "b")


class _Listed:
    """The threads of a process; another call moves them after they were listed, before they are written."""

    def __init__(self, tasks: ProcessTasks, moved_meanwhile: Callable[[int], None]) -> None:
        self._tasks = tasks
        self._moved_meanwhile = moved_meanwhile

    def threads(self) -> list[int]:
        return self._tasks.threads()

    def holds(self, tid: int) -> bool:
        self._moved_meanwhile(tid)
        return self._tasks.holds(tid)

    def ended(self) -> str:
        return self._tasks.ended()


def test_thread_that_was_moved_since_it_was_listed_stays_there(
    tree: Tree, make: Make, puppet: Puppet, held: Process
) -> None:
    ref, other, past = make("a"), make("b"), dict[int, tuple[int, Membership]]()
    listed = _Listed(ProcessTasks(held), lambda tid: tree.write_task(other.path, tid))
    moved = move(tree, listed, ref, MoveOptions(origins=past))
    assert tree.membership(puppet.pid) == Membership("", "b")
    assert (moved.moved, moved.in_other_groups, moved.not_moved) == (0, frozenset({puppet.pid}), frozenset())
    assert past == {}


def test_start_time_of_a_process_that_is_held_is_not_read_again(
    tree: Tree, make: Make, held: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pidfd shows that the number is still that of the process: the two reads were six system calls."""

    def looked(_tid: int) -> NoReturn:
        raise AssertionError("the start time was read")

    monkeypatch.setattr("resctrlmond.resctrl.processes.stat", looked)
    past: dict[int, tuple[int, Membership]] = {}
    assert move(tree, ProcessTasks(held), make("a"), MoveOptions(origins=past)) == Moved(1, 2)
    assert past == {held.pid: (held.start_time, Membership("", ""))}


def test_children_that_are_forked_later_are_in_the_group(
    tree: Tree, make: Make, puppet: Puppet, held: Process
) -> None:
    move(tree, ProcessTasks(held), make("a"))
    assert where(tree, {puppet.make("thread"), puppet.make("fork")}) == {HERE}


def test_children_made_before_stay(tree: Tree, make: Make, puppet: Puppet, held: Process) -> None:
    child = puppet.make("fork")
    move(tree, ProcessTasks(held), make("a"))
    assert where(tree, {child}) == {Membership("", "")}


def test_threads_started_during_the_move_are_moved_or_returned(
    tree: Tree, make: Make, place: Place, puppet: Puppet, held: Process
) -> None:
    puppet.do("chains")
    deadline = time.monotonic() + 60
    moved = move(tree, ProcessTasks(held), make("a"))
    # Threads that start a successor and end cannot be caught by writing their numbers; the result has them.
    while moved.not_moved:
        assert moved.passes == tasks.MAX_PASSES
        assert time.monotonic() < deadline
        moved = move(tree, ProcessTasks(held), GroupRef("", "a"))
    # A clone copies the group of its parent at its begin, and is listed at its end (kernel/fork.c, copy_process()): a
    # clone during the last pass is listed after it, and the next sweep moves it in.
    while place.name == KERNEL and {tid for tid in held.threads() if _outside(tree, tid)}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        move(tree, ProcessTasks(held), GroupRef("", "a"))


def _outside(tree: Tree, tid: int) -> bool:
    try:
        return tree.membership(tid) != HERE
    except NoSuchProcess:
        return False


def test_children_forked_while_moving_follow(tree: Tree, make: Make, puppet: Puppet, held: Process) -> None:
    puppet.do("breed")
    assert move(tree, ProcessTasks(held), make("a")).not_moved == frozenset()
    # Those that were forked before the move end soon; if later ones did not follow, some would always be outside.
    end = time.monotonic() + 60
    while outside := {child for child in _children(puppet.pid) if _outside(tree, child)}:
        assert time.monotonic() < end, outside
        time.sleep(0.1)


def _children(pid: int) -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(int(name)) == pid}


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def test_moving_a_dead_process_raises_no_such_process(tree: Tree, make: Make, puppet: Puppet, held: Process) -> None:
    ref = make("a")
    puppet.kill()
    with pytest.raises(NoSuchProcess, match=f"mon_groups/a: process {puppet.pid} ended") as caught:
        move(tree, ProcessTasks(held), ref)
    assert not isinstance(caught.value, ProcessChanged)


def test_moving_a_zombie_raises_no_such_process(tree: Tree, make: Make, puppet: Puppet) -> None:
    ref = make("a")
    child = puppet.make("fork")
    with Process.open(child) as process:
        os.kill(child, 9)
        while not process.has_ended():
            time.sleep(0.005)
        with pytest.raises(NoSuchProcess):
            move(tree, ProcessTasks(process), ref)
    assert tree.tasks(ref) == []


class _Killer(Tree):
    """The process is killed straight after its first thread was moved."""

    victim: Puppet

    def write_task_from(self, before: Membership, directory: str, tid: int) -> bool:
        is_written = super().write_task_from(before, directory, tid)
        self.victim.kill()
        return is_written


def test_a_process_that_ends_while_it_is_moved_has_changed(
    tree: Tree, make: Make, puppet: Puppet, held: Process
) -> None:
    ref = make("a")
    puppet.make("thread")
    killing = _Killer(tree.path, tree.simulation)
    killing.victim = puppet
    with pytest.raises(ProcessChanged, match=f"process {puppet.pid} ended"):
        move(killing, ProcessTasks(held), ref)


def test_move_into_a_removed_group_raises(tree: Tree, held: Process) -> None:
    with pytest.raises(NoSuchGroup, match="mon_groups/a"):
        move(tree, ProcessTasks(held), GroupRef("", "a"))


def test_threads_in_other_groups_stay_there_and_are_returned(
    tree: Tree, make: Make, puppet: Puppet, held: Process
) -> None:
    thread, other = puppet.make("thread"), puppet.make("thread")
    tree.write_task(make("b").path, other)
    assert move(tree, ProcessTasks(held), make("a")) == Moved(2, 2, frozenset({other}))
    assert where(tree, {puppet.pid, thread}) == {HERE}
    assert tree.membership(other) == Membership("", "b")


def test_threads_in_other_groups_are_taken_over_on_request(
    tree: Tree, make: Make, puppet: Puppet, held: Process
) -> None:
    other = puppet.make("thread")
    tree.write_task(make("b").path, other)
    assert move(tree, ProcessTasks(held), make("a"), MoveOptions(may_take=lambda _: True)) == Moved(2, 2)
    assert where(tree, {puppet.pid, other}) == {HERE}


class _Releaser(Tree):
    """A tree whose other group is removed by its owner while the first thread is moved."""

    def write_task_from(self, before: Membership, directory: str, tid: int) -> bool:
        is_written = super().write_task_from(before, directory, tid)
        self.remove(GroupRef("", "b"))
        return is_written


def test_thread_that_has_left_another_group_meanwhile_is_moved_and_not_returned(
    tree: Tree, make: Make, puppet: Puppet, held: Process
) -> None:
    other = puppet.make("thread")
    tree.write_task(make("b").path, other)
    assert move(_Releaser(tree.path, tree.simulation), ProcessTasks(held), make("a")) == Moved(2, 3)
    assert where(tree, {puppet.pid, other}) == {HERE}


# -- classes


@pytest.mark.allocation
def test_process_of_another_class_is_refused_with_the_kernels_message(
    tree: Tree, make: Make, class_: str, held: Process
) -> None:
    with pytest.raises(ClassMismatch) as caught:
        move(tree, ProcessTasks(held), make("a", class_))
    words = f"Can't move task to different control group; Error while processing task {held.pid}"
    assert caught.value.status == words
    assert f"{class_}/mon_groups/a/tasks" in str(caught.value)
    assert tree.membership(held.pid) == Membership("", "")


class _OfFewWords(Tree):
    """A tree that another agent works on too: its operations clear the kernel's words before they are read."""

    def last_cmd_status(self) -> str:
        return "ok\n"


@pytest.mark.allocation
def test_class_mismatch_is_raised_after_the_status_was_cleared(
    tree: Tree, make: Make, class_: str, held: Process
) -> None:
    """It was refused as KernelRefused, without a known reason."""
    few = _OfFewWords(tree.path, tree.simulation)
    with pytest.raises(ClassMismatch) as caught:
        move(few, ProcessTasks(held), make("a", class_))
    assert (caught.value.status, "follow" in caught.value.remedy) == ("", True)


@dataclass(frozen=True)
class _ChangesClass:
    """The tasks of a process that changes to class ``class_`` between the listing and the write."""

    tree: Tree
    of: ProcessTasks
    class_: str

    def threads(self) -> list[int]:
        return self.of.threads()

    def holds(self, tid: int, /) -> bool:
        self.tree.write_task(self.class_, tid)
        return self.of.holds(tid)

    def ended(self) -> str:
        return self.of.ended()


@pytest.mark.allocation
def test_a_task_that_changes_class_meanwhile_is_returned_with_its_class(
    tree: Tree, make: Make, class_: str, held: Process
) -> None:
    """The kernel's refusal of it failed the whole move."""
    ref = make("a")
    moved = move(tree, _ChangesClass(tree, ProcessTasks(held), class_), ref, MoveOptions(among=[ref]))
    assert moved == Moved(0, 2, in_other_classes={class_: frozenset({held.pid})})
    assert where(tree, {held.pid}) == {Membership(class_, "")}


@pytest.mark.allocation
def test_process_is_moved_through_the_class_on_request(
    tree: Tree, make: Make, class_: str, puppet: Puppet, held: Process
) -> None:
    thread = puppet.make("thread")
    assert move(tree, ProcessTasks(held), make("a", class_), MoveOptions(through_class=True)) == Moved(2, 2)
    assert where(tree, {puppet.pid, thread}) == {Membership(class_, "a")}
    assert move(
        tree, ProcessTasks(held), make("b"), MoveOptions(may_take=lambda _: True, through_class=True)
    ) == Moved(2, 2)
    assert where(tree, {puppet.pid, thread}) == {Membership("", "b")}


@pytest.mark.allocation
def test_a_process_in_the_groups_class_needs_no_change_of_class(
    tree: Tree, make: Make, class_: str, held: Process
) -> None:
    tree.write_task(class_, held.pid)
    assert move(tree, ProcessTasks(held), make("a", class_)) == Moved(1, 2)
    assert tree.membership(held.pid) == Membership(class_, "a")


# -- a control group


def test_a_cgroup_is_moved_with_all_below_it(
    tree: Tree, make: Make, cgroup: str, puppets: Callable[[], Puppet]
) -> None:
    above, below, outside = puppets(), puppets(), puppets()
    os.makedirs(f"{cgroup}/x/y")
    enter(cgroup, above.pid)
    enter(f"{cgroup}/x/y", below.pid)
    thread, child = below.make("thread"), below.make("fork")
    assert move(tree, CgroupTasks(cgroup), make("a")) == Moved(4, 2)
    assert where(tree, {above.pid, below.pid, thread, child}) == {HERE}
    assert tree.membership(outside.pid) == Membership("", "")


def test_a_cgroup_of_a_name_that_begins_the_same_is_another(
    tree: Tree, make: Make, cgroup: str, puppets: Callable[[], Puppet]
) -> None:
    inside, outside = puppets(), puppets()
    os.mkdir(f"{cgroup}/x")
    os.mkdir(f"{cgroup}/xy")
    enter(f"{cgroup}/x", inside.pid)
    enter(f"{cgroup}/xy", outside.pid)
    assert move(tree, CgroupTasks(f"{cgroup}/x"), make("a")) == Moved(1, 2)
    assert tree.membership(outside.pid) == Membership("", "")


def test_threads_in_threaded_cgroups_are_moved(tree: Tree, make: Make, cgroup: str, puppet: Puppet) -> None:
    thread, other = puppet.make("thread"), puppet.make("thread")
    enter(cgroup, puppet.pid)
    os.mkdir(f"{cgroup}/t")
    for name, text in (("cgroup.type", "threaded"), ("cgroup.threads", str(thread))):
        with open(f"{cgroup}/t/{name}", "w") as file:
            file.write(text)
    assert move(tree, CgroupTasks(f"{cgroup}/t"), make("b")) == Moved(1, 2)
    assert tree.membership(thread) == Membership("", "b")
    assert move(tree, CgroupTasks(cgroup), make("a"), MoveOptions(may_take=lambda _: True)) == Moved(3, 2)
    assert where(tree, {puppet.pid, thread, other}) == {HERE}


def test_empty_and_removed_cgroups_are_not_errors(tree: Tree, make: Make, cgroup: str) -> None:
    ref = make("a")
    assert move(tree, CgroupTasks(cgroup), ref) == Moved(0, 1)
    assert move(tree, CgroupTasks(f"{cgroup}/gone"), ref) == Moved(0, 1)


def test_control_group_with_its_tasks_in_the_group_needs_no_table_of_mounts(
    tree: Tree, make: Make, cgroup: str, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upkeep read it every five seconds for each container: 10 ms with 1000 mounts, and so a whole processor with
    500 containers."""
    enter(cgroup, puppet.pid)
    ref = make("a")
    assert move(tree, CgroupTasks(cgroup), ref) == Moved(1, 2)

    def looked() -> NoReturn:
        raise AssertionError("the table of mounts was read")

    monkeypatch.setattr("resctrlmond.resctrl.cgroups.mounts", looked)
    assert move(tree, CgroupTasks(cgroup), ref) == Moved(0, 1)


@pytest.mark.cgroup_v1
def test_control_group_of_version_1_is_moved_for_any_other_hierarchies(
    tree: Tree, make: Make, cgroup: str, cgroup_v1: str, puppet: Puppet
) -> None:
    thread = puppet.make("thread")
    enter(cgroup, puppet.pid)
    enter(cgroup_v1, puppet.pid)
    assert move(tree, CgroupTasks(cgroup_v1), make("a")) == Moved(2, 2)
    assert where(tree, {puppet.pid, thread}) == {HERE}


class _Mover(Tree):
    """A task leaves the control group just before its number is written."""

    away: tuple[str, int]

    def membership(self, tid: int) -> Membership:
        found = super().membership(tid)
        enter(*self.away)
        return found


def test_a_task_that_left_the_cgroup_stays_where_it_is(tree: Tree, make: Make, cgroup: str, puppet: Puppet) -> None:
    os.mkdir(f"{cgroup}/x")
    os.mkdir(f"{cgroup}/y")
    enter(f"{cgroup}/x", puppet.pid)
    moving = _Mover(tree.path, tree.simulation)
    moving.away = (f"{cgroup}/y", puppet.pid)
    assert move(moving, CgroupTasks(f"{cgroup}/x"), make("a")) == Moved(0, 2)
    assert tree.membership(puppet.pid) == Membership("", "")
