# SPDX-License-Identifier: Apache-2.0
"""The pool of RMIDs: a FIFO of free ones, and the limbo of freed ones whose cache lines have not drained."""

from __future__ import annotations

import collections
import errno
from collections.abc import Callable

from resctrlmond.sim.kernel.tree import error

LIMBO_TICK_SECONDS = 1.0

# (rmid, domain, time) -> bytes of cache that the RMID holds there at that time
Occupancy = Callable[[int, int, float], int]


class RmidPool:
    """RMIDs 1 to ``num_rmids`` - 1; 0 is root's and never allocated (fs/resctrl/monitor.c).

    ``occupancy`` is None if the machine cannot measure it: then there is no limbo, and a freed RMID is free at once.
    Times are seconds of any one monotonic clock. ``threshold`` is ``max_threshold_occupancy``, in bytes.
    """

    def __init__(self, num_rmids: int, domains: int, threshold: int, occupancy: Occupancy | None) -> None:
        self.num_rmids = num_rmids
        self.threshold = threshold
        self._occupancy = occupancy
        self._free = collections.deque(range(1, num_rmids))
        self._busy: list[set[int]] = [set() for _ in range(domains)]
        # The next run of each domain's limbo worker; None if that domain has nothing in limbo.
        self._next_tick: list[float | None] = [None] * domains
        self._offline: set[int] = set()

    def allocate(self, now: float) -> int:
        """Return the RMID that has been free for longest. Raises EBUSY if some are in limbo, ENOSPC if none is."""
        self._work_until(now)
        if not self._free:
            raise error(errno.EBUSY if self._limbo else errno.ENOSPC)
        return self._free.popleft()

    def free(self, rmid: int, now: float, here: int | None = None) -> None:
        """Free ``rmid``: append it to the free list, or put it into every domain's limbo.

        Linux 6.1 checks the domain ``here``, where this runs, at once: an RMID that holds at most the threshold there
        is clean (add_rmid_to_limbo() in arch/x86/kernel/cpu/resctrl/monitor.c).
        """
        if self._occupancy is None:
            self._free.append(rmid)
            return
        self._work_until(now)
        for domain, busy in enumerate(self._busy):
            if domain in self._offline:
                continue
            if domain == here and self._occupancy(rmid, domain, now) <= self.threshold:
                continue
            if not busy:
                self._next_tick[domain] = now + LIMBO_TICK_SECONDS
            busy.add(rmid)
        if rmid not in self._limbo:
            self._free.append(rmid)

    def set_online(self, domain: int, online: bool) -> None:
        """Release all RMIDs in the limbo of a domain that goes offline (resctrl_offline_mon_domain())."""
        if online:
            self._offline.discard(domain)
            return
        self._offline.add(domain)
        held, self._busy[domain], self._next_tick[domain] = self._busy[domain], set(), None
        self._free.extend(sorted(held - self._limbo))

    def counts(self, now: float) -> tuple[int, int, int]:
        """Return (used, limbo, free); the sum is ``num_rmids``, and root's own is used."""
        self._work_until(now)
        limbo, free = len(self._limbo), len(self._free)
        return self.num_rmids - limbo - free, limbo, free

    @property
    def _limbo(self) -> set[int]:
        return set[int]().union(*self._busy)

    def _work_until(self, now: float) -> None:
        """Run the ticks of the limbo workers that are due, the oldest first."""
        while True:
            due = [(tick, domain) for domain, tick in enumerate(self._next_tick) if tick is not None and tick <= now]
            if not due:
                return
            self._tick(*min(due))

    def _tick(self, at: float, domain: int) -> None:
        """Run a domain's worker once: an RMID that holds less than the threshold is clean here (equal is dirty)."""
        assert self._occupancy is not None, "only a machine with occupancy has a limbo"
        busy = self._busy[domain]
        clean = {rmid for rmid in busy if self._occupancy(rmid, domain, at) < self.threshold}
        busy -= clean
        self._next_tick[domain] = at + LIMBO_TICK_SECONDS if busy else None
        self._free.extend(sorted(clean - self._limbo))
