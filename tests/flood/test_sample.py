# SPDX-License-Identifier: Apache-2.0
"""A sample of make flood: Assign, the hook and root on D-Bus are served, and memory is bounded, during floods."""

from __future__ import annotations

from tests.flood.__main__ import MOST_MIB, measure, table


def test_memory_is_limited_during_a_flood_and_hooks_succeed() -> None:
    rows = measure(
        [
            "unread lists",
            "left reads",
            "unread watches",
            "D-Bus 30 MiB",
            "D-Bus unheard",
            "D-Bus unread lists",
            "D-Bus left",
        ],
        samples=2,
    )
    assert [row.flood for row in rows if row.peak_mib > MOST_MIB] == [], table(rows)
    assert all(len(row.assign) == len(row.hook) == len(row.bus) == 2 for row in rows)
