# SPDX-License-Identifier: Apache-2.0
"""Containers of a pod that are not counted in its group. Such a pod is not exact.

A container has no group because of its profile, is a workload of its own, or its Assign failed. ``Memory.excluded``
has the pods of those that this daemon was asked about. What others use in the control group of a pod, the witness
shows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from resctrlmond.resctrl.cgroups import NoSuchCgroup
from resctrlmond.resctrl.errors import NoSuchProcess, ProcessChanged, ResctrlError
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key, is_pod_uid
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.profiles.requests import CONTAINERS, Assignment
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

# The attribute with the pod of a container that is a workload of its own.
POD_UID = "pod.uid"
# Pods are remembered until there are so many, also if their containers have ended.
_MAX_PODS = 10_000


def note_pod(ctx: Context, workload: Workload) -> None:
    """Remember the pod of a container that is a workload of its own."""
    if workload.is_observed:
        _remember(ctx, workload.attributes.get(POD_UID, ""), Reason.COUNTED_APART.text(member=workload.key))
    elif workload.profile and not is_pod_uid(workload.key):
        why = Reason.EXCLUDED.text(member=workload.key, profile=workload.profile)
        _remember(ctx, workload.attributes.get(POD_UID, ""), why)


def mark_excluded(ctx: Context, txn: Transaction, why: str) -> None:
    """Make a workload late, if it runs, because a container of it is not counted in it. ``why`` names the container.

    To be called before the container is observed, or starts. A pod that begins later is late too.
    """
    _remember(ctx, txn.key, why)
    workload = txn.find()
    if workload is not None and not workload.state.is_over:
        txn.save(workload.downgraded(workload.first, Quality.LATE, why))


@contextmanager
def marking_rejected(ctx: Context, assignment: Assignment) -> Iterator[None]:
    """Make the pod late if the block, which assigns a container of it, raises: the container may run outside.

    Not if the process of the container has ended, or if the container is in the group since an earlier Assign.
    """
    try:
        yield
    except (NoSuchProcess, ProcessChanged, NoSuchCgroup):
        raise
    except Exception as error:
        if assignment.kind in CONTAINERS and assignment.member is not None:
            mark_rejected(ctx, assignment.key, assignment.member, assignment.pid or assignment.cgroup, error)
        raise


def mark_rejected(ctx: Context, pod: str, id_: str, target: int | str | None, error: Exception) -> None:
    """Make the pod late, because its container was not assigned. Does not raise.

    Not if the container, with ``target`` as its process or control group, is in the group since an earlier Assign.
    """
    if not is_pod_uid(pod):
        return
    with suppress(ResctrlError, OSError), ctx.store.transaction(canonical_key(pod)) as txn:
        workload = txn.find()
        known = workload.member(id_) if workload is not None else None
        if known is None or not known.is_living or target not in (known.pid, known.cgroup):
            why = error.message if isinstance(error, ResctrlError) else repr(error)
            mark_excluded(ctx, txn, Reason.REJECTED_CONTAINER.text(member=id_, error=why))


def mark_separate(ctx: Context, pod: str, id_: str) -> None:
    """Make the pod late, because a container in its control group is a workload of its own. Does not raise."""
    with suppress(ResctrlError, OSError), ctx.store.transaction(canonical_key(pod)) as txn:
        mark_excluded(ctx, txn, Reason.LEFT_OUT.text(member=id_))


def _remember(ctx: Context, pod: str, why: str) -> None:
    if not is_pod_uid(pod):
        return
    excluded, pod = ctx.memory.excluded, canonical_key(pod)
    excluded[pod] = why
    if len(excluded) > _MAX_PODS:
        living = {workload.attributes.get(POD_UID) for workload in ctx.store.unfinished()}
        for other in excluded.keys() - living - {pod}:
            excluded.pop(other, None)
