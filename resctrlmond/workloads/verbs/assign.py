# SPDX-License-Identifier: Apache-2.0
"""The verb Assign: put a process or a control group into the workload's group; undo everything if that fails."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import ClassMismatch, KernelRefused, NoSuchClass
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tasks import CgroupTasks, Elsewhere, Moved, MoveOptions, Origins, move, put_back
from resctrlmond.resctrl.tree import Found
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.figures.verdict import MOST_BEFORE_NS
from resctrlmond.workloads.groups import creation, nested, removal, units
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.placement import move_into_groups, outside_of, why_outside
from resctrlmond.workloads.groups.runs import (
    check_has_rmid,
    claimed,
    continue_run,
    move_empty,
    new_run,
    start_run,
    with_profile,
)
from resctrlmond.workloads.groups.target import Target, check_free, opened
from resctrlmond.workloads.model.errors import InvalidRequest
from resctrlmond.workloads.model.owners import OF_UNITS
from resctrlmond.workloads.model.states import FOLLOW
from resctrlmond.workloads.model.validation import (
    canonical_key,
    check_claim,
    check_member_id,
    check_word,
    reason_text,
    valid_class,
)
from resctrlmond.workloads.model.workload import CONTAINERS, Group, GroupState, Member, Workload, replace
from resctrlmond.workloads.profiles.requests import Assigned, Assignment
from resctrlmond.workloads.records.store import Limit, Transaction
from resctrlmond.workloads.verbs import excluded, observed, profiled

# A process that joins a container from outside (podman exec) is not a child of its init, and is found by the control
# group. To find it by namespace, the daemon would have to check every process of the host over and over.
_HIDES_JOINERS = "it has no control group of its own, so processes that join it from outside are not known"
_NOT_AWAITED = "its caller did not wait for the reply"


def assign(ctx: Context, assignment: Assignment) -> Assigned:
    """Put a process with its threads, or a control group, into the workload's group; create that if needed.

    A container for which its runtime has created a group stays there, and is a workload of its own that is only
    read (``observed``).
    A call that fails changes nothing: a group that was created for it is removed again. Only doubts stay: about
    a member that was found to be late, of groups in which tasks of a rejected member ran, and of a pod that may
    lack the rejected container. Raises what
    ``create`` does, and AlreadyMonitored, NoSuchProcess, ProcessChanged, NoSuchCgroup, PermissionDenied.
    """
    canonical_key(assignment.key)
    check_claim(assignment.owner, assignment.attributes, assignment.priority)
    check_word("kind", assignment.kind)
    if assignment.nested and assignment.take_over:
        raise InvalidRequest("nested and takeOver exclude each other: one of them decides on the outer workload")
    if assignment.member is not None:
        check_member_id(assignment.member)
    assignment, whole = profiled.with_profile(ctx, assignment), assignment.key
    with excluded.marking_rejected(ctx, assignment):
        try:
            return _assign(ctx, assignment, whole)
        except (NoSuchClass, ClassMismatch, KernelRefused) as error:
            if assignment.choice is None or assignment.class_ == FOLLOW:
                raise
            profiled.warn_of_class(assignment, str(error))
        return _assign(ctx, dataclasses.replace(assignment, class_=FOLLOW, allow_class_change=False), whole)


def _assign(ctx: Context, assignment: Assignment, whole: str) -> Assigned:
    """Carry out an assignment whose profile is selected. ``whole`` is the key that the caller has named."""
    key = canonical_key(assignment.key)
    with opened(ctx.tree, assignment) as target:
        where = target.membership()
        of_runtime = observed.group_of_runtime(ctx, where, assignment)
        if of_runtime is not None:
            return _observe(ctx, of_runtime, target, dataclasses.replace(assignment, key=whole))
        if _was_swept_up(ctx, target, where, assignment):
            assignment = dataclasses.replace(assignment, take_over=True)
        is_inside = assignment.nested and where is not None and bool(where.group)
        turn = ctx.take_over.turn() if assignment.take_over or is_inside else contextlib.nullcontext()
        with turn, ctx.store.transaction(key) as txn:
            return assign_target(ctx, txn, target, where, assignment)


def _was_swept_up(ctx: Context, target: Target, where: Membership | None, assignment: Assignment) -> bool:
    """Return whether a sweep took a container for a process that had joined another one with its control group."""
    if not assignment.is_from_runtime or target.process is None or where is None or not where.group:
        return False
    other, pid = units.owner(ctx, canonical_key(assignment.key), where), target.process.pid
    path = cgroups.cgroup_of(pid) if other is not None else ""
    if other is None or not path:
        return False
    here = [member.pid for member in other.living if member.kind in CONTAINERS and member.cgroup == path]
    # A container that a process of the other one starts is counted there.
    return bool(here) and not any(pid == init or processes.is_descendant(pid, init) for init in here)


def _observe(ctx: Context, found: Found, target: Target, assignment: Assignment) -> Assigned:
    key, whole = canonical_key(found.ref.name), canonical_key(assignment.key)
    if whole != key:
        # First, so that a daemon that is killed in between leaves no exact pod that lacks the container.
        with ctx.store.transaction(whole) as txn:
            excluded.mark_excluded(ctx, txn, excluded.apart(key))
    with ctx.store.transaction(key) as txn:
        return observed.observe(ctx, txn, found, target, assignment)


def assign_target(
    ctx: Context, txn: Transaction, target: Target, where: Membership | None, assignment: Assignment
) -> Assigned:
    """Put the target, whose first task is at ``where``, into the workload. See ``assign``."""
    before = continue_run(ctx, txn)
    part_of = _outers(ctx, before, where, assignment)
    _check_free(ctx, before, target, None if part_of else where, assignment)
    if assignment.late is False and outside_of(ctx, before, target.children()):
        assignment = dataclasses.replace(assignment, late=True)  # a process has no child before it runs
    new = target.member(assignment)
    member = _known_member(before, new)
    is_known = member is not new
    if before is not None and member.allow_class_change and assignment.class_ == FOLLOW:
        # It waits to be moved to that class, so the class where it is now does not matter.
        class_ = before.group_of(member).class_
        assignment = dataclasses.replace(assignment, class_=class_, allow_class_change=True)
    wanted = valid_class((where.class_ if where else "") if assignment.class_ == FOLLOW else assignment.class_)
    member = replace(
        member,
        take_over=assignment.take_over,
        allow_class_change=assignment.allow_class_change,
        include_descendants=assignment.include_descendants,
        exposed=reason_text(assignment.exposed) or member.exposed,
    )
    ended = txn.find() if before is None else None
    limit = Limit.WITH_RESERVE if assignment.is_from_runtime else Limit.NORMAL
    origins: list[tuple[int, Origins]] = []
    try:
        if before is None:
            # The first record has the member, because a claim that brought no member may never end.
            joining = replace(member, joining=True)
            begun = replace(new_run(ctx, txn, wanted), part_of=part_of, one_process=bool(part_of))
            workload = _joined(begun, joining, assignment)
            workload = start_run(ctx, txn, workload, may_wait=assignment.may_wait and not part_of, limit=limit)
            nested.enter(ctx, txn)
        else:
            if not assignment.may_wait:
                check_has_rmid(before)
            member = _in_group(member, _group_for(ctx, txn, where, wanted, assignment))
            workload = _joined(txn.workload, member, assignment)
            workload = replace(workload, one_process=workload.one_process and is_known)
        waits = workload.group_of(member).state is GroupState.PENDING
        outside = outside_of(ctx, workload, target.tasks.threads()) if waits else frozenset()
        # One that waits runs outside.
        joining = replace(member, joining=not waits, late=member.late or waits, tasks_outside=len(outside))
        # On disk before the member's first task is moved. From its first task on a group stays in its class.
        txn.save(replace(workload.with_member(joining), follows_class=False), limit)
        if waits:
            return Assigned(txn.workload, Moved(0, 0, not_moved=outside))
        moved = _move(ctx, txn, member, target, assignment, origins=origins)
        # As saved: tasks that were found in other classes made it late.
        member = replace(
            txn.workload.member(member.id) or member,
            tasks_outside=moved.outside,
            reason=why_outside(txn.workload, moved),
            joining=False,
            take_over=False,
            allow_class_change=member.keeps_class,
            include_descendants=False,
        )
        member = _with_lateness(
            ctx, txn.workload, member, target, assignment, moved_again=moved.moved if is_known else None
        )
        workload = replace(txn.workload.with_member(member), is_active=True)
        before_ns = _used_before(target, assignment)
        workload = ctx.proofs.entered(
            workload, member, assignment.sandbox, moved=bool(moved.moved), before_ns=before_ns, last=ended
        )
        return Assigned(txn.save(workload), moved, member.descendants_outside)
    except Exception:
        # The group must not keep tasks of a member that was rejected.
        used = _put_back(ctx, txn, origins)
        with undoing(txn.key):
            was_outside = is_known and any(here for _, here in origins)
            _undo(ctx, txn, before, ended, member, was_outside=was_outside, used=() if is_known else used)
        raise


def _put_back(ctx: Context, txn: Transaction, origins: list[tuple[int, Origins]]) -> set[int]:
    """Move the tasks out again, and return the nonces of the groups in which one may have run."""
    workload = txn.find()
    own = workload.memberships if workload is not None else frozenset()
    return {nonce for nonce, here in reversed(origins) if put_back(ctx.tree, here, own)}


def _outers(
    ctx: Context, before: Workload | None, where: Membership | None, assignment: Assignment
) -> tuple[str, ...]:
    """Return the keys of the workloads in which the new one begins, the nearest first; () if it begins in none."""
    if not assignment.nested or before is not None or where is None or not where.group:
        return ()
    outer = units.owner(ctx, assignment.key, where)
    if outer is None or units.is_unit(outer) or not nested.may_contain(outer):
        return ()
    return (outer.key, *(around.key for around in nested.outer_workloads(ctx, outer)))


def _check_free(
    ctx: Context, before: Workload | None, target: Target, where: Membership | None, assignment: Assignment
) -> None:
    """Raise AlreadyMonitored if the target is in a group that it must not be taken out of. See ``check_free``."""
    path = target.tasks.path if isinstance(target.tasks, CgroupTasks) else assignment.own_cgroup
    is_unit = assignment.owner in OF_UNITS
    if is_unit:
        units.check_not_a_member(ctx, assignment.key, path)
    if where is not None and where.group:
        paths = (path,) if path else ()
        kind = units.elsewhere(ctx, assignment.key, is_unit_itself=is_unit, paths=paths)(where)
        if is_unit or kind is Elsewhere.TAKE:
            where = None
    check_free(before, where, assignment)


def _known_member(workload: Workload | None, member: Member) -> Member:
    """Return the workload's living member, if it is this very process or control group, else ``member``."""
    known = workload.member(member.id) if workload else None
    if known is None or not known.is_living:
        return member
    if member.pid:
        is_same = (known.pid, known.start_time) == (member.pid, member.start_time)
    else:
        is_same = known.cgroup == member.cgroup
    if not is_same:
        return member
    known = replace(known, cgroup=known.cgroup or member.cgroup)
    if member.commands:
        known = replace(known, commands=member.commands)
    return known


def _joined(workload: Workload, member: Member, assignment: Assignment) -> Workload:
    """Return the workload with the member, and with the claim that comes with it."""
    workload = claimed(
        workload.with_member(member),
        assignment.owner,
        assignment.ends,
        assignment.attributes,
        assignment.priority,
        fitting=assignment.is_from_runtime,
    )
    workload = with_profile(workload, assignment.choice_of_workload)
    return replace(workload, pod_cgroup=assignment.pod_cgroup or workload.pod_cgroup)


def _group_for(
    ctx: Context, txn: Transaction, where: Membership | None, wanted: str, assignment: Assignment
) -> Group:
    """Return the workload's group in the class that is ``wanted``. Create it if there is none."""
    workload = txn.workload
    is_empty = not workload.living and len(workload.groups) == 1
    if workload.follows_class or (assignment.class_ != FOLLOW and is_empty):
        workload = move_empty(ctx, txn, wanted)
    if wanted == workload.first.class_ or (where is None and assignment.class_ == FOLLOW):
        return workload.first
    return workload.group_in(wanted) or creation.add(ctx, txn, wanted, may_wait=assignment.may_wait)


def _in_group(member: Member, group: Group) -> Member:
    if not group.folder:
        return replace(member, folder="")
    reason = group.reason if group.state is GroupState.PENDING else ""
    return replace(member, folder=group.folder, reason=reason)


def _move(
    ctx: Context,
    txn: Transaction,
    member: Member,
    target: Target,
    assignment: Assignment,
    *,
    origins: list[tuple[int, Origins]],
) -> Moved:
    """Move the member's tasks. ``origins`` gets the nonce of each group, and where the tasks were before."""
    if assignment.class_ == FOLLOW:
        return move_into_groups(ctx, txn, member, target.tasks, origins=origins)
    # All of it into the class that was named, or nothing; also tasks in the workload's groups of other classes.
    group, here = txn.workload.group_of(member), Origins()
    origins.append((group.nonce, here))
    options = MoveOptions(
        may_take=ctx.take_over.may_take_for(txn.key) if member.take_over else None,
        elsewhere=units.of_members(ctx, txn.workload),
        own=txn.workload.memberships,
        through_class=member.allow_class_change,
        origins=here,
    )
    return move(ctx.tree, target.tasks, group.ref, options)


def _with_lateness(
    ctx: Context,
    workload: Workload,
    member: Member,
    target: Target,
    assignment: Assignment,
    *,
    moved_again: int | None,
) -> Member:
    """Return the member, late if a task of it may have run outside.

    ``moved_again`` is the number of moved tasks of a member that the workload had already, else None. The tasks have
    been moved. This runs after the last move, because no task can run outside from then on.
    """
    late = assignment.late if assignment.cgroup is None else None
    if late is not False:
        outside = outside_of(ctx, workload, target.descendants())
        member = replace(member, descendants_outside=len(outside))
    if moved_again is not None:
        if assignment.unit_command is not None and not late:
            # Another command of a service, whose process was held outside until now.
            is_held = assignment.is_awaited()
            return member if is_held else replace(member, late=True, may_have_run=_NOT_AWAITED)
        return replace(member, late=True) if late or moved_again else member
    # The caller holds the process until it gets the reply, or gives up. If it still waits after the last move, it has
    # held the process all that time, and the process runs in its group only.
    is_given_up = late is False and not assignment.is_awaited()
    used_ns = target.cpu_time_ns()
    # A caller that states that the process has not run is believed if the process has hardly worked.
    is_believed = late is False and (assignment.unit_command is not None or (used_ns or 0) <= MOST_BEFORE_NS)
    if not member.late and not is_given_up and (used_ns is None or is_believed):
        if member.kind in CONTAINERS and not member.cgroup:
            return replace(member, late=True, may_have_run=_HIDES_JOINERS)
        return replace(member, late=True) if member.tasks_outside else member
    why = _NOT_AWAITED if is_given_up else ""
    return replace(member, late=True, may_have_run=why, cpu_time_before_ns=used_ns or 0)


def _used_before(target: Target, assignment: Assignment) -> int | None:
    """Return the CPU time (ns) that the process of a service's command used before its call; None for others.

    0 if that may have been the command's.
    """
    command = assignment.unit_command
    if command is None or target.process is None:
        return None
    used_ns = processes.family_cpu_time_ns(target.process.pid, command.children_ns)
    # In this order: a process that still waits has not executed its command when its time was read.
    return used_ns if used_ns <= command.most_before_ns and assignment.is_awaited() else 0


def _undo(
    ctx: Context,
    txn: Transaction,
    before: Workload | None,
    ended: Workload | None,
    member: Member,
    *,
    was_outside: bool = False,
    used: Collection[int] = (),
) -> None:
    """Undo a failed Assign.

    ``was_outside``: the workload had the member before, and tasks of it were outside. What these did there cannot be
    undone: it stays late. ``used`` are the nonces of the groups in which tasks of a new member may have run:
    what they used is counted, and a process that they forked meanwhile stays.
    """
    if before is None:
        nested.undo_enter(ctx, txn, has_run=bool(used))
        removal.discard_run(ctx, txn, ended)
        return
    for group in txn.workload.groups[1:]:
        old = before.group(group.folder)
        if old is None or (old.nonce and old.nonce != group.nonce):
            removal.discard_group(ctx, txn, group)
    # The groups are kept as they are now: one may have been moved, or created again, for this call.
    restored = replace(before, groups=txn.workload.groups)
    if was_outside:
        restored = restored.with_member(replace(restored.member(member.id) or member, late=True))
    for group in restored.existing_groups:
        if group.nonce in used:
            by = f"an Assign of {member.id}, which failed"
            restored = restored.doubted(group, doubt(Reason.MOVED_IN, by=by))
    txn.restore(restored)
