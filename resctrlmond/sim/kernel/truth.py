# SPDX-License-Identifier: Apache-2.0
"""The true use of every task and RMID, to compare with the counters."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping

from resctrlmond.sim.kernel.counters import NS, Counters
from resctrlmond.sim.messages import RmidTruth, TaskTruth, Truth, Used
from resctrlmond.sim.profiles import CORE_ENERGY, MBM_TOTAL, Profile

MOST_TASKS = 10_000
_PICO = 10**12


@dataclasses.dataclass(slots=True)
class _Account:
    """One thread's CPU time by (rmid, node)."""

    ended: bool = False
    used: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)


class Ledger:
    """The use of each task. Keeps at most ``MOST_TASKS``: the oldest ended ones are dropped and counted."""

    def __init__(self, profile: Profile, counters: Counters) -> None:
        self._profile = profile
        self._counters = counters
        self._accounts: dict[tuple[int, int], _Account] = {}
        self._forgotten = 0

    def charge(self, tid: int, start: int, rmid: int, node: int, ns: int) -> None:
        """Add CPU time of the thread with that number and start."""
        if (tid, start) not in self._accounts and len(self._accounts) >= MOST_TASKS:
            self._forget()
        account = self._accounts.setdefault((tid, start), _Account())
        if ns:
            account.used[rmid, node] += ns

    def end(self, tid: int, start: int) -> None:
        """Record the end of the thread."""
        if account := self._accounts.get((tid, start)):
            account.ended = True

    def _forget(self) -> None:
        oldest = next(iter(self._accounts))
        ended = next((key for key, account in self._accounts.items() if account.ended), oldest)
        del self._accounts[ended]
        self._forgotten += 1

    def report(self, groups: Mapping[int, str], tid: int | None = None, rmid: int | None = None) -> Truth:
        """Return the use of all, or of one thread number or one RMID; ``groups`` are the paths of groups by RMID."""
        tasks = [
            TaskTruth(number, start, account.ended, self._used(account.used.items()))
            for (number, start), account in self._accounts.items()
            if rmid is None and tid in (None, number)
        ]
        numbers = sorted(self._counters.active | groups.keys()) if rmid is None else [rmid]
        rmids = [found for number in numbers if (found := self._rmid(number, groups))] if tid is None else []
        return Truth(tasks, rmids, self._forgotten)

    def _rmid(self, rmid: int, groups: Mapping[int, str]) -> RmidTruth | None:
        """Return the use of an RMID, None if it has no group and never counted."""
        total = self._by_node(rmid, self._counters.busy)
        if rmid not in groups:
            return RmidTruth(rmid, None, [], total) if total else None
        return RmidTruth(rmid, groups[rmid], self._by_node(rmid, self._counters.busy_since_birth), total)

    def _by_node(self, rmid: int, count: Callable[[int, int], int]) -> list[Used]:
        nodes = range(self._profile.nodes)
        return self._used(((rmid, node), ns) for node in nodes if (ns := count(rmid, node)))

    def _used(self, counts: Iterable[tuple[tuple[int, int], int]]) -> list[Used]:
        energy = CORE_ENERGY.rate if CORE_ENERGY in self._profile.package_events else 0
        return [
            Used(rmid, node, ns, int(ns * energy * _PICO / NS), int(ns * MBM_TOTAL.rate / NS))
            for (rmid, node), ns in sorted(counts)
        ]
