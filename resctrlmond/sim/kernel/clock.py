# SPDX-License-Identifier: Apache-2.0
"""The clock of a simulation, real or ahead of the host's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """The simulation's clock.

    ``monotonic`` (seconds) is for limbo, cache decay, lag; ``wall_ns`` for new nodes; ``boot_ns`` for the witness.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    boot_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Stopwatch:
    """The host's monotonic clock plus an offset."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._ahead += seconds
