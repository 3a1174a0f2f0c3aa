# SPDX-License-Identifier: Apache-2.0
"""Making monitoring groups: mark, nonce, refusals, exhaustion, and nothing left of a failure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from resctrlmond.resctrl.errors import (
    GroupExists,
    KernelRefused,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    RmidsExhausted,
)
from resctrlmond.resctrl.tree import Found, GroupRef, Tree

from .conftest import NONCE, Make, mkdir, patiently
from .puppets import Puppet

MARK = 4242
A = GroupRef("", "a")
B = GroupRef("", "b")


@contextlib.contextmanager
def effective_group(gid: int) -> Iterator[None]:
    before = os.getegid()
    os.setegid(gid)
    try:
        yield
    finally:
        os.setegid(before)


def test_a_group_bears_the_makers_group_id_from_birth(tree: Tree) -> None:
    with effective_group(MARK):
        found = patiently(lambda: tree.create(A, NONCE))
    assert found == Found(A, MARK, NONCE, f"{tree.path}/mon_groups/a", found.inode)
    assert os.stat(f"{found.path}/mon_data").st_gid == MARK
    assert tree.scan() == [found]
    assert tree.find(A) == found


def test_an_administrators_group_is_foreign(tree: Tree, make: Make) -> None:
    mkdir(f"{tree.path}/mon_groups/theirs")
    with effective_group(MARK):
        make("own")
    assert {found.ref.name: found.gid for found in tree.scan()} == {"own": MARK, "theirs": 0}


def test_mark_and_nonce_stay_over_a_rename(tree: Tree) -> None:
    with effective_group(MARK):
        made = patiently(lambda: tree.create(A, NONCE))
    tree.rename(A, B)
    found = tree.find(B)
    assert found
    assert (found.gid, found.nonce) == (made.gid, made.nonce) == (MARK, NONCE)
    assert tree.find(A) is None


def test_the_nonce_stays_while_the_group_is_used(tree: Tree, make: Make, puppet: Puppet) -> None:
    ref = make("a")
    tree.write_task(ref.path, puppet.pid)
    tree.read(ref)
    tree.tasks(ref)
    found = tree.find(ref)
    assert found
    assert found.nonce == NONCE


def test_group_created_again_has_another_nonce(tree: Tree, make: Make) -> None:
    ref = make("a")
    tree.remove(ref)
    mkdir(tree.full_path(ref))
    found = tree.find(ref)
    assert found
    assert found.nonce != NONCE


def test_a_nonce_can_be_given_again(tree: Tree, make: Make) -> None:
    ref = make("a")
    assert tree.set_nonce(ref, NONCE + 1).nonce == NONCE + 1
    with pytest.raises(NoSuchGroup):
        tree.set_nonce(B, NONCE)


def test_an_existing_name_is_group_exists(tree: Tree, make: Make) -> None:
    ref = make("a")
    with pytest.raises(GroupExists, match=r"mon_groups/a: .*\(EEXIST\)"):
        tree.create(ref, NONCE + 1)
    found = tree.find(ref)
    assert found
    assert found.nonce == NONCE


@pytest.mark.parametrize("class_", ["nowhere", "info", "mon_data", "tasks", "mon_groups"])
def test_create_outside_a_class_raises_no_such_class(tree: Tree, class_: str) -> None:
    with pytest.raises(NoSuchClass, match=f"{class_}: there is no such class. 'resctrlctl status' lists the classes"):
        tree.create(GroupRef(class_, "a"), NONCE)
    assert not tree.has_class(class_)
    assert tree.scan() == []


def test_a_name_that_the_kernel_refuses(tree: Tree) -> None:
    with pytest.raises(KernelRefused, match=r"\(EPERM\)"):
        tree.create(GroupRef("", "mon_groups"), NONCE)
    with pytest.raises(KernelRefused, match=r"\(EINVAL\)"):
        tree.create(GroupRef("", "a\nb"), NONCE)
    assert tree.scan() == []


def test_status_of_a_failed_task_write_is_not_reported_for_a_later_mkdir(tree: Tree, make: Make) -> None:
    ref = make("a")
    with pytest.raises(NoSuchProcess) as of_task:
        tree.write_task(ref.path, 2**22 + 1)
    assert of_task.value.status == "No task 4194305; Error while processing task 4194305"
    assert tree.last_cmd_status().startswith("No task")
    with pytest.raises(GroupExists) as of_mkdir:
        tree.create(ref, NONCE)
    assert of_mkdir.value.status == ""
    # The daemon cleared it: mkdir before Linux 6.16 does not, and here the VFS refuses before it calls resctrl.
    assert tree.last_cmd_status() == "ok\n"


def test_status_of_a_failed_task_write_is_not_reported_for_a_later_rmdir(tree: Tree, make: Make) -> None:
    with pytest.raises(NoSuchProcess):
        tree.write_task(make("a").path, 2**22 + 1)
    with pytest.raises(KernelRefused, match=r"\(EPERM\)") as caught:
        tree.remove(GroupRef("", "a/mon_data"))
    assert caught.value.status == ""


class _Unowned(Tree):
    """A tree whose process does not own the group when it sets the nonce."""

    def set_nonce(self, ref: GroupRef, nonce: int) -> Found:
        os.seteuid(65534)
        try:
            return super().set_nonce(ref, nonce)
        finally:
            os.seteuid(0)


def test_nothing_is_left_when_the_nonce_cannot_be_set(tree: Tree) -> None:
    with pytest.raises(KernelRefused, match=r"mon_groups/a: cannot mark the monitoring group: .*\(EPERM\)"):
        patiently(lambda: _Unowned(tree.path, tree.simulation).create(A, NONCE))
    assert tree.scan() == []


class _Robbed(Tree):
    """Remove the group as soon as it exists, as another program might."""

    def set_nonce(self, ref: GroupRef, nonce: int) -> Found:
        os.rmdir(self.full_path(ref))
        return super().set_nonce(ref, nonce)


def test_group_that_is_removed_before_it_is_marked_raises_no_such_group(tree: Tree) -> None:
    with pytest.raises(NoSuchGroup):
        patiently(lambda: _Robbed(tree.path, tree.simulation).create(A, NONCE))


class _RobbedOfARefusal(Tree):
    def set_nonce(self, ref: GroupRef, nonce: int) -> Found:
        os.rmdir(self.full_path(ref))
        raise KernelRefused("cannot mark the monitoring group")


def test_undo_succeeds_if_the_group_is_already_removed(tree: Tree) -> None:
    with pytest.raises(KernelRefused, match="cannot mark"):
        patiently(lambda: _RobbedOfARefusal(tree.path, tree.simulation).create(A, NONCE))


def test_out_of_rmids_is_full_and_then_limbo(tree: Tree, make: Make) -> None:
    least = min(capacity.rmids for capacity in tree.capacity())
    for number in range(least - len(tree.classes()) - len(tree.scan())):
        make(f"g{number}")
    with pytest.raises(RmidsExhausted) as full:
        tree.create(A, NONCE)
    assert (full.value.in_limbo, full.value.status) == (False, "Out of RMIDs")
    assert "(ENOSPC)" in str(full.value)
    assert "resctrlctl list" in full.value.remedy
    tree.remove(GroupRef("", "g0"))
    if any("llc_occupancy" in capacity.events for capacity in tree.capacity()):
        with pytest.raises(RmidsExhausted) as limbo:
            tree.create(A, NONCE)
        assert (limbo.value.in_limbo, limbo.value.status) == (True, "Out of RMIDs")
        assert "(EBUSY)" in str(limbo.value)
        assert "after at least 1 s" in limbo.value.remedy
    assert patiently(lambda: tree.create(A, NONCE)).nonce == NONCE
