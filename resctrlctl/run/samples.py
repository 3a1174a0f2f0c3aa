# SPDX-License-Identifier: Apache-2.0
"""Samples of a workload while the command of ``run`` runs: the levels of its gauges, and its use in intervals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from decimal import Decimal

import msgspec

from resctrlctl.base.errors import CommandError, print_error
from resctrlctl.connection.daemon import Daemon
from resctrlctl.run.target import as_known, difference
from resctrlmond.api import signatures, types
from resctrlmond.api.levels import levels


class LevelSummary(msgspec.Struct, frozen=True, rename="camel"):
    """The samples of one gauge during a run, such as cache occupancy. The numbers are decimal."""

    event: str
    unit: str
    average: str
    peak: str
    samples: int


class Interval(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The use in one interval, which ended ``time`` seconds after the command began, and the levels at that time.

    ``run`` is the number of the run, from 1, if the command runs several times; 0 otherwise.
    """

    time: float
    totals: list[types.Total]
    levels: list[types.Level]
    run: int = 0


class Sampler:
    """Reads a workload in a thread, every ``interval_s`` from the start of the command on.

    ``begin`` is the reading before the command; None if the totals of the workload began with the command. Each
    interval is given to ``on_interval``, if there is such a function, until that raises OSError. A reading that takes
    longer than an interval replaces the next ones.
    """

    def __init__(
        self,
        daemon: Daemon,
        key: str,
        interval_s: float,
        begin: types.ReadReply | None,
        on_interval: Callable[[Interval], None] | None,
    ) -> None:
        self._daemon = daemon
        self._key = key
        self._interval_s = interval_s
        self._last = begin
        self._on_interval = on_interval
        self._is_failing = False
        self._values: dict[tuple[str, str], list[Decimal]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, begun: float) -> None:
        """Start the thread; the command began at ``begun`` (time.monotonic())."""
        self._thread = threading.Thread(target=self._sample, args=(begun,), name="samples", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no further sample. Does not wait."""
        self._stopped.set()

    def wait(self) -> None:
        """Wait for the end of the thread after ``stop``."""
        if self._thread is not None:
            self._thread.join()

    def advance(self, elapsed_s: float, now: types.ReadReply) -> None:
        """Give the interval that ends with this reading. Other threads call this after ``wait``."""
        try:
            totals = now.totals if self._last is None else difference(self._last, now)
            self._last = now
            if self._on_interval is not None:
                self._on_interval(Interval(round(elapsed_s, 6), list(totals), levels(now.readings)))
        except CommandError as error:
            self._last = now
            self._report(error)
        except OSError as error:
            print_error(f"cannot write the intervals: {error.strerror}. The command continues")
            self._on_interval = None

    def summaries(self) -> list[LevelSummary]:
        """Return the average and the peak of each gauge that had a number in a sample. Call ``wait`` before."""
        return [
            LevelSummary(event, unit, f"{sum(values) / len(values):.0f}", f"{max(values):f}", len(values))
            for (event, unit), values in self._values.items()
        ]

    def _sample(self, begun: float) -> None:
        request = types.KeyRequest(key=self._key)
        number = 0
        while True:
            number = max(number, int((time.monotonic() - begun) / self._interval_s)) + 1
            if self._stopped.wait(begun + number * self._interval_s - time.monotonic()):
                return
            try:
                reply = self._daemon.call(f"read {self._key!r}", signatures.READ, request)
            except CommandError as error:
                self._report(error)
                continue
            if self._stopped.is_set():
                return  # the command may have ended before the counters were read
            self._is_failing = False
            for level in levels(reply.readings):
                if level.value is not None:
                    self._values.setdefault((level.event, level.unit), []).append(Decimal(level.value))
            self.advance(time.monotonic() - begun, as_known(reply))

    def _report(self, error: CommandError) -> None:
        # Without intervals, the report shows how many samples there were.
        if self._on_interval is not None and not self._is_failing:
            print_error(str(error))
        self._is_failing = True
