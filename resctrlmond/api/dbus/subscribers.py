# SPDX-License-Identifier: Apache-2.0
"""Track the clients that subscribed to signals, until they unsubscribe or leave the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from resctrlmond.api.access import Caller, is_privileged
from resctrlmond.api.dbus.library import BUS_NAME, Bus, DBusError

LIMITS_EXCEEDED = "org.freedesktop.DBus.Error.LimitsExceeded"
# Each has a match rule on the bus, of which a connection can have 512 (dbus-daemon(1),
# max_match_rules_per_connection). The rest is for privileged callers.
MOST = 256
MOST_OF_READERS = 128


class Subscribers:
    """The subscribers of one connection to the bus, by their unique names. Belongs to the event loop.

    ``on_first`` is awaited before ``add`` returns for the first subscriber; ``on_last`` is called when the last one
    has gone.
    """

    def __init__(self, bus: Bus, on_first: Callable[[], Awaitable[None]], on_last: Callable[[], None]) -> None:
        self._bus = bus
        self._on_first = on_first
        self._on_last = on_last
        self._callers: dict[str, Caller] = {}
        self._adding = asyncio.Lock()

    async def add(self, name: str, caller: Caller) -> None:
        """Subscribe a client, also if it has subscribed before. Raises DBusError, BusUnavailable."""
        async with self._adding:
            if name in self._callers:
                return
            self._check_room(caller)
            await self._bus.ask("AddMatch", "s", _rule(name))
            self._callers[name] = caller
            try:
                if len(self._callers) == 1:
                    await self._on_first()
                # It may have left before the rule was there.
                has_left = not await self._bus.ask("NameHasOwner", "s", name)
            except BaseException:
                self.remove(name)
                raise
            if has_left:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Forget a client that unsubscribed or left the bus, if it had subscribed."""
        if self._callers.pop(name, None) is None:
            return
        self._bus.tell("RemoveMatch", "s", _rule(name))
        if not self._callers:
            self._on_last()

    def _check_room(self, caller: Caller) -> None:
        readers = sum(not is_privileged(other.uid) for other in self._callers.values())
        if len(self._callers) >= MOST or (not is_privileged(caller.uid) and readers >= MOST_OF_READERS):
            raise DBusError(LIMITS_EXCEEDED, f"{len(self._callers)} clients have subscribed already")


def _rule(name: str) -> str:
    """Return the match rule for the signal that a client has left the bus."""
    return f"type='signal',sender='{BUS_NAME}',interface='{BUS_NAME}',member='NameOwnerChanged',arg0='{name}'"
