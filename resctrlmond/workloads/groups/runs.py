# SPDX-License-Identifier: Apache-2.0
"""Start runs, and continue a lost run with a new run that keeps its use. Respects the RMID queue."""

from __future__ import annotations

from collections.abc import Mapping

from resctrlmond.resctrl.errors import ClassMismatch, NoSuchGroup, RmidsExhausted
from resctrlmond.resctrl.undo import undoing
from resctrlmond.workloads.figures.accounting import digits
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.groups import counters, creation, location, nested, placement, relocation, removal, units
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.ends import finish_again, has_ended
from resctrlmond.workloads.groups.queue_order import served_before
from resctrlmond.workloads.groups.resumption import losses_in_a_row
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import NoSuchWorkload
from resctrlmond.workloads.model.validation import is_pod_uid, merged_attributes, valid_class
from resctrlmond.workloads.model.workload import EndRule, Group, PriorRuns, State, Workload, replace
from resctrlmond.workloads.profiles.profile import Choice
from resctrlmond.workloads.records.store import Limit, Transaction


def continue_run(ctx: Context, txn: Transaction) -> Workload | None:
    """Return the workload if its run goes on, else None.

    First complete a run that is ending, record the loss of one whose group is gone, and start another run for one
    that was lost and is still claimed.
    """
    workload = txn.find()
    if workload is not None and workload.state is State.ENDING:
        workload = finish_again(ctx, txn)
    if workload is not None and workload.state.has_group:
        try:
            workload = location.follow(ctx, txn)
        except NoSuchGroup as error:
            workload = removal.lose(ctx, txn, error.message)
    if workload is not None and workload.is_interrupted:
        workload = resume(ctx, txn)
    return None if workload is None or workload.state.is_over else workload


def require_run(ctx: Context, txn: Transaction) -> Workload:
    """Return the workload, whose run is not over. Raises NoSuchWorkload."""
    workload = continue_run(ctx, txn) or txn.workload
    if workload.state.is_over:
        raise NoSuchWorkload(f"the workload {txn.key} has ended ({workload.state})")
    return workload


def new_run(ctx: Context, txn: Transaction, class_: str, *, follows_class: bool = False) -> Workload:
    """Return a workload for a new run, not saved yet. The files of the last run under the key are set aside.

    Files that its profile does not keep are removed, unless the new run continues it.
    Raises InvalidClass for a class whose name cannot be recorded.
    """
    class_, ended = valid_class(class_), txn.find()
    if ended is not None and ended.is_finished and not ended.keeps_files:
        ctx.snapshots.delete(txn.key)
    elif ended is not None:
        ctx.snapshots.set_aside(txn.key, ended.generation, ended.first.completed_ns)
    name = txn.key if is_pod_uid(txn.key) else ctx.config.settings.group_prefix + txn.key
    return Workload(
        key=txn.key,
        groups=(Group(class_=class_, name=name),),
        follows_class=follows_class,
        generation=ended.generation + 1 if ended else 1,
    )


def start_run(
    ctx: Context, txn: Transaction, workload: Workload, *, may_wait: bool = True, limit: Limit = Limit.NORMAL
) -> Workload:
    """Save the new workload, and create its group. If that fails, the run that ended last is the current one again.

    Raises what ``creation.create`` does, LimitExceeded, and RmidsExhausted if it may not wait.
    """
    ended = txn.find()
    try:
        # Queued groups get free RMIDs before new requests do.
        is_shared = units.is_overflow(workload)
        first = served_before(replace(workload, priority=0) if is_shared else workload, ctx.store.pending())
        if first is None:
            creation.create(ctx, txn, workload, workload.first, may_wait=may_wait, limit=limit)
        else:
            error = creation.queued_behind(ctx, first, workload.first)
            if not may_wait:
                raise error
            txn.save(workload.with_group(creation.waiting(ctx, workload.first, error)), limit)
    except Exception:
        with undoing(txn.key):
            removal.discard_run(ctx, txn, ended)
        raise
    return txn.workload


def resume(ctx: Context, txn: Transaction) -> Workload:
    """Start another run of an interrupted workload, with its living members, which are late.

    Raises what ``creation.create`` does. The lost run is then unchanged.
    """
    lost = txn.workload
    members = tuple(
        replace(member, late=True, folder="", reason="") for member in lost.living if not has_ended(member)
    )
    members += tuple(replace(member, folder="") for member in lost.dormant)
    places = [place for place in (placement.where(ctx, member) for member in members) if place is not None]
    prior_runs = _prior_runs(ctx, lost)
    # Its files are set aside with those of the lost run.
    inside = replace(nested.fold(ctx, txn).nested, has_gap=True)
    # Its tasks may be in another class by now. After an unmount they are all in the root class.
    class_ = places[0].class_ if places else lost.first.class_
    workload = replace(
        _as_requested(new_run(ctx, txn, class_, follows_class=lost.follows_class and not places), lost),
        members=members,
        prior_runs=prior_runs,
        nested=inside,
    )
    workload = start_run(ctx, txn, workload)
    placement.adopt(ctx, txn, workload.first)
    return txn.workload


def wait_again(ctx: Context, txn: Transaction, before: Workload, error: RmidsExhausted) -> Workload:
    """Start another run of a unit, which waits for an RMID, with the claims and members of ``before``.

    The run before has ended, and stays as it is: this one counts from when it has an RMID. If this daemon is killed
    before, the watch of units assigns the unit again. Raises NotWritten.
    """
    ended = txn.workload
    members = tuple(
        replace(member, late=True, folder="", reason="", tasks_outside=0)
        for member in before.members
        if member.is_living or member in before.dormant
    )
    try:
        run = new_run(ctx, txn, before.first.class_, follows_class=before.follows_class)
        workload = replace(_as_requested(run, before), members=members)
        return txn.save(workload.with_group(creation.waiting(ctx, workload.first, error)))
    except Exception:
        with undoing(txn.key):
            removal.discard_run(ctx, txn, ended)
        raise


def _as_requested(run: Workload, before: Workload) -> Workload:
    """Return the new run with what owners have requested for the run before, without its members."""
    return replace(
        run,
        priority=before.priority,
        profile=before.profile,
        profile_source=before.profile_source,
        events=before.events,
        keeps_files=before.keeps_files,
        pod_cgroup=before.pod_cgroup,
        claims=before.claims,
        attributes=before.attributes,
        attribute_owners=before.attribute_owners,
    )


def _prior_runs(ctx: Context, lost: Workload) -> PriorRuns:
    totals = {
        total.event.name: "" if total.number is None else digits(total.number)
        for total in counters.totals(ctx, lost, {})
    }
    reason = Reason.PRIOR_RUN.text(time=lost.first.completed_at, loss=lost.reason)
    return PriorRuns(totals, reason, losses_in_a_row(lost))


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
    return relocation.relocate(ctx, txn, class_)


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
    if not attributes:
        return workload
    others = {name for name, by in workload.attribute_owners.items() if by != owner and workload.is_claimed_by(by)}
    new = {name: value for name, value in attributes.items() if name not in others}
    merged = merged_attributes(workload.attributes, new, fitting=fitting)
    owners = {**workload.attribute_owners, **{name: owner for name in new if name in merged}}
    return replace(workload, attributes=merged, attribute_owners=owners)


def with_profile(workload: Workload, choice: Choice | None) -> Workload:
    """Return the workload with the profile that was selected last; unchanged if ``choice`` is None.

    A run that begins also gets what the profile decides for the whole run, which a reload does not change.
    """
    if choice is None:
        return workload
    if choice.profile is not None and not workload.first.created_at:
        workload = replace(workload, events=choice.profile.events, keeps_files=choice.profile.keeps_files)
    return replace(workload, profile=choice.name, profile_source=choice.source)
