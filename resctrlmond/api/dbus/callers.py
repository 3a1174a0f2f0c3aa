# SPDX-License-Identifier: Apache-2.0
"""Get the credentials of callers from the bus, and cache them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from resctrlmond.api.access import Caller
from resctrlmond.api.dbus.library import Bus, DBusError
from resctrlmond.resctrl import processes

# A unique name with its credentials is some hundred bytes. The bus has at most 2048 connections (dbus-daemon(1),
# max_completed_connections), unless it is configured otherwise.
_MOST = 2048
# A list of the names on the bus can be too long for the gate, because each connection may own many names. Without a
# list within _LIST_TIMEOUT_S, none is requested for _LIST_REST_S.
_LIST_TIMEOUT_S = 2.0
_LIST_REST_S = 60.0


class Callers:
    """The callers of one connection to the bus, by their unique names.

    The bus reads the credentials at the caller's connect(2), and never gives a unique name to another connection as
    long as it runs (D-Bus specification, "Bus names"). Therefore cached credentials stay valid.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[str, Caller] = {}
        self._no_list_until = 0.0

    @property
    def can_list(self) -> bool:
        """Return whether ``find_departed`` is likely to be quick."""
        return time.monotonic() >= self._no_list_until

    def known(self, sender: str) -> Caller | None:
        """Return the caller with a unique name from the cache; None if it is not cached."""
        caller = self._known.get(sender)
        if caller is not None:
            # Move it to the end: the first entry is removed first.
            del self._known[sender]
            self._known[sender] = caller
        return caller

    async def find(self, sender: str) -> Caller:
        """Return the caller with a unique name. Raises DBusError if it has left the bus, BusUnavailable, NotRead."""
        caller = self.known(sender)
        if caller is None:
            caller = _caller(await self._bus.ask("GetConnectionCredentials", "s", sender))
            self._known.pop(sender, None)
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[sender] = caller
        return caller

    async def find_departed(self, senders: Iterable[str]) -> list[str]:
        """Return those of the unique names whose connections have left the bus.

        Raises DBusError, BusUnavailable, TimeoutError.
        """
        senders = list(senders)
        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S):
                connected = set(await self._bus.ask("ListNames", ""))
        except TimeoutError:
            self._no_list_until = time.monotonic() + _LIST_REST_S
            raise
        return [sender for sender in senders if sender not in connected]


def _caller(credentials: dict[str, Any]) -> Caller:
    if "UnixUserID" not in credentials:
        raise DBusError("org.freedesktop.DBus.Error.AccessDenied", "the bus does not know the caller")
    # Without groups from the bus, the caller has none.
    groups = credentials["UnixGroupIDs"].value if "UnixGroupIDs" in credentials else []
    pid = credentials["ProcessID"].value if "ProcessID" in credentials else 0
    return Caller(
        uid=credentials["UnixUserID"].value,
        groups=frozenset(groups),
        pid=pid,
        pid_namespaces=processes.pid_namespaces(pid) if pid else 0,
    )
