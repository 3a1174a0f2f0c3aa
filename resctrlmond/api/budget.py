# SPDX-License-Identifier: Apache-2.0
"""Limit the memory of replies that callers have not read yet, for each user and in total."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

# MemoryMax= of the unit also covers 48 MiB of records (three times as much in memory) and 40 MiB of the interpreter.
MAX_BYTES = 32 * 1024 * 1024
MAX_BYTES_PER_UID = 8 * 1024 * 1024
# D-Bus has its own budget, because a stalled bus must not block varlink clients. Its replies are at most half as
# long.
MAX_DBUS_BYTES = MAX_BYTES // 2
MAX_DBUS_BYTES_PER_UID = MAX_BYTES_PER_UID // 2


class Lease:
    """The part of the budget that is reserved for one reply."""

    def __init__(self, budget: ReplyBudget, uid: int, size: int) -> None:
        self.size = size
        self._budget = budget
        self._uid = uid

    def shrink(self, size: int) -> None:
        """Return the bytes above ``size``, which the reply does not need, to the budget."""
        if size < self.size:
            self._budget.release(self._uid, self.size - size)
            self.size = size


class ReplyBudget:
    """Makes calls with long replies wait until earlier replies have been read. Belongs to the event loop.

    Root has its own share, so users that do not read their replies never delay root. Calls that change something
    reserve nothing, so not even unread lists of root delay the start of a container.
    """

    def __init__(self, most: int = MAX_BYTES, most_per_uid: int = MAX_BYTES_PER_UID) -> None:
        self._most = most
        self._most_per_uid = most_per_uid
        self._by_uid: Counter[int] = Counter()
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def taken(self) -> int:
        """Return the bytes that are reserved now."""
        return self._by_uid.total()

    @contextlib.asynccontextmanager
    async def lease(self, uid: int, size: int) -> AsyncIterator[Lease]:
        """Wait for ``size`` bytes, at most the share of a user, and reserve them."""
        size = min(size, self._most_per_uid)
        while not self._has_room(uid, size):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        self._by_uid[uid] += size
        lease = Lease(self, uid, size)
        try:
            yield lease
        finally:
            lease.shrink(0)

    def release(self, uid: int, size: int) -> None:
        """Release ``size`` bytes of a user."""
        self._by_uid[uid] -= size
        if not self._by_uid[uid]:
            del self._by_uid[uid]
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _has_room(self, uid: int, size: int) -> bool:
        if self._by_uid[uid] + size > self._most_per_uid:
            return False
        return uid == 0 or self.taken - self._by_uid[0] + size <= self._most
