# SPDX-License-Identifier: Apache-2.0
"""Collect the final figures of each run that ends, also of those that the daemon no longer lists."""

from __future__ import annotations

import logging
import threading

from resctrlmond.api import signatures
from resctrlmond.client import Client
from resctrlmond.exporter.otlp.figures import Figures, Run, check, of_end
from resctrlmond.exporter.otlp.ledger import Omission

log = logging.getLogger(__name__)

# Some KB each. A receiver that refuses for long must not let the process grow.
MAX_ENDS = 4096


class Ends:
    """The ends that wait for a push: the last ``most``. A thread of its own follows the daemon at ``path``."""

    def __init__(self, path: str, most: int = MAX_ENDS) -> None:
        self._path = path
        self._most = most
        self._guard = threading.Lock()
        self._waiting: dict[Run, Figures] = {}
        self._given_up: dict[Run, Omission] = {}

    def start(self) -> None:
        """Follow the daemon from now on, over its restarts."""
        threading.Thread(target=self._follow, name="watch", daemon=True).start()

    def add(self, figures: Figures) -> None:
        """Keep the end of a run until ``remove``, in the place of the oldest one if there are too many.

        An end that cannot be converted is given up: no push could deliver it, and no state could keep it.
        """
        try:
            check(figures)
        except ValueError as error:
            log.warning("the final figures of %s cannot be pushed: %s", figures.run.key, error)
            with self._guard:
                self._given_up[figures.run] = Omission.INVALID
            return
        with self._guard:
            self._waiting[figures.run] = figures
            while len(self._waiting) > self._most:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                self._given_up[oldest] = Omission.FULL

    def waiting(self) -> list[Figures]:
        """Return all ends that were not removed."""
        with self._guard:
            return list(self._waiting.values())

    def given_up(self) -> dict[Run, Omission]:
        """Return the runs whose ends were given up since the last call. Log how many waited for too long."""
        with self._guard:
            found, self._given_up = self._given_up, {}
        if refused := [*found.values()].count(Omission.FULL):
            log.warning(
                "the receiver has not accepted the final figures of %d runs, which are given up; the metrics"
                " resctrl.accounted.* include them",
                refused,
            )
        return found

    def remove(self, run: Run) -> None:
        """Drop the end of a run, if there is one: the receiver has it."""
        with self._guard:
            self._waiting.pop(run, None)

    def _follow(self) -> None:
        # The calls of each push report that the daemon does not answer.
        replies = Client(self._path).follow(
            signatures.WATCH, on_failure=lambda error: log.debug("cannot watch the workloads: %s", error)
        )
        for reply in replies:
            for figures in filter(None, map(of_end, reply.changes)):
                self.add(figures)
            if reply.listed:
                log.debug("watching the workloads")
