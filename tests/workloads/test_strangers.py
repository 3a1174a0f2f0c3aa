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
from resctrlmond.workloads.accounting import Quality
from resctrlmond.workloads.errors import LimitExceeded
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
    record = one_rmid.manager.assign(assignment("k", pid)).workload
    assert record.first.baseline is Quality.EXACT
    assert one_rmid.tree.tasks(record.first.ref) == [pid]
    assert one_rmid.tree.membership(overlooked) == Membership("", ""), "it is where the rmdir should have put it"


def test_a_task_that_cannot_be_moved_out_of_a_new_group_makes_it_estimated(
    one_rmid: Host, overlooked: int, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task = Tree.write_task
    foreign = GroupRef("", "k").path

    def put_again(self: Tree, directory: str, tid: int) -> None:
        """Behave like a task that always forks: another task is in the group each time."""
        write_task(self, directory, tid)
        if tid == overlooked:
            write_task(self, foreign, tid)

    monkeypatch.setattr(Tree, "write_task", put_again)
    record = one_rmid.manager.assign(assignment("k", process().pid)).workload
    assert record.first.baseline is Quality.ESTIMATED
    totals = one_rmid.manager.read("k")[2]
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all("tasks that do not belong to it were in the group" in total.reason for total in totals)


def test_a_task_in_a_group_that_was_created_again_is_marked_though_the_assign_fails(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux 6.1 moves no groups. The undo restored the quality of the group that had been removed."""
    stranger = process().pid
    gold = GroupRef("gold", "k").path
    create, write_task = Tree.create, Tree.write_task

    def create_occupied(self: Tree, ref: GroupRef, nonce: int) -> Found:
        found = create(self, ref, nonce)
        write_task(self, gold, stranger)
        return found

    def put_again(self: Tree, directory: str, tid: int) -> None:
        """Behave like a task that always forks: another task is in the group each time."""
        write_task(self, directory, tid)
        if tid == stranger:
            write_task(self, gold, tid)

    with own_host(tmp_path, "intel-rdt", 8, kernel="6.1") as host:
        host.make_class("gold")
        host.tree.write_task("gold", stranger)
        assert host.manager.create("k", owner="other").first.baseline is Quality.EXACT
        monkeypatch.setattr(Tree, "create", create_occupied)
        monkeypatch.setattr(Tree, "write_task", put_again)
        monkeypatch.setattr("resctrlmond.workloads.store.MAX_LIVING_MEMBERS", 0)
        with pytest.raises(LimitExceeded):
            host.manager.assign(assignment("k", process().pid, class_="gold", allow_class_change=True))
        after = host.manager.get("k").first
        assert (after.class_, after.baseline) == ("gold", Quality.ESTIMATED)
