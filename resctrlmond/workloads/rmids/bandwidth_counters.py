# SPDX-License-Identifier: Apache-2.0
"""Assign free bandwidth counters (AMD's ABMC) to groups that lack some, by priority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.workloads.groups import counters
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.queue_order import lacking_counters

# The subject of a failure to read the counters of the host. No workload can have this key.
ALL_COUNTERS = "bandwidth counters"


def serve(ctx: Context, guard: Callable[[str], AbstractContextManager[None]]) -> None:
    """Assign the free counters to the groups that lack some, in their order.

    No group loses a counter. ``guard`` handles the errors of one workload, by its key. Keys that a call has locked
    are skipped.
    """
    lacking = lacking_counters(ctx.store.without_counters())
    if not lacking:
        return
    with guard(ALL_COUNTERS):
        bandwidth = ctx.tree.bandwidth()
        if bandwidth.mode is not Mode.ASSIGNED:
            return
        # Counted down, because hundreds of groups may lack the one counter that is free.
        free = Counter(bandwidth.available)
        for workload, group in lacking:
            if not any(free[domain] > 0 for domain in _domains(group.unassigned)):
                continue
            with guard(workload.key), ctx.store.transaction_if_free(workload.key) as txn:
                now = txn.find() if txn is not None else None
                for _, own in lacking_counters([now] if now else []):
                    if txn is not None and own.folder == group.folder:
                        served = counters.assign_counters(ctx, txn, own)
                        free -= _domains(own.unassigned) - _domains(served.unassigned)


def _domains(unassigned: Iterable[tuple[str, str]]) -> Counter[str]:
    """Return how many counters are lacking in each domain, by its name."""
    return Counter(domain for domain, _ in unassigned)
