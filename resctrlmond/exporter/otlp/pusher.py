# SPDX-License-Identifier: Apache-2.0
"""Push the figures to a receiver again and again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from resctrlmond.exporter.metrics import EventMetrics
from resctrlmond.exporter.otlp.ends import Ends
from resctrlmond.exporter.otlp.figures import Figures, Run, of_host, of_usage
from resctrlmond.exporter.otlp.ledger import Ledger, Temporality
from resctrlmond.exporter.otlp.points import Builder, Part
from resctrlmond.exporter.otlp.sender import Sender, SendFailure
from resctrlmond.exporter.source import Observation, Source

log = logging.getLogger(__name__)

# Receivers of gRPC accept messages of 4 MiB: a resource has 1 KB, or 10 KB with all events and long names.
_RESOURCES = 200
# A push ends at a refusal that takes longer: it would take too long to divide the message.
_REFUSAL_S = 5.0
# How many refused messages a push divides: while the receiver has accepted nothing, and then.
_FIRST_DIVISIONS, _DIVISIONS = 8, 64
# The most refused resources that a push sends again.
_MOST_ALONE = 16


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
        # The names of resources that the receiver refused while it accepted others, each of which is sent alone.
        self._refused: set[str] = set()
        self._unsaved = ""
        # The runs whose ends are in the state file.
        self._saved: frozenset[Run] = frozenset()
        for figures in ledger.ends:
            ends.add(figures)

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
        self._ledger.give_up(self._ends.given_up())
        parts = self._builder.parts(observation, self._runs(observation), time.time_ns())
        if observation.usages is not None:
            workloads = [usage.workload for usage in observation.usages]
            self._ledger.forget({workload.key: workload.created_at for workload in workloads})
        # The receiver may take the time-out of a push, and the exporter may be killed meanwhile.
        if any(figures.run not in self._saved for figures in self._ends.waiting()):
            self._save()
        return self._deliver(parts)

    def _deliver(self, parts: Sequence[Part]) -> bool:
        """Send the parts in several messages. Return whether the receiver accepted everything.

        A refused message is divided until it has one resource, so that a resource that the receiver does not accept
        keeps none of the others back. Another failure ends the push: a receiver that does not answer takes the
        time-out of each message.
        """
        self._refused &= {_name(part) for part in parts}
        usual = [part for part in parts if _name(part) not in self._refused]
        alone = [[part] for part in parts if _name(part) in self._refused]
        messages = deque(usual[first : first + _RESOURCES] for first in range(0, len(usual), _RESOURCES))
        # Others each time, so that each is sent again if the receiver accepts it one day.
        messages += random.sample(alone, min(len(alone), _MOST_ALONE))
        refused: list[tuple[Part, str]] = []
        has_accepted, divisions, failure, is_unfinished = False, 0, "", len(alone) > _MOST_ALONE
        while messages:
            message, begun = messages.popleft(), time.monotonic()
            found = self._send(message)
            if found is None:
                has_accepted = True
                continue
            failure = found.reason
            if not found.is_refusal or time.monotonic() - begun > _REFUSAL_S:
                self._note_failure(failure)
                return False
            if len(message) == 1:
                refused.append((message[0], failure))
            elif divisions < (_DIVISIONS if has_accepted else _FIRST_DIVISIONS):
                divisions += 1
                middle = len(message) // 2
                messages += [message[:middle], message[middle:]]
            else:
                is_unfinished = True
        self._note_failure("" if has_accepted else failure)
        if has_accepted:
            self._note_refused(refused)
        return not refused and not is_unfinished

    def _note_failure(self, failure: str) -> None:
        """Log that the receiver accepts nothing, and once it accepts something again."""
        if failure and not self._is_failing:
            log.warning("cannot push to %s: %s. It is tried again", self._sender.url, failure)
        if not failure and self._is_failing:
            log.info("%s accepts figures again", self._sender.url)
        self._is_failing = bool(failure)

    def _note_refused(self, refused: Iterable[tuple[Part, str]]) -> None:
        """Log each resource that the receiver does not accept, although it accepts others, and send it alone."""
        for part, reason in refused:
            name = _name(part)
            if name not in self._refused:
                log.warning(
                    "%s does not accept the figures of %s: %s. They are tried again", self._sender.url, name, reason
                )
            self._refused.add(name)

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

    def _send(self, parts: Sequence[Part]) -> SendFailure | None:
        """Send a message. Return why the receiver did not accept it, or None."""
        if self._ledger.temporality is Temporality.CUMULATIVE:
            # The receiver may have got them although the push fails.
            for part in parts:
                part.record_counters()
        failure = self._sender.send(parts)
        if failure is not None:
            return failure
        for part in parts:
            part.record_counters()
            part.record_end()
            if part.ended_run is not None:
                self._ends.remove(part.ended_run)
            self._refused.discard(_name(part))
        self._save()
        return None

    def _save(self) -> None:
        waiting = self._ends.waiting()
        try:
            self._ledger.save(waiting)
        except OSError as error:
            if str(error) != self._unsaved:
                log.error(
                    "%s. After a restart, figures may be pushed twice, and final figures that wait now may be lost",
                    error,
                )
            self._unsaved = str(error)
        else:
            self._unsaved = ""
            self._saved = frozenset(figures.run for figures in waiting)


def _name(part: Part) -> str:
    """Return the name of the resource in messages: the key of its workload."""
    return str(part.attributes.get("resctrl.workload.key", "the host"))
