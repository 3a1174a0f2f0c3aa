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
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.validation import canonical_key, is_own_key, is_pod_uid
from resctrlmond.workloads.model.workload import CONTAINERS, Doubt, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

# The attribute with the pod of a container that is a workload of its own.
POD_UID = "pod.uid"
# Pods are remembered until there are so many, also if their containers have ended.
_MAX_PODS = 10_000


def note_pod(ctx: Context, workload: Workload) -> None:
    """Remember the pod of a container that is a workload of its own."""
    try:
        pod = canonical_key(workload.attributes.get(POD_UID, ""))
    except InvalidKey:
        return
    if workload.is_observed:
        _remember(ctx, pod, apart(workload.key))
    elif workload.profile and pod != workload.key:
        _remember(ctx, pod, by_profile(workload.key, workload.profile))


def mark_excluded(ctx: Context, txn: Transaction, why: Doubt) -> None:
    """Make a workload late, if it runs, because a container of it is not counted in it. ``why`` names the container.

    To be called before the container is observed, or starts. A pod that begins later is late too.
    """
    _remember(ctx, txn.key, why)
    workload = txn.find()
    if workload is not None and not workload.state.is_over:
        txn.save(workload.doubted(workload.first, why))


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
    if is_own_key(pod := canonical_key(pod), id_):
        return
    with suppress(ResctrlError, OSError), ctx.store.transaction(pod) as txn:
        workload = txn.find()
        known = workload.member(id_) if workload is not None else None
        if known is None or not known.is_living or target not in (known.pid, known.cgroup):
            why = error.message if isinstance(error, ResctrlError) else repr(error)
            mark_excluded(ctx, txn, _not_included(id_, f"its Assign failed, so it may run outside the group ({why})"))


def mark_separate(ctx: Context, pod: str, id_: str) -> None:
    """Make the pod late, because a container in its control group is a workload of its own. Does not raise."""
    with suppress(ResctrlError, OSError), ctx.store.transaction(canonical_key(pod)) as txn:
        mark_excluded(ctx, txn, _not_included(id_, "it runs in the control group of the pod, but not in the group"))


def apart(container: str) -> Doubt:
    """Return the doubt about a pod with a container for which its runtime has created a group."""
    return _not_included(container, "its runtime has its own group for it, so it is a workload of its own")


def by_profile(container: str, profile: str) -> Doubt:
    """Return the doubt about a pod with a container that its profile leaves out."""
    return _not_included(container, f"its profile is {profile}")


def _not_included(member: str, cause: str) -> Doubt:
    return doubt(Reason.NOT_INCLUDED, member=member, cause=cause)


def _remember(ctx: Context, pod: str, why: Doubt) -> None:
    workload = ctx.store.get(pod)
    if not is_pod_uid(pod) and workload is not None and not workload.state.is_over:
        return  # its next run, which may be another pod with the same key, does not lack the container
    excluded = ctx.memory.excluded
    excluded[pod] = why
    if len(excluded) > _MAX_PODS:
        living = {workload.attributes.get(POD_UID) for workload in ctx.store.unfinished()}
        for other in excluded.keys() - living - {pod}:
            excluded.pop(other, None)
