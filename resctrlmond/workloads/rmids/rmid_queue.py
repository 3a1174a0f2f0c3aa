# SPDX-License-Identifier: Apache-2.0
"""Create the groups that wait for an RMID, in their order, as RMIDs become free or are taken from units."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager

from resctrlmond.resctrl.errors import LACKS, GroupExists, KernelRefused, NoSuchClass, PermissionDenied
from resctrlmond.workloads.groups import creation, placement, removal
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.queue_order import waiting
from resctrlmond.workloads.model.errors import ForeignGroup
from resctrlmond.workloads.model.workload import Group, GroupState
from resctrlmond.workloads.records.store import Transaction
from resctrlmond.workloads.rmids import rmid_transfer
from resctrlmond.workloads.verbs import observed

# Errors whose cause may be gone a second later.
_TEMPORARY_ERRNOS = LACKS | {errno.EIO}


def serve(ctx: Context, guard: Callable[[str], AbstractContextManager[None]]) -> None:
    """Create the waiting groups in their order, until there is no RMID for the next one.

    A unit of a lower priority than that one may give up its RMID then. ``guard`` handles the errors of one workload,
    by its key. Keys that a call has locked are skipped.
    """
    refused = ""
    for queued in waiting(ctx.store.pending()):
        key, folder = queued.workload.key, queued.group.folder
        with guard(key), ctx.store.transaction_if_free(key) as txn:
            workload = txn.find() if txn is not None else None
            for _, group in waiting([workload] if workload else []):
                if txn is None or group.folder != folder:
                    continue
                if not _create(ctx, txn, group):
                    # An RMID that becomes free meanwhile is for this group, not for a later one.
                    refused = key
                    break
                if not group.observed:
                    rmid_transfer.used(ctx)
        if refused:
            # Not within the transaction: that of a unit follows, and no call may wait for two workloads.
            queue = waiting(ctx.store.pending())
            if queue and queue[0].workload.key == refused:
                rmid_transfer.take(ctx, queue, guard)
            return


def _create(ctx: Context, txn: Transaction, group: Group) -> bool:
    """Create the group. It fails for good if waiting will not help. Return False if there is no RMID for it."""
    if group.observed:
        observed.continue_beginning(ctx, txn, group)
        return True
    try:
        created = creation.create(ctx, txn, txn.workload, group)
    except (ForeignGroup, GroupExists, NoSuchClass, KernelRefused, PermissionDenied) as error:
        if error.errno in _TEMPORARY_ERRNOS:
            raise  # the next tick tries it again
        removal.fail(ctx, txn, group, str(error))
        return True
    placement.adopt(ctx, txn, created)
    return created.state is not GroupState.PENDING
