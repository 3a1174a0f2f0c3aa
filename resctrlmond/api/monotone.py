# SPDX-License-Identifier: Apache-2.0
"""Keep counters from going back: a client would take that for a restart from 0, and count the whole use again."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Generic, TypeVar

# The name of a metric and the values of its labels.
Series = tuple[str, tuple[str, ...]]

N = TypeVar("N", float, Decimal)


class Monotone(Generic[N]):
    """The last value of each counter, with its start.

    A figure of the daemon can go back a little while its start stays: the energy beyond the cores is a difference of
    readings at two times, and the use between a counter's last save and its reset by hardware is lost.
    """

    def __init__(self) -> None:
        self._last: dict[Series, tuple[str, N]] = {}

    def next(self, series: Series, start: str, value: N) -> tuple[N, bool]:
        """Return the value to export, and whether it is held: the former value of the same start was higher."""
        before = self._last.get(series)
        if before is not None and before[0] == start and before[1] > value:
            return before[1], True
        self._last[series] = (start, value)
        return value, False

    def forget_unless(self, is_kept: Callable[[Series], bool]) -> None:
        """Forget the counters that will not be exported again."""
        self._last = {series: last for series, last in self._last.items() if is_kept(series)}
