# SPDX-License-Identifier: Apache-2.0
"""A call that fails and cannot be undone either raises the error that it failed with."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.resctrl.errors import ProcessChanged, ResctrlError
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.records import store
from resctrlmond.workloads.records.atomic_files import write_file, writing
from resctrlmond.workloads.records.store import Limit, Transaction
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.workloads.builders import save
from tests.workloads.conftest import MARK, Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]


def test_a_failing_undo_of_assign_does_not_hide_the_first_error(
    host: Host, process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    control = Control(host.mountpoint)
    control.set_faults(
        Fault(on=Operation.TASKS, group="mon_groups/k", answer="EPERM"),
        Fault(on=Operation.RMDIR, group="mon_groups/k", answer="EBUSY"),
    )
    try:
        with pytest.raises(ResctrlError) as caught:
            assign(host.ctx, assignment("k", process().pid))
    finally:
        control.set_faults()
    assert caught.value.errno == errno.EPERM
    (logged,) = caplog.messages
    assert logged.startswith("k: cannot undo what a failed call did: ")
    assert "EBUSY" in logged
    # The group that could not be removed keeps its record.
    host.check()
    release(host.ctx, "k", owner="test")
    assert host.marked_groups() == []


def test_a_new_group_that_cannot_be_removed_is_not_forgotten(host: Host) -> None:
    """It held its RMID without a record until the next start."""
    control = Control(host.mountpoint)
    control.set_faults(Fault(on=Operation.RMDIR, group="mon_groups/k", answer="EBUSY"))
    groups = Path(host.run, "groups")
    groups.rename(f"{groups}.gone")
    try:
        with pytest.raises(NotWritten):
            create(host.ctx, "k", owner="test")
    finally:
        control.set_faults()
        Path(f"{groups}.gone").rename(groups)
    assert [found.ref.name for found in host.marked_groups()] == ["k"]
    host.manager.maintenance.tick()
    host.check()
    release(host.ctx, "k", owner="test")
    assert host.marked_groups() == []
    host.check()


@pytest.mark.parametrize("is_released", [False, True], ids=["a tick", "Release"])
def test_a_queued_group_that_cannot_be_created_or_removed_is_not_forgotten(host: Host, is_released: bool) -> None:
    control = Control(host.mountpoint)
    control.set_faults(Fault(on=Operation.MKDIR, group="mon_groups/k", answer="ENOSPC"))
    assert create(host.ctx, "k", owner="test").state is State.PENDING
    control.set_faults(Fault(on=Operation.RMDIR, group="mon_groups/k", answer="EBUSY"))
    os.setegid(0)  # so that the new group has no mark
    try:
        host.manager.maintenance.tick()
    finally:
        os.setegid(MARK)
        control.set_faults()
    assert host.tree.find(GroupRef("", "k")) is not None
    if is_released:
        release(host.ctx, "k", owner="test")
    else:
        host.manager.maintenance.tick()
    assert host.get("k").state.is_over
    assert host.tree.find(GroupRef("", "k")) is None
    host.check()


def test_a_member_that_ends_after_its_assign_could_not_be_undone_is_not_exact(host: Host, process: Start) -> None:
    """It ran outside, and the group, which counted nothing, called that exact."""
    child = process()
    control = Control(host.mountpoint)
    control.set_faults(
        Fault(on=Operation.TASKS, group="mon_groups/k", answer="EPERM"),
        Fault(on=Operation.RMDIR, group="mon_groups/k", answer="EBUSY"),
    )
    try:
        with pytest.raises(ResctrlError, match="EPERM"):
            assign(host.ctx, assignment("k", child.pid, member="m"))
    finally:
        control.set_faults()
    child.kill()
    child.wait()
    host.manager.maintenance.tick()
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.LATE}
    assert {total.reason for total in totals} == {
        "m may have run before it was in the group: it ended before it could be put into it"
    }


@pytest.mark.parametrize("failure", ["the process ends", "the last write fails"])
def test_a_failed_assign_of_a_member_whose_threads_were_outside_leaves_its_baseline_late(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """The undo restored an exact baseline, although the threads had run outside."""
    given = assignment("k", puppet.pid, member="m")
    assert baseline_of(assign(host.ctx, given).workload) is Quality.EXACT
    host.tree.write_task("", puppet.pid)
    write_task, save = host.tree.write_task, Transaction.save
    has_moved = False

    def moved(_before: Membership, directory: str, tid: int) -> bool:
        nonlocal has_moved
        write_task(directory, tid)
        has_moved = True
        if failure == "the process ends":
            puppet.kill()
        return True

    def refuse(txn: Transaction, record: Workload, limit: Limit | None = None) -> Workload:
        # Nothing but a full /run between two writes does this.
        if has_moved and failure == "the last write fails" and record.state is State.ACTIVE and not failed:
            failed.append(record)
            raise NotWritten("cannot write", errno=errno.ENOSPC)
        return save(txn, record, limit)

    failed: list[Workload] = []
    monkeypatch.setattr(host.tree, "write_task_from", moved)
    monkeypatch.setattr(Transaction, "save", refuse)
    with pytest.raises(ProcessChanged if failure == "the process ends" else NotWritten):
        assign(host.ctx, given)
    assert has_moved
    record = host.get("k")
    assert baseline_of(record) is Quality.LATE
    assert verdict(record).reasons == ("m ran before it was put into the group",)
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.LATE}


def test_a_failed_assign_keeps_the_late_marks_that_are_on_disk(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = assignment("k", puppet.pid, member="m")
    assign(host.ctx, given)
    host.tree.write_task("", puppet.pid)
    write_task = host.tree.write_task

    def moved(_before: Membership, directory: str, tid: int) -> bool:
        # As by a task of the member that was found in another class.
        write_task(directory, tid)
        record = host.get("k")
        save(host.ctx.store, record.doubted(record.first, doubt(Reason.NOT_INCLUDED, member="x", cause="why")))
        puppet.kill()
        return True

    monkeypatch.setattr(host.tree, "write_task_from", moved)
    with pytest.raises(ProcessChanged):
        assign(host.ctx, given)
    record = host.get("k")
    assert baseline_of(record) is Quality.LATE
    assert "x is not included: why" in verdict(record).reasons


def test_new_member_that_ends_while_it_is_moved_makes_the_totals_estimated(
    host: Host, process: Start, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of it stayed in the group, and counted there, and the totals were called exact."""
    before = assign(host.ctx, assignment("k", process().pid, member="m")).workload
    write_task = host.tree.write_task
    children: list[int] = []

    def moved(_before: Membership, directory: str, tid: int) -> bool:
        write_task(directory, tid)
        if children:
            return True
        children.append(int(puppet.do("fork")))
        os.kill(puppet.pid, signal.SIGKILL)
        os.waitid(os.P_PID, puppet.pid, os.WEXITED | os.WNOWAIT)
        return True

    monkeypatch.setattr(host.tree, "write_task_from", moved)
    with pytest.raises(ProcessChanged):
        assign(host.ctx, assignment("k", puppet.pid, member="other", late=True))
    record = host.get("k")
    assert (record.members, record.claims) == (before.members, before.claims)
    assert host.tree.membership(children[0]).group == "k"
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert "tasks of others were moved into the group" in totals[0].reason


def test_a_new_member_that_is_put_back_makes_the_totals_estimated(
    host: Host, process: Start, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its use between the move and the undo is counted."""
    assign(host.ctx, assignment("k", process().pid, member="m"))
    write_task, save = host.tree.write_task, Transaction.save
    has_moved = False

    def moved(_before: Membership, directory: str, tid: int) -> bool:
        nonlocal has_moved
        write_task(directory, tid)
        has_moved = True
        return True

    def refuse(txn: Transaction, record: Workload, limit: Limit | None = None) -> Workload:
        # Nothing but a full /run between two writes does this.
        if has_moved and record.member("other") is not None:
            raise NotWritten("cannot write", errno=errno.ENOSPC)
        return save(txn, record, limit)

    monkeypatch.setattr(host.tree, "write_task_from", moved)
    monkeypatch.setattr(Transaction, "save", refuse)
    with pytest.raises(NotWritten):
        assign(host.ctx, assignment("k", puppet.pid, member="other"))
    assert host.tree.membership(puppet.pid).group == ""
    assert baseline_of(host.get("k")) is Quality.ESTIMATED


def test_task_that_a_container_takes_from_a_failing_assign_stays_in_its_group(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The undo moved it out of the container's group, which then had no task and stayed exact."""
    create(host.ctx, "container", owner="oci")
    save = Transaction.save

    def refuse(txn: Transaction, record: Workload, limit: Limit | None = None) -> Workload:
        if record.key == "k" and record.is_active:
            host.tree.write_task(GroupRef("", "container").path, puppet.pid)  # as its hook does
            raise NotWritten("cannot write", errno=errno.ENOSPC)
        return save(txn, record, limit)

    monkeypatch.setattr(Transaction, "save", refuse)
    with pytest.raises(NotWritten):
        assign(host.ctx, assignment("k", puppet.pid, member="other"))
    assert host.tree.membership(puppet.pid).group == "container"


class _FilledByTheMove:
    """A /run that becomes full between the first record of an Assign and the last, and stays full."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._write_task = host.tree.write_task
        monkeypatch.setattr(host.tree, "write_task_from", self._move)
        monkeypatch.setattr(store, "write_file", self._write)

    def _move(self, _before: Membership, directory: str, tid: int) -> bool:
        self._write_task(directory, tid)
        self.is_full = True
        return True

    def _write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write_file(path, data, mode=mode)


def test_a_failed_assign_on_a_run_folder_that_stays_full_leaves_the_workload_as_it_was(
    host: Host, process: Start, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rejected member stayed in the workload, because the undo could not be written, and a sweep moved it in."""
    before = assign(host.ctx, assignment("k", process().pid, member="m")).workload
    run_folder = _FilledByTheMove(host, monkeypatch)
    with pytest.raises(NotWritten, match="ENOSPC"):
        assign(host.ctx, assignment("k", puppet.pid, member="other"))
    for _ in range(2):
        host.manager.maintenance.tick()
        host.manager.maintenance.sweep("k")
    assert host.tree.membership(puppet.pid).group == ""
    record = host.get("k")
    assert (record.members, record.claims) == (before.members, before.claims)
    assert baseline_of(record) is Quality.ESTIMATED  # of what the rejected member used in the group

    run_folder.is_full = False
    host.manager.maintenance.tick()
    record = host.restart().context.store.known("k")
    assert [member.id for member in record.members] == ["m"]
    (reason,) = verdict(record).reasons
    assert reason.endswith(": an Assign of other, which failed")
    assert host.tree.membership(puppet.pid).group == ""


def test_a_failed_assign_of_an_ended_workload_on_a_run_folder_that_stays_full_starts_no_run(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(host.ctx, "k", owner="test")
    release(host.ctx, "k", owner="test")
    before = host.get("k")
    run_folder = _FilledByTheMove(host, monkeypatch)
    with pytest.raises(NotWritten, match="ENOSPC"):
        assign(host.ctx, assignment("k", puppet.pid, member="other"))
    for run_folder.is_full in (True, False):
        host.manager.maintenance.tick()
        assert host.get("k") == before
        assert host.marked_groups() == []
    assert host.restart().context.store.known("k") == before


def test_a_new_member_that_the_kernel_refuses_leaves_the_totals_exact(host: Host, process: Start) -> None:
    before = assign(host.ctx, assignment("k", process().pid, member="m")).workload
    control = Control(host.mountpoint)
    control.set_faults(Fault(on=Operation.TASKS, group="mon_groups/k", answer="EPERM"))
    try:
        with pytest.raises(ResctrlError, match="EPERM"):
            assign(host.ctx, assignment("k", process().pid, member="other"))
    finally:
        control.set_faults()
    assert host.get("k") == before


def test_a_failing_undo_of_a_write_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "record"
    (in_the_way / "full").mkdir(parents=True)

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    # Nothing but a disk that turns read-only in between does this.
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(NotWritten) as caught, writing(str(in_the_way)):
        write_file(str(in_the_way), b"text")
    assert caught.value.errno == errno.EISDIR
    assert "Read-only file system" in caplog.text
