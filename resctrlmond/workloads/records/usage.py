# SPDX-License-Identifier: Apache-2.0
"""The use of all workloads, read in one pass that concurrent callers share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.records.totals import shown

# A pass serves all callers that come until then, counted from its end; or as long again as it took, up to a limit:
# a scrape, which asks for all workloads and then for their sums, would read hundreds of groups twice. Two such calls
# take at least twice the CPU time without it.
INTERVAL_S = 0.5
AGAIN = 1.0
_LONGEST_S = 10.0
# After this time without a pass, the last one is forgotten: it takes some KiB for each workload.
FORGET_S = 30.0
# A pass takes about a millisecond for each workload. Only a blocked kernel takes longer.
PATIENCE_S = 30.0


class Usage(msgspec.Struct, frozen=True):
    """The use of one workload: the totals of all events since the baseline, at ``read_at`` (RFC 3339, UTC).

    ``read_ns`` is the same time in ns since boot (``clock.boot_ns``). ``readings`` are the values of its counters at
    that time, summed over its groups. Without any group, there are none. ``error`` is the reason for which the totals
    are missing; "" if they are not.
    """

    workload: Workload
    read_at: str = ""
    read_ns: int = 0
    readings: tuple[Reading, ...] = ()
    totals: tuple[Total, ...] = ()
    error: str = ""

    def shown(self) -> Usage:
        """Return the usage without the totals of events that the workload's profile leaves out."""
        if not self.workload.events:
            return self
        return msgspec.structs.replace(self, totals=tuple(shown(self.workload, self.totals)))


T = TypeVar("T")


class _Pass(msgspec.Struct, Generic[T], frozen=True):
    begun: float  # time.monotonic()
    ended: float
    found: T

    @property
    def is_recent(self) -> bool:
        as_long_again_s = min(AGAIN * (self.ended - self.begun), _LONGEST_S)
        return time.monotonic() - self.ended < max(INTERVAL_S, as_long_again_s)


class SharedPass(Generic[T]):
    """Reads all workloads with ``read``, and serves other callers with the same pass for a time (INTERVAL_S).

    The pass is consistent for each workload, not between workloads: each has its own time.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._begun_at = ""
        self._last: _Pass[T] | None = None

    def get(self) -> T:
        """Return the last pass if it is recent, else read all workloads. Raises NotRead."""
        return self.get_with_begin()[1]

    def get_with_begin(self) -> tuple[float, T]:
        """Return the time.monotonic() at which the pass began, and what it read; see ``get``.

        Raises NotRead if another thread reads them and does not end, because the kernel does not answer.
        """
        if not self._lock.acquire(timeout=PATIENCE_S):
            raise NotRead(
                f"cannot read the counters: the kernel has not answered since {self._begun_at}",
                remedy="The kernel's log (journalctl -k) may show the reason",
            )
        try:
            last = self._last
            if last is None or not last.is_recent:
                begun, self._begun_at = time.monotonic(), utc_now()
                found = self._read()
                last = self._last = _Pass(begun, time.monotonic(), found)
            return last.begun, last.found
        finally:
            self._lock.release()

    def forget_old(self) -> bool:
        """Forget the last pass if no caller has asked for a while. Return whether there is none now."""
        last = self._last
        if last is None or time.monotonic() - last.begun < FORGET_S or not self._lock.acquire(blocking=False):
            return last is None
        try:
            self._last = None
        finally:
            self._lock.release()
        return True
