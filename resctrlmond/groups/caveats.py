# SPDX-License-Identifier: Apache-2.0
"""Reasons that keep the totals of an event from being exact, whatever its counters read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.counters import Reading, event

_REALLOCATED = (
    "this processor takes bandwidth counters from one RMID for another and resets them, so some of it may be missing "
    "(where info/L3_MON/mbm_assign_mode offers mbm_event, that mode prevents it)"
)


def of_mode(readings: Iterable[Reading], mode: Mode) -> dict[str, str]:
    """The caveats, by event, of what is read while bandwidth is counted in that mode."""
    if mode is not Mode.REALLOCATED:
        return {}
    return {name: _REALLOCATED for name in sorted({reading.event for reading in readings}) if event(name).restarts}


def together(first: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """All caveats; of an event that has one in both, the first."""
    return {**more, **first}
