# SPDX-License-Identifier: Apache-2.0
"""Requests and replies about workloads. Do not edit: "make interfaces" writes this from resctrlmond/api/types.py.

These classes do not need msgspec, which takes longer to import than a verb. ``decoders`` has the name of each field,
and the function that checks its value, by the name of the field in JSON.
"""

from __future__ import annotations

from resctrlctl.base.structs import Struct
from resctrlctl.connection.decoding import (
    Reply,
    decode_boolean,
    decode_integer,
    decode_text,
    decode_texts,
    list_of,
    optional,
    tuple_of,
    word,
)
from resctrlmond.resctrl.kinds import Kind, Status
from resctrlmond.workloads.model.states import CompanionState, EndRule, Quality, State

_companion_state = word(CompanionState)
_end_rule = word(EndRule)
_kind = word(Kind)
_quality = word(Quality)
_state = word(State)
_status = word(Status)


class Facts(Struct, omit_defaults=True, kw_only=True):
    """Facts about a container or a pod by which its profile is selected."""

    annotations: dict[str, str]
    labels: dict[str, str] | None = None
    namespace: str
    image: str
    container: str


class CreateRequest(Struct, omit_defaults=True):
    """The parameters of Create."""

    key: str
    class_: str | None = None
    claim: str | None = None
    end_rule: EndRule | None = None
    attributes: dict[str, str] | None = None
    allow_pending: bool | None = None
    priority: int | None = None
    facts: Facts | None = None


class Companion(Reply, kw_only=True):
    """The process that the profile of a workload starts beside it; see resctrlmond-profiles(5)."""

    state: CompanionState
    reason: str = ""
    unit: str

    decoders = {
        "state": ("state", _companion_state),
        "reason": ("reason", decode_text),
        "unit": ("unit", decode_text),
    }


class Claim(Reply):
    """An owner's statement that the workload is in use, with the rule by which it ends."""

    owner: str
    since: str
    end_rule: EndRule

    decoders = {
        "owner": ("owner", decode_text),
        "since": ("since", decode_text),
        "endRule": ("end_rule", _end_rule),
    }


class Member(Reply):
    """A container, sandbox, process or control group of a workload."""

    id: str
    kind: str
    owner: str
    pid: int = 0
    start_time: int = 0
    cgroup: str = ""
    started_at: str = ""
    ended_at: str = ""
    late: bool = False
    tasks_outside: int = 0
    reason: str = ""
    snapshot_folder: str = ""
    take_over: bool = False
    allow_class_change: bool = False
    joining: bool = False
    include_descendants: bool = False
    cpu_time_before_ns: int = 0
    descendants_outside: int = 0
    dormant: bool = False
    profile: str = ""
    profile_source: str = ""
    exposed: str = ""

    decoders = {
        "id": ("id", decode_text),
        "kind": ("kind", decode_text),
        "owner": ("owner", decode_text),
        "pid": ("pid", decode_integer),
        "startTime": ("start_time", decode_integer),
        "cgroup": ("cgroup", decode_text),
        "startedAt": ("started_at", decode_text),
        "endedAt": ("ended_at", decode_text),
        "late": ("late", decode_boolean),
        "tasksOutside": ("tasks_outside", decode_integer),
        "reason": ("reason", decode_text),
        "snapshotFolder": ("snapshot_folder", decode_text),
        "takeOver": ("take_over", decode_boolean),
        "allowClassChange": ("allow_class_change", decode_boolean),
        "joining": ("joining", decode_boolean),
        "includeDescendants": ("include_descendants", decode_boolean),
        "cpuTimeBeforeNs": ("cpu_time_before_ns", decode_integer),
        "descendantsOutside": ("descendants_outside", decode_integer),
        "dormant": ("dormant", decode_boolean),
        "profile": ("profile", decode_text),
        "profileSource": ("profile_source", decode_text),
        "exposed": ("exposed", decode_text),
    }


class Workload(Reply, kw_only=True):
    """A workload, with its claims and members."""

    key: str
    class_: str
    classes: tuple[str, ...] | None = None
    state: State
    reason: str | None = None
    in_limbo: bool = False
    priority: int = 0
    profile: str = ""
    profile_source: str = ""
    events: tuple[str, ...] | None = None
    companion: Companion | None = None
    memory: str = ""
    path: str | None = None
    observed: bool = False
    snapshot: str | None = None
    generation: int
    part_of: tuple[str, ...] | None = None
    nested: int = 0
    loss: str | None = None
    baseline: Quality
    caveats: dict[str, str] = {}
    claims: tuple[Claim, ...]
    members: tuple[Member, ...]
    attributes: dict[str, str]
    created_at: str | None = None
    completed_at: str | None = None

    decoders = {
        "key": ("key", decode_text),
        "class": ("class_", decode_text),
        "classes": ("classes", optional(tuple_of(decode_text))),
        "state": ("state", _state),
        "reason": ("reason", optional(decode_text)),
        "inLimbo": ("in_limbo", decode_boolean),
        "priority": ("priority", decode_integer),
        "profile": ("profile", decode_text),
        "profileSource": ("profile_source", decode_text),
        "events": ("events", optional(tuple_of(decode_text))),
        "companion": ("companion", optional(Companion.from_json)),
        "memory": ("memory", decode_text),
        "path": ("path", optional(decode_text)),
        "observed": ("observed", decode_boolean),
        "snapshot": ("snapshot", optional(decode_text)),
        "generation": ("generation", decode_integer),
        "partOf": ("part_of", optional(tuple_of(decode_text))),
        "nested": ("nested", decode_integer),
        "loss": ("loss", optional(decode_text)),
        "baseline": ("baseline", _quality),
        "caveats": ("caveats", decode_texts),
        "claims": ("claims", tuple_of(Claim.from_json)),
        "members": ("members", tuple_of(Member.from_json)),
        "attributes": ("attributes", decode_texts),
        "createdAt": ("created_at", optional(decode_text)),
        "completedAt": ("completed_at", optional(decode_text)),
    }


class WorkloadReply(Reply):
    """The answer of a verb on one workload."""

    workload: Workload

    decoders = {
        "workload": ("workload", Workload.from_json),
    }


class AssignRequest(Struct, omit_defaults=True):
    """The parameters of Assign."""

    key: str
    pid: int | None = None
    pid_fd: int | None = None
    cgroup: str | None = None
    own_cgroup: str | None = None
    late: bool | None = None
    include_descendants: bool | None = None
    class_: str | None = None
    allow_class_change: bool | None = None
    take_over: bool | None = None
    nested: bool | None = None
    claim: str | None = None
    end_rule: EndRule | None = None
    member: str | None = None
    kind: str | None = None
    attributes: dict[str, str] | None = None
    allow_pending: bool | None = None
    priority: int | None = None
    facts: Facts | None = None
    exposed: str | None = None


class AssignReply(Reply):
    """The answer of Assign."""

    workload: Workload
    moved: int
    passes: int
    tasks_outside: int
    descendants_outside: int

    decoders = {
        "workload": ("workload", Workload.from_json),
        "moved": ("moved", decode_integer),
        "passes": ("passes", decode_integer),
        "tasksOutside": ("tasks_outside", decode_integer),
        "descendantsOutside": ("descendants_outside", decode_integer),
    }


class AddMemberRequest(Struct, omit_defaults=True):
    """The parameters of AddMember."""

    key: str
    member: str
    kind: str | None = None
    claim: str | None = None


class RemoveMemberRequest(Struct, omit_defaults=True):
    """The parameters of RemoveMember."""

    key: str
    member: str
    reason: str | None = None


class ReleaseRequest(Struct, omit_defaults=True):
    """The parameters of Release."""

    key: str
    claim: str | None = None
    reason: str | None = None


class Total(Reply, kw_only=True):
    """The use of one event over all domains, since the baseline."""

    event: str
    unit: str
    value: str | None = None
    quality: Quality
    reason: str | None = None

    decoders = {
        "event": ("event", decode_text),
        "unit": ("unit", decode_text),
        "value": ("value", optional(decode_text)),
        "quality": ("quality", _quality),
        "reason": ("reason", optional(decode_text)),
    }


class ReleaseReply(Reply):
    """The answer of Release."""

    workload: Workload
    completed: bool
    totals: list[Total]
    nested: list[Total] | None = None

    decoders = {
        "workload": ("workload", Workload.from_json),
        "completed": ("completed", decode_boolean),
        "totals": ("totals", list_of(Total.from_json)),
        "nested": ("nested", optional(list_of(Total.from_json))),
    }


class MoveRequest(Struct, omit_defaults=True):
    """The parameters of Move."""

    key: str
    class_: str


class KeyRequest(Struct, omit_defaults=True):
    """The parameters of a verb that reads one workload."""

    key: str


class Reading(Reply, kw_only=True):
    """The value of one event in one domain."""

    domain: str
    event: str
    kind: Kind
    unit: str
    status: Status
    value: str | None = None
    text: str
    nested: bool

    decoders = {
        "domain": ("domain", decode_text),
        "event": ("event", decode_text),
        "kind": ("kind", _kind),
        "unit": ("unit", decode_text),
        "status": ("status", _status),
        "value": ("value", optional(decode_text)),
        "text": ("text", decode_text),
        "nested": ("nested", decode_boolean),
    }


class DomainUse(Reply):
    """The use of one event in one domain by one workload."""

    domain: str
    event: str
    kind: Kind
    unit: str
    value: str | None = None
    quality: Quality | None = None
    reason: str | None = None

    decoders = {
        "domain": ("domain", decode_text),
        "event": ("event", decode_text),
        "kind": ("kind", _kind),
        "unit": ("unit", decode_text),
        "value": ("value", optional(decode_text)),
        "quality": ("quality", optional(_quality)),
        "reason": ("reason", optional(decode_text)),
    }


class ReadReply(Reply):
    """The answer of Read."""

    workload: Workload
    readings: list[Reading]
    totals: list[Total]
    domains: list[DomainUse] | None = None
    nested: list[Total] | None = None

    decoders = {
        "workload": ("workload", Workload.from_json),
        "readings": ("readings", list_of(Reading.from_json)),
        "totals": ("totals", list_of(Total.from_json)),
        "domains": ("domains", optional(list_of(DomainUse.from_json))),
        "nested": ("nested", optional(list_of(Total.from_json))),
    }


class ReadAllRequest(Struct, omit_defaults=True):
    """The parameters of ReadAll."""

    with_ended: bool | None = None
    after: str | None = None
    domains: bool | None = None


class Level(Reply):
    """The current value of one gauge, such as cache occupancy, over all domains."""

    event: str
    unit: str
    value: str | None = None

    decoders = {
        "event": ("event", decode_text),
        "unit": ("unit", decode_text),
        "value": ("value", optional(decode_text)),
    }


class Usage(Reply, kw_only=True):
    """A workload with what it used."""

    workload: Workload
    read_at: str | None = None
    totals: list[Total]
    levels: list[Level]
    domains: list[DomainUse] | None = None
    error: str | None = None

    decoders = {
        "workload": ("workload", Workload.from_json),
        "readAt": ("read_at", optional(decode_text)),
        "totals": ("totals", list_of(Total.from_json)),
        "levels": ("levels", list_of(Level.from_json)),
        "domains": ("domains", optional(list_of(DomainUse.from_json))),
        "error": ("error", optional(decode_text)),
    }


class ReadAllReply(Reply):
    """The answer of ReadAll."""

    usages: list[Usage]
    next: str = ""

    decoders = {
        "usages": ("usages", list_of(Usage.from_json)),
        "next": ("next", decode_text),
    }
