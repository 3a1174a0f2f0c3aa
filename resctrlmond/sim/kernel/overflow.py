# SPDX-License-Identifier: Apache-2.0
"""Wraps of the hardware's bandwidth counters, if the kernel's worker that reads them in time is stopped."""

from __future__ import annotations

import collections
from collections.abc import Iterable

# The identity of a counter: event, RMID, node, and its start, because a restarted counter is another one.
Key = tuple[str, int, int, int]


class Overflow:
    """The loss by wraps: none while mbm_handle_overflow() runs, every second (fs/resctrl/monitor.c).

    A read of a counter, by the worker or by a reader, adds the count since the previous read, modulo ``wrap`` bytes
    (mbm_overflow_count() in arch/x86/kernel/cpu/resctrl/monitor.c): whole wraps between two reads are lost.
    """

    def __init__(self, wrap: int) -> None:
        self._wrap = wrap
        self._stopped = False
        self._seen: dict[Key, int] = {}  # bytes at the last read, while the worker is stopped
        self._lost: collections.Counter[Key] = collections.Counter()

    def stop(self, counters: Iterable[tuple[Key, int]]) -> None:
        """Stop the worker after a last read of all counters."""
        if not self._stopped:
            self._seen, self._stopped = dict(counters), True

    def start(self, counters: Iterable[tuple[Key, int]]) -> None:
        """Read all counters, and start the worker."""
        for key, count in counters:
            self.look(key, count)
        self._stopped = False

    def look(self, key: Key, count: int) -> int:
        """Return the kernel's value of a counter that has counted this many bytes."""
        if self._stopped:
            since = count - self._seen.get(key, 0)
            self._lost[key] += since - since % self._wrap
            self._seen[key] = count
        return count - self._lost[key]
