# SPDX-License-Identifier: Apache-2.0
"""The memory that replies may take until their callers have read them, for each user and in all."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

# Below MemoryMax= of the unit, beside 48 MiB of records (three times that in memory) and the interpreter's 40 MiB.
MAX_BYTES = 32 * 1024 * 1024
MAX_BYTES_PER_UID = 8 * 1024 * 1024
# D-Bus has a budget of its own: a bus that has stalled must not block the reads of varlink's clients.
# Its replies take half as much as varlink's pages.
MAX_DBUS_BYTES = MAX_BYTES // 2
MAX_DBUS_BYTES_PER_UID = MAX_BYTES_PER_UID // 2


class Lease:
    """A part of the budget, for one reply."""

    def __init__(self, budget: ReplyBudget, uid: int, size: int) -> None:
        self.size = size
        self._budget = budget
        self._uid = uid

    def shrink(self, size: int) -> None:
        """Give back what the reply turned out not to take."""
        if size < self.size:
            self._budget.give_back(self._uid, self.size - size)
            self.size = size


class ReplyBudget:
    """Has calls with long replies wait until earlier replies have been read. Lives in the event loop.

    Root has its own share: users that do not read their replies never delay it. Calls that change something take no
    part, so that not even root's own unread lists delay the start of a container.
    """

    def __init__(self, most: int = MAX_BYTES, most_per_uid: int = MAX_BYTES_PER_UID) -> None:
        self._most = most
        self._most_per_uid = most_per_uid
        self._by_uid: Counter[int] = Counter()
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def taken(self) -> int:
        """The bytes that are reserved now."""
        return self._by_uid.total()

    @contextlib.asynccontextmanager
    async def lease(self, uid: int, size: int) -> AsyncIterator[Lease]:
        """Wait for ``size`` bytes, at most a user's whole share, and hold them. 0 never waits."""
        size = min(size, self._most_per_uid)
        while size and not self._has_room(uid, size):
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

    def give_back(self, uid: int, size: int) -> None:
        """Free ``size`` bytes."""
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
