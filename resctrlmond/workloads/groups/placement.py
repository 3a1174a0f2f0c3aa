# SPDX-License-Identifier: Apache-2.0
"""Move the tasks of members into groups: each into the group of its class.

A sweep does this again every few seconds, to find tasks that joined a member from outside, such as *podman exec*.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import (
    LACKS,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    NotRead,
    ResctrlError,
    printable,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import NO_OPTIONS, CgroupTasks, Moved, MoveOptions, Origins, ProcessTasks, Tasks, move
from resctrlmond.workloads.evidence.callers import holds_callers_only, is_about_to_call
from resctrlmond.workloads.groups import creation, location, nested, relocation, units
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.workload import Group, GroupState, Member, State, Workload, replace
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

_KILLED = "resctrlmond was killed while it was put into it"


def sweep(ctx: Context, txn: Transaction) -> None:
    """Search the members for tasks outside the workload's groups, and move these into the group of their class."""
    workload = txn.find()
    # An idle workload has members if their adoption failed.
    if workload is None or workload.state not in (State.ACTIVE, State.IDLE):
        return
    unsaved = None
    try:
        # The tasks of a group that another program has just renamed are not outside.
        location.follow(ctx, txn)
    except (NoSuchGroup, NotMounted):
        return  # its loss is about to be recorded
    except NotWritten as error:
        unsaved = error  # the groups were found
    # If /run is full, the next sweep adds them: figures are read from the files of the nested workloads until then.
    with contextlib.suppress(NotWritten):
        nested.fold(ctx, txn)
    for member in txn.workload.living:
        try:
            _sweep_and_record(ctx, txn, member)
        except NotWritten as error:
            unsaved = error  # the others are searched nevertheless
    if unsaved is not None:
        raise unsaved
    units.drop_strays(ctx, txn)


def wake_dormant(ctx: Context, txn: Transaction) -> None:
    """Let members continue whose control group has tasks again, for example after the restart of a service.

    A service waits while all its processes are about to call.
    """
    workload = txn.find()
    if workload is None or workload.state not in (State.PENDING, State.ACTIVE, State.IDLE):
        return
    for member in workload.dormant:
        try:
            waits = not cgroups.is_populated(member.cgroup)
            waits = waits or (bool(member.commands) and holds_callers_only(member.cgroup))
        except NotRead as error:
            if error.errno in LACKS:
                raise
            continue
        if waits:
            continue
        # Its tasks have run outside until now. This is on disk before the first of them is moved.
        back = replace(
            member, ended_at="", dormant=False, started_at=utc_now(), late=True, tasks_outside=0, reason=""
        )
        txn.save(txn.workload.with_member(back))
        text = "%s: control group %s has tasks again; they are moved into the group, and the baseline is late"
        log.info(text, txn.key, printable(member.cgroup))
        _sweep_and_record(ctx, txn, back)


def adopt(ctx: Context, txn: Transaction, group: Group) -> None:
    """Move the living members of a group that was just created into it. They ran before, so its baseline is late."""
    if group.state is GroupState.PENDING:
        return
    for member in txn.workload.living:
        if not member.has_tasks:
            continue
        if not group.folder and txn.workload.group_of(member).folder:
            continue
        try:
            moved = _sweep_member(ctx, txn, member)
        except ResctrlError as error:
            # It may have ended by now, and was never in the group.
            outside = replace(_saved(txn, member), late=True, joining=False, reason=str(error))
            txn.save(txn.workload.with_member(outside))
            continue
        if moved.moved or txn.workload.group_of(member).folder == group.folder:
            late = replace(
                _without_assign_options(member), late=True, joining=False, tasks_outside=moved.outside, reason=""
            )
            if member.cgroup and member.owner == SYSTEMD:
                # After the last move, so this bounds what the unit used outside the group.
                late = replace(late, cpu_time_before_ns=cgroups.cpu_time_ns(member.cgroup) or 0)
            workload = ctx.proofs.entered(txn.workload.with_member(late), late, moved=bool(moved.moved))
            txn.save(replace(workload, is_active=True))


def rejoin(ctx: Context, txn: Transaction) -> None:
    """Move every living member into its group at the start: the last daemon may have been killed before it did."""
    workload = location.follow(ctx, txn)
    with contextlib.suppress(NotWritten):
        workload = txn.save(ctx.proofs.continued(workload))
    for member in workload.living:
        try:
            # A task that is moved now ran outside.
            _sweep_member(ctx, txn, member)
            is_active = True
        except ResctrlError:
            is_active = txn.workload.is_active
        joined = _saved(txn, member)
        # If the last daemon was killed during its Assign, the caller got no reply, and may have let it go at any
        # time.
        if member.joining:
            joined = replace(joined, joining=False, late=True, may_have_run=_KILLED)
        txn.save(replace(txn.workload.with_member(joined), is_active=is_active))


def where(ctx: Context, member: Member) -> Membership | None:
    """Return where the member's first task is; None if it has no task."""
    for tid in [member.pid] if member.pid else cgroups.tasks(member.cgroup) if member.cgroup else []:
        try:
            return ctx.tree.membership(tid)
        except NoSuchProcess:
            continue
    return None


def outside_of(ctx: Context, workload: Workload | None, tids: Iterable[int]) -> frozenset[int]:
    """Return the threads that are in none of the workload's groups."""
    own = workload.memberships if workload else frozenset()
    outside = set()
    for tid in tids:
        with contextlib.suppress(NoSuchProcess):
            if ctx.tree.membership(tid) not in own:
                outside.add(tid)
    return frozenset(outside)


def move_into_groups(
    ctx: Context,
    txn: Transaction,
    member: Member,
    tasks: Tasks,
    *,
    late: bool = False,
    leaves_callers: bool = False,
    origins: list[tuple[int, Origins]] | None = None,
) -> Moved:
    """Move the member's tasks into its group, and those in other classes into groups there.

    ``late``: they ran when the group's baseline was read. This is always so for tasks that are found in other
    classes. If all tasks of the workload are in another class, its group moves there. Tasks whose group has to wait
    for an RMID stay ``in_other_classes``. ``leaves_callers``: the process of a command of a service that is about to
    call is not moved, because its call moves it, and then it is not late. ``origins``, of an Assign, gets the nonce
    of each group, and where the tasks were before. Raises what moving tasks and creating groups raise.
    """
    home, waits_for = txn.workload.group_of(member), is_about_to_call if leaves_callers else NO_OPTIONS.waits_for
    moved = _move_into(ctx, txn, home, member, tasks=tasks, late=late, origins=origins, waits_for=waits_for)
    if member.allow_class_change:
        return moved
    for class_ in sorted(moved.in_other_classes):
        group = _group_in(ctx, txn, class_, moved)
        if not group.state.has_directory:
            continue
        more = _move_into(ctx, txn, group, member, tasks=tasks, late=True, origins=origins, waits_for=waits_for)
        moved = _together(more, moved)
    return moved


def _sweep_and_record(ctx: Context, txn: Transaction, member: Member) -> None:
    try:
        moved = _sweep_member(ctx, txn, member)
    except NoSuchProcess:
        return  # its end is about to be recorded
    except ResctrlError as error:
        txn.save(txn.workload.with_member(replace(_saved(txn, member), reason=str(error))))
        return
    if (found := _with_outside(txn, member, moved)) is not None:
        txn.save(found)


def _with_outside(txn: Transaction, member: Member, moved: Moved) -> Workload | None:
    """Return the workload with the tasks of a member that are still outside; None if the member has ended."""
    if moved.moved:
        tasks = "1 task" if moved.moved == 1 else f"{moved.moved} tasks"
        log.info("%s: moved %s of member %s into the group", txn.key, tasks, member.id)
    workload = txn.workload
    swept = workload.member(member.id)
    if swept is None or not swept.has_tasks or not workload.group_of(swept).state.has_directory:
        return None
    # This clears the previous error.
    swept = replace(_without_assign_options(swept), reason=why_outside(workload, moved), tasks_outside=moved.outside)
    if swept.tasks_outside and not workload.proof.cgroups:
        swept = _found_outside(swept)
    return replace(workload.with_member(swept), is_active=True)


def _sweep_member(ctx: Context, txn: Transaction, member: Member) -> Moved:
    """Move the tasks of a member into its groups."""
    if not txn.workload.group_of(member).state.has_directory or not member.has_tasks:
        return Moved(0, 0)
    if txn.workload.is_observed:
        return Moved(0, 0, not_moved=_threads_outside(ctx, txn.workload, member))
    if member.cgroup:
        leaves_callers = bool(member.commands)
        return move_into_groups(
            ctx, txn, member, CgroupTasks(member.cgroup), late=True, leaves_callers=leaves_callers
        )
    with Process.open(member.pid, member.start_time) as process:
        return move_into_groups(ctx, txn, member, ProcessTasks(process, member.include_descendants), late=True)


def _threads_outside(ctx: Context, workload: Workload, member: Member) -> frozenset[int]:
    if member.cgroup:
        return outside_of(ctx, workload, CgroupTasks(member.cgroup).threads())
    with Process.open(member.pid, member.start_time) as process:
        return outside_of(ctx, workload, ProcessTasks(process, member.include_descendants).threads())


def _move_into(
    ctx: Context,
    txn: Transaction,
    group: Group,
    member: Member,
    *,
    tasks: Tasks,
    late: bool,
    origins: list[tuple[int, Origins]] | None,
    waits_for: Callable[[int], bool],
) -> Moved:
    def make_late() -> None:
        # The tasks ran outside until now. This is on disk before the first of them is counted.
        txn.save(txn.workload.with_member(_found_outside(_saved(txn, member))))

    here: Origins = {}
    if origins is not None:
        origins.append((group.nonce, here))
    options = MoveOptions(
        may_take=ctx.take_over.may_take_for(txn.key) if member.take_over else None,
        elsewhere=units.of_members(ctx, txn.workload),
        through_class=member.allow_class_change,
        among=None if member.allow_class_change else [group.ref for group in txn.workload.existing_groups],
        # The witness shows what they used, if the workload is known by control groups.
        before_first=make_late if late and not txn.workload.proof.cgroups else None,
        origins=here,
        waits_for=waits_for,
    )
    return move(ctx.tree, tasks, group.ref, options)


def _group_in(ctx: Context, txn: Transaction, class_: str, moved: Moved) -> Group:
    """Return the workload's group in that class. If all its tasks are there, its only group is moved there."""
    workload = txn.workload
    if (group := workload.group_in(class_)) is not None:
        return group
    if len(workload.groups) == 1 and len(moved.in_other_classes) == 1 and not ctx.tree.tasks(workload.first.ref):
        try:
            workload = relocation.relocate(ctx, txn, class_)
        except ResctrlError as error:
            log.info("%s: its group cannot follow to class %s: %s", txn.key, class_ or "/", error)
        else:
            log.info("%s: its tasks are in class %s now, and its group followed", txn.key, class_ or "/")
            return workload.first
    return creation.add(ctx, txn, class_)


def why_outside(workload: Workload, moved: Moved) -> str:
    """Return why tasks in other classes are outside: the groups there wait for an RMID. "" if none does."""
    reasons = [
        group.reason
        for group in workload.groups
        if group.state is GroupState.PENDING and group.class_ in moved.in_other_classes
    ]
    return "; ".join(dict.fromkeys(reasons))


def _saved(txn: Transaction, member: Member) -> Member:
    """Return the member as it was saved last: a sweep that failed may have made it late."""
    return txn.workload.member(member.id) or member


def _found_outside(member: Member) -> Member:
    """Return the member, late because a task of it was found outside the group."""
    return member if member.late else replace(member, late=True, may_have_run="a task of it was found outside")


def _without_assign_options(member: Member) -> Member:
    """Return the member without what its Assign allowed: its tasks have been moved."""
    return replace(member, take_over=False, allow_class_change=member.keeps_class, include_descendants=False)


def _together(last: Moved, before: Moved) -> Moved:
    """Return the outcome of two moves of the same tasks: what the last one found, and the work of both."""
    return Moved(
        before.moved + last.moved,
        before.passes + last.passes,
        last.in_other_groups,
        last.not_moved,
        last.in_other_classes,
    )
