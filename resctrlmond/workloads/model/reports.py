# SPDX-License-Identifier: Apache-2.0
"""Pods and containers as owners report them."""

from __future__ import annotations

import msgspec

from resctrlmond.workloads.model.changes import ContainerState


class ReportedContainer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """A container, as an owner reports it."""

    id: str
    """The id of the container."""
    name: str
    """The name of the container."""
    state: ContainerState
    """The state of the container."""
    pid: int | None = None
    """Its first process."""
    reason: str | None = None
    """Why the container is in no group."""


class Sandbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """A pod's sandbox with its containers, as an owner reports it."""

    id: str
    """The id of the sandbox."""
    uid: str
    """The UID of the pod; "" if it has none: the id of the sandbox is the key of the workload then."""
    name: str
    """The name of the pod."""
    namespace: str
    """The namespace of the pod."""
    labels: dict[str, str]
    """The labels of the pod."""
    containers: list[ReportedContainer]
    """The containers of the sandbox."""
    reason: str | None = None
    """Why the pod has no group."""


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """The last report of an owner."""

    owner: str
    """The owner that reported."""
    reported_at: str
    """When it reported."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """Facts about a container or a pod by which its profile is selected. See *resctrlmond-profiles*(5)."""

    annotations: dict[str, str]
    """The annotations of the pod that can name a profile. Other annotations are ignored."""
    labels: dict[str, str] | None = None
    """The labels of the pod. Absent if they are not known."""
    namespace: str
    """The namespace of the pod; "" if it is not known."""
    image: str
    """The image of the container; "" if it is not known, or for a pod."""
    container: str
    """The name of the container; "" if it is not known, or for a pod."""
