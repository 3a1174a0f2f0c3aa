# SPDX-License-Identifier: Apache-2.0
"""What a container runtime tells its plugins, and what it is answered (nri, pkg/api/api.proto)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from google.protobuf.message import DecodeError

from resctrlmond.groups.inventory import ContainerState
from resctrlmond.nri import nri_pb2

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"


# What is kept of all that a runtime tells; what comes beyond is not monitored. A kubelet runs 110 pods unless told
# otherwise, and resctrlmond lists 2000.
MAX_SANDBOXES = 4000
MAX_MEMBERS = 40_000


class Event(enum.IntEnum):
    """The events that we have use for, by NRI's numbers."""

    RUN_POD_SANDBOX = 1
    STOP_POD_SANDBOX = 2
    REMOVE_POD_SANDBOX = 3
    POST_CREATE_CONTAINER = 5
    START_CONTAINER = 6
    POST_START_CONTAINER = 7
    STOP_CONTAINER = 10
    REMOVE_CONTAINER = 11


# A runtime closes the connection for one bit that it does not know; it takes 0 for all events. These are known to
# every version. Of what asks for an adjustment we want nothing: a delay there would hold up the creation.
MASK = sum(1 << (event - 1) for event in Event)

# NRI 0.12 has a method for each of them; before, and from then on for a plugin that has not, StateChange tells them,
# but for StopContainer, which always had its own.
METHODS = {
    "RunPodSandbox": Event.RUN_POD_SANDBOX,
    "StopPodSandbox": Event.STOP_POD_SANDBOX,
    "RemovePodSandbox": Event.REMOVE_POD_SANDBOX,
    "PostCreateContainer": Event.POST_CREATE_CONTAINER,
    "StartContainer": Event.START_CONTAINER,
    "PostStartContainer": Event.POST_START_CONTAINER,
    "StopContainer": Event.STOP_CONTAINER,
    "RemoveContainer": Event.REMOVE_CONTAINER,
}


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's sandbox: ``uid`` is the pod's own, which a replaced sandbox shares. ``pid`` holds its namespaces.

    ``labels`` and ``annotations`` are as many as there is room for.
    """

    id: str
    uid: str = ""
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    runtime_handler: str = ""
    cgroup_parent: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Container:
    """A container; ``pid`` is 0 where the runtime does not tell it."""

    id: str
    sandbox: str
    name: str = ""
    state: ContainerState = ContainerState.UNKNOWN
    pid: int = 0
    cgroups_path: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it has processes."""
        return self.state in (ContainerState.RUNNING, ContainerState.PAUSED)


@dataclass(frozen=True, slots=True)
class Configure:
    """The runtime introduces itself; ``config`` is what it has to configure us with, "" for nothing."""

    runtime: str
    version: str
    config: str = ""


@dataclass(frozen=True, slots=True)
class Synchronize:
    """A part of all that there is; ``more`` parts follow."""

    pods: tuple[Pod, ...]
    containers: tuple[Container, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Happened:
    """An event; ``event`` is None for one that we did not ask for."""

    event: Event | None
    pod: Pod | None
    container: Container | None


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The runtime says goodbye."""


Told = Configure | Synchronize | Happened | Shutdown


class Unreadable(Exception):
    """The payload is not what its method says."""


def decode(method: str, payload: bytes) -> Told | None:
    """What a call of the Plugin service tells; None for a method that we do not have. Raises Unreadable."""
    try:
        return _decode(method, payload)
    # What the text of a string has against UTF-8 is a ValueError in some builds of the library.
    except (DecodeError, ValueError) as error:
        raise Unreadable(f"{method} with a payload of {len(payload)} bytes that cannot be read: {error}") from error


def _decode(method: str, payload: bytes) -> Told | None:
    match method:
        case "Configure":
            configure = nri_pb2.ConfigureRequest.FromString(payload)
            return Configure(configure.runtime_name, configure.runtime_version, configure.config)
        case "Synchronize":
            chunk = nri_pb2.SynchronizeRequest.FromString(payload)
            # One more of each says that there are too many; a message has room for two million that are empty.
            pods = islice(chunk.pods, MAX_SANDBOXES + 1)
            containers = islice(chunk.containers, MAX_MEMBERS + 1)
            return Synchronize(tuple(map(_pod, pods)), tuple(map(_container, containers)), chunk.more)
        case "StateChange":
            change = nri_pb2.StateChangeEvent.FromString(payload)
            event = Event(change.event) if change.event in _NUMBERS else None
            return _happened(event, change)
        case "Shutdown":
            return Shutdown()
        case _ if method in METHODS:
            return _happened(METHODS[method], nri_pb2.EventRequest.FromString(payload))
        case _:
            return None


_NUMBERS = frozenset(Event)


def _happened(event: Event | None, told: nri_pb2.StateChangeEvent | nri_pb2.EventRequest) -> Happened:
    return Happened(
        event,
        _pod(told.pod) if told.HasField("pod") else None,
        _container(told.container) if told.HasField("container") else None,
    )


# What is kept of a pod or a container is bounded: a message holds megabytes, and there may be thousands of them. No
# id, name or path that is of use is longer; labels have 381 characters each in Kubernetes.
_TEXT_LENGTH = 4096
_MAP_LENGTH = 65536


def _pod(pod: nri_pb2.PodSandbox) -> Pod:
    return Pod(
        id=pod.id[:_TEXT_LENGTH],
        uid=pod.uid[:_TEXT_LENGTH],
        name=pod.name[:_TEXT_LENGTH],
        namespace=pod.namespace[:_TEXT_LENGTH],
        labels=_fitting(pod.labels),
        annotations=_fitting({_text(one.name): _text(one.value) for one in islice(pod.annotations, _MAP_LENGTH)}),
        runtime_handler=pod.runtime_handler[:_TEXT_LENGTH],
        cgroup_parent=pod.linux.cgroup_parent[:_TEXT_LENGTH],
        pid=pod.pid,
    )


def _text(told: bytes) -> str:
    return told.decode(errors="replace")


def _fitting(told: Mapping[str, str]) -> dict[str, str]:
    """As many as there is room for, in the order of their names."""
    found: dict[str, str] = {}
    left = _MAP_LENGTH
    for name in sorted(told):
        length = len(name) + len(told[name])
        if length <= left:
            found[name] = told[name]
            left -= length
    return found


_STATES = {
    1: ContainerState.CREATED,
    2: ContainerState.PAUSED,
    3: ContainerState.RUNNING,
    4: ContainerState.STOPPED,
}


def _container(told: nri_pb2.Container) -> Container:
    return Container(
        id=told.id[:_TEXT_LENGTH],
        sandbox=told.pod_sandbox_id[:_TEXT_LENGTH],
        name=told.name[:_TEXT_LENGTH],
        state=_STATES.get(told.state, ContainerState.UNKNOWN),
        pid=told.pid,
        cgroups_path=told.linux.cgroups_path[:_TEXT_LENGTH],
    )


def registration(name: str, index: str) -> bytes:
    """The payload of RegisterPlugin."""
    return nri_pb2.RegisterPluginRequest(plugin_name=name, plugin_idx=index).SerializeToString()


def answer(told: Told) -> bytes:
    """The payload of the answer: that we go along, and change nothing."""
    if isinstance(told, Configure):
        return nri_pb2.ConfigureResponse(events=MASK).SerializeToString()
    if isinstance(told, Synchronize):
        return nri_pb2.SynchronizeResponse(more=told.more).SerializeToString()
    return b""
