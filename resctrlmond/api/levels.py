# SPDX-License-Identifier: Apache-2.0
"""The current values of gauges, over all domains. resctrlctl uses this too, with its own classes."""

from __future__ import annotations

from decimal import Decimal

from resctrlmond.resctrl.kinds import Kind

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol, TypeVar

    _Level = TypeVar("_Level")

    class _Reading(Protocol):
        @property
        def event(self) -> str: ...
        @property
        def unit(self) -> str: ...
        @property
        def kind(self) -> Kind: ...
        @property
        def nested(self) -> bool: ...
        @property
        def value(self) -> str | None: ...


def levels(readings: Iterable[_Reading], level: Callable[..., _Level]) -> list[_Level]:
    """Return the sum over all domains of each gauge, such as cache occupancy. ``level`` is the class ``Level``."""
    sums: dict[tuple[str, str], Decimal | None] = {}
    for one in readings:
        if one.kind is Kind.GAUGE and not one.nested:
            name, before = (one.event, one.unit), sums.get((one.event, one.unit), Decimal(0))
            sums[name] = None if before is None or one.value is None else before + Decimal(one.value)
    return [
        level(event=event, unit=unit, value=None if number is None else f"{number:f}")
        for (event, unit), number in sorted(sums.items())
    ]
