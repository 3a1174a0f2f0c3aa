# SPDX-License-Identifier: Apache-2.0
"""Limit the log of messages that a runtime, or an annotation of a container, can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

BURST = 20
INTERVAL_S = 60.0
# The limit for the length of a message: a message quotes text of the runtime, where a name may have megabytes.
LONGEST = 2000


class RateLimit(logging.Filter):
    """Passes at most BURST messages in INTERVAL_S for each line of code. The next message has the number of the
    others.

    Debug messages pass, because they were requested. A message is cut to LONGEST characters.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Line of code -> start of its interval, messages that passed in it, messages that were dropped since the last
        # one.
        self._places: dict[tuple[str, int], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record passes. Changes its message."""
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
