# SPDX-License-Identifier: Apache-2.0
"""Combine the pods that owners reported with the workloads of pods, for ListPods. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resctrlmond.api import types
from resctrlmond.workloads.model.pods import ContainerState, ReportedContainer, ReportedSandbox, Sandbox
from resctrlmond.workloads.model.validation import canonical_key, is_own_key, is_pod_uid
from resctrlmond.workloads.model.workload import State

# Prefixes of a pod's labels and annotations among the attributes of its workload.
LABEL = "pod.label."
ANNOTATION = "pod.annotation."


def pods_of(reports: Iterable[ReportedSandbox], workloads: Iterable[types.Workload]) -> list[types.Pod]:
    """Return all reported pods and all other pods with a workload that has not ended, by namespace and name.

    A pod that was not reported (the hook created its workload, or the adapter has not reported since the daemon's
    start) has only the containers that are members of the workload, without their names. Those that are workloads of
    their own are listed with the pod, but not counted in its group.
    """
    by_key: dict[str, list[ReportedSandbox]] = {}
    for report in reports:
        by_key.setdefault(report.key, []).append(report)
    found, apart = dict[str, types.Workload](), dict[str, dict[str, types.Workload]]()
    for workload in workloads:
        if not _is_apart(workload):
            found[workload.key] = workload
        elif (pod := workload.attributes.get("pod.uid", "")) and not workload.state.is_over:
            apart.setdefault(canonical_key(pod) if is_pod_uid(pod) else pod, {})[workload.key] = workload
    reported = [_reported_pod(key, of_pod, found.get(key), apart.get(key, {})) for key, of_pod in by_key.items()]
    others = [
        _unreported_pod(workload, apart.get(key, {}))
        for key, workload in found.items()
        if key not in by_key and _is_pod(workload) and not workload.state.is_over
    ]
    return sorted([*reported, *others], key=lambda pod: (pod.namespace, pod.name, pod.key))


def _is_apart(workload: types.Workload) -> bool:
    """Whether a workload is one container, possibly of a pod, and not a pod."""
    is_container = any(member.id == workload.key for member in workload.members)
    return workload.observed or (is_container and bool(workload.profile) and not is_pod_uid(workload.key))


def _is_pod(workload: types.Workload) -> bool:
    is_container = any(is_own_key(workload.key, member.id) for member in workload.members)
    return "pod.uid" in workload.attributes or (is_pod_uid(workload.key) and not is_container)


def _reported_pod(
    key: str,
    reports: list[ReportedSandbox],
    workload: types.Workload | None,
    apart: Mapping[str, types.Workload],
) -> types.Pod:
    sandboxes = [report.sandbox for report in reports]
    # All sandboxes of a pod have the same name and namespace; labels may change.
    newest = sandboxes[-1]
    members = {member.id: member for member in workload.members} if workload else {}
    containers = [
        _container(container, sandbox, members.get(container.id), workload, apart)
        for sandbox in sandboxes
        for container in sandbox.containers
    ]
    known = {container.id for container in containers}
    return types.Pod(
        key=key,
        name=newest.name,
        namespace=newest.namespace,
        labels=newest.labels,
        sandboxes=[sandbox.id for sandbox in sandboxes],
        containers=[*containers, *(one for one in _members(workload, apart) if one.id not in known)],
        reason=next((sandbox.reason for sandbox in sandboxes if sandbox.reason), None),
        workload=workload,
    )


def _unreported_pod(workload: types.Workload, apart: Mapping[str, types.Workload]) -> types.Pod:
    labels = {
        name.removeprefix(LABEL): value for name, value in workload.attributes.items() if name.startswith(LABEL)
    }
    return types.Pod(
        key=workload.key,
        name=workload.attributes.get("pod.name", ""),
        namespace=workload.attributes.get("pod.namespace", ""),
        labels=labels,
        sandboxes=[member.id for member in workload.members if member.kind == "sandbox" and member.lives],
        containers=_members(workload, apart),
        workload=workload,
    )


def _members(workload: types.Workload | None, apart: Mapping[str, types.Workload]) -> list[types.Container]:
    """Return the living containers of a pod's workload, and those that are workloads of their own."""
    return [
        _container(
            ReportedContainer(id=member.id, name="", state=ContainerState.RUNNING, pid=member.pid or None),
            None,
            member if of is workload else None,
            workload,
            apart,
        )
        for of in filter(None, (workload, *apart.values()))
        for member in of.members
        if member.kind == "container" and member.lives
    ]


def _container(
    reported: ReportedContainer,
    sandbox: Sandbox | None,
    member: types.Member | None,
    workload: types.Workload | None,
    apart: Mapping[str, types.Workload],
) -> types.Container:
    if (own := apart.get(reported.id)) is not None:
        why = f"it has its own group, because of its profile {own.profile}"
        if own.observed:
            why = "observed: its runtime has its own group for it"
        return types.Container(
            id=reported.id,
            name=reported.name,
            state=reported.state,
            sandbox=sandbox.id if sandbox else None,
            pid=reported.pid or None,
            monitored=False,
            reason=f"{why}; see workload {reported.id}",
        )
    is_member = member is not None and member.lives
    is_counted = is_member and workload is not None and workload.state.has_group and not (member and member.reason)
    return types.Container(
        id=reported.id,
        name=reported.name,
        state=reported.state,
        sandbox=sandbox.id if sandbox else None,
        pid=reported.pid or (member.pid if member and is_member else 0) or None,
        monitored=is_counted,
        reason=None
        if is_counted
        else reported.reason or _reason(reported.state, sandbox, member if is_member else None, workload),
    )


def _reason(
    state: ContainerState, sandbox: Sandbox | None, member: types.Member | None, workload: types.Workload | None
) -> str | None:
    """Return why a running container is not counted; None if the container does not run."""
    if state not in (ContainerState.RUNNING, ContainerState.PAUSED):
        return None
    if workload is None:
        return (sandbox and sandbox.reason) or "its pod has no group"
    if workload.state is State.PENDING or workload.state.is_over:
        return workload.reason or f"its pod's group is {workload.state}"
    return member.reason if member and member.reason else "it is not in its pod's group"
