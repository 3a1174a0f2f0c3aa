# SPDX-License-Identifier: Apache-2.0
"""Start runs and add groups to them. Respects the RMID queue; rolls back on error."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from resctrlmond.resctrl.errors import ClassMismatch, RmidsExhausted, no_rmid_remedy
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads import group_ops
from resctrlmond.workloads.clock import boot_ns, utc_now
from resctrlmond.workloads.context import Context
from resctrlmond.workloads.model import ROOT_FOLDER, EndRule, Group, State, Workload, replace
from resctrlmond.workloads.plan import served_before
from resctrlmond.workloads.store import Transaction
from resctrlmond.workloads.validation import is_pod_uid, merged_attributes


def new_run(ctx: Context, txn: Transaction, class_: str, *, follows_class: bool = False) -> Workload:
    """Return a workload for a new run, not saved yet. The files of the last run under the key are set aside."""
    ended = txn.find()
    if ended is not None:
        ctx.snapshots.set_aside(txn.key, ended.generation, ended.first.completed_ns)
    name = txn.key if is_pod_uid(txn.key) else ctx.settings().group_prefix + txn.key
    return Workload(
        key=txn.key,
        groups=(Group(class_=class_, name=name),),
        follows_class=follows_class,
        generation=ended.generation + 1 if ended else 1,
    )


def start_run(
    ctx: Context,
    txn: Transaction,
    workload: Workload,
    ended: Workload | None,
    *,
    may_wait: bool = True,
    use_reserve: bool = False,
) -> Workload:
    """Save the new workload, and create its group. If that fails, the ``ended`` run is the current one again.

    Raises what ``group_ops.create`` does, LimitExceeded, and RmidsExhausted if it may not wait.
    """
    try:
        ctx.store.check_limits(workload, use_reserve=use_reserve)
        group = group_ops.begun(ctx, workload.first)
        # Queued groups get free RMIDs before new requests do.
        first = served_before(workload, ctx.store.all())
        if first is not None:
            error = _queued_behind(ctx, first, group)
            if not may_wait:
                raise error
            return txn.save(workload.with_group(group_ops.waiting(group, error)))
        txn.save(workload.with_group(group))
        group_ops.create(ctx, txn, group, may_wait=may_wait)
    except Exception:
        with undoing(txn.key):
            group_ops.discard_run(ctx, txn, ended)
        raise
    return txn.workload


def _queued_behind(ctx: Context, first: Group, group: Group) -> RmidsExhausted:
    return RmidsExhausted(
        "cannot create the monitoring group: workloads of the same or a higher priority already wait for an RMID",
        path=ctx.tree.full_path(group.ref),
        in_limbo=first.in_limbo,
        remedy=no_rmid_remedy(first.in_limbo),
    )


def add_group(ctx: Context, txn: Transaction, class_: str, *, may_wait: bool = True) -> Group:
    """Create one more group of the workload, in a class where it has none."""
    workload = txn.workload
    # The name of the class is taken if the group of that class was moved to another class.
    taken = {group.folder for group in workload.groups if group.class_ != class_}
    names = itertools.chain([class_ or ROOT_FOLDER], map(str, itertools.count(2)))
    group = Group(
        folder=next(name for name in names if name not in taken),
        class_=class_,
        name=workload.first.name,
        boot_id=ctx.mark.boot_id,
        created_at=utc_now(),
        created_ns=boot_ns(),
        # If the first group waits for an RMID, this one is created after it.
        reason=workload.reason,
    )
    if workload.state is State.PENDING:
        return txn.save_group(group)
    try:
        group = group_ops.begun(ctx, group)
        first = served_before(workload, ctx.store.all())
        if first is not None:
            error = _queued_behind(ctx, first, group)
            if not may_wait:
                raise error
            return txn.save_group(group_ops.waiting(group, error))
        return group_ops.create(ctx, txn, group, may_wait=may_wait)
    except Exception:
        with undoing(txn.key):
            group_ops.discard_group(ctx, txn, group)
        raise


def move_empty(ctx: Context, txn: Transaction, class_: str) -> Workload:
    """Move the group of a workload without living tasks to another class. Raises ClassMismatch if it has some."""
    workload = txn.workload
    first = workload.first
    if first.class_ == class_:
        return workload
    if any(member.has_tasks for member in workload.living):
        raise ClassMismatch(
            f"the group of {txn.key} is in class {first.class_ or '/'}, not in {class_ or '/'}",
            path=ctx.tree.full_path(first.ref),
            remedy="Use Move (resctrlctl move) to move the whole group to another class",
        )
    return group_ops.relocate(ctx, txn, class_)


def check_has_rmid(workload: Workload) -> None:
    """Raise RmidsExhausted if the workload waits for an RMID."""
    if workload.state is State.PENDING:
        raise RmidsExhausted(workload.reason, in_limbo=workload.first.in_limbo)


def claimed(
    workload: Workload,
    owner: str,
    ends: EndRule | None = None,
    attributes: Mapping[str, str] | None = None,
    priority: int | None = None,
    *,
    fitting: bool = False,
) -> Workload:
    """Return the workload with a claim of ``owner``, the attributes added, and the priority, if one is given.

    An attribute that another owner has set is not changed while that owner claims the workload. ``fitting``: leave
    out attributes that would exceed a limit. Otherwise that raises InvalidAttributes.
    """
    workload = workload.with_claim(owner, utc_now(), ends)
    if priority is not None:
        workload = replace(workload, priority=priority)
    others = {name for name, by in workload.attribute_owners.items() if by != owner and workload.is_claimed_by(by)}
    new = {name: value for name, value in (attributes or {}).items() if name not in others}
    merged = merged_attributes(workload.attributes, new, fitting=fitting)
    owners = {**workload.attribute_owners, **{name: owner for name in new if name in merged}}
    return replace(workload, attributes=merged, attribute_owners=owners)
