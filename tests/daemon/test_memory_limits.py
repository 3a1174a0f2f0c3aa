# SPDX-License-Identifier: Apache-2.0
"""The limits of the units leave room for what the daemon allows itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from resctrlmond.api import budget, workers
from resctrlmond.api.dbus.gate import MAX_LARGE_BODY
from resctrlmond.workloads import early_pruning, pods, store

UNITS = Path(__file__).parents[2] / "systemd"


def _settings(name: str) -> dict[str, str]:
    lines = (UNITS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_internal_budget_is_below_the_units_limit() -> None:
    # A record in memory takes three times its file, and the D-Bus door keeps its properties, too.
    records = 5 * store.MAX_BYTES_WITH_RESERVE
    replies = budget.MAX_BYTES + budget.MAX_BYTES_PER_UID + budget.MAX_DBUS_BYTES + budget.MAX_DBUS_BYTES_PER_UID
    others = 2 * (pods.MAX_BYTES + replies) + 4 * MAX_LARGE_BODY
    assert records + others < 400 << 20
    # As much again is left for the values of workloads that live.
    assert 2 * ((400 << 20) + early_pruning.MAX_ENDED_BYTES) < 2 << 30
    assert _settings("resctrlmond.service")["MemoryMax"] == "2G"


def test_there_are_threads_for_every_lane() -> None:
    threads = sum(lane.value[1] for lane in workers.Lane)
    assert threads + 8 <= int(_settings("resctrlmond.service")["TasksMax"])


@pytest.mark.parametrize("name", ["resctrlmond.service", "resctrlmon-nri.service"])
def test_no_unit_dumps_core_or_is_throttled(name: str) -> None:
    settings = _settings(name)
    assert settings["LimitCORE"] == "0"
    assert "MemoryHigh" not in settings
    assert "MemoryMax" in settings
    assert "TasksMax" in settings
