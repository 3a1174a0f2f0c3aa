# SPDX-License-Identifier: Apache-2.0
"""Assignable bandwidth counters: a group without a counter is reported, and gets a free counter by priority."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.api import translate
from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment, machine

Start = Callable[[], "subprocess.Popen[bytes]"]
TRAFFIC = "mbm_total_bytes"
SECOND = 1_000_000_000
GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Four counters in each L3: two are the root's, and two are left for one group."""
    with machine(tmp_path, "amd-abmc", counters=4) as (made, _):
        yield made


@pytest.fixture
def start(host: Host, process: Start) -> Callable[..., int]:
    """Start a process in the group of a workload; returns its id."""

    def start(key: str, priority: int | None = None) -> int:
        child = process()
        Control(host.mountpoint).spawn(tid=child.pid)
        assign(host.ctx, assignment(key, child.pid, priority=priority))
        return child.pid

    return start


def run(host: Host, pid: int) -> None:
    Control(host.mountpoint).run(pid, SECOND)


def traffic(of: list[Total]) -> Total:
    return next(one for one in of if one.event.name == TRAFFIC)


def info(host: Host, name: str) -> Path:
    return Path(host.mountpoint, "info", "L3_MON", name)


def test_a_group_without_a_counter_marks_its_baseline_with_reason_and_remedy(
    host: Host, start: Callable[..., int]
) -> None:
    """It was "idle" with an exact baseline, and its total was unknown without a word."""
    start("first")
    run(host, start("second"))
    first, second = (translate.workload_of(host.get(key), None) for key in ("first", "second"))
    assert (first.baseline, first.caveats) == (Quality.EXACT, {})
    assert second.baseline is Quality.ESTIMATED
    assert set(second.caveats) == {TRAFFIC, "mbm_local_bytes"}
    assert "no counter was free in mon_L3_00, mon_L3_01" in second.caveats[TRAFFIC]
    assert "unassign counters of groups that do not need them" in second.caveats[TRAFFIC]
    total = traffic(release(host.ctx, "second", owner="test").totals)
    assert (total.number, total.quality) == (None, Quality.UNKNOWN)
    assert second.caveats[TRAFFIC] in total.reason


L3S = ("mon_L3_00", "mon_L3_01")


def test_status_has_the_counters_of_each_l3(host: Host, start: Callable[..., int]) -> None:
    start("first")
    seen = host.manager.watcher.look().bandwidth
    assert seen is not None
    assert (seen.mode, seen.can_assign) == (Mode.ASSIGNED, True)
    assert (seen.counters, seen.available) == (dict.fromkeys(L3S, 4), dict.fromkeys(L3S, 0))
    info(host, "mbm_assign_mode").write_text("default\n")
    seen = host.manager.watcher.look().bandwidth
    assert seen is not None
    assert (seen.mode, seen.can_assign, seen.available) == (Mode.REALLOCATED, True, {})


def test_freed_counter_is_assigned_by_priority(host: Host, start: Callable[..., int]) -> None:
    start("first")
    pids = {key: start(key, priority) for key, priority in (("low", -5), ("high", 5), ("middle", 0))}
    for pid in pids.values():
        run(host, pid)
    release(host.ctx, "first", owner="test")
    # At once: a group that is created before the next tick would get it from the kernel.
    assert host.get("high").first.unassigned == ()
    host.manager.maintenance.tick()
    assert host.get("middle").first.unassigned
    assert host.get("low").first.unassigned
    for pid in pids.values():
        run(host, pid)
    total = traffic(release(host.ctx, "high", owner="test").totals)
    # The second of the two seconds.
    assert (total.number, total.quality) == (GIB, Quality.ESTIMATED)
    assert host.get("middle").first.unassigned == ()
    # The next daemon assigns the remaining counter.
    host.restart()
    release(host.ctx, "middle", owner="test")
    assert host.get("low").first.unassigned == ()
    host.check()


def test_counters_that_are_used_up_are_not_asked_for(
    host: Host, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group that lacks counters, of which there can be hundreds, was refused for each counter."""
    start("first")
    for key in ("second", "third", "fourth"):
        start(key)
    tree = host.ctx.tree
    assign, given = tree.assign_counter, list[bool]()

    def assign_and_note(ref: GroupRef, name: str, domain: str) -> bool:
        given.append(assign(ref, name, domain))
        return given[-1]

    monkeypatch.setattr(tree, "assign_counter", assign_and_note)
    release(host.ctx, "first", owner="test")
    assert given == [True] * 4
    assert host.get("second").first.unassigned == ()


def test_counter_that_an_administrator_frees_is_assigned_and_no_counter_is_removed(
    host: Host, start: Callable[..., int]
) -> None:
    start("first")
    run(host, start("second", 1000))
    host.manager.maintenance.tick()
    # For any priority: the first workload and the root keep their counters.
    assert host.get("second").first.unassigned
    assert all("=_" not in path.read_text() for path in [Path(host.mountpoint, "mbm_L3_assignments")])
    Path(host.mountpoint, "mbm_L3_assignments").write_text(f"{TRAFFIC}:1=_\n")
    host.manager.maintenance.tick()
    # mbm_total_bytes comes before mbm_local_bytes.
    assert ("mon_L3_01", TRAFFIC) not in host.get("second").first.unassigned
    assert ("mon_L3_00", TRAFFIC) in host.get("second").first.unassigned
    assert ("mon_L3_01", "mbm_local_bytes") in host.get("second").first.unassigned
    assert traffic(release(host.ctx, "first", owner="test").totals).quality is Quality.EXACT


def test_group_gets_counters_that_the_kernel_does_not_assign_by_itself(host: Host, start: Callable[..., int]) -> None:
    info(host, "mbm_assign_on_mkdir").write_text("0\n")
    run(host, start("k"))
    total = traffic(release(host.ctx, "k", owner="test").totals)
    assert (total.number, total.quality) == (GIB, Quality.EXACT)


def test_no_counter_is_assigned_in_the_default_mode(host: Host, start: Callable[..., int]) -> None:
    start("first")
    start("second")
    info(host, "mbm_assign_mode").write_text("default\n")
    host.manager.maintenance.tick()
    assert host.get("second").first.unassigned
    assert traffic(release(host.ctx, "second", owner="test").totals).quality is not Quality.EXACT
