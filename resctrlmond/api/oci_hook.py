# SPDX-License-Identifier: Apache-2.0
"""Handle org.resctrlmon.Hook.Run: assign a container at its start, and end its member at poststop."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable

import msgspec

from resctrlmond.api import podman
from resctrlmond.api.access import Caller
from resctrlmond.api.oci_state import (
    InvalidOciState,
    OciContainer,
    State,
    claimed_container,
    claims_pod,
    container_without_pod,
    facts_of,
    parse_state,
)
from resctrlmond.api.types import RunReply, RunRequest
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchGroup, NoSuchProcess, NotRead
from resctrlmond.service.rate_limit import RateLimit
from resctrlmond.workloads.evidence.pod_cgroups import pod_cgroup
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import NotWatched
from resctrlmond.workloads.model.owners import OCI
from resctrlmond.workloads.model.validation import attribute_value
from resctrlmond.workloads.model.workload import EndRule
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.excluded import mark_rejected, mark_separate
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.read import get

log = logging.getLogger(__name__)
# A container that crashes in a loop repeats its message each time.
log.addFilter(RateLimit())

# Both run after the container's init is in its cgroup and RDT class, and before it executes the container's program
# (OCI runtime specification, config.md, "POSIX-platform Hooks"; prestart is the older name).
_BEFORE_EXEC = ("createRuntime", "prestart")
_AFTER_END = "poststop"
# Runtimes name the control group of a container after its id, with a prefix if systemd creates it.
_CGROUP_PREFIXES = ("cri-containerd", "crio", "crun", "docker", "libpod", "runc")


def key_of(request: RunRequest) -> str | None:
    """Return the key of the workload that a container's annotations name; None if the call changes no workload."""
    if request.stage not in (*_BEFORE_EXEC, _AFTER_END):
        return None
    try:
        return claimed_container(parse_state(request.state))[0].key
    except InvalidOciState:
        return None


def run(manager: Manager, request: RunRequest, caller: Caller) -> RunReply:
    """Handle one stage of a container. Raises InvalidOciState, PermissionDenied, and the errors of Assign."""
    state = parse_state(request.state)
    if request.stage in _BEFORE_EXEC:
        return _assign(manager.context, state, caller)
    if request.stage == _AFTER_END:
        return _end(manager.context, state)
    return RunReply(key=claimed_container(state)[0].key)


def _assign(ctx: Context, state: State, caller: Caller) -> RunReply:
    # The PID namespace of a hook that had given up before its connection was accepted is unknown.
    if caller.pid_namespaces or not _is_in_own_cgroup(state):
        caller.check_pid(state.pid, remedy="Run the container engine in the host's PID namespace")
    if state.pid == 0:
        raise InvalidOciState(f"the state of container {state.id} does not name a process")
    if not caller.waits():
        _check_start(state.pid, caller)
    try:
        container, own, pod = _placement(state, functools.partial(mark_separate, ctx))
    except NotRead as error:
        # The runtime starts the container all the same.
        named, _ = claimed_container(state)
        mark_rejected(ctx, named.key, named.member, state.pid, error)
        raise
    assignment = Assignment(
        key=container.key,
        owner=OCI,
        ends=EndRule.CONTAINER,
        pid=state.pid,
        member=container.member,
        kind=container.kind,
        own_cgroup=own,
        # The runtime starts the program of the init after the hook has ended. Runtimes of virtual machines
        # call the hook for a process that runs.
        late=False if state.status in ("creating", "created") else None,
        is_awaited=caller.waits,
        pod_cgroup=pod,
        sandbox=container.sandbox,
        attributes=container.attributes,
        is_from_runtime=True,
        facts=facts_of(state, container),
    )
    try:
        done = assign(ctx, assignment)
    except NotWatched as error:
        log.debug("container %s: %s", container.member, error.message)
        return RunReply(key=container.key)
    return RunReply(key=done.workload.key, state=done.workload.state, moved=done.moved.moved)


def _end(ctx: Context, state: State) -> RunReply:
    container, _ = claimed_container(state)
    ctx.unwatched.remove(container.member)
    if claims_pod(state) and not _is_member(ctx, container):
        # At its start, the control group of the container was not in that pod.
        container = container_without_pod(state)
    try:
        ended = remove_member(
            ctx, container.key, container.member, reason="its runtime reported that it has stopped", confirms=True
        )
    except NoSuchGroup:
        # Started before the daemon, or refused at its start: no member to remove.
        return RunReply(key=container.key)
    return RunReply(key=container.key, state=ended.state)


def _check_start(pid: int, caller: Caller) -> None:
    """Raise NoSuchProcess if the process started after the call: then the container's process has ended.

    While the runtime waits for its hook, it keeps the process, and the number is not used again.
    """
    found = processes.stat(pid)
    if found is None or found.start_time * 1_000_000_000 > caller.received_ns * processes.TICKS_PER_S:
        raise NoSuchProcess(f"process {pid} has ended")


def _is_in_own_cgroup(state: State) -> bool:
    """Return whether the process of the state is in a control group that runtimes name after the container.

    The process is then the container's, also if another process called the hook. Other prefixes are not accepted: the
    session of a user is "session-ID.scope".
    """
    name = re.compile(rf"(?:(?:{'|'.join(_CGROUP_PREFIXES)})-)?{re.escape(state.id)}(?:\.scope)?")
    try:
        return state.pid > 0 and any(map(name.fullmatch, cgroups.cgroup_of(state.pid).split("/")))
    except NoSuchProcess:
        return False


def _is_member(ctx: Context, container: OciContainer) -> bool:
    try:
        return get(ctx, container.key).member(container.member) is not None
    except NoSuchGroup:
        return False


def _placement(state: State, leave_out: Callable[[str, str], None]) -> tuple[OciContainer, str, str]:
    """Return a container, the control group of its own and that of its pod; "" if there is none.

    Users can write annotations, but only the kubelet creates control groups of pods. Therefore only the control group
    proves that a container belongs to a pod. Without this proof, the container is a workload with its own id, and a
    pod in whose control group it is becomes late: ``leave_out`` gets both.
    """
    container, wrong = claimed_container(state)
    cgroup = cgroups.cgroup_of(state.pid)
    pod, uid = pod_cgroup(cgroup, container.key if claims_pod(state) else "")
    if wrong:
        log.warning("%s: the container is counted as a workload of its own", wrong)
    elif claims_pod(state) and uid != container.key:
        where = f"in the control group of pod {uid}" if uid else "not in the control group of a pod"
        log.warning(
            "container %s claims to be of pod %s, but is %s (%s): it is counted as a workload of its own",
            state.id,
            container.key,
            where,
            cgroup or "/",
        )
        container = container_without_pod(state)
    if uid != container.key:
        pod = ""
        if uid:
            leave_out(uid, container.member)
    if podman.is_podman(state.annotations):
        container = _add_podman_facts(container, state, cgroup)
    if not cgroup:
        return container, "", ""
    # It is the container's own if it has no other tasks. Otherwise the container is in the control group of its
    # creator.
    others = set(cgroups.tasks(cgroup)) - {state.pid}
    if others:
        others -= set(processes.threads(state.pid))
    return container, "" if others else cgroup, pod


def _add_podman_facts(container: OciContainer, state: State, cgroup: str) -> OciContainer:
    """Return the container with its kind and name, which Podman does not write into the state."""
    if podman.is_infra(state.id, state.annotations, cgroup):
        container = msgspec.structs.replace(container, kind="sandbox")
    if "container.name" not in container.attributes and (name := podman.container_name(state.id, state.pid)):
        container = msgspec.structs.replace(
            container, attributes=container.attributes | {"container.name": attribute_value(name)}
        )
    return container
