# SPDX-License-Identifier: Apache-2.0
"""The verb Create: create a workload's group without a task."""

from __future__ import annotations

from collections.abc import Mapping

from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.runs import (
    check_has_rmid,
    claimed,
    continue_run,
    move_empty,
    new_run,
    start_run,
    with_profile,
)
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.states import FOLLOW
from resctrlmond.workloads.model.validation import canonical_key, check_claim, valid_class
from resctrlmond.workloads.model.workload import EndRule, Workload
from resctrlmond.workloads.records.store import Limit
from resctrlmond.workloads.verbs import profiled


def create(
    ctx: Context,
    key: str,
    *,
    owner: str,
    ends: EndRule | None = None,
    class_: str = FOLLOW,
    attributes: Mapping[str, str] | None = None,
    may_wait: bool = True,
    priority: int | None = None,
    facts: Facts | None = None,
) -> Workload:
    """Create the workload's group without a task, or find it; ``owner`` claims it, and the claim ends by the rule
    ``ends`` (None: EndRule.RELEASE for a new claim, unchanged for an existing one).

    With class FOLLOW the group is created in the root class and moves to the class of its first task. If no RMID
    is free, the workload is ``pending``; RmidsExhausted only if not ``may_wait``. Pending workloads get an RMID
    in the order of ``priority`` (-1000 to 1000, 0 at first), the highest first. ``facts`` are those of a pod by
    which its profile is selected, None for no selection. Raises NotWatched, InvalidKey, InvalidClass,
    NoSuchClass, ForeignGroup, ClassMismatch, KernelRefused, NotMounted, NotWritten, InvalidAttributes,
    LimitExceeded.
    """
    key = canonical_key(key)
    check_claim(owner, attributes or {}, priority)
    class_ = class_ if class_ == FOLLOW else valid_class(class_)
    choice = profiled.choose_for_pod(ctx, key, owner, facts)
    priority = profiled.priority_of(ctx, key, choice) if priority is None else priority
    with ctx.store.transaction(key) as txn:
        workload = continue_run(ctx, txn)
        if workload is None:
            workload = new_run(ctx, txn, "" if class_ == FOLLOW else class_, follows_class=class_ == FOLLOW)
            workload = with_profile(claimed(workload, owner, ends, attributes, priority), choice)
            return start_run(ctx, txn, workload, may_wait=may_wait)
        if not may_wait:
            check_has_rmid(workload)
        if class_ != FOLLOW and all(class_ != group.class_ for group in workload.groups):
            # Before the move, which is not undone.
            ctx.store.check_limits(claimed(workload, owner, ends, attributes, priority))
            move_empty(ctx, txn, class_)
        workload = with_profile(claimed(txn.workload, owner, ends, attributes, priority), choice)
        return txn.save(workload, Limit.NORMAL)
