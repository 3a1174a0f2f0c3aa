# SPDX-License-Identifier: Apache-2.0
"""The durable record of one workload's group, and the folder of records under /run."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Iterator

import msgspec

from resctrlmond.groups.accounting import Quality, worst
from resctrlmond.groups.errors import InvalidClass, InvalidKey
from resctrlmond.groups.files import read_file, write_file, writing
from resctrlmond.groups.keys import canonical_key, valid_class
from resctrlmond.groups.times import boot_ns, seconds_since_ns
from resctrlmond.resctrl.errors import NotRead, reading
from resctrlmond.resctrl.tree import GroupRef

VERSION = 1
_SUFFIX = ".json"
_SET_ASIDE = ".unreadable"
# The part in the root, which has no name: resctrl itself has a directory of this one, so no class is called so.
ROOT_PART = "mon_groups"
# A container that crashes in a loop is a new member each time; the record is written anew each time as well.
MAX_ENDED_MEMBERS = 100
# They stand in each total's reason.
MAX_LATE_REASONS = 5
# No pod and no unit has as many; a runtime or an agent that never ends its members reaches it.
MAX_LIVING_MEMBERS = 1000
MAX_CLAIMS = 64
# What a workload may grow to by what callers add. The end of its members and of its groups adds some more, and a file
# of 4 MiB can still be read back.
MAX_RECORD_BYTES = 1024 * 1024


class State(enum.StrEnum):
    """The state of a workload."""

    PENDING = "pending"
    """The workload waits for its group, most often because no RMID is free; see *reason* and *inLimbo* of *Group*.
    The daemon retries by itself.
    """
    ACTIVE = "active"
    """The workload has a group and members."""
    IDLE = "idle"
    """The workload has a group but no members."""
    ENDING = "ending"
    """The end values are being written."""
    COMPLETED = "completed"
    """The workload has ended. The end values are written, and kept for _snapshot_ttl_."""
    LOST = "lost"
    """The run has ended because somebody else removed the group or unmounted resctrl. The values that were read last
    are the end values. While the workload is claimed, the daemon begins another run.
    """
    FAILED = "failed"
    """The run has ended because the group could not be created; see *reason* of *Group*."""

    @property
    def has_group(self) -> bool:
        """Whether a directory in resctrl belongs to a record in this state."""
        return self in (State.ACTIVE, State.IDLE, State.ENDING)

    @property
    def is_over(self) -> bool:
        """Whether the run is over: only its snapshot and totals remain."""
        return self in (State.COMPLETED, State.LOST, State.FAILED)


class EndRule(enum.StrEnum):
    """The rule by which a claim ends. Every claim also ends when its owner releases it."""

    RELEASE = "release"
    """The claim ends only when its owner releases it."""
    MEMBERS = "members"
    """The claim ends 10 seconds after the workload's last member, so that the owner has time to release the claim and
    get the totals. *resctrlctl run* uses this rule.
    """
    CONTAINER = "container"
    """The claim on a pod ends with the pod's control group. If that is not known, the claim ends _pod_linger_ after
    the last member. The claim on another workload ends _linger_ after the last member. If its owner has added no
    member, only the end of the control group ends a claim. The hook uses this rule.
    """
    TASKS = "tasks"
    """The claim ends with the last task in the group. The daemon uses this rule for a group whose record was lost,
    and refuses it in a request.
    """


class Claim(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """An owner's word that the workload lives. ``since`` is RFC 3339, UTC. ``ends`` is the rule by which it ends."""

    owner: str
    since: str
    ends: EndRule


class Member(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A container, sandbox or process of a workload.

    ``part`` is the further group that it counts in (see Record), "" for the first one.
    ``joining``: its tasks are about to be moved; after a crash nobody knows which were.
    ``start_time`` is field 22 of /proc/PID/stat in clock ticks since boot: with the pid it names one process for
    ever. ``cgroup`` is the absolute path of its control group directory, "" if it has none of its own. ``left``
    counts tasks that could not be moved into the group. ``take_over``, ``allow_class_change`` and ``tree`` (with all
    descendants) are what its Assign allowed, kept while it waits for its group.
    ``ran_before_ns`` is at most the CPU time that it had used when it was put in: a bound on that, not on any event.
    ``descendants`` counts the processes below it that stayed outside then.
    ``awaited``: the member is a control group, as of a service, and has ended because that was empty or gone; tasks
    that appear at its path are taken in.
    ``init``: it is the first process of a PID namespace, so the kernel ends all others there with it.
    """

    id: str
    kind: str
    owner: str
    pid: int = 0
    start_time: int = 0
    cgroup: str = ""
    started_at: str = ""
    ended_at: str = ""
    late: bool = False
    left: int = 0
    reason: str = ""
    part: str = ""
    take_over: bool = False
    allow_class_change: bool = False
    joining: bool = False
    tree: bool = False
    ran_before_ns: int = 0
    descendants: int = 0
    awaited: bool = False
    init: bool = False

    @property
    def has_tasks(self) -> bool:
        """Whether there is something of it that can be moved; a sandbox may be noted by name alone."""
        return bool(self.pid or self.cgroup)

    @property
    def lives(self) -> bool:
        """Whether its end was not seen yet."""
        return not self.ended_at


class Earlier(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """What a workload used before its group was lost and made anew: ``totals`` by event, "" where unknown.

    ``losses`` counts the runs that were cut short in a row, and ``reason`` tells of the last of them.
    """

    totals: dict[str, str]
    reason: str
    losses: int = 1


class Record(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True):
    """Everything the daemon must know of one workload after a restart.

    ``class_`` is the control group ("" is the root), ``follows`` whether it is still open and taken from the first
    task. ``nonce`` is the mtime (ns) that the group's directory bears. ``boot_id`` and times tell runs apart.
    ``baseline`` is the quality of the begin readings as a whole; ``inodes`` are those that the domains' directories
    had then. ``late_reasons`` says why the baseline is late, as far as it is known. ``caveats`` says of events why
    none of their totals is exact, whatever is read. ``transactions`` is what its bandwidth events counted then, as
    ``Tree.transactions`` returns it. ``unassigned``: the domains and bandwidth events for which the
    group is to have a counter as soon as one is free. ``other_cpu_ns`` is, per member, the CPU time that its control
    group had used when the member was put in and that was not of its first process (see ``groups/joiners.py``); of
    a member that is only a control group, all CPU time that it had used.
    ``created_ns`` and ``completed_ns`` are ``created_at`` and ``completed_at`` by the clock of the boot
    (``times.boot_ns()``), ``idle_ns`` is when its last member ended: how long a run stood, how long ago it ended and
    who has waited longest is decided by these.
    ``attribute_owners`` tells which owner set an attribute, by the attribute's name.
    Of the records that wait for an RMID, the one of the highest ``priority`` gets it.

    A workload whose tasks are in several classes has one group in each, for the kernel moves no task between classes
    through a group. ``further`` are those after the first: each is a record with a ``part``, by which it is known and
    its folder below ``classes/`` is called, and which tells of that group alone.

    A run that is lost keeps its claims and members: while they live it is begun anew, and ``earlier`` says what it
    had used until then.
    """

    # A factory's value is written even where it is the default: a file without a version says nothing to a later one.
    version: int = msgspec.field(default_factory=lambda: VERSION)
    key: str
    class_: str = msgspec.field(default="", name="class")
    follows: bool = False
    group_name: str
    state: State
    reason: str = ""
    in_limbo: bool = False
    generation: int = 1
    nonce: int = 0
    boot_id: str = ""
    baseline: Quality = Quality.UNKNOWN
    priority: int = 0
    pod_cgroup: str = ""
    claims: tuple[Claim, ...] = ()
    members: tuple[Member, ...] = ()
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    attribute_owners: dict[str, str] = msgspec.field(default_factory=dict)
    created_at: str = ""
    completed_at: str = ""
    created_ns: int = 0
    completed_ns: int = 0
    idle_ns: int = 0
    part: str = ""
    inodes: dict[str, int] = msgspec.field(default_factory=dict)
    late_reasons: tuple[str, ...] = ()
    unassigned: tuple[tuple[str, str], ...] = ()
    caveats: dict[str, str] = msgspec.field(default_factory=dict)
    transactions: dict[str, str] = msgspec.field(default_factory=dict)
    other_cpu_ns: dict[str, int] = msgspec.field(default_factory=dict)
    further: tuple[Record, ...] = ()
    earlier: Earlier | None = None

    @property
    def ref(self) -> GroupRef:
        """The directory in resctrl that belongs to this record."""
        return GroupRef(self.class_, self.group_name)

    @property
    def place(self) -> str:
        """Where its snapshot is, below the folder of snapshots."""
        return f"{self.key}/classes/{self.part}" if self.part else self.key

    @property
    def groups(self) -> tuple[Record, ...]:
        """All groups of the workload, the first one first."""
        return (self, *self.further)

    @property
    def standing(self) -> tuple[Record, ...]:
        """The groups that have a directory in resctrl."""
        return tuple(group for group in self.groups if group.state.has_group)

    @property
    def worst_baseline(self) -> Quality:
        """The quality of the baselines of all groups that have, or had, a directory in resctrl."""
        return worst(self.baseline, *(group.baseline for group in self.further if group.inodes))

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was lost and somebody still says that the workload lives."""
        return self.state is State.LOST and bool(self.claims)

    @property
    def is_torn(self) -> bool:
        """Whether a further group ends. Where the whole run does not, that one was lost, and the run is with it."""
        return any(group.state in (State.LOST, State.COMPLETED, State.ENDING) for group in self.further)

    def home(self, member: Member) -> Record:
        """The group that the member counts in: the first one where its own could not be made."""
        own = (group for group in self.further if group.part == member.part and group.state is not State.FAILED)
        return next(own, self)

    def with_group(self, group: Record) -> Record:
        """The record with ``group``, which is the first one itself or a further one, in its new form."""
        if not group.part:
            return group
        others = tuple(other for other in self.further if other.part != group.part)
        return msgspec.structs.replace(self, further=(*others, group))

    def with_late(self, member: Member, why: str = "") -> Record:
        """The record after a member came that ran already when the baseline of its group was read; ``why`` says how.

        The first MAX_LATE_REASONS reasons are kept.
        """
        return self.made_late(self.home(member), why)

    def made_late(self, group: Record, why: str = "") -> Record:
        """The record after a task of ``group``, one of its own, ran outside; see ``with_late``."""
        return self.made_worse(group, Quality.LATE, why)

    def made_worse(self, group: Record, quality: Quality, why: str) -> Record:
        """The record with a baseline of ``group``, one of its own, that is no better than that; see ``with_late``."""
        reasons = group.late_reasons
        if why and why not in reasons and len(reasons) < MAX_LATE_REASONS:
            reasons = (*reasons, why)
        baseline = worst(group.baseline, quality)
        return self.with_group(msgspec.structs.replace(group, baseline=baseline, late_reasons=reasons))

    def as_reported(self) -> Record:
        """The record with a late baseline for each group that a member is being put into.

        Its caller may have stopped waiting, so that it runs outside. That is found out only after the last move.
        """
        record = self
        for member in self.living:
            if member.joining:
                record = record.with_late(member, f"{member.id} is being put into its group")
        return record

    def member(self, member_id: str) -> Member | None:
        """The member of that id, living or ended."""
        return next((member for member in self.members if member.id == member_id), None)

    def with_member(self, member: Member) -> Record:
        """The record with that member added, or put in the place of the one with its id.

        Of the members that have ended, the last MAX_ENDED_MEMBERS are kept.
        """
        members = [member if other.id == member.id else other for other in self.members]
        if member not in members:
            members.append(member)
        ended = [other for other in members if not other.lives]
        forgotten = {other.id for other in ended[:-MAX_ENDED_MEMBERS]}
        return msgspec.structs.replace(self, members=tuple(other for other in members if other.id not in forgotten))

    def with_claim(self, owner: str, since: str, ends: EndRule | None = None) -> Record:
        """The record with a claim of ``owner``. Of an existing claim only the rule changes, if ``ends`` is given."""
        known = next((claim for claim in self.claims if claim.owner == owner), None)
        if known is None:
            new = Claim(owner, since, ends or EndRule.RELEASE)
            return msgspec.structs.replace(self, claims=(*self.claims, new))
        if ends in (None, known.ends):
            return self
        changed = msgspec.structs.replace(known, ends=ends)
        return msgspec.structs.replace(
            self, claims=tuple(changed if claim is known else claim for claim in self.claims)
        )

    def without_claim(self, owner: str) -> Record:
        """The record without that owner's claim."""
        return msgspec.structs.replace(self, claims=tuple(claim for claim in self.claims if claim.owner != owner))

    def claimed_by(self, owner: str) -> bool:
        """Whether that owner says that the workload lives."""
        return any(claim.owner == owner for claim in self.claims)

    def claimed_until(self, rule: EndRule) -> bool:
        """Whether a claim ends by that rule."""
        return any(claim.ends is rule for claim in self.claims)

    @property
    def awaited(self) -> tuple[Member, ...]:
        """The ended members that go on once their control group has tasks again: their owner still claims."""
        return tuple(member for member in self.members if member.awaited and self.claimed_by(member.owner))

    @property
    def living(self) -> tuple[Member, ...]:
        """The members whose end was not seen yet."""
        return tuple(member for member in self.members if member.lives)


class UnreadableRecord(Exception):
    """A record file that is damaged, or of another version: it is kept, and told. ``path`` is the file, ``key`` the
    workload's by its name.
    """

    def __init__(self, path: str, why: str, *, is_of_other_version: bool = False) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.key = os.path.basename(path).removesuffix(_SUFFIX)
        self.is_of_other_version = is_of_other_version


def encode(record: Record) -> bytes:
    """The record as its file holds it: one JSON object and a newline."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes, path: str) -> Record:
    """Read a record's file strictly; ``path`` only names it in the error.

    Raises UnreadableRecord for what is damaged, and for a version that this code does not know.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise UnreadableRecord(
                path,
                f"written by another version of resctrlmond (record format {version}, not {VERSION}), and not "
                "changed: install that version to continue with it, or remove the file and restart this one to "
                "give it up",
                is_of_other_version=True,
            )
        record = msgspec.json.decode(data, type=Record)
        _check_names(record)
    except (msgspec.DecodeError, UnicodeError, RecursionError, InvalidKey, InvalidClass) as error:
        raise UnreadableRecord(path, f"not a valid record: {error}") from error
    return record


def _check_names(record: Record) -> None:
    """Raise InvalidKey or InvalidClass for what could not be a name of ours: each of them meets a path."""
    for group in record.groups:
        canonical_key(group.key)
        if not valid_class(group.group_name):
            raise InvalidKey(f"the group of {group.key} has no name")
        valid_class(group.class_)
        if group.part != ROOT_PART:
            valid_class(group.part)


class _Version(msgspec.Struct):
    version: int


class Records:
    """The folder of records. Only the manager writes; every file is whole or not there.

    A file that could not be read is left alone; when its name is needed, it is kept as ``KEY.json.unreadable``, until
    ``prune`` removes it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._unreadable: set[str] = set()
        # When this daemon set aside, or found, a file that could not be read (times.boot_ns()).
        self._set_aside: dict[str, int] = {}

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, key + _SUFFIX)

    def save(self, record: Record) -> int:
        """Write the record's file; when this returns, a crash at any later point finds it. Raises NotWritten.

        Returns the size of the file in bytes.
        """
        path = self._path(record.key)
        data = encode(record)
        with writing(path):
            self._keep_unreadable(path)
            write_file(path, data, mode=0o640)
        return len(data)

    def _keep_unreadable(self, path: str) -> None:
        if path in self._unreadable:
            os.rename(path, path + _SET_ASIDE)
            self._unreadable.remove(path)
            self._set_aside[path + _SET_ASIDE] = boot_ns()

    def prune(self, ttl_s: float) -> list[str]:
        """Remove the files that were set aside longer than ``ttl_s`` seconds ago; their paths. Raises NotWritten."""
        removed = []
        for path, then in sorted(self._set_aside.items()):
            if seconds_since_ns(then) < ttl_s:
                continue
            with writing(path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                removed.append(path)
            del self._set_aside[path]
        return removed

    def delete(self, key: str) -> None:
        """Remove the record's file, if there is one. Raises NotWritten."""
        path = self._path(key)
        with writing(path):
            self._keep_unreadable(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def load(self) -> Iterator[Record | UnreadableRecord]:
        """Every record of the folder, in order of the key; in the place of an unreadable one, why it is that.

        Raises NotRead where nobody can tell: who takes that for no record gives up the group that it speaks of.
        """
        with reading("list the records", self.folder):
            names = sorted(os.listdir(self.folder))
        for name in names:
            if name.endswith(_SUFFIX + _SET_ASIDE):
                self._set_aside.setdefault(os.path.join(self.folder, name), boot_ns())
            if name.startswith(".") or not name.endswith(_SUFFIX):
                continue
            path = os.path.join(self.folder, name)
            try:
                record = decode(read_file(path), path)
                if record.key + _SUFFIX != name:
                    raise UnreadableRecord(path, f"is about another workload, {record.key!r}")
            except (UnreadableRecord, NotRead, OSError) as error:
                # What we lack will pass; a page of /run that is lost (EIO) stays so, and the others are to be served.
                if isinstance(error, NotRead) and error.errno != errno.EIO:
                    raise
                self._unreadable.add(path)
                yield error if isinstance(error, UnreadableRecord) else UnreadableRecord(path, str(error))
            else:
                yield record
