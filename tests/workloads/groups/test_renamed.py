# SPDX-License-Identifier: Apache-2.0
"""Another program renames groups, within a class or into another: the workload continues in the same group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlctl.workloads.tree_view import TreeView
from resctrlmond.resctrl.errors import GroupExists
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import MARK, Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]

PLACES = pytest.mark.parametrize("to", [GroupRef("", "renamed"), GroupRef("gold", "k"), GroupRef("gold", "renamed")])
NOTICED = pytest.mark.parametrize("noticed", ["by the tick", "by a call", "at the start"])


def rename(host: Host, ref: GroupRef, to: GroupRef) -> None:
    """Rename a group as another program does. The kernel moves its tasks too."""
    if to.class_ and not host.tree.has_class(to.class_):
        host.make_class(to.class_)
    host.tree.rename(ref, to)


def notice(host: Host, noticed: str) -> None:
    if noticed == "by the tick":
        host.manager.maintenance.tick()
    elif noticed == "by a call":
        create(host.ctx, "k", owner="another")
    else:
        host.restart()


@PLACES
@NOTICED
def test_renamed_group_still_belongs_to_the_workload(host: Host, process: Start, to: GroupRef, noticed: str) -> None:
    """It was called lost, and adopted with an unknown baseline, or replaced by a new and empty group."""
    child = process()
    before = assign(host.ctx, assignment("k", child.pid)).workload
    rename(host, before.first.ref, to)
    notice(host, noticed)
    host.manager.maintenance.tick()
    record = host.get("k")
    assert (record.first.ref, record.first.nonce, record.state) == (to, before.first.nonce, State.ACTIVE)
    assert (record.generation, baseline_of(record), record.members) == (1, Quality.EXACT, before.members)
    assert host.tree.membership(child.pid) == Membership(to.class_, to.name)
    assert [found.ref for found in host.marked_groups()] == [to]
    assert host.manager.problems == []
    link = os.readlink(Path(host.run, "groups/k/mon_data/mon_L3_00/llc_occupancy"))
    assert link == host.tree.full_path(to) + "/mon_data/mon_L3_00/llc_occupancy"
    host.check()
    another = process()
    assign(host.ctx, assignment("k", another.pid, member="another"))
    assert host.tree.membership(another.pid).group == to.name
    if noticed == "by a call":
        release(host.ctx, "k", owner="another")
    released = release(host.ctx, "k", owner="test")
    assert released.completed
    assert {total.quality for total in released.totals} == {Quality.EXACT}
    assert host.marked_groups() == []


@PLACES
def test_a_renamed_group_is_read_and_released_before_any_tick(host: Host, process: Start, to: GroupRef) -> None:
    child = process()
    before = assign(host.ctx, assignment("k", child.pid)).workload
    rename(host, before.first.ref, to)
    _, readings, totals = read(host.ctx, "k")
    assert readings
    assert {total.quality for total in totals} == {Quality.EXACT}
    released = release(host.ctx, "k", owner="test")
    assert (released.workload.state, host.marked_groups()) == (State.COMPLETED, [])
    assert {total.quality for total in released.totals} == {Quality.EXACT}


def test_further_groups_are_followed_as_well(host: Host, process: Start) -> None:
    host.make_class("gold")
    first, second = process(), process()
    host.tree.write_task("gold", second.pid)
    assign(host.ctx, assignment("k", first.pid, member="first"))
    before = assign(host.ctx, assignment("k", second.pid, member="second")).workload
    rename(host, before.groups[1:][0].ref, GroupRef("gold", "renamed"))
    rename(host, before.first.ref, GroupRef("", "first"))
    host.manager.maintenance.tick()
    record = host.get("k")
    assert [group.ref for group in record.groups] == [GroupRef("", "first"), GroupRef("gold", "renamed")]
    assert baseline_of(record) is baseline_of(before)
    host.check()


def test_a_group_that_is_swapped_for_a_foreign_one_is_found(host: Host, process: Start) -> None:
    record = assign(host.ctx, assignment("k", process().pid)).workload
    host.tree.rename(record.first.ref, GroupRef("", "renamed"))
    foreign = host.make_foreign("k")
    host.manager.maintenance.tick()
    assert host.get("k").first.ref == GroupRef("", "renamed")
    assert host.tree.find(foreign) is not None
    host.check()


def test_group_with_the_name_of_another_workload_does_not_become_its_group(host: Host, process: Start) -> None:
    """There was no check since the rename, so no record has this name yet."""
    child = process()
    record = assign(host.ctx, assignment("k", child.pid)).workload
    host.tree.rename(record.first.ref, GroupRef("", "other"))
    with pytest.raises(GroupExists):
        create(host.ctx, "other", owner="test")
    host.manager.maintenance.tick()
    assert baseline_of(host.get("k")) is Quality.EXACT
    assert host.tree.membership(child.pid).group == "other"
    host.check()


@pytest.mark.parametrize("name", [b"k\xff", b"info"])
def test_a_group_with_a_name_that_no_record_can_hold_is_renamed_back(host: Host, process: Start, name: bytes) -> None:
    before = assign(host.ctx, assignment("k", process().pid)).workload
    host.tree.rename(before.first.ref, GroupRef("", os.fsdecode(name)))
    host.manager.maintenance.tick()
    assert host.get("k") == before
    host.check()


def test_a_renamed_group_is_shown_without_the_daemon(host: Host, process: Start) -> None:
    before = assign(host.ctx, assignment("k", process().pid)).workload
    host.tree.rename(before.first.ref, GroupRef("", "renamed"))
    view = TreeView(host.tree, MARK, {"k": before}, host.run)
    assert [workload.key for workload in view.workloads().workloads] == ["k"]
    shown = view.read("k")
    assert shown.workload.path == host.tree.full_path(GroupRef("", "renamed"))
    assert shown.readings
