# SPDX-License-Identifier: Apache-2.0
"""The times that a simulation goes by."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """``monotonic`` in seconds rules limbo, cache decay and lag; ``wall_ns`` stamps new nodes."""

    monotonic: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns


class Stopwatch:
    """The host's monotonic clock, put forward by as much as was asked for."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        """Time goes by."""
        self._ahead += seconds
