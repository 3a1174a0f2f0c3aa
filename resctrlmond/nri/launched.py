# SPDX-License-Identifier: Apache-2.0
"""Run as a plugin that the runtime launches: the runtime passes its name and a connected socket (nri, plugin.go)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.nri.messages import PLUGIN_INDEX, PLUGIN_NAME
from resctrlmond.nri.mux import MuxError
from resctrlmond.nri.plugin import Plugin
from resctrlmond.nri.session import Session

log = logging.getLogger(__name__)

_NAME = "NRI_PLUGIN_NAME"
_INDEX = "NRI_PLUGIN_IDX"
_SOCKET = "NRI_PLUGIN_SOCKET"


@dataclass(frozen=True, slots=True)
class Launched:
    """The name, the index and the file descriptor of the connection that the runtime has passed."""

    name: str
    index: str
    fd: int

    async def run(self, plugin: Plugin, report: Callable[[str], None]) -> None:
        """Serve the connection until it ends. Do not connect again: the runtime launches its plugins anew."""
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=self.fd))
        session = Session(reader, writer, plugin, lambda runtime: report(f"launched by {runtime}"), is_only=True)
        try:
            await session.run(self.name, self.index)
        except (OSError, EOFError, MuxError) as error:
            log.info(
                "the runtime that launched the plugin has ended: %s", getattr(error, "strerror", None) or str(error)
            )


def from_environment(environment: Mapping[str, str]) -> Launched | None:
    """Read the runtime's environment variables. Return None if no runtime has launched the adapter. Raises
    ConfigError.
    """
    if _SOCKET not in environment:
        return None
    name, index, number = (environment.get(variable, "") for variable in (_NAME, _INDEX, _SOCKET))
    if PLUGIN_NAME.fullmatch(name) is None or PLUGIN_INDEX.fullmatch(index) is None:
        raise ConfigError(f"{_SOCKET} is set, but {_NAME} is {name!a} and {_INDEX} {index!a}: no plugin's")
    fd = int(number) if re.fullmatch("[0-9]{1,6}", number) else -1
    if not _is_socket(fd):
        raise ConfigError(f"{_SOCKET} is {number!a}, which is not a connected socket")
    os.set_inheritable(fd, False)
    return Launched(name, index, fd)


def _is_socket(fd: int) -> bool:
    try:
        return fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
