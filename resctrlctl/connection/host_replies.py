# SPDX-License-Identifier: Apache-2.0
"""Replies about the host. Do not edit: "make interfaces" writes this from resctrlmond/api/types.py.

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
from resctrlctl.connection.replies import Reading, Total, Workload
from resctrlmond.resctrl.kinds import Kind, Mode
from resctrlmond.workloads.model.changes import ChangeKind, ContainerState
from resctrlmond.workloads.model.states import CallKind, NameKind, Pool, Quality

_call_kind = word(CallKind)
_change_kind = word(ChangeKind)
_container_state = word(ContainerState)
_kind = word(Kind)
_mode = word(Mode)
_name_kind = word(NameKind)
_pool = word(Pool)
_quality = word(Quality)


class NoParameters(Struct, omit_defaults=True):
    """The parameters of a verb that has none."""


class Foreign(Reply):
    """A monitoring group without the daemon's mark: another program created it."""

    class_: str
    name: str
    path: str

    decoders = {
        "class": ("class_", decode_text),
        "name": ("name", decode_text),
        "path": ("path", decode_text),
    }


class ListReply(Reply):
    """The answer of List."""

    workloads: list[Workload]
    foreign: list[Foreign]

    decoders = {
        "workloads": ("workloads", list_of(Workload.from_json)),
        "foreign": ("foreign", list_of(Foreign.from_json)),
    }


class Container(Reply, kw_only=True):
    """A container of a pod."""

    id: str
    name: str
    state: ContainerState
    sandbox: str | None = None
    pid: int | None = None
    monitored: bool
    reason: str | None = None

    decoders = {
        "id": ("id", decode_text),
        "name": ("name", decode_text),
        "state": ("state", _container_state),
        "sandbox": ("sandbox", optional(decode_text)),
        "pid": ("pid", optional(decode_integer)),
        "monitored": ("monitored", decode_boolean),
        "reason": ("reason", optional(decode_text)),
    }


class Pod(Reply):
    """A pod with its workload."""

    key: str
    name: str
    namespace: str
    labels: dict[str, str]
    sandboxes: list[str]
    containers: list[Container]
    reason: str | None = None
    workload: Workload | None = None

    decoders = {
        "key": ("key", decode_text),
        "name": ("name", decode_text),
        "namespace": ("namespace", decode_text),
        "labels": ("labels", decode_texts),
        "sandboxes": ("sandboxes", list_of(decode_text)),
        "containers": ("containers", list_of(Container.from_json)),
        "reason": ("reason", optional(decode_text)),
        "workload": ("workload", optional(Workload.from_json)),
    }


class Report(Reply):
    """The last report of an owner."""

    owner: str
    reported_at: str

    decoders = {
        "owner": ("owner", decode_text),
        "reportedAt": ("reported_at", decode_text),
    }


class ListPodsReply(Reply):
    """The answer of ListPods."""

    pods: list[Pod]
    reported: list[Report]

    decoders = {
        "pods": ("pods", list_of(Pod.from_json)),
        "reported": ("reported", list_of(Report.from_json)),
    }


class Unwatched(Reply, kw_only=True):
    """A container, or a unit of systemd, that is in no group because of its profile."""

    id: str
    name: str = ""
    is_unit: bool = False
    pod: str = ""
    profile: str
    profile_source: str
    reason: str
    since: str

    decoders = {
        "id": ("id", decode_text),
        "name": ("name", decode_text),
        "isUnit": ("is_unit", decode_boolean),
        "pod": ("pod", decode_text),
        "profile": ("profile", decode_text),
        "profileSource": ("profile_source", decode_text),
        "reason": ("reason", decode_text),
        "since": ("since", decode_text),
    }


class ListUnwatchedReply(Reply):
    """The answer of ListUnwatched."""

    containers: list[Unwatched]

    decoders = {
        "containers": ("containers", list_of(Unwatched.from_json)),
    }


class Change(Reply):
    """A change of one workload."""

    change: ChangeKind
    at: str
    key: str
    workload: Workload | None = None
    totals: list[Total] | None = None
    error: str | None = None

    decoders = {
        "change": ("change", _change_kind),
        "at": ("at", decode_text),
        "key": ("key", decode_text),
        "workload": ("workload", optional(Workload.from_json)),
        "totals": ("totals", optional(list_of(Total.from_json))),
        "error": ("error", optional(decode_text)),
    }


class WatchReply(Reply):
    """One of the answers of Watch."""

    changes: list[Change]
    listed: bool = False

    decoders = {
        "changes": ("changes", list_of(Change.from_json)),
        "listed": ("listed", decode_boolean),
    }


class PoolUse(Reply, kw_only=True):
    """The use of one event in one domain by one pool of the machine."""

    pool: Pool
    domain: str
    event: str
    kind: Kind
    unit: str
    value: str | None = None
    skew: str
    quality: Quality
    reason: str | None = None

    decoders = {
        "pool": ("pool", _pool),
        "domain": ("domain", decode_text),
        "event": ("event", decode_text),
        "kind": ("kind", _kind),
        "unit": ("unit", decode_text),
        "value": ("value", optional(decode_text)),
        "skew": ("skew", decode_text),
        "quality": ("quality", _quality),
        "reason": ("reason", optional(decode_text)),
    }


class MachineReply(Reply):
    """The answer of Machine."""

    since: str
    read_at: str
    pools: list[PoolUse]

    decoders = {
        "since": ("since", decode_text),
        "readAt": ("read_at", decode_text),
        "pools": ("pools", list_of(PoolUse.from_json)),
    }


class SumsRequest(Struct, omit_defaults=True):
    """The parameters of Sums."""

    by: NameKind | None = None


class RunCount(Reply):
    """A number of runs of one quality."""

    quality: Quality
    runs: int

    decoders = {
        "quality": ("quality", _quality),
        "runs": ("runs", decode_integer),
    }


class Sum(Reply):
    """The use of one event by all workloads of one name."""

    event: str
    unit: str
    value: str | None = None
    late: str | None = None
    estimated: str | None = None
    unknown_runs: int = 0

    decoders = {
        "event": ("event", decode_text),
        "unit": ("unit", decode_text),
        "value": ("value", optional(decode_text)),
        "late": ("late", optional(decode_text)),
        "estimated": ("estimated", optional(decode_text)),
        "unknownRuns": ("unknown_runs", decode_integer),
    }


class NameSums(Reply, kw_only=True):
    """The use of all workloads of one name."""

    by: NameKind
    name: str
    ends: list[RunCount]
    running: int = 0
    sums: list[Sum]

    decoders = {
        "by": ("by", _name_kind),
        "name": ("name", decode_text),
        "ends": ("ends", list_of(RunCount.from_json)),
        "running": ("running", decode_integer),
        "sums": ("sums", list_of(Sum.from_json)),
    }


class SumsReply(Reply, kw_only=True):
    """The answer of Sums."""

    since: str
    reset: str | None = None
    read_at: str
    lost: int
    names: list[NameSums]

    decoders = {
        "since": ("since", decode_text),
        "reset": ("reset", optional(decode_text)),
        "readAt": ("read_at", decode_text),
        "lost": ("lost", decode_integer),
        "names": ("names", list_of(NameSums.from_json)),
    }


class ForeignRequest(Struct, omit_defaults=True):
    """The parameters of ReadForeign."""

    class_: str
    name: str


class ReadForeignReply(Reply):
    """The answer of ReadForeign."""

    foreign: Foreign
    readings: list[Reading]

    decoders = {
        "foreign": ("foreign", Foreign.from_json),
        "readings": ("readings", list_of(Reading.from_json)),
    }


class Capacity(Reply):
    """A monitoring resource of the machine."""

    resource: str
    rmids: int
    events: tuple[str, ...]

    decoders = {
        "resource": ("resource", decode_text),
        "rmids": ("rmids", decode_integer),
        "events": ("events", tuple_of(decode_text)),
    }


class Counters(Reply):
    """The assignable bandwidth counters of one L3 cache."""

    domain: str
    counters: int
    available: int | None = None

    decoders = {
        "domain": ("domain", decode_text),
        "counters": ("counters", decode_integer),
        "available": ("available", optional(decode_integer)),
    }


class Bandwidth(Reply):
    """How the machine counts memory bandwidth."""

    mode: Mode
    can_assign: bool
    counters: tuple[Counters, ...]

    decoders = {
        "mode": ("mode", _mode),
        "canAssign": ("can_assign", decode_boolean),
        "counters": ("counters", tuple_of(Counters.from_json)),
    }


class Latency(Reply):
    """The durations of the calls of one kind, as a histogram."""

    calls: CallKind
    since: str
    bounds_us: tuple[int, ...]
    counts: tuple[int, ...]
    sum_us: int

    decoders = {
        "calls": ("calls", _call_kind),
        "since": ("since", decode_text),
        "boundsUs": ("bounds_us", tuple_of(decode_integer)),
        "counts": ("counts", tuple_of(decode_integer)),
        "sumUs": ("sum_us", decode_integer),
    }


class StatusReply(Reply, kw_only=True):
    """The answer of Status."""

    version: str
    mount: str
    mounted: bool
    simulation: str | None = None
    rmids: int
    rmids_used: int
    pending: int
    in_limbo: bool | None = None
    oldest_pending_ms: int | None = None
    groups: int
    foreign: list[Foreign]
    classes: list[str]
    capacity: list[Capacity]
    bandwidth: Bandwidth | None = None
    latencies: tuple[Latency, ...] | None = None
    problems: list[str]

    decoders = {
        "version": ("version", decode_text),
        "mount": ("mount", decode_text),
        "mounted": ("mounted", decode_boolean),
        "simulation": ("simulation", optional(decode_text)),
        "rmids": ("rmids", decode_integer),
        "rmidsUsed": ("rmids_used", decode_integer),
        "pending": ("pending", decode_integer),
        "inLimbo": ("in_limbo", optional(decode_boolean)),
        "oldestPendingMs": ("oldest_pending_ms", optional(decode_integer)),
        "groups": ("groups", decode_integer),
        "foreign": ("foreign", list_of(Foreign.from_json)),
        "classes": ("classes", list_of(decode_text)),
        "capacity": ("capacity", list_of(Capacity.from_json)),
        "bandwidth": ("bandwidth", optional(Bandwidth.from_json)),
        "latencies": ("latencies", optional(tuple_of(Latency.from_json))),
        "problems": ("problems", list_of(decode_text)),
    }
