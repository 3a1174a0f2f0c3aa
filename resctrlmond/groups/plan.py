# SPDX-License-Identifier: Apache-2.0
"""What to do, decided without doing anything: at start-up from records and tree, and when a claim has ended."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.keys import is_pod_uid
from resctrlmond.groups.record import Claim, EndRule, Record, State
from resctrlmond.groups.times import seconds_since_ns
from resctrlmond.resctrl.tree import Found

# The owners that are parts of this daemon: the OCI hook, and the claim on a group whose record was lost. No client
# can claim a workload under these names.
OCI = "oci"
RECOVERED = "recovered"
RESERVED_OWNERS = frozenset({OCI, RECOVERED})
# How long a claim outlives the last member if it ends with the members: its owner saw the end too, and has this long
# to ask for the totals.
MEMBERS_LINGER_S = 10.0
# A lost run is begun anew after this time, doubled with each loss in a row, up to the longest one. A run that stood
# for longer than STEADY_S was no part of a row.
RESUME_S = 0.5
MAX_RESUME_S = 300.0
STEADY_S = 600.0


class Do(enum.Enum):
    """What a record that is not over needs at start-up."""

    KEEP = "its group stands, perhaps in another class or under another name: go on"
    RETRY = "it has no group yet: make it"
    BASELINE = "its group was made, but no begin values were written and no task has joined"
    FINISH = "its end was begun: complete it"
    LOSE = "its group is gone"


@dataclass(frozen=True, slots=True)
class Step:
    """One record and what it needs; ``found`` is its group, where it has one. A further group has its own step."""

    do: Do
    record: Record
    found: Found | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """The start-up plan: steps for every record that is not over, and our groups that no record speaks of."""

    steps: tuple[Step, ...]
    leftovers: tuple[Found, ...]


def recover(records: Iterable[Record], tree: Sequence[Found], gid: int, boot_id: str) -> Recovery:
    """Match records with the groups that bear our mark (``gid``): by nonce, wherever they stand.

    A record of another boot matches nothing: what it spoke of ended with that boot.
    """
    ours = {found.nonce: found for found in tree if found.gid == gid}
    steps = []
    for record in records:
        if record.state.is_over:
            continue
        for group in record.groups:
            same_boot = group.boot_id == boot_id
            found = ours.pop(group.nonce, None) if same_boot and group.nonce else None
            # Further groups end with the first, and none of them before it.
            if group is record or not (record.state is State.ENDING or record.is_torn or group.state.is_over):
                steps.append(Step(_what(group, found, same_boot), group, found))
    return Recovery(tuple(steps), tuple(ours.values()))


def _what(record: Record, found: Found | None, same_boot: bool) -> Do:
    if record.state is State.ENDING:
        return Do.FINISH
    if record.is_torn:
        return Do.LOSE
    if record.state is State.PENDING:
        if not same_boot:
            return Do.LOSE
        return Do.BASELINE if found else Do.RETRY
    if found is None:
        return Do.LOSE
    return Do.KEEP


def waiting(records: Iterable[Record]) -> list[Record]:
    """The groups that wait for an RMID, in the order in which they are to get one: by priority, then by age.

    The further groups of a workload wait until its first one stands.
    """
    found = [
        (-record.priority, group.created_ns, group.key, group.part, group)
        for record in records
        if not record.state.is_over and record.state is not State.ENDING
        for group in record.groups
        if group.state is State.PENDING and (group is record or record.state.has_group)
    ]
    return [row[-1] for row in sorted(found, key=lambda row: row[:-1])]


def baseline_of(record: Record | None, group: Record) -> Quality:
    """The quality of the baseline of a group that waited, ``record`` being its workload: late if it has members.

    They ran, or run, outside of it. From the first word on: who ends before its adoption was never in the group.
    """
    members = [member for member in record.members if member.has_tasks] if record else []
    is_late = record is not None and any(record.home(member).part == group.part for member in members)
    return Quality.LATE if is_late else Quality.EXACT


def served_before(record: Record, records: Iterable[Record]) -> Record | None:
    """The first of those that wait already and are to get an RMID before a group that is asked for now."""
    # Without a reason it has not been refused an RMID: it is being made at this moment, and waits for nothing.
    others = (group for group in waiting(records) if group.reason and group.key != record.key)
    return next((group for group in others if group.priority >= record.priority), None)


def lacking_counters(records: Iterable[Record]) -> list[Record]:
    """The groups that stand and lack bandwidth counters, in the order in which they get them: as for RMIDs."""
    found = [
        (-record.priority, group.created_ns, group.key, group.part, group)
        for record in records
        for group in record.standing
        if group.unassigned and group.state is not State.ENDING
    ]
    return [row[-1] for row in sorted(found, key=lambda row: row[:-1])]


def resumes_after_s(losses: int) -> float:
    """How long a run that was lost waits before it is begun anew, after that many ``losses`` in a row.

    Somebody who removes our groups over and over is not to be fought: each time it takes twice as long.
    """
    return min(RESUME_S * 2.0 ** min(losses, 16), MAX_RESUME_S)


def losses_in_a_row(record: Record) -> int:
    """How many runs of the workload were cut short one after the other; the lost ``record`` is the last of them."""
    if record.earlier is None or record.completed_ns - record.created_ns > STEADY_S * 1e9:
        return 1
    return record.earlier.losses + 1


def claims_over(
    record: Record, *, pod_is_gone: bool, group_is_empty: bool, linger_s: float, pod_linger_s: float
) -> list[str]:
    """The owners whose claims on the workload have ended by their rules.

    ``pod_is_gone``: the pod's control group, known by ``record.pod_cgroup``, does not exist any more.
    ``group_is_empty``: no task is in the group (asked only if a claim ends by EndRule.TASKS).
    """
    idle = _idle_for(record)

    def is_over(claim: Claim) -> bool:
        match claim.ends:
            case EndRule.TASKS:
                return group_is_empty
            case EndRule.MEMBERS:
                return bool(record.members) and idle >= MEMBERS_LINGER_S
            case EndRule.CONTAINER:
                if is_pod_uid(record.key) and record.pod_cgroup:
                    return pod_is_gone and not _holds_pod(record, claim)
                has_brought = any(member.owner == claim.owner for member in record.members)
                return has_brought and idle >= (pod_linger_s if is_pod_uid(record.key) else linger_s)
            case EndRule.RELEASE:
                return False

    return [claim.owner for claim in record.claims if is_over(claim)]


def _holds_pod(record: Record, claim: Claim) -> bool:
    """Whether a living member keeps the claim on a pod whose control group is gone.

    A member of another owner without tasks is known by name only: it ends by that owner's word, which this claim does
    not wait for. While the pod's control group exists the pod keeps its RMID: its next container may start soon.
    """
    return any(member.owner == claim.owner or member.has_tasks for member in record.living)


def _idle_for(record: Record) -> float:
    """How many seconds ago the last member ended; negative while one lives."""
    if record.living:
        return -1.0
    return seconds_since_ns(record.idle_ns) if record.members else 0.0
