# SPDX-License-Identifier: Apache-2.0
"""Decide from what the witness has seen whether the tasks of a run were always in its groups, and no others.

If the workload is known by control groups, these are two questions to one table (``resctrl.witness``): which CPU
time was used in its control groups with other RMIDs, and which with its RMIDs in other control groups. The answers
are sums since the begin, so a look at any time covers all of the run, and nothing has to be found while it happens.

Otherwise its tasks are those that were put into its groups, and what these start: a new task has the RMID of the one
that has started it. So they are in its groups, and no others, if no other program has moved a task.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from resctrlmond.resctrl.errors import printable
from resctrlmond.resctrl.witness import Ids, Move, Moves, Seen, Use
from resctrlmond.workloads.figures.reasons import Reason, text_of, why_late
from resctrlmond.workloads.model.states import Quality, seconds_up_to, worst
from resctrlmond.workloads.model.workload import CONTAINERS, Doubt, Group, Proof, Workload, replace

# The time since the last tick of a task that is moved while it runs, and the rounding of cpu.stat.
SLACK_NS = 1_000_000
# The kernel gives RMIDs again, and charges the last use of a task when it frees it. So sums of former users of an
# RMID can still grow if something was charged to them in this time before the group was created.
_HISTORY_NS = 60 * 10**9
NOT_LOADED = "resctrlmond-witness had not been loaded when the run began"
# A sandbox waits for its end, so it uses CPU time only at its start and its end.
_IDLE_NS = 100_000_000
DROPPED = "resctrlmond-witness dropped what it had recorded of removed control groups before resctrlmond read it"
# The time of the last look is compared as it is in the record. The witness keeps what it has recorded of a removed
# control group for an hour, so half of that is left for a daemon that starts again.
_UNSAVED_NS = 1800 * 10**9
# A workload that goes on for ever with new control groups, as a service that restarts does, must not make its record
# grow for ever.
_MAX_CGROUPS = 1000
# On x86, an RMID is of one group, and counts in it in any class. On arm64, each PARTID has its own PMGs.
_RMIDS_ARE_OF_CLASSES = os.uname().machine == "aarch64"
# The reasons are repeated in each total.
_MOST_NAMED = 5
# The process of a runtime uses some milliseconds before it executes the container, on an emulated processor a hundred
# times as much. A process that has used more, such as that of a virtual machine, has begun to run it.
MOST_BEFORE_NS = 10**9


def with_cause(proof: Proof, cause: str) -> Proof:
    """Return the proof that shows nothing from now on, and the first cause of that."""
    return proof if proof.cause else replace(proof, cause=printable(cause))


def with_new_cgroup(proof: Proof, inode: int, member: str) -> Proof:
    """Return the proof with a control group that has replaced one of a member. All that it has used counts."""
    if len(proof.entered) >= _MAX_CGROUPS:
        return with_cause(proof, f"the control group of {member} was created too many times")
    cgroups = tuple(dict.fromkeys((*proof.cgroups, inode)))
    return replace(proof, cgroups=cgroups, entered={**proof.entered, inode: 0})


def with_cgroup(proof: Proof, inode: int) -> Proof:
    """Return the proof with another control group of the workload, whose tasks have not entered."""
    if len(proof.cgroups) >= _MAX_CGROUPS:
        return with_cause(proof, f"it has had more than {_MAX_CGROUPS} control groups")
    return replace(proof, cgroups=(*proof.cgroups, inode))


def unknown(workload: Workload, cause: str) -> Workload:
    """Return the workload of which the witness shows nothing from now on."""
    return replace(workload, proof=with_cause(workload.proof, cause))


def weighed(workload: Workload, seen: Seen, moves: Moves, until_ns: int, mover: int = 0) -> Workload:
    """Return the workload with what the witness has seen of it until ``until_ns``, at least.

    Moves by the process ``mover`` are those of resctrlmond.
    """
    if seen.watch != workload.proof.watch:
        return unknown(workload, "resctrlmond-witness was loaded again during the run, or could not record something")
    if workload.proof.cgroups:
        # The last look read the files after ``until_ns``. So it saw all use in control groups that were removed by
        # then, or their drop. This look sees all use in those that were removed later, or their drop: the witness
        # states a drop before it removes the rows, and a look reads the drops last.
        if seen.dropped_ns > workload.proof.until_ns:
            return unknown(workload, DROPPED)
        return _with_use(workload, seen, moves, until_ns)
    return _with_moves(workload, moves, until_ns, {*workload.proof.movers, mover})


def _with_use(workload: Workload, seen: Seen, moves: Moves, until_ns: int) -> Workload:
    """Return the workload, which is known by control groups, with what was used in these and in its groups."""
    proof = workload.proof
    groups = [group for group in workload.groups if group.inodes]
    inside, outside = _used_inside(workload, seen), _outside_of(proof, groups, proof.cgroups, seen)
    for group in groups:
        strangers_ns = max(group.strangers_ns, _strangers_ns(group, proof, seen))
        workload = workload.with_group(replace(group, strangers_ns=strangers_ns))
    proof = _with_outside(_with_inside(proof, inside), outside, seen)
    return replace(workload, proof=replace(proof, until_ns=until_ns, moves=_read_until(proof, moves)))


def _read_until(proof: Proof, moves: Moves, *, is_due: bool = False) -> int:
    """Return the number that a record has of the last write that was read.

    A new one is saved (``is_news``), and a save sends a signal. So it rises only before writes are forgotten.
    """
    is_due = is_due or moves.last - proof.moves > moves.capacity // 4
    return moves.last if is_due else proof.moves


def _with_inside(proof: Proof, now: dict[int, int]) -> Proof:
    """Return the proof with what was used in the groups. The newest value of a control group counts."""
    inside = {**proof.inside, **now}
    if len(inside) > _MAX_CGROUPS:
        # The witness drops rows of removed control groups only.
        gone = sum(ns for cgroup, ns in inside.items() if cgroup not in now)
        inside = {0: gone, **now}
    return replace(proof, inside=inside)


def _used_inside(workload: Workload, seen: Seen) -> dict[int, int]:
    """Return the CPU time (ns) that tasks of the workload used in its groups, by control group."""
    found: dict[int, int] = {}
    for use in _sums(seen.of_cgroups(workload.proof.cgroups)):
        if inside_ns := _inside_ns(workload.groups, use):
            found[use.cgroups[0]] = found.get(use.cgroups[0], 0) + inside_ns
    return found


def _with_outside(proof: Proof, now: dict[int, dict[int, int]], seen: Seen) -> Proof:
    """Return the proof with what was used outside, as ``_outside_of`` returns it."""
    # One that has entered meanwhile was among those of the control group above it.
    homes = {cgroup: home for home, below in now.items() for cgroup in below}
    # The witness drops all rows of a removed control group if its table is nearly full.
    outside = {
        home: {cgroup: ns for cgroup, ns in proof.outside.get(home, {}).items() if homes.get(cgroup, home) == home}
        | now.get(home, {})
        for home in (*proof.outside, *now)
    }
    # Others in the control group of the pod may be about to enter, or to be known as helpers, or never do.
    there = {use.cgroups[0] for use in seen.of_cgroups(proof.cgroups)}.difference(now.get(0, ()))
    if starting := {cgroup: ns for cgroup, ns in outside.pop(0, {}).items() if cgroup not in there}:
        outside[0] = starting
    proof = replace(proof, outside=outside)
    if sum(map(len, outside.values())) <= _MAX_CGROUPS:
        return proof
    return with_cause(proof, "tasks in too many control groups used CPU time outside the group")


def _with_moves(workload: Workload, moves: Moves, until_ns: int, movers: Container[int]) -> Workload:
    """Return the workload, which is not known by control groups, with the moves of other programs."""
    proof, before, groups = workload.proof, workload.groups, workload.existing_groups

    def is_own(ids: Ids) -> bool:
        return any(_has_ids(group, ids) for group in groups)

    new = [move for move in moves.after(proof.moves) if move.writer not in movers]
    new = [move for move in new if is_own(move.old) != is_own(move.new)]
    for group in groups:
        # An earlier group may have had the same IDs.
        of_group = [move for move in new if move.at_ns >= group.created_ns and _is_of(group, move)]
        moved_in = group.moved_in + sum(_has_ids(group, move.new) for move in of_group)
        moved_out = group.moved_out + sum(_has_ids(group, move.old) for move in of_group)
        moved_by = next((_by(move) for move in reversed(of_group)), group.moved_by)
        workload = workload.with_group(replace(group, moved_in=moved_in, moved_out=moved_out, moved_by=moved_by))
    number = _read_until(proof, moves, is_due=workload.groups != before)
    return replace(workload, proof=replace(proof, moves=number, until_ns=until_ns))


def _is_of(group: Group, move: Move) -> bool:
    return _has_ids(group, move.old) or _has_ids(group, move.new)


def _by(move: Move) -> str:
    """Return the program that has moved a task, and its process, for people."""
    return printable(f"{move.program} (process {move.writer})") if move.writer else "a program that is not known"


def outside_ns_of(proof: Proof) -> int:
    """Return the CPU time (ns) that tasks in the control groups used outside the groups, and that is missing."""
    used = ((home, sum(below.values())) for home, below in proof.outside.items())
    allowed = proof.idle | proof.entered
    return sum(max(0, ns - allowed.get(home, 0)) for home, ns in used)


class CpuTime(NamedTuple):
    """The CPU time (ns) that the tasks in the control groups of a run used in its groups, and outside."""

    inside_ns: int
    outside_ns: int


def cpu_time(workload: Workload) -> CpuTime | None:
    """Return the CPU time of a run as of the last look; None if the witness has not shown it."""
    proof, groups = workload.proof, [group for group in workload.groups if group.inodes]
    # In groups of other classes can be tasks of a member that counts in the first one.
    has_unknown_ids = len(groups) > 1 and any(group.ids is None for group in groups)
    if not proof.cgroups or proof.cause or has_unknown_ids or any(group.has_mixed_use for group in groups):
        return None
    return CpuTime(proof.inside_ns, outside_ns_of(proof))


def entered_now(
    proof: Proof,
    inodes: Sequence[int],
    groups: Collection[Group],
    seen: Seen,
    *,
    before_ns: int | None = None,
    has_run: bool = False,
    living: Container[int] = (),
) -> Proof:
    """Return the proof with control groups whose tasks have just entered the groups, and what they used before.

    ``before_ns``: only one process has entered, which used so much before. The rest was used by others. ``has_run``:
    the member, which has the last one of them, is known to have run before. Otherwise its runtime used only a little
    there. ``living`` are control groups below these whose tasks have not entered.
    """
    known = proof.entered
    proof = replace(proof, entered={**dict.fromkeys(inodes, 0), **known})
    outside = _outside_of(proof, groups, proof.cgroups, seen)
    used = {
        inode: sum(ns for cgroup, ns in outside.get(inode, {}).items() if cgroup == inode or cgroup not in living)
        for inode in inodes
    }
    if before_ns is not None:
        # It may have used a part of that in another control group.
        used = {inode: min(known.get(inode, 0) + before_ns, ns) for inode, ns in used.items()}
    elif used[inodes[-1]] > MOST_BEFORE_NS and not has_run:
        used[inodes[-1]] = 0
    idle = {inode: sum(outside.get(inode, {}).values()) + _IDLE_NS for inode in proof.idle if not proof.idle[inode]}
    proof = replace(proof, entered={**proof.entered, **used}, idle={**proof.idle, **idle})
    return _with_outside(proof, outside, seen)


def _outside_of(
    proof: Proof, groups: Collection[Group], cgroups: Iterable[int], seen: Seen
) -> dict[int, dict[int, int]]:
    """Return the use outside: all that is not inside, so also what is history of the groups.

    By the nearest control group that has entered, 0 if none has, and then by the control group of the tasks.
    """
    outside = dict[int, dict[int, int]]()
    for use in _sums(seen.of_cgroups(cgroups)):
        outside_ns = use.cpu_ns - _inside_ns(groups, use)
        if outside_ns and not any(above in proof.helpers for above in use.cgroups):
            known = (cgroup for cgroup in use.cgroups if cgroup in proof.entered or cgroup in proof.idle)
            home = next(known, 0)
            here = outside.setdefault(home, {})
            here[use.cgroups[0]] = here.get(use.cgroups[0], 0) + outside_ns
    return outside


def _inside_ns(groups: Iterable[Group], use: Use) -> int:
    """Return how much of the CPU time of one control group, as ``_sums`` returns it, was used in these groups."""
    for group in groups:
        if _has_ids(group, use.ids) and use.at_ns > group.created_ns:
            same = (old.cpu_ns for old in group.history if (old.ids, old.cgroups) == (use.ids, use.cgroups))
            return max(0, use.cpu_ns - sum(same))
    return 0


def _has_ids(group: Group, ids: Ids) -> bool:
    """Whether whatever has these IDs is counted in the group, also while another program has it in another class."""
    if group.ids is None:
        return False
    return group.ids == ids if _RMIDS_ARE_OF_CLASSES else group.ids[1] == ids[1]


def with_ids(group: Group, moved: Sequence[Move], proof: Proof, seen: Seen) -> Group:
    """Return the group with the IDs of what was moved into it, and with what had been used with these before.

    No task was in it until the first one was moved. What was charged until then is history. No part of what was
    charged later is known to be.
    """
    group, entered_ns = replace(group, ids=moved[-1].new), moved[0].at_ns
    own = {use.cgroups[0] for use in seen.of_cgroups(proof.cgroups)}
    uses, since_ns = seen.of_rmid(moved[-1].new[1]), group.created_ns - _HISTORY_NS
    before = [use for use in uses if use.at_ns <= entered_ns]
    history = _sums(use for use in before if use.cgroups[0] in own or use.at_ns > since_ns)
    is_mixed = any(entered_ns < use.at_ns < 1 << 63 for use in uses if use.cgroups[0] in own)
    return replace(group, history=tuple(history), has_mixed_use=group.has_mixed_use or is_mixed)


def _strangers_ns(group: Group, proof: Proof, seen: Seen) -> int:
    """Return the most CPU time that tasks of others can have used in the group."""
    own = set(proof.cgroups)
    uses = seen.of_rmid(group.ids[1] if group.ids is not None else None)
    return sum(_inside_ns([group], use) for use in _sums(uses) if own.isdisjoint(use.cgroups))


def _sums(uses: Iterable[Use]) -> Iterable[Use]:
    """Return the sum of the CPU times of each control group with the same IDs, until the newest of them."""
    found: dict[tuple[Ids, tuple[int, ...]], Use] = {}
    for use in uses:
        old = found.get((use.ids, use.cgroups))
        now = use if old is None else replace(use, cpu_ns=old.cpu_ns + use.cpu_ns, at_ns=max(old.at_ns, use.at_ns))
        found[use.ids, use.cgroups] = now
    return found.values()


class Verdict(NamedTuple):
    """The best quality that a total of a run can have, and the reasons if that is not exact."""

    quality: Quality
    reasons: tuple[str, ...]


def verdict(workload: Workload) -> Verdict:
    """Return the verdict on the totals of a run by its record, whatever its counters read.

    A doubt about some events only is not part of it. The first _MOST_NAMED late members are named.
    """
    groups = [group for group in workload.groups if group.has_begin]
    late = [member for member in workload.members if member.is_late]
    found = [(Quality.LATE, why_late(member)) for member in late[:_MOST_NAMED]]
    found += _of_proof(workload, groups)
    for group in groups:
        found += [(_quality_of(doubt), text_of(doubt)) for doubt in group.doubts if not doubt.events]
    if not found and (cause := next(filter(None, (unseen(workload, group) for group in groups)), "")):
        found.append((Quality.ESTIMATED, Reason.NOT_WITNESSED.text(cause=cause)))
    reasons = tuple(dict.fromkeys(why for _, why in found))
    return Verdict(worst(Quality.EXACT, *(quality for quality, _ in found)), reasons)


def baseline_of(workload: Workload) -> Quality:
    """Return the best quality that a total of a run can have; unknown without the begin values of a group."""
    is_known = all(group.has_begin for group in workload.groups if group.inodes or group is workload.first)
    return verdict(workload).quality if is_known else Quality.UNKNOWN


def _quality_of(doubt: Doubt) -> Quality:
    return Reason[doubt.reason].qualities[0]


def unseen(workload: Workload, group: Group) -> str:
    """Return what the witness would have to show for the group to be exact, and has not; "" if nothing is missing."""
    if not workload.proof.until_ns:
        return "resctrlmond has not asked the witness yet"
    if group.has_mixed_use:
        return "its control groups may have used CPU time with the RMID of the group before it existed"
    # A control group can be assigned while it has no task.
    had_task = (member for member in workload.members if member.pid or member.commands)
    entered = (member.id for member in had_task if workload.group_of(member) == group)
    if group.ids is None and (member := next(entered, "")):
        return f"the witness has not seen the move of {member} into the group"
    # A process that joins a container from outside (podman exec) is not a child of its init.
    others = (member for member in workload.members if member.kind in CONTAINERS and not member.cgroup and member.pid)
    if other := next(others, None):
        return f"{other.id} has no control group of its own, so processes that join it from outside are not known"
    return ""


def _of_proof(workload: Workload, groups: Sequence[Group]) -> Iterator[tuple[Quality, str]]:
    """Yield the reasons for which totals are not exact by what the witness has seen, and has not."""
    if groups and (cause := cause_of(workload)):
        yield Quality.ESTIMATED, Reason.NOT_WITNESSED.text(cause=cause)
    if (outside_ns := outside_ns_of(workload.proof)) > SLACK_NS:
        share = outside_ns / (outside_ns + workload.proof.inside_ns)
        why = Reason.USED_OUTSIDE.text(seconds=seconds_up_to(outside_ns), share=f"{100 * share:.1f} %")
        yield Quality.LATE, why
    for group in groups:
        if group.strangers_ns > SLACK_NS:
            yield Quality.ESTIMATED, Reason.USED_BY_OTHERS.text(seconds=seconds_up_to(group.strangers_ns))
        if group.moved_out:
            yield Quality.LATE, Reason.MOVED_OUT.text(by=group.moved_by)
        if group.moved_in:
            yield Quality.ESTIMATED, Reason.MOVED_IN.text(by=group.moved_by)


def cause_of(workload: Workload) -> str:
    """Return why the witness shows nothing about the workload; "" if it does, or if it need not."""
    proof = workload.proof
    if proof.cause or proof.cgroups or workload.is_observed:
        return proof.cause
    if proof.watch is None:
        return NOT_LOADED
    # One that is joining is late until the witness is asked.
    if any(member.cgroup and not member.joining for member in workload.members):
        return "resctrlmond did not ask the witness when its tasks entered the group"
    return ""


def is_news(before: Workload, now: Workload) -> bool:
    """Whether the record must have what the witness has shown since it was saved.

    Amounts that change the verdict are saved, and again each time that they have doubled: each save sends a signal.
    So the time of the last look is saved each half hour only, and before the witness forgets writes.
    """
    known, new = before.proof, now.proof
    if (known.cause, known.moves, known.cgroups) != (new.cause, new.moves, new.cgroups):
        return True
    if new.cgroups and new.until_ns - known.until_ns > _UNSAVED_NS:
        return True
    amounts = [(outside_ns_of(known), outside_ns_of(new))]
    amounts += [(old.strangers_ns, group.strangers_ns) for old, group in zip(before.groups, now.groups, strict=True)]
    has_learnt = [(group.ids, group.doubts) for group in before.groups] != [
        (group.ids, group.doubts) for group in now.groups
    ]
    return has_learnt or any(amount > SLACK_NS and not SLACK_NS < old >= amount / 2 for old, amount in amounts)
