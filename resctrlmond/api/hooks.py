# SPDX-License-Identifier: Apache-2.0
"""org.resctrlmon.Hook: what an OCI runtime's hook tells, as requests to the manager."""

from __future__ import annotations

import os
import re

from resctrlmond.api.access import Caller
from resctrlmond.api.oci import InvalidState, State, Workload, parse_state, workload_of
from resctrlmond.api.types import Reply, Request
from resctrlmond.groups.keys import canonical_key, is_pod_uid
from resctrlmond.groups.manager import Manager
from resctrlmond.groups.plan import OCI
from resctrlmond.groups.record import EndRule
from resctrlmond.groups.target import Assignment
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchGroup, PermissionDenied

# Both run after the container's init is in its cgroup and RDT class, and before it executes the container's program
# (OCI runtime specification, config.md, "POSIX-platform Hooks"; prestart is the older name).
_BEFORE_EXEC = ("createRuntime", "prestart")
_AFTER_END = "poststop"


class RunRequest(Request, frozen=True, kw_only=True):
    """Run: the hook's stage, and the container's state as the runtime gave it."""

    stage: str
    state: str


class RunReply(Reply, frozen=True, kw_only=True):
    """Which workload the hook was for, its state after it, and how many tasks were moved."""

    key: str | None = None
    state: str | None = None
    moved: int | None = None


def run(manager: Manager, request: RunRequest, caller: Caller) -> RunReply:
    """Serve one hook. Raises InvalidState, PermissionDenied, and what Assign does."""
    state = parse_state(request.state)
    workload = workload_of(state)
    if request.stage in _BEFORE_EXEC:
        return _assign(manager, state, workload, caller)
    if request.stage == _AFTER_END:
        return _end(manager, workload)
    return RunReply(key=workload.key)


def _assign(manager: Manager, state: State, workload: Workload, caller: Caller) -> RunReply:
    if processes.pid_namespaces(caller.pid) != 1:
        raise PermissionDenied(
            f"the hook of container {state.id} runs in another PID namespace: its pid {state.pid} means nothing here",
            remedy="Run the container engine in the host's PID namespace",
        )
    if state.pid == 0:
        raise InvalidState(f"the state of container {state.id} names no process")
    own, pod = _placement(state.pid, workload)
    done = manager.assign(
        Assignment(
            key=workload.key,
            owner=OCI,
            ends=EndRule.CONTAINER,
            pid=state.pid,
            member=workload.member,
            kind=workload.kind,
            own_cgroup=own,
            # The runtime holds the container's init until its hook has ended.
            late=False,
            pod_cgroup=pod,
            attributes=workload.attributes,
            is_from_runtime=True,
        )
    )
    return RunReply(key=workload.key, state=done.record.state, moved=done.moved.moved)


def _end(manager: Manager, workload: Workload) -> RunReply:
    try:
        record = manager.remove_member(
            workload.key, workload.member, reason="its runtime says it has stopped", confirms=True
        )
    except NoSuchGroup:
        # Started before us, or refused at its start: there is nothing to end.
        return RunReply(key=workload.key)
    return RunReply(key=workload.key, state=record.state)


def _placement(pid: int, workload: Workload) -> tuple[str, str]:
    """The control group that is the container's own, and its pod's; "" each where there is none."""
    cgroup = cgroups.cgroup_of(pid)
    if not cgroup:
        return "", ""
    # Its own, if nobody else is in it: without a cgroup of its own a container sits in its maker's.
    others = set(cgroups.tasks(cgroup)).difference(processes.threads(pid))
    pod, uid = pod_cgroup(cgroup)
    if not is_pod_uid(workload.key):
        pod = ""
    elif uid and uid != workload.key:
        # Annotations may be a user's, the place in the tree of control groups is the kubelet's: nobody is to be
        # counted for another's pod.
        raise InvalidState(
            f"container {workload.member} says that it is of pod {workload.key}, its control group is pod {uid}'s",
            path=cgroup,
        )
    return "" if others else cgroup, pod


# The kubelet's names for a pod's control group: "pod<uid>" (cgroupfs), "kubepods-burstable-pod<uid>.slice" with
# underscores for dashes (systemd); the UIDs of static pods have neither.
_POD_CGROUP = re.compile(r"(?:.*[^0-9a-z])?pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:\.slice)?")


def pod_cgroup(cgroup: str) -> tuple[str, str]:
    """The ancestor of a container's control group that is named for a pod, and that pod's UID; ("", "") if none."""
    while (parent := os.path.dirname(cgroup)) != cgroup:
        cgroup = parent
        if named := _POD_CGROUP.fullmatch(os.path.basename(cgroup)):
            return cgroup, canonical_key(re.sub("[-_]", "", named[1]))
    return "", ""
