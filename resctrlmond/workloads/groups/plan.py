# SPDX-License-Identifier: Apache-2.0
"""Decisions without side effects: the start-up plan, the order of the RMID queue, and which claims have ended."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from resctrlmond.resctrl.tree import Found
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.clock import seconds_since_ns
from resctrlmond.workloads.model.validation import is_pod_uid
from resctrlmond.workloads.model.workload import Claim, EndRule, Group, GroupState, State, Workload

# How long a claim outlives the last member if it ends with the members: its owner saw the end too, and has this long
# to ask for the totals.
MEMBERS_LINGER_S = 10.0
# A lost run is begun anew after this time, doubled with each loss in a row, up to the longest one. A run that
# lasted longer than STEADY_S ends the row.
RESUME_S = 0.5
MAX_RESUME_S = 300.0
STEADY_S = 600.0


class Do(enum.Enum):
    """The step that a group needs at start-up."""

    KEEP = "its directory is there, perhaps in another class or under another name: continue"
    RETRY = "it has no directory yet: create it; or it is observed, and was not read yet"
    BASELINE = "its directory was created, but no begin values were written and no task has joined"
    FINISH = "its end had begun: complete it"
    RECORD_LOSS = "its directory is gone"


class InWorkload(NamedTuple):
    """A group and its workload."""

    workload: Workload
    group: Group


class Step(msgspec.Struct, frozen=True):
    """One group, and what it needs."""

    do: Do
    key: str
    group: Group


class StartPlan(msgspec.Struct, frozen=True):
    """The start-up plan: steps for every workload that is not over, and marked directories without a record."""

    steps: tuple[Step, ...]
    leftovers: tuple[Found, ...]


def plan_start(workloads: Iterable[Workload], tree: Sequence[Found], gid: int, boot_id: str) -> StartPlan:
    """Match groups with the directories that have the mark (``gid``): by nonce, at any path.

    An observed group has no mark, and is matched by path and inode. A group of another boot matches nothing, because
    its directory ended with that boot.
    """
    marked = {found.nonce: found for found in tree if found.gid == gid}
    others = {(found.ref, found.inode): found for found in tree if found.gid != gid}
    steps = []
    for workload in workloads:
        if workload.state.is_over:
            continue
        is_ending = workload.state is State.ENDING or workload.has_ended_further_group
        own = []
        for group in workload.groups:
            same_boot = group.boot_id == boot_id
            if group.observed:
                found = others.get((group.ref, group.nonce)) if same_boot else None
            else:
                found = marked.pop(group.nonce, None) if same_boot and group.nonce else None
            # The other groups end with the first one, and none of them before it.
            if not group.folder:
                own.append(Step(_what(workload, group, found, same_boot), workload.key, group))
            elif not (is_ending or group.state.is_over):
                own.append(Step(_what(None, group, found, same_boot), workload.key, group))
        # The run ends with any of its groups.
        steps += [step for step in own if step.do is Do.RECORD_LOSS][:1] or own
    return StartPlan(tuple(steps), tuple(marked.values()))


def _what(workload: Workload | None, group: Group, found: Found | None, same_boot: bool) -> Do:
    if group.state is GroupState.ENDING:
        return Do.FINISH
    if workload is not None and workload.has_ended_further_group:
        return Do.RECORD_LOSS
    if group.state is GroupState.PENDING:
        if not same_boot:
            return Do.RECORD_LOSS
        return Do.BASELINE if found and not group.observed else Do.RETRY
    return Do.KEEP if found else Do.RECORD_LOSS


def waiting(workloads: Iterable[Workload]) -> list[InWorkload]:
    """The groups that wait for an RMID, in the order in which they are to get one: by priority, then by age.

    The other groups of a workload wait until its first one stands. Before these are the observed groups that were not
    read yet, which have an RMID.
    """
    groups = [
        InWorkload(workload, group)
        for workload in workloads
        if not workload.state.is_over and workload.state is not State.ENDING
        for group in workload.groups
        if group.state is GroupState.PENDING and (not group.folder or workload.state.has_group)
    ]
    return sorted(groups, key=_rank)


def _rank(of: InWorkload) -> tuple[bool, int, int, str, str]:
    return not of.group.observed, -of.workload.priority, of.group.created_ns, of.workload.key, of.group.folder


def why_late(workload: Workload, group: Group) -> tuple[str, ...]:
    """Why the baseline of a group that waited is late: its members ran outside until now. () if it has none.

    A member that ends before it is moved was never in the group, so this is decided before.
    """
    members = [member for member in workload.members if member.has_tasks]
    return tuple(
        Reason.RAN_OUTSIDE.text(member=member.id) if member.is_living else Reason.ENDED_OUTSIDE.text(member=member.id)
        for member in members
        if workload.group_of(member).folder == group.folder
    )


def served_before(workload: Workload, workloads: Iterable[Workload]) -> Group | None:
    """The first of the waiting groups that are to get an RMID before a new group of ``workload``."""
    # Without a reason it has not been refused an RMID: it is being created at this moment.
    others = (of for of in waiting(workloads) if of.group.reason and of.workload.key != workload.key)
    return next((of.group for of in others if of.workload.priority >= workload.priority), None)


def lacking_counters(workloads: Iterable[Workload]) -> list[InWorkload]:
    """The groups that lack bandwidth counters, in the order in which they are to get them: as for RMIDs."""
    groups = [
        InWorkload(workload, group)
        for workload in workloads
        for group in workload.existing_groups
        if group.unassigned and group.state is not GroupState.ENDING
    ]
    return sorted(groups, key=_rank)


def resumes_after_s(losses: int) -> float:
    """Return the seconds between the loss of a run and the next run, after that many ``losses`` in a row.

    The time doubles with each loss, because another program may remove the groups over and over.
    """
    return min(RESUME_S * 2.0 ** min(losses, 16), MAX_RESUME_S)


def losses_in_a_row(workload: Workload) -> int:
    """Return the number of runs in a row that were lost; the run of ``workload`` is the last of them."""
    first, prior_runs = workload.first, workload.prior_runs
    if prior_runs is None or first.completed_ns - first.created_ns > STEADY_S * 1e9:
        return 1
    return prior_runs.losses + 1


def claims_over(
    workload: Workload, *, pod_is_gone: bool, group_is_empty: bool, linger_s: float, pod_linger_s: float
) -> list[str]:
    """Return the owners whose claims on the workload have ended by their rules.

    ``pod_is_gone``: the pod's control group, known by ``workload.pod_cgroup``, does not exist any more.
    ``group_is_empty``: no task is in the group (asked only if a claim ends by EndRule.TASKS).
    """
    idle = _idle_for(workload)

    def is_over(claim: Claim) -> bool:
        match claim.ends:
            case EndRule.TASKS:
                return group_is_empty
            case EndRule.MEMBERS:
                return bool(workload.members) and idle >= MEMBERS_LINGER_S
            case EndRule.CONTAINER:
                if is_pod_uid(workload.key) and workload.pod_cgroup:
                    return pod_is_gone and not _holds_pod(workload, claim)
                has_brought = any(member.owner == claim.owner for member in workload.members)
                return has_brought and idle >= (pod_linger_s if is_pod_uid(workload.key) else linger_s)
            case EndRule.RELEASE:
                return False

    return [claim.owner for claim in workload.claims if is_over(claim)]


def _holds_pod(workload: Workload, claim: Claim) -> bool:
    """Whether a living member keeps the claim on a pod whose control group is gone.

    A member without tasks, such as a sandbox that is known by name only, keeps only the claim of its own owner: no
    other owner can end it. While the control group exists the claim lasts, because the pod's next container may start
    soon.
    """
    return any(member.owner == claim.owner or member.has_tasks for member in workload.living)


def _idle_for(workload: Workload) -> float:
    """How many seconds ago the last member ended; negative while one lives."""
    if workload.living:
        return -1.0
    return seconds_since_ns(workload.idle_ns) if workload.members else 0.0
