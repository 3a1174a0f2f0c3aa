# SPDX-License-Identifier: Apache-2.0
"""The parts that every function on workloads uses."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resctrlmond.resctrl.tree import Tree
from resctrlmond.workloads.evidence.interference import Interference
from resctrlmond.workloads.evidence.run_state import RunStates
from resctrlmond.workloads.evidence.takeover import TakeOver
from resctrlmond.workloads.evidence.watched import WatchedMembers
from resctrlmond.workloads.evidence.witnessed import Proofs
from resctrlmond.workloads.machine.pools import Machine
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.workload import Doubt, Workload
from resctrlmond.workloads.profiles.profile import Profile, Profiles
from resctrlmond.workloads.profiles.unwatched import UnwatchedContainers
from resctrlmond.workloads.records.quality_file import QualityFiles
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store


class Memory(msgspec.Struct):
    """Facts that belong to no run, kept until the daemon ends.

    ``excluded`` is the reason why a container of a pod is not counted in the group of the pod, by the key of the pod,
    which may begin later. ``taken_ns`` is when RMIDs were taken from units that no waiting group has got yet
    (``rmid_transfer.py``, ``clock.boot_ns``).
    """

    excluded: dict[str, Doubt] = msgspec.field(default_factory=dict)
    taken_ns: list[int] = msgspec.field(default_factory=list)


class Callbacks(msgspec.Struct):
    """Functions of higher parts that verbs call.

    ``serve_counters`` assigns bandwidth counters that became free.
    """

    serve_counters: Callable[[], None] = lambda: None


class Reloadable(msgspec.Struct):
    """The settings and the profiles, which a reload replaces."""

    settings: Settings
    profiles: Profiles = msgspec.field(default_factory=Profiles)

    def profile_of(self, workload: Workload) -> Profile | None:
        """Return the profile of the workload as it is now; None if it has none, or an unknown one."""
        return self.profiles.find(workload.profile)


class Context(msgspec.Struct, frozen=True):
    """The tree, the store, the files, what watches them, and the settings of the last reload."""

    tree: Tree
    store: Store
    runs: RunStates
    snapshots: Snapshots
    mark: Mark
    config: Reloadable
    quality: QualityFiles
    take_over: TakeOver
    interference: Interference
    machine: Machine
    proofs: Proofs
    callbacks: Callbacks = msgspec.field(default_factory=Callbacks)
    memory: Memory = msgspec.field(default_factory=Memory)
    watched: WatchedMembers = msgspec.field(default_factory=WatchedMembers)
    unwatched: UnwatchedContainers = msgspec.field(default_factory=UnwatchedContainers)
