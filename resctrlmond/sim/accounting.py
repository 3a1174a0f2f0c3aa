# SPDX-License-Identifier: Apache-2.0
"""Whose CPU time goes to which RMID: looks at the tasks, and charges the counters and the ledger."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping

from resctrlmond.sim.counters import Counters
from resctrlmond.sim.profiles import Profile
from resctrlmond.sim.tasks import DEFAULT, Member, Tasks, TaskTable
from resctrlmond.sim.truth import Ledger

SAMPLE_SECONDS = 0.05


@dataclasses.dataclass(slots=True)
class _Owner:
    """The group that has a CPU, by its RMID; ``seen`` is what was left to it of the CPU's time ``at`` that time."""

    rmid: int
    seen: int
    at: float


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
        # CPU -> who counts there what no member is charged with.
        self._owners: dict[int, _Owner] = {}
        self._charged_on: collections.Counter[int] = collections.Counter()  # to members, by CPU
        self.tasks = Tasks(table, self._charge, self._bury, now)

    def poll(self) -> None:
        """To be called often: sees new threads while their parents live, and counts CPU time every 50 ms."""
        now = self._now()
        if self.tasks or self._owners:
            self.tasks.look()
            if now - self._sampled >= SAMPLE_SECONDS:
                self._sample(None)

    def look(self, rmids: Collection[int] | None = None) -> None:
        """Counts all that was used up to now, as far as it concerns these RMIDs (None: all)."""
        if self._owners and (rmids is None or any(owner.rmid in rmids for owner in self._owners.values())):
            rmids = None  # its share of a CPU is what all the others leave
        if self.tasks or self._owners:
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
            self._settle_cpus()
            self._sampled = self._now()

    def update_cache(self) -> None:
        """To be called when tasks have changed groups: the cache that they hold changes its owner."""
        live = collections.Counter(self.tasks.live(self.node_of))
        # Whatever runs on a CPU of a group holds as much as one task.
        live.update((owner.rmid, self.node_of(cpu)) for cpu, owner in self._owners.items())
        self._counters.hold_cache(live, self._now())

    def give_cpus(self, owners: Mapping[int, int]) -> None:
        """CPU -> the RMID that counts there what tasks of the default group use; root's where none is named.

        A task's own RMID goes before its CPU's (__resctrl_sched_in() in arch/x86/include/asm/resctrl.h).
        """
        if not owners and not self._owners:
            return
        self.look()
        now, left = self._now(), self._left()
        self._owners = {cpu: _Owner(rmid, left.get(cpu, 0), now) for cpu, rmid in owners.items()}
        self.update_cache()

    def _left(self) -> dict[int, int]:
        """CPU -> the time used there that no member was charged with."""
        used = self._table.host_cpu_ns()
        return {cpu: ns - self._host_start.get(cpu, 0) - self._charged_on[cpu] for cpu, ns in used.items()}

    def _settle_cpus(self) -> None:
        if not self._owners:
            return
        now, left = self._now(), self._left()
        for cpu, owner in self._owners.items():
            if (ns := left.get(cpu, 0) - owner.seen) > 0:
                self._counters.charge(owner.rmid, self.node_of(cpu), ns, owner.at, now)
                owner.seen += ns
            owner.at = now

    def settle_root(self) -> None:
        """Charges root with what all CPUs did and nobody else was charged with."""
        used = [0] * self._profile.nodes
        for cpu, ns in self._table.host_cpu_ns().items():
            used[self.node_of(cpu)] += ns - self._host_start.get(cpu, 0)
        self._counters.settle_root(used)

    def charge_default(self, tid: int, cpu: int, ns: int) -> None:
        """Notes what a thread of the default group used; its counters follow from the host's CPU time."""
        stat = self._table.stat(tid)
        if stat and self.tasks.ids(tid) == DEFAULT:
            rmid = self._owners[cpu].rmid if cpu in self._owners else DEFAULT.rmid
            self._ledger.charge(tid, stat.start, rmid, self.node_of(cpu), ns)

    def node_of(self, cpu: int) -> int:
        """The node that a CPU belongs to."""
        return self._profile.node_of(cpu, self._table.cpus)

    def cpus_of(self, node: int) -> list[int]:
        """The CPUs of a node."""
        return [cpu for cpu in range(self._table.cpus) if self.node_of(cpu) == node]

    def _charge(self, member: Member, ns: int, since: float) -> None:
        node = self.node_of(member.cpu)
        self._charged_on[member.cpu] += ns
        self._counters.charge(member.ids.rmid, node, ns, since, self._now())
        self._ledger.charge(member.tid, member.start, member.ids.rmid, node, ns)

    def _bury(self, member: Member) -> None:
        self._ledger.end(member.tid, member.start)
