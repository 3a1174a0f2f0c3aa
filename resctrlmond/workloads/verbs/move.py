# SPDX-License-Identifier: Apache-2.0
"""The verb Move: move a workload to another class."""

from __future__ import annotations

from resctrlmond.workloads.groups import relocation
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.runs import require_run
from resctrlmond.workloads.model.validation import canonical_key, valid_class
from resctrlmond.workloads.model.workload import Workload


def move(ctx: Context, key: str, class_: str) -> Workload:
    """Move the workload to another class; its RMID and counters stay. Raises NoSuchClass, KernelRefused."""
    key, class_ = canonical_key(key), valid_class(class_)
    with ctx.store.transaction(key) as txn:
        workload = require_run(ctx, txn)
        if not ctx.tree.has_class(class_):
            raise ctx.tree.no_such_class(class_)
        if workload.first.class_ == class_:
            return workload
        return relocation.relocate(ctx, txn, class_)
