# SPDX-License-Identifier: Apache-2.0
"""The parts that every function on workloads uses."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resctrlmond.resctrl.mounts import Mounting
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.evidence.callers import LeftCallers
from resctrlmond.workloads.evidence.interference import Interference
from resctrlmond.workloads.evidence.joiners import Joiners
from resctrlmond.workloads.evidence.pod_times import PodTimes
from resctrlmond.workloads.evidence.takeover import TakeOver
from resctrlmond.workloads.evidence.watched import WatchedMembers
from resctrlmond.workloads.machine.pools import Machine
from resctrlmond.workloads.model.clock import boot_ns
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.profiles.profile import Profile, Profiles
from resctrlmond.workloads.profiles.unwatched import UnwatchedContainers
from resctrlmond.workloads.records.quality_file import QualityFiles
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store

# The inode of a file or folder and its time of status change (ns), which no program can set.
Stamp = tuple[int, int]


class Memory(msgspec.Struct):
    """Facts about groups, kept until the daemon ends.

    ``mounted_on`` is the mount on which a group was found last, by its nonce. ``stale_links`` are the snapshots
    (``Workload.subfolder``) whose links to live counters could not be changed after their group moved. ``occupants``
    is a task that was found in a group, by its directory. ``checkpoints`` are the checkpoints of a workload's groups
    (``Snapshots.keep_read``) for which its file ``quality`` was written, by key. ``stamps`` are those of its files at
    the start, by key, until its first checkpoint; ``code`` is that of the program (``quality_stamps.py``). ``apart``
    is the reason why a container of a pod is not counted in the group of the pod, by the key of the pod; it lacks
    containers that were started before ``since_ns`` (``clock.boot_ns``). ``taken_ns`` is when RMIDs were taken from
    units that no waiting group has got yet (``rmid_transfer.py``). ``empty_since_ns`` is when an overflow workload
    lost its last member, by key (``overflow.py``). ``returns`` is, by key, when the dormant member of a service
    ended, and since when its control group has tasks again.
    """

    mounted_on: dict[int, Mounting] = msgspec.field(default_factory=dict)
    stale_links: set[str] = msgspec.field(default_factory=set)
    occupants: dict[GroupRef, int] = msgspec.field(default_factory=dict)
    checkpoints: dict[str, list[int]] = msgspec.field(default_factory=dict)
    stamps: dict[str, list[Stamp]] = msgspec.field(default_factory=dict)
    code: Stamp | None = None
    apart: dict[str, str] = msgspec.field(default_factory=dict)
    since_ns: int = msgspec.field(default_factory=boot_ns)
    taken_ns: list[int] = msgspec.field(default_factory=list)
    empty_since_ns: dict[str, int] = msgspec.field(default_factory=dict)
    returns: dict[str, tuple[str, int]] = msgspec.field(default_factory=dict)


class Callbacks(msgspec.Struct):
    """Functions of higher parts that verbs call.

    ``on_assigned`` gets the process of a new member, and its workload's key, before ``Store.on_end``; then it owns
    the process. ``serve_counters`` assigns bandwidth counters that became free.
    """

    on_assigned: Callable[[str, Process], None] = lambda _key, process: process.close()
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
    snapshots: Snapshots
    mark: Mark
    config: Reloadable
    quality: QualityFiles
    joiners: Joiners
    take_over: TakeOver
    interference: Interference
    machine: Machine
    pod_times: PodTimes
    callers: LeftCallers = msgspec.field(default_factory=LeftCallers)
    callbacks: Callbacks = msgspec.field(default_factory=Callbacks)
    memory: Memory = msgspec.field(default_factory=Memory)
    watched: WatchedMembers = msgspec.field(default_factory=WatchedMembers)
    unwatched: UnwatchedContainers = msgspec.field(default_factory=UnwatchedContainers)
