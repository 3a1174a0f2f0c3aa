# SPDX-License-Identifier: Apache-2.0
"""Members of groups: threads move singly, inherit at fork, are listed in tasks, and are in one group only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .actors import Actor
from .target import Resctrl


@pytest.fixture
def a(fs: Resctrl) -> str:
    return fs.create("mon_groups/a")


@pytest.fixture
def b(fs: Resctrl) -> str:
    return fs.create("mon_groups/b")


def put(fs: Resctrl, group: str, tid: int) -> None:
    fs.write(f"{group}/tasks", tid)


def test_a_process_number_moves_one_thread(fs: Resctrl, a: str, actor: Actor) -> None:
    """Writing a process moves its first thread only; the others stay."""
    other = actor.thread()
    put(fs, a, actor.pid)
    assert fs.members(a) == {actor.pid}
    assert (fs.groups_of(actor.pid), fs.groups_of(other)) == (("/", "a"), ("/", ""))


def test_a_thread_moves_alone(fs: Resctrl, a: str, actor: Actor) -> None:
    """A thread's number moves that thread, not its process."""
    tid = actor.thread()
    put(fs, a, tid)
    assert fs.members(a) == {tid}


def test_a_child_is_in_its_parents_group(fs: Resctrl, a: str, actor: Actor) -> None:
    """A forked process begins in the group of its parent, and so do its own children."""
    put(fs, a, actor.pid)
    child = actor.fork()
    grandchild = child.fork()
    assert fs.members(a) == {actor.pid, child.pid, grandchild.pid}


def test_earlier_children_stay(fs: Resctrl, a: str, actor: Actor) -> None:
    """Children and threads from before the move do not follow."""
    child, thread = actor.fork(), actor.thread()
    put(fs, a, actor.pid)
    assert fs.members(a) == {actor.pid}
    assert fs.groups_of(child.pid) == fs.groups_of(thread) == ("/", "")


def test_a_new_thread_is_in_the_group_of_its_creator(fs: Resctrl, a: str, actor: Actor) -> None:
    """A thread that is started by a member is a member."""
    put(fs, a, actor.pid)
    tid = actor.thread()
    assert fs.members(a) == {actor.pid, tid}


def test_a_child_is_in_the_group_of_the_thread_that_forked(fs: Resctrl, a: str, b: str, actor: Actor) -> None:
    """The children of threads in two groups begin in the group of the thread that forked them."""
    tid = actor.thread()
    put(fs, a, actor.pid)
    put(fs, b, tid)
    of_leader, of_thread = actor.fork(), actor.fork(thread=tid)
    assert fs.members(a) == {actor.pid, of_leader.pid}
    assert fs.members(b) == {tid, of_thread.pid}


def test_exec_changes_nothing(fs: Resctrl, a: str, actor: Actor) -> None:
    """exec does not change the group."""
    put(fs, a, actor.pid)
    actor.exec()
    assert fs.members(a) == {actor.pid}


def test_ended_thread_is_not_listed(fs: Resctrl, a: str, actor: Actor) -> None:
    """A thread that has ended is not listed."""
    tid = actor.thread()
    put(fs, a, tid)
    assert fs.members(a) == {tid}
    actor.call("end_thread", tid=tid)
    assert fs.members(a) == set()


def test_a_zombie_is_listed_until_it_is_reaped(fs: Resctrl, a: str, actor: Actor) -> None:
    """A process that has ended is listed until its parent reaps it."""
    put(fs, a, actor.pid)
    child = actor.fork()
    child.exit()
    assert fs.members(a) == {actor.pid, child.pid}
    actor.call("reap", pid=child.pid)
    assert fs.members(a) == {actor.pid}


def test_moving_between_monitoring_groups(fs: Resctrl, a: str, b: str, actor: Actor) -> None:
    """A task moves from one monitoring group to another immediately, and is in only one."""
    put(fs, a, actor.pid)
    put(fs, b, actor.pid)
    assert (fs.members(a), fs.members(b)) == (set(), {actor.pid})


def test_roots_tasks_takes_out_of_a_monitoring_group(fs: Resctrl, a: str, actor: Actor) -> None:
    """A write to root's tasks removes the task from its monitoring group, even if root lists no task."""
    put(fs, a, actor.pid)
    put(fs, ".", actor.pid)
    assert (fs.members(a), fs.groups_of(actor.pid)) == (set(), ("/", ""))


def test_children_of_a_member_that_left(fs: Resctrl, a: str, actor: Actor) -> None:
    """Children of a process that has left the group are not in the group."""
    put(fs, a, actor.pid)
    put(fs, ".", actor.pid)
    child = actor.fork()
    assert fs.groups_of(child.pid) == ("/", "")
    assert fs.members(a) == set()


def test_a_child_stays_in_its_group_when_its_parent_ends(fs: Resctrl, a: str, actor: Actor) -> None:
    """A process stays in its group when its parent ends."""
    child = actor.fork()
    put(fs, a, child.pid)
    grandchild = child.fork()
    assert fs.members(a) == {child.pid, grandchild.pid}
    child.exit()
    actor.call("reap", pid=child.pid)
    assert fs.members(a) == {grandchild.pid}


def test_tasks_has_one_decimal_number_in_each_line(fs: Resctrl, a: str, actor: Actor) -> None:
    """tasks has one decimal number in each line; that of an empty group is empty."""
    assert fs.read(a, "tasks") == ""
    put(fs, a, actor.pid)
    assert fs.read(a, "tasks") == f"{actor.pid}\n"


@pytest.mark.monitoring_only
def test_root_lists_no_task_without_allocation(fs: Resctrl, a: str, actor: Actor) -> None:
    """With monitoring only, root's tasks reads empty, although tasks are in root."""
    put(fs, a, actor.pid)
    assert fs.read("tasks") == ""
    assert fs.members(a) == {actor.pid}


@pytest.mark.allocation
def test_root_lists_the_tasks_of_its_monitoring_groups(fs: Resctrl, a: str, actors: Callable[[], Actor]) -> None:
    """A control group also lists the tasks of its monitoring groups."""
    inside, outside = actors(), actors()
    put(fs, a, inside.pid)
    assert {inside.pid, outside.pid} <= fs.members("")


@pytest.mark.allocation
def test_a_control_group_lists_its_own(fs: Resctrl, actors: Callable[[], Actor]) -> None:
    """A control group lists its tasks and those of its monitoring groups; root lists neither."""
    inner, outer = actors(), actors()
    fs.create("class")
    fs.create("class/mon_groups/m")
    fs.write("class/tasks", f"{inner.pid},{outer.pid}")
    put(fs, "class/mon_groups/m", inner.pid)
    assert fs.members("class") == {inner.pid, outer.pid}
    assert fs.members("class/mon_groups/m") == {inner.pid}
    assert not {inner.pid, outer.pid} & fs.members("")


@pytest.mark.allocation
def test_a_control_groups_tasks_takes_out_of_a_monitoring_group(fs: Resctrl, a: str, actor: Actor) -> None:
    """A move to another control group removes the task from its monitoring group."""
    fs.create("class")
    put(fs, a, actor.pid)
    put(fs, "class", actor.pid)
    assert (fs.groups_of(actor.pid), fs.members(a)) == (("class", ""), set())


@pytest.mark.allocation
def test_the_control_groups_own_tasks_takes_out_of_its_monitoring_group(fs: Resctrl, actor: Actor) -> None:
    """A write to the tasks of the same control group removes the task from its monitoring group."""
    fs.create("class")
    fs.create("class/mon_groups/m")
    put(fs, "class", actor.pid)
    put(fs, "class/mon_groups/m", actor.pid)
    assert fs.groups_of(actor.pid) == ("class", "m")
    put(fs, "class", actor.pid)
    assert fs.groups_of(actor.pid) == ("class", "")


@pytest.mark.allocation
def test_children_of_a_control_groups_task(fs: Resctrl, actor: Actor) -> None:
    """A child is in its parent's control group and monitoring group."""
    fs.create("class")
    fs.create("class/mon_groups/m")
    put(fs, "class", actor.pid)
    first = actor.fork()
    put(fs, "class/mon_groups/m", actor.pid)
    second = actor.fork()
    assert (fs.groups_of(first.pid), fs.groups_of(second.pid)) == (("class", ""), ("class", "m"))


def test_names_of_groups_in_proc(fs: Resctrl, actor: Actor) -> None:
    """``/proc/TID/cpu_resctrl_groups`` has the name of the group, with any characters."""
    fs.create("mon_groups/with space")
    put(fs, "mon_groups/with space", actor.pid)
    assert fs.groups_of(actor.pid) == ("/", "with space")
