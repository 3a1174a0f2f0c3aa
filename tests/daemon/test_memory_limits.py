# SPDX-License-Identifier: Apache-2.0
"""The limits of the units are above the internal limits of the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from resctrlmond.api import budget, workers
from resctrlmond.api.dbus.gate import MAX_LARGE_BODY
from resctrlmond.workloads.model import pods
from resctrlmond.workloads.records import store
from resctrlmond.workloads.upkeep import early_pruning

UNITS = Path(__file__).parents[2] / "systemd"


def _settings(name: str) -> dict[str, str]:
    lines = (UNITS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_internal_budget_is_below_the_units_limit() -> None:
    # A record takes three times its file's size in memory, and the D-Bus server also keeps its properties.
    records = 5 * store.MAX_BYTES_WITH_RESERVE
    replies = budget.MAX_BYTES + budget.MAX_BYTES_PER_UID + budget.MAX_DBUS_BYTES + budget.MAX_DBUS_BYTES_PER_UID
    others = 2 * (pods.MAX_BYTES + replies) + 4 * MAX_LARGE_BODY
    assert records + others < 400 << 20
    # The other half is for the values of running workloads.
    assert 2 * ((400 << 20) + early_pruning.MAX_ENDED_BYTES) < 2 << 30
    assert _settings("resctrlmond.service")["MemoryMax"] == "2G"


def test_unit_allows_the_threads_of_all_lanes() -> None:
    threads = sum(lane.value[1] for lane in workers.Lane)
    assert threads + 8 <= int(_settings("resctrlmond.service")["TasksMax"])


@pytest.mark.parametrize("name", ["resctrlmond.service", "resctrlmon-nri.service", "resctrlmon-exporter.service"])
def test_no_unit_dumps_core_or_is_throttled(name: str) -> None:
    settings = _settings(name)
    assert settings["LimitCORE"] == "0"
    assert "MemoryHigh" not in settings
    assert "MemoryMax" in settings
    assert "TasksMax" in settings
