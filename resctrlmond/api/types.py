# SPDX-License-Identifier: Apache-2.0
r"""The types of the public interface, with their descriptions: the only declaration of what callers send and receive.

``python -m tests.interfaces`` writes the varlink and D-Bus descriptions and the reference in the manual pages from
this module and from the rows of ``verbs.VERBS`` and ``errors.ERRORS``. The docstring of a struct describes the type,
the text below a field the field; a field without one is described in ``Common``. The texts are in the markup of
scdoc(5): \*name\*, \_value\_.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from resctrlmond.resctrl.kinds import Kind, Mode, Status
from resctrlmond.workloads.model.changes import ChangeKind, ContainerState
from resctrlmond.workloads.model.reports import Facts, Report, Sandbox
from resctrlmond.workloads.model.states import (
    CallKind,
    CompanionState,
    EndRule,
    NameKind,
    Pool,
    ProofKind,
    Quality,
    State,
)

# The index of a file descriptor among those that come with a message: int in varlink, h over D-Bus.
DescriptorIndex = Annotated[int, msgspec.Meta(extra={"dbus": "h"})]

# Types that have another name at the interfaces than in the layer that they come from.
PUBLIC_NAMES: dict[type[enum.StrEnum], str] = {Kind: "EventKind", Status: "ReadingStatus", Mode: "BandwidthMode"}


class Request(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel", kw_only=True
):
    """The parameters of a verb. Unknown fields and values of another type are refused."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """The answer of a verb, or a part of it. A field that has its default is left out."""


class Common(Reply, frozen=True, kw_only=True):
    """The fields that mean the same in every request and reply, unless a type describes its own."""

    key: str
    r"""The workload: a pod's UID, a container's id, a unit's name, or another name of at most 200 ASCII letters,
    digits, backslashes and "@:.\_-+,=~" that begins with neither "." nor "-". Pod UIDs are accepted in any form and
    returned in lower case with dashes.
    """
    claim: str
    """The owner of the claim. Default: _uid:_ and the caller's user id. The names _oci_, _recovered_, _systemd_
    and _overflow_ are reserved for the daemon: only *Release* accepts them. The daemon does not interpret any other
    name.
    """
    end_rule: EndRule
    """The rule by which the claim ends. Default: _release_ for a new claim; an existing claim keeps its rule. A
    request with _tasks_ is refused.
    """
    attributes: dict[str, str]
    """Names and values that describe the workload, such as a pod's name: at most 64. The daemon shows them and does
    not interpret them. An attribute that another owner set does not change while that owner claims the workload.
    """
    workload: Workload
    """The workload after the call."""
    allow_pending: bool
    """Whether the workload may wait if no RMID is free. _true_, the default: it is _pending_, and gets its group when
    an RMID is free. _false_: nothing is created, and the error is *RmidsExhausted*.
    """
    priority: int
    """The order in which pending workloads get free RMIDs: -1000 to 1000, the highest first; at the same priority,
    the oldest first. 0 until a caller or a profile sets it.
    """
    facts: Facts
    """Facts about the container or pod by which its profile is selected. If the profile excludes it, the error is
    *NotWatched*. If its profile gives the container a group of its own, the key of the workload is the id of the
    member, and its claim is the daemon's. Without facts, no profile is selected.
    """


class Claim(Reply, frozen=True):
    """An owner's statement that the workload is in use, with the rule by which it ends."""

    owner: str
    """_oci_ (the hook), _nri_ (the plugin), _cli_ and _run_ (*resctrlctl*), _recovered_ (the daemon, for a group
    whose record was lost), _systemd_ (a unit), _overflow_ (units that share a group), _uid:_ and a user id, or a
    name that a client chose.
    """
    since: str
    """When the owner first claimed the workload."""
    end_rule: EndRule
    """The rule by which the claim ends."""


class Member(Reply, frozen=True):
    """A container, sandbox, process or control group of a workload."""

    id: str
    """The id of the member."""
    kind: str
    """What the member is, such as _container_, _sandbox_ or _process_."""
    owner: str
    """The owner of the claim with which the member was added."""
    pid: int = 0
    """The first process of the member."""
    start_time: int = 0
    """Field 22 of _/proc/PID/stat_ of that process. *pid* and *startTime* together identify a process uniquely."""
    cgroup: str = ""
    """The directory of the control group that holds this member and nothing else."""
    started_at: str = ""
    """When the member was added."""
    ended_at: str = ""
    """When the member ended. Absent while it lives."""
    late: bool = False
    """Whether the member, or a task that joined it from outside, had already run when it was put into the group."""
    tasks_outside: int = 0
    """How many of its tasks are outside the workload's groups."""
    reason: str = ""
    """Why the member, or a part of it, is not in the workload's group."""
    snapshot_folder: str = ""
    """The directory below _classes/_ in the snapshot, for a member that is counted in a further group of the
    workload. Absent if the member is counted in the first group.
    """
    take_over: bool = False
    """As in the *Assign* that added the member; kept while the member waits for its group."""
    allow_class_change: bool = False
    """As in the *Assign* that added the member; kept while the member waits for its group."""
    joining: bool = False
    """Whether the tasks of the member are being moved."""
    include_descendants: bool = False
    """As in the *Assign* that added the member; kept while the member waits for its group."""
    cpu_time_before_ns: int = 0
    """The most CPU time, in nanoseconds, that the member can have used before it was put into the group. This does
    not bound joules or bytes.
    """
    descendants_outside: int = 0
    """How many descendants of the member stayed outside when it was put into the group."""
    dormant: bool = False
    """Whether the member is a control group, such as that of a service, that is empty or was removed. As long as its
    owner claims the workload, tasks that appear at its path are put into the group, and the totals are _late_.
    """
    profile: str = ""
    """The name of its profile. Absent if it has none. See *resctrlmond-profiles*(5)."""
    profile_source: str = ""
    """The annotation or rule that selected the profile, or no profile."""
    exposed: str = ""
    """Whether the container has the files of the workload as a mount, or why not. Absent if its profile does not
    expose them.
    """

    @property
    def lives(self) -> bool:
        """Whether the member has not ended."""
        return not self.ended_at


class Companion(Reply, frozen=True, kw_only=True):
    """The process that the profile of a workload starts beside it; see *resctrlmond-profiles*(5)."""

    state: CompanionState
    """Where it is in its life."""
    reason: str = ""
    """Why it is in this state. Absent if there is no reason."""
    unit: str
    """The unit of systemd that it runs in."""


class Workload(Reply, frozen=True, kw_only=True):
    """A workload, with its claims and members."""

    key: str
    class_: str = msgspec.field(name="class")
    """The class of its first group, by the name of the control group; "" is the root."""
    classes: tuple[str, ...] | None = None
    """All classes in which the workload has a group, if there are several. Readings and totals are then the sums."""
    state: State
    """The state of the workload."""
    reason: str | None = None
    """Why the workload is in this state."""
    in_limbo: bool = False
    """With _pending_: whether RMIDs are in limbo, that is, freed but not usable until their cache lines are gone."""
    priority: int = 0
    profile: str = ""
    """The name of the profile of its pod or container. Absent if it has none. See *resctrlmond-profiles*(5)."""
    profile_source: str = ""
    """The annotation or rule that selected the profile, or no profile."""
    events: tuple[str, ...] | None = None
    """The globs of its profile: totals, readings and files have only the events that these select. Absent for all."""
    companion: Companion | None = None
    """Its companion. Absent if its profile has none."""
    memory: str = ""
    """Whether systemd has set the memory settings of its profile, or why not. Absent for a workload whose profile has
    none, and for one that is not a unit of systemd or a container of Podman.
    """
    path: str | None = None
    """The directory of the group in resctrl. Absent while there is none."""
    observed: bool = False
    """Whether another program owns the group: the runtime of the container created it. The group is read, and never
    changed, and no total is better than _estimated_.
    """
    snapshot: str | None = None
    """The directory with the begin and end files; see *resctrlmond*(8), *FILES*."""
    generation: int
    """The number of this run, counted from 1 for each key."""
    part_of: tuple[str, ...] | None = None
    """The keys of the workloads in which it began, the nearest first (*nested* in *Assign*)."""
    nested: int = 0
    """How many workloads are or were nested in it. A task is counted in the innermost workload only."""
    loss: str | None = None
    """When and why the workload lost an earlier group. Its totals then cover all runs, and state what is missing."""
    baseline: Quality
    """The quality of the begin values as a whole: _estimated_ if there are caveats."""
    caveats: dict[str, str] = msgspec.field(default_factory=dict)
    """For each event whose totals cannot be exact, whatever its counters read: the reason, and what to do. No
    bandwidth counter was free when the group was created, the processor reallocates its bandwidth counters, or
    another program changed what they count.
    """
    cpu_time_ns: int | None = None
    """The CPU time that tasks in its control groups used in its groups in this run, as *resctrlmond-witness*(8) has
    recorded it. *Get*, *Read*, *ReadAll* and *Release* ask the witness; other replies have what was seen last. Absent
    if the witness does not show it, and for a workload that is not known by control groups, such as a command.
    """
    cpu_time_outside_ns: int | None = None
    """The CPU time that tasks in its control groups used outside its groups, and that the totals lack. Absent if
    *cpuTimeNs* is.
    """
    claims: tuple[Claim, ...]
    """The claims on the workload."""
    members: tuple[Member, ...]
    """The members of the workload, with those that have ended."""
    attributes: dict[str, str]
    created_at: str | None = None
    """When the begin values were read."""
    completed_at: str | None = None
    """When the end values were read."""
    created_ns: int | None = None
    """When the begin values were read, in nanoseconds since boot (CLOCK_BOOTTIME, see *clock_gettime*(2)). The system
    clock may be set, so durations are differences of such times.
    """
    completed_ns: int | None = None
    """When the end values were read, in nanoseconds since boot."""


class Proof(Reply, frozen=True, kw_only=True):
    """One of the proofs on which the quality of a workload rests, as far as it is known."""

    kind: ProofKind
    """The proof."""
    shown: bool
    """Whether it is shown. If it is not, the text states what is missing."""
    text: str
    """What was seen, with its bounds and the time."""


class Foreign(Reply, frozen=True, kw_only=True):
    """A monitoring group without the daemon's mark: another program created it. It is listed, and never changed."""

    class_: str = msgspec.field(name="class")
    """The class, by the name of its control group; "" is the root."""
    name: str
    """The name of its directory."""
    path: str
    """The path of its directory."""


class Unwatched(Reply, frozen=True, kw_only=True):
    """A container, or a unit of systemd, that is in no group because of its profile."""

    id: str
    """The id of the container, or the name of the unit."""
    name: str = ""
    """The name of the container. Absent if it is not known, and for a unit."""
    is_unit: bool = False
    """Whether it is a unit of systemd."""
    pod: str = ""
    """The UID of its pod. Absent if it has none."""
    profile: str
    """The name of its profile."""
    profile_source: str
    """The annotation, rule or default that selected the profile."""
    reason: str
    """Why it is in no group."""
    since: str
    """When it started, or was found."""


class Reading(Reply, frozen=True, kw_only=True):
    """The value of one event in one domain."""

    domain: str
    """The directory in _mon_data_, such as _mon_L3_00_."""
    event: str
    """The file in that directory; *resctrlmond*(7) lists the events."""
    kind: Kind
    """What the difference of two values means."""
    unit: str
    """_bytes_, _joules_, _farads_, _cycles_, or "" for a count."""
    status: Status
    """Whether the value is a number and, if not, why."""
    value: str | None = None
    """The number. Absent if there is none."""
    text: str
    """The text that the kernel wrote."""
    nested: bool
    """Whether the domain is inside another one, whose reading already contains this one: do not add up both."""


class Total(Reply, frozen=True, kw_only=True):
    """The use of one event over all domains, since the baseline."""

    event: str
    """The event, as in *Reading*."""
    unit: str
    """The unit, as in *Reading*."""
    value: str | None = None
    """The exact number. Absent if it is unknown."""
    quality: Quality
    """How far the number can be trusted."""
    reason: str | None = None
    """Why the quality is not _exact_; *resctrlmond*(7), *QUALITY*, lists the reasons."""


class DomainUse(Reply, frozen=True, kw_only=True):
    """The use of one event in one domain by one workload."""

    domain: str
    """The directory in _mon_data_, such as _mon_L3_00_. An L3 cache includes its Sub-NUMA nodes."""
    event: str
    """The event, as in *Reading*."""
    kind: Kind
    """_cumulative_: *value* is the use since the baseline. _gauge_: it is the current value."""
    unit: str
    """The unit, as in *Reading*."""
    value: str | None = None
    """The number. Absent if it is unknown."""
    quality: Quality | None = None
    """How far the number can be trusted. Absent with a gauge."""
    reason: str | None = None
    """Why the quality is not _exact_. After a loss, the use of the earlier runs is missing in *value*, because only
    their sums over all domains are known.
    """


class Level(Reply, frozen=True, kw_only=True):
    """The current value of one gauge, such as cache occupancy, over all domains."""

    event: str
    """The event, as in *Reading*."""
    unit: str
    """The unit, as in *Reading*."""
    value: str | None = None
    """The number. Absent if a domain has none."""


class Usage(Reply, frozen=True, kw_only=True):
    """A workload with what it used."""

    workload: Workload
    """The workload."""
    read_at: str | None = None
    """When the counters were read, or the end values of a workload that is over. Absent if it has no group."""
    read_ns: int | None = None
    """The same time, in nanoseconds since boot, as *createdNs* of *Workload*."""
    totals: list[Total]
    """What was used since the baseline, over all domains."""
    levels: list[Level]
    """The current values of the gauges. Empty if the workload has no group."""
    domains: list[DomainUse] | None = None
    """The parts of *totals* and *levels* in each domain, in order of domain and event; after a loss, the part of the
    present run only. Absent without *domains* in the call.
    """
    error: str | None = None
    """Why the workload could not be read, so that totals are missing."""


class Change(Reply, frozen=True, kw_only=True):
    """A change of one workload."""

    change: ChangeKind
    """The kind of the change."""
    at: str
    """When the daemon noticed it."""
    key: str
    workload: Workload | None = None
    """The workload after the change. Absent if it was removed."""
    totals: list[Total] | None = None
    """With _ended_: what the run used."""
    error: str | None = None
    """With _ended_: why there are no totals."""


class Failure(Reply, frozen=True, kw_only=True):
    """The error of one key, in the reply of a call with several keys."""

    key: str
    error: str
    """The name of the error."""
    message: str
    """What failed and why, in one sentence."""


class PoolUse(Reply, frozen=True, kw_only=True):
    """The use of one event in one domain by one pool of the machine."""

    pool: Pool
    """The pool."""
    domain: str
    """The directory in _mon_data_, such as _mon_L3_00_. An L3 cache includes its Sub-NUMA nodes."""
    event: str
    """The event, as in Reading."""
    kind: Kind
    """_cumulative_: *value* is the use since *since* of the reply. _gauge_: it is the current value."""
    unit: str
    """The unit, as in Reading."""
    value: str | None = None
    """The number. Absent if it is unknown."""
    skew: str
    """By how much the number can be wrong at most: counters run on while they are read one after the other."""
    quality: Quality
    """_exact_: everything was counted, up to *skew*. _estimated_: some use may be missing."""
    reason: str | None = None
    """Why the quality is not exact."""


class RunCount(Reply, frozen=True, kw_only=True):
    """A number of runs of one quality."""

    quality: Quality
    """The worst quality of the totals of each run."""
    runs: int
    """How many runs."""


class Sum(Reply, frozen=True, kw_only=True):
    """The use of one event by all workloads of one name."""

    event: str
    """The event, as in Reading."""
    unit: str
    """The unit, as in Reading."""
    value: str | None = None
    """The number, with the parts that are not exact. Absent if no workload has a number."""
    late: str | None = None
    """The part of *value* that is _late_; _0_ if the late runs have counted nothing. Absent if no run is late."""
    estimated: str | None = None
    """The part of *value* that is _estimated_; _0_ if the estimated runs have counted nothing. Absent if none is."""
    unknown_runs: int = 0
    """How many runs have no number, or never had an RMID, so that their use is missing in *value*. Units that share a
    group are among them, although the workload of that group has their use.
    """


class NameSums(Reply, frozen=True, kw_only=True):
    """The use of all workloads of one name."""

    by: NameKind
    """The grouping of the name."""
    name: str
    """The name. "" for the workloads that have none, and _(other)_ for names above 128 in the grouping or longer than
    128 characters.
    """
    ends: list[RunCount]
    """How many runs have ended."""
    running: int = 0
    """How many workloads have not ended."""
    sums: list[Sum]
    """The use of the runs that have ended, and of the others until now, in order of the event."""


class Latency(Reply, frozen=True, kw_only=True):
    """The durations of the calls of one kind, as a histogram."""

    calls: CallKind
    """The kind of the calls."""
    since: str
    """When the daemon started, and began to count."""
    bounds_us: tuple[int, ...]
    """The upper bounds of the buckets, in microseconds."""
    counts: tuple[int, ...]
    """How many calls took longer than the bound before and at most as long as that of the bucket. The last number is
    that of the calls above all bounds.
    """
    sum_us: int
    """The sum of all durations, in microseconds."""


class Capacity(Reply, frozen=True, kw_only=True):
    """A monitoring resource of the machine."""

    resource: str
    """The directory in _info_ of resctrl, such as _L3_MON_."""
    rmids: int
    """The number of its RMIDs."""
    events: tuple[str, ...]
    """The events that it counts."""


class Counters(Reply, frozen=True, kw_only=True):
    """The assignable bandwidth counters of one domain."""

    domain: str
    """The domain, such as the L3 cache _mon_L3_00_."""
    counters: int
    """The number of counters of the domain, for all groups."""
    available: int | None = None
    """The number of free counters. Absent unless the mode is _assigned_."""


class Bandwidth(Reply, frozen=True, kw_only=True):
    """How the machine counts memory bandwidth."""

    mode: Mode
    """How RMIDs get their counters."""
    can_assign: bool
    """Whether the kernel offers the mode _mbm_event_."""
    counters: tuple[Counters, ...]
    """The domains that have assignable counters."""


class Container(Reply, frozen=True, kw_only=True):
    """A container of a pod."""

    id: str
    """The id of the container."""
    name: str
    """The name of the container; "" if no owner reported it."""
    state: ContainerState
    """The state of the container."""
    sandbox: str | None = None
    """The id of its sandbox. Absent if no owner reported it."""
    pid: int | None = None
    """Its first process."""
    monitored: bool
    """Whether the container is counted in its pod's group."""
    reason: str | None = None
    """Why the container is not in a group although it runs."""


class Pod(Reply, frozen=True, kw_only=True):
    """A pod with its workload."""

    key: str
    name: str
    """The name of the pod."""
    namespace: str
    """The namespace of the pod."""
    labels: dict[str, str]
    """The labels of the pod."""
    sandboxes: list[str]
    """The ids of its sandboxes: more than one while a sandbox is replaced."""
    containers: list[Container]
    """The containers of the pod."""
    reason: str | None = None
    """Why the pod has no workload."""
    workload: Workload | None = None
    """The workload of the pod. Absent if it has none."""


class CreateRequest(Request, frozen=True, kw_only=True):
    """The parameters of Create."""

    key: str
    class_: str | None = msgspec.field(default=None, name="class")
    """The class of the group, by the name of its control group; "" is the root. _follow_, the default: the class of
    the first task.
    """
    claim: str | None = None
    end_rule: EndRule | None = None
    attributes: dict[str, str] | None = None
    allow_pending: bool | None = None
    priority: int | None = None
    facts: Facts | None = None


class AssignRequest(Request, frozen=True, kw_only=True):
    """The parameters of Assign."""

    key: str
    pid: int | None = None
    """A process, by its id in the daemon's PID namespace. A caller in another PID namespace gets *PermissionDenied*.
    """
    pid_fd: DescriptorIndex | None = None
    """A process, by the index of a pidfd (*pidfd_open*(2)) among the file descriptors that are passed together with
    the message: over varlink with SCM_RIGHTS, as with *varlinkctl --push-fd=*, over D-Bus as a value of type h. A
    pidfd works from every PID namespace, and never refers to another process.
    """
    cgroup: str | None = None
    """The directory of a control group."""
    own_cgroup: str | None = None
    """With *pid*: the directory of the control group that holds the process and nothing else. Tasks that join it
    later are put into the group.
    """
    late: bool | None = None
    """With *pid*: whether the process has already run user code. If it has, its totals are _late_. With _false_, the
    caller states that the process has not run, and that it keeps the process from running until the reply arrives or
    the connection is closed; if the caller ends or closes the connection before the process is in the group, the
    totals are _late_ nevertheless, as if the process has used more than 1 s of CPU time. If the field is absent, the
    daemon checks: a process that has used CPU time has run. With *cgroup*, the daemon always checks.
    """
    include_descendants: bool | None = None
    """With *pid*: whether to move all existing descendants of the process too. Processes that it starts later are in
    the group in any case. A descendant whose parent has ended cannot be found: use *cgroup* for it.
    """
    class_: str | None = msgspec.field(default=None, name="class")
    """The class for the tasks, by the name of its control group; "" is the root. _follow_, the default: the class in
    which the tasks are. If the workload has its group in another class, it gets a further group there.
    """
    allow_class_change: bool | None = None
    """Whether to move tasks that are in another class to *class*, which changes their allocation of cache and
    bandwidth. Without this, the error is *ClassMismatch*.
    """
    take_over: bool | None = None
    """Whether to take tasks out of other monitoring groups, which then no longer count them; the totals of a workload
    that loses tasks become _late_. Without this, the error is *AlreadyMonitored* if the first task is in another
    monitoring group, and further tasks that are in another one stay there.
    """
    nested: bool | None = None
    """With *pid* and a new workload: whether the workload begins inside the one in whose group the process is. It
    takes the process out of that group, and both can be _exact_: the outer workload is not _late_, and *Read* and
    *Release* return for it what its nested workloads used too. When the nested workload ends, tasks of it that run
    on are moved into the group of the outer one. The nested workload does not wait for an RMID. Not with *takeOver*.
    With *ownCgroup*, neither is _exact_: a task that leaves both that control group and the group is in no workload.
    """
    claim: str | None = None
    end_rule: EndRule | None = None
    member: str | None = None
    """The id of the member. Default: _pid-PID_, or the control group's name."""
    kind: str | None = None
    """What the member is, such as _container_. Default: _process_."""
    attributes: dict[str, str] | None = None
    allow_pending: bool | None = None
    priority: int | None = None
    facts: Facts | None = None
    exposed: str | None = None
    """Whether the container has the files of the workload as a mount (*Expose*), or why not; for the record."""


class ReleaseRequest(Request, frozen=True, kw_only=True):
    """The parameters of Release."""

    key: str
    claim: str | None = None
    """The owner of the claim. Default: _uid:_ and the caller's user id."""
    reason: str | None = None
    """Why the claim ends, for the record."""


class AddMemberRequest(Request, frozen=True, kw_only=True):
    """The parameters of AddMember."""

    key: str
    member: str
    """The id of the member."""
    kind: str | None = None
    """What the member is. Default: _sandbox_."""
    claim: str | None = None


class RemoveMemberRequest(Request, frozen=True, kw_only=True):
    """The parameters of RemoveMember."""

    key: str
    member: str
    """The id of the member."""
    reason: str | None = None
    """Why the member ended, for the record."""


class ExposeRequest(Request, frozen=True, kw_only=True):
    """The parameters of Expose."""

    key: str
    member: str
    """The id of the container."""
    cgroup: str | None = None
    """The path of the container's control group below the mount point, which need not exist yet. The directory stays
    as long as the control group or the workload exists.
    """


class ReconcileRequest(Request, frozen=True, kw_only=True):
    """The parameters of Reconcile."""

    claim: str
    """The owner of the claims."""
    keys: list[str]
    """The keys of all workloads that the owner still uses."""


class MoveRequest(Request, frozen=True, kw_only=True):
    """The parameters of Move."""

    key: str
    class_: str = msgspec.field(name="class")
    """The class to move to, by the name of its control group; "" is the root."""


class ReportPodsRequest(Request, frozen=True, kw_only=True):
    """The parameters of ReportPods."""

    claim: str
    """The owner that reports."""
    sandboxes: list[Sandbox] | None = None
    """The sandboxes to report. Each replaces an earlier report of the same sandbox."""
    removed: list[str] | None = None
    """The ids of sandboxes that were removed."""
    replace_all: bool | None = None
    """Whether to forget all earlier reports of this owner first."""


class KeyRequest(Request, frozen=True, kw_only=True):
    """The parameters of a verb that reads one workload."""

    key: str


class ReadAllRequest(Request, frozen=True, kw_only=True):
    """The parameters of ReadAll."""

    with_ended: bool | None = None
    """Whether to return the workloads that are over too, up to _snapshot_ttl_ after their end. Default: _false_."""
    after: str | None = None
    """Return only workloads whose keys follow this one: the field *next* of the reply before."""
    domains: bool | None = None
    """Whether to return the use in each domain too. Default: _false_."""


class SumsRequest(Request, frozen=True, kw_only=True):
    """The parameters of Sums."""

    by: NameKind | None = None
    """The grouping to return. Default: all of them."""


class ForeignRequest(Request, frozen=True, kw_only=True):
    """The parameters of ReadForeign."""

    class_: str = msgspec.field(name="class")
    """The class, by the name of its control group; "" is the root."""
    name: str
    """The name of the group's directory, as in *List*."""


class NoParameters(Request, frozen=True, kw_only=True):
    """The parameters of a verb that has none."""


class WorkloadReply(Reply, frozen=True, kw_only=True):
    """The answer of a verb on one workload."""

    workload: Workload


class GetReply(Reply, frozen=True, kw_only=True):
    """The answer of Get."""

    workload: Workload
    """The workload."""
    proofs: list[Proof] = msgspec.field(default_factory=list)
    """The proofs on which its quality rests, as far as they are known now: _entered_ for each member, and one of each
    other kind.
    """


class AssignReply(Reply, frozen=True, kw_only=True):
    """The answer of Assign."""

    workload: Workload
    moved: int
    """How many tasks were moved into the group."""
    passes: int
    """How often the tasks were listed until no new task was found."""
    tasks_outside: int
    """How many tasks stayed outside: they are in another monitoring group, or in a class where the workload's group
    waits for an RMID.
    """
    descendants_outside: int
    """How many descendants of the process stayed outside."""


class ReleaseReply(Reply, frozen=True, kw_only=True):
    """The answer of Release."""

    workload: Workload
    completed: bool
    """Whether it was the last claim, so that the workload has ended."""
    totals: list[Total]
    """What the workload itself used from the baseline until now or, with *completed*, until the end."""
    nested: list[Total] | None = None
    """What its nested workloads used since its baseline, which is not in *totals*. Absent if there were none."""


class ExposeReply(Reply, frozen=True, kw_only=True):
    """The answer of Expose."""

    path: str
    """The directory to mount. It exists, and has regular files only: see *resctrlmond*(8), *FILES*."""


class ReconcileReply(Reply, frozen=True, kw_only=True):
    """The answer of Reconcile."""

    kept: list[str]
    """Those of *keys* that the owner claims."""
    released: list[str]
    """The workloads on which the owner's claim was ended."""
    failures: list[Failure]
    """Those of *keys* that the owner does not claim and can claim again with *Create* or *Assign*, and the workloads
    on which its claim could not be ended.
    """


class ListReply(Reply, frozen=True, kw_only=True):
    """The answer of List."""

    workloads: list[Workload]
    """The workloads in order of their keys, with those that ended less than _snapshot_ttl_ ago."""
    foreign: list[Foreign]
    """The monitoring groups without the daemon's mark."""


class ListUnwatchedReply(Reply, frozen=True, kw_only=True):
    """The answer of ListUnwatched."""

    containers: list[Unwatched]
    """The containers and units, in order of their ids."""


class ReportPodsReply(Reply, frozen=True, kw_only=True):
    """The answer of ReportPods."""

    count: int
    """How many sandboxes of the owner the daemon knows now."""


class ListPodsReply(Reply, frozen=True, kw_only=True):
    """The answer of ListPods."""

    pods: list[Pod]
    """The pods, in order of namespace and name."""
    reported: list[Report]
    """When each owner last reported."""


class ReadReply(Reply, frozen=True, kw_only=True):
    """The answer of Read."""

    workload: Workload
    """The workload."""
    readings: list[Reading]
    """The current counters in each domain. Empty if the workload is over."""
    read_ns: int | None = None
    """When the counters were read, or the end values of a workload that is over, in nanoseconds since boot, as
    *createdNs* of *Workload*. Absent if it has no group.
    """
    totals: list[Total]
    """What the workload itself used since the baseline, over all domains."""
    domains: list[DomainUse] | None = None
    """The parts of *totals* in each domain, and the current values of its gauges, in order of domain and event.
    After a loss, the part of the present run only. Absent if there are none.
    """
    nested: list[Total] | None = None
    """What its nested workloads used since its baseline, which is not in *totals*. Absent if there were none."""


class ReadAllReply(Reply, frozen=True, kw_only=True):
    """The answer of ReadAll."""

    usages: list[Usage]
    """The workloads in order of their keys."""
    next: str = ""
    """The last key of this reply, if workloads follow that did not fit into it: pass it as *after*. Otherwise ""."""


class WatchReply(Reply, frozen=True, kw_only=True):
    """One of the answers of Watch."""

    changes: list[Change]
    """The changes in their order."""
    listed: bool = False
    """Whether all workloads that are _present_ have been listed with this answer. The next ones have what changed."""


class MachineReply(Reply, frozen=True, kw_only=True):
    """The answer of Machine."""

    since: str
    """When counting began: soon after the start of a daemon, which can be an earlier one than the present, or after
    resctrl was mounted again."""
    read_at: str
    """When the counters were read."""
    pools: list[PoolUse]
    """The use of each pool, by domain and event."""


class SumsReply(Reply, frozen=True, kw_only=True):
    """The answer of Sums."""

    since: str
    """When the sums began: at the first start of the daemon after the boot. A run that had not ended then counts from
    its baseline on, even if that is earlier.
    """
    reset: str | None = None
    """Why the sums began again after that, at *since*. Absent if they did not."""
    read_at: str
    """When the sums were read. The counters were read up to half a second before; those of hundreds of groups, up to
    twice the time that their reading takes."""
    lost: int
    """How many of the ended runs had lost a group."""
    names: list[NameSums]
    """The sums, in order of grouping and name. The names of each grouping have all workloads together."""


class ReadForeignReply(Reply, frozen=True, kw_only=True):
    """The answer of ReadForeign."""

    foreign: Foreign
    """The monitoring group."""
    readings: list[Reading]
    """The current counters in each domain."""


class StatusReply(Reply, frozen=True, kw_only=True):
    """The answer of Status."""

    version: str
    """The version of *resctrlmond*."""
    mount: str
    """The directory where resctrl is, or is expected to be, mounted."""
    mounted: bool
    """Whether resctrl is mounted there."""
    simulation: str | None = None
    """The profile of the simulator. Absent on a real kernel. See *resctrlmond-sim*(1)."""
    rmids: int
    """The number of RMIDs of the machine, for all programs: the smallest number among its monitoring resources."""
    rmids_used: int
    """The number of RMIDs that the classes, including the root, and the groups of all programs use."""
    pending: int
    """How many workloads wait for an RMID."""
    in_limbo: bool | None = None
    """Whether pending workloads wait for RMIDs in limbo. Absent if no workload waits, because the kernel reports this
    only when an RMID is requested.
    """
    oldest_pending_ms: int | None = None
    """How many milliseconds the oldest pending workload has waited. Absent if no workload waits."""
    groups: int
    """How many workloads have a monitoring group."""
    foreign: list[Foreign]
    """The monitoring groups without the daemon's mark."""
    classes: list[str]
    """The names of the classes, "" for the root."""
    capacity: list[Capacity]
    """The monitoring resources of the machine."""
    bandwidth: Bandwidth | None = None
    """How memory bandwidth is counted. Absent if resctrl is not mounted."""
    latencies: tuple[Latency, ...] | None = None
    """How long calls took, by kind."""
    problems: list[str]
    """Problems for an operator, one sentence each: what was wrong at the start, which system calls hang,
    whether another program removes monitoring groups of the daemon and which processes may be the cause, and which
    workloads lack bandwidth counters.
    """


class RunRequest(Request, frozen=True, kw_only=True):
    """The parameters of org.resctrlmon.Hook.Run."""

    stage: str
    """The stage of the hook. _createRuntime_ or _prestart_: put the container's first process into its workload's
    group before that process executes the container's program. _poststop_: record that the container has ended. Other
    stages change nothing.
    """
    state: str
    """The container's state (OCI runtime specification, "State"): the JSON text that the runtime wrote."""


class RunReply(Reply, frozen=True, kw_only=True):
    """The answer of org.resctrlmon.Hook.Run."""

    key: str | None = None
    state: str | None = None
    """The *State* of the workload."""
    moved: int | None = None
    """How many tasks were moved into the group."""
    queue_timeout_ms: int | None = None
    """The call waits for those of other containers. The maximum duration of the hook in milliseconds, unless a later
    reply extends it, up to *hook_queue_timeout* in *resctrlmond.yaml*(5). Another reply follows.
    """


class AssignSelfRequest(Request, frozen=True, kw_only=True):
    """The parameters of org.resctrlmon.Unit.AssignSelf."""

    children_us: int | None = None
    """The CPU time (µs) of the children that the process has waited for (*getrusage*(2), RUSAGE_CHILDREN). They have
    prepared the command for systemd, so their use is not missing. Other processes can read this time only in clock
    ticks, and *resctrlmond* lowers or raises the value to agree with them.
    """


class AssignSelfReply(Reply, frozen=True, kw_only=True):
    """The answer of org.resctrlmon.Unit.AssignSelf."""

    key: str | None = None
    state: str | None = None
    """The *State* of the workload."""
    exact: bool | None = None
    """Whether the service is *exact* so far: see *resctrlmon-unit-exec*(8)."""


class ErrorParameters(Reply, frozen=True, kw_only=True):
    """The fields of every error but *InternalError*."""

    message: str
    """What failed and why, in one sentence."""
    path: str | None = None
    """The file or directory."""
    errno: str | None = None
    """The name of the errno, such as _EINVAL_."""
    status: str | None = None
    """The kernel's explanation, from _info/last_cmd_status_."""
    remedy: str | None = None
    """What to do."""


class ExhaustedParameters(ErrorParameters, frozen=True, kw_only=True):
    """The fields of *RmidsExhausted*."""

    in_limbo: bool
    """Whether RMIDs are in limbo, and can be used when their cache lines are gone."""
