# SPDX-License-Identifier: Apache-2.0
"""End groups: write the end values, remove the directory. A crash between any two steps can be recovered."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from resctrlmond.resctrl.counters import event
from resctrlmond.resctrl.errors import (
    NoSuchGroup,
    NotMounted,
    NotRead,
    ResctrlError,
)
from resctrlmond.workloads.evidence.foreign_writes import has_tasks_of_others
from resctrlmond.workloads.figures.checkpoint import Checkpoint, readings_of
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.figures.verdict import baseline_of, unknown
from resctrlmond.workloads.groups import counters, location, nested, units
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.machine.pools import REMOVED_BY_OTHERS
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.owners import RECOVERED
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Group, GroupState, State, Workload, replace
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.records.totals import End


def finish(
    ctx: Context,
    txn: Transaction,
    reason: str,
    *,
    change: Callable[[Workload], Workload] = lambda workload: workload,
    without_claims: Iterable[str] = (),
    take_out: Callable[[Workload], None] = lambda _workload: None,
    has_ended: bool = True,
) -> Workload:
    """End the run: write the end values of each group, remove its directory, and so free its RMID.

    ``change`` returns the workload with what the first write records too. ``without_claims`` are the owners of the
    last claims, which are removed with the first write. ``take_out`` moves the tasks out of the groups, before the
    end values are read. ``has_ended``: a unit has ended, not only the watch of it. Can be called again for a workload
    that is ending: finished steps are not repeated.
    """
    first = txn.workload.first
    if first.state is not GroupState.ENDING and _was_never_created(ctx, txn.key, first):
        txn.save(change(txn.workload))
    elif first.state is not GroupState.ENDING:
        workload = _summed(ctx, change(txn.workload))
        ending = replace(workload.first, state=GroupState.ENDING, reason=reason)
        # Until its tasks have returned.
        may_leave = nested.has_tasks_to_return(ctx, workload)
        left_tasks = may_leave or workload.left_tasks
        saved = replace(workload.with_group(ending), left_tasks=left_tasks, gave_tasks=may_leave)
        txn.save(functools.reduce(Workload.without_claim, without_claims, saved))
        # After the write: if that fails, the run goes on, and its tasks must not be outside.
        take_out(txn.workload)
        # Tasks that run on are counted in the workload around this one, from before the end values are read.
        left_tasks = nested.give_back(ctx, txn.workload)
        # Only now, because a run whose end could not be recorded goes on.
        ended = units.with_running_on(txn.workload) if has_ended else txn.workload
        txn.save(replace(ended, left_tasks=left_tasks or workload.left_tasks))
    # The first group is the last to end, because its completed_at means that all end values are written.
    _end_others(ctx, txn, reason)
    _end_group(ctx, txn, txn.workload.first, reason)
    return txn.workload


def _end_others(ctx: Context, txn: Transaction, reason: str) -> None:
    for folder in [group.folder for group in txn.workload.groups[1:]]:
        # The end of another group may have saved a doubt about this one.
        group = txn.workload.group(folder)
        if group is not None and not group.state.is_over:
            _end_group(ctx, txn, group, reason)


def _was_never_created(ctx: Context, key: str, group: Group) -> bool:
    return group.state is GroupState.PENDING and location.find_or_none(ctx, key, group) is None


def _end_group(ctx: Context, txn: Transaction, group: Group, reason: str) -> None:
    if _was_never_created(ctx, txn.key, group):
        _remove_incomplete(ctx, group)
        _close(ctx, txn, group, GroupState.COMPLETED, f"{reason}; it never had an RMID")
        return
    if group.state is not GroupState.ENDING:
        group = txn.save_group(replace(group, state=GroupState.ENDING, reason=reason))
    subfolder = txn.workload.subfolder(group)
    if ctx.snapshots.is_complete(subfolder):
        # The removal failed, or the daemon was killed: tasks may have used something since the end values.
        _close_in_pool(ctx, txn, group)
        may_have_left = nested.may_have_had_tasks(ctx, txn.workload, group)
    else:
        try:
            group = location.follow_group(ctx, txn, group)
            if ctx.snapshots.is_bare(subfolder):
                # Another program removed its files. It ends nevertheless, and no total is computed from the rest.
                group = txn.save_group(replace(group, has_begin=False))
                ctx.snapshots.make_anew(subfolder)
            # An event that only other domains have, which came online later, is never exact.
            if any(event(reading.event).lags for reading in ctx.snapshots.begin_values(subfolder)):
                time.sleep(counters.REPORTING_LAG_S)
            group = _write_end(ctx, txn, group, GroupState.COMPLETED, group.reason)
        except (NoSuchGroup, NotMounted) as error:
            _lose_group(ctx, txn, group, str(error))
            return
        may_have_left = nested.has_new_tasks(ctx, txn.workload, group)
    if may_have_left:
        # Forked while the others were moved. What they have used since the end values were read is not counted.
        txn.save(replace(txn.workload, left_tasks=True))
        nested.give_back(ctx, txn.workload)
    remove_directory(ctx, txn.key, group)
    _close(ctx, txn, group, GroupState.COMPLETED, group.reason)


def _close_in_pool(ctx: Context, txn: Transaction, group: Group) -> bool:
    """Count the use of a group until now in the pool of workloads. Its removal follows, and must not fail for that.

    Return whether there is such a group.
    """
    try:
        found = location.find(ctx, txn.key, group)
        # Another program may have renamed it, or moved tasks into it since its end values.
        now = replace(group, class_=found.ref.class_, name=found.ref.name)
        ctx.machine.ending(txn.workload, now, Quality.UNKNOWN)
        ctx.machine.count_last(txn.workload.subfolder(group), group, ctx.tree.read(found.ref))
    except (NoSuchGroup, NotMounted):
        return False
    except ResctrlError as error:
        ctx.machine.lost(f"the values of an ended workload cannot be read: {error}")
    return True


def _write_end(ctx: Context, txn: Transaction, group: Group, state: GroupState, reason: str) -> Group:
    """Read the last values, and write them as those of a group that ends with ``state``."""
    subfolder = txn.workload.subfolder(group)
    ctx.snapshots.keep_no_more(subfolder)
    ctx.machine.ending(txn.workload, group, baseline_of(txn.workload))
    before = group
    readings, now = ctx.tree.read(group.ref), utc_now()
    ctx.machine.count_last(subfolder, group, readings)
    group = counters.save_caveats(txn, counters.with_caveats(ctx, group, readings))
    try:
        weighed = ctx.proofs.weighed(txn.workload, is_last=True)
    except NotRead as error:  # no later look is about this run alone
        weighed = unknown(txn.workload, str(error))
    txn.save(weighed)
    group = txn.workload.group(group.folder) or group
    quality = baseline_of(txn.workload)
    if quality not in (Quality.EXACT, Quality.LATE):
        # Only now, the tasks of others are known. One that came since the reading may have ended.
        new = [one for one in group.doubts if one not in before.doubts]
        has_others = bool(group.strangers_ns) or group.moved_in > before.moved_in or has_tasks_of_others(new)
        ctx.machine.ending(txn.workload, group, quality, has_new_tasks=has_others)
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
            existing = location.follow_group(ctx, txn, group)
        except (NoSuchGroup, NotMounted):
            existing = None
        if existing is not None:
            group = _write_end(ctx, txn, existing, GroupState.LOST, reason)
        else:
            now, last = utc_now(), readings_of(ctx.snapshots.last_read(subfolder))
            # With another mount, the pools begin again.
            if not location.went_with_mount(ctx, txn.key, group):
                ctx.machine.count_last(subfolder, group, last, are_last=False)
                if not group.observed:
                    ctx.machine.lost(REMOVED_BY_OTHERS)
            # The clock may stand still, so the times of the readings do not show it.
            group = group.doubted(doubt(Reason.LOST, loss=reason, time=_newest(ctx.snapshots.last_read(subfolder))))
            over = replace(group, state=GroupState.LOST, reason=reason)
            ctx.snapshots.end(subfolder, now, last, _sealing(ctx, txn, over, (now, last)), txn.workload.shows)
    elif not ctx.snapshots.exists(subfolder) and not group.observed:
        ctx.machine.lost(REMOVED_BY_OTHERS)
    remove_directory(ctx, txn.key, group)
    _close(ctx, txn, group, GroupState.LOST, reason)


def _newest(last_read: Checkpoint) -> str:
    """Return the time of the last reading; "never" if there was none since the baseline."""
    return max((last.time for last in last_read.values()), default="") or "never"


def fail(ctx: Context, txn: Transaction, group: Group, reason: str) -> None:
    """Record that the group cannot be created, now or later. Raises if its directory cannot be removed."""
    _remove_incomplete(ctx, group)
    _close(ctx, txn, group, GroupState.FAILED, reason)


def _close(ctx: Context, txn: Transaction, group: Group, state: GroupState, reason: str) -> None:
    group = replace(group, state=state, reason=reason, completed_at=utc_now(), completed_ns=boot_ns())
    workload = txn.workload.with_group(group)
    if not group.folder:
        workload = _with_ended_claims(ctx, workload)
        workload = workload if workload.is_interrupted else _summed(ctx, workload)
        nested.report_end(ctx, workload)
    txn.save(workload)
    run = ctx.runs.of(txn.key)
    run.groups.pop(group.nonce, None)
    run.kept_numbers = None


def _summed(ctx: Context, workload: Workload) -> Workload:
    """Return the workload, which ends, with what its nested workloads used until now."""
    return nested.summed(ctx, workload, functools.partial(counters.own_now, ctx))


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


def remove_directory(ctx: Context, key: str, group: Group) -> None:
    if group.observed:
        return
    found, is_own = location.find_or_none(ctx, key, group), False
    if found:
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
    is_own = found.nonce == group.nonce or (found.gid == ctx.mark.gid and not location.is_recorded(ctx, found))
    if is_own and not ctx.tree.tasks(group.ref):
        ctx.tree.remove(group.ref)


def discard_group(ctx: Context, txn: Transaction, group: Group) -> None:
    """Undo the creation of a group for a call that failed."""
    _discard_files(ctx, txn, group)
    ctx.runs.of(txn.key).groups.pop(group.nonce, None)
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
        txn.restore(ended)
    ctx.runs.forget(txn.key)  # the next run has the same generation


def _discard_files(ctx: Context, txn: Transaction, group: Group) -> None:
    if group.state.has_directory:
        if not _close_in_pool(ctx, txn, group) and not group.observed:
            ctx.machine.lost(REMOVED_BY_OTHERS)
        remove_directory(ctx, txn.key, group)
    elif group.state is GroupState.PENDING:
        _remove_incomplete(ctx, group)
    ctx.snapshots.delete(txn.workload.subfolder(group))
