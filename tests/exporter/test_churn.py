# SPDX-License-Identifier: Apache-2.0
"""Two minutes of ``make churn``. The Makefile runs them beside the other tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from resctrlmond.workloads.model.states import Quality
from tests.exporter.churn import churn

_SECONDS, _INTERVAL_S = 120.0, 3


@pytest.mark.timeout(900)
def test_prometheus_has_the_use_and_misses_no_end_and_sees_no_counter_fall(tmp_path: Path) -> None:
    outcome = churn(tmp_path, _SECONDS, _INTERVAL_S)
    assert outcome.faults == []
    # Both ways to kill the daemon.
    assert outcome.workloads >= 30
    assert outcome.kills >= 3
    assert outcome.short
    assert outcome.ended[Quality.EXACT] > outcome.workloads / 2
    assert outcome.ended[Quality.LATE]
    assert outcome.ended[Quality.ESTIMATED]
    assert outcome.starts
    assert outcome.samples > outcome.workloads
    assert outcome.points > outcome.workloads
    assert outcome.ended.total() > outcome.workloads
