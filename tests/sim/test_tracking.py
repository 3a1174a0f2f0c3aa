# SPDX-License-Identifier: Apache-2.0
"""Hardware that counts the bandwidth of some RMIDs at a time: which ones, and what the others read."""

from __future__ import annotations

import pytest

from tests.sim.virtual import Lab

GIB = 1 << 30


@pytest.fixture
def lab() -> Lab:
    """Five groups with a task each, on a machine that tracks four RMIDs."""
    made = Lab("amd-tracking")
    for number in range(5):
        made.mkdir(f"mon_groups/g{number}")
        made.tasks.fork(tid=100 + number)
        made.write(f"mon_groups/g{number}/tasks", f"{100 + number}\n")
    return made


def counter(lab: Lab, number: int, event: str = "mbm_total_bytes", domain: int = 0) -> str:
    return lab.read(f"mon_groups/g{number}/mon_data/mon_L3_{domain:02d}/{event}").strip()


def test_an_rmid_is_tracked_from_its_first_use_on(lab: Lab) -> None:
    # Since mkdir, until so many others are.
    assert [counter(lab, number) for number in range(5)] == ["Unavailable", *["0"] * 4]
    assert counter(lab, 0, "llc_occupancy").isdigit()
    lab.run(100, 1.0)
    assert counter(lab, 0) == str(GIB)
    assert counter(lab, 0, domain=1) == "Unavailable"


def test_the_rmid_that_was_idle_longest_loses_its_counter(lab: Lab) -> None:
    for number in (0, 1, 2, 3, 0, 4):
        lab.run(100 + number, 1.0)
        counter(lab, number)
    assert [counter(lab, number) for number in range(5)] == [str(2 * GIB), "Unavailable", *[str(GIB)] * 3]


def test_a_counter_that_comes_back_begins_from_0(lab: Lab) -> None:
    lab.run(100, 1.0)
    assert counter(lab, 0) == str(GIB)
    for number in (1, 2, 3, 4):
        lab.run(100 + number, 1.0)
        counter(lab, number)
    lab.run(100, 3.0)
    assert counter(lab, 0) == str(3 * GIB)
