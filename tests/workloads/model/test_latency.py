# SPDX-License-Identifier: Apache-2.0
"""Each call is in one bucket of its histogram."""

from __future__ import annotations

import pytest

from resctrlmond.workloads.model.latency import BOUNDS_US, Histogram, Latencies
from resctrlmond.workloads.model.states import CallKind


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (0.0005, 0), (0.000501, 1), (0.001, 1), (0.02, 5), (30.0, 14), (30.1, 15), (1e6, 15)],
)
def test_call_is_in_the_first_bucket_whose_bound_it_does_not_exceed(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    histogram.add(seconds)
    assert [index for index, count in enumerate(histogram.counts) if count] == [bucket]
    assert histogram.sum_us == round(seconds * 1e6)


def test_bounds_rise() -> None:
    assert list(BOUNDS_US) == sorted(set(BOUNDS_US))
    assert len(Histogram().counts) == len(BOUNDS_US) + 1


def test_each_kind_has_its_own_histogram() -> None:
    latencies = Latencies()
    latencies.add(CallKind.HOOK, 0.003)
    counts = {kind: sum(histogram.counts) for kind, histogram in latencies.histograms.items()}
    assert counts == {CallKind.HOOK: 1, CallKind.READ: 0, CallKind.CHANGE: 0}
