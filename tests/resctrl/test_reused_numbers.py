# SPDX-License-Identifier: Apache-2.0
"""A pid that the kernel reuses between the check and the write: the other task is moved back."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from resctrlmond.resctrl import tree as tree_module
from resctrlmond.resctrl.errors import NoSuchProcess
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import CgroupTasks, Moved, MoveOptions, ProcessTasks, move, put_back
from resctrlmond.resctrl.tree import GroupRef, Tree

from .conftest import Make
from .puppets import Puppet, pause_for_start_time


class NumberReuser(Tree):
    """Just before the number is written, it is given to another task."""

    victim = 0
    reuse: Callable[[], int]

    def before_write(self, tid: int) -> None:
        if tid == self.victim:
            self.victim = 0
            pause_for_start_time()
            assert self.reuse() == tid, "the number could not be had again"


@pytest.fixture
def reuser(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> NumberReuser:
    made, write = NumberReuser(tree.path, tree.simulation), tree_module._write

    def write_later(path: str, command: bytes) -> None:
        # After the last look at the task.
        if os.path.basename(path) == "tasks" and command.strip():
            made.before_write(int(command))
        write(path, command)

    monkeypatch.setattr(tree_module, "_write", write_later)
    return made


@pytest.fixture
def nursery(tree: Tree, make: Make, puppets: Callable[[], Puppet]) -> Puppet:
    """A process in a group of its own, which makes the strangers."""
    made = puppets()
    tree.write_task(make("theirs").path, made.pid)
    return made


THEIRS = Membership("", "theirs")


def test_task_with_a_reused_pid_is_moved_back_to_the_group_of_its_parent(
    reuser: NumberReuser, make: Make, nursery: Puppet, puppet: Puppet, held: Process
) -> None:
    def reuse() -> int:
        puppet.kill()
        return nursery.make(f"fork-as {puppet.pid}")

    reuser.victim, reuser.reuse = puppet.pid, reuse
    ref = make("a")
    with pytest.raises(NoSuchProcess, match=f"process {puppet.pid} ended"):
        move(reuser, ProcessTasks(held), ref)
    assert reuser.membership(puppet.pid) == THEIRS
    assert reuser.tasks(ref) == []


def test_thread_with_a_reused_number_is_moved_back_to_the_group_of_its_process(
    reuser: NumberReuser, make: Make, nursery: Puppet, puppet: Puppet, held: Process
) -> None:
    def reuse() -> int:
        puppet.kill()
        return nursery.make(f"thread-as {puppet.pid}")

    reuser.victim, reuser.reuse = puppet.pid, reuse
    with pytest.raises(NoSuchProcess):
        move(reuser, ProcessTasks(held), make("a"))
    assert reuser.membership(puppet.pid) == THEIRS


def test_task_with_a_reused_pid_and_no_group_is_moved_out_again(
    reuser: NumberReuser, make: Make, puppets: Callable[[], Puppet], puppet: Puppet, held: Process
) -> None:
    other = puppets()

    def reuse() -> int:
        puppet.kill()
        return other.make(f"fork-as {puppet.pid}")

    reuser.victim, reuser.reuse = puppet.pid, reuse
    with pytest.raises(NoSuchProcess):
        move(reuser, ProcessTasks(held), make("a"))
    assert reuser.membership(puppet.pid) == Membership("", "")


def test_a_strangers_group_that_was_removed_leaves_it_in_its_class(
    reuser: NumberReuser, make: Make, nursery: Puppet, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = reuser.membership

    def remove_group(tid: int) -> Membership:
        found = membership(tid)
        if tid == nursery.pid:
            reuser.remove(GroupRef("", "theirs"))
        return found

    def reuse() -> int:
        puppet.kill()
        return nursery.make(f"fork-as {puppet.pid}")

    monkeypatch.setattr(reuser, "membership", remove_group)
    reuser.victim, reuser.reuse = puppet.pid, reuse
    with Process.open(puppet.pid) as held, pytest.raises(NoSuchProcess):
        move(reuser, ProcessTasks(held), make("a"))
    monkeypatch.setattr(reuser, "membership", membership)
    assert reuser.membership(puppet.pid) == Membership("", "")


@pytest.mark.allocation
def test_task_with_a_reused_pid_is_moved_back_to_its_class(
    reuser: NumberReuser, make: Make, class_: str, puppets: Callable[[], Puppet]
) -> None:
    nursery, puppet = puppets(), puppets()
    reuser.write_task(class_, nursery.pid)
    reuser.write_task(make("theirs", class_).path, nursery.pid)
    reuser.write_task(class_, puppet.pid)

    def reuse() -> int:
        puppet.kill()
        return nursery.make(f"fork-as {puppet.pid}")

    # Through the class of the group, which changes the stranger's allocation until it is given back.
    reuser.victim, reuser.reuse = puppet.pid, reuse
    with Process.open(puppet.pid) as held, pytest.raises(NoSuchProcess):
        move(reuser, ProcessTasks(held), make("a"), MoveOptions(through_class=True))
    assert reuser.membership(puppet.pid) == Membership(class_, "theirs")


def test_a_new_thread_of_the_same_process_stays(
    reuser: NumberReuser, make: Make, puppet: Puppet, held: Process
) -> None:
    thread = puppet.make("short-thread")

    def reuse() -> int:
        puppet.do("end-thread")
        return puppet.make(f"thread-as {thread}")

    reuser.victim, reuser.reuse = thread, reuse
    ref = make("a")
    moved = move(reuser, ProcessTasks(held), ref)
    assert (moved.passes, moved.not_moved) == (2, frozenset())
    assert {reuser.membership(tid) for tid in puppet.threads()} == {Membership("", "a")}


def test_task_with_a_reused_pid_of_a_control_group_is_moved_back(
    reuser: NumberReuser, make: Make, cgroup: str, nursery: Puppet, puppet: Puppet
) -> None:
    with open(f"{cgroup}/cgroup.procs", "w") as procs:
        procs.write(str(puppet.pid))

    def reuse() -> int:
        puppet.kill()
        return nursery.make(f"fork-as {puppet.pid}")

    reuser.victim, reuser.reuse = puppet.pid, reuse
    ref = make("a")
    assert move(reuser, CgroupTasks(cgroup), ref) == Moved(0, 2)
    assert reuser.membership(puppet.pid) == THEIRS
    assert reuser.tasks(ref) == []
    assert os.path.exists(f"/proc/{puppet.pid}")


def test_undo_does_not_move_a_task_with_a_reused_pid(
    tree: Tree, make: Make, nursery: Puppet, puppet: Puppet, held: Process
) -> None:
    """The process that was moved has ended, and its number is a stranger's: the stranger was moved in its stead."""
    ref = make("a")
    past: dict[int, tuple[int, Membership]] = {}
    move(tree, ProcessTasks(held), ref, MoveOptions(origins=past))
    assert set(past) == {puppet.pid}
    puppet.kill()
    pause_for_start_time()
    assert nursery.make(f"fork-as {puppet.pid}") == puppet.pid, "the number could not be had again"
    put_back(tree, past, [Membership(ref.class_, ref.name)])
    assert tree.membership(puppet.pid) == THEIRS


def test_undoing_moves_leaves_a_later_task_with_the_number_in_no_group(
    tree: Tree, make: Make, puppets: Callable[[], Puppet], puppet: Puppet, held: Process
) -> None:
    other, before, after = puppets(), make("before"), make("after")
    tree.write_task(before.path, puppet.pid)
    past: dict[int, tuple[int, Membership]] = {}
    move(tree, ProcessTasks(held), after, MoveOptions(may_take=lambda _: True, origins=past))
    puppet.kill()
    pause_for_start_time()
    assert other.make(f"fork-as {puppet.pid}") == puppet.pid, "the number could not be had again"
    put_back(tree, past, [Membership(after.class_, after.name)])
    assert tree.membership(puppet.pid) == Membership("", "")


def test_undoing_moves_puts_each_thread_back_where_it_was(
    tree: Tree, make: Make, puppet: Puppet, held: Process
) -> None:
    before, after = make("before"), make("after")
    thread = puppet.make("thread")
    tree.write_task(before.path, thread)
    past: dict[int, tuple[int, Membership]] = {}
    move(tree, ProcessTasks(held), after, MoveOptions(may_take=lambda _: True, origins=past))
    assert set(tree.tasks(after)) == {puppet.pid, thread}
    put_back(tree, past, [Membership(after.class_, after.name)])
    assert tree.membership(puppet.pid) == Membership("", "")
    assert tree.membership(thread) == Membership("", "before")
