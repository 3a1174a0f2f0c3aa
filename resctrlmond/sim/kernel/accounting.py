# SPDX-License-Identifier: Apache-2.0
"""Charge the CPU time of tasks to RMIDs: sample the tasks, and update the counters and the ledger."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping

from resctrlmond.sim.kernel.counters import Counters
from resctrlmond.sim.kernel.tasks import DEFAULT, ROOT, Member, Tasks, TaskTable
from resctrlmond.sim.kernel.truth import Ledger
from resctrlmond.sim.kernel.witness import Witness
from resctrlmond.sim.profiles import Profile

SAMPLE_SECONDS = 0.05


@dataclasses.dataclass(slots=True)
class _Owner:
    """The group that has a CPU, by its RMID. ``seen`` is the rest of the CPU's time ``at`` that time."""

    rmid: int
    seen: int
    at: float


class Accounting:
    """Updates ``tasks`` and their use. ``now`` is the simulation's clock, in seconds."""

    def __init__(
        self,
        profile: Profile,
        table: TaskTable,
        counters: Counters,
        ledger: Ledger,
        *,
        witness: Witness,
        now: Callable[[], float],
    ) -> None:
        self._profile = profile
        self._table = table
        self._counters = counters
        self._ledger = ledger
        self._witness = witness
        self._now = now
        self._host_start = dict(table.host_cpu_ns())
        self._sampled = float("-inf")
        # CPU -> the group that gets the time that is charged to no member.
        self._owners: dict[int, _Owner] = {}
        self._charged_on: collections.Counter[int] = collections.Counter()  # charged to members, by CPU
        self.tasks = Tasks(table, self._charge, witness.charge, self._bury, now)

    def poll(self) -> None:
        """Find new threads while their parents live, and charge CPU time every 50 ms. Call this often."""
        now = self._now()
        if self.tasks or self._owners:
            self.tasks.look()
            if now - self._sampled >= SAMPLE_SECONDS:
                self._sample(None)
        elif now - self._sampled >= SAMPLE_SECONDS:
            # No member can fork or end, but the kernel's queues would fill up, and lose what comes later.
            self.tasks.skip()
            self._sampled = now

    def look(self, rmids: Collection[int] | None = None) -> None:
        """Charge all use until now, for these RMIDs (None: all)."""
        if self._owners and (rmids is None or any(owner.rmid in rmids for owner in self._owners.values())):
            rmids = None  # the share of a CPU is the rest of all others
        if self.tasks or self._owners:
            self.tasks.look()
            self._sample(rmids)

    def look_at(self, tid: int) -> None:
        """Charge the use of one thread until now."""
        self.tasks.look()
        self.tasks.check(tid)
        self.update_cache()

    def _sample(self, rmids: Collection[int] | None) -> None:
        self.tasks.sample(rmids)
        self.update_cache()
        if rmids is None:
            self._charge_cpus()
            self._sampled = self._now()

    def update_cache(self) -> None:
        """Move the cache of tasks to their current groups. Call this after tasks have changed groups."""
        live = collections.Counter(self.tasks.live(self.node_of))
        # A CPU of a group occupies as much cache as one task.
        live.update((owner.rmid, self.node_of(cpu)) for cpu, owner in self._owners.items())
        self._counters.hold_cache(live, self._now())

    def give_cpus(self, owners: Mapping[int, int]) -> None:
        """Set the RMID of each CPU, which counts the use of tasks of the default group there; root's by default.

        A task's own RMID has precedence over that of its CPU (__resctrl_sched_in() in
        arch/x86/include/asm/resctrl.h).
        """
        if not owners and not self._owners:
            return
        self.look()
        now, left = self._now(), self._left()
        self._owners = {cpu: _Owner(rmid, left.get(cpu, 0), now) for cpu, rmid in owners.items()}
        self.update_cache()

    def _left(self) -> dict[int, int]:
        """Return the time of each CPU that is charged to no member."""
        used = self._table.host_cpu_ns()
        return {cpu: ns - self._host_start.get(cpu, 0) - self._charged_on[cpu] for cpu, ns in used.items()}

    def _charge_cpus(self) -> None:
        if not self._owners:
            return
        now, left = self._now(), self._left()
        for cpu, owner in self._owners.items():
            if (ns := left.get(cpu, 0) - owner.seen) > 0:
                self._counters.charge(owner.rmid, self.node_of(cpu), ns, owner.at, now)
                owner.seen += ns
            owner.at = now

    def charge_root(self) -> None:
        """Charge root with the use of all CPUs that is not charged elsewhere."""
        used = [0] * self._profile.nodes
        for cpu, ns in self._table.host_cpu_ns().items():
            used[self.node_of(cpu)] += ns - self._host_start.get(cpu, 0)
        self._counters.charge_root(used)

    def charge_default(self, tid: int, cpu: int, ns: int) -> None:
        """Record the use of a thread of the default group; its counters follow from the CPU time of the host."""
        stat = self._table.stat(tid)
        if stat and self.tasks.ids(tid) == DEFAULT:
            rmid = self._owners[cpu].rmid if cpu in self._owners else DEFAULT.rmid
            self._ledger.charge(tid, stat.start, rmid, self.node_of(cpu), ns)
            self._witness.add(DEFAULT, self._table.cgroups(tid) or ROOT, ns)

    def look_for_witness(self) -> None:
        """Charge all use until now, also that of each control group, and find removed control groups."""
        usage = self._table.cgroup_usage()
        self.look()
        self._witness.settle(usage)
        # After the look, which may be the first at a control group.
        self._witness.find_removed()

    def end(self, tid: int) -> None:
        """Record the control group in which a virtual thread ends, and its end if it is in the default group."""
        stat = self._table.stat(tid)
        if stat and not self.tasks.locate(tid, stat.start):
            self._witness.add(DEFAULT, self._table.cgroups(tid) or ROOT, 0, ended=1)

    def node_of(self, cpu: int) -> int:
        """Return the node of a CPU."""
        return self._profile.node_of(cpu, self._table.cpus)

    def cpus_of(self, node: int) -> list[int]:
        """Return the CPUs of a node."""
        return [cpu for cpu in range(self._table.cpus) if self.node_of(cpu) == node]

    def _charge(self, member: Member, ns: int, since: float) -> None:
        node = self.node_of(member.cpu)
        self._charged_on[member.cpu] += ns
        self._counters.charge(member.ids.rmid, node, ns, since, self._now())
        self._ledger.charge(member.tid, member.start, member.ids.rmid, node, ns)
        self._witness.use(member, ns)

    def _bury(self, member: Member) -> None:
        self._ledger.end(member.tid, member.start)
        self._witness.charge(member, ended=1)
