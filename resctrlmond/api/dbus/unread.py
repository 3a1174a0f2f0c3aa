# SPDX-License-Identifier: Apache-2.0
"""Limit the replies that the bus keeps in memory because their receivers do not read them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from resctrlmond.api.dbus.callers import Callers
from resctrlmond.api.dbus.library import BUS_NAME, Bus, BusUnavailable, DBusError

_log = logging.getLogger(__name__)

LIMITS_EXCEEDED = "org.freedesktop.DBus.Error.LimitsExceeded"
NAME_HAS_NO_OWNER = "org.freedesktop.DBus.Error.NameHasNoOwner"
_STATISTICS = "org.freedesktop.DBus.Debug.Stats"
# Only dbus-broker reports this.
_BROKER_ACCOUNTING = "org.bus1.DBus.Debug.Stats.PeerAccounting"

# dbus-daemon counts unread messages against their sender. At 127 MiB (dbus-daemon(1), max_incoming_bytes) it stops
# reading from the sender: replies to root would wait for a stalled reader. These limits are for the replies to one
# user, including root, and to all users except root. Replies of running calls can exceed them: two of a user, eight
# in total.
MAX_BYTES_PER_UID = 8 * 1024 * 1024
MAX_BYTES = 48 * 1024 * 1024
# Beyond this excess, calls are dropped without a reply: an error reply would not be read either.
MAX_EXCESS_PER_UID = 16 * 1024 * 1024
MAX_EXCESS = 40 * 1024 * 1024
# The limits above and the replies to root leave the rest for signals.
MAX_TOTAL_BYTES = 112 * 1024 * 1024
# The bus is asked for its count again after this many bytes of signals.
_SIGNALS_BYTES = 4 * 1024 * 1024
# The overhead of a message. It also limits the number of receivers in the table.
_OVERHEAD_BYTES = 1024
# The time for a reader to read replies before its call is refused. Libraries wait for 25 s.
PATIENCE_S = 5.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_LONGEST_FLOOD_PAUSE_S = 4.0

_ROOT = 0
_UNKNOWN_UID = -1


class _Receiver(msgspec.Struct):
    """A connection: its user, the bytes sent to it, and the bytes that it has certainly read."""

    uid: int
    sent: int = 0
    read: int = 0

    @property
    def unread(self) -> int:
        return self.sent - self.read


class Unread:
    """Limits the unread replies to each user of one connection to the bus. Belongs to the event loop.

    The bytes that were sent are an upper limit of the unread bytes. When they reach a limit, the bus is asked for the
    unread bytes. A dbus-daemon without statistics only reports which receivers have left. dbus-broker disconnects a
    receiver that does not read, and never stops reading from the sender, so it needs no limit.
    """

    def __init__(self, bus: Bus, callers: Callers) -> None:
        self._bus = bus
        self._callers = callers
        self._has_statistics = True
        self._is_limited = True
        # By unique name.
        self._receivers: dict[str, _Receiver] = {}
        # The bytes that may be unread.
        self._by_uid: Counter[int] = Counter()
        self._signals = 0
        self._measuring: asyncio.Task[None] | None = None
        bus.gate.on_sent = self._sent

    async def start(self) -> None:
        """Detect which statistics the bus has. Raises BusUnavailable."""
        try:
            await self._ask_statistics(str(self._bus.unique_name), "IncomingBytes")
        except (DBusError, KeyError):
            self._has_statistics = False
            self._is_limited = not await self._is_broker()

    async def close(self) -> None:
        """Stop asking the bus."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)

    async def room(self, uid: int) -> None:
        """Wait until the user's unread replies are below the limit. Raises DBusError, BusUnavailable."""
        end = time.monotonic() + PATIENCE_S
        pause = _FIRST_PAUSE_S
        while self.is_full(uid):
            await self._measure(self._names(uid))
            if not self.is_full(uid):
                break
            if time.monotonic() > end:
                raise DBusError(
                    LIMITS_EXCEEDED,
                    f"the bus may hold {self._by_uid[uid]} bytes of replies that user {uid} has not read, and "
                    f"{self._others} bytes of all users but root. Read them, close the connections that do not, "
                    "or call over varlink",
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def is_full(self, uid: int) -> bool:
        """Return whether a call of the user that reads must wait."""
        return self._is_beyond(uid, MAX_BYTES_PER_UID, MAX_BYTES)

    def is_flooded(self, uid: int | None) -> bool:
        """Return whether a user (None: unknown) has so many unread bytes that not even an error may be sent."""
        uid = _UNKNOWN_UID if uid is None else uid
        if not self._is_far_beyond(uid):
            return False
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure_floods())
        return True

    async def is_bus_full(self) -> bool:
        """Return whether all unread bytes, with signals, are close to the limit of the bus for one sender."""
        if not self._has_statistics or self._signals < _SIGNALS_BYTES:
            return False
        self._signals = 0
        try:
            return await self._ask_statistics(str(self._bus.unique_name), "IncomingBytes") > MAX_TOTAL_BYTES
        except (DBusError, BusUnavailable):
            return False

    @property
    def _others(self) -> int:
        return self._by_uid.total() - self._by_uid[_ROOT]

    def _is_far_beyond(self, uid: int) -> bool:
        return self._is_beyond(uid, MAX_BYTES_PER_UID + MAX_EXCESS_PER_UID, MAX_BYTES + MAX_EXCESS)

    def _is_beyond(self, uid: int, most_of_uid: int, most: int) -> bool:
        return self._is_limited and (self._by_uid[uid] >= most_of_uid or (uid != _ROOT and self._others >= most))

    def _names(self, uid: int) -> list[str]:
        """Return the receivers of the limit that is reached: those of the user, or of all users except root."""
        is_own = self._by_uid[uid] >= MAX_BYTES_PER_UID
        return [name for name, one in self._receivers.items() if (one.uid == uid if is_own else one.uid != _ROOT)]

    def _sent(self, destination: str, size: int) -> None:
        if not destination:
            self._signals += size
        elif destination != BUS_NAME and self._is_limited:
            receiver = self._receivers.setdefault(destination, _Receiver(_UNKNOWN_UID))
            self._count(receiver, -receiver.unread)
            caller = self._callers.known(destination)
            if caller is not None:
                receiver.uid = caller.uid
            receiver.sent += size + _OVERHEAD_BYTES
            self._count(receiver, receiver.unread)

    def _count(self, receiver: _Receiver, change: int) -> None:
        self._by_uid[receiver.uid] += change
        if not self._by_uid[receiver.uid]:
            del self._by_uid[receiver.uid]

    async def _measure_floods(self) -> None:
        """Ask the bus until users whose calls are dropped have read their replies."""
        pause = _FIRST_PAUSE_S
        with contextlib.suppress(BusUnavailable):
            while flooded := [uid for uid in self._by_uid if self._is_far_beyond(uid)]:
                for uid in flooded:
                    await self._measure(self._names(uid))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_FLOOD_PAUSE_S)

    async def _measure(self, names: Iterable[str]) -> None:
        """Ask the bus for the unread bytes of these receivers. Raises BusUnavailable."""
        for name in names:
            receiver = self._receivers.get(name)
            if receiver is None:
                continue
            sent = receiver.sent
            read = sent - await self._unread(name, receiver.unread)
            if read > receiver.read:
                self._count(receiver, receiver.read - read)
                receiver.read = read
            # Another call of this method may have removed it, and a reply may have been sent since.
            if not receiver.unread and self._receivers.get(name) is receiver:
                del self._receivers[name]

    async def _unread(self, name: str, most: int) -> int:
        try:
            if self._has_statistics:
                return await self._ask_statistics(name, "OutgoingBytes")
            return most if await self._bus.ask("NameHasOwner", "s", name) else 0
        except DBusError as error:
            if error.type != NAME_HAS_NO_OWNER:
                _log.debug("the bus does not report the unread bytes of %s: %s", name, error)
            return 0 if error.type == NAME_HAS_NO_OWNER else most

    async def _ask_statistics(self, name: str, key: str) -> int:
        found = await self._bus.ask("GetConnectionStats", "s", name, interface=_STATISTICS)
        return int(found[key].value)

    async def _is_broker(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return _BROKER_ACCOUNTING in await self._bus.ask("GetStats", "", interface=_STATISTICS)
        except (DBusError, TimeoutError):
            return False
