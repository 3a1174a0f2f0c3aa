# SPDX-License-Identifier: Apache-2.0
"""Move a workload's group to another class."""

from __future__ import annotations

from resctrlmond.resctrl.errors import (
    ClassMismatch,
    KernelRefused,
    ResctrlError,
)
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.groups import creation, location
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.target import only_observed
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.validation import valid_class
from resctrlmond.workloads.model.workload import GroupState, Workload, replace
from resctrlmond.workloads.records.store import Transaction


def relocate(ctx: Context, txn: Transaction, class_: str) -> Workload:
    """Move the workload's only group to another class.

    If this kernel does not rename groups, a group that never had a member is created again in that class.
    Raises NoSuchClass, ClassMismatch, GroupExists, ForeignGroup, and InvalidClass for a class whose name cannot be
    recorded.
    """
    class_, before = valid_class(class_), txn.workload
    if before.is_observed:
        raise only_observed(before)
    if len(before.groups) > 1:
        raise ClassMismatch(
            f"the tasks of {txn.key} are in several classes, with a group in each",
            path=ctx.tree.full_path(before.first.ref),
            remedy="Only a workload with a single group can be moved",
        )
    if not before.state.has_group:
        # No directory takes the tasks along: they change class as they join.
        workload = before.with_group(replace(before.first, class_=class_))
        for member in workload.living:
            if member.has_tasks:
                workload = workload.with_member(replace(member, allow_class_change=True))
        return txn.save(replace(workload, follows_class=False))
    group = location.follow_group(ctx, txn, before.first)
    before = txn.workload
    in_fixed_class = replace(before, follows_class=False)
    target = GroupRef(class_, group.name)
    try:
        ctx.tree.rename(group.ref, target)
    except KernelRefused as error:
        # A group without tasks may have counted something: its counters would be lost.
        if before.members or ctx.tree.tasks(group.ref):
            raise ClassMismatch(
                f"the group is in class {group.class_ or '/'}, and this kernel cannot move groups",
                path=error.path,
                errno=error.errno,
                status=error.status,
            ) from error
        moving = replace(group, class_=class_, state=GroupState.PENDING)
        txn.save(replace(in_fixed_class.with_group(moving), is_active=False))
        ctx.machine.replacing(group)
        try:
            ctx.tree.remove(group.ref)
        except ResctrlError:
            # The directory is still there, and no record would be about it.
            with undoing(txn.key):
                txn.save(before)
            raise
        creation.create(ctx, txn, txn.workload, moving)
        return txn.workload
    try:
        location.relocated(ctx, in_fixed_class, group, target, txn.save)
    except NotWritten:
        saved = txn.workload.group(group.folder)
        if saved is None or saved.ref != target:
            # A group that is not at the path in its record would count as lost.
            with undoing(txn.key):
                ctx.tree.rename(target, group.ref)
                location.relink(ctx, before, group)
        raise
    return txn.workload
