# SPDX-License-Identifier: Apache-2.0
"""The verb Create."""

from __future__ import annotations

from collections.abc import Mapping

from resctrlmond.workloads.context import Context
from resctrlmond.workloads.model import EndRule, Workload
from resctrlmond.workloads.requests import FOLLOW
from resctrlmond.workloads.resume import continue_run
from resctrlmond.workloads.runs import check_has_rmid, claimed, move_empty, new_run, start_run
from resctrlmond.workloads.store import Transaction


def create(
    ctx: Context,
    txn: Transaction,
    class_: str,
    *,
    owner: str,
    ends: EndRule | None,
    attributes: Mapping[str, str],
    may_wait: bool,
    priority: int | None,
) -> Workload:
    """Create the workload without a task, or claim the existing one. See ``Manager.create``."""
    workload = continue_run(ctx, txn)
    if workload is None:
        ended = txn.find()
        workload = new_run(ctx, txn, "" if class_ == FOLLOW else class_, follows_class=class_ == FOLLOW)
        workload = claimed(workload, owner, ends, attributes, priority)
        return start_run(ctx, txn, workload, ended, may_wait=may_wait)
    if not may_wait:
        check_has_rmid(workload)
    ctx.store.check_limits(claimed(workload, owner, ends, attributes, priority))
    if class_ != FOLLOW and all(class_ != group.class_ for group in workload.groups):
        move_empty(ctx, txn, class_)
    return txn.save(claimed(txn.workload, owner, ends, attributes, priority))
