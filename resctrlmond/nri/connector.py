# SPDX-License-Identifier: Apache-2.0
"""Keeps a connection to the runtime, or waits for one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from resctrlmond import journal
from resctrlmond.nri.mux import MuxError
from resctrlmond.nri.plugin import Plugin
from resctrlmond.nri.session import Session

log = logging.getLogger(__name__)

# Between two tries to connect: a runtime that starts is found soon, one that is not there costs nothing.
RECONNECT_S = (0.2, 5.0)


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

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self._connect()
            except (OSError, EOFError, MuxError) as error:
                self._tell(getattr(error, "strerror", None) or str(error))
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(2 * self._wait_s, RECONNECT_S[1])

    async def _connect(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        await Session(reader, writer, self._plugin, self._configured).run(self._name, self._index)

    def _configured(self, runtime: str) -> None:
        log.info("registered with %s", runtime)
        self._say(f"registered with {runtime}")
        self._wait_s, self._said = RECONNECT_S[0], ""

    def _tell(self, reason: str) -> None:
        if reason != self._said:
            log.log(journal.NOTICE, "no runtime at %s: %s; waiting for one", self._socket, reason)
            self._say(f"waiting for a runtime at {self._socket}: {reason}")
            self._said = reason
