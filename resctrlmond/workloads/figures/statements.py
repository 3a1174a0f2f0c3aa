# SPDX-License-Identifier: Apache-2.0
"""State the five proofs on which the quality of a workload rests (``ProofKind``), with what was seen, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import Reason, text_of, why_late
from resctrlmond.workloads.figures.verdict import NOT_LOADED, SLACK_NS, cause_of, outside_ns_of, unseen
from resctrlmond.workloads.model.states import ProofKind, Quality, seconds_up_to
from resctrlmond.workloads.model.workload import Member, Proof, Workload

# The proof that a doubt takes away. All others are about what was read.
_DOUBTED = {
    Reason.NESTED_OUTSIDE.name: ProofKind.CLOSED,
    Reason.NOT_INCLUDED.name: ProofKind.CLOSED,
    Reason.RAN_ON.name: ProofKind.CLOSED,
    Reason.NESTED_OTHERS.name: ProofKind.ALONE,
    Reason.HAS_CPUS.name: ProofKind.ALONE,
    Reason.CHANGES_UNKNOWN.name: ProofKind.ALONE,
    Reason.OBSERVED.name: ProofKind.ALONE,
}


class Statement(msgspec.Struct, frozen=True):
    """Whether a proof is shown, and what was seen, or what is missing."""

    kind: ProofKind
    shown: bool
    text: str


def statements(workload: Workload, counted: Sequence[Total], now_ns: int) -> Iterator[Statement]:
    """Yield a statement of each proof, and of the first one for each member.

    ``counted`` are the totals with the quality that they have by their counters alone. ``now_ns`` is the present
    (``clock.boot_ns``).
    """
    yield from _entered(workload)
    if missing := _missing(workload):
        text = f"the witness does not show it: {missing}"
        yield Statement(ProofKind.CLOSED, shown=False, text=text)
        yield Statement(ProofKind.ALONE, shown=False, text=text)
    else:
        yield _doubted(workload, _closed(workload, now_ns))
        yield _doubted(workload, _alone(workload, now_ns))
    yield _doubted(workload, _read(workload, counted))
    yield _watched(workload)


def _doubted(workload: Workload, statement: Statement) -> Statement:
    """Return the statement with the doubts about all totals that take this proof away."""
    texts = [
        text_of(doubt)
        for group in workload.groups
        for doubt in group.doubts
        if not doubt.events and _DOUBTED.get(doubt.reason, ProofKind.READ) is statement.kind
    ]
    if not texts:
        return statement
    return Statement(statement.kind, shown=False, text="; ".join(dict.fromkeys((statement.text, *texts))))


def _entered(workload: Workload) -> Iterator[Statement]:
    found = [
        (member, _outside_before(workload, member))
        for member in workload.members
        if member.has_tasks or member.is_late
    ]
    if not found:
        yield Statement(ProofKind.ENTERED, shown=False, text="no task has been put into its groups")
    entered_ns = sum(workload.proof.entered.values())
    before = f"; until then, {seconds_up_to(entered_ns)} s of CPU time were used in the control groups"
    # The time is that of all members.
    first = next((member for member, missing in found if not missing), None) if entered_ns else None
    for member, missing in found:
        first_task = f"the first task of {member.id} was in the group before it ran"
        if not (member.pid or member.commands):
            first_task = f"{member.id} had no task when it was put into the group"
        text = missing or first_task
        yield Statement(ProofKind.ENTERED, not missing, text + (before if member is first else ""))


def _outside_before(workload: Workload, member: Member) -> str:
    """Return why tasks of the member may have run before they were in the group; "" if they have not."""
    if not workload.group_of(member).inodes:
        return f"{member.id} is in no group yet"
    return why_late(member) if member.is_late else ""


def _missing(workload: Workload) -> str:
    """Return why the witness shows nothing about the tasks of the workload; "" if it does."""
    if cause := cause_of(workload):
        return cause
    if workload.is_observed:
        return "another program owns the group"
    return next(filter(None, (unseen(workload, group) for group in workload.groups if group.inodes)), "")


def _closed(workload: Workload, now_ns: int) -> Statement:
    proof = workload.proof
    if not proof.cgroups:
        return _moved(ProofKind.CLOSED, workload, sum(group.moved_out for group in workload.groups), "out of", now_ns)
    outside_ns = outside_ns_of(proof)
    share = outside_ns / ((outside_ns + proof.inside_ns) or 1)
    text = (
        f"since then, tasks in its control groups used {_seconds(proof.inside_ns)} s of CPU time in its groups and "
        f"{seconds_up_to(outside_ns)} s outside ({100 * share:.1f} %), {_until(proof, now_ns)}"
    )
    return Statement(ProofKind.CLOSED, outside_ns <= SLACK_NS, text)


def _moved(kind: ProofKind, workload: Workload, number: int, where: str, now_ns: int) -> Statement:
    tasks = "no task" if not number else "1 task" if number == 1 else f"{number} tasks"
    by = f" (the last one was {_movers(workload)})" if number else ""
    text = f"other programs{by} have moved {tasks} {where} its groups, {_until(workload.proof, now_ns)}"
    return Statement(kind, not number, text)


def _movers(workload: Workload) -> str:
    return ", ".join(dict.fromkeys(group.moved_by for group in workload.groups if group.moved_by))


def _alone(workload: Workload, now_ns: int) -> Statement:
    if not workload.proof.cgroups:
        return _moved(ProofKind.ALONE, workload, sum(group.moved_in for group in workload.groups), "into", now_ns)
    groups = [group for group in workload.groups if group.ids is not None and group.inodes]
    ids = ", ".join(f"CLOSID {group.ids[0]} and RMID {group.ids[1]}" for group in groups if group.ids is not None)
    used, until = seconds_up_to(sum(group.strangers_ns for group in groups)), _until(workload.proof, now_ns)
    text = (
        f"tasks of other control groups used up to {used} s of CPU time with {ids}" if ids else "no task has entered"
    )
    shown = all(group.strangers_ns <= SLACK_NS for group in groups)
    return Statement(ProofKind.ALONE, shown, f"{text}, {until}")


def _read(workload: Workload, counted: Sequence[Total]) -> Statement:
    if not counted:
        return Statement(ProofKind.READ, shown=False, text="no counter has been read")
    events: dict[str, list[str]] = {}
    for total in counted:
        if total.quality is not Quality.EXACT:
            events.setdefault(total.reason, []).append(total.event.name)
    if events:
        text = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in events.items())
        return Statement(ProofKind.READ, shown=False, text=text)
    last = "at the end" if workload.state.is_over else "at the last reading"
    return Statement(ProofKind.READ, shown=True, text=f"every counter had a number at the begin and {last}")


def _watched(workload: Workload) -> Statement:
    watch, missing = workload.proof.watch, _missing(workload)
    if watch is None or missing:
        text = f"not known: {missing}" if watch else NOT_LOADED
        return Statement(ProofKind.WATCHED, shown=False, text=text)
    text = f"resctrlmond-witness has counted without a gap since {_seconds(watch.begun_ns)} s after boot"
    if workload.first.created_ns:
        text += f"; the group was created {_seconds(workload.first.created_ns)} s after boot"
    return Statement(ProofKind.WATCHED, shown=True, text=text)


def _until(proof: Proof, now_ns: int) -> str:
    ago = seconds_up_to(max(0, now_ns - proof.until_ns))
    return f"as seen {ago} s ago ({_seconds(proof.until_ns)} s after boot)"


def _seconds(ns: int) -> str:
    """Return a lower bound (ns) in seconds, with three digits, rounded down."""
    return f"{ns // 10**9}.{ns // 10**6 % 1000:03}"
