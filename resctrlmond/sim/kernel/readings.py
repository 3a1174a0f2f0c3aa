# SPDX-License-Identifier: Apache-2.0
"""Contents of counter files: sums over groups and nodes, and the kernel's words in place of a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from resctrlmond.sim.kernel.abmc import Assignments
from resctrlmond.sim.kernel.bmec import Configurations
from resctrlmond.sim.kernel.counters import Counters, format_raw
from resctrlmond.sim.kernel.domains import Domain, Domains
from resctrlmond.sim.kernel.faults import Faults
from resctrlmond.sim.kernel.groups import Group
from resctrlmond.sim.kernel.overflow import Key, Overflow
from resctrlmond.sim.profiles import Event, Kind

# A number, or the word for the reason why there is none.
Value = int | str


def _sum(values: Sequence[Value]) -> Value:
    """Sum the numbers and skip words; if there are only words, return the last one (mon_event_count())."""
    numbers = [value for value in values if isinstance(value, int)]
    return sum(numbers) if numbers else values[-1]


class Readings:
    """Reads counters as fs/resctrl/ctrlmondata.c and monitor.c do."""

    def __init__(
        self,
        counters: Counters,
        domains: Domains,
        assignments: Assignments,
        configurations: Configurations,
        faults: Faults,
    ) -> None:
        self._counters = counters
        self._domains = domains
        self._assignments = assignments
        self._configurations = configurations
        self._faults = faults
        profile = counters.profile
        self._overflow = Overflow(profile.scale_bytes << profile.mbm_bits)

    def text(self, group: Group, event: Event, domain: Domain, now: float) -> str:
        """Return the content of a counter file: the values of the group and its children, added before rounding."""
        value = _sum([self._value(member, event, domain, now) for member in group.members])
        return f"{format_raw(event, value) if isinstance(value, int) else value}\n"

    def _value(self, group: Group, event: Event, domain: Domain, now: float) -> Value:
        """Return the value of one RMID in one domain; for an L3 with nodes, the sum of those that can be read."""
        if word := self._faults.word(group.path, domain.name, event.name):
            return word
        if domain.parts:
            online = [part for part in domain.parts if self._domains.is_online(part)]
            return _sum([self._value(group, event, part, now) for part in online])
        rmid, node = group.ids.rmid, domain.nodes[0]
        if event.kind is Kind.OCCUPANCY:
            return self._counters.occupancy(rmid, node, now)
        if event.kind is Kind.TELEMETRY:
            raw = self._counters.telemetry(event, rmid, domain.number, now)
            return "Unavailable" if raw is None else raw
        if not self._assignments.counts(rmid, event, domain.number):
            return "Unassigned"
        if not self._counters.is_tracked(rmid, node):
            return "Unavailable"
        if not self._configurations.can_be_read(rmid, event, domain.number):
            return "Unavailable"
        return self._overflow.look(*self._traffic(rmid, event, domain))

    def _traffic(self, rmid: int, event: Event, domain: Domain) -> tuple[Key, int]:
        node = domain.nodes[0]
        rate = self._configurations.rate(event, domain.number, self._assignments.rate(event))
        key = (event.name, rmid, node, self._counters.began(event, rmid, node))
        return key, self._counters.traffic(event, rmid, node, rate)

    def run_worker(self, groups: Iterable[Group], *, runs: bool) -> None:
        """Stop or start the worker that reads the bandwidth counters of all groups in time."""
        looked = (
            self._traffic(group.ids.rmid, event, leaf)
            for group in groups
            for domain in self._domains.caches
            for leaf in domain.parts or (domain,)
            for event in leaf.events
            if event.kind is Kind.TRAFFIC
        )
        (self._overflow.start if runs else self._overflow.stop)(looked)
