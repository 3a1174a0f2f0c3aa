# SPDX-License-Identifier: Apache-2.0
"""Hardware that counts the bandwidth of only some RMIDs at a time, and the values of the others."""

from __future__ import annotations

import pytest

from tests.sim.virtual import VirtualResctrl

GIB = 1 << 30


@pytest.fixture
def resctrl() -> VirtualResctrl:
    """Return a model that tracks four RMIDs, with five groups of one task each."""
    made = VirtualResctrl("amd-tracking")
    for number in range(5):
        made.mkdir(f"mon_groups/g{number}")
        made.tasks.fork(tid=100 + number)
        made.write(f"mon_groups/g{number}/tasks", f"{100 + number}\n")
    return made


def counter(resctrl: VirtualResctrl, number: int, event: str = "mbm_total_bytes", domain: int = 0) -> str:
    return resctrl.read(f"mon_groups/g{number}/mon_data/mon_L3_{domain:02d}/{event}").strip()


def test_an_rmid_is_tracked_from_its_first_use_on(resctrl: VirtualResctrl) -> None:
    # Since mkdir, until so many others are.
    assert [counter(resctrl, number) for number in range(5)] == ["Unavailable", *["0"] * 4]
    assert counter(resctrl, 0, "llc_occupancy").isdigit()
    resctrl.run(100, 1.0)
    assert counter(resctrl, 0) == str(GIB)
    assert counter(resctrl, 0, domain=1) == "Unavailable"


def test_the_rmid_that_was_idle_longest_loses_its_counter(resctrl: VirtualResctrl) -> None:
    for number in (0, 1, 2, 3, 0, 4):
        resctrl.run(100 + number, 1.0)
        counter(resctrl, number)
    assert [counter(resctrl, number) for number in range(5)] == [str(2 * GIB), "Unavailable", *[str(GIB)] * 3]


def test_reassigned_counter_begins_from_0(resctrl: VirtualResctrl) -> None:
    resctrl.run(100, 1.0)
    assert counter(resctrl, 0) == str(GIB)
    for number in (1, 2, 3, 4):
        resctrl.run(100 + number, 1.0)
        counter(resctrl, number)
    resctrl.run(100, 3.0)
    assert counter(resctrl, 0) == str(3 * GIB)
