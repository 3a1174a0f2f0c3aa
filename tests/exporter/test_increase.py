# SPDX-License-Identifier: Apache-2.0
"""The comparison of sums with the actual use reports each wrong sum."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.exporter.increase import Increase, Sum
from tests.truth.record import Bounds

# Half a unit is known to be missing or not at each run.
_RUN = Bounds(Fraction("1.5"), Fraction(2))


def energy(name: str) -> Sum:
    return "resctrlmond_accounted_core_energy_joules_total", frozenset({("by", "namespace"), ("name", name)})


def traffic(name: str) -> Sum:
    labels = {("by", "namespace"), ("name", name), ("scope", "total")}
    return "resctrlmond_accounted_memory_bandwidth_bytes_total", frozenset(labels)


@pytest.mark.parametrize(
    ("sums", "complaints"),
    [
        # Three runs of 2 J and 2 bytes, after a first one.
        ({energy("shop"): 8.0, traffic("shop"): 8.0}, []),
        ({energy("shop"): 6.5, traffic("shop"): 8.0}, []),
        ({energy("shop"): 6.25, traffic("shop"): 8.0}, ["energy", "increased by 4.25", "4.5 to 6.0"]),
        ({energy("shop"): 8.25, traffic("shop"): 8.0}, ["energy", "increased by 6.25"]),
        # The last run is missing, or counted twice, in one of the metrics.
        ({energy("shop"): 8.0, traffic("shop"): 6.0}, ["bandwidth", "increased by 4.0"]),
        ({energy("shop"): 8.0, traffic("shop"): 10.0}, ["bandwidth", "increased by 8.0"]),
        # A sum is absent, or another one has the run too.
        ({energy("shop"): 8.0}, ["bandwidth", "increased by -2.0"]),
        (
            {energy("shop"): 8.0, traffic("shop"): 8.0, energy("bank"): 2.0},
            ["bank", "increased by 2.0", "0.0 to 0.0"],
        ),
        # Its own workload is running.
        ({energy("shop"): 8.0, traffic("shop"): 8.0, energy("house"): 2.0}, []),
    ],
)
def test_sum_that_is_not_the_use_is_reported(sums: dict[Sum, float], complaints: list[str]) -> None:
    now = {energy("shop"): 2.0, traffic("shop"): 2.0}
    increase = Increase(lambda: now)
    increase.begin()
    for _ in range(3):
        increase.add("shop", {"core_energy": _RUN, "mbm_total_bytes": _RUN})
    now = sums
    found = increase.faults(without="house")
    assert len(found) == bool(complaints)
    assert all(complaint in found[0] for complaint in complaints)
