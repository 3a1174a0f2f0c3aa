# SPDX-License-Identifier: Apache-2.0
"""Workloads and their monitoring groups, as the daemon remembers them."""

from __future__ import annotations

import enum

import msgspec

from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.resctrl.witness import Ids, Use, Watch
from resctrlmond.workloads.model.event_globs import selects
from resctrlmond.workloads.model.states import EndRule, Quality, State

# Declared in a module that clients can import without this one.
__all__ = ["EndRule", "State"]

# The folder of a group in the root class, which has no name: resctrl has a directory of this name itself, so no class
# is called so.
ROOT_FOLDER = "mon_groups"
# Kinds of members that processes may join from outside. A child of another member's process starts in its group.
CONTAINERS = frozenset({"container", "sandbox"})
# With the same reason, and other values: each total repeats them.
MAX_DOUBTS = 5
# A container that crashes in a loop is a new member each time, and each new member writes the whole record.
MAX_ENDED_MEMBERS = 100

replace = msgspec.structs.replace


class GroupState(enum.StrEnum):
    """Where one monitoring group is in its life."""

    PENDING = "pending"
    """The directory has not been created, or its begin values have not been written."""
    CREATED = "created"
    """The directory exists, and the begin values are written."""
    ENDING = "ending"
    """The end values are being written."""
    COMPLETED = "completed"
    """The end values are written, and the directory has been removed."""
    LOST = "lost"
    """Another program removed the directory, or unmounted resctrl."""
    FAILED = "failed"
    """The directory could not be created."""

    @property
    def has_directory(self) -> bool:
        """Whether a group in this state has a directory in resctrl."""
        return self in (GroupState.CREATED, GroupState.ENDING)

    @property
    def is_over(self) -> bool:
        """Whether only the files of the group remain."""
        return self in (GroupState.COMPLETED, GroupState.LOST, GroupState.FAILED)


class Claim(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A statement of ``owner`` that the workload is in use, since a time (RFC 3339, UTC), and the rule of its end."""

    owner: str
    since: str
    ends: EndRule


class Member(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A container, sandbox or process of a workload.

    ``folder`` names the group that the member counts in (``Group.folder``).
    ``late``: it is not known that its first task was in the group before it ran. ``may_have_run`` is why it may have
    run before, "" if it has.
    ``joining``: its tasks are being moved. After a crash it is not known which were.
    ``start_time`` is field 22 of /proc/PID/stat in clock ticks since boot: pid and start time identify one process.
    ``cgroup`` is the absolute path of its own control group, "" if it has none. ``tasks_outside`` counts the tasks
    that could not be moved into the group. ``take_over``, ``allow_class_change`` and ``include_descendants`` are
    parameters of its Assign, kept while the member waits for its group.
    ``cpu_time_before_ns`` is an upper bound of the CPU time that it had used when it was assigned; it bounds no other
    event. ``descendants_outside`` counts the descendants of its process that stayed outside at that time.
    ``dormant``: the member is a control group, for example of a service, and has ended because the control group is
    empty or gone. If tasks appear at its path, they are moved into the group.
    ``init``: the process is the first of a PID namespace, so the kernel ends all other processes of that with it.
    ``commands``: the member is a service, and these processes of its commands were put into the group before they
    executed them (``daemon.unit_commands``).
    ``profile`` is the name of its profile, "" for none, and ``profile_source`` the annotation or rule that selected
    it, "" if none was selected. ``keeps_class``: the profile of a unit names the class of its group, so tasks that
    the unit starts later are moved to that class too. ``exposed`` states whether the container has the files of the
    workload as a mount, or why not; "" if its profile does not expose them.
    """

    id: str
    kind: str
    owner: str
    pid: int = 0
    start_time: int = 0
    cgroup: str = ""
    started_at: str = ""
    ended_at: str = ""
    late: bool = True
    may_have_run: str = ""
    tasks_outside: int = 0
    reason: str = ""
    folder: str = ""
    take_over: bool = False
    allow_class_change: bool = False
    joining: bool = False
    include_descendants: bool = False
    cpu_time_before_ns: int = 0
    descendants_outside: int = 0
    dormant: bool = False
    init: bool = False
    commands: tuple[str, ...] = ()
    profile: str = ""
    profile_source: str = ""
    keeps_class: bool = False
    exposed: str = ""

    @property
    def has_tasks(self) -> bool:
        """Whether the member has a process or a control group. A sandbox may be known by name only."""
        return bool(self.pid or self.cgroup)

    @property
    def is_late(self) -> bool:
        """Whether tasks of it ran, or may have run, before they were in the group."""
        return self.joining or (self.late and bool(self.has_tasks or self.may_have_run))

    @property
    def is_living(self) -> bool:
        """Whether the member has not ended, as far as the daemon knows."""
        return not self.ended_at


class PriorRuns(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The use of a workload before its group was lost and created again: ``totals`` by event, "" if unknown.

    ``losses`` is the number of runs in a row that were cut short. ``reason`` describes the last loss.
    """

    totals: dict[str, str]
    reason: str
    losses: int = 1


class Part(msgspec.Struct, frozen=True):
    """A workload that is nested in another one: its key and the nonce of its first group.

    A later run with the same key has another nonce, and may have the same generation.
    """

    key: str
    nonce: int

    @property
    def name(self) -> str:
        """The name of the file with its totals."""
        return f"{self.key}.{self.nonce}"


class NestedTotal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sum of one event; ``value`` is decimal, "" if unknown."""

    value: str
    quality: Quality
    reason: str = ""


class Nested(msgspec.Struct, frozen=True, omit_defaults=True):
    """The workloads inside a workload (see ``nested.py``).

    ``living`` are those whose use is not in ``totals`` yet, the sums of the others by event. ``count`` is the number
    of all. ``missing`` is the key of one whose use is not known; "" if there is none. ``has_gap``: the group of the
    workload was lost and created again. Workloads that began inside it meanwhile are not listed.
    """

    living: tuple[Part, ...] = ()
    totals: dict[str, NestedTotal] = msgspec.field(default_factory=dict)
    count: int = 0
    missing: str = ""
    has_gap: bool = False


class Proof(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """The proof of a run: what the witness has seen of it (``figures.verdict``).

    ``watch``: since when the witness had counted without a gap when the run began; None without a witness. ``cause``
    is why it cannot show that the totals are exact, "" if it can. All was seen until ``until_ns``
    (``clock.boot_ns``). CPU times are in ns.

    ``cgroups`` are the inode numbers of the control groups whose tasks, also those below, are the workload's.
    ``paths`` are the paths that these have had, also those of members that the record has no more: a control group
    that is created again at one of them belongs to the workload. Each has the exact service that it belongs to, or
    "": systemd creates the control group of a service at another path if its ``Slice=`` has changed.
    ``entered`` is what was used in the control group of each member before its tasks entered the groups, and
    ``helpers`` are control groups whose tasks belong to the runtime: neither is missing, nor is what is allowed in
    the control groups of sandboxes (``idle``). ``inside`` was used with the RMIDs of the groups, by control group,
    and ``outside`` with others: for each control group that has entered, in it and in each one below, and for 0 in
    others, such as that of a container that its runtime is about to start. In ``inside``, 0 stands for control groups
    that are gone.

    ``cgroups`` is () if the workload is not known by control groups: a process with its descendants. The tasks of
    such a workload leave its groups only by a move. ``moves`` is the number of the last write or move that was read
    for the workload. ``movers`` are the PIDs of the daemons that have read it, this one last, whose writes do not
    count; () if that is not known.
    """

    watch: Watch | None = None
    cause: str = ""
    until_ns: int = 0
    cgroups: tuple[int, ...] = ()
    paths: dict[str, str] = msgspec.field(default_factory=dict)
    entered: dict[int, int] = msgspec.field(default_factory=dict)
    helpers: tuple[int, ...] = ()
    idle: dict[int, int] = msgspec.field(default_factory=dict)
    inside: dict[int, int] = msgspec.field(default_factory=dict)
    outside: dict[int, dict[int, int]] = msgspec.field(default_factory=dict)
    moves: int = 0
    movers: tuple[int, ...] = ()

    @property
    def inside_ns(self) -> int:
        """The CPU time (ns) that was used with the RMIDs of the groups."""
        return sum(self.inside.values())


class Doubt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reason for which the totals of a group are not exact, with its values (``figures.reasons``).

    ``reason`` is its name. It is about the totals of ``events`` only, if there are any.
    """

    reason: str
    values: dict[str, str] = msgspec.field(default_factory=dict)
    events: tuple[str, ...] = ()


class Group(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """A monitoring group of a workload: one directory in resctrl, in one class.

    ``folder`` identifies the group in its workload. It is "" for the first group, which has its files in the
    workload's snapshot folder; each other group has its files in ``classes/FOLDER`` below that. ``class_`` is the
    control group ("" is the root class), ``name`` the name of the directory. ``nonce`` is the modification time (ns)
    that the daemon gave the directory. With ``boot_id`` it identifies it. ``in_limbo``: the group waits for an RMID,
    and RMIDs in limbo will become free. ``observed``: another program owns the group, so it is only read, and
    ``nonce`` is the inode of the directory.

    ``has_begin``: its begin values are known. ``doubts`` are what has happened for which its totals are not exact.
    ``is_reallocated``: the hardware gives the group's bandwidth counters to other RMIDs too
    (``Mode.REALLOCATED``), or did so during the run. ``unassigned``: the domains and bandwidth events for which the
    group is to get a counter as soon as one is free.

    ``inodes`` are those of the domains' directories at the baseline, by domain; there are none before it.
    ``transactions`` is what the bandwidth events counted then (``Tree.bandwidth_configuration``). ``created_ns`` and
    ``completed_ns`` are ``created_at`` and ``completed_at`` in ns since boot (``clock.boot_ns``): durations and the
    order of the RMID queue are computed from these. ``ids`` are its CLOSID and RMID, None if no task has entered it.
    In another class it has another CLOSID, and keeps its RMID. ``strangers_ns`` is the CPU time that tasks of others
    used with its IDs, see ``Proof``. ``history`` is what had been used with its RMID before.
    ``has_mixed_use``: it is not known how much of the use in its control groups is history. ``moved_in`` and
    ``moved_out`` are the numbers of tasks that other programs moved into it and out of it, and ``moved_by`` is the
    last one of these programs.
    """

    folder: str = ""
    class_: str = msgspec.field(default="", name="class")
    name: str
    state: GroupState = GroupState.PENDING
    reason: str = ""
    in_limbo: bool = False
    nonce: int = 0
    observed: bool = False
    boot_id: str = ""
    has_begin: bool = False
    doubts: tuple[Doubt, ...] = ()
    is_reallocated: bool = False
    inodes: dict[str, int] = msgspec.field(default_factory=dict)
    transactions: dict[str, str] = msgspec.field(default_factory=dict)
    unassigned: tuple[tuple[str, str], ...] = ()
    created_at: str = ""
    created_ns: int = 0
    completed_at: str = ""
    completed_ns: int = 0
    ids: Ids | None = None
    history: tuple[Use, ...] = ()
    has_mixed_use: bool = False
    strangers_ns: int = 0
    moved_in: int = 0
    moved_out: int = 0
    moved_by: str = ""

    @property
    def ref(self) -> GroupRef:
        """The directory in resctrl."""
        return GroupRef(self.class_, self.name)

    def has_doubt(self, reason: str) -> bool:
        """Whether there is a doubt with that reason."""
        return any(doubt.reason == reason for doubt in self.doubts)

    def doubted(self, *doubts: Doubt) -> Group:
        """Return the group with these doubts. Of those with the same reason and events, the first few are kept."""
        group = self
        for doubt in doubts:
            same = [known for known in group.doubts if (known.reason, known.events) == (doubt.reason, doubt.events)]
            if doubt not in same and len(same) < MAX_DOUBTS:
                group = replace(group, doubts=(*group.doubts, doubt))
        return group


class Workload(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """Everything that the daemon must know of one workload after a restart.

    ``groups`` has one group for each class in which the workload has tasks, because the kernel does not move a task
    from one class to another through a group. There is always a first one, whose state is that of the workload.
    ``follows_class``: the workload has had no task yet, and its group goes to the class of the first one.
    ``is_active``: the workload has members. ``generation`` counts the runs under this key. ``prior_runs`` is what the
    runs before used if they were lost: a run that is lost keeps its claims and members, and as long as they live the
    daemon starts another one. ``idle_ns`` is when the last member ended (``clock.boot_ns``).
    ``attribute_owners`` is the owner that set an attribute, by the attribute's name. A higher ``priority`` gets a
    free RMID first. ``part_of`` are the keys of the workloads in which this one began, the nearest first. It is
    ``nested`` in those of them that list it. ``one_process``: all its tasks descend from the process with which it
    began inside these. ``left_tasks``: tasks of it do not get into their groups at its end, because they could not be
    moved, or another workload has taken them. ``gave_tasks``: at its end, tasks of it went
    to the workload around it. ``profile`` and ``profile_source`` are those of the pod or of the container, as with a
    member. ``events`` and ``keeps_files`` are those of its profile when the run began: only events that these globs
    select are shown in files and figures, and without ``keeps_files`` the files are removed at the end of the run.
    ``uncounted``: the run has ended, and the file of the sums lacks it
    (``sums.py``).
    """

    key: str
    groups: tuple[Group, ...]
    generation: int = 1
    follows_class: bool = False
    is_active: bool = False
    priority: int = 0
    profile: str = ""
    profile_source: str = ""
    events: tuple[str, ...] = ()
    keeps_files: bool = True
    pod_cgroup: str = ""
    claims: tuple[Claim, ...] = ()
    members: tuple[Member, ...] = ()
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    attribute_owners: dict[str, str] = msgspec.field(default_factory=dict)
    idle_ns: int = 0
    prior_runs: PriorRuns | None = None
    part_of: tuple[str, ...] = ()
    one_process: bool = False
    left_tasks: bool = False
    gave_tasks: bool = False
    uncounted: bool = False
    nested: Nested = Nested()
    proof: Proof = Proof()

    # -- groups

    @property
    def first(self) -> Group:
        """The group that the run began with. Its state is that of the run."""
        return self.groups[0]

    @property
    def state(self) -> State:
        """The state of the run."""
        if self.first.state is GroupState.CREATED:
            return State.ACTIVE if self.is_active else State.IDLE
        return State(self.first.state)

    @property
    def reason(self) -> str:
        """Why the workload is in its state; "" if there is no reason."""
        return self.first.reason

    def shows(self, event: str) -> bool:
        """Whether the files and figures of the workload have the event of that name."""
        return not self.events or selects(self.events, event)

    @property
    def is_observed(self) -> bool:
        """Whether another program owns the workload's group, and resctrlmond only reads it."""
        return self.first.observed

    @property
    def existing_groups(self) -> tuple[Group, ...]:
        """The groups that have a directory in resctrl."""
        return tuple(group for group in self.groups if group.state.has_directory)

    @property
    def memberships(self) -> frozenset[Membership]:
        """The memberships that tasks of these groups have."""
        return frozenset(Membership(group.class_, group.name) for group in self.existing_groups)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was lost and is still claimed."""
        return self.state is State.LOST and bool(self.claims)

    @property
    def is_finished(self) -> bool:
        """Whether only the run's record and files remain, until they are removed."""
        return self.state.is_over and not self.is_interrupted and not self.existing_groups

    @property
    def has_ended_further_group(self) -> bool:
        """Whether a group other than the first one is ending or has ended.

        If the run itself is not ending, that group was lost, and the run is lost with it.
        """
        ends = (GroupState.LOST, GroupState.COMPLETED, GroupState.ENDING)
        return any(group.state in ends for group in self.groups[1:])

    def subfolder(self, group: Group) -> str:
        """The path of the group's files below the folder ``groups/`` of all snapshots."""
        return f"{self.key}/classes/{group.folder}" if group.folder else self.key

    def group(self, folder: str) -> Group | None:
        """The group with that folder."""
        return next((group for group in self.groups if group.folder == folder), None)

    def group_in(self, class_: str) -> Group | None:
        """The group in that class that has not failed."""
        groups = (group for group in self.groups if group.class_ == class_)
        return next((group for group in groups if group.state is not GroupState.FAILED), None)

    def group_at(self, ref: GroupRef) -> Group | None:
        """The group whose directory that is."""
        return next((group for group in self.existing_groups if group.ref == ref), None)

    def group_of(self, member: Member) -> Group:
        """The group that the member counts in: the first one if its own could not be created."""
        own = self.group(member.folder)
        return self.first if own is None or own.state is GroupState.FAILED else own

    def with_group(self, group: Group) -> Workload:
        """Return the workload with that group added, or in the place of the one with its folder."""
        groups = [group if old.folder == group.folder else old for old in self.groups]
        if group not in groups:
            groups.append(group)
        return replace(self, groups=tuple(groups))

    def without_group(self, folder: str) -> Workload:
        """Return the workload without the group of that folder."""
        return replace(self, groups=tuple(group for group in self.groups if group.folder != folder))

    def doubted(self, group: Group, *doubts: Doubt) -> Workload:
        """Return the workload with doubts about one of its groups."""
        now = self.group(group.folder)
        return self if now is None else self.with_group(now.doubted(*doubts))

    @property
    def as_part(self) -> Part:
        """This run as one that is nested in another workload."""
        return Part(self.key, self.first.nonce)

    def has_part(self, inner: Workload) -> bool:
        """Whether ``inner`` is nested in this workload, and has not ended as far as the record shows."""
        return inner.as_part in self.nested.living

    # -- members

    @property
    def living(self) -> tuple[Member, ...]:
        """The members that have not ended."""
        return tuple(member for member in self.members if member.is_living)

    @property
    def dormant(self) -> tuple[Member, ...]:
        """The ended members that continue when their control group has tasks again, because their owner still claims
        the workload.
        """
        return tuple(member for member in self.members if member.dormant and self.is_claimed_by(member.owner))

    def member(self, member_id: str) -> Member | None:
        """The member with that id, living or ended."""
        return next((member for member in self.members if member.id == member_id), None)

    def with_member(self, member: Member) -> Workload:
        """Return the workload with that member added, or in the place of the one with its id. If that is late, it is.

        Of the members that have ended, the last MAX_ENDED_MEMBERS are kept, and late ones rather than others: the
        workload stays late.
        """
        known = self.member(member.id)
        if known is not None and known.late and known.has_tasks and not (member.late and member.has_tasks):
            why = known.may_have_run or ("" if member.has_tasks else "an earlier member of this name ran before")
            member = replace(member, late=True, may_have_run=why)
        members = [member if other.id == member.id else other for other in self.members]
        if member not in members:
            members.append(member)
        ended = [other for other in members if not other.is_living]
        ended.sort(key=lambda other: other.is_late)
        forgotten = {other.id for other in ended[:-MAX_ENDED_MEMBERS]}
        return replace(self, members=tuple(other for other in members if other.id not in forgotten))

    # -- claims

    def with_claim(self, owner: str, since: str, ends: EndRule | None = None) -> Workload:
        """Return the workload with a claim of ``owner``. Of an existing claim, only the rule ``ends`` is changed."""
        known = next((claim for claim in self.claims if claim.owner == owner), None)
        if known is None:
            return replace(self, claims=(*self.claims, Claim(owner, since, ends or EndRule.RELEASE)))
        if ends in (None, known.ends):
            return self
        changed = replace(known, ends=ends)
        return replace(self, claims=tuple(changed if claim is known else claim for claim in self.claims))

    def without_claim(self, owner: str) -> Workload:
        """Return the workload without the claim of that owner."""
        return replace(self, claims=tuple(claim for claim in self.claims if claim.owner != owner))

    def is_claimed_by(self, owner: str) -> bool:
        """Whether that owner has a claim."""
        return any(claim.owner == owner for claim in self.claims)

    def has_claim_until(self, rule: EndRule) -> bool:
        """Whether a claim ends by that rule."""
        return any(claim.ends is rule for claim in self.claims)
