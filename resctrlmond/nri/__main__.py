# SPDX-License-Identifier: Apache-2.0
"""The command resctrlmon-nri: connects to a container runtime, and again whenever that has ended."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import signal
import sys
from collections.abc import Sequence

from resctrlmond import __version__, config, journal
from resctrlmond.notify import Notify
from resctrlmond.nri.carrier import Carrier
from resctrlmond.nri.door import Door
from resctrlmond.nri.mux import MuxError
from resctrlmond.nri.plugin import Plugin
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.session import Session

log = logging.getLogger("resctrlmond.nri")

NRI_SOCKET = "/var/run/nri/nri.sock"
# Between two tries to connect: a runtime that starts is found soon, one that is not there costs nothing.
RECONNECT_S = (0.2, 5.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resctrlmon-nri",
        description="Put the containers of containerd and CRI-O into the monitoring groups of their pods: a plugin "
        "of the runtime (NRI) that asks resctrlmond for each.",
    )
    manager = config.Config().varlink_socket
    parser.add_argument("--socket", default=NRI_SOCKET, metavar="PATH", help="the runtime's NRI socket (%(default)s)")
    parser.add_argument(
        "--manager-socket", default=manager, metavar="PATH", help="resctrlmond's socket (%(default)s)"
    )
    parser.add_argument("--name", type=_name, default="resctrlmond", help="the plugin's name (%(default)s)")
    parser.add_argument(
        "--index",
        type=_index,
        default="90",
        metavar="NN",
        help="two digits: its place among the runtime's plugins, lower ones are called first (%(default)s)",
    )
    parser.add_argument("--log-level", choices=journal.LEVELS, default="info", help="(%(default)s)")
    parser.add_argument("--version", action="version", version=f"resctrlmon-nri {__version__}")
    return parser


def _name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.+-]+", text) is None:
        raise argparse.ArgumentTypeError("a plugin's name has ASCII letters, digits and _.+-")
    return text


def _index(text: str) -> str:
    if re.fullmatch("[0-9]{2}", text) is None:
        raise argparse.ArgumentTypeError("a plugin's index has two digits")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the adapter until it is told to stop; returns the exit code."""
    options = _parser().parse_args(arguments)
    journal.setup(options.log_level, "resctrlmon-nri")
    asyncio.run(_run(options))
    return 0


async def _run(options: argparse.Namespace) -> None:
    plugin = Plugin(Carrier(Door(options.manager_socket), Pods()))
    notify = Notify()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    work = {
        asyncio.ensure_future(plugin.run()),
        asyncio.ensure_future(_Connector(options, plugin, notify).run()),
        asyncio.ensure_future(stopping.wait()),
    }
    # Ready before there is a runtime: it may come later, or be restarted.
    notify.ready()
    done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    notify.stopping()
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for task in done:
        task.result()
    log.info("stopped; groups stay, and are taken up at the next start")


class _Connector:
    """Keeps a connection to the runtime, or waits for one."""

    def __init__(self, options: argparse.Namespace, plugin: Plugin, notify: Notify) -> None:
        self._options = options
        self._plugin = plugin
        self._notify = notify
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
        reader, writer = await asyncio.open_unix_connection(self._options.socket)
        session = Session(reader, writer, self._plugin, self._configured)
        await session.run(self._options.name, self._options.index)

    def _configured(self, runtime: str) -> None:
        log.info("registered with %s", runtime)
        self._notify.status(f"registered with {runtime}")
        self._wait_s, self._said = RECONNECT_S[0], ""

    def _tell(self, reason: str) -> None:
        if reason != self._said:
            log.log(journal.NOTICE, "no runtime at %s: %s; waiting for one", self._options.socket, reason)
            self._notify.status(f"waiting for a runtime at {self._options.socket}: {reason}")
            self._said = reason


if __name__ == "__main__":
    sys.exit(main())
