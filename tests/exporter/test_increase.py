# SPDX-License-Identifier: Apache-2.0
"""The comparisons of sums and of pools with the actual use report what is wrong."""

from __future__ import annotations

from fractions import Fraction

import pytest

from resctrlmond.sim.profiles import PROFILES
from tests.exporter.increase import Increase, Sum
from tests.exporter.machine_increase import MachineIncrease, Scrape
from tests.truth.record import Bounds, counted_events

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


PROFILE = PROFILES["intel-aet"]
NOTHING = dict.fromkeys(counted_events(PROFILE), Fraction(0))


def joules(before: int, pools: float, tracked: float, after: int) -> Scrape:
    """A scrape of energy; tasks in no group use some between ``before`` and ``after``."""
    energy = (Fraction(amount) for amount in (before, pools, tracked, after))
    return Scrape(*({**NOTHING, "core_energy": amount} for amount in energy))


@pytest.mark.parametrize(
    ("last", "complaints"),
    [
        # Three runs of 2 J, and 10 to 12 J in no group.
        (joules(116, 117, 8.0, 118), []),
        (joules(116, 115.5, 6.5, 118), []),
        # A run is missing in the pool of workloads, or counted twice.
        (joules(116, 115.5, 6.0, 118), ["the pool of workloads increased by 4.0"]),
        (joules(116, 117, 10.0, 118), ["the pool of workloads increased by 8.0"]),
        # More or less than all tasks can have used.
        (joules(116, 120, 8.0, 118), ["all pools increased by 19.0"]),
        (joules(116, 113, 8.0, 118), ["all pools increased by 12.0"]),
    ],
)
def test_pools_that_are_not_the_use_are_reported(last: Scrape, complaints: list[str]) -> None:
    scrapes = iter((joules(100, 101, 2.0, 102), last))
    increase = MachineIncrease(lambda: next(scrapes), PROFILE)
    increase.add({"core_energy": _RUN})  # before the first scrape
    increase.begin()
    for _ in range(3):
        increase.add({"core_energy": _RUN})
    found = increase.faults()
    assert len(found) == bool(complaints)
    assert all(complaint in found[0] for complaint in complaints)
