# SPDX-License-Identifier: Apache-2.0
"""A mark that arrives while another call is at work is neither missed nor lost."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.figures.verdict import verdict
from resctrlmond.workloads.model.errors import LimitExceeded, NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import GroupState, State, Workload
from resctrlmond.workloads.records.store import Limit, Transaction
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment
from tests.workloads.evidence.test_interference import react, write

Start = Callable[[], "subprocess.Popen[bytes]"]


def test_read_reports_a_mark_that_arrives_between_its_readings_and_its_totals(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readings included the use of the task, and the totals were called exact."""
    record = assign(host.ctx, assignment("k", process().pid)).workload
    stranger = process().pid
    read_group = host.tree.read
    moved: list[int] = []

    def read_then_move(ref: GroupRef) -> list[Reading]:
        found = read_group(ref)
        if not moved:
            moved.append(stranger)
            write(host, f"{record.first.ref.path}/tasks", stranger)
            react(host)
        return found

    monkeypatch.setattr(host.tree, "read", read_then_move)
    totals = read(host.ctx, "k")[2]
    assert moved
    assert {total.quality for total in totals} == {Quality.ESTIMATED}


def test_a_mark_that_cannot_be_written_at_the_end_keeps_the_workload_from_ending_exact(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    save, read_group = Transaction.save, host.tree.read
    failed: list[Workload] = []

    def write_then_read(ref: GroupRef) -> list[Reading]:
        write(host, f"{ref.path}/cpus_list", "0")
        return read_group(ref)

    def refuse(txn: Transaction, workload: Workload, limit: Limit | None = None) -> Workload:
        if verdict(workload).reasons and not failed:
            failed.append(workload)
            raise NotWritten("cannot write", errno=errno.ENOSPC)
        return save(txn, workload, limit)

    monkeypatch.setattr(host.tree, "read", write_then_read)
    monkeypatch.setattr(Transaction, "save", refuse)
    with pytest.raises(NotWritten):
        release(host.ctx, "k", owner="test")
    host.manager.maintenance.tick()
    ended, _, totals = read(host.ctx, "k")
    assert ended.state is State.COMPLETED
    assert {total.quality for total in totals} == {Quality.ESTIMATED}


def test_a_mark_of_a_later_group_that_arrives_at_the_end_of_another_is_kept(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the second group saves the mark of the third."""
    for class_ in ("gold", "silver"):
        host.make_class(class_)
    for class_ in ("", "gold", "silver"):
        child = process()
        if class_:
            host.tree.write_task(class_, child.pid)
        assign(host.ctx, assignment("k", child.pid))
    react(host)
    _, second, third = host.get("k").groups
    stranger = process().pid
    host.tree.write_task("silver", stranger)
    react(host)
    read_group = host.tree.read
    moved: list[int] = []

    def read_then_move(ref: GroupRef) -> list[Reading]:
        found = read_group(ref)
        if ref == second.ref and not moved:
            moved.append(stranger)
            write(host, f"{third.ref.path}/tasks", stranger)
        return found

    monkeypatch.setattr(host.tree, "read", read_then_move)
    release(host.ctx, "k", owner="test")
    assert moved
    assert Quality.EXACT not in {total.quality for total in read(host.ctx, "k")[2]}


def test_a_failed_assign_keeps_the_groups_that_waited_before_and_removes_its_own(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has a nonce yet, so the new group was mistaken for the earlier one."""
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 4):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        children = [process() for _ in range(3)]
        for class_, child in zip(["gold", "silver"], children[1:], strict=True):
            host.make_class(class_)
            host.tree.write_task(class_, child.pid)
        create(host.ctx, "one", owner="test")
        before = [
            assign(host.ctx, assignment("k", child.pid, member=f"c{number}")).workload
            for number, child in enumerate(children[:2])
        ][-1]
        assert [group.state for group in before.groups] == [GroupState.PENDING] * 2
        monkeypatch.setattr("resctrlmond.workloads.records.store.MAX_LIVING_MEMBERS", 2)
        with pytest.raises(LimitExceeded):
            assign(host.ctx, assignment("k", children[2].pid, member="c2"))
        assert host.get("k") == before
        host.check()
