# SPDX-License-Identifier: Apache-2.0
"""The last point of each counter that a receiver of OTLP got, for runs that are too long to keep all points."""

from __future__ import annotations

import time
from collections.abc import Mapping

from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.exporter.otlp.points import name_of, of_workload
from tests.exporter.increase import Sum
from tests.exporter.otlp_receiver import Attributes, Point, Received
from tests.wait import wait_until

_PREFIX = "resctrl."
_SUMS = {name_of(row.accounted).name: row.accounted.sample for row in EVENT_METRICS.values() if row.accounted}
# The generation of the workload, 0 for the host, the attributes of the point and the start.
Counter = tuple[str | int, Attributes, int]
# The time and the value of a point.
Last = tuple[int, float]


class Pushed:
    """The counters that ``received`` gets from now on. Thread-safe."""

    def __init__(self, received: Received) -> None:
        self.faults: list[str] = []
        self.number = 0
        self._received = received
        # By the key of the workload, "" for the host, and by the metric.
        self._last: dict[tuple[str | int, str], dict[Counter, Last]] = {}
        received.refuses = self._take

    def _take(self, points: list[Point]) -> bool:
        self._received.points.clear()
        for point in points:
            if not point.temporality:
                continue
            self.number += 1
            of = dict(point.resource)
            key, generation = of.get("resctrl.workload.key", ""), of.get("resctrl.workload.generation", 0)
            counters = self._last.setdefault((key, point.name), {})
            counter = generation, point.attributes, point.start_ns
            before = counters.get(counter, (0, 0.0))[1]
            if point.value < before:
                self.faults.append(f"{point.name} of {key!r} {counter} fell from {before!r} to {point.value!r}")
            counters[counter] = point.time_ns, point.value
        return False

    def await_reading(self) -> None:
        """Wait for figures that were read after now."""
        now_ns = time.time_ns()
        wait_until(lambda: max((at for at, _ in self._of("", "resctrl.ends").values()), default=0) > now_ns)

    def sums(self) -> Mapping[Sum, float]:
        """Return the last value of each sum of a namespace, by its name and labels in Prometheus."""
        found: dict[Sum, Last] = {}
        for name, sample in _SUMS.items():
            for counter, last in self._of("", name).items():
                labels = {of.removeprefix(_PREFIX): str(value) for of, value in counter[1] if value != ""}
                if labels["by"] == "namespace":
                    series = sample, frozenset(labels.items())
                    found[series] = max(last, found.get(series, last))
        return {series: value for series, (_, value) in found.items()}

    def used(self, key: str) -> dict[str, float]:
        """Return the last value of each event of a workload that had one run."""
        found = {}
        for event, row in EVENT_METRICS.items():
            of = {(f"{_PREFIX}{row.workload.labels[-1]}", row.label)} if row.label else set()
            for counter, (_, value) in self._of(key, of_workload(row).name).items():
                if counter[1] == of:
                    found[event] = value
        return found

    def _of(self, key: str, name: str) -> dict[Counter, Last]:
        with self._received.guard:
            return dict(self._last.get((key, name), {}))
