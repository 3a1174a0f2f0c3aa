# SPDX-License-Identifier: Apache-2.0
"""The one writer: every verb of the doors, as blocking calls that any thread may make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resctrlmond.groups import target
from resctrlmond.groups.accounting import Total
from resctrlmond.groups.book import Book
from resctrlmond.groups.keys import (
    attribute_value,
    canonical_key,
    check_attributes,
    check_member_id,
    check_priority,
    check_word,
    is_pod_uid,
    valid_class,
)
from resctrlmond.groups.lifecycle import Lifecycle, Mark, replace
from resctrlmond.groups.outcomes import Assigned, Reconciled, Released
from resctrlmond.groups.record import ROOT_PART, Claim, Member, Record, Records, State
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.groups.target import FOLLOW, Assignment, Target, check_free
from resctrlmond.groups.times import utc_now
from resctrlmond.groups.upkeep import Upkeep
from resctrlmond.groups.usage import summed
from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    NoSuchClass,
    NoSuchGroup,
    NotMounted,
    ResctrlError,
    RmidsExhausted,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tasks import Moved
from resctrlmond.resctrl.tree import Found, Tree


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
        priority: int | None = None,
    ) -> Record:
        """Make the workload's group, without a task yet, or find it standing; ``owner`` claims it.

        With class FOLLOW it is made in the root and goes to its first task's class. Without a free RMID the group
        is ``pending``; RmidsExhausted only if not ``may_wait``. Those that wait get one in order of ``priority``
        (-1000 to 1000, at first 0), the highest first. Raises InvalidKey, InvalidClass, NoSuchClass,
        ForeignGroup, ClassMismatch, KernelRefused, NotMounted, NotWritten.
        """
        key = canonical_key(key)
        check_word("claim", owner)
        check_attributes(attributes or {})
        check_priority(priority)
        follows = class_ == FOLLOW
        class_ = "" if follows else valid_class(class_)
        with self.book.writing(key):
            record = self._living(key)
            if record is None:
                ended = self.book.get(key)
                record = self._new(key, class_, ended, follows)
                return self._make(_claimed(record, owner, attributes, priority), ended, may_wait)
            if not may_wait:
                _check_has_rmid(record)
            if not follows and all(class_ != group.class_ for group in record.groups):
                record = self._in_class(record, class_)
            return self.book.put(_claimed(record, owner, attributes, priority))

    def assign(self, assignment: Assignment) -> Assigned:
        """Put a process with its threads, or a control group, into the workload's group; make that if need be.

        What fails changes nothing: a group made for the call is removed again. Raises what ``create`` does, and
        AlreadyMonitored, NoSuchProcess, ProcessChanged, NoSuchCgroup, PermissionDenied.
        """
        key = canonical_key(assignment.key)
        check_attributes(assignment.attributes)
        check_priority(assignment.priority)
        check_word("claim", assignment.owner)
        check_word("kind", assignment.kind)
        if assignment.member is not None:
            check_member_id(assignment.member)
        with target.opened(assignment) as moving:
            where = moving.membership(self.tree)
            with self.book.writing(key):
                return self._assign(key, moving, where, assignment)

    def _assign(self, key: str, moving: Target, where: Membership | None, assignment: Assignment) -> Assigned:
        before = self._living(key)
        check_free(before, where, assignment)
        member = _as_noted(before, moving.member(assignment))
        ended = self.book.get(key) if before is None else None
        if before is None:
            record = self._new(key, assignment.class_for(where), ended)
            # With its member from the first word on: a claim without one would never end by itself.
            record = self._make(_joined(record, member, assignment), ended, assignment.may_wait)
        else:
            record = before
        try:
            if before is not None:
                if not assignment.may_wait:
                    _check_has_rmid(before)
                record, member = self._in_place(before, member, where, assignment)
            # On disk before the member's first task is moved.
            record = self.book.put(_joined(record, member, assignment))
            home = record.home(member)
            if home.state is State.PENDING:
                return Assigned(record, Moved(0, 0))
            through = assignment.allow_class_change
            moved = moving.move(self.tree, home.ref, take_over=assignment.take_over, through_class=through)
            member = replace(member, left=len(moved.left | moved.elsewhere))
            return Assigned(self.book.put(replace(record.with_member(member), state=State.ACTIVE)), moved)
        except Exception:
            self._undo(record, before, ended)
            raise

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
                    record = self.life.finish(record, attribute_value(reason))
            return Released(record, record.state.is_over, self._totals(record))

    def add_member(self, key: str, member: str, *, owner: str, kind: str = "sandbox") -> Record:
        """Note a member that brings no task of its own. Raises NoSuchGroup."""
        key = canonical_key(key)
        check_member_id(member)
        check_word("claim", owner)
        check_word("kind", kind)
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
                self.upkeep.end_member(record, ending, attribute_value(reason))
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
        """The monitoring groups that do not bear our mark; [] while resctrl is not mounted, which Status tells."""
        try:
            return [found for found in self.tree.scan() if found.gid != self.life.mark.gid]
        except NotMounted:
            return []

    def read(self, key: str) -> tuple[Record, list[Reading], list[Total]]:
        """The counters now ([] once the workload is over), and the totals since the baseline. Raises NoSuchGroup."""
        key = canonical_key(key)
        while (record := self._known(key)).state not in _ENDED:
            try:
                readings = self.life.readings(record)
                found = record, summed(readings), self.life.totals(record, readings)
            except (ResctrlError, FileNotFoundError):
                if self.book.get(key) is record:
                    raise
            else:
                # Readers of what lives do not wait: it may have ended, and been set aside, under our eyes.
                now = self.book.get(key)
                if now is not None and now.generation == record.generation and now.state not in _ENDED:
                    return found
        with self.book.writing(key):
            record = self._known(key)
            return record, [], self._totals(record)

    # -- steps

    def _living(self, key: str) -> Record | None:
        """The record of a run that goes on; one that has ended without our seeing it is closed first."""
        record = self.book.get(key)
        if record is not None and record.state is State.ENDING:
            record = self.life.finish(record, record.reason)
        if record is not None and record.state.has_group:
            try:
                self.life.check_identities(record)
            except NoSuchGroup as error:
                record = self.life.lose(record, error.message)
        return None if record is None or record.state.is_over else record

    def _known(self, key: str) -> Record:
        record = self.book.get(key)
        if record is None:
            raise NoSuchGroup(f"there is no workload {key}", remedy="'resctrlctl list' shows those there are")
        return record

    def _known_living(self, key: str) -> Record:
        record = self._living(key) or self._known(key)
        if record.state.is_over:
            raise NoSuchGroup(f"the workload {key} is over ({record.state})")
        return record

    def _new(self, key: str, class_: str, ended: Record | None, follows: bool = False) -> Record:
        """A record for a new run; the ``ended`` one under the same key is moved aside, whole."""
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

    def _make(self, record: Record, ended: Record | None, may_wait: bool) -> Record:
        try:
            made = self.life.make(record)
            if not may_wait:
                _check_has_rmid(made)
        except Exception:
            self.life.discard(record, ended)
            raise
        return made

    def _in_place(
        self, record: Record, member: Member, where: Membership | None, assignment: Assignment
    ) -> tuple[Record, Member]:
        """The workload with a group in the class that the assignment wants, and the member that is to be in that."""
        wanted = assignment.class_for(where)
        if record.follows or (assignment.class_ != FOLLOW and not record.living and not record.further):
            record = self._in_class(record, wanted)
        # From its first task on a group stays where it is, and no task is moved to its class for its sake.
        record = replace(record, follows=False)
        if wanted == record.class_ or (where is None and assignment.class_ == FOLLOW):
            return record, replace(member, part="")
        group = next((group for group in record.further if group.class_ == wanted), None)
        if group is None or group.state is State.FAILED:
            group = self._further(self.book.put(record), wanted, assignment.may_wait)
        reason = group.reason if group.state is State.PENDING else ""
        return record.with_group(group), replace(member, part=group.part, reason=reason)

    def _further(self, record: Record, class_: str, may_wait: bool) -> Record:
        """One more group of the workload, in another class than those it has."""
        group = Record(
            key=record.key,
            part=class_ or ROOT_PART,
            class_=class_,
            group_name=record.group_name,
            state=State.PENDING,
            boot_id=self.life.mark.boot_id,
            created_at=utc_now(),
            # The first group is waited for first; the tick will make this one after it.
            reason=record.reason,
        )
        if record.state is State.PENDING:
            return self.book.put(group)
        return self._make(group, None, may_wait)

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

    def _undo(self, record: Record, before: Record | None, ended: Record | None) -> None:
        if before is None:
            self.life.discard(record, ended)
            return
        # All as it was, but for the group itself: it may have been moved, or made anew, for this call.
        stands = self.book.get(before.key) or record
        known = {group.nonce for group in before.groups}
        for group in stands.further:
            if group.nonce not in known:
                self.life.discard(group, None)
        of_the_group = {name: getattr(stands, name) for name in _OF_THE_GROUP}
        state = before.state if stands.state.has_group == before.state.has_group else stands.state
        self.book.put(replace(before, **of_the_group, state=state))

    def _totals(self, record: Record) -> list[Total]:
        try:
            readings = self.life.readings(record)
        except (NoSuchGroup, NotMounted):
            readings = {}
        return self.life.totals(record, readings)


_ENDED = {state for state in State if state.is_over} | {State.ENDING}
# What a record says of the directory rather than of the workload.
_OF_THE_GROUP = ("class_", "nonce", "boot_id", "created_at", "in_limbo", "reason")


def _check_has_rmid(record: Record) -> None:
    if record.state is State.PENDING:
        raise RmidsExhausted(record.reason, in_limbo=record.in_limbo)


def _as_noted(record: Record | None, member: Member) -> Member:
    """The member as it is noted already, if it is this very process or control group: it has not come anew."""
    noted = record.member(member.id) if record else None
    if noted is None or not noted.lives:
        return member
    if member.pid:
        is_same = (noted.pid, noted.start_time) == (member.pid, member.start_time)
    else:
        is_same = noted.cgroup == member.cgroup
    return replace(noted, cgroup=noted.cgroup or member.cgroup) if is_same else member


def _joined(record: Record, member: Member, assignment: Assignment) -> Record:
    """The record with its new member, and the claim that comes with it."""
    record = _claimed(record.with_member(member), assignment.owner, assignment.attributes, assignment.priority)
    record = replace(record, pod_cgroup=assignment.pod_cgroup or record.pod_cgroup)
    return record.with_late(member) if member.late else record


def _claimed(
    record: Record, owner: str, attributes: Mapping[str, str] | None = None, priority: int | None = None
) -> Record:
    record = record.with_claim(Claim(owner, utc_now()))
    if priority is not None:
        record = replace(record, priority=priority)
    return replace(record, attributes={**record.attributes, **(attributes or {})})
