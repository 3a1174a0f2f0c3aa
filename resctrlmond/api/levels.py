# SPDX-License-Identifier: Apache-2.0
"""The current values of gauges, over all domains. Clients use this too."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from resctrlmond.api import types
from resctrlmond.resctrl.kinds import Kind


def levels(readings: Iterable[types.Reading]) -> list[types.Level]:
    """Return the sum over all domains of each gauge, such as cache occupancy."""
    sums: dict[tuple[str, str], Decimal | None] = {}
    for one in readings:
        if one.kind is Kind.GAUGE and not one.nested:
            name, before = (one.event, one.unit), sums.get((one.event, one.unit), Decimal(0))
            sums[name] = None if before is None or one.value is None else before + Decimal(one.value)
    return [
        types.Level(event=event, unit=unit, value=None if number is None else f"{number:f}")
        for (event, unit), number in sorted(sums.items())
    ]
