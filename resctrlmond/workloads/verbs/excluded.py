# SPDX-License-Identifier: Apache-2.0
"""Containers of a pod that are not counted in its group. Such a pod is not exact.

A container has no group because of its profile, is a workload of its own, or its Assign failed. ``Memory.excluded``
has the pods of those that this daemon was asked about. It is lost with the daemon, so the control group of a pod
shows earlier containers.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.cgroups import NoSuchCgroup
from resctrlmond.resctrl.errors import LACKS, NoSuchProcess, NotRead, ProcessChanged, ResctrlError
from resctrlmond.resctrl.processes import Process
from resctrlmond.workloads.evidence.pod_cgroups import containers_in, pod_cgroup
from resctrlmond.workloads.evidence.pod_times import cgroup_of_pod, is_exact_pod
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.placement import outside_of
from resctrlmond.workloads.groups.target import Target
from resctrlmond.workloads.model.clock import boot_ns
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key, is_pod_uid
from resctrlmond.workloads.model.workload import Member, Workload
from resctrlmond.workloads.profiles.requests import CONTAINERS, Assignment
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

# The attribute with the pod of a container that is a workload of its own.
POD_UID = "pod.uid"
# Pods are remembered until there are so many, also if their containers have ended.
_MAX_PODS = 10_000
# A hook gives up long before, and its call, if it has reached the daemon, was served.
_UNASSIGNED_S = 60.0


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


def with_excluded(
    ctx: Context, txn: Transaction, workload: Workload | None, target: Target, assignment: Assignment
) -> Workload | None:
    """Return the workload, late if it is a pod and a container that runs in its control group is not counted in it.

    To be called when a container of the pod is assigned; ``workload`` is the pod, None if no run goes on. Only
    containers that were started before ``Memory.since_ns``, or _UNASSIGNED_S ago, are searched: ``Memory.excluded``
    has those of later calls, and a container that is being created has not run yet. Raises NoSuchProcess, NotRead.
    """
    is_exact = workload is None or workload.first.baseline is Quality.EXACT
    if not is_exact or not is_pod_uid(txn.key) or txn.key in ctx.memory.excluded:
        return workload
    own = assignment.cgroup or assignment.own_cgroup
    if not own and target.process is not None:
        own = cgroups.cgroup_of(target.process.pid)
    before_ns = max(ctx.memory.since_ns, _unassigned_before_ns())
    found = _left_out(ctx, txn.key, workload, [own], assignment.member or "", before_ns=before_ns)
    if found:
        mark_excluded(ctx, txn, Reason.LEFT_OUT.text(member=found))
        return workload and txn.workload
    return workload


def mark_left_out(ctx: Context, txn: Transaction) -> None:
    """Make a pod late if a container runs in its control group, or may have run, and is not counted in it.

    To be called at the start, after the tasks of the members were moved. A container that is being created makes its
    pod late too: its hook may have failed before this daemon ran, and then no later call names the container.
    """
    workload = txn.find()
    if workload is None or not is_exact_pod(workload):
        return
    why_earlier = ""
    try:
        why = _why_left_out(ctx, txn.key, workload)
        why_earlier = ctx.pod_times.why_late(workload)
    except NotRead as error:
        why = Reason.CANNOT_FIND_CONTAINERS.text(error=error)
    if why:
        mark_excluded(ctx, txn, why)
    elif why_earlier:
        log.info("%s: %s", txn.key, why_earlier)
        txn.save(workload.downgraded(workload.first, Quality.LATE, why_earlier))


def mark_unassigned(ctx: Context, txn: Transaction) -> bool:
    """Make a pod late if a container that is not counted in it has run in its control group for _UNASSIGNED_S.

    To be called by each sweep: a hook that is killed before its call leaves a container that no call names. Return
    whether the next sweep must search again, although no task has run since: there is such a container.
    """
    workload = txn.find()
    if workload is None or not is_exact_pod(workload):
        return False
    try:
        # First of any age, because most pods have none.
        if not _why_left_out(ctx, txn.key, workload):
            return False
        why = _why_left_out(ctx, txn.key, workload, before_ns=_unassigned_before_ns())
    except NotRead as error:
        if error.errno in LACKS:
            return True
        why = Reason.CANNOT_FIND_CONTAINERS.text(error=error)
    if why:
        mark_excluded(ctx, txn, why)
    return True


def _unassigned_before_ns() -> float:
    """Return when a container was started, at the latest, of which no hook will call any more."""
    return boot_ns() - _UNASSIGNED_S * 1e9


def _why_left_out(ctx: Context, key: str, workload: Workload, *, before_ns: float = math.inf) -> str:
    """Return the reason for which the pod is late; "" for none. Raises NotRead."""
    # A path in the control group of the pod stands for a container whose own is not known.
    pod = cgroup_of_pod(workload)
    paths = {pod and os.path.join(pod, "any"), *map(_cgroup_of, workload.living)}
    found = _left_out(ctx, key, workload, paths - {""}, before_ns=before_ns)
    return Reason.LEFT_OUT.text(member=found) if found else ""


def _cgroup_of(member: Member) -> str:
    """Return the control group of a member; "" if it is not known."""
    if member.cgroup or not member.pid:
        return member.cgroup
    with suppress(NoSuchProcess), Process.open(member.pid, member.start_time) as process:
        return cgroups.cgroup_of(process.pid)
    return ""


def _left_out(
    ctx: Context,
    key: str,
    workload: Workload | None,
    own: Collection[str],
    starting: str = "",
    *,
    before_ns: float = math.inf,
) -> str:
    """Return the id of a container that runs in the control group of a pod, but not in its group; "" if none does.

    ``own`` are control groups of containers of the pod, ``starting`` is the id of a container that starts. Only
    threads that were started before ``before_ns`` are searched. Raises NotRead.
    """
    members = workload.living if workload else ()
    paths = {*own, *(member.cgroup for member in members)}
    ids = {starting, *(member.id for member in members)}
    pods = {pod for pod, uid in map(pod_cgroup, own) if uid == canonical_key(key)}
    for pod in sorted(pods):
        for name, path in containers_in(pod, ids).items():
            if path not in paths and outside_of(ctx, workload, _started_before(cgroups.tasks(path), before_ns)):
                return name
    return ""


def _started_before(tids: Collection[int], time_ns: float) -> list[int]:
    """Return the threads that were started before a time of ``clock.boot_ns``, or in the same tick."""
    found = ((tid, processes.stat(tid)) for tid in tids)
    return [
        tid
        for tid, stat in found
        if stat is not None and stat.start_time * 1_000_000_000 <= time_ns * processes.TICKS_PER_S
    ]


def _remember(ctx: Context, pod: str, why: str) -> None:
    if not is_pod_uid(pod):
        return
    excluded, pod = ctx.memory.excluded, canonical_key(pod)
    excluded[pod] = why
    if len(excluded) > _MAX_PODS:
        ctx.memory.since_ns = boot_ns()
        living = {workload.attributes.get(POD_UID) for workload in ctx.store.unfinished()}
        for other in excluded.keys() - living - {pod}:
            excluded.pop(other, None)
