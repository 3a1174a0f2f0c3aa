# SPDX-License-Identifier: Apache-2.0
"""The first checkpoint of a run waits while calls of hooks are queued, and no longer than a few seconds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.groups import counters
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from tests.workloads.conftest import Host, assignment, machine

Start = Callable[[], "subprocess.Popen[bytes]"]


def has_checkpoint(host: Host, key: str = "k") -> bool:
    return bool(host.ctx.snapshots.last_read(key))


def totals(manager: Manager, key: str) -> list[Total]:
    workload = manager.context.store.known(key)
    return counters.totals(manager.context, workload, counters.readings(manager.context, workload))


@pytest.fixture
def queued(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the queue of the hooks; no run is too old for a checkpoint to wait."""
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.FIRST_CHECKPOINT_S", 3600.0)
    host.ctx.config.settings = Settings(checkpoint_interval_s=3600.0)
    calls = ["a call"]
    host.manager.maintenance.has_queued_calls = lambda: bool(calls)
    return calls


def test_first_checkpoint_waits_until_no_call_is_queued(host: Host, process: Start, queued: list[str]) -> None:
    assign(host.ctx, assignment("k", process().pid))
    host.ctx.watched.report("k", host.get("k").living)
    for _ in range(3):
        host.manager.maintenance.tick()
    assert not has_checkpoint(host)
    queued.clear()
    host.manager.maintenance.tick()
    assert has_checkpoint(host)


def test_first_checkpoint_of_an_older_run_does_not_wait(
    host: Host, process: Start, queued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.FIRST_CHECKPOINT_S", 0.0)
    host.manager.maintenance.tick()
    assert has_checkpoint(host)


def test_first_checkpoint_waits_for_a_checkpoint_interval_at_most(
    host: Host, process: Start, queued: list[str]
) -> None:
    host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
    assign(host.ctx, assignment("k", process().pid))
    host.manager.maintenance.tick()
    assert has_checkpoint(host)


@pytest.mark.parametrize("profile", ["intel-aet", "amd-abmc"])
def test_first_checkpoint_does_not_wait_if_groups_can_lose_their_counters(
    tmp_path: Path, process: Start, profile: str
) -> None:
    child = process()
    with machine(tmp_path, profile) as (host, control):
        control.spawn(tid=child.pid)
        host.ctx.config.settings = Settings()
        host.manager.maintenance.has_queued_calls = lambda: True
        assign(host.ctx, assignment("k", child.pid))
        host.manager.maintenance.tick()
        assert has_checkpoint(host) == (profile == "amd-abmc")
        host.ctx.interference.close()


def test_kill_before_the_first_checkpoint_loses_nothing(tmp_path: Path, process: Start) -> None:
    child = process()
    with machine(tmp_path, "intel-aet") as (host, control):
        control.spawn(tid=child.pid)
        host.ctx.config.settings = Settings()
        host.manager.maintenance.has_queued_calls = lambda: True
        assign(host.ctx, assignment("k", child.pid))
        control.run(child.pid, 1_000_000_000)
        host.manager.maintenance.tick()
        assert not has_checkpoint(host)
        host.restart()
        control.run(child.pid, 1_000_000_000)
        host.manager.maintenance.tick()
        (used,) = control.truth(tid=child.pid).tasks[0].used
        traffic = next(total for total in totals(host.manager, "k") if total.event.name == "mbm_total_bytes")
        assert (traffic.number, traffic.quality) == (used.bytes, Quality.EXACT)
        host.check()
        host.ctx.interference.close()


def test_totals_of_a_group_that_is_lost_before_its_first_checkpoint_are_unknown(
    host: Host, process: Start, queued: list[str]
) -> None:
    assign(host.ctx, assignment("k", process().pid))
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(host.get("k").first.ref))
    host.restart()
    assert host.get("k").state is State.LOST
    found = totals(host.manager, "k")
    assert {total.quality for total in found} == {Quality.UNKNOWN}
    assert all("never read before" in total.reason for total in found)
    host.check()
