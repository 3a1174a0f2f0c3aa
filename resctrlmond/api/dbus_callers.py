# SPDX-License-Identifier: Apache-2.0
"""Who calls over D-Bus: the credentials that the bus itself took from the caller's connection."""

from __future__ import annotations

from typing import Any

from resctrlmond.api._bus import Bus, DBusError
from resctrlmond.api.access import Caller
from resctrlmond.resctrl import processes

# A unique name with its credentials is some hundred bytes; a host has tens of clients, not thousands.
_MOST = 256
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

    async def named(self, sender: str) -> Caller:
        """The caller behind a unique name. Raises DBusError if it is gone, BusUnavailable."""
        caller = self._known.get(sender)
        if caller is None:
            caller = _caller(await self._bus.ask("GetConnectionCredentials", "s", sender))
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[sender] = caller
        return caller


def _caller(credentials: dict[str, Any]) -> Caller:
    if "UnixUserID" not in credentials:
        raise DBusError("org.freedesktop.DBus.Error.AccessDenied", "the bus does not know who calls")
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
