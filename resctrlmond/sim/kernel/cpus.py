# SPDX-License-Identifier: Apache-2.0
"""The files cpus and cpus_list: the group of each CPU, valid writes, and CPUs that go offline or online."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping

from resctrlmond.sim.kernel.commands import CommandStatus
from resctrlmond.sim.kernel.cpusets import parse_cpu_list, parse_cpu_mask
from resctrlmond.sim.kernel.groups import Group
from resctrlmond.sim.kernel.tree import error


class Cpus:
    """The masks of all groups (rdtgroup_cpus_write() in fs/resctrl/rdtgroup.c).

    Every online CPU is in one control group, and in at most one monitoring group of it. ``controls`` returns the
    control groups, the root's first.
    """

    def __init__(self, total: int, status: CommandStatus, controls: Callable[[], Collection[Group]]) -> None:
        self.total = total
        self.online = set(range(total))
        self._status = status
        self._controls = controls

    @property
    def _default(self) -> Group:
        return next(iter(self._controls()))

    def owners(self) -> Mapping[int, int]:
        """Return CPU -> the RMID that counts the default group's tasks there, without the CPUs of root."""
        owners: dict[int, int] = {}
        for control in self._controls():
            for group in control.members:
                owners.update(dict.fromkeys(group.cpus, group.ids.rmid))
        return {cpu: rmid for cpu, rmid in owners.items() if rmid}

    def write(self, group: Group, command: str, *, as_list: bool) -> None:
        """Set the CPUs of the group; CPUs that it had before go to its parent, or to root."""
        try:
            wanted = (parse_cpu_list if as_list else parse_cpu_mask)(command, self.total)
        except OSError:
            self._status.add("Bad CPU list/mask")
            raise
        if not wanted <= self.online:
            raise self._refusal("Can only assign online CPUs")
        if group.parent is None:
            self._write_control(group, wanted)
        else:
            self._write_monitoring(group, group.parent, wanted)

    def _refusal(self, why: str) -> OSError:
        self._status.add(why)
        return error(errno.EINVAL)

    def _write_control(self, group: Group, wanted: set[int]) -> None:
        if group is self._default and not group.cpus <= wanted:
            raise self._refusal("Can't drop CPUs from default group")
        self._default.cpus |= group.cpus - wanted
        for other in self._controls():
            if other is not group:
                for loser in other.members:
                    loser.cpus -= wanted
        group.cpus = wanted
        # Its monitoring groups lose all CPUs, even those that the group keeps.
        for child in group.children.values():
            child.cpus = set()

    def _write_monitoring(self, group: Group, parent: Group, wanted: set[int]) -> None:
        if not wanted <= parent.cpus:
            raise self._refusal("Can only add CPUs to mongroup that belong to parent")
        for other in parent.children.values():
            other.cpus -= wanted
        group.cpus = wanted

    def release(self, group: Group) -> None:
        """Release the CPUs of a removed control group to root; the parent already has those of a monitoring group."""
        if group.parent is None:
            self._default.cpus |= group.cpus

    def set_online(self, cpus: Collection[int], online: bool) -> None:
        """Update the groups for CPUs that go offline (in no group) or come online (in root only)."""
        if online:
            self.online.update(cpus)
            self._default.cpus.update(cpus)
            return
        self.online.difference_update(cpus)
        for control in self._controls():
            for group in control.members:
                group.cpus.difference_update(cpus)
