# SPDX-License-Identifier: Apache-2.0
"""A workload that outlives its group is measured again, late, and its earlier use is still counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import counters
from resctrlmond.workloads.groups.resumption import MAX_RESUME_S, losses_in_a_row, resumes_after_s
from resctrlmond.workloads.model.errors import ForeignGroup, NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import PriorRuns, State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import reconcile, release
from tests.sim.conftest import Puppet
from tests.workloads.builders import save, total_of, workload
from tests.workloads.conftest import UID, Host, assignment, locked, own_host
from tests.workloads.groups.test_cut import CTR, Fuse, cut, forget, fuse

__all__ = ["fuse"]

Start = Callable[[], "subprocess.Popen[bytes]"]
TRAFFIC = "mbm_total_bytes"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resctrlmond.workloads.groups.resumption.RESUME_S", 0.0)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Host]:
    """Return a separate machine, whose filesystem the test may unmount."""
    with own_host(tmp_path, "intel-aet", 8) as host:
        yield host


def remove(host: Host, key: str) -> None:
    """Remove a group as another program does."""
    os.rmdir(host.tree.full_path(host.get(key).first.ref))
    host.manager.maintenance.tick()


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


@pytest.mark.usefixtures("soon")
def test_a_workload_whose_group_was_removed_gets_a_new_one_and_is_late(host: Host, process: Start) -> None:
    first, second = process(), process()
    assign(host.ctx, assignment(UID, first.pid, "oci", member="c1", attributes={"pod": "web"}, priority=3))
    before = assign(host.ctx, assignment(UID, second.pid, "nri", member="c2")).workload
    remove(host, UID)
    assert host.get(UID).state is State.LOST
    host.manager.maintenance.tick()
    record = host.get(UID)
    assert (record.state, record.generation, baseline_of(record)) == (State.ACTIVE, 2, Quality.LATE)
    assert (record.claims, record.attributes, record.priority) == (before.claims, {"pod": "web"}, 3)
    assert [(member.id, member.late) for member in record.living] == [("c1", True), ("c2", True)]
    assert {host.tree.membership(child.pid).group for child in (first, second)} == {UID}
    assert os.path.isfile(f"{host.run}/completed/{UID}/1/completed_at")
    host.check()
    end(first)
    end(second)
    host.manager.maintenance.tick()
    release(host.ctx, UID, owner="nri")
    assert not host.get(UID).is_claimed_by("nri")


@pytest.mark.usefixtures("soon")
def test_use_before_the_loss_is_in_the_totals(host: Host, puppet: Puppet) -> None:
    assign(host.ctx, assignment("k", puppet.pid))
    puppet.do("burn 0.1")
    host.manager.maintenance.tick()
    known = total_of(read(host.ctx, "k")[2])
    assert known.number
    with host.ctx.store.transaction("k") as txn:
        counters.checkpoint(host.ctx, txn)
    for losses in (1, 2):
        remove(host, "k")
        host.manager.maintenance.tick()
        record = host.get("k")
        assert record.prior_runs is not None
        assert (record.state, record.prior_runs.losses) == (State.ACTIVE, losses)
    host.restart()
    puppet.do("burn 0.1")
    found = total_of(release(host.ctx, "k", owner="test").totals)
    assert found.quality is Quality.ESTIMATED
    assert "use until it had a new one is not counted" in found.reason
    assert found.number is not None
    since = [Path(host.run, "groups/k/mon_data", "mon_L3_00", f"{TRAFFIC}.{at}") for at in ("begin", "end")]
    assert found.number >= known.number
    assert {part.quality for part in found.domains.values()} == {Quality.ESTIMATED}
    assert all(path.is_file() for path in since)


@pytest.mark.usefixtures("soon")
def test_a_run_without_files_that_is_lost_leaves_no_exact_total(host: Host) -> None:
    """Its use was in no total, and the totals of the next run were exact."""
    create(host.ctx, "k", owner="test")
    shutil.rmtree(Path(host.run, "groups/k"))
    remove(host, "k")
    host.manager.maintenance.tick()
    assert host.get("k").generation == 2
    host.check()
    totals = release(host.ctx, "k", owner="test").totals
    assert totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all("its group was lost at" in total.reason for total in totals)


@pytest.mark.usefixtures("soon")
def test_new_mount_is_used_without_a_call(tmp_path: Path, process: Start) -> None:
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    child = process()
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        assign(host.ctx, assignment("k", child.pid))
        create(host.ctx, "empty", owner="a")
        assert unmount(host.mountpoint)
        for _ in range(3):
            host.manager.maintenance.tick()
        assert {record.state for record in host.ctx.store.all()} == {State.LOST}
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host.manager.maintenance.tick()
        states = {record.key: (record.state, record.generation) for record in host.ctx.store.all()}
        assert states == {"k": (State.ACTIVE, 2), "empty": (State.IDLE, 2)}
        assert host.tree.membership(child.pid).group == "k"
        host.check()


def test_mount_right_after_an_unmount_is_not_reported_as_removal_of_groups(tmp_path: Path, process: Start) -> None:
    """Device, inodes and mount id are the same again."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        for key in ("a", "b"):
            assign(host.ctx, assignment(key, process().pid))
        host.manager.maintenance.tick()
        assert unmount(host.mountpoint)
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 8):
        host.manager.maintenance.tick()
        for key in ("a", "b"):
            record = host.get(key)
            assert record.state is State.LOST
            assert "unmounted and mounted again" in record.reason
        create(host.ctx, "c", owner="test")
        os.rmdir(host.tree.full_path(host.get("c").first.ref))
        host.manager.maintenance.tick()
        assert "another program" in host.get("c").reason


def test_remount_during_a_call_is_not_reported_as_removal_of_groups(tmp_path: Path, process: Start) -> None:
    """A tick that skipped the workload still recorded that it had checked every group."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        assign(host.ctx, assignment("k", process().pid))
        assert unmount(host.mountpoint)
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 8):
        with locked(host, "k"):
            host.manager.maintenance.tick()
        assert host.get("k").state is State.ACTIVE
        host.manager.maintenance.tick()
        assert "unmounted and mounted again" in host.get("k").reason


def test_class_removed_with_its_groups_is_not_mistaken_for_a_remount(host: Host, process: Start) -> None:
    """Classes change the ctime of the root directory after a chmod of it."""
    os.chmod(host.mountpoint, 0o755)
    host.make_class("gold")
    child = process()
    host.tree.write_task("gold", child.pid)
    assign(host.ctx, assignment("k", child.pid))
    host.manager.maintenance.tick()
    os.rmdir(f"{host.mountpoint}/gold")
    host.manager.maintenance.tick()
    assert host.get("k").reason.startswith("the group was removed by another program")


def test_long_unmount_delays_no_call_afterwards(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it lasts nothing can be tried, so nothing was tried in vain."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    child = process()
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        assign(host.ctx, assignment("k", child.pid))
        assert unmount(host.mountpoint)
        host.manager.maintenance.tick()
    now = time.monotonic()
    for seconds in range(1000):
        monkeypatch.setattr(
            "resctrlmond.workloads.upkeep.maintenance.time.monotonic", lambda passed=seconds: now + passed
        )
        host.manager.maintenance.tick()
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host.manager.maintenance.tick()
        assert host.get("k").state is State.ACTIVE
    monkeypatch.undo()


@pytest.mark.usefixtures("soon")
def test_run_lost_without_a_daemon_is_resumed(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid, "run"))
    os.rmdir(host.tree.full_path(GroupRef("", "k")))
    host.restart()
    host.manager.maintenance.tick()
    assert (host.get("k").state, host.tree.membership(child.pid).group) == (State.ACTIVE, "k")


@pytest.mark.usefixtures("soon")
def test_resumed_group_is_in_the_current_class_of_the_tasks(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    host.make_class("gold")
    os.rmdir(host.tree.full_path(GroupRef("", "k")))
    host.tree.write_task("gold", child.pid)
    host.manager.maintenance.tick()
    host.manager.maintenance.tick()
    assert host.get("k").first.ref == GroupRef("gold", "k")
    host.check()


def test_ended_and_released_workloads_are_not_resumed(host: Host, process: Start) -> None:
    child = process()
    for key, owner in (("ended", "run"), ("released", "a"), ("unknown", "b")):
        assign(host.ctx, assignment(key, child.pid, owner, member="m", take_over=True))
        remove(host, key)
        assert host.get(key).is_interrupted
    release(host.ctx, "released", owner="a")
    reconcile(host.ctx, "b", [])
    assert not host.get("unknown").is_interrupted
    end(child)
    remove_member(host.ctx, "ended", "m")
    release(host.ctx, "ended", owner="run")
    for _ in range(3):
        host.manager.maintenance.tick()
    assert {record.state for record in host.ctx.store.all()} == {State.LOST}
    assert host.marked_groups() == []


def test_assign_resumes_the_run_at_once_with_all_members(host: Host, process: Start) -> None:
    first, second = process(), process()
    assign(host.ctx, assignment(UID, first.pid, "nri", member="c1"))
    remove(host, UID)
    record = assign(host.ctx, assignment(UID, second.pid, "nri", member="c2")).workload
    assert [(member.id, member.late) for member in record.living] == [("c1", True), ("c2", False)]
    assert {host.tree.membership(child.pid).group for child in (first, second)} == {UID}
    host.check()


@pytest.mark.usefixtures("soon")
def test_foreign_group_of_the_name_is_not_changed_and_the_run_stays_lost(
    host: Host, process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    os.rmdir(host.tree.full_path(GroupRef("", "k")))
    ref = host.make_foreign("k")
    for _ in range(3):
        host.manager.maintenance.tick()
    record = host.get("k")
    assert (record.state, record.is_interrupted, record.generation) == (State.LOST, True, 1)
    assert len([entry for entry in caplog.records if "another program created it" in entry.message]) == 1
    assert "completed_at" in host.files("k")
    with pytest.raises(ForeignGroup):
        create(host.ctx, "k", owner="test")
    os.rmdir(host.tree.full_path(ref))
    host.manager.maintenance.tick()
    assert host.get("k").state is State.ACTIVE


def test_claimed_run_is_not_dropped(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid))
    remove(host, "k")
    host.ctx.config.settings = type(host.settings)(snapshot_ttl_s=0.0)
    host.manager.maintenance.tick()
    assert host.get("k").state is State.LOST
    release(host.ctx, "k", owner="test")
    host.manager.maintenance.tick()
    assert host.ctx.store.all() == []


def test_the_next_loss_waits_in_full_after_a_call_resumed_the_run(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the loss before was kept, so the wait after this one was over at once."""
    begin, clock = time.monotonic(), [0.0]
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.time.monotonic", lambda: begin + clock[0])
    first, second = process(), process()
    assign(host.ctx, assignment("k", first.pid))
    remove(host, "k")
    host.manager.maintenance.tick()
    assign(host.ctx, assignment("k", second.pid, member="second"))
    clock[0] = 30.0
    remove(host, "k")
    for waited in (0.0, 1.0, 1.9):
        clock[0] = 30.0 + waited
        host.manager.maintenance.tick()
        assert host.get("k").state is State.LOST, waited
    clock[0] = 32.1
    host.manager.maintenance.tick()
    assert host.get("k").state is State.ACTIVE


def test_the_next_loss_waits_in_full_after_a_resume_that_failed_late(
    host: Host, process: Start, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run had begun, and the failed try of it counted for the next loss."""
    assign(host.ctx, assignment(UID, process().pid))
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise NotWritten("the disk is full")

        patched.setattr("resctrlmond.workloads.groups.placement.adopt", fail)
        remove(host, UID)
        host.manager.maintenance.tick()
    assert host.get(UID).state is not State.LOST
    monkeypatch.setattr("resctrlmond.workloads.groups.resumption.RESUME_S", 60.0)
    host.manager.maintenance.tick()
    assert host.ctx.runs.of(UID).resume_try is None
    remove(host, UID)
    host.manager.maintenance.tick()
    assert host.get(UID).state is State.LOST


def test_a_resumed_run_has_its_first_checkpoint_at_once(host: Host, process: Start) -> None:
    """It waited for the interval since the checkpoint of the run before."""
    assign(host.ctx, assignment("k", process().pid))
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(GroupRef("", "k")))
    assign(host.ctx, assignment("k", process().pid, member="second"))
    assert "checkpoint" not in host.files("k")
    host.manager.maintenance.tick()
    assert "checkpoint" in host.files("k")


def test_each_loss_in_a_row_doubles_the_delay_up_to_a_limit() -> None:
    waits = [resumes_after_s(losses) for losses in range(1, 40)]
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits == sorted(waits)
    assert waits[-1] == MAX_RESUME_S


@pytest.mark.parametrize(("minutes", "losses"), [(9, 5), (11, 1)])
def test_long_run_resets_the_delay(minutes: int, losses: int) -> None:
    """However the clock was set meanwhile."""
    record = workload(
        "k",
        State.LOST,
        created_at="2026-01-01T00:00:00.000000Z",
        completed_at=f"2026-01-01T00:{20 - minutes}:00.000000Z",
        created_ns=10**15,
        completed_ns=10**15 + minutes * 60 * 10**9,
        prior_runs=PriorRuns({}, "lost", 4),
    )
    assert losses_in_a_row(record) == losses


def test_figures_of_earlier_runs_keep_every_digit(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid))
    exact = Decimal("98765432109876543210.123456789")
    record = host.get("k")
    prior_runs = PriorRuns({"core_energy": str(exact), TRAFFIC: ""}, "lost before")
    save(host.ctx.store, msgspec.structs.replace(record, prior_runs=prior_runs))
    host.restart()
    totals = read(host.ctx, "k")[2]
    energy, traffic = total_of(totals, "core_energy"), total_of(totals)
    assert energy.number is not None
    assert energy.number >= exact
    assert (traffic.quality, traffic.reason) == (Quality.ESTIMATED, "lost before")


@pytest.fixture
def small(small_simulation: str, tmp_path: Path) -> Iterator[Host]:
    made = Host(small_simulation, str(tmp_path))
    yield made
    made.clean()


@pytest.mark.usefixtures("soon")
def test_kill_at_any_step_of_a_resume(small: Host, process: Start, fuse: Fuse) -> None:
    step = 0
    killed = True
    while killed:
        child = process()
        assign(small.ctx, assignment(CTR, child.pid, "oci", member="c1"))
        small.manager.maintenance.tick()
        remove(small, CTR)
        killed = cut(fuse, step, small.manager.maintenance.tick)
        manager = small.restart()
        small.check()
        for _ in range(2):
            manager.maintenance.tick()
        record = manager.context.store.known(CTR)
        assert (record.state, record.generation, baseline_of(record)) == (State.ACTIVE, 2, Quality.LATE), step
        assert record.prior_runs is not None
        assert record.prior_runs.losses == 1
        assert small.tree.membership(child.pid).group == CTR
        assert os.path.isfile(f"{small.run}/completed/{CTR}/1/completed_at"), step
        end(child)
        manager.maintenance.tick()
        assert manager.context.store.known(CTR).state is State.COMPLETED
        assert small.marked_groups() == []
        small.check()
        forget(small)
        step += 1
    assert step > 8
