# SPDX-License-Identifier: Apache-2.0
"""The verbs AddMember and RemoveMember."""

from __future__ import annotations

from resctrlmond.workloads.groups import ends, placement
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.runs import claimed, require_run
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.validation import canonical_key, check_member_id, check_word, reason_text
from resctrlmond.workloads.model.workload import Member, Workload, replace
from resctrlmond.workloads.records.store import Limit


def add_member(ctx: Context, key: str, member: str, *, owner: str, kind: str = "sandbox") -> Workload:
    """Add a member that has no task of its own. A living member that has tasks is not changed.

    Raises NoSuchWorkload, LimitExceeded.
    """
    key = canonical_key(key)
    check_member_id(member)
    check_word("claim", owner)
    check_word("kind", kind)
    with ctx.store.transaction(key) as txn:
        workload = require_run(ctx, txn)
        known = workload.member(member)
        if known is None or not (known.is_living and known.has_tasks):
            workload = workload.with_member(
                Member(id=member, kind=kind, owner=owner, started_at=utc_now(), late=False)
            )
        return txn.save(claimed(workload, owner), Limit.NORMAL)


def remove_member(
    ctx: Context, key: str, member: str, *, reason: str = "removed", confirms: bool = False
) -> Workload:
    """End a member. A member that is not known, or that has ended, is not an error.

    ``confirms``: the caller only confirms the end of the member's first process. If that runs, the call is about
    an earlier process of the same id, and ends nothing. Raises NoSuchWorkload.
    """
    key = canonical_key(key)
    with ctx.store.transaction(key) as txn:
        # Before record_ends(), which may end the workload: tasks of another dormant member may have come back.
        placement.wake_dormant(ctx, txn)
        workload = txn.workload
        ending = workload.member(member)
        if ending is not None and ending.is_living and not (confirms and ends.runs(ending)):
            txn.save(ends.without_member(workload, ending, reason_text(reason)))
        elif ending is not None and ending.dormant:
            txn.save(workload.with_member(replace(ending, dormant=False, reason=reason_text(reason))))
        return ends.record_ends(ctx, txn) or workload
