# SPDX-License-Identifier: Apache-2.0
"""Bandwidth counters of the hardware wrap; the kernel's worker that looks at them in time can be stopped."""

from __future__ import annotations

import collections
from collections.abc import Iterable

# Which counter: event, RMID, node, and where it began, so that one that began anew is another one.
Key = tuple[str, int, int, int]


class Overflow:
    """What wraps cost: nothing while mbm_handle_overflow() runs, every second (fs/resctrl/monitor.c).

    A look at a counter, by the worker or by a reader, adds what was counted since the look before, modulo ``wrap``
    bytes (mbm_overflow_count() in arch/x86/kernel/cpu/resctrl/monitor.c): whole wraps between two looks are lost.
    """

    def __init__(self, wrap: int) -> None:
        self._wrap = wrap
        self._stopped = False
        self._seen: dict[Key, int] = {}  # bytes at the last look, while the worker is stopped
        self._lost: collections.Counter[Key] = collections.Counter()

    def stop(self, counters: Iterable[tuple[Key, int]]) -> None:
        """The worker has looked at all counters, and does not again."""
        if not self._stopped:
            self._seen, self._stopped = dict(counters), True

    def start(self, counters: Iterable[tuple[Key, int]]) -> None:
        """It looks at all counters, and goes on."""
        for key, count in counters:
            self.look(key, count)
        self._stopped = False

    def look(self, key: Key, count: int) -> int:
        """What the kernel makes of a counter that has counted so many bytes in truth."""
        if self._stopped:
            since = count - self._seen.get(key, 0)
            self._lost[key] += since - since % self._wrap
            self._seen[key] = count
        return count - self._lost[key]
