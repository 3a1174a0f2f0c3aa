# SPDX-License-Identifier: Apache-2.0
"""Whose CPU time goes to which RMID: looks at the tasks, and charges the counters and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection

from resctrlmond.sim.counters import Counters
from resctrlmond.sim.profiles import Profile
from resctrlmond.sim.tasks import DEFAULT, Member, Tasks, TaskTable
from resctrlmond.sim.truth import Ledger

SAMPLE_SECONDS = 0.05


class Accounting:
    """Keeps ``tasks``, and what they use, up to date. ``now`` is the simulation's clock, in seconds."""

    def __init__(
        self, profile: Profile, table: TaskTable, counters: Counters, ledger: Ledger, now: Callable[[], float]
    ) -> None:
        self._profile = profile
        self._table = table
        self._counters = counters
        self._ledger = ledger
        self._now = now
        self._host_start = dict(table.host_cpu_ns())
        self._sampled = float("-inf")
        self.tasks = Tasks(table, self._charge, self._bury, now)

    def poll(self) -> None:
        """To be called often: sees new threads while their parents live, and counts CPU time every 50 ms."""
        now = self._now()
        if self.tasks:
            self.tasks.look()
            if now - self._sampled >= SAMPLE_SECONDS:
                self._sample(None)

    def look(self, rmids: Collection[int] | None = None) -> None:
        """Counts all that was used up to now, as far as it concerns these RMIDs (None: all)."""
        if self.tasks:
            self.tasks.look()
            self._sample(rmids)

    def look_at(self, tid: int) -> None:
        """Counts what one thread used up to now."""
        self.tasks.look()
        self.tasks.check(tid)
        self.update_cache()

    def _sample(self, rmids: Collection[int] | None) -> None:
        self.tasks.sample(rmids)
        self.update_cache()
        if rmids is None:
            self._sampled = self._now()

    def update_cache(self) -> None:
        """To be called when tasks have changed groups: the cache that they hold changes its owner."""
        self._counters.hold_cache(self.tasks.live(self._node_of), self._now())

    def settle_root(self) -> None:
        """Charges root with what all CPUs did and nobody else was charged with."""
        used = [0] * self._profile.nodes
        for cpu, ns in self._table.host_cpu_ns().items():
            used[self._node_of(cpu)] += ns - self._host_start.get(cpu, 0)
        self._counters.settle_root(used)

    def charge_default(self, tid: int, cpu: int, ns: int) -> None:
        """Notes what a thread of the default group used; its counters follow from the host's CPU time."""
        stat = self._table.stat(tid)
        if stat and self.tasks.ids(tid) == DEFAULT:
            self._ledger.charge(tid, stat.start, DEFAULT.rmid, self._node_of(cpu), ns)

    def _node_of(self, cpu: int) -> int:
        return self._profile.node_of(cpu, self._table.cpus)

    def _charge(self, member: Member, ns: int, since: float) -> None:
        node = self._node_of(member.cpu)
        self._counters.charge(member.ids.rmid, node, ns, since, self._now())
        self._ledger.charge(member.tid, member.start, member.ids.rmid, node, ns)

    def _bury(self, member: Member) -> None:
        self._ledger.end(member.tid, member.start)
