# SPDX-License-Identifier: Apache-2.0
"""How long calls take, as histograms with fixed bounds since the start of the daemon."""

from __future__ import annotations

import bisect

import msgspec

from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.states import CallKind

# The upper bounds of the buckets (µs): from a call that reads a record to a hook that gives up.
BOUNDS_US = (
    *(500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000),
)


class Histogram(msgspec.Struct):
    """The number of calls by duration: up to each bound, and one number more for those above. And the sum (µs)."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_US) + 1))
    sum_us: int = 0

    def add(self, seconds: float) -> None:
        """Count a call that took so long."""
        microseconds = int(seconds * 1e6)
        self.counts[bisect.bisect_left(BOUNDS_US, microseconds)] += 1
        self.sum_us += microseconds


class Latencies:
    """The histogram of each kind of call. Only the event loop adds calls, so there is no lock."""

    def __init__(self) -> None:
        self.since = utc_now()
        self.histograms = {kind: Histogram() for kind in CallKind}

    def add(self, kind: CallKind, seconds: float) -> None:
        """Count a call of that kind."""
        self.histograms[kind].add(seconds)
