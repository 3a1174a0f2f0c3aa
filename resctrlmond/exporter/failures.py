# SPDX-License-Identifier: Apache-2.0
"""Count the connections that got no reply, and log some of them."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping

log = logging.getLogger(__name__)

# Each user of the host can cause failures, so each kind is logged once in this time.
_LOG_S = 600.0


class Failure(enum.StrEnum):
    """Why a connection got no reply: a label of the metric."""

    TLS = "tls"
    SLOW = "slow"
    FULL = "full"
    CLOSED = "closed"


class Failures:
    """The connections that failed since the start. Thread-safe."""

    def __init__(self) -> None:
        self.since = time.time()
        self._guard = threading.Lock()
        self._counts = Counter(dict.fromkeys(Failure, 0))
        self._logged: dict[Failure, float] = {}

    def add(self, failure: Failure, reason: str, client: str = "") -> None:
        """Count a failure. Log its reason if none of its kind was logged in the last ten minutes."""
        now = time.monotonic()
        with self._guard:
            self._counts[failure] += 1
            is_logged = now - self._logged.get(failure, -_LOG_S) >= _LOG_S
            if is_logged:
                self._logged[failure] = now
        log.log(
            logging.WARNING if is_logged else logging.DEBUG,
            "a connection%s got no reply: %s. resctrlmond_exporter_connections_failed_total counts all of them",
            f" from {client}" if client else "",
            reason,
        )

    def counts(self) -> Mapping[Failure, int]:
        """Return how many connections have failed, by kind."""
        with self._guard:
            return dict(self._counts)
