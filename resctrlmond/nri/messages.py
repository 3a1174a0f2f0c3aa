# SPDX-License-Identifier: Apache-2.0
"""Requests of a container runtime to its plugins, and their responses (nri, pkg/api/api.proto)."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from google.protobuf.message import DecodeError

from resctrlmond.nri import nri_pb2
from resctrlmond.workloads.model.pods import ContainerState
from resctrlmond.workloads.profiles.memory_settings import memory_annotations
from resctrlmond.workloads.profiles.profile import annotation_names

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"

# The syntax that runtimes require (nri, pkg/api/plugin.go).
PLUGIN_NAME = re.compile("[A-Za-z0-9_.+-]+")
PLUGIN_INDEX = re.compile("[0-9]{2}")

# Limits for sandboxes and containers; further ones are not monitored. By default, a kubelet runs 110 pods, and
# resctrlmond lists 2000.
MAX_SANDBOXES = 4000
MAX_MEMBERS = 40_000


class Event(enum.IntEnum):
    """The events that the adapter subscribes to, with the numbers of NRI."""

    RUN_POD_SANDBOX = 1
    STOP_POD_SANDBOX = 2
    REMOVE_POD_SANDBOX = 3
    POST_CREATE_CONTAINER = 5
    START_CONTAINER = 6
    POST_START_CONTAINER = 7
    STOP_CONTAINER = 10
    REMOVE_CONTAINER = 11


# A runtime closes the connection if it does not know a bit, and takes 0 for all events. Every version knows these
# events. The one that asks for an adjustment is left out unless it is needed: a delay there would delay the creation
# of the container.
MASK = sum(1 << (event - 1) for event in Event)
# CreateContainer, which has a method of its own in every version.
CREATE_MASK = 1 << 3

# NRI 0.12 has a method for each event. Before 0.12, and for a plugin without these methods, StateChange reports all
# events except StopContainer, which always had its own method.
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
    """A sandbox of a pod. ``uid`` is the pod's UID, which a replaced sandbox shares. ``pid`` holds its namespaces.

    ``labels`` and ``annotations`` are limited in size.
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
class Mount:
    """A mount of a container, at the path ``destination`` in it. ``source`` is not kept for those of the runtime."""

    destination: str
    type: str = ""
    options: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    """A container. ``pid`` is 0, and ``image`` "", if the runtime does not report it.

    ``set_files`` are the files of its control group that the runtime's client or another plugin sets by their names.
    ``mounts`` are known while it is created: None if there are too many of them.
    """

    id: str
    sandbox: str
    name: str = ""
    state: ContainerState = ContainerState.UNKNOWN
    pid: int = 0
    cgroups_path: str = ""
    image: str = ""
    set_files: frozenset[str] = frozenset()
    mounts: tuple[Mount, ...] | None = ()

    @property
    def is_running(self) -> bool:
        """Whether the container has processes."""
        return self.state in (ContainerState.RUNNING, ContainerState.PAUSED)


@dataclass(frozen=True, slots=True)
class Configure:
    """The runtime's first call. ``config`` is its configuration of this plugin, or ""."""

    runtime: str
    version: str
    config: str = ""


@dataclass(frozen=True, slots=True)
class Synchronize:
    """A part of the runtime's list. ``more``: another part follows."""

    pods: tuple[Pod, ...]
    containers: tuple[Container, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class EventReport:
    """An event. ``event`` is None if the adapter did not subscribe to it."""

    event: Event | None
    pod: Pod | None
    container: Container | None


@dataclass(frozen=True, slots=True)
class Creation:
    """A container that the runtime creates when it has the response."""

    pod: Pod
    container: Container


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The runtime closes the connection."""


Notification = Configure | Synchronize | EventReport | Creation | Shutdown


class Unreadable(Exception):
    """The payload does not match its method."""


def decode(method: str, payload: bytes) -> Notification | None:
    """Decode a call of the Plugin service. Return None for an unknown method. Raises Unreadable."""
    try:
        return _decode(method, payload)
    # Some builds of the library raise ValueError for a string that is not UTF-8.
    except (DecodeError, ValueError) as error:
        raise Unreadable(f"{method} with a payload of {len(payload)} bytes that cannot be read: {error}") from error


def _decode(method: str, payload: bytes) -> Notification | None:
    match method:
        case "Configure":
            configure = nri_pb2.ConfigureRequest.FromString(payload)
            return Configure(configure.runtime_name, configure.runtime_version, configure.config)
        case "Synchronize":
            chunk = nri_pb2.SynchronizeRequest.FromString(payload)
            # Decode one more than the limit to detect an excess; a message has room for two million empty entries.
            pods = islice(chunk.pods, MAX_SANDBOXES + 1)
            containers = islice(chunk.containers, MAX_MEMBERS + 1)
            return Synchronize(tuple(map(_pod, pods)), tuple(map(_container, containers)), chunk.more)
        case "StateChange":
            change = nri_pb2.StateChangeEvent.FromString(payload)
            event = Event(change.event) if change.event in _NUMBERS else None
            return _event_report(event, change)
        case "CreateContainer":
            created = nri_pb2.EventRequest.FromString(payload)
            container = replace(_container(created.container), mounts=_mounts(created.container.mounts))
            return Creation(_pod(created.pod), container)
        case "Shutdown":
            return Shutdown()
        case _ if method in METHODS:
            return _event_report(METHODS[method], nri_pb2.EventRequest.FromString(payload))
        case _:
            return None


_NUMBERS = frozenset(Event)


def _event_report(event: Event | None, request: nri_pb2.StateChangeEvent | nri_pb2.EventRequest) -> EventReport:
    return EventReport(
        event,
        _pod(request.pod) if request.HasField("pod") else None,
        _container(request.container) if request.HasField("container") else None,
    )


# Limits for each pod and container: a message holds megabytes, and there may be thousands of pods. Useful IDs, names
# and paths are shorter. A label in Kubernetes has at most 381 characters.
_TEXT_LENGTH = 4096
_MAP_LENGTH = 65536
# Kubernetes allows 256 KiB of annotations: those that choose a profile or an amount of memory must not displace each
# other. The names of profiles, and amounts, are shorter than this value.
_CHOOSING_LENGTH = 262_144
_CHOICE_LENGTH = 256
_MOUNTS = 2000
_OPTIONS = 100


# The annotations of a container with the name of its image: of CRI-O, of containerd. CRI-O copies those of the pod,
# which its user sets, to each container, and then sets its own. So its own is the only one that counts, if there is
# one. Neither lets a user replace its own one.
_IMAGE = (b"io.kubernetes.cri-o.ImageName", b"io.kubernetes.cri.image-name")


def _pod(pod: nri_pb2.PodSandbox) -> Pod:
    annotations = {_text(pair.name): _text(pair.value) for pair in islice(pod.annotations, _MAP_LENGTH)}
    return Pod(
        id=pod.id[:_TEXT_LENGTH],
        uid=pod.uid[:_TEXT_LENGTH],
        name=pod.name[:_TEXT_LENGTH],
        namespace=pod.namespace[:_TEXT_LENGTH],
        labels=_fitting(pod.labels),
        # Large annotations leave no room for others.
        annotations=_fitting(annotations)
        | _choosing(memory_annotations(annotations))
        | _choosing(annotation_names(annotations)),
        runtime_handler=pod.runtime_handler[:_TEXT_LENGTH],
        cgroup_parent=pod.linux.cgroup_parent[:_TEXT_LENGTH],
        pid=pod.pid,
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _choosing(entries: Mapping[str, str]) -> dict[str, str]:
    return _fitting({name: value[:_CHOICE_LENGTH] for name, value in entries.items()}, _CHOOSING_LENGTH)


def _fitting(entries: Mapping[str, str], left: int = _MAP_LENGTH) -> dict[str, str]:
    """Return the entries that fit into ``left`` characters, in the order of their names."""
    found: dict[str, str] = {}
    for name in sorted(entries):
        length = len(name) + len(entries[name])
        if length <= left:
            found[name] = entries[name]
            left -= length
    return found


_STATES = {
    1: ContainerState.CREATED,
    2: ContainerState.PAUSED,
    3: ContainerState.RUNNING,
    4: ContainerState.STOPPED,
}


def _container(container: nri_pb2.Container) -> Container:
    images = {pair.name: pair.value for pair in islice(container.annotations, _MAP_LENGTH) if pair.name in _IMAGE}
    return Container(
        id=container.id[:_TEXT_LENGTH],
        sandbox=container.pod_sandbox_id[:_TEXT_LENGTH],
        name=container.name[:_TEXT_LENGTH],
        state=_STATES.get(container.state, ContainerState.UNKNOWN),
        pid=container.pid,
        cgroups_path=container.linux.cgroups_path[:_TEXT_LENGTH],
        image=_text(next((images[name] for name in _IMAGE if name in images), b""))[:_TEXT_LENGTH],
        set_files=frozenset(islice(container.linux.resources.unified, _MAP_LENGTH)),
    )


def _mounts(mounts: Iterable[nri_pb2.Mount]) -> tuple[Mount, ...] | None:
    """Return the mounts; None if there are more than a container has."""
    found = list(islice(mounts, _MOUNTS + 1))
    if len(found) > _MOUNTS:
        return None
    return tuple(
        Mount(
            mount.destination[:_TEXT_LENGTH],
            mount.type[:_TEXT_LENGTH],
            tuple(option[:_TEXT_LENGTH] for option in islice(mount.options, _OPTIONS)),
        )
        for mount in found
    )


def registration(name: str, index: str) -> bytes:
    """Encode the payload of RegisterPlugin."""
    return nri_pb2.RegisterPluginRequest(plugin_name=name, plugin_idx=index).SerializeToString()


def answer(request: Notification, *, has_creations: bool = False) -> bytes:
    """Encode the response to a call: accept it, and change nothing.

    ``has_creations``: subscribe to CreateContainer too.
    """
    if isinstance(request, Configure):
        events = MASK | CREATE_MASK if has_creations else MASK
        return nri_pb2.ConfigureResponse(events=events).SerializeToString()
    if isinstance(request, Synchronize):
        return nri_pb2.SynchronizeResponse(more=request.more).SerializeToString()
    return b""


def adjustment(files: Mapping[str, str], mount: Mount | None = None) -> bytes:
    """Encode the response to CreateContainer: the text for each file of the control group, and a mount."""
    response = nri_pb2.CreateContainerResponse()
    if files:
        response.adjust.linux.resources.unified.update(files)
    if mount is not None:
        response.adjust.mounts.add(
            destination=mount.destination, type=mount.type, source=mount.source, options=mount.options
        )
    return response.SerializeToString()
