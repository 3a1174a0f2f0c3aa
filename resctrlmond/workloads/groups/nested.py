# SPDX-License-Identifier: Apache-2.0
"""Nested workloads: runs that a task of another workload starts, such as a *resctrlctl run* in a *resctrlctl run*.

A task is counted in the innermost workload. A workload with nested ones has its own figure, without them, and beside
it the sum of theirs. The list of the outer workload decides which workloads are nested in it: all inside it, also
those inside another nested one, and each only with its own figure. So no use is counted twice, and a workload that
outlives the one in which it began is still nested in those around that.

The end of a nested workload moves the tasks that run on into the group of the outer one, and writes what the nested
workload used to a file of the outer one, because it must not wait for a transaction of that. The outer one adds these
files to its record.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import msgspec

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.counters import event, parse_value
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    KernelRefused,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    PermissionDenied,
    ResctrlError,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.figures.accounting import Total, added, digits
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.figures.verdict import SLACK_NS, unknown
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality, worst
from resctrlmond.workloads.model.workload import Group, NestedTotal, Part, State, Workload, replace
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.records.totals import used

log = logging.getLogger(__name__)

# A task that forks while it is moved leaves its child behind; the next pass finds it.
_MAX_PASSES = 10
# A task that forks and ends, as does its child, and so on, can be seen to run by none of so many lists.
_MAX_LISTS = 100
# How long to wait for the end of a fork, before each of these passes.
_FORK_S = 0.004
# A nested workload that ends while it is read is read again.
_MAX_TRIES = 5
_RUNNING = (State.ACTIVE, State.IDLE)

OwnTotals = Callable[[Workload], list[Total]]
# Returns the workload of a key; None if there is none.
Find = Callable[[str], Workload | None]


class _End(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The file of a nested workload that has ended: its own totals.

    ``left_tasks``: tasks may have run on that were not moved into the group of the outer workload. ``gave_others``:
    tasks of others were in its group, and may have been moved there.
    """

    totals: dict[str, NestedTotal]
    left_tasks: bool = True
    gave_others: bool = True


# Created by the import: if two threads use a type for the first time at once, msgspec crashes, because one of them
# sees the incomplete description of the type that the other one creates.
_DECODER = msgspec.json.Decoder(_End)


# -- begin


def may_contain(workload: Workload) -> bool:
    """Whether a workload can begin inside this one, which is not a unit's: a unit gives up its tasks without this."""
    return workload.state in _RUNNING and not workload.is_observed


def enter(ctx: Context, txn: Transaction) -> None:
    """Add a workload whose group has just been created to the lists of those around it (``Workload.part_of``).

    The caller has the turn (``TakeOver.turn``). The lists are on disk before the first task is moved.
    """
    part = txn.workload.as_part
    # The outermost first: after a kill, a workload that lists it is in those around that.
    for key in reversed(txn.workload.part_of):
        with ctx.store.transaction(key) as outer:
            workload = outer.find()
            if workload is not None and may_contain(workload):
                workload = fold(ctx, outer)
                nested = replace(
                    workload.nested, living=(*workload.nested.living, part), count=workload.nested.count + 1
                )
                workload = replace(workload, nested=nested)
                if workload.proof.cgroups:
                    workload = unknown(workload, "workloads are nested in it")
                outer.save(workload)


def undo_enter(ctx: Context, txn: Transaction, *, has_run: bool) -> None:
    """Remove a workload that has just begun from these lists, because its Assign failed.

    ``has_run``: its task was moved and put back. What the task used meanwhile is counted nowhere.
    """
    begun = txn.find()
    if begun is None or begun.state.is_over:
        return  # it was not begun, and the run before it is the current one again
    for key in begun.part_of:
        with undoing(key), ctx.store.transaction(key) as outer:
            workload = outer.find()
            if workload is None or not workload.has_part(begun):
                continue
            nested = workload.nested
            left = tuple(part for part in nested.living if part != begun.as_part)
            workload = replace(workload, nested=replace(nested, living=left, count=nested.count - 1))
            if has_run:
                by = f"workload {begun.key} had one of them for a time"
                workload = workload.doubted(workload.first, doubt(Reason.MOVED_OUT, by=by))
            outer.restore(workload)


# -- relation


def outer_workloads(ctx: Context, workload: Workload) -> list[Workload]:
    """Return the running workloads in which this one is nested, the nearest first.

    Not a later run with the key of one of them.
    """
    found = map(ctx.store.get, workload.part_of)
    return [outer for outer in found if outer is not None and may_contain(outer) and outer.has_part(workload)]


# -- end


def has_tasks_to_return(ctx: Context, workload: Workload) -> bool:
    """Return whether there are tasks that ``give_back`` moves."""
    if not outer_workloads(ctx, workload):
        return False
    with suppress(NoSuchGroup, NotMounted):
        return any(running_tasks(ctx, group) for group in workload.existing_groups)
    return True


def running_tasks(ctx: Context, group: Group) -> list[int]:
    """Return the tasks of a group that run, and those of which that is not known. Raises NoSuchGroup, NotMounted.

    A task that has ended since it was listed may have forked before. So none runs only if all ended ones of a list
    were known as such before it.
    """
    known, listed = set[int](), list[int]()
    for _ in range(_MAX_LISTS):
        listed = list(ctx.tree.tasks(group.ref))
        if running := [tid for tid in listed if processes.is_running(tid)]:
            return running
        if known.issuperset(listed):
            return []
        known.update(listed)
    return listed


def give_back(ctx: Context, workload: Workload) -> bool:
    """Move the tasks of a workload that ends into the group of the nearest workload around it.

    They run on, and are counted there from then on. Return whether there are tasks that could not be moved there.
    """
    around = outer_workloads(ctx, workload)
    left = False
    for group in workload.existing_groups if around else ():
        homes = [home for outer in around if (home := _home(outer, group)) is not None]
        # If only a workload further out has a group in their class, the nearest one lacks them.
        is_nearest = _home(around[0], group) is not None
        try:
            left |= not _move_all(ctx, group, homes[:1], is_nearest=is_nearest)
        except (NoSuchGroup, NotMounted):
            left |= ctx.tree.find(group.ref) is not None
    return left


def _home(outer: Workload, group: Group) -> Group | None:
    """Return the group of the outer workload to which a task can be moved without a change of its class."""
    return next((home for home in outer.existing_groups if home.class_ == group.class_), None)


def _move_all(ctx: Context, group: Group, homes: list[Group], *, is_nearest: bool) -> bool:
    """Move all tasks of a group, until none is left. Return whether none is left, and all are in the nearest home.

    A child that is being forked has the RMID of its parent, and is in no list yet. So a task that was moved must have
    been seen while it does not fork, before the last list.
    """
    here, moved = Membership(group.class_, group.name), set[int]()
    for number in range(_MAX_PASSES):
        moved = {tid for tid in moved if processes.may_be_forking(tid)}
        tids = running_tasks(ctx, group)
        if not tids and not moved:
            return is_nearest or number == 0
        if not homes:
            return False
        for tid in tids:
            # A thread that has changed class, or cannot be moved, is found by the next pass, or is elsewhere.
            with suppress(NoSuchProcess, ClassMismatch, PermissionDenied, KernelRefused):
                # Not one that a container's hook has moved since it was listed: it is counted there.
                ctx.tree.write_task_from(here, homes[0].ref.path, tid)
        moved.update(tids)
        time.sleep(_FORK_S)
        log.debug("moved %d tasks out of the ending group %s in pass %d", len(tids), group.name, number + 1)
    return False


def has_new_tasks(ctx: Context, workload: Workload, group: Group) -> bool:
    """Whether tasks run in a group of a nested workload after its end: they were being forked meanwhile."""
    with suppress(NoSuchGroup, NotMounted):
        return bool(outer_workloads(ctx, workload)) and bool(running_tasks(ctx, group))
    return False


def may_have_had_tasks(ctx: Context, workload: Workload, group: Group) -> bool:
    """Whether tasks may have run in a group of a nested workload since an earlier call wrote its end values."""
    return bool(outer_workloads(ctx, workload)) and ctx.tree.find(group.ref) is not None


def report_end(ctx: Context, workload: Workload) -> None:
    """Write what a workload that is over used, for each workload around it.

    For one that cannot be written, ``fold`` uses the record, while that is kept. Without both, the figures of the
    outer workload state that.
    """
    for outer in outer_workloads(ctx, workload):
        try:
            end = _end_of(ctx.snapshots, workload)
            if end is None:
                log.warning("%s: its files were removed, so the totals of %s lack it", workload.key, outer.key)
                continue
            ctx.snapshots.write_nested(outer.key, workload.as_part.name, msgspec.json.encode(end) + b"\n")
        except (NotWritten, ResctrlError, OSError) as error:
            log.warning("%s: the totals of %s may lack it: %s", workload.key, outer.key, error)


def _end_of(snapshots: Snapshots, over: Workload) -> _End | None:
    """Return the end of a workload that is over; None if its files were removed. Raises NotRead, OSError."""
    found = used(snapshots, over, {})
    return _end(found, over) if found or not over.first.inodes else None


def _end(found: Iterable[Total], workload: Workload) -> _End:
    had_others = any(
        group.moved_in or group.strangers_ns > SLACK_NS or group.has_doubt(Reason.MOVED_IN.name)
        for group in workload.groups
    )
    # In a control group, and with another member, come processes of others.
    is_own = workload.one_process and not workload.proof.cgroups
    gave_others = had_others or (workload.gave_tasks and not is_own)
    return _End(_by_event(found), _may_have_left(workload), gave_others or _is_unseen(workload))


def _is_unseen(workload: Workload) -> bool:
    """Whether the witness does not show what became of the tasks of a workload."""
    return bool(workload.proof.cause) or workload.proof.watch is None


def _may_have_left(workload: Workload) -> bool:
    # The tasks of a group that another program removes run on in no group, and those that it moves out are not moved
    # into the group of the outer workload at the end.
    were_moved = any(group.moved_out for group in workload.groups) or _is_unseen(workload)
    return workload.left_tasks or were_moved or workload.state is State.LOST


def _by_event(totals: Iterable[Total]) -> dict[str, NestedTotal]:
    return {
        total.event.name: NestedTotal(
            "" if total.number is None else digits(total.number), total.quality, total.reason
        )
        for total in totals
    }


# -- sums


def fold(ctx: Context, txn: Transaction) -> Workload:
    """Add the totals of nested workloads that have ended to the record, and remove their files."""
    workload = with_ended(ctx.snapshots, ctx.store.get, txn.workload)
    for part in workload.nested.living:
        inner = ctx.store.get(part.key)
        is_gone = inner is None or inner.as_part != part
        if is_gone and _read_end(ctx.snapshots, workload, part) is None:
            workload = _with_unknown(workload, part)
    ended = [part for part in txn.workload.nested.living if part not in workload.nested.living]
    if ended:
        workload = txn.save(workload)
        for part in ended:
            ctx.snapshots.remove_nested(workload.key, part.name)
    return workload


def with_ended(snapshots: Snapshots, find: Find, workload: Workload) -> Workload:
    """Return the workload with the sums of those nested workloads that have ended."""
    for part in workload.nested.living:
        end = _read_end(snapshots, workload, part) or _recorded_end(snapshots, find, part)
        if end is not None:
            workload = _with_end(workload, part, end)
    return workload


def summed(ctx: Context, workload: Workload, own_now: OwnTotals) -> Workload:
    """Return the workload with what each nested workload used until now. It has none from now on.

    ``own_now`` returns the current totals of a workload without its nested ones.
    """
    for part in workload.nested.living:
        end = _current(ctx, workload, part, own_now)
        workload = _with_unknown(workload, part) if end is None else _with_end(workload, part, end)
    return workload


def totals(ctx: Context, workload: Workload, own: Iterable[Total], own_now: OwnTotals) -> list[Total]:
    """Return what all workloads nested in this run used since it began; [] if there were none.

    ``own`` are the totals of the workload itself. ``own_now``: see ``summed``.
    """
    names = [total.event.name for total in own]
    while True:
        now = ctx.store.get(workload.key)
        if now is None or now.generation != workload.generation:
            now = workload
        whole = now if now.state.is_over and not now.is_interrupted else summed(ctx, now, own_now)
        later = ctx.store.get(workload.key)
        if later is None or later.generation != now.generation or later.nested == now.nested:
            return totals_on_disk(whole, names)


def totals_on_disk(workload: Workload, names: Iterable[str]) -> list[Total]:
    """Return what the nested workloads used that the record includes. The use of others is missing.

    ``names`` are the events of the workload itself. [] if there were no nested workloads.
    """
    nested = workload.nested
    if not nested.count:
        return []
    missing = nested.missing or (nested.living[0].key if nested.living else "")
    parts = [[_total(name, of) for name, of in nested.totals.items()]]
    if missing:
        why = Reason.NESTED_UNKNOWN.text(cause=f"workload {missing} is missing")
        everything = dict.fromkeys((*names, *nested.totals))
        parts.append([Total(event(name), None, Quality.UNKNOWN, why) for name in everything])
    elif nested.totals:
        parts.append(_uncounted(names, nested.totals))
    found = added(parts)
    return [_with_gap(total) for total in found] if nested.has_gap else found


def _with_gap(total: Total) -> Total:
    gap = Reason.NESTED_UNKNOWN.text(cause="those that began while its group was lost are not included")
    reason = "; ".join(filter(None, (total.reason, gap)))
    return dataclasses.replace(total, quality=worst(total.quality, Quality.ESTIMATED), reason=reason)


def _uncounted(names: Iterable[str], counted: Collection[str]) -> list[Total]:
    """Return an unknown total for each event that was not counted, so that a sum without it is not exact."""
    why = Reason.NESTED_UNKNOWN.text(cause="they did not count this event")
    return [Total(event(name), None, Quality.UNKNOWN, why) for name in names if name not in counted]


def _total(name: str, of: NestedTotal) -> Total:
    return Total(event(name), parse_value(of.value).number if of.value else None, of.quality, of.reason)


def _with_end(workload: Workload, part: Part, end: _End) -> Workload:
    nested = workload.nested
    parts = [[_total(name, of) for name, of in totals.items()] for totals in (nested.totals, end.totals)]
    if nested.totals and end.totals:  # one without totals had no group
        parts += [_uncounted(end.totals, nested.totals), _uncounted(nested.totals, end.totals)]
    both = added(parts)
    living = tuple(one for one in nested.living if one != part)
    workload = replace(workload, nested=replace(nested, living=living, totals=_by_event(both)))
    if end.gave_others:
        workload = workload.doubted(workload.first, doubt(Reason.NESTED_OTHERS, key=part.key))
    return _with_left_tasks(workload, part) if end.left_tasks else workload


def _with_unknown(workload: Workload, part: Part) -> Workload:
    """Return the workload without a nested one of which neither the use nor the tasks at its end are known."""
    nested = workload.nested
    living = tuple(one for one in nested.living if one != part)
    workload = replace(workload, nested=replace(nested, living=living, missing=nested.missing or part.key))
    return _with_left_tasks(workload, part)


def _with_left_tasks(workload: Workload, part: Part) -> Workload:
    return workload.doubted(workload.first, doubt(Reason.NESTED_OUTSIDE, key=part.key))


def _read_end(snapshots: Snapshots, workload: Workload, part: Part) -> _End | None:
    """Return the file of a nested workload that has ended; None if there is none, or it is damaged."""
    data = snapshots.read_nested(workload.key, part.name)
    try:
        return _DECODER.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _recorded_end(snapshots: Snapshots, find: Find, part: Part) -> _End | None:
    """Return the end of a nested workload from its record; None if it is not over, or not known any more."""
    inner = find(part.key)
    if inner is None or inner.as_part != part or not inner.state.is_over:
        return None
    with suppress(ResctrlError, OSError):
        return _end_of(snapshots, inner)
    return None


def _current(ctx: Context, workload: Workload, part: Part, own_now: OwnTotals) -> _End | None:
    """Return what a nested workload has used until now; None if that is not known."""
    for _ in range(_MAX_TRIES):
        if (end := _read_end(ctx.snapshots, workload, part)) is not None:
            return end
        inner = ctx.store.get(part.key)
        if inner is None or inner.as_part != part:
            break
        try:
            found = own_now(with_ended(ctx.snapshots, ctx.store.get, inner))
        except (ResctrlError, FileNotFoundError):
            continue
        later = ctx.store.get(part.key)
        # A doubt may have been saved meanwhile.
        if later is None or later.groups != inner.groups:
            continue
        if found or not inner.first.inodes:
            return _end(found, later)
    return _read_end(ctx.snapshots, workload, part)
