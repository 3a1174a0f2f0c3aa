# SPDX-License-Identifier: Apache-2.0
"""A sample of make flood: Assign and the hook are served, and memory is bounded, while the doors are flooded."""

from __future__ import annotations

from tests.flood.__main__ import MOST_MIB, measure, table


def test_a_flood_takes_bounded_memory_and_stops_no_hook() -> None:
    rows = measure(["unread lists", "D-Bus 30 MiB"], samples=2)
    assert [row.flood for row in rows if row.peak_mib > MOST_MIB] == [], table(rows)
    assert all(len(row.assign) == len(row.hook) == 2 for row in rows)
