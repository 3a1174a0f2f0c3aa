# SPDX-License-Identifier: Apache-2.0
"""Who calls over D-Bus: the credentials that the bus itself took from the caller's connection."""

from __future__ import annotations

from typing import Any

from resctrlmond.api.access import Caller
from resctrlmond.api.dbus.library import Bus, DBusError
from resctrlmond.resctrl import processes

# A unique name with its credentials is some hundred bytes. The bus has at most 2048 connections (dbus-daemon(1),
# max_completed_connections), unless it is configured otherwise.
_MOST = 2048
_UNKNOWN_GROUP = -1


class Callers:
    """The callers of one connection to the bus, by their unique names.

    The credentials are those at the time of the caller's connect(2), and a unique name is never given to another
    connection for as long as the bus runs (D-Bus specification, "Bus names"): what was learned once stays true,
    and no change of owners need be watched.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[str, Caller] = {}

    def known(self, sender: str) -> Caller | None:
        """The caller behind a unique name, if the bus has been asked already."""
        caller = self._known.get(sender)
        if caller is not None:
            # The last to be forgotten.
            del self._known[sender]
            self._known[sender] = caller
        return caller

    async def named(self, sender: str) -> Caller:
        """The caller behind a unique name. Raises DBusError if it is gone, BusUnavailable, NotRead."""
        caller = self.known(sender)
        if caller is None:
            caller = _caller(await self._bus.ask("GetConnectionCredentials", "s", sender))
            self._known.pop(sender, None)
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[sender] = caller
        return caller


def _caller(credentials: dict[str, Any]) -> Caller:
    if "UnixUserID" not in credentials:
        raise DBusError("org.freedesktop.DBus.Error.AccessDenied", "the bus does not know the caller")
    # Lowest first, so that the primary one cannot be told. A bus that does not tell groups grants none.
    groups = credentials["UnixGroupIDs"].value if "UnixGroupIDs" in credentials else []
    pid = credentials["ProcessID"].value if "ProcessID" in credentials else 0
    return Caller(
        uid=credentials["UnixUserID"].value,
        gid=groups[0] if groups else _UNKNOWN_GROUP,
        groups=frozenset(groups),
        pid=pid,
        pid_namespaces=processes.pid_namespaces(pid) if pid else 0,
    )
