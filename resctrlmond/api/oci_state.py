# SPDX-License-Identifier: Apache-2.0
"""Parse the container state that an OCI runtime passes to its hooks, and derive the key of its workload."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from resctrlmond.api import podman
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.validation import attribute_value, canonical_key, check_member_id
from resctrlmond.workloads.profiles.profile import annotation_names

# The limit of the hook, which shortens long strings: then all states of Kubernetes fit.
MAX_STATE_LENGTH = 1 << 21

# The annotations with the pod's UID: of CRI-O, of containerd. The first one that exists is used.
_POD_UID = ("io.kubernetes.pod.uid", "io.kubernetes.cri.sandbox-uid")

# For each attribute the annotations with its value: of CRI-O, of containerd. io.kubernetes.cri-o.ContainerName is not
# used, because it has the form "k8s_<container>_<pod>_...".
_ATTRIBUTES = {
    "pod.name": ("io.kubernetes.pod.name", "io.kubernetes.cri.sandbox-name"),
    "pod.namespace": ("io.kubernetes.pod.namespace", "io.kubernetes.cri.sandbox-namespace"),
    "pod.uid": _POD_UID,
    "container.name": ("io.kubernetes.container.name", "io.kubernetes.cri.container-name"),
}

# The image of the container: of CRI-O, of containerd. Podman does not set it. CRI-O's is first, because CRI-O copies
# the annotations of the pod, which its user sets, to each container, and then sets its own.
_IMAGE = ("io.kubernetes.cri-o.ImageName", "io.kubernetes.cri.image-name")

# "sandbox" or "container": CRI-O, containerd. Podman does not set it.
_CONTAINER_TYPE = ("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri.container-type")

# The id of the container that keeps the namespaces of the pod: CRI-O, containerd.
_SANDBOX = ("io.kubernetes.cri-o.SandboxID", "io.kubernetes.cri.sandbox-id")

# All annotations that are used, beside those that name a profile.
_USED = frozenset({*_POD_UID, *_IMAGE, *_CONTAINER_TYPE, *_SANDBOX, *podman.ANNOTATIONS}.union(*_ATTRIBUTES.values()))


class InvalidOciState(ResctrlError):
    """The input of the hook is not a valid OCI state, or does not identify a workload."""


class State(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of a container (OCI runtime-spec, runtime.md, "State"). Other fields are ignored.

    ``pid`` is the container's init in the PID namespace of the runtime; 0 if there is none.
    """

    oci_version: Annotated[str, msgspec.Meta(max_length=128)]
    id: str
    status: Annotated[str, msgspec.Meta(max_length=128)]
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    bundle: str = ""
    annotations: dict[str, str] = {}


class OciContainer(msgspec.Struct, frozen=True):
    """A container of an OCI state: the key of its workload, its id as a member of it, and its attributes.

    ``kind`` is "sandbox" for the container that only keeps the namespaces of a pod (infra, pause), whose id is
    ``sandbox``, "" if the container is in no pod.
    """

    key: str
    member: str
    kind: Literal["container", "sandbox"]
    attributes: dict[str, str]
    sandbox: str = ""


_decoder = msgspec.json.Decoder(State)


def parse_state(text: str) -> State:
    """Decode the state from JSON of at most 2 MiB. Raises InvalidOciState, which names the invalid field."""
    if len(text) > MAX_STATE_LENGTH:
        raise InvalidOciState(f"the OCI state is longer than {MAX_STATE_LENGTH} characters")
    try:
        state = _decoder.decode(text)
        check_member_id(state.id)
    except InvalidKey as error:
        raise InvalidOciState(f"the id in the OCI state is not valid: {error.message}") from error
    # Deep nesting in an ignored field raises RecursionError, a lone surrogate UnicodeEncodeError.
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidOciState(f"the OCI state cannot be read: {error}") from error
    return state


def used_part(text: str) -> str:
    """Return the state without fields and annotations that are not used; the text itself if it cannot be read."""
    try:
        state = parse_state(text)
    except InvalidOciState:
        return text
    used = {name: value for name, value in state.annotations.items() if name in _USED}
    used |= annotation_names(state.annotations)
    return msgspec.json.encode(msgspec.structs.replace(state, annotations=used)).decode()


def container_of(state: State) -> OciContainer:
    """Return the container. Its workload is its pod if it has one, otherwise the container itself.

    Raises InvalidOciState, also if the annotation of the pod's UID is not a key: if it were ignored, the container
    would be counted separately from its pod, without an error.
    """
    name, uid = _first(state, _POD_UID)
    if wrong := _wrong_uid(state):
        raise InvalidOciState(wrong)
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
    return OciContainer(key, state.id, "sandbox" if sandbox else "container", attributes, _first(state, _SANDBOX)[1])


def claimed_container(state: State) -> tuple[OciContainer, str]:
    """Return the container, and why its annotations name no pod; "" if they are correct. Raises InvalidOciState.

    The user of a container may have written them, and must not keep it from being counted.
    """
    wrong = _wrong_uid(state)
    return (container_without_pod(state) if wrong else container_of(state)), wrong


def container_without_pod(state: State) -> OciContainer:
    """Return the container as a separate workload, without the pod of its annotations. Raises InvalidOciState."""
    container = container_of(msgspec.structs.replace(state, annotations=_without(state.annotations, _POD_UID)))
    attributes = {name: value for name, value in container.attributes.items() if not name.startswith("pod.")}
    return msgspec.structs.replace(container, attributes=attributes)


def claims_pod(state: State) -> bool:
    """Return whether the container's annotations name a pod."""
    return bool(_first(state, _POD_UID)[0])


def facts_of(state: State, container: OciContainer) -> Facts:
    """Return the facts by which the container's profile is selected. The state has no labels of the pod."""
    return Facts(
        annotations=annotation_names(state.annotations),
        namespace=container.attributes.get("pod.namespace", ""),
        image=attribute_value(_first(state, _IMAGE)[1]),
        container=container.attributes.get("container.name", ""),
    )


def _wrong_uid(state: State) -> str:
    """Return an error message if the annotation of the pod's UID is not a key; "" if it is, or does not exist.

    The kubelet uses the UID in the manifest of a static pod, and a pod of crictl has any text as its UID.
    """
    name, uid = _first(state, _POD_UID)
    try:
        if name:
            canonical_key(uid)
    except InvalidKey:
        return f"the annotation {name} of container {state.id} is not a pod UID: {uid[:64]!a}"
    return ""


def _without(annotations: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in annotations.items() if name not in names}


def _first(state: State, names: tuple[str, ...]) -> tuple[str, str]:
    # Return the name and value of the first annotation that exists; ("", "") if none does.
    for name in names:
        if name in state.annotations:
            return name, state.annotations[name]
    return "", ""
