# SPDX-License-Identifier: Apache-2.0
"""From the state that an OCI runtime gives its hooks to the workload that it speaks of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.errors import InvalidKey
from resctrlmond.workloads.validation import attribute_value, canonical_key, check_member_id, is_pod_uid

# A pod carries up to 256 KiB of annotations and CRI-O gives them twice; the hook sends no more than this.
MAX_STATE_LENGTH = 1 << 20

# Where the runtimes put the pod's UID: CRI-O, containerd. The first one that is there counts.
_POD_UID = ("io.kubernetes.pod.uid", "io.kubernetes.cri.sandbox-uid")

# Attribute -> annotations that may hold it, CRI-O's first, then containerd's. CRI-O's
# io.kubernetes.cri-o.ContainerName is left out: it is the long "k8s_<container>_<pod>_..." name.
_ATTRIBUTES = {
    "pod.name": ("io.kubernetes.pod.name", "io.kubernetes.cri.sandbox-name"),
    "pod.namespace": ("io.kubernetes.pod.namespace", "io.kubernetes.cri.sandbox-namespace"),
    "pod.uid": _POD_UID,
    "container.name": ("io.kubernetes.container.name", "io.kubernetes.cri.container-name"),
}

# "sandbox" or "container": CRI-O, containerd. Podman does not set it.
_CONTAINER_TYPE = ("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri.container-type")


class InvalidOciState(ResctrlError):
    """What the hook was given is no OCI state, or one that names no workload."""


class State(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of a container (OCI runtime-spec, runtime.md, "State"); fields beyond these are passed over.

    ``pid`` is the container's init as the runtime's pid namespace sees it, 0 where there is none (any more).
    """

    oci_version: Annotated[str, msgspec.Meta(max_length=128)]
    id: str
    status: Annotated[str, msgspec.Meta(max_length=128)]
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    bundle: str = ""
    annotations: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Workload:
    """What a state says about the workload: its key, the container as its member, and what it is called.

    ``kind`` is "sandbox" for the container that only holds a pod's namespaces (infra, pause).
    """

    key: str
    member: str
    kind: Literal["container", "sandbox"]
    attributes: dict[str, str]


_decoder = msgspec.json.Decoder(State)


def parse_state(text: str) -> State:
    """The state from its JSON text, of at most 1 MiB. Raises InvalidOciState, with the field that is wrong."""
    if len(text) > MAX_STATE_LENGTH:
        raise InvalidOciState(f"the OCI state is longer than {MAX_STATE_LENGTH} characters")
    try:
        state = _decoder.decode(text)
        check_member_id(state.id)
    except InvalidKey as error:
        raise InvalidOciState(f"the id in the OCI state is not valid: {error.message}") from error
    # Deep nesting in a field that is passed over is a RecursionError, a lone surrogate a UnicodeEncodeError.
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidOciState(f"the OCI state cannot be read: {error}") from error
    return state


def workload_of(state: State) -> Workload:
    """The workload that the container belongs to: its pod where it has one, else the container itself.

    An annotation for the pod's UID that holds no UID is refused rather than passed over: the container would
    be counted apart from its pod without anybody being told. Raises InvalidOciState.
    """
    name, uid = _first(state, _POD_UID)
    if name and not is_pod_uid(uid):
        raise InvalidOciState(f"the annotation {name} of container {state.id} is not a pod UID: {uid[:64]!a}")
    try:
        key = canonical_key(uid if name else state.id)
    except InvalidKey as error:
        raise InvalidOciState(
            f"the container's id is not a valid key: {error.message}", remedy=error.remedy
        ) from error
    values = {attribute: _first(state, names)[1] for attribute, names in _ATTRIBUTES.items()}
    values["bundle"] = state.bundle
    attributes = {attribute: attribute_value(value) for attribute, value in values.items() if value}
    sandbox = _first(state, _CONTAINER_TYPE)[1] == "sandbox"
    return Workload(key, state.id, "sandbox" if sandbox else "container", attributes)


def own_workload(state: State) -> Workload:
    """The container as a workload of its own, whatever pod its annotations name. Raises InvalidOciState."""
    workload = workload_of(msgspec.structs.replace(state, annotations=_without(state.annotations, _POD_UID)))
    if is_pod_uid(workload.key):
        raise InvalidOciState(
            f"the container's id {state.id} has the form of a pod's UID, and cannot be the key of a container"
        )
    attributes = {name: value for name, value in workload.attributes.items() if not name.startswith("pod.")}
    return dataclasses.replace(workload, attributes=attributes)


def _without(annotations: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in annotations.items() if name not in names}


def _first(state: State, names: tuple[str, ...]) -> tuple[str, str]:
    # Name and value of the first of these annotations that is there; ("", "") if none is.
    for name in names:
        if name in state.annotations:
            return name, state.annotations[name]
    return "", ""
