# SPDX-License-Identifier: Apache-2.0
"""Keeps a connection to the runtime, or waits for one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from resctrlmond import journal
from resctrlmond.nri.mux import MuxError
from resctrlmond.nri.plugin import Plugin
from resctrlmond.nri.session import Session

log = logging.getLogger(__name__)

# Between two tries to connect: a runtime that starts is found soon, one that is not there costs nothing.
RECONNECT_S = (0.2, 5.0)
# A connection that lasted so long was one; what ends sooner is tried again as if it had not been.
LASTING_S = 5.0
# A runtime that has taken the connection configures us at once, or once it is done with plugins that keep it waiting,
# of which containerd gives each 5 s.
REGISTRATION_S = 60.0


class Connector:
    """Connects to the runtime's socket under a name and an index; ``say`` hears in words how that stands."""

    def __init__(self, socket: str, name: str, index: str, plugin: Plugin, say: Callable[[str], None]) -> None:
        self._socket = socket
        self._name = name
        self._index = index
        self._plugin = plugin
        self._say = say
        self._wait_s = RECONNECT_S[0]
        self._said = ""
        # Whom the current connection is with, and until when it must be with somebody.
        self._runtime = ""
        self._limit = asyncio.Timeout(None)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self._connect()
            except (OSError, EOFError, MuxError) as error:
                if self._runtime and time.monotonic() - began >= LASTING_S:
                    self._wait_s, self._said = RECONNECT_S[0], ""
                self._tell(getattr(error, "strerror", None) or str(error))
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
            raise ConnectionError(f"it took the connection and said nothing for {REGISTRATION_S:.0f} s") from error

    def _configured(self, runtime: str) -> None:
        self._limit.reschedule(None)
        log.info("registered with %s", runtime)
        self._say(f"registered with {runtime}")
        self._runtime = runtime

    def _tell(self, reason: str) -> None:
        if reason != self._said:
            log.log(journal.NOTICE, "no runtime at %s: %s; waiting for one", self._socket, reason)
            self._say(f"waiting for a runtime at {self._socket}: {reason}")
            self._said = reason
