# SPDX-License-Identifier: Apache-2.0
"""Telemetry of packages: its lag, overflow and integers; no energy is lost."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.sim.kernel.counters import NS
from tests.sim.virtual import VirtualResctrl

ENERGY = "mon_groups/a/mon_data/mon_PERF_PKG_00/core_energy"
TRAFFIC = "mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes"
GIB = 1 << 30


def busy_resctrl(
    profile: str = "intel-aet", *, reports_forks: bool = True, **numbers: Any
) -> tuple[VirtualResctrl, int]:
    resctrl = VirtualResctrl(profile, reports_forks=reports_forks, **numbers)
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    return resctrl, tid


def now(resctrl: VirtualResctrl, path: str) -> str:
    """Return the content of a file without advancing the clock."""
    return resctrl.file(path).show().strip()


def test_telemetry_shows_after_a_push_and_traffic_at_once() -> None:
    resctrl, tid = busy_resctrl()
    resctrl.run(tid, 1.0)
    assert (now(resctrl, ENERGY), now(resctrl, TRAFFIC)) == ("Unavailable", str(GIB))
    resctrl.now += 0.0015
    resctrl.run(tid, 1.0)
    resctrl.model.accounting.look()
    resctrl.now += 0.001
    assert now(resctrl, ENERGY) == "5.000000"


def test_lag_continues_after_the_end_of_the_task_for_at_most_two_milliseconds() -> None:
    resctrl, tid = busy_resctrl()
    resctrl.now += 0.0001
    resctrl.run(tid, 1.0)
    resctrl.model.accounting.look()
    resctrl.tasks.exit(tid)
    assert now(resctrl, ENERGY) == "Unavailable"
    resctrl.now += 0.002
    assert now(resctrl, ENERGY) == "2.500000"


def test_push_that_is_rounded_into_the_future_is_accepted() -> None:
    resctrl, tid = busy_resctrl()
    resctrl.now = 1000.04
    assert math.floor(resctrl.now / 0.002) * 0.002 > resctrl.now
    resctrl.model.accounting.look()
    resctrl.run(tid, 1.0)
    resctrl.model.accounting.look()
    resctrl.now += 0.002
    assert now(resctrl, ENERGY) == "2.500000"


def test_a_lag_of_nothing_is_none() -> None:
    resctrl, tid = busy_resctrl(lag_ms=0)
    resctrl.run(tid, 1.0)
    assert now(resctrl, ENERGY) == "2.500000"


@pytest.mark.parametrize(
    ("profile", "lag_ms", "is_inexact"),
    [("intel-aet", 2, False), ("intel-aet", 2.5, True), ("intel-rdt", 100, False)],
)
def test_a_lag_longer_than_that_of_hardware_makes_the_simulation_inexact(
    profile: str, lag_ms: float, is_inexact: bool
) -> None:
    """After the wait that hardware needs, a total would be too small and exact."""
    reason = VirtualResctrl(profile, lag_ms=lag_ms).model.inexact
    assert ("its telemetry lags by 2.5 ms" in reason) == bool(reason) == is_inexact


def test_running_task_lags_by_the_last_part_of_the_time_since_its_last_sample() -> None:
    resctrl, tid = busy_resctrl(lag_ms=100)
    resctrl.now = 1000.15
    resctrl.run(tid, 0.15)
    # Two thirds of it were used before the last push, at 1000.1 s.
    assert Decimal(now(resctrl, ENERGY)) == pytest.approx(Decimal("0.25"), abs=Decimal("0.001"))


def test_a_register_wraps_at_its_width() -> None:
    resctrl, tid = busy_resctrl(telemetry_bits=24)  # 18 of them fraction: 64 J
    seen = []
    for _ in range(3):
        resctrl.run(tid, 10.0)
        seen.append(resctrl.read(ENERGY))
    assert seen == ["25.000000\n", "50.000000\n", "11.000000\n"]


def test_integer_events_have_no_fraction() -> None:
    resctrl, tid = busy_resctrl("intel-aet-perf")
    resctrl.run(tid, 2.0)
    package = "mon_groups/a/mon_data/mon_PERF_PKG_00/"
    assert resctrl.read(package + "unhalted_core_cycles") == "4800000000\n"
    names = set(resctrl.read("info/PERF_PKG_MON/mon_features").split())
    assert names == set(resctrl.directory(package).children)
    assert "uops_retired" in names


def test_use_after_the_last_sample_is_charged_to_the_group() -> None:
    resctrl, tid = busy_resctrl()
    resctrl.run(tid, 1.0)
    resctrl.model.accounting.look()
    resctrl.run(tid, 1.0)
    resctrl.tasks.exit(tid)
    assert resctrl.read(ENERGY) == "5.000000\n"


def test_use_of_an_unseen_task_is_charged_to_the_group() -> None:
    resctrl, tid = busy_resctrl()
    for _ in range(3):
        child = resctrl.tasks.fork(tid)
        grandchild = resctrl.tasks.fork(child)
        resctrl.run(child, 0.5)
        resctrl.run(grandchild, 0.5)
        resctrl.tasks.exit(grandchild)
        resctrl.tasks.exit(child)
    assert resctrl.read(ENERGY) == "7.500000\n"


def test_the_last_use_of_a_task_that_vanishes_after_the_look_is_counted_by_the_same_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resctrl, tid = busy_resctrl()
    resctrl.run(tid, 1.0)
    resctrl.tasks.exit(tid)
    later = iter([[], resctrl.tasks.exits()])
    monkeypatch.setattr(resctrl.tasks, "exits", lambda: next(later, []))
    assert resctrl.read(ENERGY) == "2.500000\n"


def test_last_use_is_roots_if_exits_are_not_reported() -> None:
    resctrl, tid = busy_resctrl(reports_forks=False)
    resctrl.run(tid, 1.0)
    resctrl.tasks.exit(tid)
    assert resctrl.read(ENERGY) == "Unavailable\n"
    assert resctrl.read("mon_data/mon_PERF_PKG_00/core_energy") == "2.500000\n"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 0.01)), max_size=30))
def test_lagging_counters_never_fall_nor_lead_and_always_catch_up(steps: list[tuple[int, float]]) -> None:
    resctrl, tid = busy_resctrl()
    used, before = 0, 0
    for ns, pause in steps:
        resctrl.tasks.run(tid, ns)
        used += ns
        resctrl.now += pause
        text = now(resctrl, ENERGY)
        shown = 0 if text == "Unavailable" else int(Decimal(text) * 10**6)
        assert before <= shown <= used * 5 // 2 // 1000 + 4
        before = shown
    resctrl.model.accounting.look()
    resctrl.now += 0.003
    text = now(resctrl, ENERGY)
    assert (text == "Unavailable") == (used == 0)
    if used:
        assert abs(Decimal(text) - Decimal(used) * 5 / 2 / NS) <= Decimal("0.000005")
