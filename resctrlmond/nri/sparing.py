# SPDX-License-Identifier: Apache-2.0
"""Keeps the adapter's log bounded whatever a runtime does, or does again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

BURST = 20
INTERVAL_S = 60.0
# A message quotes what came from outside, where a name may have megabytes.
LONGEST = 2000


class Sparing(logging.Filter):
    """Of each place in the code at most BURST messages in INTERVAL_S pass; the next that passes has their number.

    What is logged for debugging passes, as it was asked for. A message is cut to LONGEST characters.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Place -> when its interval began, how many passed in it, how many were held back since the last that passed.
        self._places: dict[tuple[str, int], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record passes; it may be changed."""
        if record.levelno <= logging.DEBUG:
            return True
        place, now = (record.pathname, record.lineno), self._clock()
        since, passed, held_back = self._places.get(place, (now, 0, 0))
        if now - since >= INTERVAL_S:
            since, passed = now, 0
        if passed >= BURST:
            self._places[place] = (since, passed, held_back + 1)
            return False
        self._places[place] = (since, passed + 1, 0)
        text = record.getMessage()
        if len(text) > LONGEST:
            text = text[:LONGEST] + "..."
        if held_back:
            text += f" ({held_back} more like this one were left out before it)"
        record.msg, record.args = text, ()
        return True
