# SPDX-License-Identifier: Apache-2.0
"""Workloads of systemd units: which tasks they count, and which they give to others.

A unit counts the tasks in its control group, and below it, that have no workload of their own. So a slice counts what
its units without a workload use, and each task is counted once, in the innermost workload. A task starts in the group
of its parent: a container or session that a unit's process starts begins in the unit's group, with a control group
elsewhere. Any other workload may take such a task, without a take-over, and a sweep moves the others out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from resctrlmond.resctrl import cgroups, processes, tasks
from resctrlmond.resctrl.counters import event
from resctrlmond.resctrl.errors import (
    NoSuchGroup,
    NotMounted,
    NotRead,
    printable,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tasks import Elsewhere
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import AlreadyMonitored
from resctrlmond.workloads.model.owners import OF_UNITS, OVERFLOW
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Group, Member, State, Workload
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

OVERFLOW_PREFIX = "overflow@"
_ROOT_SLICE = "-.slice"


def is_unit(workload: Workload) -> bool:
    """Return whether the workload is claimed for one or several units, and by no other owner."""
    return bool(workload.claims) and all(claim.owner in OF_UNITS for claim in workload.claims)


def is_overflow(workload: Workload) -> bool:
    """Return whether units without an RMID of their own share the workload (``overflow.py``)."""
    return is_unit(workload) and workload.is_claimed_by(OVERFLOW)


def overflow_room(ctx: Context) -> int:
    """Return how many more groups units may share, of the number in the configuration."""
    shared = (workload for workload in ctx.store.unfinished() if is_overflow(workload))
    return max(ctx.config.settings.overflow - sum(len(workload.existing_groups) for workload in shared), 0)


def overflow_key(workload: Workload) -> str:
    """Return the key of the overflow workload for a unit."""
    if user := workload.attributes.get("user", ""):
        return f"{OVERFLOW_PREFIX}user-{user}.slice"
    member = workload.member(workload.key)
    top = cgroups.below_mount(member.cgroup).split("/")[1:2] if member is not None and member.cgroup else []
    return OVERFLOW_PREFIX + (top[0] if top and top[0].endswith(".slice") else _ROOT_SLICE)


def is_running_overflow(workload: Workload | None) -> bool:
    """Whether units share the workload now."""
    return workload is not None and is_overflow(workload) and workload.state in (State.ACTIVE, State.IDLE)


def shared(ctx: Context, workload: Workload) -> list[Total]:
    """Return the totals of a unit that waits for an RMID: unknown, if it shares a group; [] if it shares none."""
    around = _around(ctx, workload)
    if around is None:
        return []
    others = sum(member.is_living for member in around.members if member.id != workload.key)
    text = "1 other" if others == 1 else f"{others} others"
    why = Reason.SHARED.text(others=text, group=around.key)
    readings = ctx.snapshots.begin_values(around.subfolder(around.first))
    names = sorted({reading.event for reading in readings if workload.shows(reading.event)})
    return [Total(event(name), None, Quality.UNKNOWN, why) for name in names]


def _around(ctx: Context, workload: Workload) -> Workload | None:
    """Return the overflow workload in which a unit is counted now."""
    if workload.state is not State.PENDING or not is_unit(workload) or is_overflow(workload):
        return None
    around = ctx.store.get(overflow_key(workload))
    if around is None or not is_running_overflow(around):
        return None
    member = around.member(workload.key)
    return around if member is not None and (member.is_living or member.dormant) else None


def elsewhere(
    ctx: Context, key: str, *, is_unit_itself: bool, paths: tuple[str, ...]
) -> Callable[[Membership], Elsewhere]:
    """Return what happens to a task of a workload that is in another group, as a function of that group.

    ``paths`` are the control groups of the workload.
    """
    known: dict[Membership, Elsewhere] = {}

    def decide(where: Membership) -> Elsewhere:
        other = owner(ctx, key, where)
        if other is None:
            return Elsewhere.OUTSIDE  # of another program
        own = ctx.store.get(key)
        if own is not None and own.has_part(other):
            return Elsewhere.LEAVE
        if own is not None and other.has_part(own):
            return Elsewhere.TAKE
        stays = Elsewhere.LEAVE if is_unit_itself else Elsewhere.OUTSIDE
        if own is not None and is_overflow(own) and any(path in paths for path in _paths(other)):
            return stays  # that unit has just got an RMID of its own
        return Elsewhere.TAKE if is_unit(other) and not _is_below(other, paths) else stays

    def decide_once(where: Membership) -> Elsewhere:
        if where not in known:
            known[where] = decide(where)
        return known[where]

    return decide_once


def of_members(ctx: Context, workload: Workload) -> Callable[[Membership], Elsewhere]:
    """Return ``elsewhere`` for the tasks of the workload's members."""
    return elsewhere(ctx, workload.key, is_unit_itself=is_unit(workload), paths=_paths(workload))


def check_not_a_member(ctx: Context, key: str, path: str) -> None:
    """Raise AlreadyMonitored if the control group is a member, or the pod, of a workload that is not a unit's.

    For the assignment of a unit, which would only hold an RMID: a container has a scope, and may have a workload.
    """
    for other in ctx.store.unfinished():
        paths = [member.cgroup for member in other.living]
        if other.key != key and not is_unit(other) and path in (*paths, other.pod_cgroup):
            raise AlreadyMonitored(f"the control group {printable(path)} belongs to workload {other.key}")


def with_running_on(workload: Workload) -> Workload:
    """Return a workload that ends; if it is an exact service, estimated if its processes run on. Raises NotRead."""
    for member in workload.members:
        if member.commands and cgroups.is_populated(member.cgroup):
            workload = workload.doubted(workload.group_of(member), doubt(Reason.RAN_ON, member=member.id))
    return workload


def drop_strays(ctx: Context, txn: Transaction) -> None:
    """Move tasks out of the groups of a unit that are not in its control group, each to no group of its class.

    They left the control group, as the session of a user leaves the service that accepted the login. What they used
    since then is counted in the unit, and the witness shows how much CPU time that was.
    """
    workload = txn.find()
    if workload is None or not is_unit(workload):
        return
    members = [member for member in workload.members if member.cgroup]
    if is_overflow(workload):
        members = [member for member in members if member.is_living or member.dormant or _has_group(ctx, member.id)]
    try:
        found = [(group, _strays(ctx, group, members)) for group in workload.existing_groups]
    except (NoSuchGroup, NotMounted, NotRead):
        return  # a loss is about to be recorded; the sweep has recorded that a control group cannot be read
    for group, strays in found:
        if not strays:
            continue
        log.info("%s: moved tasks out of the group that have left the control group: %d", txn.key, len(strays))
        # Not one that another workload takes meanwhile: its runtime may just have called the hook.
        tasks.take_out(ctx.tree, group.ref, strays)


def _has_group(ctx: Context, key: str) -> bool:
    workload = ctx.store.get(key)
    return workload is not None and workload.state.has_group


def _strays(ctx: Context, group: Group, members: Sequence[Member]) -> list[int]:
    """Return the threads in the group that are in no control group of the members."""
    inside = {tid for member in members for tid in cgroups.tasks(member.cgroup)}
    strays = [tid for tid in ctx.tree.tasks(group.ref) if tid not in inside]
    # Created only for a task that is not in the list: it may have been started since then.
    tests = [cgroups.member_test(member.cgroup) for member in members] if strays else []
    return [tid for tid in strays if processes.is_running(tid) and not any(holds(tid) for holds in tests)]


def owner(ctx: Context, key: str, where: Membership) -> Workload | None:
    """Return the workload other than ``key`` whose group that is."""
    found = ctx.store.owner_of(GroupRef(where.class_, where.group))
    return found if found is not None and found.key != key else None


def _paths(workload: Workload) -> tuple[str, ...]:
    return tuple(member.cgroup for member in workload.members if member.cgroup)


def _is_below(other: Workload, paths: tuple[str, ...]) -> bool:
    """Return whether a control group of the other workload is below one of the paths."""
    return any(path.startswith(f"{above}/") for path in _paths(other) for above in paths)
