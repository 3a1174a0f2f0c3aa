# SPDX-License-Identifier: Apache-2.0
"""Read the counters of groups, keep the values, and compute the totals."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.counters import Reading, event
from resctrlmond.resctrl.errors import (
    ResctrlError,
)
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures import caveats
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.groups import location
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.queue_order import lacking_counters
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.workload import Group, State, Workload, replace
from resctrlmond.workloads.records.snapshot import KeptReadings
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.records.totals import Live, LiveReadings, used

# Cores report their energy counts every 2 ms at the latest, also after the death of a task (cover letter of the AET
# patches): the last reading comes after that.
REPORTING_LAG_S = 0.004

# Domains and bandwidth events, as in Group.unassigned.
Lacking = tuple[tuple[str, str], ...]


def checkpoint(ctx: Context, txn: Transaction) -> None:
    """Keep the current values, for the case that another program removes a group. Raises NoSuchGroup, NotWritten.

    Nothing is written for a workload whose values are those of its last checkpoint.
    """
    found, kept = {}, []
    for group in txn.workload.existing_groups:
        readings, result = _read_and_keep(ctx, txn.workload, group)
        found[txn.workload.subfolder(group)] = readings
        kept.append(result.number)
        save_caveats(txn, with_caveats(ctx, group, readings))
    # A change of the workload has updated the file already (QualityFiles.before_save).
    run = ctx.runs.of(txn.key)
    if 0 in kept or run.kept_numbers != kept or not ctx.snapshots.quality(txn.key):
        run.kept_numbers = None
        ctx.quality.update(txn.workload, found)
        run.kept_numbers = kept


def read_before_removal(ctx: Context, workload: Workload, group: Group) -> None:
    """Keep the current values, if they can be read, because another program may remove the group at any moment."""
    if group.state.has_directory:
        with contextlib.suppress(ResctrlError):  # then the checkpoint before stays the last reading
            _read_and_keep(ctx, workload, group)


def assign_counters(ctx: Context, txn: Transaction, group: Group) -> Group:
    """Assign the free bandwidth counters that the group lacks. Raises NoSuchGroup, KernelRefused."""
    group = location.follow_group(ctx, txn, group)
    return txn.save_group(replace(group, unassigned=assign(ctx, group.ref, group.unassigned)))


def is_first(ctx: Context, workload: Workload) -> bool:
    """Whether no other group of the same or a higher priority lacks bandwidth counters."""
    first = next(iter(lacking_counters(ctx.store.without_counters())), None)
    return first is None or first.workload.priority < workload.priority


def assign(ctx: Context, ref: GroupRef, lacking: Lacking) -> Lacking:
    """Assign these counters to a group, if they are free. Return those that it still lacks."""
    return tuple((domain, name) for domain, name in lacking if not ctx.tree.assign_counter(ref, name, domain))


def with_caveats(ctx: Context, group: Group, readings: Sequence[Reading]) -> Group:
    """Return the group with the caveats of these readings. Raises NotRead."""
    inexact, configuration = ctx.tree.inexact(), ctx.tree.bandwidth_configuration()
    mode = configuration.mode if any(event(reading.event).restarts for reading in readings) else None
    group = group.doubted(*caveats.of_readings(readings, mode, inexact, configuration.kernel_mode))
    if group.transactions:
        group = group.doubted(*caveats.changed(group.transactions, configuration.transactions))
    return replace(group, is_reallocated=True) if mode is Mode.REALLOCATED else group


def save_caveats(txn: Transaction, group: Group) -> Group:
    """Save the group's caveats, because the mode may be another one at its end."""
    saved = txn.workload.group(group.folder)
    if saved is None or (saved.doubts, saved.is_reallocated) == (group.doubts, group.is_reallocated):
        return group
    return txn.save_group(group)


def readings(ctx: Context, workload: Workload) -> Live:
    """Return the current values of each group; {} if the workload has no group, or its end values are written."""
    if not workload.state.has_group or _has_ends(ctx, workload):
        return {}
    location.check_whole(workload)
    return {workload.subfolder(group): _read(ctx, workload, group) for group in workload.existing_groups}


def _read(ctx: Context, workload: Workload, group: Group) -> LiveReadings:
    """Read the group's counters, and keep the values, if possible. Raises NoSuchGroup, NotRead."""
    begun_ns = time.monotonic_ns()
    found = ctx.tree.read(location.find(ctx, workload.key, group).ref)
    with contextlib.suppress(NotWritten):  # then no other reader has written newer ones either
        return LiveReadings(found, _keep(ctx, workload, group, begun_ns, found).checkpoint)
    return LiveReadings(found)


def _read_and_keep(ctx: Context, workload: Workload, group: Group) -> tuple[list[Reading], KeptReadings]:
    """Read the group's counters, and keep the values for the case that another program removes the group.

    Raises NoSuchGroup, NotRead, NotWritten.
    """
    begun_ns = time.monotonic_ns()
    found = ctx.tree.read(location.find(ctx, workload.key, group).ref)
    return found, _keep(ctx, workload, group, begun_ns, found)


def _keep(ctx: Context, workload: Workload, group: Group, begun_ns: int, found: Sequence[Reading]) -> KeptReadings:
    return ctx.snapshots.keep_read(group.created_at, begun_ns, workload.subfolder(group), found, group.inodes)


def totals(ctx: Context, workload: Workload, live: Live) -> list[Total]:
    """Return the totals since the baseline: up to the ``live`` readings, or up to the end values of an ended run."""
    if _has_ends(ctx, workload):
        return used(ctx.snapshots, workload, {})
    for group in workload.groups:
        if (subfolder := workload.subfolder(group)) in live:
            workload = workload.with_group(with_caveats(ctx, group, live[subfolder].readings))
    found = used(ctx.snapshots, workload, live)
    if live:
        ctx.quality.witness(workload, live, found)
    return found


def own_now(ctx: Context, workload: Workload) -> list[Total]:
    """Return the totals of a workload until now, without its nested workloads. Raises NoSuchGroup, NotRead."""
    live = readings(ctx, workload)
    if live:
        workload = ctx.proofs.weighed(workload)
    return totals(ctx, workload, live)


def _has_ends(ctx: Context, workload: Workload) -> bool:
    if workload.state.is_over:
        return True
    return workload.state is State.ENDING and ctx.snapshots.is_complete(workload.key)
