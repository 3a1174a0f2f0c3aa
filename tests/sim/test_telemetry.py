# SPDX-License-Identifier: Apache-2.0
"""Telemetry of packages: its lag, its wrap, its integers, and what is never lost of it."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.sim.kernel.counters import NS
from tests.sim.virtual import Lab

ENERGY = "mon_groups/a/mon_data/mon_PERF_PKG_00/core_energy"
TRAFFIC = "mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes"
GIB = 1 << 30


def busy_lab(profile: str = "intel-aet", *, tells_forks: bool = True, **numbers: Any) -> tuple[Lab, int]:
    lab = Lab(profile, tells_forks=tells_forks, **numbers)
    lab.mkdir("mon_groups/a")
    tid = lab.tasks.fork()
    lab.write("mon_groups/a/tasks", str(tid))
    return lab, tid


def now(lab: Lab, path: str) -> str:
    """The file's content without any time going by."""
    return lab.file(path).show().strip()


def test_telemetry_shows_after_a_push_and_traffic_at_once() -> None:
    lab, tid = busy_lab()
    lab.run(tid, 1.0)
    assert (now(lab, ENERGY), now(lab, TRAFFIC)) == ("Unavailable", str(GIB))
    lab.now += 0.0015
    lab.run(tid, 1.0)
    lab.model.accounting.look()
    lab.now += 0.001
    assert now(lab, ENERGY) == "5.000000"


def test_lag_goes_on_after_the_death_of_the_task_and_ends_within_two_milliseconds() -> None:
    lab, tid = busy_lab()
    lab.now += 0.0001
    lab.run(tid, 1.0)
    lab.model.accounting.look()
    lab.tasks.exit(tid)
    assert now(lab, ENERGY) == "Unavailable"
    lab.now += 0.002
    assert now(lab, ENERGY) == "2.500000"


def test_push_that_is_rounded_into_the_future_is_accepted() -> None:
    lab, tid = busy_lab()
    lab.now = 1000.04
    assert math.floor(lab.now / 0.002) * 0.002 > lab.now
    lab.model.accounting.look()
    lab.run(tid, 1.0)
    lab.model.accounting.look()
    lab.now += 0.002
    assert now(lab, ENERGY) == "2.500000"


def test_a_lag_of_nothing_is_none() -> None:
    lab, tid = busy_lab(lag_ms=0)
    lab.run(tid, 1.0)
    assert now(lab, ENERGY) == "2.500000"


@pytest.mark.parametrize(
    ("profile", "lag_ms", "is_inexact"),
    [("intel-aet", 2, False), ("intel-aet", 2.5, True), ("intel-rdt", 100, False)],
)
def test_a_lag_longer_than_that_of_hardware_makes_the_simulation_inexact(
    profile: str, lag_ms: float, is_inexact: bool
) -> None:
    """A daemon that waits as on hardware reported too little, as exact."""
    reason = Lab(profile, lag_ms=lag_ms).model.inexact
    assert ("its telemetry lags by 2.5 ms" in reason) == bool(reason) == is_inexact


def test_a_running_task_lags_by_the_last_part_of_the_time_since_it_was_looked_at() -> None:
    lab, tid = busy_lab(lag_ms=100)
    lab.now = 1000.15
    lab.run(tid, 0.15)
    # Two thirds of it were used before the last push, at 1000.1 s.
    assert Decimal(now(lab, ENERGY)) == pytest.approx(Decimal("0.25"), abs=Decimal("0.001"))


def test_a_register_wraps_at_its_width() -> None:
    lab, tid = busy_lab(telemetry_bits=24)  # 18 of them fraction: 64 J
    seen = []
    for _ in range(3):
        lab.run(tid, 10.0)
        seen.append(lab.read(ENERGY))
    assert seen == ["25.000000\n", "50.000000\n", "11.000000\n"]


def test_integer_events_have_no_fraction() -> None:
    lab, tid = busy_lab("intel-aet-perf")
    lab.run(tid, 2.0)
    package = "mon_groups/a/mon_data/mon_PERF_PKG_00/"
    assert lab.read(package + "unhalted_core_cycles") == "4800000000\n"
    names = set(lab.read("info/PERF_PKG_MON/mon_features").split())
    assert names == set(lab.directory(package).children)
    assert "uops_retired" in names


def test_use_after_the_last_sample_is_charged_to_the_group() -> None:
    lab, tid = busy_lab()
    lab.run(tid, 1.0)
    lab.model.accounting.look()
    lab.run(tid, 1.0)
    lab.tasks.exit(tid)
    assert lab.read(ENERGY) == "5.000000\n"


def test_use_of_an_unseen_task_is_charged_to_the_group() -> None:
    lab, tid = busy_lab()
    for _ in range(3):
        child = lab.tasks.fork(tid)
        grandchild = lab.tasks.fork(child)
        lab.run(child, 0.5)
        lab.run(grandchild, 0.5)
        lab.tasks.exit(grandchild)
        lab.tasks.exit(child)
    assert lab.read(ENERGY) == "7.500000\n"


def test_the_last_use_of_a_task_that_vanishes_after_the_look_is_counted_by_the_same_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, tid = busy_lab()
    lab.run(tid, 1.0)
    lab.tasks.exit(tid)
    later = iter([[], lab.tasks.exits()])
    monkeypatch.setattr(lab.tasks, "exits", lambda: next(later, []))
    assert lab.read(ENERGY) == "2.500000\n"


def test_last_use_is_roots_if_exits_are_not_reported() -> None:
    lab, tid = busy_lab(tells_forks=False)
    lab.run(tid, 1.0)
    lab.tasks.exit(tid)
    assert lab.read(ENERGY) == "Unavailable\n"
    assert lab.read("mon_data/mon_PERF_PKG_00/core_energy") == "2.500000\n"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 0.01)), max_size=30))
def test_lagging_counters_never_fall_nor_lead_and_always_catch_up(steps: list[tuple[int, float]]) -> None:
    lab, tid = busy_lab()
    used, before = 0, 0
    for ns, pause in steps:
        lab.tasks.run(tid, ns)
        used += ns
        lab.now += pause
        text = now(lab, ENERGY)
        shown = 0 if text == "Unavailable" else int(Decimal(text) * 10**6)
        assert before <= shown <= used * 5 // 2 // 1000 + 4
        before = shown
    lab.model.accounting.look()
    lab.now += 0.003
    text = now(lab, ENERGY)
    assert (text == "Unavailable") == (used == 0)
    if used:
        assert abs(Decimal(text) - Decimal(used) * 5 / 2 / NS) <= Decimal("0.000005")
