# SPDX-License-Identifier: Apache-2.0
"""An NRI plugin that does nothing, on the adapter's own wire: python3 -m tests.bench.noop SOCKET."""

from __future__ import annotations

import asyncio
import sys

from resctrlmond.nri.manager import Manager
from resctrlmond.nri.messages import EventReport, Synchronize
from resctrlmond.nri.plugin import Plugin
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.session import Session
from resctrlmond.nri.updater import Updater


class Noop(Plugin):
    """Everything is done before it is begun."""

    def __init__(self) -> None:
        super().__init__(Updater(Manager("/none"), Pods()))

    def synchronize(self, chunk: Synchronize) -> None:
        """Forget it."""

    def handle_event(self, report: EventReport) -> asyncio.Future[None]:
        """Answer at once."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def main(socket: str) -> None:
    """Until the runtime closes the connection."""
    reader, writer = await asyncio.open_unix_connection(socket)
    await Session(reader, writer, Noop(), lambda _: None).run("noop", "00")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
