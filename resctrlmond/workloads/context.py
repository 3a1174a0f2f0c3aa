# SPDX-License-Identifier: Apache-2.0
"""The parts that every function on workloads uses."""

from __future__ import annotations

import msgspec

from resctrlmond.resctrl.mounts import Mounting
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.interference import Interference
from resctrlmond.workloads.joiners import Joiners
from resctrlmond.workloads.machine import Machine
from resctrlmond.workloads.mark import Mark
from resctrlmond.workloads.quality_file import QualityFiles
from resctrlmond.workloads.settings import Settings
from resctrlmond.workloads.snapshot import Snapshots
from resctrlmond.workloads.store import Store
from resctrlmond.workloads.takeover import TakeOver
from resctrlmond.workloads.watched import WatchedMembers


class Memory(msgspec.Struct, frozen=True):
    """Facts about groups, kept until the daemon ends.

    ``mounted_on`` is the mount on which a group was found last, by its nonce. ``stale_links`` are the snapshots
    (``Workload.subfolder``) whose links to live counters could not be changed after their group moved. ``occupants``
    is a task that was found in a group, by its directory. ``checkpoints`` are the checkpoints of a workload's groups
    (``Snapshots.keep_read``) for which its file ``quality`` was written, by key. ``apart`` is a container of a pod
    that is a workload of its own, because its runtime has a group for it, by the key of the pod.
    """

    mounted_on: dict[int, Mounting] = msgspec.field(default_factory=dict)
    stale_links: set[str] = msgspec.field(default_factory=set)
    occupants: dict[GroupRef, int] = msgspec.field(default_factory=dict)
    checkpoints: dict[str, list[int]] = msgspec.field(default_factory=dict)
    apart: dict[str, str] = msgspec.field(default_factory=dict)


class Reloadable(msgspec.Struct):
    """The settings, which a reload replaces."""

    settings: Settings


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
    memory: Memory = msgspec.field(default_factory=Memory)
    watched: WatchedMembers = msgspec.field(default_factory=WatchedMembers)
