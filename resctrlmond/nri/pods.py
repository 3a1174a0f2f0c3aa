# SPDX-License-Identifier: Apache-2.0
"""What the runtime has told of its pods and containers: state without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from resctrlmond.api.pods import ANNOTATION, LABEL
from resctrlmond.groups.errors import InvalidAttributes, InvalidKey
from resctrlmond.groups.keys import (
    MAX_ATTRIBUTE_LENGTH,
    MAX_ATTRIBUTES,
    MAX_ATTRIBUTES_BYTES,
    attribute_value,
    canonical_key,
    check_attributes,
    check_member_id,
)
from resctrlmond.nri.messages import MAX_MEMBERS, MAX_SANDBOXES, Container, Pod
from resctrlmond.nri.selection import Selection

# Names of containers that are told of a pod, as a whole one attribute.
MAX_NAMES = 40

# Room for what is told when a container starts: the names of all, and that they are counted as a whole.
_MAX_OWN = MAX_ATTRIBUTES - 2
_MAX_OWN_BYTES = MAX_ATTRIBUTES_BYTES - 5 * MAX_ATTRIBUTE_LENGTH

# What the kubelet and containerd label for themselves says the pod's own fields again.
_THEIR_LABELS = ("io.kubernetes.pod.", "io.kubernetes.container.", "io.cri-containerd.")


@dataclass(slots=True)
class Sandbox:
    """One sandbox of a pod; ``key`` names its workload. ``is_settled``: resctrlmond knows it, or has refused it.

    ``unselected`` is why its pod is not to be monitored, "" for one that is. ``cgroup`` is the pod's control group,
    where it has one of its own that we have seen. ``names`` are its containers', also of those that are gone.
    ``started`` tells the process that holds its namespaces from later ones of that number (field 22 of
    /proc/PID/stat), 0 until we have looked at it.
    """

    pod: Pod
    key: str
    unselected: str = ""
    is_settled: bool = False
    cgroup: str = ""
    names: set[str] = field(default_factory=set)
    started: int = 0


@dataclass(slots=True)
class Member:
    """One container of a sandbox; ``is_settled``: resctrlmond has it in its group, or has refused it.

    ``cgroup`` is the path of its control group where we found it ourselves. ``started`` tells the process that was
    told from later ones of its number (field 22 of /proc/PID/stat), 0 where we did not look in time. ``is_found``: no
    event or list has named it, its control group is all that is known of it.
    """

    container: Container
    key: str
    is_settled: bool = False
    cgroup: str = ""
    started: int = 0
    is_found: bool = False


class Pods:
    """All sandboxes and containers that exist, by their ids."""

    def __init__(self, selection: Selection | None = None) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.members: dict[str, Member] = {}
        self._selection = selection or Selection()
        # Ids that events tell of before the connection's list has come: they are newer than it.
        self._told: set[str] = set()
        self._awaits_list = True
        # Whether a list has ever come: without one, what is not known may live all the same.
        self.is_whole = False

    def begin(self) -> None:
        """A new connection begins; what is known stays until its list replaces it."""
        self._told.clear()
        self._awaits_list = True

    def await_no_list(self) -> None:
        """The connection's list will not come: NRI before 0.8 sends none to a plugin that the runtime launched."""
        self._told.clear()
        self._awaits_list = False

    def select(self, selection: Selection) -> None:
        """Select anew."""
        self._selection = selection
        for sandbox in self.sandboxes.values():
            sandbox.unselected = selection.why_not(sandbox.pod)

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
                if (known := before.get(told.id)) is not None:
                    one.is_settled, one.cgroup = known.is_settled, known.cgroup
                    if isinstance(one, Sandbox) and isinstance(known, Sandbox) and not one.pod.pid:
                        # containerd does not know it anew before the sandbox is asked for.
                        one.pod = replace(one.pod, pid=known.pod.pid)
                    one.started = known.started if _pid(one) == _pid(known) else 0
            except InvalidKey as error:
                wrong.append(str(error))
        self.await_no_list()
        self.is_whole = True
        return wrong

    def add_sandbox(self, pod: Pod) -> Sandbox:
        """The sandbox, added if it is new. Raises InvalidKey."""
        known = self.sandboxes.get(pod.id)
        if known is None:
            check_member_id(pod.id)
            same = self.members.get(pod.id)
            if same is not None and same.is_found:
                # A search found the control group of the sandbox itself before the runtime's event: on a busy host
                # containerd 2.1 sends that seconds after it has made the control group.
                del self.members[pod.id]
            elif same is not None:
                raise InvalidKey(f"pod sandbox {pod.id} has the id of a container")
            if len(self.sandboxes) >= MAX_SANDBOXES:
                raise InvalidKey(f"sandbox {pod.id} is one more than {MAX_SANDBOXES}: the adapter keeps no more")
            key = canonical_key(pod.uid or pod.id)
            wanted = self._selection.annotations
            given = {name: text for name, text in pod.annotations.items() if name in wanted}
            known = Sandbox(replace(pod, annotations=given), key, self._selection.why_not(pod))
            self.sandboxes[pod.id] = known
        elif pod.pid and pod.pid != known.pod.pid:
            known.pod, known.started = replace(known.pod, pid=pod.pid), 0
        return known

    def add_member(self, container: Container) -> Member:
        """The container, added or brought up to date. Raises InvalidKey."""
        check_member_id(container.id)
        if container.sandbox not in self.sandboxes:
            raise InvalidKey(
                f"container {container.id} is of a sandbox that nobody told of: {container.sandbox[:80]!a}"
            )
        if container.id in self.sandboxes:
            raise InvalidKey(f"container {container.id} has the id of a sandbox")
        known = self.members.get(container.id)
        if known is None and len(self.members) >= MAX_MEMBERS:
            raise InvalidKey(f"container {container.id} is one more than {MAX_MEMBERS}: the adapter keeps no more")
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
        if self._awaits_list and len(self._told) < MAX_SANDBOXES + MAX_MEMBERS:
            self._told.update(ids)

    def lives(self, key: str) -> bool:
        """Whether the workload has a sandbox that is selected."""
        return any(sandbox.key == key and not sandbox.unselected for sandbox in self.sandboxes.values())

    def is_selected(self, member: Member) -> bool:
        """Whether a container's pod is."""
        sandbox = self.sandboxes.get(member.container.sandbox)
        return sandbox is not None and not sandbox.unselected


def _pid(one: Sandbox | Member) -> int:
    return one.pod.pid if isinstance(one, Sandbox) else one.container.pid


def attributes(sandbox: Sandbox) -> dict[str, str]:
    """What to call a pod's workload; labels as far as they fit resctrlmond's bounds, in the order of their names."""
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


def container_names(sandbox: Sandbox) -> dict[str, str]:
    """The attribute of them."""
    names = attribute_value(", ".join(sorted(sandbox.names - {""})))
    return {"pod.containers": names} if names else {}


def fitting_labels(
    labels: Mapping[str, str], most: int = MAX_ATTRIBUTES, most_bytes: int = _MAX_OWN_BYTES
) -> dict[str, str]:
    """The pod's own labels as far as they fit resctrlmond's bounds, in the order of their names."""
    found: dict[str, str] = {}
    for name, value in sorted(labels.items()):
        if name.startswith(_THEIR_LABELS) or not _is_allowed({LABEL + name: attribute_value(value)}):
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
