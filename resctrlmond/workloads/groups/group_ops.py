# SPDX-License-Identifier: Apache-2.0
"""Create, move, read and remove monitoring groups. A crash between any two steps can be recovered."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from resctrlmond.resctrl.bandwidth import Mode, domain_number
from resctrlmond.resctrl.counters import Reading, event
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    GroupExists,
    KernelRefused,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    PermissionDenied,
    ResctrlError,
    RmidsExhausted,
    no_rmid_remedy,
    printable,
)
from resctrlmond.resctrl.tree import Found, GroupRef
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.figures import caveats
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.checkpoint import readings_of
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.groups import nested, units
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.plan import lacking_counters, served_before
from resctrlmond.workloads.groups.target import only_observed
from resctrlmond.workloads.machine.pools import REMOVED_BY_OTHERS
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.errors import ForeignGroup, InvalidClass, NotWritten
from resctrlmond.workloads.model.owners import RECOVERED
from resctrlmond.workloads.model.states import Quality, worst
from resctrlmond.workloads.model.validation import valid_class
from resctrlmond.workloads.model.workload import ROOT_FOLDER, Group, GroupState, State, Workload, replace
from resctrlmond.workloads.records.snapshot import KeptReadings
from resctrlmond.workloads.records.store import Limit, Transaction
from resctrlmond.workloads.records.totals import End, Live, LiveReadings, used

# Cores report their energy counts every 2 ms at the latest, also after the death of a task (cover letter of the AET
# patches): the last reading comes after that.
REPORTING_LAG_S = 0.004

# A task that forks while it is moved out of a new group leaves its child there.
_MAX_CLEARINGS = 10

log = logging.getLogger(__name__)

# Domains and bandwidth events, as in Group.unassigned.
Lacking = tuple[tuple[str, str], ...]


# -- create


def create(
    ctx: Context,
    txn: Transaction,
    workload: Workload,
    group: Group,
    quality: Quality = Quality.EXACT,
    *,
    why_late: Sequence[str] = (),
    may_wait: bool = True,
    limit: Limit | None = None,
) -> Group:
    """Save the workload with the group, create the group's directory, and write its baseline. Return the group.

    Its state is CREATED. ``why_late`` are the reasons for which the baseline is late, if it is. The record is on
    disk before the directory exists, and the baseline before a task can join. If no RMID is free, the group stays
    pending, with the reason; RmidsExhausted only if not ``may_wait``. Raises ForeignGroup, NoSuchClass,
    KernelRefused, NotMounted, NotWritten and LimitExceeded, and leaves no directory in these cases.
    """
    group = begun(ctx, group)
    txn.save(workload.with_group(group), limit)
    begin_quality = quality
    try:
        if workload.priority < 0:
            _check_reserve(ctx, workload, group)
        # Earlier writes cannot have moved a task of the new group: their events are read at the end of the block.
        with ctx.interference.changing(), ctx.interference.creating(group.ref):
            found = ctx.tree.create(group.ref, group.nonce)
            ctx.interference.watch(group.ref)
    except RmidsExhausted as error:
        if not may_wait:
            raise
        return txn.save_group(waiting(ctx, group, error))
    except GroupExists as error:
        found, begin_quality = _take_existing(ctx, group, quality, error)
    if found.gid != ctx.mark.gid:
        with undoing(txn.key):
            ctx.tree.remove(group.ref)
        raise KernelRefused(
            f"the new group has group id {found.gid} instead of the mark of resctrlmond, {ctx.mark.gid}",
            path=found.path,
            remedy="Run resctrlmond with the group resctrlmon (Group= in its unit)",
        )
    try:
        return write_baseline(ctx, txn, group, begin_quality, why_late)
    except ResctrlError:
        if begin_quality is quality:  # otherwise it has tasks, and was only adopted
            with undoing(txn.key):
                _remove_directory(ctx, group)
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
            discard_group(ctx, txn, group)
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


def _take_existing(ctx: Context, group: Group, quality: Quality, error: GroupExists) -> tuple[Found, Quality]:
    """Give the group a directory of its name that exists already, if that is ours and no record is about it."""
    existing = ctx.tree.find(group.ref)
    if existing is None:
        raise error
    if existing.gid != ctx.mark.gid:
        raise ForeignGroup(
            "a monitoring group with this name exists already: another program created it",
            path=existing.path,
            remedy="Choose another key, or remove the group if it is not needed",
        ) from error
    if _is_recorded(ctx, existing):
        raise error  # of another key: from before group_prefix was changed, or renamed to this name
    # It has our mark and no record: a crash came between two steps, or the record was lost.
    begin_quality = worst(quality, Quality.UNKNOWN) if ctx.tree.tasks(group.ref) else quality
    return ctx.tree.set_nonce(group.ref, group.nonce), begin_quality


def _is_recorded(ctx: Context, found: Found) -> bool:
    others = [other for workload in ctx.store.unfinished() for other in workload.existing_groups]
    return any(other.ref == found.ref or other.nonce == found.nonce for other in others)


def write_baseline(
    ctx: Context, txn: Transaction, group: Group, quality: Quality, why_late: Sequence[str] = ()
) -> Group:
    """Read the begin values, and write and save them. Return the group, in state CREATED."""
    return txn.save_group(with_baseline(ctx, txn.workload, group, quality, why_late))


def with_baseline(
    ctx: Context, workload: Workload, group: Group, quality: Quality = Quality.EXACT, why_late: Sequence[str] = ()
) -> Group:
    """Read the begin values, and write them. Return the group, in state CREATED, not saved yet.

    A group that is created again in another class keeps the quality of its first baseline and the reasons. The
    baseline of an observed group is estimated at best.
    """
    mounting = ctx.memory.mounted_on[group.nonce] = ctx.tree.mounting()
    if group.inodes:
        quality = worst(quality, group.baseline)
    else:
        group = replace(group, baseline_reasons=())  # of another directory, which has been removed
    if quality is not Quality.UNKNOWN and not group.observed:
        group, quality = _cleared(ctx, workload.key, group, quality)
    group = replace(group, created_at=utc_now(), created_ns=boot_ns())
    # Before the readings, and at the end after them, so that a change in between is found.
    configuration = ctx.tree.bandwidth_configuration(mounting)
    group = replace(group, transactions=configuration.transactions)
    readings = ctx.tree.read(group.ref, mounting)
    lacking = caveats.unassigned(readings)
    may_get = lacking and configuration.mode is Mode.ASSIGNED and not group.observed
    if may_get and _is_first_for_counters(ctx, workload) and _assign(ctx, group.ref, lacking) != lacking:
        readings = ctx.tree.read(group.ref)
        lacking = caveats.unassigned(readings)
    group = replace(group, caveats=caveats.of_unassigned(lacking), unassigned=() if group.observed else lacking)
    group = _with_caveats(ctx, group, readings)
    inodes = {reading.domain: reading.inode for reading in readings}
    group = replace(group, state=GroupState.CREATED, reason="", in_limbo=False, baseline=quality, inodes=inodes)
    if group.observed:
        group = group.downgraded(Quality.ESTIMATED, Reason.OBSERVED.text())
    if apart := ctx.memory.apart.get(workload.key):
        why_late = (*why_late, apart)
    for why in why_late:
        group = group.downgraded(Quality.LATE, why)
    live = ctx.tree.full_path(group.ref)
    ctx.snapshots.begin(workload.subfolder(group), group.created_at, live, readings, workload.shows)
    return group


def _cleared(ctx: Context, key: str, group: Group, quality: Quality) -> tuple[Group, Quality]:
    """Move tasks out of a new group, each to the default group of its class. Return the quality of the baseline.

    An rmdir overlooks a task that is forked meanwhile (rdt_move_group_tasks()): it keeps the RMID, and is in the
    next group that gets this RMID. Its class stays the same.
    """
    strangers, moved = [], 0
    for _ in range(_MAX_CLEARINGS):
        strangers = ctx.tree.tasks(group.ref)
        if not strangers:
            if moved:
                time.sleep(REPORTING_LAG_S)  # what it used until now is not of the group
                log.info(
                    "%s: tasks that do not belong to it were in the new group, and were moved out: %d", key, moved
                )
            return group, quality
        for tid in strangers:
            with contextlib.suppress(NoSuchProcess, NoSuchClass, PermissionDenied, KernelRefused):
                # Not one that another call has moved to its own group since it was listed.
                ctx.tree.take_out(group.ref, tid)
                moved += 1
    why = Reason.STRANGERS.text(count=len(strangers))
    return group.downgraded(quality, why), worst(quality, Quality.ESTIMATED)


# -- find and move


def find(ctx: Context, group: Group) -> Found:
    """Find the group's directory by mark and nonce, also if another program renamed it. Raises NoSuchGroup."""
    # Before the group: if a mount comes in between, the group is not found on it.
    mounting = ctx.tree.mounting()
    found = ctx.tree.find(group.ref)
    if found is None or not _is_of(ctx, group, found):
        ctx.tree.check_mounted()
        # A group that was removed with its mount is nowhere, and an observed one is known by its path. The whole tree
        # is searched only if another group is missing.
        scanned = [] if group.observed or went_with_mount(ctx, group) else ctx.tree.scan()
        renamed = next((other for other in scanned if _is_of(ctx, group, other)), None)
        if renamed is None:
            raise NoSuchGroup(_why_gone(ctx, group, found), path=ctx.tree.full_path(group.ref))
        found = renamed
    ctx.memory.mounted_on[group.nonce] = mounting
    return found


def _is_of(ctx: Context, group: Group, found: Found) -> bool:
    if group.observed:
        # Inodes repeat after a mount: the runtime may have created a group there for another start of the container.
        is_there = (found.ref, found.inode) == (group.ref, group.nonce) and not went_with_mount(ctx, group)
        return is_there and found.gid != ctx.mark.gid
    return found.gid == ctx.mark.gid and found.nonce == group.nonce


def _find_or_none(ctx: Context, group: Group) -> Found | None:
    try:
        return find(ctx, group)
    except (NoSuchGroup, NotMounted):
        return None


def went_with_mount(ctx: Context, group: Group) -> bool:
    """Whether the mount on which the group was found last is gone, so that no program removed the group itself."""
    return ctx.memory.mounted_on.get(group.nonce, ctx.tree.mounting()) != ctx.tree.mounting()


def _why_gone(ctx: Context, group: Group, instead: Found | None) -> str:
    if went_with_mount(ctx, group):
        return "resctrl was unmounted and mounted again, which removed every group"
    if instead is not None:
        return "another group is in its place"
    if group.observed:
        return "the program that owns the group removed it before the last reading"
    return "the group was removed by another program"


def follow(ctx: Context, txn: Transaction) -> Workload:
    """Find all groups of the workload, and record those that another program renamed. Raises NoSuchGroup.

    One group that is gone is enough: the totals would lack what it counted. NotWritten is raised after all groups
    were found, and their paths are kept in memory: a start finds a group by its nonce.
    """
    unsaved = None
    for group in txn.workload.existing_groups:
        try:
            follow_group(ctx, txn, group)
        except NotWritten as error:
            unsaved = error
    _check_whole(txn.workload)
    if unsaved is not None:
        raise unsaved
    return txn.workload


def follow_group(ctx: Context, txn: Transaction, group: Group) -> Group:
    """Find the group, and record its new path if another program renamed it. Raises NoSuchGroup, NotWritten."""
    found = find(ctx, group)
    if found.ref == group.ref:
        return group
    if not _is_recordable(found.ref):
        # A record with this name could not be read back.
        ctx.tree.rename(found.ref, group.ref)
        log.warning("%s: another program renamed its group to %s; renamed back", txn.key, printable(found.ref.path))
        return group
    path = printable(found.ref.path)
    log.info("%s: another program renamed its group to %s, and the workload continues in it", txn.key, path)
    return _relocated(ctx, txn, txn.workload, group, found.ref, is_done=True)


def relocate(ctx: Context, txn: Transaction, class_: str) -> Workload:
    """Move the workload's only group to another class.

    If this kernel does not rename groups, a group that never had a member is created again in that class.
    Raises NoSuchClass, ClassMismatch, GroupExists, ForeignGroup, and InvalidClass for a class whose name cannot be
    recorded.
    """
    class_, before = valid_class(class_), txn.workload
    if before.is_observed:
        raise only_observed(before)
    if len(before.groups) > 1:
        raise ClassMismatch(
            f"the tasks of {txn.key} are in several classes, with a group in each",
            path=ctx.tree.full_path(before.first.ref),
            remedy="Only a workload with a single group can be moved",
        )
    if not before.state.has_group:
        # No directory takes the tasks along: they change class as they join.
        workload = before.with_group(replace(before.first, class_=class_))
        for member in workload.living:
            if member.has_tasks:
                workload = workload.with_member(replace(member, allow_class_change=True))
        return txn.save(replace(workload, follows_class=False))
    group = follow_group(ctx, txn, before.first)
    before = txn.workload
    in_fixed_class = replace(before, follows_class=False)
    target = GroupRef(class_, group.name)
    try:
        ctx.tree.rename(group.ref, target)
    except KernelRefused as error:
        # A group without tasks may have counted something: its counters would be lost.
        if before.members or ctx.tree.tasks(group.ref):
            raise ClassMismatch(
                f"the group is in class {group.class_ or '/'}, and this kernel cannot move groups",
                path=error.path,
                errno=error.errno,
                status=error.status,
            ) from error
        moving = replace(group, class_=class_, state=GroupState.PENDING)
        txn.save(replace(in_fixed_class.with_group(moving), is_active=False))
        ctx.machine.replacing(group)
        try:
            ctx.tree.remove(group.ref)
        except ResctrlError:
            # The directory is still there, and no record would be about it.
            with undoing(txn.key):
                txn.save(before)
            raise
        create(ctx, txn, txn.workload, moving)
        return txn.workload
    try:
        _relocated(ctx, txn, in_fixed_class, group, target)
    except NotWritten:
        saved = txn.workload.group(group.folder)
        if saved is None or saved.ref != target:
            # A group that is not at the path in its record would count as lost.
            with undoing(txn.key):
                ctx.tree.rename(target, group.ref)
                relink(ctx, before, group)
        raise
    return txn.workload


def _relocated(
    ctx: Context, txn: Transaction, workload: Workload, group: Group, ref: GroupRef, *, is_done: bool = False
) -> Group:
    """Save the workload with its group at another path.

    ``is_done``: another program renamed the group, so the path is kept in memory if it cannot be written.
    """
    group = replace(group, class_=ref.class_, name=ref.name)
    try:
        relink(ctx, workload, group)
    finally:
        # Also if the links cannot be changed: a group that is not at the path in its record would count as lost.
        group = txn.save(workload.with_group(group), is_undo=is_done).group(group.folder) or group
    return group


def relink(ctx: Context, workload: Workload, group: Group) -> None:
    """Point the links of the group's snapshot at its directory. Raises NotWritten, NotRead."""
    subfolder = workload.subfolder(group)
    ctx.memory.stale_links.add(subfolder)
    ctx.snapshots.relink(subfolder, ctx.tree.full_path(group.ref), workload.shows)
    ctx.memory.stale_links.discard(subfolder)


def relink_stale(ctx: Context, workload: Workload) -> None:
    """Repeat each ``relink`` of the workload's groups that failed. Raises NotWritten, NotRead."""
    for group in workload.existing_groups:
        if workload.subfolder(group) in ctx.memory.stale_links:
            relink(ctx, workload, group)


def _is_recordable(ref: GroupRef) -> bool:
    try:
        return bool(valid_class(ref.name)) and valid_class(ref.class_) == ref.class_
    except InvalidClass:
        return False


# -- end


def finish(
    ctx: Context,
    txn: Transaction,
    reason: str,
    *,
    change: Callable[[Workload], Workload] = lambda workload: workload,
    without_claims: Iterable[str] = (),
    take_out: Callable[[Workload], None] = lambda _workload: None,
) -> Workload:
    """End the run: write the end values of each group, remove its directory, and so free its RMID.

    ``change`` returns the workload with what the first write records too. ``without_claims`` are the owners of the
    last claims, which are removed with the first write. ``take_out`` moves the tasks out of the groups, before the
    end values are read. Can be called again for a workload that is ending: finished steps are not repeated.
    """
    first = txn.workload.first
    if first.state is not GroupState.ENDING and _was_never_created(ctx, first):
        txn.save(change(txn.workload))
    elif first.state is not GroupState.ENDING:
        ctx.interference.before_end(txn)
        workload = closed(ctx, change(txn.workload))
        ending = replace(workload.first, state=GroupState.ENDING, reason=reason)
        # Until its tasks have returned.
        may_leave = nested.has_tasks_to_return(ctx, workload)
        saved = replace(workload.with_group(ending), left_tasks=may_leave or workload.left_tasks)
        txn.save(functools.reduce(Workload.without_claim, without_claims, saved))
        # After the write: if that fails, the run goes on, and its tasks must not be outside.
        take_out(txn.workload)
        # Tasks that run on are counted in the workload around this one, from before the end values are read.
        left_tasks = nested.give_back(ctx, txn.workload)
        txn.save(replace(txn.workload, left_tasks=left_tasks or workload.left_tasks))
    # The first group is the last to end, because its completed_at means that all end values are written.
    _end_others(ctx, txn, reason)
    _end_group(ctx, txn, txn.workload.first, reason)
    return txn.workload


def _end_others(ctx: Context, txn: Transaction, reason: str) -> None:
    for folder in [group.folder for group in txn.workload.groups[1:]]:
        # The end of another group may have saved a downgrade of this one.
        group = txn.workload.group(folder)
        if group is not None and not group.state.is_over:
            _end_group(ctx, txn, group, reason)


def _was_never_created(ctx: Context, group: Group) -> bool:
    return group.state is GroupState.PENDING and _find_or_none(ctx, group) is None


def _end_group(ctx: Context, txn: Transaction, group: Group, reason: str) -> None:
    if _was_never_created(ctx, group):
        _remove_incomplete(ctx, group)
        _close(ctx, txn, group, GroupState.COMPLETED, f"{reason}; it never had an RMID")
        return
    if group.state is not GroupState.ENDING:
        group = txn.save_group(replace(group, state=GroupState.ENDING, reason=reason))
    subfolder = txn.workload.subfolder(group)
    is_again = ctx.snapshots.is_complete(subfolder)
    if not is_again:
        try:
            group = follow_group(ctx, txn, group)
            if ctx.snapshots.is_bare(subfolder):
                # Another program removed its files. It ends nevertheless, and no total is computed from the rest.
                group = txn.save_group(replace(group, baseline=Quality.UNKNOWN))
                ctx.snapshots.make_anew(subfolder)
            # An event that only other domains have, which came online later, is never exact.
            if any(event(reading.event).lags for reading in ctx.snapshots.begin_values(subfolder)):
                time.sleep(REPORTING_LAG_S)
            group = _write_end(ctx, txn, group, GroupState.COMPLETED, group.reason)
        except (NoSuchGroup, NotMounted) as error:
            _lose_group(ctx, txn, group, str(error))
            return
    if is_again:
        # The removal failed, or the daemon was killed: tasks may have used something since the end values.
        _close_in_pool(ctx, txn, group)
    if nested.may_leave_tasks(ctx, txn.workload, group, is_again=is_again):
        # Forked while the others were moved. What they have used since the end values were read is not counted.
        txn.save(replace(txn.workload, left_tasks=True))
        nested.give_back(ctx, txn.workload)
    _remove_directory(ctx, group)
    _close(ctx, txn, group, GroupState.COMPLETED, group.reason)


def _close_in_pool(ctx: Context, txn: Transaction, group: Group) -> bool:
    """Count the use of a group until now in the pool of workloads. Its removal follows, and must not fail for that.

    Return whether there is such a group.
    """
    try:
        found = find(ctx, group)
        # Another program may have renamed it.
        ctx.machine.ending(txn.workload, replace(group, class_=found.ref.class_, name=found.ref.name))
        ctx.machine.closed(txn.workload.subfolder(group), group, ctx.tree.read(found.ref))
    except (NoSuchGroup, NotMounted):
        return False
    except ResctrlError as error:
        ctx.machine.lost(f"the values of an ended workload cannot be read: {error}")
    return True


def _write_end(ctx: Context, txn: Transaction, group: Group, state: GroupState, reason: str) -> Group:
    """Read the last values, and write them as those of a group that ends with ``state``."""
    subfolder = txn.workload.subfolder(group)
    ctx.snapshots.keep_no_more(subfolder)
    ctx.machine.ending(txn.workload, group)
    readings, now = ctx.tree.read(group.ref), utc_now()
    ctx.machine.closed(subfolder, group, readings)
    group = _save_caveats(txn, _with_caveats(ctx, group, readings))
    group, is_written = ctx.interference.after_last_reading(txn, group)
    if group.baseline not in (Quality.EXACT, Quality.LATE):
        # Only now, the writes of other programs are known. A task that came since the reading may have ended.
        ctx.machine.ending(txn.workload, group, has_new_tasks=is_written)
    # In one file first, because the group may be removed before each value is in a file of its own. A domain that
    # went offline has its last value there too.
    last = readings_of(ctx.snapshots.checkpoint(subfolder, now, readings, group.inodes))
    over = replace(group, state=state, reason=reason)
    ctx.snapshots.end(subfolder, now, last, _sealing(ctx, txn, over, (now, last)), txn.workload.shows)
    return group


def _sealing(ctx: Context, txn: Transaction, over: Group, end: End) -> AbstractContextManager[None] | None:
    """Write the final qualities of the workload with its first group."""
    return None if over.folder else ctx.quality.sealing(txn.workload.with_group(over), end)


def lose(ctx: Context, txn: Transaction, reason: str) -> Workload:
    """Record that another program removed a group: the values that were read last become its end values.

    The run ends with it, and so do the other groups of the workload.
    """
    _end_others(ctx, txn, reason)
    _lose_group(ctx, txn, txn.workload.first, reason)
    return txn.workload


def _lose_group(ctx: Context, txn: Transaction, group: Group, reason: str) -> None:
    subfolder = txn.workload.subfolder(group)
    if ctx.snapshots.exists(subfolder) and not ctx.snapshots.is_complete(subfolder):
        try:
            existing = follow_group(ctx, txn, group)
        except (NoSuchGroup, NotMounted):
            existing = None
        if existing is not None:
            group = _write_end(ctx, txn, existing, GroupState.LOST, reason)
        else:
            now, last = utc_now(), readings_of(ctx.snapshots.last_read(subfolder))
            # With another mount, the pools begin again.
            if not went_with_mount(ctx, group):
                ctx.machine.closed(subfolder, group, last, are_last=False)
                if not group.observed:
                    ctx.machine.lost(REMOVED_BY_OTHERS)
            over = replace(group, state=GroupState.LOST, reason=reason)
            ctx.snapshots.end(subfolder, now, last, _sealing(ctx, txn, over, (now, last)), txn.workload.shows)
    elif not ctx.snapshots.exists(subfolder) and not group.observed:
        ctx.machine.lost(REMOVED_BY_OTHERS)
    _remove_directory(ctx, group)
    _close(ctx, txn, group, GroupState.LOST, reason)


def fail(ctx: Context, txn: Transaction, group: Group, reason: str) -> None:
    """Record that the group cannot be created, now or later. Raises if its directory cannot be removed."""
    _remove_incomplete(ctx, group)
    _close(ctx, txn, group, GroupState.FAILED, reason)


def _close(ctx: Context, txn: Transaction, group: Group, state: GroupState, reason: str) -> None:
    group = replace(group, state=state, reason=reason, completed_at=utc_now(), completed_ns=boot_ns())
    workload = txn.workload.with_group(group)
    if not group.folder:
        workload = _with_ended_claims(ctx, workload)
        workload = workload if workload.is_interrupted else closed(ctx, workload)
        nested.report_end(ctx, workload)
    txn.save(workload)
    forgotten = [group] if group.folder else workload.groups
    for over in forgotten:
        ctx.memory.mounted_on.pop(over.nonce, None)
        ctx.memory.stale_links.discard(workload.subfolder(over))
    ctx.memory.checkpoints.pop(txn.key, None)
    ctx.memory.stamps.pop(txn.key, None)
    ctx.memory.returns.pop(txn.key, None)


def closed(ctx: Context, workload: Workload) -> Workload:
    """Return the workload, which ends, with what its nested workloads used until now."""
    return nested.closed(ctx, workload, functools.partial(own_now, ctx))


def _with_ended_claims(ctx: Context, workload: Workload) -> Workload:
    """Return the workload, which is over, without claims and living members, unless another run follows."""
    # A lost run is followed by another one, unless it ended with its boot, or the claim of RECOVERED is its only one,
    # or the group was of another program.
    if workload.state is State.LOST and workload.first.boot_id == ctx.mark.boot_id and not workload.is_observed:
        workload = workload.without_claim(RECOVERED)
        if workload.claims:
            return workload
    return _with_ended_members(replace(workload, claims=()))


def _with_ended_members(workload: Workload) -> Workload:
    ended_at = workload.first.completed_at
    members = [replace(member, ended_at=ended_at) if member.is_living else member for member in workload.members]
    return replace(workload, members=tuple(members))


def without_claim(workload: Workload, owner: str) -> Workload:
    """Return the workload without that claim. With the last claim of a lost run its members end."""
    workload = workload.without_claim(owner)
    return _with_ended_members(workload) if workload.state is State.LOST and not workload.claims else workload


def _remove_directory(ctx: Context, group: Group) -> None:
    if group.observed:
        return
    found, is_own = _find_or_none(ctx, group), False
    if found:
        with ctx.interference.changing():
            is_own = ctx.tree.remove(found.ref)
    ctx.machine.removed(group, is_own=is_own)


def _remove_incomplete(ctx: Context, group: Group) -> None:
    """Remove the directory of a group whose creation failed, if it was created.

    If that fails, the group must stay in its record, which is served again with the RMID queue: without a record, the
    directory holds its RMID until the next start.
    """
    found = ctx.tree.find(group.ref)
    if found is None or group.observed:
        return
    # A directory without the nonce was created for this group too, but could not be given the nonce.
    is_own = found.nonce == group.nonce or (found.gid == ctx.mark.gid and not _is_recorded(ctx, found))
    if is_own and not ctx.tree.tasks(group.ref):
        ctx.tree.remove(group.ref)


def discard_group(ctx: Context, txn: Transaction, group: Group) -> None:
    """Undo the creation of a group for a call that failed."""
    _discard_files(ctx, txn, group)
    txn.save(txn.workload.without_group(group.folder))


def discard_run(ctx: Context, txn: Transaction, ended: Workload | None) -> None:
    """Undo the start of a run for a call that failed. The run that ``ended`` before it is the current one again."""
    workload = txn.find()
    if workload is not None and (ended is None or workload.generation != ended.generation):
        for group in workload.groups[1:]:
            discard_group(ctx, txn, group)
        _discard_files(ctx, txn, workload.first)
    if ended is None:
        txn.drop()
    else:
        ctx.snapshots.bring_back(ended.key, ended.generation)
        txn.save(ended, is_undo=True)


def _discard_files(ctx: Context, txn: Transaction, group: Group) -> None:
    if group.state.has_directory:
        if not _close_in_pool(ctx, txn, group) and not group.observed:
            ctx.machine.lost(REMOVED_BY_OTHERS)
        _remove_directory(ctx, group)
    elif group.state is GroupState.PENDING:
        _remove_incomplete(ctx, group)
    ctx.memory.mounted_on.pop(group.nonce, None)
    ctx.snapshots.delete(txn.workload.subfolder(group))


# -- counters


def checkpoint(ctx: Context, txn: Transaction) -> None:
    """Keep the current values, for the case that another program removes a group. Raises NoSuchGroup, NotWritten.

    Nothing is written for a workload whose values are those of its last checkpoint.
    """
    found, kept = {}, []
    for group in txn.workload.existing_groups:
        readings, result = _read_and_keep(ctx, txn.workload, group)
        found[txn.workload.subfolder(group)] = readings
        kept.append(result.number)
        _save_caveats(txn, _with_caveats(ctx, group, readings))
    # A change of the workload has updated the file already (QualityFiles.before_save).
    if 0 in kept or ctx.memory.checkpoints.get(txn.key) != kept or not ctx.snapshots.quality(txn.key):
        ctx.memory.checkpoints.pop(txn.key, None)
        ctx.quality.update(txn.workload, found)
        ctx.memory.checkpoints[txn.key] = kept
        ctx.memory.stamps.pop(txn.key, None)


def read_before_removal(ctx: Context, workload: Workload, group: Group) -> None:
    """Keep the current values, if they can be read, because another program may remove the group at any moment."""
    if group.state.has_directory:
        with contextlib.suppress(ResctrlError):  # then the checkpoint before stays the last reading
            _read_and_keep(ctx, workload, group)


def assign_counters(ctx: Context, txn: Transaction, group: Group) -> Group:
    """Assign the free bandwidth counters that the group lacks. Raises NoSuchGroup, KernelRefused."""
    group = follow_group(ctx, txn, group)
    return txn.save_group(replace(group, unassigned=_assign(ctx, group.ref, group.unassigned)))


def _is_first_for_counters(ctx: Context, workload: Workload) -> bool:
    """Whether no other group of the same or a higher priority lacks bandwidth counters."""
    first = next(iter(lacking_counters(ctx.store.without_counters())), None)
    return first is None or first.workload.priority < workload.priority


def _assign(ctx: Context, ref: GroupRef, lacking: Lacking) -> Lacking:
    """Assign these counters to a group, if they are free. Return those that it still lacks."""
    return tuple(
        (domain, name) for domain, name in lacking if not ctx.tree.assign_counter(ref, name, domain_number(domain))
    )


def _with_caveats(ctx: Context, group: Group, readings: Sequence[Reading]) -> Group:
    """Return the group with the caveats of these readings. Raises NotRead."""
    inexact, configuration = ctx.tree.inexact(), ctx.tree.bandwidth_configuration()
    mode = configuration.mode if any(event(reading.event).restarts for reading in readings) else None
    found = caveats.of_readings(readings, mode, inexact) | group.caveats
    if group.transactions:
        found = caveats.with_change(found, group.transactions, configuration.transactions)
    return replace(group, caveats=found, is_reallocated=group.is_reallocated or mode is Mode.REALLOCATED)


def _save_caveats(txn: Transaction, group: Group) -> Group:
    """Save the group's caveats, because the mode may be another one at its end."""
    saved = txn.workload.group(group.folder)
    if saved is None or (saved.caveats, saved.is_reallocated) == (group.caveats, group.is_reallocated):
        return group
    return txn.save_group(group)


def readings(ctx: Context, workload: Workload) -> Live:
    """Return the current values of each group; {} if the workload has no group, or its end values are written."""
    if not workload.state.has_group or _has_ends(ctx, workload):
        return {}
    _check_whole(workload)
    return {workload.subfolder(group): _read(ctx, workload, group) for group in workload.existing_groups}


def _read(ctx: Context, workload: Workload, group: Group) -> LiveReadings:
    """Read the group's counters, and keep the values, if possible. Raises NoSuchGroup, NotRead."""
    begun_ns = time.monotonic_ns()
    found = ctx.tree.read(find(ctx, group).ref)
    with contextlib.suppress(NotWritten):  # then no other reader has written newer ones either
        return LiveReadings(found, _keep(ctx, workload, group, begun_ns, found).checkpoint)
    return LiveReadings(found)


def _read_and_keep(ctx: Context, workload: Workload, group: Group) -> tuple[list[Reading], KeptReadings]:
    """Read the group's counters, and keep the values for the case that another program removes the group.

    Raises NoSuchGroup, NotRead, NotWritten.
    """
    begun_ns = time.monotonic_ns()
    found = ctx.tree.read(find(ctx, group).ref)
    return found, _keep(ctx, workload, group, begun_ns, found)


def _keep(ctx: Context, workload: Workload, group: Group, begun_ns: int, found: Sequence[Reading]) -> KeptReadings:
    return ctx.snapshots.keep_read(group.created_at, begun_ns, workload.subfolder(group), found, group.inodes)


def totals(ctx: Context, workload: Workload, live: Live) -> list[Total]:
    """Return the totals since the baseline: up to the ``live`` readings, or up to the end values of an ended run."""
    if _has_ends(ctx, workload):
        return used(ctx.snapshots, workload, {})
    for group in workload.groups:
        if (subfolder := workload.subfolder(group)) in live:
            workload = workload.with_group(_with_caveats(ctx, group, live[subfolder].readings))
    found = used(ctx.snapshots, workload, live)
    if live:
        ctx.quality.witness(workload, live, found)
    return found


def own_now(ctx: Context, workload: Workload) -> list[Total]:
    """Return the totals of a workload until now, without its nested workloads. Raises NoSuchGroup, NotRead."""
    return totals(ctx, workload, readings(ctx, workload))


def _has_ends(ctx: Context, workload: Workload) -> bool:
    if workload.state.is_over:
        return True
    return workload.state is State.ENDING and ctx.snapshots.is_complete(workload.key)


def _check_whole(workload: Workload) -> None:
    if workload.has_ended_further_group:
        raise NoSuchGroup("the group was removed by another program in one of its classes")
