# SPDX-License-Identifier: Apache-2.0
"""Compare the increase of the sums of namespaces in Prometheus with the actual use of their workloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from resctrlmond.exporter.metrics import EVENT_METRICS
from tests.exporter.prometheus import Prometheus
from tests.truth.record import Bounds

# Sums of floating-point numbers.
_ACCURACY = 1e-9

# A sum: its metric and its labels.
Sum = tuple[str, frozenset[tuple[str, str]]]


class Increase:
    """The increase of all sums of namespaces, which ``read`` returns, and the use that was added meanwhile."""

    def __init__(self, read: Callable[[], Mapping[Sum, float]]) -> None:
        self._read = read
        self._first: Mapping[Sum, float] = {}
        self._used: dict[Sum, Bounds] = {}

    def begin(self) -> None:
        """Count from the present values on."""
        self._first, self._used = self._read(), {}

    def add(self, namespace: str, used: Mapping[str, Bounds]) -> None:
        """Add the use of a run, by event."""
        for event, amount in used.items():
            row = EVENT_METRICS[event]
            assert row.accounted is not None
            labels = zip(row.accounted.labels, ("namespace", namespace, row.label), strict=False)
            series = row.accounted.sample, frozenset(labels)
            self._used[series] = self._used.get(series, Bounds()) + amount

    def faults(self, *, without: str = "") -> list[str]:
        """Return the sums that did not increase by the use; a sum without any must not have increased.

        Only workloads of the namespace ``without``, which is left out, may be running.
        """
        last, found = self._read(), []
        for series in last.keys() | self._used.keys():
            labels = dict(series[1])
            if labels["name"] == without:
                continue
            increase = last.get(series, 0.0) - self._first.get(series, 0.0)
            used = self._used.get(series, Bounds())
            accuracy = Fraction(_ACCURACY * last.get(series, 0.0))
            if increase not in used + Bounds(-accuracy, accuracy):
                found.append(
                    f"{series[0]}{labels} increased by {increase!r}; its workloads used {float(used.low)!r} to "
                    f"{float(used.high)!r}"
                )
        return found


def sums(server: Prometheus) -> dict[Sum, float]:
    """Return the last sample of each sum of a namespace."""
    names = [
        name for name in server.metrics() if name.startswith("resctrlmond_accounted_") and name.endswith("_total")
    ]
    return {(name, one.labels): one.samples[-1][1] for name in names for one in server.series(name, by="namespace")}
