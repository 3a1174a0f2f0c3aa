# SPDX-License-Identifier: Apache-2.0
"""Combine the pods that owners reported with the workloads of pods, for ListPods. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from resctrlmond.api import types
from resctrlmond.workloads.model import State
from resctrlmond.workloads.pods import ContainerState, Noted, ReportedContainer, Sandbox
from resctrlmond.workloads.validation import is_pod_uid

# Prefixes of a pod's labels and annotations among the attributes of its workload.
LABEL = "pod.label."
ANNOTATION = "pod.annotation."


def pods_of(reports: Iterable[Noted], groups: Iterable[types.Group]) -> list[types.Pod]:
    """Return all reported pods and all other pods with a workload that has not ended, by namespace and name.

    A pod that was not reported (the hook created its workload, or the adapter has not reported since the daemon's
    start) has only the containers that are members of the workload, without their names.
    """
    by_key: dict[str, list[Noted]] = {}
    for report in reports:
        by_key.setdefault(report.key, []).append(report)
    by_group = {group.key: group for group in groups}
    reported = [_reported_pod(key, of_pod, by_group.get(key)) for key, of_pod in by_key.items()]
    others = [
        _grouped_pod(group)
        for key, group in by_group.items()
        if key not in by_key and _is_pod(group) and not group.state.is_over
    ]
    return sorted([*reported, *others], key=lambda pod: (pod.namespace, pod.name, pod.key))


def _is_pod(group: types.Group) -> bool:
    return "pod.uid" in group.attributes or is_pod_uid(group.key)


def _reported_pod(key: str, reports: list[Noted], group: types.Group | None) -> types.Pod:
    sandboxes = [report.sandbox for report in reports]
    # All sandboxes of a pod have the same name and namespace; labels may change.
    newest = sandboxes[-1]
    members = {member.id: member for member in group.members} if group else {}
    containers = [
        _container(container, sandbox, members.get(container.id), group)
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
        containers=[*containers, *(one for one in _members(group) if one.id not in known)],
        reason=next((sandbox.reason for sandbox in sandboxes if sandbox.reason), None),
        group=group,
    )


def _grouped_pod(group: types.Group) -> types.Pod:
    labels = {name.removeprefix(LABEL): value for name, value in group.attributes.items() if name.startswith(LABEL)}
    return types.Pod(
        key=group.key,
        name=group.attributes.get("pod.name", ""),
        namespace=group.attributes.get("pod.namespace", ""),
        labels=labels,
        sandboxes=[member.id for member in group.members if member.kind == "sandbox" and member.lives],
        containers=_members(group),
        group=group,
    )


def _members(group: types.Group | None) -> list[types.Container]:
    """Return the containers that are living members of a group."""
    if group is None:
        return []
    return [
        _container(
            ReportedContainer(id=member.id, name="", state=ContainerState.RUNNING, pid=member.pid or None),
            None,
            member,
            group,
        )
        for member in group.members
        if member.kind == "container" and member.lives
    ]


def _container(
    reported: ReportedContainer, sandbox: Sandbox | None, member: types.Member | None, group: types.Group | None
) -> types.Container:
    is_member = member is not None and member.lives
    is_counted = is_member and group is not None and group.state.has_group and not (member and member.reason)
    return types.Container(
        id=reported.id,
        name=reported.name,
        state=reported.state,
        sandbox=sandbox.id if sandbox else None,
        pid=reported.pid or (member.pid if member and is_member else 0) or None,
        monitored=is_counted,
        reason=None
        if is_counted
        else reported.reason or _reason(reported.state, sandbox, member if is_member else None, group),
    )


def _reason(
    state: ContainerState, sandbox: Sandbox | None, member: types.Member | None, group: types.Group | None
) -> str | None:
    """Return why a running container is not counted; None if the container does not run."""
    if state not in (ContainerState.RUNNING, ContainerState.PAUSED):
        return None
    if group is None:
        return (sandbox and sandbox.reason) or "its pod has no group"
    if group.state is State.PENDING or group.state.is_over:
        return group.reason or f"its pod's group is {group.state}"
    return member.reason if member and member.reason else "it is not in its pod's group"
