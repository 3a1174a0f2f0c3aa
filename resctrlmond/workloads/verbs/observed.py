# SPDX-License-Identifier: Apache-2.0
"""Workloads whose group another program owns: a container whose runtime created a monitoring group for it.

The runtime does so if the container's configuration has ``linux.intelRdt.enableMonitoring`` (OCI runtime
specification, config-linux.md), and removes the group when it deletes the container. resctrlmond only reads the
group: it moves no task, and does not rename the group, assign counters to it, or remove it.
"""

from __future__ import annotations

from resctrlmond.resctrl.errors import NoSuchGroup
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tasks import Moved
from resctrlmond.resctrl.tree import Found, GroupRef
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.groups import creation, ends, location, placement, removal
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.runs import claimed, continue_run, new_run, with_profile
from resctrlmond.workloads.groups.target import Target, already_monitored
from resctrlmond.workloads.model.clock import boot_ns, utc_now
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.owners import OCI
from resctrlmond.workloads.model.validation import canonical_key, is_own_key, is_pod_uid, reason_text
from resctrlmond.workloads.model.workload import EndRule, Group, Workload, replace
from resctrlmond.workloads.profiles.requests import Assigned, Assignment
from resctrlmond.workloads.records.store import Limit, Transaction
from resctrlmond.workloads.verbs.excluded import POD_UID


def group_of_runtime(ctx: Context, where: Membership | None, assignment: Assignment) -> Found | None:
    """Return the group of another program that the task of a container is in, if it is named after the container."""
    if where is None or not where.group or where.group != assignment.member or assignment.take_over:
        return None
    if assignment.kind not in ("container", "sandbox") or not _has_own_key(where.group):
        return None
    found = ctx.tree.find(GroupRef(where.class_, where.group))
    return found if found is not None and found.gid != ctx.mark.gid else None


def _has_own_key(name: str) -> bool:
    try:
        return not is_pod_uid(canonical_key(name))
    except InvalidKey:
        return False


def observe(ctx: Context, txn: Transaction, found: Found, target: Target, assignment: Assignment) -> Assigned:
    """Begin to read the group of a container. The key of the workload is the container's id, also in a pod.

    The runtime has put the container into the group before. Can be called again for the same container. Raises
    AlreadyMonitored if the key is used by another workload.
    """
    # Neither the member nor the claim is the caller's, which ends those of its own that it does not know (Reconcile).
    member = replace(target.member(assignment), owner=OCI, exposed=reason_text(assignment.exposed))
    before = continue_run(ctx, txn)
    if before is not None and before.is_observed:
        # The container may have ended unseen, and the runtime use its group again for the next start.
        before = ends.record_ends(ctx, txn)
    if before is not None and not before.state.is_over:
        known = before.member(member.id)
        if known is None or not before.is_observed or before.first.nonce != found.inode:
            raise already_monitored(Membership(found.ref.class_, found.ref.name))
        # The hook and an adapter know different facts: one of them may name a process, and the other a control group.
        known = replace(known, cgroup=known.cgroup or member.cgroup)
        workload = _claimed(before.with_member(known), assignment)
        return Assigned(txn.save(workload, Limit.WITH_RESERVE), Moved(0, 0))
    ended = txn.find()
    try:
        workload = new_run(ctx, txn, found.ref.class_)
        group = Group(
            class_=found.ref.class_,
            name=found.ref.name,
            observed=True,
            nonce=found.inode,
            boot_id=ctx.mark.boot_id,
            created_at=utc_now(),
            created_ns=boot_ns(),
        )
        workload = replace(_claimed(workload, assignment), groups=(group,), is_active=True).with_member(member)
        txn.save(workload, Limit.WITH_RESERVE)
        group = creation.with_baseline(ctx, workload, group, has_begin=True)
        if not assignment.is_awaited():
            workload = _late(workload)
        txn.save(workload.with_group(group))
        placement.sweep(ctx, txn)
        return Assigned(txn.workload, Moved(0, 0))
    except Exception:
        with undoing(txn.key):
            removal.discard_run(ctx, txn, ended)
        raise


def continue_beginning(ctx: Context, txn: Transaction, group: Group) -> None:
    """Read a group for the first time whose workload was recorded by a call that was cut short."""
    try:
        location.find(ctx, txn.key, group)
    except NoSuchGroup as error:
        removal.fail(ctx, txn, group, error.message)
        return
    group = creation.with_baseline(ctx, txn.workload, group, has_begin=True)
    txn.save(_late(txn.workload).with_group(group))
    placement.sweep(ctx, txn)


def _late(workload: Workload) -> Workload:
    """Return the workload, late, because its container may have run before the first reading."""
    members = (replace(member, late=True) if member.is_living else member for member in workload.members)
    return replace(workload, members=tuple(members))


def _claimed(workload: Workload, assignment: Assignment) -> Workload:
    """Return the workload with its claim and the attributes of a caller."""
    attributes = dict(assignment.attributes)
    pod = canonical_key(assignment.key)
    if not is_own_key(pod, assignment.member or ""):
        # First, because the last ones are left out if there are too many.
        attributes = {POD_UID: pod, **attributes} | {POD_UID: pod}
    workload = claimed(workload, OCI, EndRule.CONTAINER, attributes, assignment.priority, fitting=True)
    return with_profile(workload, assignment.choice)
