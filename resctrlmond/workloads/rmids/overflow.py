# SPDX-License-Identifier: Apache-2.0
"""Count units that have no RMID of their own in groups that they share.

A unit that waits for an RMID is a member of the overflow workload of its slice: of the slice at the top of its path,
or of the slice of the user for units of users. The workload has one group in each class in which these units have
tasks. Its figures are those of all its members together; no figure is divided among them. A unit that gets an RMID
takes its tasks out of the shared group (``units.elsewhere``), and leaves the overflow workload at the same tick.

``serve`` compares the members with the units that wait, and so also completes what a kill has cut short. Slices do
not share a group: the tasks of other units in them cannot be distinguished from their own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from resctrlmond.resctrl import cgroups, tasks
from resctrlmond.resctrl.errors import (
    NoSuchProcess,
    ResctrlError,
    RmidsExhausted,
)
from resctrlmond.workloads.groups import creation, ends, placement, removal, target
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.units import (
    OVERFLOW_PREFIX,
    is_overflow,
    is_running_overflow,
    is_unit,
    overflow_key,
)
from resctrlmond.workloads.model.clock import boot_ns, seconds_since_ns
from resctrlmond.workloads.model.errors import AlreadyMonitored
from resctrlmond.workloads.model.owners import OVERFLOW
from resctrlmond.workloads.model.validation import MAX_PRIORITY
from resctrlmond.workloads.model.workload import Member, State, Workload, replace
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.verbs.assign import assign_target

log = logging.getLogger(__name__)

KIND = "overflow"
# Behind all others in the queue: it waits only after another program has removed its group.
_PRIORITY = -MAX_PRIORITY - 1
# For how long a shared group without members is kept, so that units that restart do not create one each time.
LINGER_S = 30.0
# A tick moves no more units than this into shared groups, so that it does not delay other work.
_MOST_JOINS = 50

Guard = Callable[[str], AbstractContextManager[None]]
# By key of an overflow workload: the members that it is to have, by unit.
Wanted = Mapping[str, Mapping[str, Member]]


def serve(ctx: Context, guard: Guard) -> None:
    """Let the units that wait for an RMID share groups, and no others.

    ``guard`` handles the errors of one workload, by its key.
    """
    wanted = _wanted(ctx) if ctx.config.settings.overflow else {}
    for key in [key for key in ctx.store.by_key() if key.startswith(OVERFLOW_PREFIX)]:
        with guard(key), ctx.store.transaction_if_free(key) as txn:
            if txn is not None:
                _keep(ctx, txn, wanted.get(key, {}))
    joins = 0
    for key, members in sorted(wanted.items()):
        for _, member in sorted(members.items()):
            if joins >= _MOST_JOINS:
                return
            if not member.is_living or _has(ctx.store.get(key), member):
                continue  # a dormant one has no task until the tick wakes it
            joins += 1
            if not _join_if_possible(ctx, guard, key, member) and not is_running_overflow(ctx.store.get(key)):
                break  # no group may be created for this slice now


def _join_if_possible(ctx: Context, guard: Guard, key: str, member: Member) -> bool:
    """Move the tasks of a unit into the shared group. Return whether there was an RMID for it."""
    with guard(key):
        try:
            _join(ctx, key, member)
        except RmidsExhausted as error:
            log.debug("%s is not counted: %s", member.id, error)
            return False
    return True


def _wanted(ctx: Context) -> Wanted:
    """Return the units that wait for an RMID, by the overflow workload that is to count them."""
    found: dict[str, dict[str, Member]] = {}
    slices: list[str] | None = None
    for workload in ctx.store.pending():
        member = workload.member(workload.key)
        is_waiting = workload.state is State.PENDING and bool(workload.reason)
        if not is_waiting or not is_unit(workload) or is_overflow(workload) or workload.key.endswith(".slice"):
            continue
        if member is None or not member.cgroup or not (member.is_living or member.dormant):
            continue
        if slices is None:
            slices = list(_counted_slices(ctx))
        key = overflow_key(workload)
        is_in_slice = any(member.cgroup.startswith(f"{path}/") for path in slices)
        if not is_in_slice or _has(ctx.store.get(key), member):
            found.setdefault(key, {})[workload.key] = member
    return found


def _counted_slices(ctx: Context) -> Iterator[str]:
    """Yield the control groups of slices that count the tasks of their units without a workload."""
    for workload in ctx.store.unfinished():
        if workload.key.endswith(".slice") and is_unit(workload) and workload.state.has_group:
            yield from (member.cgroup for member in workload.living if member.cgroup)


def _has(workload: Workload | None, member: Member) -> bool:
    """Whether the unit is a member already."""
    if workload is None or workload.state.is_over:
        return False
    known = workload.member(member.id)
    return known is not None and known.cgroup == member.cgroup and (known.is_living or known.dormant)


def _join(ctx: Context, key: str, member: Member) -> None:
    """Move the tasks of a unit into the shared group. Raises RmidsExhausted, and what ``assign`` raises."""
    slice_ = key.removeprefix(OVERFLOW_PREFIX)
    assignment = Assignment(
        key=key,
        owner=OVERFLOW,
        cgroup=member.cgroup,
        kind=KIND,
        member=member.id,
        attributes={"kind": KIND, "unit": slice_},
        priority=_PRIORITY,
        may_wait=False,
    )
    known = ctx.store.get(key)
    if known is not None and not known.state.is_over and not is_overflow(known):
        raise AlreadyMonitored(f"a client has claimed the key {key}", remedy="Release it (resctrlctl release)")
    # A unit that has just ended, or is a container that has a workload by now.
    ended = contextlib.suppress(AlreadyMonitored, NoSuchProcess, cgroups.NoSuchCgroup)
    with ended, target.opened(ctx.tree, assignment) as opened:
        where = opened.membership()
        if where is None:
            return  # it has no task
        with ctx.store.transaction_if_free(key) as txn:
            if txn is not None:
                assign_target(ctx, txn, opened, where, assignment)


def _keep(ctx: Context, txn: Transaction, wanted: Mapping[str, Member]) -> None:
    """Remove the members that are not ``wanted``, and end the workload if it has had none for a time."""
    workload = txn.find()
    if workload is None or workload.state.is_over or not is_overflow(workload):
        return
    if workload.state is State.PENDING:
        # After the loss of its group. The queue has units before it, which may wait for long.
        created = creation.create(ctx, txn, workload, workload.first)
        placement.adopt(ctx, txn, created)
        workload = txn.workload
    gone = [
        member
        for member in workload.members
        if (member.is_living or member.dormant) and not _is_same(wanted.get(member.id), member)
    ]
    for member in gone:
        _remove(ctx, txn, member)
    run = ctx.runs.of(txn.key)
    if any(member.is_living or member.dormant for member in txn.workload.members):
        run.empty_since_ns = None
        return
    if run.empty_since_ns is None:
        run.empty_since_ns = boot_ns()
    if wanted or (seconds_since_ns(run.empty_since_ns) < LINGER_S and ctx.config.settings.overflow):
        return
    removal.finish(ctx, txn, "no unit shares its group any more", without_claims=[OVERFLOW])


def _is_same(wanted: Member | None, member: Member) -> bool:
    return wanted is not None and wanted.cgroup == member.cgroup


def _remove(ctx: Context, txn: Transaction, member: Member) -> None:
    """End a member. Tasks of it that still run are in the group of the unit, or leave the shared group now."""
    if member.is_living:
        txn.save(ends.without_member(txn.workload, member, "the unit has an RMID of its own, or has ended"))
    else:
        txn.save(txn.workload.with_member(replace(member, dormant=False)))
    unit = ctx.store.get(member.id)
    if unit is not None and unit.state.has_group:
        return  # its sweeps take what was forked while its tasks were moved
    with contextlib.suppress(ResctrlError):
        for group in txn.workload.existing_groups:
            tasks.take_out(ctx.tree, group.ref, cgroups.tasks(member.cgroup))
