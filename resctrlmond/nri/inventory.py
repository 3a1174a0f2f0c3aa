# SPDX-License-Identifier: Apache-2.0
"""Convert all that the runtime has reported into resctrlmond's inventory, including unmonitored pods. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from resctrlmond.nri.pods import Member, Pods, Sandbox, fitting_labels
from resctrlmond.workloads.model.pods import MAX_CONTAINERS, MAX_SANDBOXES, ReportedContainer
from resctrlmond.workloads.model.pods import Sandbox as ReportedSandbox
from resctrlmond.workloads.model.validation import attribute_value

# A request has at most 2 MiB (api/varlink/connection.py).
_CHUNK_BYTES = 512 * 1024
# Kubernetes allows names and values of 63 characters; other clients of a runtime can set any length. These limits in
# bytes keep the largest sandbox within one request.
_LABEL_BYTES = 1024
_NAME_BYTES = 256
_REASON_BYTES = 320


def inventory(pods: Pods, refusals: Mapping[str, str]) -> dict[str, ReportedSandbox]:
    """Return all sandboxes with their containers, by ID. ``refusals``: why a key or a container is unmonitored."""
    # resctrlmond accepts no more than this. The newest ones are the most useful.
    sandboxes = dict(list(pods.sandboxes.items())[-MAX_SANDBOXES:])
    containers: dict[str, list[ReportedContainer]] = {name: [] for name in sandboxes}
    for member in pods.members.values():
        of_sandbox = containers.get(member.container.sandbox)
        if of_sandbox is not None and len(of_sandbox) < MAX_CONTAINERS:
            of_sandbox.append(_container(member, refusals))
    return {name: _sandbox(sandbox, containers[name], refusals) for name, sandbox in sandboxes.items()}


def chunks(sandboxes: list[ReportedSandbox]) -> Iterator[list[ReportedSandbox]]:
    """Split the sandboxes into parts that fit into one request. Yields at least one part."""
    chunk: list[ReportedSandbox] = []
    size = 0
    for sandbox in sandboxes:
        more = len(msgspec.json.encode(sandbox))
        if chunk and size + more > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(sandbox)
        size += more
    yield chunk


def _container(member: Member, refusals: Mapping[str, str]) -> ReportedContainer:
    container = member.container
    return ReportedContainer(
        id=container.id,
        name=_cut(container.name, _NAME_BYTES),
        state=container.state,
        pid=container.pid or None,
        reason=_cut(refusals.get(container.id, ""), _REASON_BYTES) or None,
    )


def _cut(text: str, most: int) -> str:
    """Return the printable part of the text that fits into ``most`` bytes."""
    return attribute_value(text).encode()[:most].decode(errors="ignore")


def _sandbox(sandbox: Sandbox, containers: list[ReportedContainer], refusals: Mapping[str, str]) -> ReportedSandbox:
    pod = sandbox.pod
    return ReportedSandbox(
        id=pod.id,
        uid=pod.uid,
        name=attribute_value(pod.name),
        namespace=attribute_value(pod.namespace),
        labels={label: _cut(value, _LABEL_BYTES) for label, value in fitting_labels(pod.labels).items()},
        containers=containers,
        reason=_cut(sandbox.unselected or refusals.get(sandbox.key, ""), _REASON_BYTES) or None,
    )
