# SPDX-License-Identifier: Apache-2.0
"""The one writer: every verb of the doors, as blocking calls that any thread may make."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from resctrlmond.groups import target
from resctrlmond.groups.accounting import Total
from resctrlmond.groups.book import Book
from resctrlmond.groups.ends import Ends, runs
from resctrlmond.groups.errors import NoSuchClaim
from resctrlmond.groups.inventory import Inventory
from resctrlmond.groups.joining import Joining, claimed
from resctrlmond.groups.keys import (
    canonical_key,
    check_attributes,
    check_member_id,
    check_priority,
    check_word,
    reason_text,
    valid_class,
)
from resctrlmond.groups.lifecycle import Lifecycle, Mark, replace
from resctrlmond.groups.making import Making
from resctrlmond.groups.outcomes import Assigned, Reconciled, Released
from resctrlmond.groups.pending import Pending
from resctrlmond.groups.record import EndRule, Member, Record, Records, State
from resctrlmond.groups.recovery import Problem, Recovery
from resctrlmond.groups.resuming import Resuming
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.groups.survey import Survey
from resctrlmond.groups.sweeping import Sweeping
from resctrlmond.groups.target import FOLLOW, Assignment
from resctrlmond.groups.times import utc_now
from resctrlmond.groups.upkeep import Upkeep
from resctrlmond.groups.usage import summed
from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import (
    NoSuchGroup,
    NotMounted,
    ResctrlError,
)
from resctrlmond.resctrl.tree import Found, GroupRef, Tree


class Manager:
    """Owns the groups that bear ``mark``. Calls for one key run one at a time; ``get`` and ``list`` never wait."""

    def __init__(self, tree: Tree, records: Records, snapshots: Snapshots, mark: Mark, settings: Settings) -> None:
        self.tree = tree
        self.settings = settings
        self.book = Book(records)
        self.inventory = Inventory()
        self.life = Lifecycle(tree, self.book, snapshots, mark)
        making = Making(self.life, self._settings)
        sweeping = Sweeping(self.life, making)
        resuming = Resuming(self.life, making, sweeping)
        pending = Pending(self.life, sweeping)
        self.joining = Joining(self.life, making, sweeping, resuming)
        self.ends = Ends(self.life, self._settings)
        self.upkeep = Upkeep(
            self.life, self._settings, sweeping=sweeping, pending=pending, resuming=resuming, ends=self.ends
        )
        self.recovery = Recovery(self.life, self._settings, sweeping=sweeping, pending=pending, ends=self.ends)
        self.survey = Survey(tree, mark.gid)
        self._found_at_start: list[Problem] = []
        # What is wrong at present, by what it is about; "" is nothing.
        self.alerts: dict[str, str] = {}

    def _settings(self) -> Settings:
        return self.settings

    def recover(self) -> None:
        """Take up where the last daemon stopped: the only way to start. ``problems`` then says what was odd."""
        # Before a group is created or a task moved: what others write from now on is seen.
        self.upkeep.interference.start()
        self._found_at_start = self.recovery.recover()
        self.upkeep.begin()

    @property
    def problems(self) -> list[str]:
        """What an operator should know: what the start found and still holds, and what fails at present."""
        return [*(problem.text for problem in self._found_at_start), *self.upkeep.problems]

    def tick(self) -> None:
        """Once a second: upkeep; forget the problems of the start that are over."""
        self.upkeep.tick()
        lasting = []
        for problem in self._found_at_start:
            try:
                if problem.lasts():
                    lasting.append(problem)
            except ResctrlError:
                lasting.append(problem)  # the tree cannot be read now
        self._found_at_start = lasting

    # -- verbs that write

    def create(
        self,
        key: str,
        *,
        owner: str,
        ends: EndRule | None = None,
        class_: str = FOLLOW,
        attributes: Mapping[str, str] | None = None,
        may_wait: bool = True,
        priority: int | None = None,
    ) -> Record:
        """Make the workload's group, without a task yet, or find it standing; ``owner`` claims it, and the claim
        ends by the rule ``ends`` (None: EndRule.RELEASE for a new claim, unchanged for an existing one).

        With class FOLLOW it is made in the root and goes to its first task's class. Without a free RMID the group
        is ``pending``; RmidsExhausted only if not ``may_wait``. Those that wait get one in order of ``priority``
        (-1000 to 1000, at first 0), the highest first. Raises InvalidKey, InvalidClass, NoSuchClass,
        ForeignGroup, ClassMismatch, KernelRefused, NotMounted, NotWritten, InvalidAttributes, LimitExceeded.
        """
        key = canonical_key(key)
        check_word("claim", owner)
        check_attributes(attributes or {})
        check_priority(priority)
        class_ = class_ if class_ == FOLLOW else valid_class(class_)
        with self.book.writing(key):
            return self.joining.create(
                key,
                class_,
                owner=owner,
                ends=ends,
                attributes=attributes or {},
                may_wait=may_wait,
                priority=priority,
            )

    def assign(self, assignment: Assignment) -> Assigned:
        """Put a process with its threads, or a control group, into the workload's group; make that if need be.

        What fails changes nothing: a group made for the call is removed again. Only a baseline that was found to be
        late stays late. Raises what ``create`` does, and AlreadyMonitored, NoSuchProcess,
        ProcessChanged, NoSuchCgroup, PermissionDenied.
        """
        key = canonical_key(assignment.key)
        check_attributes(assignment.attributes)
        check_priority(assignment.priority)
        check_word("claim", assignment.owner)
        check_word("kind", assignment.kind)
        if assignment.member is not None:
            check_member_id(assignment.member)
        with target.opened(self.tree, assignment) as moving:
            where = moving.membership()
            turn = self.joining.sweeping.take_over.turn() if assignment.take_over else contextlib.nullcontext()
            with turn, self.book.writing(key):
                return self.joining.assign(key, moving, where, assignment)

    def release(self, key: str, *, owner: str, reason: str = "released") -> Released:
        """End ``owner``'s claim; the workload ends with its last claim. Of a workload that is over, tell the totals.

        Raises NoSuchGroup, and NoSuchClaim if the workload is not over and ``owner`` has no claim on it.
        """
        key = canonical_key(key)
        with self.book.writing(key):
            record = self.book.known(key)
            if not record.state.is_over and not record.claimed_by(owner) and record.claims:
                owners = ", ".join(claim.owner for claim in record.claims)
                raise NoSuchClaim(f"{owner} has no claim on {key}", remedy=f"It is claimed by {owners}")
            if not record.state.is_over:
                # The last claim goes with the same write that notes the end and its reason: a daemon that is killed
                # after it completes this end, one that is killed before it has not begun.
                if not record.without_claim(owner).claims:
                    # What has joined since the last sweep ran outside, and the totals must say so.
                    self.upkeep.sweeping.take_back(key)
                    if self.book.known(key).living:
                        self.upkeep.sweeping.sweep(key)
                    record = self.book.known(key)
                record = record.without_claim(owner)
                record = self.book.put(record) if record.claims else self.life.finish(record, reason_text(reason))
            elif record.is_interrupted:
                record = self.book.put(record.without_claim(owner))
            released = Released(record, record.state.is_over, self._totals(record))
        if released.completed:
            # Before the next group is created: the kernel would give it the counters that came free.
            self.upkeep.serve_counters()
        return released

    def add_member(self, key: str, member: str, *, owner: str, kind: str = "sandbox") -> Record:
        """Note a member that brings no task of its own; one that lives, and has tasks, stays what it is.

        Raises NoSuchGroup, LimitExceeded.
        """
        key = canonical_key(key)
        check_member_id(member)
        check_word("claim", owner)
        check_word("kind", kind)
        with self.book.writing(key):
            record = self.joining.known_living(key)
            noted = record.member(member)
            if noted is None or not (noted.lives and noted.has_tasks):
                record = record.with_member(Member(id=member, kind=kind, owner=owner, started_at=utc_now()))
            return self.book.put(self.book.checked(claimed(record, owner)))

    def remove_member(self, key: str, member: str, *, reason: str = "removed", confirms: bool = False) -> Record:
        """End a member, by the word of who knows. A member that is not known, or ended, is no error.

        ``confirms``: the word only confirms the end of its first process. While that runs the word is of an earlier
        one under its id, and ends nothing. Raises NoSuchGroup.
        """
        key = canonical_key(key)
        with self.book.writing(key):
            # Before the settling, which may end the workload: tasks of another awaited member may have come back.
            self.upkeep.sweeping.take_back(key)
            record = self.book.known(key)
            ending = record.member(member)
            if ending is not None and ending.lives and not (confirms and runs(ending)):
                self.ends.end_member(record, ending, reason_text(reason))
            elif ending is not None and ending.awaited:
                self.book.put(record.with_member(replace(ending, awaited=False, reason=reason_text(reason))))
            return self.ends.settle(key) or record

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
            if not record.claimed_by(owner):
                continue
            if record.key in living:
                kept.append(record.key)
                continue
            try:
                self.release(record.key, owner=owner, reason="not in its owner's Reconcile list")
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
            record = self.joining.known_living(key)
            if not self.tree.has_class(class_):
                raise self.tree.no_such_class(class_)
            if record.class_ == class_:
                return record
            if not record.state.has_group:
                # Nothing is renamed that would take its tasks along: they change class as they join.
                for member in record.living:
                    record = record.with_member(replace(member, allow_class_change=True))
            return self.life.relocate(replace(record, follows=False), class_)

    # -- verbs that read

    def get(self, key: str) -> Record:
        """The workload's record. Raises NoSuchGroup."""
        return self.book.known(canonical_key(key))

    def records(self) -> list[Record]:
        """All records, ended ones until their time is over, in order of the key."""
        return self.book.all()

    def read(self, key: str) -> tuple[Record, list[Reading], list[Total]]:
        """The counters now ([] once the workload is over), and the totals since the baseline. Raises NoSuchGroup."""
        key = canonical_key(key)
        while (record := self.book.known(key)).state not in _ENDED:
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
            record = self.book.known(key)
            return record, [], self._totals(record)

    def read_foreign(self, ref: GroupRef) -> tuple[Found, list[Reading]]:
        """A monitoring group without our mark, with its counters now. Changes nothing. Raises NoSuchGroup."""
        # Not a path that is made of what a caller sent: it has to be one of those that stand.
        found = next((one for one in self.survey.look().foreign if one.ref == ref), None)
        if found is None:
            raise NoSuchGroup(
                f"there is no foreign monitoring group {ref.name} in class {ref.class_ or '/'}",
                remedy="'resctrlctl list' shows the foreign groups",
            )
        return found, self.tree.read(found.ref)

    # -- steps

    def _totals(self, record: Record) -> list[Total]:
        try:
            readings = self.life.readings(record)
        except (NoSuchGroup, NotMounted):
            readings = {}
        return self.life.totals(record, readings)


_ENDED = {state for state in State if state.is_over} | {State.ENDING}
