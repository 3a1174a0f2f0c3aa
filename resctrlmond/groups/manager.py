# SPDX-License-Identifier: Apache-2.0
"""The one writer: every verb of the doors, as blocking calls that any thread may make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resctrlmond.groups import target
from resctrlmond.groups.accounting import Quality, Total
from resctrlmond.groups.book import Book
from resctrlmond.groups.errors import AlreadyMonitored
from resctrlmond.groups.keys import canonical_key, check_attributes, check_member_id, is_pod_uid, valid_class
from resctrlmond.groups.lifecycle import Lifecycle, Mark, replace
from resctrlmond.groups.record import Claim, Member, Record, Records, State
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.groups.target import FOLLOW, Assignment
from resctrlmond.groups.times import utc_now
from resctrlmond.groups.upkeep import Upkeep
from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import ClassMismatch, NoSuchClass, NoSuchGroup, ResctrlError, RmidsExhausted
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tasks import Moved
from resctrlmond.resctrl.tree import Found, Tree


@dataclass(frozen=True, slots=True)
class Assigned:
    """The outcome of Assign."""

    record: Record
    moved: Moved


@dataclass(frozen=True, slots=True)
class Released:
    """The outcome of Release: ``completed`` if it was the last claim, and the totals so far."""

    record: Record
    completed: bool
    totals: list[Total]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What became of an owner's claims; ``failures`` by key."""

    kept: list[str]
    released: list[str]
    failures: dict[str, ResctrlError]


class Manager:
    """Owns the groups that bear ``mark``. Calls for one key run one at a time; ``get`` and ``list`` never wait."""

    def __init__(self, tree: Tree, records: Records, snapshots: Snapshots, mark: Mark, settings: Settings) -> None:
        self.tree = tree
        self.settings = settings
        self.book = Book(records)
        self.life = Lifecycle(tree, self.book, snapshots, mark)
        self.upkeep = Upkeep(self.life, lambda: self.settings)
        self.problems: list[str] = []

    def recover(self) -> None:
        """Take up where the last daemon stopped: the only way to start. ``problems`` then says what was odd."""
        self.problems = self.upkeep.recover()

    # -- verbs that write

    def create(
        self,
        key: str,
        *,
        owner: str,
        class_: str = FOLLOW,
        attributes: Mapping[str, str] | None = None,
        may_wait: bool = True,
    ) -> Record:
        """Make the workload's group, without a task yet, or find it standing; ``owner`` claims it.

        With class FOLLOW it is made in the root and goes to its first task's class. Without a free RMID the group
        is ``pending``; RmidsExhausted only if not ``may_wait``. Raises InvalidKey, InvalidClass, NoSuchClass,
        ForeignGroup, ClassMismatch, KernelRefused, NotMounted.
        """
        key = canonical_key(key)
        check_attributes(attributes or {})
        follows = class_ == FOLLOW
        class_ = "" if follows else valid_class(class_)
        with self.book.writing(key):
            record = self._living(key)
            if record is None:
                record = self._new(key, class_, follows)
                return self._make(_claimed(record, owner, attributes), may_wait)
            if not follows and class_ != record.class_:
                record = self._in_class(record, class_)
            return self.book.put(_claimed(record, owner, attributes))

    def assign(self, assignment: Assignment) -> Assigned:
        """Put a process with its threads, or a control group, into the workload's group; make that if need be.

        What fails changes nothing: a group made for the call is removed again. Raises what ``create`` does, and
        AlreadyMonitored, NoSuchProcess, ProcessChanged, NoSuchCgroup, PermissionDenied.
        """
        key = canonical_key(assignment.key)
        check_attributes(assignment.attributes)
        if assignment.member is not None:
            check_member_id(assignment.member)
        with target.opened(assignment) as moving:
            where = moving.membership(self.tree)
            with self.book.writing(key):
                before = self._living(key)
                self._check_free(before, where, assignment)
                record = before or self._make(
                    _claimed(self._new(key, _class_for(assignment, where)), assignment.owner), assignment.may_wait
                )
                try:
                    record = self._in_place(record, where, assignment)
                    record = self._joined(record, moving.member(assignment), assignment)
                    if record.state is State.PENDING:
                        return Assigned(record, Moved(0, 0))
                    through = assignment.allow_class_change
                    moved = moving.move(self.tree, record.ref, take_over=assignment.take_over, through_class=through)
                except ResctrlError:
                    self._undo(record, before)
                    raise
                return Assigned(self._moved(record, moving.member(assignment).id, moved), moved)

    def release(self, key: str, *, owner: str, reason: str = "released") -> Released:
        """End ``owner``'s claim; the workload ends with its last claim. Of a workload that is over, tell the totals.

        Raises NoSuchGroup.
        """
        key = canonical_key(key)
        with self.book.writing(key):
            record = self._known(key)
            if not record.state.is_over:
                record = self.book.put(record.without_claim(owner))
                if not record.claims:
                    record = self.life.finish(record, reason)
            return Released(record, record.state.is_over, self._totals(record))

    def add_member(self, key: str, member: str, *, owner: str, kind: str = "sandbox") -> Record:
        """Note a member that brings no task of its own. Raises NoSuchGroup."""
        key = canonical_key(key)
        check_member_id(member)
        with self.book.writing(key):
            record = self._known_living(key)
            joining = Member(id=member, kind=kind, owner=owner, started_at=utc_now())
            return self.book.put(_claimed(record.with_member(joining), owner))

    def remove_member(self, key: str, member: str, *, reason: str = "removed") -> Record:
        """End a member, by the word of who knows. A member that is not known, or ended, is no error.

        Raises NoSuchGroup.
        """
        key = canonical_key(key)
        with self.book.writing(key):
            record = self._known(key)
            ending = record.member(member)
            if ending is not None and ending.lives:
                self.upkeep.end_member(record, ending, reason)
            return self.upkeep.settle(key) or record

    def reconcile(self, owner: str, keys: Iterable[str]) -> Reconciled:
        """End ``owner``'s claims on all workloads but ``keys``. Nobody else's claims are touched."""
        failures: dict[str, ResctrlError] = {}
        living = set()
        for key in keys:
            try:
                living.add(canonical_key(key))
            except ResctrlError as error:
                failures[key] = error
        kept, released = [], []
        for record in self.book.all():
            if record.state.is_over or not record.claimed_by(owner):
                continue
            if record.key in living:
                kept.append(record.key)
                continue
            try:
                self.release(record.key, owner=owner, reason="its owner knows it no longer")
                released.append(record.key)
            except ResctrlError as error:
                failures[record.key] = error
        for key in sorted(living.difference(kept)):
            failures[key] = NoSuchGroup(f"{owner} has no claim on {key}", remedy="Create or assign it")
        return Reconciled(kept, released, failures)

    def move(self, key: str, class_: str) -> Record:
        """Move the whole group to another class; its RMID and counters stay. Raises NoSuchClass, KernelRefused."""
        key, class_ = canonical_key(key), valid_class(class_)
        with self.book.writing(key):
            record = self._known_living(key)
            if not self.tree.has_class(class_):
                raise NoSuchClass("there is no such class", path=f"{self.tree.path}/{class_}")
            if record.class_ == class_:
                return record
            return self.life.relocate(replace(record, follows=False), class_)

    # -- verbs that read

    def get(self, key: str) -> Record:
        """The workload's record. Raises NoSuchGroup."""
        return self._known(canonical_key(key))

    def records(self) -> list[Record]:
        """All records, ended ones until their time is over, in order of the key."""
        return self.book.all()

    def foreign(self) -> list[Found]:
        """The monitoring groups that do not bear our mark."""
        return [found for found in self.tree.scan() if found.gid != self.life.mark.gid]

    def read(self, key: str) -> tuple[Record, list[Reading], list[Total]]:
        """The counters now ([] once the workload is over), and the totals since the baseline. Raises NoSuchGroup."""
        record = self._known(canonical_key(key))
        readings = self.life.readings(record)
        return record, readings, self.life.totals(record, readings)

    # -- steps

    def _living(self, key: str) -> Record | None:
        record = self.book.get(key)
        return None if record is None or record.state.is_over else record

    def _known(self, key: str) -> Record:
        record = self.book.get(key)
        if record is None:
            raise NoSuchGroup(f"there is no workload {key}", remedy="'resctrlctl list' shows those there are")
        return record

    def _known_living(self, key: str) -> Record:
        record = self._known(key)
        if record.state.is_over:
            raise NoSuchGroup(f"the workload {key} is over ({record.state})")
        return record

    def _new(self, key: str, class_: str, follows: bool = False) -> Record:
        """A record for a new run; an ended one under the same key is moved aside, whole."""
        ended = self.book.get(key)
        if ended is not None:
            self.life.snapshots.set_aside(key, ended.generation)
        return Record(
            key=key,
            class_=class_,
            follows=follows,
            group_name=key if is_pod_uid(key) else self.settings.group_prefix + key,
            state=State.PENDING,
            generation=ended.generation + 1 if ended else 1,
        )

    def _make(self, record: Record, may_wait: bool) -> Record:
        try:
            made = self.life.make(record)
        except ResctrlError:
            self.life.discard(record)
            raise
        if made.state is State.PENDING and not may_wait:
            self.life.discard(made)
            raise RmidsExhausted(made.reason, path=self.tree.full_path(made.ref), in_limbo=made.in_limbo)
        return made

    def _check_free(self, record: Record | None, where: Membership | None, assignment: Assignment) -> None:
        if where is None or not where.group or assignment.take_over:
            return
        if record is not None and (where.class_, where.group) == (record.class_, record.group_name):
            return
        raise AlreadyMonitored(
            f"the task is in the monitoring group {where.group!r} of class {where.class_ or '/'} already",
            remedy="It counts there, and a task has one group. takeOver takes it out of that one",
        )

    def _in_place(self, record: Record, where: Membership | None, assignment: Assignment) -> Record:
        """The group in the class that the assignment wants, as far as it may still go there."""
        wanted = _class_for(assignment, where)
        if assignment.class_ != FOLLOW or record.follows:
            record = self._in_class(record, wanted)
        # From its first task on the group stays where it is: a task of another class is the kernel's to refuse.
        return replace(record, follows=False)

    def _in_class(self, record: Record, class_: str) -> Record:
        if record.class_ == class_:
            return record
        if record.living:
            raise ClassMismatch(
                f"the group of {record.key} stands in class {record.class_ or '/'}, not in {class_ or '/'}",
                path=self.tree.full_path(record.ref),
                remedy="Move takes the whole group to another class",
            )
        return self.life.relocate(replace(record, follows=False), class_)

    def _joined(self, record: Record, member: Member, assignment: Assignment) -> Record:
        """The record with its new member, on disk before the member's first task is moved."""
        record = _claimed(record.with_member(member), assignment.owner, assignment.attributes)
        late = member.late and record.baseline is Quality.EXACT
        return self.book.put(
            replace(
                record,
                pod_cgroup=assignment.pod_cgroup or record.pod_cgroup,
                baseline=Quality.LATE if late else record.baseline,
            )
        )

    def _moved(self, record: Record, member_id: str, moved: Moved) -> Record:
        member = record.member(member_id)
        assert member is not None
        member = replace(member, left=len(moved.left | moved.elsewhere))
        return self.book.put(replace(record.with_member(member), state=State.ACTIVE))

    def _undo(self, record: Record, before: Record | None) -> None:
        if before is None:
            self.life.discard(record)
            return
        self.book.put(replace(record, members=before.members, claims=before.claims, attributes=before.attributes))

    def _totals(self, record: Record) -> list[Total]:
        return self.life.totals(record, self.life.readings(record))


def _class_for(assignment: Assignment, where: Membership | None) -> str:
    if assignment.class_ != FOLLOW:
        return valid_class(assignment.class_)
    return where.class_ if where else ""


def _claimed(record: Record, owner: str, attributes: Mapping[str, str] | None = None) -> Record:
    record = record.with_claim(Claim(owner, utc_now()))
    return replace(record, attributes={**record.attributes, **(attributes or {})})
