# SPDX-License-Identifier: Apache-2.0
"""Ticks skip a workload without news, and sweeps one of which no task has run since the last one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.workloads.evidence.activity import activity
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import counters, ends
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, Member, State, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.records.store import Store, Transaction
from resctrlmond.workloads.upkeep.maintenance import Maintenance
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.wait import wait_until
from tests.workloads.builders import workload
from tests.workloads.conftest import Host, assignment, join

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the workloads that ticks look at."""
    keys: list[str] = []
    record_ends = ends.record_ends

    def counted(ctx: Context, txn: Transaction) -> Workload | None:
        keys.append(txn.key)
        return record_ends(ctx, txn)

    monkeypatch.setattr(ends, "record_ends", counted)
    return keys


def watch(host: Host, key: str = "k") -> None:
    """Report all members of the workload as watched, as the daemon does, and have ticks find its group."""
    host.ctx.watched.report(key, host.get(key).living)
    host.manager.maintenance.tick()
    host.manager.maintenance.tick()


def tick_of_a_sweep(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_S", 0.0)
        host.manager.maintenance.tick()


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def test_tick_does_no_work_for_watched_members(host: Host, process: Start, looked_at: list[str]) -> None:
    for key in ("k", "other"):
        assign(host.ctx, assignment(key, process().pid))
    watch(host)
    looked_at.clear()
    host.manager.maintenance.tick()
    assert looked_at == ["other"]


def test_end_without_a_report_is_found_by_the_next_sweep(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid, "oci"))
    watch(host)
    end(child)
    host.manager.maintenance.tick()
    assert host.get("k").state is State.ACTIVE
    tick_of_a_sweep(host, monkeypatch)
    assert host.get("k").state is State.COMPLETED


def test_end_of_a_member_that_is_not_watched_any_longer_is_found_by_the_next_tick(host: Host, process: Start) -> None:
    """The end may not have been recorded after a report, and there is no further report."""
    child = process()
    assign(host.ctx, assignment("k", child.pid, "oci"))
    watch(host)
    end(child)
    host.ctx.watched.report("k", ())
    host.manager.maintenance.tick()
    assert host.get("k").state is State.COMPLETED


def test_only_the_process_that_is_watched_is_skipped(host: Host, process: Start, looked_at: list[str]) -> None:
    """A member of the same id may be another process, and its watch begin later."""
    assign(host.ctx, assignment("k", process().pid, member="m"))
    watch(host)
    assign(host.ctx, assignment("k", process().pid, member="m"))
    for _ in range(3):
        looked_at.clear()
        host.manager.maintenance.tick()
        assert looked_at == ["k"]


def test_claims_that_end_by_time_or_by_tasks_are_checked(
    host: Host, process: Start, looked_at: list[str], cgroup: str
) -> None:
    create(host.ctx, "lingers", owner="a", ends=EndRule.CONTAINER)
    create(host.ctx, "waits", owner="a")
    assign(host.ctx, assignment("until-empty", process().pid, ends=EndRule.TASKS))
    child = process()
    join(cgroup, child.pid)
    assign(host.ctx, Assignment(key="service", owner="a", cgroup=cgroup))
    watch(host, "until-empty")
    watch(host, "service")
    looked_at.clear()
    host.manager.maintenance.tick()
    assert looked_at == ["lingers", "until-empty"]
    end(child)
    host.manager.maintenance.record_ends("service")
    looked_at.clear()
    host.manager.maintenance.tick()
    host.manager.maintenance.tick()
    assert looked_at.count("service") == 2, "tasks may appear in its control group"


@pytest.mark.parametrize("by", ["its directory", "its class", "its place"])
def test_removal_of_the_group_of_a_skipped_workload_is_found_by_the_next_tick(
    host: Host, process: Start, looked_at: list[str], by: str
) -> None:
    host.make_class("gold")
    create(host.ctx, "k", owner="test", class_="gold")
    assign(host.ctx, assignment("k", process().pid, class_="gold", allow_class_change=True))
    watch(host)
    looked_at.clear()
    host.manager.maintenance.tick()
    assert looked_at == []
    path = host.tree.full_path(host.get("k").first.ref)
    if by == "its class":
        os.rmdir(Path(host.mountpoint, "gold"))
    else:
        os.rmdir(path)
    if by == "its place":
        host.make_foreign("k", "gold")
    host.manager.maintenance.tick()
    assert host.get("k").state is State.LOST


def test_new_path_of_the_group_of_a_skipped_workload_is_found_by_the_next_tick(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid))
    watch(host)
    host.tree.rename(GroupRef("", "k"), GroupRef("", "renamed"))
    host.manager.maintenance.tick()
    host.manager.maintenance.tick()
    assert (host.get("k").first.name, host.get("k").state) == ("renamed", State.ACTIVE)
    os.rmdir(host.tree.full_path(GroupRef("", "renamed")))
    host.manager.maintenance.tick()
    assert host.get("k").state is State.LOST


@pytest.mark.parametrize("is_mounted_again", [False, True])
def test_unmount_under_a_skipped_workload_is_found_by_the_next_tick(
    tmp_path: Path, process: Start, is_mounted_again: bool
) -> None:
    for name in ("resctrl", "run"):
        (tmp_path / name).mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        assign(host.ctx, assignment("k", process().pid))
        watch(host)
        assert unmount(host.mountpoint)
        if not is_mounted_again:
            host.manager.maintenance.tick()
    if is_mounted_again:
        with Simulation(str(tmp_path / "resctrl"), "intel-aet", 8):
            host.manager.maintenance.tick()
    assert host.get("k").state is State.LOST
    host.ctx.interference.close()


def test_removal_is_found_by_the_next_tick_if_nothing_reports_it(host: Host, process: Start) -> None:
    """The host gives no inotify instance, for example."""
    assign(host.ctx, assignment("k", process().pid))
    watch(host)
    host.ctx.interference.close()
    os.rmdir(host.tree.full_path(GroupRef("", "k")))
    host.manager.maintenance.tick()
    assert host.get("k").state is State.LOST


def assign_in(host: Host, cgroup: str, pid: int) -> None:
    """Assign a process that has a control group of its own: the kernel states the CPU time of that."""
    join(cgroup, pid)
    assign(host.ctx, assignment("k", pid, "oci", own_cgroup=cgroup))


def fall_asleep(host: Host, monkeypatch: pytest.MonkeyPatch, looked_at: list[str]) -> None:
    """Sweep until the sweep skips the workload."""
    watch(host)
    for _ in range(100):
        looked_at.clear()
        tick_of_a_sweep(host, monkeypatch)
        if not looked_at:
            return
    pytest.fail("the workload has not fallen asleep")


def test_sweep_of_all_skips_no_workload(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, looked_at: list[str], cgroup: str
) -> None:
    """In case that the report of an end, or of a removed group, was lost."""
    assign_in(host, cgroup, process().pid)
    fall_asleep(host, monkeypatch, looked_at)
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_ALL_S", 0.0)
    tick_of_a_sweep(host, monkeypatch)
    assert looked_at == ["k"]


def test_end_of_a_process_of_a_workload_that_slept_is_found_by_the_next_sweep(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, looked_at: list[str], cgroup: str
) -> None:
    child = process()
    assign_in(host, cgroup, child.pid)
    fall_asleep(host, monkeypatch, looked_at)
    end(child)
    tick_of_a_sweep(host, monkeypatch)
    assert host.get("k").state is State.COMPLETED


def test_task_that_joins_a_workload_that_slept_is_moved_after_it_has_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, looked_at: list[str], cgroup: str, puppet: Puppet
) -> None:
    init = Puppet()
    try:
        join(cgroup, init.pid)
        assign(host.ctx, assignment("k", init.pid, "oci", own_cgroup=cgroup))
        fall_asleep(host, monkeypatch, looked_at)
        join(cgroup, puppet.pid)
        puppet.do("burn 0.05")
        tick_of_a_sweep(host, monkeypatch)
        assert host.tree.membership(puppet.pid).group == "k"
        assert baseline_of(host.get("k")) is Quality.LATE
    finally:
        init.kill()


def test_workload_with_a_task_outside_does_not_sleep(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, looked_at: list[str], cgroup: str
) -> None:
    init, other = process(), process()
    join(cgroup, init.pid)
    assign(host.ctx, assignment("k", init.pid, "oci", own_cgroup=cgroup))
    foreign = host.make_foreign("foreign")
    host.tree.write_task(foreign.path, other.pid)
    join(cgroup, other.pid)
    for _ in range(5):
        watch(host)
        looked_at.clear()
        tick_of_a_sweep(host, monkeypatch)
        assert looked_at == ["k"]
    assert host.get("k").members[0].tasks_outside == 1


@pytest.mark.parametrize("text", ["nr_periods 0\nnr_throttled 0\n", ""])
def test_file_without_a_cpu_time_does_not_show_that_nothing_has_run(tmp_path: Path, text: str) -> None:
    """That of a control group of version 1, and of one that is gone."""
    (tmp_path / "cpu.stat").write_text(text)
    member = Member("m", "cgroup", "a", cgroup=str(tmp_path))
    assert activity(workload("k", members=(member,))) is None
    (tmp_path / "cpu.stat").write_text("usage_usec 7\nuser_usec 0\n")
    assert activity(workload("k", members=(member,))) == (b"usage_usec 7",)


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the workloads whose counters are read for a checkpoint."""
    keys: list[str] = []
    checkpoint = counters.checkpoint

    def counted(ctx: Context, txn: Transaction) -> None:
        keys.append(txn.key)
        checkpoint(ctx, txn)

    monkeypatch.setattr(counters, "checkpoint", counted)
    return keys


def wait_until_it_sleeps(pid: int) -> None:
    """Wait until a process that has replied waits for the next request."""
    known: list[bytes] = []

    def sleeps() -> bool:
        known.append(Path(f"/proc/{pid}/schedstat").read_bytes())
        # On a busy machine, a process that could run may not run for long.
        return known[-5:] == [known[-1]] * 5 and processes.stat_fields(pid)[0] == b"S"

    wait_until(sleeps)


def ticks(host: Host, number: int = 20) -> None:
    host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
    for _ in range(number):
        host.manager.maintenance.tick()


def test_checkpoints_are_skipped_while_no_task_runs(
    host: Host, puppet: Puppet, checkpoints: list[str], cgroup: str
) -> None:
    wait_until_it_sleeps(puppet.pid)
    assign_in(host, cgroup, puppet.pid)
    ticks(host)
    checkpoints.clear()
    ticks(host)
    # One in ten is taken.
    assert checkpoints == ["k", "k"]
    puppet.do("burn 0.05")
    wait_until_it_sleeps(puppet.pid)
    checkpoints.clear()
    ticks(host, 2)
    assert checkpoints == ["k", "k"], "the second one has what the hardware counted after the task stopped"
    ticks(host, 5)
    assert checkpoints == ["k", "k"]


def test_use_of_a_task_that_slept_is_in_the_next_checkpoint(host: Host, puppet: Puppet, cgroup: str) -> None:
    wait_until_it_sleeps(puppet.pid)
    assign_in(host, cgroup, puppet.pid)
    ticks(host)
    before = host.ctx.snapshots.last_read("k")
    puppet.do("burn 0.2")
    ticks(host, 1)
    after = host.ctx.snapshots.last_read("k")
    assert {domain: last.values for domain, last in after.items()} != {
        domain: last.values for domain, last in before.items()
    }


def test_no_checkpoint_is_skipped_of_a_group_that_can_lose_its_counters(
    tmp_path: Path, puppet: Puppet, checkpoints: list[str], cgroup: str
) -> None:
    """A counter that another group had meanwhile restarts from 0, and only a reading in between detects it."""
    for name in ("resctrl", "run"):
        (tmp_path / name).mkdir()
    with Simulation(str(tmp_path / "resctrl"), "amd-abmc", 8):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        wait_until_it_sleeps(puppet.pid)
        assign_in(host, cgroup, puppet.pid)
        ticks(host, 10)
        assert checkpoints == ["k"] * 10
        host.ctx.interference.close()


def test_no_checkpoint_is_skipped_of_a_workload_without_a_control_group(
    host: Host, process: Start, checkpoints: list[str]
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    ticks(host, 10)
    assert checkpoints == ["k"] * 10


def test_first_checkpoints_of_a_task_that_joins_a_workload_that_slept_are_taken(
    host: Host, process: Start, checkpoints: list[str]
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    ticks(host)
    assign(host.ctx, assignment("k", process().pid, member="other"))
    checkpoints.clear()
    ticks(host, 2)
    assert checkpoints == ["k", "k"]


@pytest.fixture
def considered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the workloads of which ticks determine whether they can be skipped."""
    keys: list[str] = []
    is_unchanged = Maintenance._is_unchanged

    def counted(self: Maintenance, workload: Workload, settings: Settings) -> bool:
        keys.append(workload.key)
        return is_unchanged(self, workload, settings)

    monkeypatch.setattr(Maintenance, "_is_unchanged", counted)
    return keys


def test_ticks_cost_nothing_for_workloads_that_are_all_skipped(
    host: Host, process: Start, considered: list[str]
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    watch(host)
    host.manager.maintenance.tick()
    considered.clear()
    for _ in range(3):
        host.manager.maintenance.tick()
    assert considered == []


def test_checkpoint_of_a_workload_that_was_skipped_with_all_others_is_taken_when_it_is_due(
    host: Host, process: Start, checkpoints: list[str], considered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_S", 3600.0)
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_ALL_S", 3600.0)
    assign(host.ctx, assignment("k", process().pid))
    watch(host)
    host.manager.maintenance.tick()
    checkpoints.clear()
    considered.clear()
    host.manager.maintenance.tick()
    assert considered == []
    later = time.monotonic() + host.ctx.config.settings.checkpoint_interval_s
    monkeypatch.setattr(time, "monotonic", lambda: later)
    host.manager.maintenance.tick()
    assert checkpoints == ["k"]


def test_one_workload_with_news_is_found_among_workloads_that_were_all_skipped(
    host: Host, process: Start, looked_at: list[str]
) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid, "oci"))
    assign(host.ctx, assignment("other", process().pid))
    for key in ("k", "other"):
        watch(host, key)
    host.manager.maintenance.tick()
    end(child)
    host.ctx.watched.report("k", ())
    looked_at.clear()
    host.manager.maintenance.tick()
    assert looked_at == ["k"]
    assert host.get("k").state is State.COMPLETED


def test_checkpoints_are_taken_while_a_task_runs_that_an_ended_member_left(
    host: Host, puppet: Puppet, checkpoints: list[str]
) -> None:
    """They were skipped, because no living member had used CPU time."""
    assign(host.ctx, assignment("k", puppet.pid))
    remove_member(host.ctx, "k", host.get("k").members[0].id)
    ticks(host)
    assert host.get("k").state is State.IDLE
    for _ in range(3):
        puppet.do("burn 0.05")
        checkpoints.clear()
        ticks(host, 1)
        assert checkpoints == ["k"]


def test_tasks_that_an_ended_member_may_have_left_are_not_taken_for_sleeping(tmp_path: Path) -> None:
    def member(id_: str, **fields: Any) -> Member:
        return Member(id=id_, kind="container", owner="test", started_at="2026-01-01T00:00:00Z", **fields)

    (tmp_path / "cgroup.events").write_text("populated 1\n")
    ended_at, gone = "2026-01-01T00:01:00Z", str(tmp_path / "gone")
    living = member("living", cgroup=str(tmp_path))
    assert not ends.may_run_unseen(workload("k", members=(living,)))
    assert not ends.may_run_unseen(workload("k", members=(living, member("ended", cgroup=gone, ended_at=ended_at))))
    left = (
        member("process", pid=1, start_time=1, ended_at=ended_at),
        member("populated", cgroup=str(tmp_path), ended_at=ended_at),
    )
    for one in left:
        assert ends.may_run_unseen(workload("k", members=(living, one)))


def test_ticks_and_sweeps_look_at_no_finished_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("a", "b"):
        create(host.ctx, key, owner="o")
        release(host.ctx, key, owner="o")
    create(host.ctx, "k", owner="o")
    host.manager.maintenance.tick()
    opened: list[str] = []
    transaction_if_free = Store.transaction_if_free

    def noted(store: Store, key: str) -> contextlib.AbstractContextManager[Transaction | None]:
        opened.append(key)
        return transaction_if_free(store, key)

    monkeypatch.setattr(Store, "transaction_if_free", noted)
    create(host.ctx, "k", owner="another")
    host.manager.maintenance.tick()
    tick_of_a_sweep(host, monkeypatch)
    assert set(opened) == {"k"}


def test_tick_forgets_a_run_that_has_ended_but_not_the_next_run_of_its_key(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(host.ctx.runs, "forget", forgotten.append)
    for key in ("over", "again"):
        create(host.ctx, key, owner="o")
        release(host.ctx, key, owner="o")
    create(host.ctx, "again", owner="o")
    forgotten.clear()
    host.manager.maintenance.tick()
    host.manager.maintenance.tick()
    assert forgotten == ["over"]
