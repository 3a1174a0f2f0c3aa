# SPDX-License-Identifier: Apache-2.0
"""What goes over the doors: the requests and replies of org.resctrlmon.Manager, as its IDL has them."""

from __future__ import annotations

import msgspec

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.inventory import ContainerState, Sandbox, Told
from resctrlmond.groups.record import Claim, EndRule, Member, State
from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.counters import Kind, Status

FOLLOW = "follow"


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """The parameters of a method: what is unknown or of the wrong type is refused."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """What a method answers; fields that have nothing to say are left out."""


class Group(Reply, frozen=True, kw_only=True):
    """A workload's group, with its claims and members."""

    key: str
    class_: str = msgspec.field(name="class")
    classes: tuple[str, ...] | None = None
    state: State
    reason: str | None = None
    in_limbo: bool = False
    priority: int = 0
    path: str | None = None
    snapshot: str | None = None
    generation: int
    loss: str | None = None
    baseline: Quality
    caveats: dict[str, str] = msgspec.field(default_factory=dict)
    claims: tuple[Claim, ...]
    members: tuple[Member, ...]
    attributes: dict[str, str]
    created_at: str | None = None
    completed_at: str | None = None


class Foreign(Reply, frozen=True, kw_only=True):
    """A monitoring group that does not bear our mark."""

    class_: str = msgspec.field(name="class")
    name: str
    path: str


class Reading(Reply, frozen=True, kw_only=True):
    """One event in one domain; ``value`` is the number as the kernel wrote it, in ``unit``."""

    domain: str
    event: str
    kind: Kind
    unit: str
    status: Status
    value: str | None = None
    text: str
    part: bool


class Total(Reply, frozen=True, kw_only=True):
    """The use of one event over all domains since the baseline."""

    event: str
    unit: str
    value: str | None = None
    quality: Quality
    reason: str | None = None


class Failure(Reply, frozen=True, kw_only=True):
    """Why one key of many could not be served; ``error`` is an error's name."""

    key: str
    error: str
    message: str


class Capacity(Reply, frozen=True, kw_only=True):
    """What one monitoring resource of the machine offers."""

    resource: str
    rmids: int
    events: tuple[str, ...]


class Counters(Reply, frozen=True, kw_only=True):
    """The assignable bandwidth counters of one domain; ``available`` is known in the mode ``assigned`` only."""

    domain: str
    counters: int
    available: int | None = None


class Bandwidth(Reply, frozen=True, kw_only=True):
    """How the machine counts memory bandwidth; ``can_assign``: it offers the mode ``mbm_event``."""

    mode: Mode
    can_assign: bool
    counters: tuple[Counters, ...]


class Container(Reply, frozen=True, kw_only=True):
    """A container of a pod; ``monitored``: it counts in its pod's group, else ``reason`` where it runs."""

    id: str
    name: str
    state: ContainerState
    sandbox: str | None = None
    pid: int | None = None
    monitored: bool
    reason: str | None = None


class Pod(Reply, frozen=True, kw_only=True):
    """A pod, with its group where it has one; ``reason``: why it has none."""

    key: str
    name: str
    namespace: str
    labels: dict[str, str]
    sandboxes: list[str]
    containers: list[Container]
    reason: str | None = None
    group: Group | None = None


class CreateRequest(Request, frozen=True, kw_only=True):
    """Create: make a workload's group, without a task yet."""

    key: str
    class_: str | None = msgspec.field(default=None, name="class")
    claim: str | None = None
    ends: EndRule | None = None
    attributes: dict[str, str] | None = None
    pending: bool | None = None
    priority: int | None = None


class AssignRequest(Request, frozen=True, kw_only=True):
    """Assign: put a process or a control group into the workload's group."""

    key: str
    pid: int | None = None
    pid_fd: int | None = None
    cgroup: str | None = None
    own_cgroup: str | None = None
    late: bool | None = None
    tree: bool | None = None
    class_: str | None = msgspec.field(default=None, name="class")
    allow_class_change: bool | None = None
    take_over: bool | None = None
    claim: str | None = None
    ends: EndRule | None = None
    member: str | None = None
    kind: str | None = None
    attributes: dict[str, str] | None = None
    pending: bool | None = None
    priority: int | None = None


class ReleaseRequest(Request, frozen=True, kw_only=True):
    """Release: end an owner's claim."""

    key: str
    claim: str | None = None
    reason: str | None = None


class AddMemberRequest(Request, frozen=True, kw_only=True):
    """AddMember: note a member that brings no task of its own."""

    key: str
    member: str
    kind: str | None = None
    claim: str | None = None


class RemoveMemberRequest(Request, frozen=True, kw_only=True):
    """RemoveMember: end a member."""

    key: str
    member: str
    reason: str | None = None


class ReconcileRequest(Request, frozen=True, kw_only=True):
    """Reconcile: all the workloads that an owner knows to live."""

    claim: str
    keys: list[str]


class MoveRequest(Request, frozen=True, kw_only=True):
    """Move: the whole group to another class."""

    key: str
    class_: str = msgspec.field(name="class")


class NotePodsRequest(Request, frozen=True, kw_only=True):
    """NotePods: what an owner knows of pods, in the place of what it told before of the same sandboxes."""

    claim: str
    pods: list[Sandbox] | None = None
    gone: list[str] | None = None
    fresh: bool | None = None


class KeyRequest(Request, frozen=True, kw_only=True):
    """Get and Read: which workload."""

    key: str


class ForeignRequest(Request, frozen=True, kw_only=True):
    """ReadForeign: which monitoring group of another program, as List names it."""

    class_: str = msgspec.field(name="class")
    name: str


class NoParameters(Request, frozen=True, kw_only=True):
    """List, ListPods and Status take none."""


class GroupReply(Reply, frozen=True, kw_only=True):
    """A group, as it is after the call."""

    group: Group


class AssignReply(Reply, frozen=True, kw_only=True):
    """What Assign did: tasks written, passes made, tasks and descendant processes that stayed outside."""

    group: Group
    moved: int
    passes: int
    left: int
    descendants: int


class ReleaseReply(Reply, frozen=True, kw_only=True):
    """Whether that was the last claim, and what was used so far."""

    group: Group
    completed: bool
    totals: list[Total]


class ReconcileReply(Reply, frozen=True, kw_only=True):
    """What became of an owner's claims."""

    kept: list[str]
    released: list[str]
    failures: list[Failure]


class ListReply(Reply, frozen=True, kw_only=True):
    """Our groups and those of others."""

    groups: list[Group]
    foreign: list[Foreign]


class NotePodsReply(Reply, frozen=True, kw_only=True):
    """How many sandboxes are now known of that owner."""

    known: int


class ListPodsReply(Reply, frozen=True, kw_only=True):
    """All pods that are known, and when each owner told last."""

    pods: list[Pod]
    told: list[Told]


class ReadReply(Reply, frozen=True, kw_only=True):
    """The counters now and the totals since the baseline."""

    group: Group
    readings: list[Reading]
    totals: list[Total]


class ReadForeignReply(Reply, frozen=True, kw_only=True):
    """The counters of a monitoring group that does not bear our mark, now."""

    foreign: Foreign
    readings: list[Reading]


class StatusReply(Reply, frozen=True, kw_only=True):
    """The machine and the daemon as a whole."""

    version: str
    mount: str
    mounted: bool
    simulation: str | None = None
    rmids: int
    used: int
    pending: int
    in_limbo: bool | None = None
    groups: int
    foreign: list[Foreign]
    classes: list[str]
    capacity: list[Capacity]
    bandwidth: Bandwidth | None = None
    problems: list[str]
