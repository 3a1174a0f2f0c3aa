# SPDX-License-Identifier: Apache-2.0
"""Detect that members have ended, and end their claims, and with the last claim the workload.

``removal`` reads and writes the end values.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NoSuchProcess, ResctrlError, printable
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.groups import counters, removal
from resctrlmond.workloads.groups.claims import claims_over
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.units import is_unit
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.workload import EndRule, Group, Member, State, Workload, replace
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

_TAKEN_OUT = "its tasks may have been moved out of the group before"
_DORMANT = "its control group is empty or gone; tasks that appear at its path are moved into the group"


def record_ends(ctx: Context, txn: Transaction) -> Workload | None:
    """Record which members have ended, end the claims that end with them, and with the last claim the workload.

    Return the workload as it is then; None if there is no such workload.
    """
    workload = txn.find()
    if workload is None or (workload.state.is_over and not workload.is_interrupted):
        return workload
    ended = list(filter(has_ended, workload.living))
    for member in ended:
        group = workload.group_of(member)
        if group.observed or group.class_ == member.id:
            # Its runtime is about to remove the group, or the class that it created for the container.
            counters.read_before_removal(ctx, workload, group)
    without_dead = functools.reduce(_without_dead_member, ended, workload)
    owners = _ended_claims(ctx, without_dead)
    # Its owner did not release it at its end.
    is_read_late = all(claim.owner in owners for claim in without_dead.claims) and any(
        claim.ends is EndRule.MEMBERS for claim in without_dead.claims
    )

    def with_ends(before: Workload) -> Workload:
        after = functools.reduce(_without_dead_member, ended, before)
        return _with_late_end(ctx, after) if is_read_late else after

    left = functools.reduce(removal.without_claim, owners, without_dead)
    if not left.claims and not left.state.is_over and left.state is not State.ENDING:
        # As in Release, the write that records the end removes the last claims.
        reason = left.reason or "its last member ended"
        workload = removal.finish(ctx, txn, reason, change=with_ends, without_claims=owners)
    else:
        workload = txn.save(functools.reduce(removal.without_claim, owners, with_ends(workload)))
    _log_dormant(without_dead, ended)
    return finish_again(ctx, txn) if workload.state is State.ENDING else workload


def add_unseen_end(ctx: Context, txn: Transaction) -> None:
    """Add a caveat to a workload that ended while no daemon ran, because its end values are read too late.

    For the start, before anything ends.
    """
    workload = txn.find()
    if workload is None:
        return
    if _has_ended_unseen(ctx, workload):
        workload = _with_late_end(ctx, workload, "resctrlmond was not running, and ")
    txn.save(workload)


def finish_again(ctx: Context, txn: Transaction) -> Workload:
    """Complete an end that failed before: what ran since then in the groups is counted too, or was outside."""
    txn.save(_with_late_end(ctx, txn.workload))
    return removal.finish(ctx, txn, txn.workload.reason)


def _with_late_end(ctx: Context, workload: Workload, why: str = "") -> Workload:
    """Return the workload with a caveat if its end values are read later than its end."""
    if workload.state is State.ENDING and (is_unit(workload) or workload.part_of):
        # Its end has taken its tasks out: a nested one, or a unit with a claim, which gives up its RMID.
        for group in workload.existing_groups:
            if not ctx.snapshots.is_complete(workload.subfolder(group)):
                workload = workload.doubted(group, doubt(Reason.END_READ_LATE, cause=_TAKEN_OUT))
    # Processes that a member has started may run on in the group after its end, unless its control group or its PID
    # namespace ended with it.
    others = [member.id for member in workload.members if _may_leave_processes(member)]
    for group in workload.existing_groups if others else ():
        if not ctx.snapshots.is_complete(workload.subfolder(group)):
            cause = f"{why}the use of processes that {others[-1]} had started is counted until they were"
            workload = workload.doubted(group, doubt(Reason.END_READ_LATE, cause=cause))
    return workload


def without_member(workload: Workload, member: Member, reason: str) -> Workload:
    """Return the workload in which the member has ended. With the last one an active workload is idle."""
    ended = replace(member, ended_at=utc_now(), reason=member.reason or reason, joining=False)
    if member.joining:
        # Its Assign failed and could not be undone, and nothing has moved it since then.
        ended = replace(ended, late=True, may_have_run="it ended before it could be put into it")
    workload = workload.with_member(ended)
    is_active = workload.is_active and bool(workload.living)
    return replace(workload, idle_ns=boot_ns(), is_active=is_active)


def _without_dead_member(workload: Workload, member: Member) -> Workload:
    if member.pid:
        return without_member(workload, member, "ended")
    # A service has a new control group of the same path after each restart.
    return without_member(workload, replace(member, dormant=True, reason=""), _DORMANT)


def _log_dormant(workload: Workload, ended: Iterable[Member]) -> None:
    for member in ended:
        if not member.pid and workload.is_claimed_by(member.owner):
            text = (
                "%s: control group %s is empty or gone; tasks that appear at this path are moved into the group, late"
            )
            log.info(text, workload.key, printable(member.cgroup))


def _has_ended_unseen(ctx: Context, workload: Workload) -> bool:
    """Whether the workload has ended, by the members and claims of a record from before the start.

    A claim that ends by another rule than that of its members lasts until its owner releases it.
    """
    if workload.state is State.ENDING:
        return True
    with_members = all(claim.ends in (EndRule.MEMBERS, EndRule.CONTAINER) for claim in workload.claims)
    if not (workload.existing_groups and workload.claims and with_members) or workload.pod_cgroup:
        return False
    return all(map(has_ended, workload.living)) if workload.living else bool(_ended_claims(ctx, workload))


def _ended_claims(ctx: Context, workload: Workload) -> list[str]:
    """Return the owners of the claims that have ended by their rules."""
    if workload.is_observed:
        # The owner of the group removes it soon after its last task.
        lives = any(member.has_tasks for member in workload.living)
        return [] if lives else [claim.owner for claim in workload.claims]
    settings, profile = ctx.config.settings, ctx.config.profile_of(workload)
    linger_s = profile.linger_s if profile else None
    return claims_over(
        workload,
        pod_is_gone=bool(workload.pod_cgroup) and not cgroups.is_there(workload.pod_cgroup),
        group_is_empty=workload.has_claim_until(EndRule.TASKS)
        and all(_is_empty(ctx, workload.key, group) for group in workload.existing_groups),
        linger_s=settings.linger_s if linger_s is None else linger_s,
        pod_linger_s=settings.pod_linger_s if linger_s is None else linger_s,
    )


def _is_empty(ctx: Context, key: str, group: Group) -> bool:
    """Whether no task is in the group.

    The kernel walks every thread of the machine for the list of tasks, so the list is read only if the task that was
    found in it last has left.
    """
    state = ctx.runs.of(key).of_group(group)
    if state.occupant is None or not _is_in(ctx, group.ref, state.occupant):
        state.occupant = None  # also if the list cannot be read
        state.occupant = next(iter(ctx.tree.tasks(group.ref)), None)
    return state.occupant is None


def _is_in(ctx: Context, ref: GroupRef, tid: int) -> bool:
    try:
        return ctx.tree.membership(tid) == Membership(ref.class_, ref.name)
    except NoSuchProcess:
        return False


def _may_leave_processes(member: Member) -> bool:
    """Whether processes of the member may run on after its end, or it runs itself."""
    if member.is_living and not has_ended(member):
        return True
    return bool(member.pid) and not (member.cgroup or member.init)


def may_leave_tasks(workload: Workload) -> bool:
    """Return whether tasks of members may run in the workload's groups when it ends. Raises NotRead, OSError.

    The witness shows whether other programs have moved tasks into them.
    """
    return any(_may_leave_processes(member) for member in workload.members if member.has_tasks)


def may_run_unseen(workload: Workload) -> bool:
    """Return whether tasks that are of no living member may run in the workload's groups.

    An ended member may have left them, or another program has moved them into a group without members.
    """
    members = [member for member in workload.members if member.has_tasks]
    if not any(member.is_living for member in members):
        return True
    ended = [member for member in members if not member.is_living]
    try:
        return any(_may_leave_processes(member) or not has_ended(member) for member in ended)
    except (ResctrlError, OSError):
        return True


def has_ended(member: Member) -> bool:
    """Whether nothing of the member runs any more: its first process ended and its control group is empty."""
    if not member.pid and not member.cgroup:
        return False  # a sandbox without a process ends by word only
    return not runs(member) and not (member.cgroup and cgroups.is_populated(member.cgroup))


def runs(member: Member) -> bool:
    """Whether its first process is known, and runs. Raises NotRead."""
    if not member.pid:
        return False
    try:
        with Process.open(member.pid, member.start_time):
            return True
    except NoSuchProcess:
        return False
