# SPDX-License-Identifier: Apache-2.0
"""Create groups, and write their baselines. A crash between any two steps can be recovered.

The record is on disk before the directory, and has the nonce that the directory gets after mkdir. A kill between the
two leaves a directory with our mark and another nonce, which the next try takes (``_take_existing``), and without
such a try ``recovery`` removes.
"""

from __future__ import annotations

import itertools
import logging
import os
import time

from resctrlmond.resctrl import tasks
from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.errors import (
    GroupExists,
    KernelRefused,
    ResctrlError,
    RmidsExhausted,
    no_rmid_remedy,
)
from resctrlmond.resctrl.tree import Found
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.figures import caveats
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.groups import counters, location, removal, units
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.queue_order import served_before
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.errors import ForeignGroup
from resctrlmond.workloads.model.validation import is_pod_uid, valid_class
from resctrlmond.workloads.model.workload import ROOT_FOLDER, Group, GroupState, State, Workload, replace
from resctrlmond.workloads.records.store import Limit, Transaction

log = logging.getLogger(__name__)


def create(
    ctx: Context,
    txn: Transaction,
    workload: Workload,
    group: Group,
    *,
    may_wait: bool = True,
    limit: Limit | None = None,
) -> Group:
    """Save the workload with the group, create the group's directory, and write its baseline. Return the group.

    Its state is CREATED. The record is on
    disk before the directory exists, and the baseline before a task can join. If no RMID is free, the group stays
    pending, with the reason; RmidsExhausted only if not ``may_wait``. Raises ForeignGroup, NoSuchClass,
    KernelRefused, NotMounted, NotWritten and LimitExceeded, and leaves no directory in these cases.
    """
    group = begun(ctx, group)
    txn.save(workload.with_group(group), limit)
    is_empty = True
    try:
        if workload.priority < 0:
            _check_reserve(ctx, workload, group)
        with ctx.interference.creating(group.ref):
            found = ctx.tree.create(group.ref, group.nonce)
            ctx.interference.watch(group.ref)
    except RmidsExhausted as error:
        if not may_wait:
            raise
        return txn.save_group(waiting(ctx, group, error))
    except GroupExists as error:
        found, is_empty = _take_existing(ctx, group, error)
    if found.gid != ctx.mark.gid:
        with undoing(txn.key):
            ctx.tree.remove(group.ref)
        raise KernelRefused(
            f"the new group has group id {found.gid} instead of the mark of resctrlmond, {ctx.mark.gid}",
            path=found.path,
            remedy="Run resctrlmond with the group resctrlmon (Group= in its unit)",
        )
    try:
        return write_baseline(ctx, txn, group, has_begin=is_empty)
    except ResctrlError:
        if is_empty:  # otherwise it has tasks, and was only adopted
            with undoing(txn.key):
                removal.remove_directory(ctx, txn.key, group)
        raise


def _check_reserve(ctx: Context, workload: Workload, group: Group) -> None:
    """Raise RmidsExhausted if a group of a priority below 0 would take an RMID that is kept for other workloads."""
    settings, path = ctx.config.settings, ctx.tree.full_path(group.ref)
    if units.is_overflow(workload) and not units.overflow_room(ctx):
        raise RmidsExhausted(
            "cannot create the monitoring group: no more groups may be shared by units",
            path=path,
            remedy=f"Raise 'overflow' ({settings.overflow}) in resctrlmond.yaml",
        )
    kept = kept_from(ctx, workload)
    if kept and (free := ctx.tree.free_rmids()) <= kept:
        raise RmidsExhausted(
            f"cannot create the monitoring group: RMIDs are kept for workloads of priority 0 and above ({free} free)",
            path=path,
            remedy=f"Watch fewer systemd units, or lower 'reserve' ({settings.reserve}) in resctrlmond.yaml",
        )


def kept_from(ctx: Context, workload: Workload) -> int:
    """Return how many free RMIDs a workload leaves to others, units also for the groups that they share."""
    if workload.priority >= 0:
        return 0
    has_room = units.is_unit(workload) and not units.is_overflow(workload)
    return ctx.config.settings.reserve + (units.overflow_room(ctx) if has_room else 0)


def add(ctx: Context, txn: Transaction, class_: str, *, may_wait: bool = True) -> Group:
    """Create one more group of the workload, in a class where it has none.

    Raises what ``create`` does, and InvalidClass for a class whose name cannot be recorded.
    """
    class_, workload = valid_class(class_), txn.workload
    # The name of the class is taken if the group of that class was moved to another class.
    taken = {group.folder for group in workload.groups if group.class_ != class_}
    names = itertools.chain([class_ or ROOT_FOLDER], map(str, itertools.count(2)))
    group = Group(
        folder=next(name for name in names if name not in taken),
        class_=class_,
        name=workload.first.name,
        boot_id=ctx.mark.boot_id,
        created_at=utc_now(),
        created_ns=boot_ns(),
        # If the first group waits for an RMID, this one is created after it.
        reason=workload.reason,
    )
    if workload.state is State.PENDING:
        return txn.save_group(group)
    group = begun(ctx, group)
    is_shared = units.is_overflow(workload)
    # The queue has units that wait for an RMID of their own, so their shared group does not wait in it.
    may_wait = may_wait and not is_shared
    try:
        first = served_before(replace(workload, priority=0) if is_shared else workload, ctx.store.pending())
        if first is None:
            return create(ctx, txn, workload, group, may_wait=may_wait)
        error = queued_behind(ctx, first, group)
        if not may_wait:
            raise error
        return txn.save_group(waiting(ctx, group, error))
    except Exception:
        with undoing(txn.key):
            removal.discard_group(ctx, txn, group)
        raise


def begun(ctx: Context, group: Group) -> Group:
    """Return the group with a nonce and a time of creation, if it has none yet."""
    # The second of the clock with random digits below: it looks like a time, and no two are equal. A group that waits
    # keeps its nonce, so that a retry changes nothing in the record.
    nonce = group.nonce or time.time_ns() // 10**9 * 10**9 + int.from_bytes(os.urandom(8), "big") % 10**9
    if not group.created_at:
        group = replace(group, created_at=utc_now(), created_ns=boot_ns())
    return replace(group, state=GroupState.PENDING, nonce=nonce, boot_id=ctx.mark.boot_id)


def waiting(ctx: Context, group: Group, error: RmidsExhausted) -> Group:
    """Return the group as one that waits for an RMID, for the reason in ``error``."""
    return replace(begun(ctx, group), reason=str(error), in_limbo=error.in_limbo)


def queued_behind(ctx: Context, first: Group, group: Group) -> RmidsExhausted:
    """Return the error for a new group that must wait, because the group ``first`` waits for an RMID already."""
    return RmidsExhausted(
        "cannot create the monitoring group: workloads of the same or a higher priority already wait for an RMID",
        path=ctx.tree.full_path(group.ref),
        in_limbo=first.in_limbo,
        remedy=no_rmid_remedy(first.in_limbo),
    )


def _take_existing(ctx: Context, group: Group, error: GroupExists) -> tuple[Found, bool]:
    """Give the group a directory of its name that exists already, if that is ours and no record is about it.

    Return it, and whether it has no task.
    """
    existing = ctx.tree.find(group.ref)
    if existing is None:
        raise error
    if existing.gid != ctx.mark.gid:
        raise ForeignGroup(
            "a monitoring group with this name exists already: another program created it",
            path=existing.path,
            remedy="Choose another key, or remove the group if it is not needed",
        ) from error
    if location.is_recorded(ctx, existing):
        raise error  # of another key: from before group_prefix was changed, or renamed to this name
    # It has our mark and no record: a crash came between two steps, or the record was lost.
    is_empty = not ctx.tree.tasks(group.ref)
    return ctx.tree.set_nonce(group.ref, group.nonce), is_empty


def write_baseline(ctx: Context, txn: Transaction, group: Group, *, has_begin: bool) -> Group:
    """Read the begin values, and write and save them. Return the group, in state CREATED."""
    workload = txn.workload
    if not group.folder:
        # Before the first task of the run can be in the group.
        workload = replace(workload, proof=ctx.proofs.begin())
    group = with_baseline(ctx, workload, group, has_begin=has_begin)
    return txn.save(workload.with_group(group)).group(group.folder) or group


def with_baseline(ctx: Context, workload: Workload, group: Group, *, has_begin: bool) -> Group:
    """Read the begin values, and write them. Return the group, in state CREATED, not saved yet.

    ``has_begin``: its totals since then are known. A group that is created again in another class keeps its doubts.
    """
    mounting = ctx.runs.of(workload.key).of_group(group).mounted_on = ctx.tree.mounting()
    if group.inodes:
        has_begin = has_begin and group.has_begin
        group = replace(group, doubts=tuple(known for known in group.doubts if not known.events))
        if group.ids is not None:
            group = replace(group, has_mixed_use=True)  # with the IDs of another directory
    else:
        # The others are about another directory, which has been removed.
        group = replace(group, doubts=tuple(one for one in group.doubts if one.reason == Reason.NOT_INCLUDED.name))
    # A task that another program moves into the group from now on counts as one of others.
    created_at, created_ns = utc_now(), boot_ns()
    if has_begin and not group.observed:
        group = _cleared(ctx, workload.key, group)
    group = replace(group, created_at=created_at, created_ns=created_ns, ids=None, history=())
    # Before the readings, and at the end after them, so that a change in between is found.
    configuration = ctx.tree.bandwidth_configuration(mounting)
    group = replace(group, transactions=configuration.transactions)
    readings = ctx.tree.read(group.ref, mounting)
    lacking = caveats.unassigned(readings)
    may_get = lacking and configuration.mode is Mode.ASSIGNED and not group.observed
    if may_get and counters.is_first(ctx, workload) and counters.assign(ctx, group.ref, lacking) != lacking:
        readings = ctx.tree.read(group.ref)
        lacking = caveats.unassigned(readings)
    group = replace(group, unassigned=() if group.observed else lacking).doubted(*caveats.of_unassigned(lacking))
    group = counters.with_caveats(ctx, group, readings)
    inodes = {reading.domain: reading.inode for reading in readings}
    group = replace(group, state=GroupState.CREATED, reason="", in_limbo=False, has_begin=has_begin, inodes=inodes)
    if group.observed:
        group = group.doubted(doubt(Reason.OBSERVED))
    if not_included := ctx.memory.excluded.get(workload.key):
        group = group.doubted(not_included)
    live = ctx.tree.full_path(group.ref)
    ctx.snapshots.begin(workload.subfolder(group), group.created_at, live, readings, workload.shows)
    if not is_pod_uid(workload.key):
        ctx.memory.excluded.pop(workload.key, None)  # another pod can have the same key
    return group


def _cleared(ctx: Context, key: str, group: Group) -> Group:
    """Move tasks out of a new group, each to the default group of its class. Return the group, doubted if that fails.

    An rmdir overlooks a task that is forked meanwhile (rdt_move_group_tasks()): it keeps the RMID, and is in the
    next group that gets this RMID. Its class stays the same.
    """
    moved, left = tasks.empty(ctx.tree, group.ref)
    if left:
        by = f"{left} were in it at its baseline, and some may have stayed"
        return group.doubted(doubt(Reason.MOVED_IN, by=by))
    if moved:
        time.sleep(counters.REPORTING_LAG_S)  # what they used until now is not of the group
        log.info("%s: tasks that do not belong to it were in the new group, and were moved out: %d", key, moved)
    return group
