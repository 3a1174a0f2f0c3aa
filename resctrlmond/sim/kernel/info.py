# SPDX-License-Identifier: Apache-2.0
"""The directory info: the features of the machine, and the settings of all groups."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

from resctrlmond.sim.kernel.abmc import Assignments
from resctrlmond.sim.kernel.allocation import Allocation
from resctrlmond.sim.kernel.bmec import Configurations
from resctrlmond.sim.kernel.commands import CommandStatus, parse_unsigned
from resctrlmond.sim.kernel.groups import FILE_RO, FILE_RW, NodeFactory
from resctrlmond.sim.kernel.rmids import RmidPool
from resctrlmond.sim.kernel.tree import Caller, Directory, Store, error
from resctrlmond.sim.profiles import Event, Kind, Profile


def _taking(store: Callable[[str], None]) -> Store:
    """Return a write operation that ignores the caller."""

    def take(_caller: Caller, command: str) -> None:
        store(command)

    return take


class InfoFiles:
    """Fills ``info`` (res_common_files[] in fs/resctrl/rdtgroup.c)."""

    def __init__(
        self,
        *,
        profile: Profile,
        status: CommandStatus,
        rmids: RmidPool,
        assignments: Assignments,
        configurations: Configurations,
        allocation: Allocation,
    ) -> None:
        self._profile = profile
        self._status = status
        self._rmids = rmids
        self._assignments = assignments
        self._configurations = configurations
        self._cat = allocation

    def fill(self, root: Directory, factory: NodeFactory) -> None:
        """Create ``info`` with everything in it."""
        profile = self._profile
        info = factory.directory(root, "info")
        factory.file(info, "last_cmd_status", FILE_RO, self._status.show)
        if profile.can_allocate:
            self._allocation(factory.directory(info, "L3"), factory)
        for resource, events in profile.resources:
            where = factory.directory(info, f"{resource}_MON")
            features = "".join(f"{name}\n" for event in events for name in (event.name, *self._config_of(event)))
            factory.file(where, "num_rmids", FILE_RO, lambda: f"{profile.num_rmids}\n")
            factory.file(where, "mon_features", FILE_RO, partial(str, features))
            if resource == "L3":
                self._cache_monitoring(where, factory)

    def _config_of(self, event: Event) -> list[str]:
        """Return the file with the configuration of the event, if it can be changed."""
        return [f"{event.name}_config"] if self._profile.configurable_events and event.kind is Kind.TRAFFIC else []

    def _cache_monitoring(self, where: Directory, factory: NodeFactory) -> None:
        show = lambda: f"{self._rmids.threshold}\n"  # noqa: E731 - one of many files
        factory.file(where, "max_threshold_occupancy", FILE_RW, show, _taking(self._write_threshold))
        counters = self._assignments
        if not self._profile.is_old:  # since Linux 6.18
            factory.file(where, "mbm_assign_mode", FILE_RW, counters.show_mode, _taking(counters.write_mode))
        for event in self._profile.cache_events:
            for name in self._config_of(event):
                store = _taking(partial(self._configurations.write, event))
                factory.file(where, name, FILE_RW, partial(self._configurations.show, event), store)
        if not self._profile.mbm_counters:
            return
        factory.file(where, "num_mbm_cntrs", FILE_RO, counters.show_number)
        factory.file(where, "available_mbm_cntrs", FILE_RO, counters.show_available)
        on_mkdir = _taking(counters.write_on_mkdir)
        factory.file(where, "mbm_assign_on_mkdir", FILE_RW, counters.show_on_mkdir, on_mkdir)
        configs = factory.directory(where, "event_configs")
        for event in self._profile.cache_events:
            if event.kind is Kind.TRAFFIC:
                directory = factory.directory(configs, event.name)
                store = _taking(partial(counters.write_filter, event))
                factory.file(directory, "event_filter", FILE_RW, partial(counters.show_filter, event), store)

    def _write_threshold(self, command: str) -> None:
        # Linux 6.12 writes no message.
        status = CommandStatus(is_old=True) if self._profile.is_old else self._status
        status.clear()
        try:
            value = parse_unsigned(command)
        except OSError as refusal:
            raise status.unreadable("max_threshold_occupancy", refusal.errno or errno.EINVAL) from refusal
        limit = self._profile.cache_bytes
        if value > limit:
            status.add(f"max_threshold_occupancy: Exceeds limit (before adjustment) of {limit} bytes")
            raise error(errno.EINVAL)
        self._rmids.threshold = self._profile.round_down(value)

    def _allocation(self, where: Directory, factory: NodeFactory) -> None:
        profile = self._profile
        for name, text in {
            "num_closids": f"{profile.num_closids}\n",
            "cbm_mask": f"{(1 << profile.cbm_bits) - 1:x}\n",
            "min_cbm_bits": "1\n",
            "shareable_bits": f"{profile.shareable_bits:x}\n",
            "sparse_masks": f"{profile.sparse_masks:d}\n",
        }.items():
            if name == "sparse_masks" and profile.is_oldest:
                continue  # since Linux 6.7
            factory.file(where, name, FILE_RO, partial(str, text))
        factory.file(where, "bit_usage", FILE_RO, self._cat.show_usage)
