# SPDX-License-Identifier: Apache-2.0
"""CPU hotplug: a domain disappears with its last CPU and appears with its first one."""

from __future__ import annotations

import errno
from collections.abc import Callable

from resctrlmond.sim.kernel.abmc import Assignments
from resctrlmond.sim.kernel.accounting import Accounting
from resctrlmond.sim.kernel.allocation import Allocation
from resctrlmond.sim.kernel.counters import Counters
from resctrlmond.sim.kernel.cpus import Cpus
from resctrlmond.sim.kernel.domains import Domain, Domains
from resctrlmond.sim.kernel.rmids import RmidPool
from resctrlmond.sim.kernel.tree import error


class Hotplug:
    """CPU hotplug as in resctrl_offline_cpu() and resctrl_offline_mon_domain().

    ``place`` creates or removes the directories of a domain, which may be a part of the second one, in all groups.
    """

    def __init__(
        self,
        *,
        domains: Domains,
        cpus: Cpus,
        rmids: RmidPool,
        counters: Counters,
        assignments: Assignments,
        allocation: Allocation,
        accounting: Accounting,
        place: Callable[[Domain, Domain | None, bool], None],
    ) -> None:
        self._domains = domains
        self._cpus = cpus
        self._rmids = rmids
        self._counters = counters
        self._assignments = assignments
        self._allocation = allocation
        self._accounting = accounting
        self._place = place

    def set_cpu(self, cpu: int, online: bool) -> None:
        """Switch one CPU, and every domain of which it is the last or the first one.

        Raises ENOENT for a CPU that does not exist or is in that state already, EBUSY for the last online one.
        """
        if not 0 <= cpu < self._cpus.total or (cpu in self._cpus.online) == online:
            raise error(errno.ENOENT)
        if self._cpus.online == {cpu}:
            raise error(errno.EBUSY)
        self._set_cpus([cpu], online)
        alive = {self._accounting.node_of(other) for other in self._cpus.online}
        for leaf in self._domains.leaves:
            of_it = self._accounting.node_of(cpu) in leaf.nodes
            if of_it and self._domains.is_online(leaf) != bool(alive.intersection(leaf.nodes)):
                self._switch(leaf.name, online)

    def set_domain(self, name: str, online: bool) -> None:
        """Switch all CPUs of a cache or node; of a package, only its files.

        Its directories disappear from all groups and appear anew; traffic then starts at 0, telemetry continues.
        Raises ENOENT for a domain that does not exist or is in that state already.
        """
        self._accounting.look()
        leaf = self._switch(name, online)
        if leaf not in self._domains.packages:
            self._set_cpus([cpu for node in leaf.nodes for cpu in self._accounting.cpus_of(node)], online)

    def _set_cpus(self, cpus: list[int], online: bool) -> None:
        self._accounting.look()
        self._cpus.set_online(cpus, online)
        self._accounting.give_cpus(self._cpus.owners())

    def _switch(self, name: str, online: bool) -> Domain:
        was_online = set(self._domains.online_caches())
        switched = self._domains.set_online(name, online)
        if switched is None:
            raise error(errno.ENOENT)
        leaf, whole = switched
        if leaf not in self._domains.packages:  # packages have neither limbo nor traffic
            self._rmids.set_online(leaf.nodes[0], online)
            if online:
                self._counters.restart_node(leaf.nodes[0])
            else:
                self._assignments.drop_domain(leaf.number)
        for cache in was_online.symmetric_difference(self._domains.online_caches()):
            self._allocation.reset(cache)
        self._place(leaf, whole, online)
        return leaf
