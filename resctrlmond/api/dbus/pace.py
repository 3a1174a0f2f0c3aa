# SPDX-License-Identifier: Apache-2.0
"""Delay long replies while the bus is busy, because replies to root would be sent after them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from resctrlmond.api.dbus.library import Bus, DBusError
from resctrlmond.api.dbus.unread import LIMITS_EXCEEDED, PATIENCE_S

# dbus-daemon reads 2 KiB of a sender's bytes in each round over all connections (dbus-transport-socket.c,
# max_bytes_read_per_iteration). With connections that flood it, a round takes tens of milliseconds, and a reply of 1
# MiB takes ten seconds.
LONG_BYTES = 16 * 1024
_PROBE = "x" * 32 * 1024
_PROBE_S = 0.1
_PAUSE_S = 1.0
# After a long reply that took longer than _SLOW_S, no long reply is sent for _FIRST_REST_S, and twice as long after
# each further one: the bus may be flooded only while the daemon sends.
_SLOW_S = 2.0
_FIRST_REST_S = 60.0
_LONGEST_REST_S = 600.0

_OVERHEAD_BYTES = 8


class Pace:
    """Sends long replies to readers one after another, and refuses them while the bus is busy.

    Belongs to the event loop; outlives connections to the bus.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._rest_s = _FIRST_REST_S
        self._rests_until = 0.0
        self._busy_until = 0.0

    @contextlib.asynccontextmanager
    async def turn(self, bus: Bus, body: list[Any]) -> AsyncIterator[None]:
        """Wait until a reply may be sent in the context. Raises DBusError LimitsExceeded if the bus is too busy."""
        size = _size(body)
        if size <= LONG_BYTES:
            yield
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._turn.acquire()
        except TimeoutError:
            raise _busy(size) from None
        try:
            if not await self._is_quick(bus):
                raise _busy(size)
            begun = time.monotonic()
            yield
            self._set_rest(time.monotonic() - begun)
        finally:
            self._turn.release()

    def _set_rest(self, seconds: float) -> None:
        """Set the time without long replies, after one that took ``seconds``."""
        now = time.monotonic()
        if seconds > _SLOW_S:
            self._rests_until = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        elif now - self._rests_until > _LONGEST_REST_S:
            self._rest_s = _FIRST_REST_S

    async def _is_quick(self, bus: Bus) -> bool:
        """Return whether the bus reads messages of the daemon without delay. Raises BusUnavailable."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() >= self._rests_until:
            if time.monotonic() >= self._busy_until:
                begun = time.monotonic()
                with contextlib.suppress(DBusError):
                    await bus.ask("NameHasOwner", "s", _PROBE)
                if time.monotonic() - begun < _PROBE_S:
                    return True
                self._busy_until = time.monotonic() + _PAUSE_S
            if self._busy_until > end:
                break
            await asyncio.sleep(_PAUSE_S)
        return False


def _busy(size: int) -> DBusError:
    return DBusError(
        LIMITS_EXCEEDED, f"the bus is too busy for a reply of {size} bytes. Call over varlink, or try again later"
    )


def _size(value: Any) -> int:
    """Estimate the bytes of a value in a message."""
    if isinstance(value, str):
        return _OVERHEAD_BYTES + len(value)
    if isinstance(value, dict):
        return sum(_size(key) + _size(one) for key, one in value.items())
    if isinstance(value, list):
        return sum(map(_size, value))
    return _OVERHEAD_BYTES + (_size(value.value) if hasattr(value, "value") else 0)
