# SPDX-License-Identifier: Apache-2.0
"""Keep a connection to the runtime, or wait for the runtime."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from resctrlmond.nri.mux import MuxError
from resctrlmond.nri.plugin import Plugin
from resctrlmond.nri.session import Session
from resctrlmond.service import journal

log = logging.getLogger(__name__)

# The first and the longest delay between two attempts to connect. The first one is short because the runtime may be
# starting; the longest one limits the cost of a runtime that does not exist.
RECONNECT_S = (0.2, 5.0)
# A connection that lasts this long resets the delay.
LASTING_S = 5.0
# A runtime configures a plugin at once, or after plugins that make it wait. containerd waits 5 s for each of them.
REGISTRATION_S = 60.0


class Connector:
    """Connects to the runtime's socket with a name and an index. ``report`` receives the state of the connection as
    text.
    """

    def __init__(self, socket: str, name: str, index: str, plugin: Plugin, report: Callable[[str], None]) -> None:
        self._socket = socket
        self._name = name
        self._index = index
        self._plugin = plugin
        self._report = report
        self._wait_s = RECONNECT_S[0]
        self._reason = ""
        # The runtime of the current connection, and the time limit for its registration.
        self._runtime = ""
        self._limit = asyncio.Timeout(None)

    async def run(self) -> None:
        """Connect until the task is cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self._connect()
                # At once: a container that starts before the next connection is late.
                log.info("connecting to the runtime again, because the profiles need other events")
                self._wait_s, self._reason = RECONNECT_S[0], ""
                continue
            except (OSError, EOFError, MuxError) as error:
                if self._runtime and time.monotonic() - began >= LASTING_S:
                    self._wait_s, self._reason = RECONNECT_S[0], ""
                self._report_wait(getattr(error, "strerror", None) or str(error))
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(2 * self._wait_s, RECONNECT_S[1])

    async def _connect(self) -> None:
        self._runtime = ""
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            async with asyncio.timeout(REGISTRATION_S) as self._limit:
                await Session(reader, writer, self._plugin, self._configured).run(self._name, self._index)
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            raise ConnectionError(
                f"it accepted the connection but sent nothing for {REGISTRATION_S:.0f} s"
            ) from error

    def _configured(self, runtime: str) -> None:
        self._limit.reschedule(None)
        log.info("registered with %s", runtime)
        self._report(f"registered with {runtime}")
        self._runtime = runtime

    def _report_wait(self, reason: str) -> None:
        if reason != self._reason:
            log.log(journal.NOTICE, "no runtime at %s: %s; waiting for one", self._socket, reason)
            self._report(f"waiting for a runtime at {self._socket}: {reason}")
            self._reason = reason
