# SPDX-License-Identifier: Apache-2.0
"""The state of the runtime's pods and containers, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from resctrlmond.api.pods import ANNOTATION, LABEL
from resctrlmond.nri.messages import MAX_MEMBERS, MAX_SANDBOXES, Container, Pod
from resctrlmond.nri.selection import Selection
from resctrlmond.workloads.model.errors import InvalidAttributes, InvalidKey
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.validation import (
    MAX_ATTRIBUTE_LENGTH,
    MAX_ATTRIBUTES,
    MAX_ATTRIBUTES_BYTES,
    attribute_value,
    canonical_key,
    check_attributes,
    check_member_id,
)
from resctrlmond.workloads.profiles.profile import annotation_names, choosing_names

# The limit for container names of a pod; all names together are one attribute.
MAX_NAMES = 40

# Room for the attributes that are added when a container starts: the names of all containers, and ``pod.counted``.
_MAX_OWN = MAX_ATTRIBUTES - 2
_MAX_OWN_BYTES = MAX_ATTRIBUTES_BYTES - 5 * MAX_ATTRIBUTE_LENGTH

# Labels of the kubelet and of containerd, which repeat fields of the pod.
_RUNTIME_LABELS = ("io.kubernetes.pod.", "io.kubernetes.container.", "io.cri-containerd.")


@dataclass(slots=True)
class Sandbox:
    """One sandbox of a pod. ``key`` names its workload. ``is_settled``: resctrlmond knows it, or has refused it.

    ``is_excluded``: resctrlmond has refused it because of its profile. ``choosing`` are the annotations of the pod
    that can name a profile.
    ``unselected`` is the reason why its pod is not monitored, or "". ``cgroup`` is the control group of the pod, if
    one was found. ``names`` are the names of its containers, including removed ones. ``started`` is the start time of
    the process that holds its namespaces (field 22 of /proc/PID/stat), which detects a reused pid; 0 if it is not
    known yet.
    """

    pod: Pod
    key: str
    unselected: str = ""
    is_settled: bool = False
    cgroup: str = ""
    names: set[str] = field(default_factory=set)
    started: int = 0
    is_excluded: bool = False
    choosing: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Member:
    """One container of a sandbox. ``is_settled``: resctrlmond has it in its group, or has refused it.

    ``key`` is that of the workload in which it is counted: the pod or, by its profile, the container itself.
    ``is_excluded``: resctrlmond has refused it because of its profile.
    ``cgroup`` is the path of its control group, if a search found it. ``started`` is the start time of the reported
    process (field 22 of /proc/PID/stat), which detects a reused pid; 0 if the process was not read in time.
    ``is_found``: a search found its control group, but no event or list has named it.
    """

    container: Container
    key: str
    is_settled: bool = False
    cgroup: str = ""
    started: int = 0
    is_found: bool = False
    is_excluded: bool = False


class Pods:
    """All sandboxes and containers that exist, by their IDs."""

    def __init__(self, selection: Selection | None = None) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.members: dict[str, Member] = {}
        self._selection = selection or Selection()
        # The IDs in events that arrived before the list of the connection: they are newer than the list.
        self._newer_ids: set[str] = set()
        self._awaits_list = True
        # Whether a list has ever arrived: without one, unknown pods may exist.
        self.has_list = False

    def begin(self) -> None:
        """Start a new connection. The state remains until the list of the connection replaces it."""
        self._newer_ids.clear()
        self._awaits_list = True

    def await_no_list(self) -> None:
        """Expect no list for this connection: NRI before 0.8 sends none to a plugin that the runtime launched."""
        self._newer_ids.clear()
        self._awaits_list = False

    def select(self, selection: Selection) -> None:
        """Replace the selection of pods."""
        self._selection = selection
        for sandbox in self.sandboxes.values():
            sandbox.unselected = selection.why_not(sandbox.pod)

    def replace_all(self, pods: Iterable[Pod], containers: Iterable[Container]) -> list[str]:
        """Replace the state by the runtime's list. Return an error message for each entry that is refused."""
        before: dict[str, Sandbox | Member] = {**self.sandboxes, **self.members}
        self.sandboxes = {name: entry for name, entry in self.sandboxes.items() if name in self._newer_ids}
        self.members = {name: entry for name, entry in self.members.items() if name in self._newer_ids}
        wrong = []
        # Pods first, because a container refers to its pod.
        everything: tuple[Pod | Container, ...] = (*pods, *containers)
        for reported in everything:
            if reported.id in self._newer_ids:
                continue
            try:
                entry = self.add_sandbox(reported) if isinstance(reported, Pod) else self.add_member(reported)
                if (known := before.get(reported.id)) is not None:
                    entry.is_settled, entry.cgroup = known.is_settled, known.cgroup
                    entry.is_excluded = known.is_excluded
                    if isinstance(entry, Member) and isinstance(known, Member) and known.key == reported.id:
                        entry.key = known.key
                    if isinstance(entry, Sandbox) and isinstance(known, Sandbox) and not entry.pod.pid:
                        # After a restart, containerd does not report the pid until a client asks for the sandbox.
                        entry.pod = replace(entry.pod, pid=known.pod.pid)
                    entry.started = known.started if _pid(entry) == _pid(known) else 0
            except InvalidKey as error:
                wrong.append(str(error))
        self.await_no_list()
        self.has_list = True
        return wrong

    def add_sandbox(self, pod: Pod) -> Sandbox:
        """Add the sandbox if it is new, and return it. Raises InvalidKey."""
        known = self.sandboxes.get(pod.id)
        if known is None:
            check_member_id(pod.id)
            same = self.members.get(pod.id)
            if same is not None and same.is_found:
                # A search found the control group of the sandbox itself before the event of the runtime: on a busy
                # host, containerd 2.1 sends the event seconds after it has created the control group.
                del self.members[pod.id]
            elif same is not None:
                raise InvalidKey(f"pod sandbox {pod.id} has the id of a container")
            if len(self.sandboxes) >= MAX_SANDBOXES:
                raise InvalidKey(f"sandbox {pod.id} exceeds the limit of {MAX_SANDBOXES} sandboxes")
            key = canonical_key(pod.uid or pod.id)
            wanted = self._selection.annotations
            given = {name: text for name, text in pod.annotations.items() if name in wanted}
            known = Sandbox(replace(pod, annotations=given), key, self._selection.why_not(pod))
            known.choosing = annotation_names(pod.annotations)
            self.sandboxes[pod.id] = known
        elif pod.pid and pod.pid != known.pod.pid:
            known.pod, known.started = replace(known.pod, pid=pod.pid), 0
        return known

    def add_member(self, container: Container) -> Member:
        """Add or update the container, and return it. Raises InvalidKey."""
        check_member_id(container.id)
        if container.sandbox not in self.sandboxes:
            raise InvalidKey(
                f"container {container.id} belongs to a sandbox that the runtime has not reported: "
                f"{container.sandbox[:80]!a}"
            )
        if container.id in self.sandboxes:
            raise InvalidKey(f"container {container.id} has the id of a sandbox")
        known = self.members.get(container.id)
        if known is None and len(self.members) >= MAX_MEMBERS:
            raise InvalidKey(f"container {container.id} exceeds the limit of {MAX_MEMBERS} containers")
        if known is not None and known.container.sandbox != container.sandbox:
            raise InvalidKey(
                f"container {container.id} is of sandbox {known.container.sandbox}, not of {container.sandbox}"
            )
        if known is None:
            sandbox = self.sandboxes[container.sandbox]
            known = self.members[container.id] = Member(container, sandbox.key)
            if len(sandbox.names) < MAX_NAMES:
                sandbox.names.add(attribute_value(container.name)[: MAX_ATTRIBUTE_LENGTH // MAX_NAMES])
        else:
            known.is_found = False
            # A runtime leaves out fields that it does not know at the moment.
            known.container = replace(
                container,
                pid=container.pid or known.container.pid,
                cgroups_path=container.cgroups_path or known.container.cgroups_path,
                image=container.image or known.container.image,
            )
        return known

    def remove_sandbox(self, sandbox: str) -> list[str]:
        """Remove a sandbox and its containers. Return the IDs of these containers."""
        self.sandboxes.pop(sandbox, None)
        gone = [name for name, member in self.members.items() if member.container.sandbox == sandbox]
        for name in gone:
            del self.members[name]
        return gone

    def include_all(self) -> None:
        """Forget which sandboxes and containers resctrlmond has refused because of their profiles."""
        for sandbox in self.sandboxes.values():
            sandbox.is_excluded = False
        for member in self.members.values():
            member.is_excluded = False

    def record_ids(self, *ids: str) -> None:
        """Record that an event has named these IDs."""
        if self._awaits_list and len(self._newer_ids) < MAX_SANDBOXES + MAX_MEMBERS:
            self._newer_ids.update(ids)

    def has_selected_sandbox(self, key: str) -> bool:
        """Whether the workload has a sandbox that is selected."""
        return any(sandbox.key == key and not sandbox.unselected for sandbox in self.sandboxes.values())

    def why_unselected(self, pod: Pod) -> str:
        """Return the reason why the pod is not monitored; "" if it is."""
        return self._selection.why_not(pod)

    def is_selected(self, member: Member) -> bool:
        """Whether the pod of the container is selected."""
        sandbox = self.sandboxes.get(member.container.sandbox)
        return sandbox is not None and not sandbox.unselected


def _pid(entry: Sandbox | Member) -> int:
    return entry.pod.pid if isinstance(entry, Sandbox) else entry.container.pid


def attributes(sandbox: Sandbox) -> dict[str, str]:
    """Return the attributes of a pod's workload. Annotations and labels are limited, in the order of their names."""
    pod = sandbox.pod
    given = {
        "pod.name": pod.name,
        "pod.namespace": pod.namespace,
        "pod.uid": pod.uid,
        "pod.runtime_handler": pod.runtime_handler,
    }
    found = {name: attribute_value(value) for name, value in given.items() if value}
    for name, value in sorted(pod.annotations.items()):
        annotation = {ANNOTATION + name: attribute_value(value)}
        if len(found) < _MAX_OWN and _is_allowed(annotation) and _size(found | annotation) <= _MAX_OWN_BYTES:
            found |= annotation
    labels = fitting_labels(pod.labels, _MAX_OWN - len(found), _MAX_OWN_BYTES - _size(found))
    return found | {LABEL + name: value for name, value in labels.items()}


def facts(sandbox: Sandbox, container: Container | None = None) -> Facts:
    """Return the facts by which resctrlmond selects the profile of a pod or, with ``container``, of a container."""
    return facts_of(replace(sandbox.pod, annotations=sandbox.choosing), container)


def facts_of(pod: Pod, container: Container | None) -> Facts:
    """Return the facts of a pod with all its annotations. See ``facts``.

    They have only the annotations that can choose for this container: all of them may not fit into a message.
    """
    names = choosing_names(container.name if container else "")
    return Facts(
        annotations={name: pod.annotations[name] for name in names if name in pod.annotations},
        labels=dict(pod.labels),
        namespace=pod.namespace,
        image=container.image if container else "",
        container=container.name if container else "",
    )


def container_names(sandbox: Sandbox) -> dict[str, str]:
    """Return the attribute with the names of the containers."""
    names = attribute_value(", ".join(sorted(sandbox.names - {""})))
    return {"pod.containers": names} if names else {}


def fitting_labels(
    labels: Mapping[str, str], most: int = MAX_ATTRIBUTES, most_bytes: int = _MAX_OWN_BYTES
) -> dict[str, str]:
    """Return the pod's own labels that fit the limits of resctrlmond, in the order of their names."""
    found: dict[str, str] = {}
    for name, value in sorted(labels.items()):
        if name.startswith(_RUNTIME_LABELS) or not _is_allowed({LABEL + name: attribute_value(value)}):
            continue
        most_bytes -= _size({LABEL + name: attribute_value(value)})
        if len(found) == most or most_bytes < 0:
            break
        found[name] = attribute_value(value)
    return found


def _size(attributes: Mapping[str, str]) -> int:
    return sum(len(text.encode()) for pair in attributes.items() for text in pair)


def _is_allowed(label: dict[str, str]) -> bool:
    try:
        check_attributes(label)
    except InvalidAttributes:
        return False
    return True
