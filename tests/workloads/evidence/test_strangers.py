# SPDX-License-Identifier: Apache-2.0
"""Tasks of other programs in a group of a workload make its totals inexact."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import Found, GroupRef, Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.errors import LimitExceeded
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from tests.workloads.conftest import Host, assignment, own_host

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def one_rmid(tmp_path: Path) -> Iterator[Host]:
    """A machine with an RMID for one group, which the next group gets at once."""
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    with Simulation(str(tmp_path / "resctrl"), "monitoring-only", 2):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        yield host
        host.clean()


@pytest.fixture
def overlooked(one_rmid: Host, process: Start) -> int:
    """A task that kept its RMID when the group of another program was removed."""
    pid = process().pid
    foreign = one_rmid.make_foreign("theirs")
    one_rmid.tree.write_task(foreign.path, pid)
    Control(one_rmid.mountpoint).overlook(pid)
    os.rmdir(one_rmid.tree.full_path(foreign))
    return pid


def test_a_task_that_an_rmdir_overlooked_is_moved_out_before_the_baseline(
    one_rmid: Host, overlooked: int, process: Start
) -> None:
    """It was counted in the next group that got the RMID, and the totals were exact."""
    pid = process().pid
    record = assign(one_rmid.ctx, assignment("k", pid)).workload
    assert baseline_of(record) is Quality.EXACT
    assert one_rmid.tree.tasks(record.first.ref) == [pid]
    assert one_rmid.tree.membership(overlooked) == Membership("", ""), "it is where the rmdir should have put it"


def test_a_task_that_another_call_moves_out_of_a_new_group_stays_in_its_own(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may start from a task that kept its RMID: its hook moves it between the list and the move."""
    task, new = process().pid, GroupRef("", "k")
    create_group, tasks, write_task = Tree.create, Tree.tasks, Tree.write_task
    with own_host(tmp_path, "monitoring-only", 4) as host:
        mine = create(host.ctx, "mine", owner="other").first.ref

        def create_occupied(self: Tree, ref: GroupRef, nonce: int) -> Found:
            found = create_group(self, ref, nonce)
            write_task(self, ref.path, task)
            return found

        def list_and_start(self: Tree, ref: GroupRef) -> list[int]:
            found = tasks(self, ref)
            if ref == new and task in found:
                write_task(self, mine.path, task)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Tree, "create", create_occupied)
            patch.setattr(Tree, "tasks", list_and_start)
            record = create(host.ctx, "k", owner="other")
        assert host.tree.membership(task) == Membership("", "mine")
        assert baseline_of(record) is Quality.EXACT
        host.clean()


def test_a_task_that_cannot_be_moved_out_of_a_new_group_makes_it_estimated(
    one_rmid: Host, overlooked: int, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out = Tree.take_out

    def put_again(self: Tree, ref: GroupRef, tid: int) -> None:
        """Behave like a task that always forks: another task is in the group each time."""
        take_out(self, ref, tid)
        if tid == overlooked:
            self.write_task(ref.path, tid)

    monkeypatch.setattr(Tree, "take_out", put_again)
    record = assign(one_rmid.ctx, assignment("k", process().pid)).workload
    assert baseline_of(record) is Quality.ESTIMATED
    totals = read(one_rmid.ctx, "k")[2]
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all("1 were in it at its baseline, and some may have stayed" in total.reason for total in totals)


def test_a_task_in_a_group_that_was_created_again_is_marked_though_the_assign_fails(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux 6.1 moves no groups. The undo restored the quality of the group that had been removed."""
    stranger = process().pid
    gold = GroupRef("gold", "k").path
    create_group, take_out = Tree.create, Tree.take_out

    def create_occupied(self: Tree, ref: GroupRef, nonce: int) -> Found:
        found = create_group(self, ref, nonce)
        self.write_task(gold, stranger)
        return found

    def put_again(self: Tree, ref: GroupRef, tid: int) -> None:
        """Behave like a task that always forks: another task is in the group each time."""
        take_out(self, ref, tid)
        if tid == stranger:
            self.write_task(gold, tid)

    with own_host(tmp_path, "intel-rdt", 8, kernel="6.1") as host:
        host.make_class("gold")
        host.tree.write_task("gold", stranger)
        assert baseline_of(create(host.ctx, "k", owner="other")) is Quality.EXACT
        monkeypatch.setattr(Tree, "create", create_occupied)
        monkeypatch.setattr(Tree, "take_out", put_again)
        monkeypatch.setattr("resctrlmond.workloads.records.store.MAX_LIVING_MEMBERS", 0)
        with pytest.raises(LimitExceeded):
            assign(host.ctx, assignment("k", process().pid, class_="gold", allow_class_change=True))
        after = host.get("k")
        assert (after.first.class_, baseline_of(after)) == ("gold", Quality.ESTIMATED)
