# SPDX-License-Identifier: Apache-2.0
"""The command resctrlmon-nri: connect to a container runtime, and connect again when the connection ends."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Sequence

from resctrlmond import __version__
from resctrlmond.configuration import config, profile_files
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.nri import launched, settings
from resctrlmond.nri.connector import Connector
from resctrlmond.nri.exposure import Exposure
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.memory import Memory
from resctrlmond.nri.messages import PLUGIN_INDEX, PLUGIN_NAME
from resctrlmond.nri.plugin import Plugin
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.reloads import Reloads
from resctrlmond.nri.rival import Watch
from resctrlmond.nri.selection import Selection
from resctrlmond.nri.updater import Updater
from resctrlmond.service import journal
from resctrlmond.service.arguments import Parser, add_manager_socket, not_empty
from resctrlmond.service.notify import Notify
from resctrlmond.service.rate_limit import RateLimit

log = logging.getLogger("resctrlmond.nri")

NRI_SOCKET = "/var/run/nri/nri.sock"
# See sysexits(3); the same value as that of the daemon.
EXIT_CONFIG = 78
# The time limit of a call before a container is created, whose runtime waits for at most 2 s by default.
EXPOSE_S = 1.0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resctrlmon-nri",
        description="Put the containers of containerd and CRI-O into the monitoring groups of their pods: a plugin "
        "of the runtime (NRI) that calls resctrlmond for each of them.",
    )
    parser.add_argument(
        "--socket",
        type=not_empty,
        default=NRI_SOCKET,
        metavar="PATH",
        help="the runtime's NRI socket (%(default)s)",
    )
    add_manager_socket(parser, config.Config().varlink_socket)
    parser.add_argument(
        "--config",
        type=not_empty,
        metavar="PATH",
        help=f"the configuration file ({settings.DEFAULT_PATH}, if it exists)",
    )
    parser.add_argument(
        "--profiles-dir",
        type=not_empty,
        metavar="PATH",
        help=f"the only directory with profiles ({' and '.join(profile_files.DIRECTORIES)})",
    )
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="check the configuration and the profiles, and exit; a running plugin is not affected",
    )
    parser.add_argument("--name", type=_name, default="resctrlmond", help="the plugin's name (%(default)s)")
    parser.add_argument(
        "--index",
        type=_index,
        default="90",
        metavar="NN",
        help="two digits: the position among the runtime's plugins; lower ones are called first (%(default)s)",
    )
    parser.add_argument("--log-level", choices=journal.LEVELS, default="info", help="(%(default)s)")
    parser.add_argument("--version", action="version", version=f"resctrlmon-nri {__version__}")
    return parser


def _name(text: str) -> str:
    if PLUGIN_NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError("a plugin's name has ASCII letters, digits and _.+-")
    return text


def _index(text: str) -> str:
    if PLUGIN_INDEX.fullmatch(text) is None:
        raise argparse.ArgumentTypeError("a plugin's index has two digits")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the adapter until a signal stops it. Return the exit status."""
    options = _parser().parse_args(arguments)
    journal.setup(options.log_level, "resctrlmon-nri")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimit())
    try:
        selection = settings.load(options.config)
        directories = profile_files.chosen(options.profiles_dir)
        if options.check_config:
            profile_files.load(directories)
            return 0
        memory = Memory(directories)
        by_runtime = launched.from_environment(os.environ)
    except ConfigError as error:
        log.error("%s", error, extra=journal.fields(error))
        return EXIT_CONFIG
    # Before the loop runs, which then reads the profiles: a reload before that does not end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return asyncio.run(_run(options, selection, memory, by_runtime))


async def _run(
    options: argparse.Namespace, selection: Selection, memory: Memory, by_runtime: launched.Launched | None
) -> int:
    exposure = Exposure(Manager(options.manager_socket, EXPOSE_S))
    plugin = Plugin(Updater(Manager(options.manager_socket), Pods(selection)), memory, exposure)
    notify = Notify()
    watch = Watch(options.manager_socket, notify)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    reloads = Reloads(plugin, notify)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloads.begin)
    await reloads.start()
    if by_runtime:
        connecting = by_runtime.run(plugin, watch.report)
    else:
        connecting = Connector(options.socket, options.name, options.index, plugin, watch.report).run()
    work = [
        asyncio.ensure_future(coroutine) for coroutine in (plugin.run(), connecting, watch.run(), stopping.wait())
    ]
    # Report readiness before a runtime is connected: the runtime may start later or restart.
    notify.ready()
    done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    notify.stopping()
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for task in done:
        task.result()
    log.info("stopped; the groups remain, and the next start continues with them")
    return 0
