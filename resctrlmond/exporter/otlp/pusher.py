# SPDX-License-Identifier: Apache-2.0
"""Push the figures to a receiver again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from resctrlmond.exporter.metrics import EventMetrics
from resctrlmond.exporter.otlp.ends import Ends
from resctrlmond.exporter.otlp.figures import Figures, of_host, of_usage
from resctrlmond.exporter.otlp.ledger import Ledger, Temporality
from resctrlmond.exporter.otlp.points import Builder, Part
from resctrlmond.exporter.otlp.sender import Sender
from resctrlmond.exporter.source import Observation, Source

log = logging.getLogger(__name__)

# Receivers of gRPC accept messages of 4 MiB: a resource has 1 KB, or 10 KB with all events and long names.
_RESOURCES = 200


class Pusher:
    """Pushes what ``source`` and ``ends`` report. All of this is done by one thread."""

    def __init__(
        self,
        source: Source,
        ends: Ends,
        sender: Sender,
        ledger: Ledger,
        events: Mapping[str, EventMetrics],
        *,
        timeout_s: float,
    ) -> None:
        self._source = source
        self._ends = ends
        self._sender = sender
        self._ledger = ledger
        self._host = {**of_host(), **sender.attributes}
        self._builder = Builder(ledger, events, self._host)
        self._timeout_s = timeout_s
        self._is_failing = False
        self._unsaved = ""

    def run(self, interval_s: float, stop: threading.Event) -> None:
        """Push now, at each interval and, at last, when ``stop`` is set."""
        is_last = False
        while True:
            begun = time.monotonic()
            try:
                self.push()
            except Exception:  # a bug must not end all later pushes
                log.exception("a push failed")
            if is_last:
                return
            is_last = stop.wait(max(0.0, begun + interval_s - time.monotonic()))

    def push(self) -> bool:
        """Push all that the receiver does not have. Return whether it accepted everything."""
        observation = self._source.observe(self._timeout_s)
        parts = self._builder.parts(observation, self._runs(observation), time.time_ns())
        if observation.usages is not None:
            workloads = [usage.workload for usage in observation.usages]
            self._ledger.forget({workload.key: workload.created_at for workload in workloads})
        # Up to the first failure: a receiver that does not answer takes the time-out of each message.
        return all(self._send(parts[first : first + _RESOURCES]) for first in range(0, len(parts), _RESOURCES))

    def _runs(self, observation: Observation) -> Iterable[Figures]:
        """Return the figures of each run. An end that was watched is newer than what was listed before."""
        listed = filter(None, map(of_usage, observation.usages or ()))
        runs = {figures.run: figures for figures in listed}
        for figures in self._ends.waiting():
            known = self._ledger.runs.get(figures.run)
            if known is not None and known.is_final:
                self._ends.remove(figures.run)
            else:
                runs[figures.run] = figures
        # A run that continues another one comes after it.
        return sorted(runs.values(), key=lambda of: (of.run.key, of.start, of.run.created_at))

    def _send(self, parts: Sequence[Part]) -> bool:
        if self._ledger.temporality is Temporality.CUMULATIVE:
            # The receiver may have got them although the push fails.
            for part in parts:
                part.keep()
        failure = self._sender.send(parts)
        if failure is not None:
            if not self._is_failing:
                log.warning("cannot push to %s: %s. It is tried again", self._sender.url, failure)
            self._is_failing = True
            return False
        if self._is_failing:
            log.info("%s accepts figures again", self._sender.url)
        self._is_failing = False
        for part in parts:
            part.keep()
            part.end()
            if part.final is not None:
                self._ends.remove(part.final)
        self._save()
        return True

    def _save(self) -> None:
        try:
            self._ledger.save()
        except OSError as error:
            if str(error) != self._unsaved:
                log.error("%s. After a restart, figures may be pushed twice", error)
            self._unsaved = str(error)
        else:
            self._unsaved = ""
