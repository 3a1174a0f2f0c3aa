# SPDX-License-Identifier: Apache-2.0
"""Detect nri-resctrl-mon on this host: it and resctrlmond cannot manage the same pods."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import stat

from resctrlmond.host.known_programs import NRI_RESCTRL_MON, NRI_RESCTRL_MON_FOLDER, find_processes
from resctrlmond.service.notify import Notify

log = logging.getLogger(__name__)

SEARCH_S = 60.0

PLUGINS = "/opt/nri/plugins"
SNAPSHOTS = NRI_RESCTRL_MON_FOLDER
_MAX_PROCESSES = 3


def rivals(
    manager_socket: str, *, proc: str = "/proc", plugins: str = PLUGINS, snapshots: str = SNAPSHOTS
) -> list[str]:
    """Describe each trace of nri-resctrl-mon, [] if there is none.

    The traces are its processes, its file among the plugins that runtimes launch, and its directory of values. That
    directory may belong to resctrlmond, for programs that read it; it then has the group of ``manager_socket``.
    Plugins that connect to the runtime by themselves cannot be detected.
    """
    programs = (NRI_RESCTRL_MON,)
    found = [
        f"it runs as process {process.pid}"
        for process in itertools.islice(find_processes(programs, proc), _MAX_PROCESSES)
    ]
    found += [f"{plugins}/{name} is launched by the runtime" for name in _names(plugins)]
    if _is_foreign(snapshots, manager_socket):
        found.append(f"{snapshots} does not belong to resctrlmond")
    return found


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if NRI_RESCTRL_MON.comm.fullmatch(name))
    except OSError:
        return []


def _is_foreign(folder: str, manager_socket: str) -> bool:
    try:
        found = os.stat(folder)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        mark = os.stat(manager_socket).st_gid
        return stat.S_ISDIR(found.st_mode) and (found.st_gid != mark or mark == 0)
    # The owner of the directory cannot be determined without resctrlmond.
    return False


class Watch:
    """Searches for nri-resctrl-mon every minute, and reports the state of the adapter to the service manager."""

    def __init__(self, manager_socket: str, notify: Notify) -> None:
        self._manager_socket = manager_socket
        self._notify = notify
        self._status = ""
        self._found: list[str] = []

    async def run(self) -> None:
        """Search until the task is cancelled."""
        while True:
            found = await asyncio.to_thread(rivals, self._manager_socket)
            if found != self._found:
                self._found = found
                if found:
                    log.warning(
                        "nri-resctrl-mon is on this host too: %s. Remove one of the two: each takes the other's "
                        "containers for its own; see resctrlmon-nri(8)",
                        "; ".join(found),
                    )
                else:
                    log.info("nri-resctrl-mon is gone from this host")
                if self._status:
                    self.report(self._status)
            await asyncio.sleep(SEARCH_S)

    def report(self, status: str) -> None:
        """Report the state of the adapter."""
        self._status = status
        self._notify.status(f"{status}; nri-resctrl-mon is here too" if self._found else status)
