# SPDX-License-Identifier: Apache-2.0
"""The tick and the start: ends are detected, losses recorded, runs pruned, and all work continues after a restart."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import counters, ends
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.owners import RECOVERED
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Claim, EndRule, State, Workload
from resctrlmond.workloads.records.record_format import encode
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member, remove_member
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import reconcile, release
from tests.workloads.builders import workload
from tests.workloads.conftest import UID, Host, assignment, join, locked

CTR = "4d" * 32
Start = Callable[[], "subprocess.Popen[bytes]"]


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def test_a_tick_ends_between_two_workloads_when_the_daemon_stops(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 60 groups on a busy machine the stop found the tick at work, and reported a call that hangs."""
    for key in ("first", "second"):
        assign(host.ctx, assignment(key, process().pid))
    maintenance, checkpoint = host.manager.maintenance, counters.checkpoint
    seen: list[str] = []

    def stopped(ctx: Context, txn: Transaction) -> None:
        seen.append(txn.key)
        maintenance.is_stopping = True
        checkpoint(ctx, txn)

    monkeypatch.setattr(counters, "checkpoint", stopped)
    maintenance.tick()
    assert len(seen) == 1


def test_a_containers_group_ends_with_it(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1"))
    host.manager.maintenance.tick()
    assert host.get(CTR).state is State.ACTIVE
    end(child)
    host.manager.maintenance.tick()
    record = host.get(CTR)
    assert (record.state, baseline_of(record)) == (State.COMPLETED, Quality.EXACT)
    assert record.members[0].ended_at
    host.check()


def test_a_pods_group_stays_over_its_containers_and_ends_with_its_cgroup(
    host: Host, process: Start, cgroup: str
) -> None:
    first, second = process(), process()
    before = assign(host.ctx, assignment(UID, first.pid, "oci", member="c1", pod_cgroup=cgroup)).workload
    end(first)
    host.manager.maintenance.tick()
    assert host.get(UID).state is State.IDLE
    after = assign(host.ctx, assignment(UID, second.pid, "oci", member="c2", pod_cgroup=cgroup)).workload
    assert (after.first.nonce, after.generation, after.state) == (before.first.nonce, 1, State.ACTIVE)
    end(second)
    os.rmdir(cgroup)
    host.manager.maintenance.tick()
    assert host.get(UID).state is State.COMPLETED
    host.check()


@pytest.mark.parametrize("first", ["the pod", "the adapter", "the adapter that forgot"])
def test_a_pod_of_hook_and_adapter_ends_with_both_in_any_order(
    host: Host, process: Start, cgroup: str, first: str
) -> None:
    """Its image could not be fetched, so both know its sandbox alone, and each by its own means."""
    pause = process()
    join(cgroup, pause.pid)
    assign(host.ctx, assignment(UID, pause.pid, "oci", member="sandbox", kind="sandbox", pod_cgroup=cgroup))
    create(host.ctx, UID, owner="nri")
    add_member(host.ctx, UID, "sandbox", owner="nri")
    member = host.get(UID).member("sandbox")
    assert member is not None
    assert member.pid == pause.pid, "a name does not remove the process"
    add_member(host.ctx, UID, "replaced", owner="nri")

    def report() -> None:
        if first != "the adapter that forgot":
            remove_member(host.ctx, UID, "sandbox")
            remove_member(host.ctx, UID, "replaced")
        reconcile(host.ctx, "nri", [])

    if first != "the pod":
        report()
        host.manager.maintenance.tick()
        assert host.get(UID).is_claimed_by("oci")
    end(pause)
    os.rmdir(cgroup)
    host.manager.maintenance.tick()
    if first == "the pod":
        assert host.get(UID).is_claimed_by("nri")
        report()
        host.manager.maintenance.tick()
    assert host.get(UID).state is State.COMPLETED
    host.check()


def test_process_that_joins_a_containers_cgroup_is_moved(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exec session is a child of its runtime, not of the container's first process.

    This one has used nothing before it was found.
    """
    init, session = process(), process()
    join(cgroup, init.pid)
    assign(host.ctx, assignment(CTR, init.pid, "oci", member="c1", own_cgroup=cgroup))
    join(cgroup, session.pid)
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_S", 0.0)
    caplog.set_level("INFO", "resctrlmond")
    host.manager.maintenance.tick()
    assert f"{CTR}: moved 1 task of member c1 into the group" in caplog.messages
    assert host.tree.membership(session.pid).group == CTR
    taken_in = host.get(CTR)
    assert (baseline_of(taken_in), taken_in.members[0].late) == (Quality.EXACT, False)
    end(init)
    host.manager.maintenance.tick()
    assert host.get(CTR).state is State.ACTIVE
    end(session)
    host.manager.maintenance.tick()
    assert host.get(CTR).state is State.COMPLETED


def test_number_of_tasks_outside_is_current(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number was that at the assignment of the member for the whole life of the workload."""
    init, session = process(), process()
    join(cgroup, init.pid)
    assign(host.ctx, assignment(CTR, init.pid, "oci", member="c1", own_cgroup=cgroup))
    foreign = host.make_foreign("theirs")
    host.tree.write_task(foreign.path, session.pid)
    join(cgroup, session.pid)
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_S", 0.0)
    host.manager.maintenance.tick()
    member = host.get(CTR).members[0]
    assert (host.tree.membership(session.pid).group, member.tasks_outside) == ("theirs", 1)
    os.rmdir(host.tree.full_path(foreign))
    host.manager.maintenance.tick()
    member = host.get(CTR).members[0]
    assert (host.tree.membership(session.pid).group, member.tasks_outside) == (CTR, 0)


def test_process_that_joined_without_a_daemon_is_moved_at_the_start(host: Host, process: Start, cgroup: str) -> None:
    init, session = process(), process()
    join(cgroup, init.pid)
    assign(host.ctx, assignment(CTR, init.pid, "oci", member="c1", own_cgroup=cgroup))
    assert baseline_of(host.restart().context.store.known(CTR)) is Quality.EXACT
    join(cgroup, session.pid)
    assert baseline_of(host.restart().context.store.known(CTR)) is Quality.EXACT
    assert host.tree.membership(session.pid).group == CTR
    end(session)
    end(init)


def test_control_group_is_assigned_completely_and_is_late(host: Host, process: Start, cgroup: str) -> None:
    children = [process() for _ in range(3)]
    for child in children:
        join(cgroup, child.pid)
    done = assign(host.ctx, dataclasses.replace(assignment("unit.service", 0), pid=None, cgroup=cgroup, kind="unit"))
    assert done.moved.moved == 3
    assert (baseline_of(done.workload), done.workload.members[0].late) == (Quality.LATE, True)
    for child in children:
        assert host.tree.membership(child.pid).group == "unit.service"
        end(child)
    host.manager.maintenance.tick()
    assert host.get("unit.service").state is State.IDLE


def test_group_that_another_program_removed_is_lost_and_reported(host: Host, process: Start) -> None:
    record = assign(host.ctx, assignment("k", process().pid)).workload
    os.rmdir(host.tree.full_path(record.first.ref))
    host.manager.maintenance.tick()
    lost = host.get("k")
    assert (lost.state, lost.is_interrupted) == (State.LOST, True)
    assert "another program" in lost.reason
    assert "completed_at" in host.files("k")
    host.check()


def test_ended_runs_are_pruned_after_the_ttl(host: Host) -> None:
    create(host.ctx, "k", owner="a")
    release(host.ctx, "k", owner="a")
    create(host.ctx, "k", owner="a")
    release(host.ctx, "k", owner="a")
    host.manager.maintenance.tick()
    assert (host.folder("records"), host.folder("groups"), host.folder("completed")) == (["k.json"], ["k"], ["k"])
    host.ctx.config.settings = Settings(snapshot_ttl_s=0)
    host.manager.maintenance.tick()
    assert (host.folder("records"), host.folder("groups"), host.folder("completed")) == ([], [], [])
    assert host.ctx.store.all() == []


# -- after a restart


def test_restart_changes_nothing_of_living_workloads(host: Host, process: Start) -> None:
    child = process()
    record = assign(host.ctx, assignment("k", child.pid)).workload
    found, files = host.tree.find(record.first.ref), host.files("k")
    host.restart()
    assert host.get("k") == record
    assert (host.tree.find(record.first.ref), host.files("k")) == (found, files)
    assert host.manager.problems == []


def test_workload_that_ended_without_a_daemon_is_ended_at_the_start(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment(CTR, child.pid, "oci"))
    end(child)
    host.restart()
    record = host.get(CTR)
    assert (record.state, baseline_of(record)) == (State.COMPLETED, Quality.ESTIMATED)
    host.check()


def test_marked_group_without_a_record_is_adopted_or_removed_if_empty(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("busy", child.pid))
    create(host.ctx, "empty", owner="a")
    foreign = host.make_foreign("foreign")
    shutil.rmtree(os.path.join(host.run, "records"))
    os.mkdir(os.path.join(host.run, "records"))
    host.restart()
    record = host.get("busy")
    assert (record.state, baseline_of(record)) == (State.ACTIVE, Quality.UNKNOWN)
    assert host.tree.membership(child.pid).group == "busy"
    assert host.tree.find(GroupRef("", "empty")) is None
    assert host.tree.find(foreign) is not None
    record_path = host.tree.full_path(record.first.ref)
    assert [line.split(": ", 1)[1] for line in host.manager.problems] == [
        "had the mark of resctrlmond, but no record: adopted with an unknown baseline",
        "had the mark of resctrlmond, but no record and no tasks: removed",
    ]
    assert all(total.number is None for total in read(host.ctx, "busy")[2])
    assert record.is_claimed_by(RECOVERED)
    host.manager.tick()
    adopted = f"{record_path}: had the mark of resctrlmond, but no record: adopted with an unknown baseline"
    assert host.manager.problems == [adopted]
    end(child)
    host.manager.tick()
    assert host.get("busy").state is State.COMPLETED
    assert host.manager.problems == [], "the adoption is still a problem after the workload ended"
    assert host.marked_groups() == []


def test_tasks_of_an_adopted_group_are_not_listed_each_second(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each list the kernel walks every thread of the machine, with all of resctrl locked."""
    first, second = process(), process()
    assign(host.ctx, assignment("busy", first.pid))
    assign(host.ctx, assignment("busy", second.pid))
    shutil.rmtree(os.path.join(host.run, "records"))
    os.mkdir(os.path.join(host.run, "records"))
    host.restart()
    listed: list[GroupRef] = []
    tasks = host.tree.tasks

    def record(ref: GroupRef) -> list[int]:
        listed.append(ref)
        return tasks(ref)

    monkeypatch.setattr(host.tree, "tasks", record)
    for _ in range(5):
        host.manager.maintenance.tick()
    assert len(listed) <= 1
    end(first)
    for _ in range(5):
        host.manager.maintenance.tick()
    assert len(listed) <= 2
    assert host.get("busy").state is State.ACTIVE
    end(second)
    host.manager.maintenance.tick()
    assert host.get("busy").state is State.COMPLETED


def test_an_adopted_group_ends_when_its_last_task_leaves_it_for_another_group(host: Host, process: Start) -> None:
    """The task lives on elsewhere: the RMID was kept for as long as it did."""
    child = process()
    assign(host.ctx, assignment("busy", child.pid))
    shutil.rmtree(os.path.join(host.run, "records"))
    os.mkdir(os.path.join(host.run, "records"))
    host.restart()
    host.manager.maintenance.tick()
    assert host.get("busy").state is State.ACTIVE
    foreign = host.make_foreign("theirs")
    host.tree.write_task(foreign.path, child.pid)
    host.manager.maintenance.tick()
    assert host.get("busy").state is State.COMPLETED
    assert host.marked_groups() == []
    assert host.tree.membership(child.pid).group == "theirs"


def test_linger_counts_from_the_end_of_the_last_member(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each member's end begins the time anew; the end of the first member and the age of the group do not matter."""
    clock, ahead_ns = time.clock_gettime_ns, 0
    monkeypatch.setattr(time, "clock_gettime_ns", lambda which: clock(which) + ahead_ns)
    host.ctx.config.settings = Settings(linger_s=3600)
    first, second = process(), process()
    for number, child in enumerate((first, second)):
        assign(host.ctx, assignment(CTR, child.pid, "oci", member=f"c{number}"))

    def state_after(hours: float) -> State:
        nonlocal ahead_ns
        ahead_ns += int(hours * 3600e9)
        host.manager.maintenance.tick()
        return host.get(CTR).state

    end(first)
    assert state_after(0) is State.ACTIVE
    assert state_after(2) is State.ACTIVE
    end(second)
    assert state_after(0) is State.IDLE
    assert state_after(0.9) is State.IDLE
    assert state_after(0.2) is State.COMPLETED


def test_a_group_cut_before_its_nonce_is_not_removed_under_its_record(host: Host) -> None:
    """Made, but not yet marked with its nonce: the record made it anew, and the clearing up removed that one."""
    create(host.ctx, "k", owner="a")
    os.utime(host.tree.full_path(GroupRef("", "k")), ns=(1, 1))
    record = host.get("k")
    pending = workload(
        "k",
        State.PENDING,
        nonce=record.first.nonce,
        boot_id=record.first.boot_id,
        claims=record.claims,
    )
    Path(host.run, "records", "k.json").write_bytes(encode(pending))
    host.restart()
    assert host.get("k").state is State.IDLE
    host.check()
    host.manager.maintenance.tick()
    assert host.get("k").state is State.IDLE


def test_problem_of_the_start_is_removed_when_it_is_solved(host: Host, process: Start) -> None:
    """Problems of the start remained in the status until the daemon ended."""
    create(host.ctx, "k", owner="a")
    child = process()
    assign(host.ctx, assignment("other", child.pid))
    records = Path(host.run, "records")
    (records / "k.json").write_text("damaged")
    (records / "gone.json").write_text("damaged")
    (records / "other.json").write_bytes((records / "other.json").read_bytes()[:-9])
    host.restart()
    host.manager.tick()
    host.manager.tick()
    problems = host.manager.problems
    assert [any(name in problem for problem in problems) for name in ("k.json", "gone.json", "adopted")] == [True] * 3
    (records / "gone.json").unlink()
    create(host.ctx, "k", owner="a")  # its damaged record is kept under another name
    end(child)
    host.manager.tick()
    assert host.manager.problems == []


def test_work_that_fails_is_a_problem_until_it_succeeds(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    create(host.ctx, "k", owner="a")

    def fail(_ctx: Context, _txn: Transaction) -> Workload | None:
        raise NotWritten("cannot write the record", path="/run/k.json", errno=errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(ends, "record_ends", fail)
        host.restart()
        assert [problem.partition(" ")[0] for problem in host.manager.problems] == ["k:"]
        for _ in range(2):
            host.manager.tick()
            assert [problem.partition(" ")[0] for problem in host.manager.problems] == ["k:"]
    host.manager.tick()
    assert host.manager.problems == []


@pytest.mark.parametrize("work", ["counters", "pruning"])
def test_failed_work_is_not_a_problem_after_its_workload_is_gone(host: Host, work: str) -> None:
    with host.manager.maintenance._guarded("gone", work):
        raise NotWritten("cannot write", path="/run/gone", errno=errno.ENOSPC)
    assert [problem.partition(":")[0] for problem in host.manager.problems] == ["gone"]
    host.manager.tick()
    assert host.manager.problems == []


def test_work_of_a_call_does_not_hide_a_tick_that_hangs(host: Host) -> None:
    before = host.manager.maintenance.last_progress
    with host.manager.maintenance._guarded("k", "counters", is_tick=False):
        pass
    assert host.manager.maintenance.last_progress == before


def test_an_unreadable_record_is_kept_and_its_group_adopted(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    path = Path(host.run, "records", "k.json")
    damaged = path.read_bytes()[:-9]
    path.write_bytes(damaged)
    host.restart()
    assert (host.get("k").state, baseline_of(host.get("k"))) == (State.ACTIVE, Quality.UNKNOWN)
    assert Path(f"{path}.unreadable").read_bytes() == damaged
    assert any("not a valid record" in problem for problem in host.manager.problems)


def test_an_unreadable_record_is_removed_after_the_snapshot_ttl_and_this_is_logged(
    host: Host, process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    path = Path(host.run, "records", "k.json")
    path.write_bytes(path.read_bytes()[:-9])
    host.restart()
    kept = Path(f"{path}.unreadable")
    host.manager.tick()
    assert kept.exists()
    host.ctx.config.settings = msgspec.structs.replace(host.ctx.config.settings, snapshot_ttl_s=0.0)
    with caplog.at_level("INFO"):
        host.manager.tick()
    assert not kept.exists()
    assert f"set aside for snapshot_ttl: {kept}" in caplog.text


def test_one_bad_record_does_not_keep_the_daemon_from_starting(host: Host, process: Start) -> None:
    create(host.ctx, "bad", owner="a")
    child = process()
    assign(host.ctx, assignment(CTR, child.pid, "oci"))
    end(child)
    # Its snapshot is a file: what is written into it cannot be.
    path = Path(host.run, "groups", "bad")
    shutil.rmtree(path)
    path.write_text("?")
    os.rmdir(host.tree.full_path(GroupRef("", "bad")))
    manager = host.restart()
    assert manager.context.store.known(CTR).state is State.COMPLETED
    assert [record.key for record in manager.context.store.all()] == [CTR, "bad"]


def test_a_record_of_another_boot_is_lost(host: Host) -> None:
    record = create(host.ctx, "k", owner="a")
    os.rmdir(host.tree.full_path(record.first.ref))
    path = Path(host.run, "records", "k.json")
    path.write_text(path.read_text().replace(record.first.boot_id, "another-boot"))
    host.restart()
    assert host.get("k").state is State.LOST
    host.check()


def test_daemon_survives_an_unmount_and_a_mount(tmp_path: Path, process: Start) -> None:
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    child = process()
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        assign(host.ctx, assignment("k", child.pid))
        waiting = create(host.ctx, "other", owner="a")
        assert waiting.state is State.IDLE
        assert unmount(host.mountpoint)
        host.manager.maintenance.tick()
        assert {record.state for record in host.ctx.store.all()} == {State.LOST}
        assert "unmounted" in host.get("k").reason
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        record = assign(host.ctx, assignment("k", child.pid)).workload
        assert (record.state, record.generation) == (State.ACTIVE, 2)
        host.check()


def test_tick_skips_locked_workloads(host: Host, process: Start) -> None:
    """A verb that hangs in the kernel with its key held stopped the upkeep of all others."""
    held, other = process(), process()
    assign(host.ctx, assignment("held", held.pid, "oci"))
    assign(host.ctx, assignment("other", other.pid, "oci"))
    end(held)
    end(other)
    with locked(host, "held"):
        host.manager.maintenance.tick()
        assert host.get("other").state is State.COMPLETED
        assert host.get("held").state is State.ACTIVE
    host.manager.maintenance.tick()
    assert host.get("held").state is State.COMPLETED


@pytest.mark.parametrize("names", [[b"\x1b]0;\xff\x07" * 30] * 30, [b"d"] * 1000], ids=["longer-than-a-path", "deep"])
def test_control_groups_of_a_workload_do_not_stop_the_tick_of_others(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch, names: list[bytes]
) -> None:
    """A user who may create control groups chooses their names and depth. The sweep raised errors that
    nothing handled (UnicodeEncodeError, RecursionError), and no tick or start got beyond that workload."""
    init, other = process(), process()
    join(cgroup, init.pid)
    assign(host.ctx, assignment("a", init.pid, "oci", member="c1", own_cgroup=cgroup))
    assign(host.ctx, assignment("b", other.pid, "oci"))
    here = os.open(".", os.O_RDONLY)
    os.chdir(cgroup)
    for name in names:
        os.mkdir(name)
        os.chdir(name)
    try:
        monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_S", 0.0)
        host.manager.maintenance.tick()
        assert host.restart().context.store.known("a").state is State.ACTIVE
        end(other)
        host.manager.maintenance.tick()
        assert host.get("b").state is State.COMPLETED
        reason = host.get("a").members[0].reason
        assert reason.isprintable()
        assert ("name too long" in reason) == (len(names) == 30)
    finally:
        for name in names:
            os.chdir("..")
            os.rmdir(name)
        os.fchdir(here)
        os.close(here)
    # When the error is over, its reason is removed: a container with a reason counts as not monitored.
    host.manager.maintenance.tick()
    assert host.get("a").members[0].reason == ""


def test_error_in_one_workload_does_not_stop_the_maintenance_of_others(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The mistake is made here: none is known."""
    held, other = process(), process()
    assign(host.ctx, assignment("a", held.pid, "oci"))
    assign(host.ctx, assignment("b", other.pid, "oci"))
    record_ends = ends.record_ends

    def mistaken(ctx: Context, txn: Transaction) -> Workload | None:
        if txn.key == "a":
            raise RuntimeError("a mistake")
        return record_ends(ctx, txn)

    monkeypatch.setattr(ends, "record_ends", mistaken)
    end(other)
    host.manager.maintenance.tick()
    host.manager.maintenance.tick()
    assert host.get("b").state is State.COMPLETED
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "a: maintenance failed unexpectedly"
    ]
    assert host.restart().context.store.known("b").state is State.COMPLETED
    assert "a: RuntimeError('a mistake')" in host.manager.problems


def test_tick_reports_progress_for_each_workload(host: Host) -> None:
    before = host.manager.maintenance.last_progress
    create(host.ctx, "a", owner="a")
    host.manager.maintenance.tick()
    assert host.manager.maintenance.last_progress > before


def test_removed_run_folder_is_reported_once_or_not_at_all(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """A tick without the folder of ended runs failed, and logged that each second."""
    os.rmdir(os.path.join(host.run, "completed"))
    create(host.ctx, "k", owner="a")
    host.manager.maintenance.tick()
    release(host.ctx, "k", owner="a")
    create(host.ctx, "k", owner="a")
    assert host.folder("completed") == ["k"]
    shutil.rmtree(os.path.join(host.run, "completed"))
    Path(host.run, "completed").write_text("no folder")
    host.manager.maintenance.tick()
    host.manager.maintenance.tick()
    assert [record.levelname for record in caplog.records if "completed" in record.getMessage()] == ["ERROR"]
    shutil.rmtree(os.path.join(host.run, "records"))
    with pytest.raises(NotWritten, match="systemctl restart resctrlmond"):
        create(host.ctx, "other", owner="a")
    os.mkdir(os.path.join(host.run, "records"))


def test_interrupted_adoption_keeps_the_tasks_and_is_unknown(host: Host, process: Start) -> None:
    """The next start took them for strangers, moved them out, and reported 0 as exact."""
    child = process()
    first = assign(host.ctx, assignment("k", child.pid)).workload.first
    claims = (Claim("recovered", utc_now(), EndRule.TASKS),)
    cut = workload("k", State.PENDING, nonce=first.nonce, boot_id=first.boot_id, claims=claims)
    Path(host.run, "records", "k.json").write_bytes(encode(cut))
    found = host.restart().context.store.known("k")
    assert (found.state.has_group, baseline_of(found)) == (True, Quality.UNKNOWN)
    assert host.tree.membership(child.pid) == Membership("", "k")
