# SPDX-License-Identifier: Apache-2.0
"""What the runtime has told of its pods and containers: state without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from resctrlmond.groups.errors import InvalidAttributes, InvalidKey
from resctrlmond.groups.keys import (
    MAX_ATTRIBUTES,
    attribute_value,
    canonical_key,
    check_attributes,
    check_member_id,
)
from resctrlmond.nri.messages import Container, Pod

_LABEL = "pod.label."
# What the kubelet and containerd label for themselves says the pod's own fields again.
_THEIR_LABELS = ("io.kubernetes.pod.", "io.kubernetes.container.", "io.cri-containerd.")


@dataclass(slots=True)
class Sandbox:
    """One sandbox of a pod; ``key`` names its workload. ``is_settled``: resctrlmond knows it, or has refused it.

    ``cgroup`` is the pod's control group, where it has one of its own that we have seen.
    """

    pod: Pod
    key: str
    is_settled: bool = False
    cgroup: str = ""


@dataclass(slots=True)
class Member:
    """One container of a sandbox; ``is_settled``: resctrlmond has it in its group, or has refused it.

    ``cgroup`` is the path of its control group where we found it ourselves.
    """

    container: Container
    key: str
    is_settled: bool = False
    cgroup: str = ""


class Pods:
    """All sandboxes and containers that exist, by their ids."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.members: dict[str, Member] = {}
        # Ids that events tell of before the connection's list has come: they are newer than it.
        self._told: set[str] = set()
        self._has_list = False

    def begin(self) -> None:
        """A new connection begins; what is known stays until its list replaces it."""
        self._told.clear()
        self._has_list = False

    def replace_all(self, pods: Iterable[Pod], containers: Iterable[Container]) -> list[str]:
        """Take the runtime's list for the full truth. Returns what was wrong with those that cannot be taken."""
        before: dict[str, Sandbox | Member] = {**self.sandboxes, **self.members}
        self.sandboxes = {name: one for name, one in self.sandboxes.items() if name in self._told}
        self.members = {name: one for name, one in self.members.items() if name in self._told}
        wrong = []
        # Pods first: a container is of one of them.
        everything: tuple[Pod | Container, ...] = (*pods, *containers)
        for told in everything:
            if told.id in self._told:
                continue
            try:
                one = self.add_sandbox(told) if isinstance(told, Pod) else self.add_member(told)
                if told.id in before:
                    one.is_settled, one.cgroup = before[told.id].is_settled, before[told.id].cgroup
            except InvalidKey as error:
                wrong.append(str(error))
        self._told.clear()
        self._has_list = True
        return wrong

    def add_sandbox(self, pod: Pod) -> Sandbox:
        """The sandbox, added if it is new. Raises InvalidKey."""
        known = self.sandboxes.get(pod.id)
        if known is None:
            check_member_id(pod.id)
            known = self.sandboxes[pod.id] = Sandbox(pod, canonical_key(pod.uid or pod.id))
        elif pod.pid:
            known.pod = replace(known.pod, pid=pod.pid)
        return known

    def add_member(self, container: Container) -> Member:
        """The container, added or brought up to date. Raises InvalidKey."""
        check_member_id(container.id)
        if container.sandbox not in self.sandboxes:
            raise InvalidKey(
                f"container {container.id} is of a sandbox that nobody told of: {container.sandbox[:80]!a}"
            )
        known = self.members.get(container.id)
        if known is None:
            key = self.sandboxes[container.sandbox].key
            known = self.members[container.id] = Member(container, key)
        else:
            # A runtime leaves out what it does not know at the moment.
            known.container = replace(
                container,
                pid=container.pid or known.container.pid,
                cgroups_path=container.cgroups_path or known.container.cgroups_path,
            )
        return known

    def remove_sandbox(self, sandbox: str) -> list[str]:
        """Forget a sandbox; returns its containers, which are forgotten as well."""
        self.sandboxes.pop(sandbox, None)
        gone = [name for name, member in self.members.items() if member.container.sandbox == sandbox]
        for name in gone:
            del self.members[name]
        return gone

    def tell(self, *ids: str) -> None:
        """An event has told of these."""
        if not self._has_list:
            self._told.update(ids)

    def lives(self, key: str) -> bool:
        """Whether the workload has a sandbox."""
        return any(sandbox.key == key for sandbox in self.sandboxes.values())


def attributes(pod: Pod) -> dict[str, str]:
    """What to call a pod's workload; labels as far as they fit resctrlmond's bounds, in the order of their names."""
    given = {"pod.name": pod.name, "pod.namespace": pod.namespace, "pod.uid": pod.uid}
    found = {name: attribute_value(value) for name, value in given.items() if value}
    for name, value in sorted(pod.labels.items()):
        label = {_LABEL + name: attribute_value(value)}
        if name.startswith(_THEIR_LABELS) or not _is_allowed(label):
            continue
        if len(found) == MAX_ATTRIBUTES:
            break
        found |= label
    return found


def _is_allowed(label: dict[str, str]) -> bool:
    try:
        check_attributes(label)
    except InvalidAttributes:
        return False
    return True
