# SPDX-License-Identifier: Apache-2.0
"""Start another run of a workload whose group was lost. It keeps what was used before."""

from __future__ import annotations

from resctrlmond.resctrl.errors import NoSuchGroup
from resctrlmond.workloads import group_ops, placement
from resctrlmond.workloads.accounting import digits
from resctrlmond.workloads.context import Context
from resctrlmond.workloads.ends import finish_again, has_ended
from resctrlmond.workloads.model import PriorRuns, State, Workload, replace
from resctrlmond.workloads.plan import losses_in_a_row
from resctrlmond.workloads.runs import new_run, start_run
from resctrlmond.workloads.store import Transaction


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
            workload = group_ops.follow(ctx, txn)
        except NoSuchGroup as error:
            workload = group_ops.lose(ctx, txn, error.message)
    if workload is not None and workload.is_interrupted:
        workload = resume(ctx, txn)
    return None if workload is None or workload.state.is_over else workload


def require_run(ctx: Context, txn: Transaction) -> Workload:
    """Return the workload, whose run is not over. Raises NoSuchGroup."""
    workload = continue_run(ctx, txn) or txn.workload
    if workload.state.is_over:
        raise NoSuchGroup(f"the workload {txn.key} has ended ({workload.state})")
    return workload


def resume(ctx: Context, txn: Transaction) -> Workload:
    """Start another run of an interrupted workload, with its living members, which are late.

    Raises what ``group_ops.create`` does. The lost run is then unchanged.
    """
    lost = txn.workload
    members = tuple(
        replace(member, late=True, folder="", reason="") for member in lost.living if not has_ended(member)
    )
    members += tuple(replace(member, folder="") for member in lost.dormant)
    places = [place for place in (placement.where(ctx, member) for member in members) if place is not None]
    prior_runs = _prior_runs(ctx, lost)
    # Its tasks may be in another class by now. After an unmount they are all in the root class.
    class_ = places[0].class_ if places else lost.first.class_
    workload = replace(
        new_run(ctx, txn, class_, follows_class=lost.follows_class and not places),
        priority=lost.priority,
        pod_cgroup=lost.pod_cgroup,
        claims=lost.claims,
        members=members,
        attributes=lost.attributes,
        attribute_owners=lost.attribute_owners,
        prior_runs=prior_runs,
    )
    workload = start_run(ctx, txn, workload, lost)
    placement.adopt(ctx, txn, workload.first)
    return txn.workload


def _prior_runs(ctx: Context, lost: Workload) -> PriorRuns:
    totals = {
        total.event.name: "" if total.number is None else digits(total.number)
        for total in group_ops.totals(ctx, lost, {})
    }
    lost_at = lost.first.completed_at
    reason = f"its group was lost at {lost_at} ({lost.reason}), and its use until it had a new one is not counted"
    return PriorRuns(totals, reason, losses_in_a_row(lost))
