# SPDX-License-Identifier: Apache-2.0
"""Pods with their containers and groups: what owners told of them, and what the groups themselves tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from resctrlmond.api import types
from resctrlmond.workloads.model import State
from resctrlmond.workloads.pods import ContainerState, Noted, ReportedContainer, Sandbox
from resctrlmond.workloads.validation import is_pod_uid

# How adapters call a pod's label, and its annotation, among the attributes of its workload.
LABEL = "pod.label."
ANNOTATION = "pod.annotation."


def pods_of(noted: Iterable[Noted], groups: Iterable[types.Group]) -> list[types.Pod]:
    """Every pod that somebody told of, or that has a group which is not over; in order of namespace and name.

    A pod that only its group tells of (the hook's, or an adapter's that has not told since the daemon's start) has of
    its containers those that are in the group, without their names.
    """
    by_key: dict[str, list[Noted]] = {}
    for one in noted:
        by_key.setdefault(one.key, []).append(one)
    standing = {group.key: group for group in groups}
    told = [_noted_pod(key, of_pod, standing.get(key)) for key, of_pod in by_key.items()]
    others = [
        _grouped_pod(group)
        for key, group in standing.items()
        if key not in by_key and _is_pod(group) and not group.state.is_over
    ]
    return sorted([*told, *others], key=lambda pod: (pod.namespace, pod.name, pod.key))


def _is_pod(group: types.Group) -> bool:
    return "pod.uid" in group.attributes or is_pod_uid(group.key)


def _noted_pod(key: str, noted: list[Noted], group: types.Group | None) -> types.Pod:
    sandboxes = [one.sandbox for one in noted]
    # What a replaced sandbox was called, the newest is called too.
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
    """The containers that a group has as its living members."""
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
    noted: ReportedContainer, sandbox: Sandbox | None, member: types.Member | None, group: types.Group | None
) -> types.Container:
    is_member = member is not None and member.lives
    is_counted = is_member and group is not None and group.state.has_group and not (member and member.reason)
    return types.Container(
        id=noted.id,
        name=noted.name,
        state=noted.state,
        sandbox=sandbox.id if sandbox else None,
        pid=noted.pid or (member.pid if member and is_member else 0) or None,
        monitored=is_counted,
        reason=None
        if is_counted
        else noted.reason or _why_not(noted.state, sandbox, member if is_member else None, group),
    )


def _why_not(
    state: ContainerState, sandbox: Sandbox | None, member: types.Member | None, group: types.Group | None
) -> str | None:
    """Why a container that runs is not counted; None for one that need not be."""
    if state not in (ContainerState.RUNNING, ContainerState.PAUSED):
        return None
    if group is None:
        return (sandbox and sandbox.reason) or "its pod has no group"
    if group.state is State.PENDING or group.state.is_over:
        return group.reason or f"its pod's group is {group.state}"
    return member.reason if member and member.reason else "it is not in its pod's group"
