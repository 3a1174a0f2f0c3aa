# SPDX-License-Identifier: Apache-2.0
"""The hands of the manager: each step in the life of one group, in the order that survives being cut anywhere."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from resctrlmond.groups import caveats
from resctrlmond.groups.accounting import Quality, Total, worst
from resctrlmond.groups.book import Book
from resctrlmond.groups.checkpoint import readings_of
from resctrlmond.groups.errors import ForeignGroup, InvalidClass, NotWritten
from resctrlmond.groups.keys import valid_class
from resctrlmond.groups.plan import RECOVERED, lacking_counters
from resctrlmond.groups.quality import QualityFiles, text
from resctrlmond.groups.record import MAX_LATE_REASONS, Record, State
from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.groups.times import boot_ns, utc_now
from resctrlmond.groups.usage import Live, at_baseline, used
from resctrlmond.resctrl.bandwidth import Mode, domain_number
from resctrlmond.resctrl.counters import Reading, event
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    GroupExists,
    KernelRefused,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    PermissionDenied,
    ResctrlError,
    RmidsExhausted,
    printable,
    undoing,
)
from resctrlmond.resctrl.mounts import Mounting
from resctrlmond.resctrl.tree import Found, GroupRef, Tree

# Cores hand their energy counts over every 2 ms at the latest, also after a task's death (the cover letter of the
# AET series): a last reading is taken after that.
REPORTING_LAG_S = 0.004

# A task that forks while it is moved out of a new group leaves its child there.
_MAX_CLEARINGS = 10

log = logging.getLogger(__name__)

replace = msgspec.structs.replace
# Domains and bandwidth events, as in Record.unassigned.
Lacking = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """What makes a group ours: the group id that the kernel gives it at birth, in this boot."""

    gid: int
    boot_id: str


class Lifecycle:
    """Makes, moves and ends the groups of records. Whoever calls holds the record's key.

    What is about one group takes the record of a further one as well (see ``Record``).
    """

    def __init__(self, tree: Tree, book: Book, snapshots: Snapshots, mark: Mark) -> None:
        self.tree = tree
        self.book = book
        self.snapshots = snapshots
        self.mark = mark
        self.quality = QualityFiles(snapshots)
        book.before_put = self.quality.before_put
        # Called when a group has been created, with the record before its end values are read, and with the record of
        # one group after that.
        self.created: Callable[[GroupRef], None] = lambda _ref: None
        self.before_end: Callable[[Record], Record] = lambda record: record
        self.after_last_reading: Callable[[Record], Record] = lambda group: group
        # Per nonce of a standing group: the mount on which it was seen last.
        self._seen_on: dict[int, Mounting] = {}
        # Places whose links to live counters could not be changed after the group moved: the next tick tries again.
        self._stale_links: set[str] = set()

    def make(self, record: Record, quality: Quality = Quality.EXACT, may_wait: bool = True) -> Record:
        """Make the record's group and write its baseline down: from ``pending`` to ``idle``.

        The record stands before the group does, and the baseline before a task can join. Without a free RMID the
        record stays ``pending``, with the reason; RmidsExhausted only if not ``may_wait``. Raises ForeignGroup,
        NoSuchClass, KernelRefused, NotMounted and NotWritten, and leaves no group then.
        """
        record = self.book.put(self._begun(record))
        try:
            found, begun = self._create(record, quality)
        except RmidsExhausted as error:
            if not may_wait:
                raise
            return self.wait(record, error)
        if found.gid != self.mark.gid:
            with undoing(record.key):
                self.tree.remove(record.ref)
            raise KernelRefused(
                f"the new group has group id {found.gid} instead of the mark of resctrlmond, {self.mark.gid}",
                path=found.path,
                remedy="Run resctrlmond with the group resctrlmon (Group= in its unit)",
            )
        try:
            return self.baseline(record, begun)
        except ResctrlError:
            if begun is quality:  # not one that has tasks and was only taken up
                with undoing(record.key):
                    self._remove_own(record)
            raise

    def wait(self, record: Record, error: RmidsExhausted) -> Record:
        """Have the record wait for an RMID, for the reason that ``error`` gives. Raises NotWritten."""
        return self.book.put(replace(self._begun(record), reason=str(error), in_limbo=error.in_limbo))

    def _begun(self, record: Record) -> Record:
        # The clock's second with a random rest: looks like a time to a person, and no two are alike. A record that
        # waits keeps its own, which no group bears yet: nothing is written, or told, each time that it is tried.
        nonce = record.nonce or time.time_ns() // 10**9 * 10**9 + secrets.randbelow(10**9)
        if not record.created_at:
            record = replace(record, created_at=utc_now(), created_ns=boot_ns())
        return replace(record, state=State.PENDING, nonce=nonce, boot_id=self.mark.boot_id)

    def _create(self, record: Record, quality: Quality) -> tuple[Found, Quality]:
        ref = record.ref
        try:
            found = self.tree.create(ref, record.nonce)
            self.created(ref)
            return found, quality
        except GroupExists as error:
            standing = self.tree.find(ref)
            if standing is None:
                raise
            if standing.gid != self.mark.gid:
                raise ForeignGroup(
                    "a monitoring group with this name exists already: another program created it",
                    path=standing.path,
                    remedy="Choose another key, or remove the group if it is not needed",
                ) from error
            others = [other for workload in self.book.all() for other in workload.standing]
            if any(other.ref == ref or other.nonce == standing.nonce for other in others):
                raise  # of another key: from before group_prefix was changed, or renamed to this name
            # Ours, but of no record: a run that was cut between two steps, or whose record was lost.
            begun = worst(quality, Quality.UNKNOWN) if self.tree.tasks(ref) else quality
            return self.tree.set_nonce(ref, record.nonce), begun

    def baseline(self, record: Record, quality: Quality) -> Record:
        """Read the begin values and write them down."""
        self._seen_on[record.nonce] = self.tree.mounting()
        if quality is not Quality.UNKNOWN:
            record, quality = self._cleared(record, quality)
        record = replace(record, created_at=utc_now(), created_ns=boot_ns())
        # Before the readings, and at the end after them: a change in between is seen.
        record = replace(record, transactions=self.tree.transactions())
        readings = self.tree.read(record.ref)
        lacking = caveats.unassigned(readings)
        if lacking and self._is_first_for_counters(record) and self._assigned(record.ref, lacking) != lacking:
            readings = self.tree.read(record.ref)
            lacking = caveats.unassigned(readings)
        record = replace(record, caveats=caveats.of_unassigned(lacking), unassigned=lacking)
        record = self._with_caveats(record, readings)
        inodes = {reading.domain: reading.inode for reading in readings}
        begun = replace(record, state=State.IDLE, reason="", in_limbo=False, baseline=quality, inodes=inodes)
        qualities = None if record.part else text(at_baseline(begun, readings))
        self.snapshots.begin(record.place, record.created_at, self.tree.full_path(record.ref), readings, qualities)
        return self.book.put(begun)

    def _cleared(self, record: Record, quality: Quality) -> tuple[Record, Quality]:
        """Move tasks out of a new group, each to the default group of its class, and return the baseline's quality.

        An rmdir overlooks a task that is forked meanwhile (rdt_move_group_tasks()): it keeps the RMID, and is in the
        group that gets this RMID next. Its class stays the same.
        """
        strangers, moved = [], 0
        for _ in range(_MAX_CLEARINGS):
            strangers = self.tree.tasks(record.ref)
            if not strangers:
                if moved:
                    time.sleep(REPORTING_LAG_S)  # what it used until now is not of the group
                    log.info(
                        "%s: tasks that do not belong to it were in the new group, and were moved out: %d",
                        record.key,
                        moved,
                    )
                return record, quality
            for tid in strangers:
                with contextlib.suppress(NoSuchProcess, NoSuchClass, PermissionDenied, KernelRefused):
                    self.tree.write_task(self.tree.membership(tid).class_, tid)
                    moved += 1
        count = len(strangers)
        why = f"tasks that do not belong to it were in the group at its baseline and could not be moved out: {count}"
        reasons = (*record.late_reasons, why)[:MAX_LATE_REASONS]
        return replace(record, late_reasons=reasons), worst(quality, Quality.ESTIMATED)

    def find(self, record: Record) -> Found:
        """Find the record's own group by its mark and nonce, also if somebody renamed it. Raises NoSuchGroup."""
        # Before the group: if a mount comes in between, the group is not found on it.
        mounting = self.tree.mounting()
        found = self.tree.find(record.ref)
        if found is None or not self._is_of(record, found):
            self.tree.check_mounted()
            # What went with its mount is nowhere. The whole tree is looked through only when a group is missing.
            scanned = [] if self.went_with_mount(record) else self.tree.scan()
            renamed = next((other for other in scanned if self._is_of(record, other)), None)
            if renamed is None:
                raise NoSuchGroup(self._why_gone(record, found), path=self.tree.full_path(record.ref))
            found = renamed
        self._seen_on[record.nonce] = mounting
        return found

    def _is_of(self, record: Record, found: Found) -> bool:
        return found.gid == self.mark.gid and found.nonce == record.nonce

    def follow(self, record: Record) -> Record:
        """Return the workload with each group where it is now. Raises NoSuchGroup if any of its groups is gone: what
        it counts would be short of that group.
        """
        for group in record.standing:
            record = record.with_group(self.follow_group(group))
        _check_whole(record)
        return record

    def follow_group(self, group: Record) -> Record:
        """Return the record of the group where that is now: somebody may have renamed it. Raises NoSuchGroup."""
        found = self.find(group)
        if found.ref == group.ref:
            return group
        if not _is_recordable(found.ref):
            # No record with this name could be read back.
            self.tree.rename(found.ref, group.ref)
            log.warning("%s: somebody renamed its group to %s; renamed back", group.key, printable(found.ref.path))
            return group
        path = printable(found.ref.path)
        log.info("%s: somebody renamed its group to %s, and the workload continues in it", group.key, path)
        return self.relocated(group, found.ref)

    def went_with_mount(self, group: Record) -> bool:
        """Whether the mount on which the group was seen last is gone: nobody removed the group itself."""
        return self._seen_on.get(group.nonce, self.tree.mounting()) != self.tree.mounting()

    def _why_gone(self, record: Record, instead: Found | None) -> str:
        if self.went_with_mount(record):
            return "resctrl was unmounted and mounted again, which removed every group"
        return "the group was removed by somebody else" if instead is None else "another group is in its place"

    def relocate(self, record: Record, class_: str) -> Record:
        """Move the group to another class: by rename, or made anew there if it never had a member and rename is not
        offered. Raises NoSuchClass, ClassMismatch, GroupExists.
        """
        if record.further:
            raise ClassMismatch(
                f"the tasks of {record.key} are in several classes, with a group in each",
                path=self.tree.full_path(record.ref),
                remedy="Only a workload with a single group can be moved",
            )
        if not record.state.has_group:
            return self.book.put(replace(record, class_=class_))
        record = self.follow_group(record)
        target = GroupRef(class_, record.group_name)
        try:
            self.tree.rename(record.ref, target)
        except KernelRefused as error:
            # Without a task, but with a past: its counters would be lost.
            if record.members or self.tree.tasks(record.ref):
                raise ClassMismatch(
                    f"the group is in class {record.class_ or '/'}, and this kernel cannot move groups",
                    path=error.path,
                    errno=error.errno,
                    status=error.status,
                ) from error
            moving = self.book.put(replace(record, class_=class_, state=State.PENDING))
            try:
                self.tree.remove(record.ref)
            except ResctrlError:
                # It stands, and of what waits elsewhere nobody would know that.
                with undoing(record.key):
                    self.book.put(record)
                raise
            return self.make(moving, record.baseline)
        try:
            return self.relocated(record, target)
        except NotWritten:
            noted = self.book.get(record.key)
            if noted is None or noted.ref != target:
                # A group that is not known to stand there would be taken for lost: back to where it is known.
                with undoing(record.key):
                    self.tree.rename(target, record.ref)
                    self.relink(record)
            raise

    def relocated(self, record: Record, ref: GroupRef) -> Record:
        """Record that the group is in another class, or has another name, now."""
        record = replace(record, class_=ref.class_, group_name=ref.name)
        try:
            self.relink(record)
        finally:
            # Whatever becomes of the links: a group that is not known to stand there would be taken for lost.
            record = self.book.put(record)
        return record

    def relink(self, record: Record) -> None:
        """Point the links of one group's snapshot at its directory. Raises NotWritten, NotRead."""
        self._stale_links.add(record.place)
        self.snapshots.relink(record.place, self.tree.full_path(record.ref))
        self._stale_links.discard(record.place)

    def relink_stale(self, record: Record) -> None:
        """Repeat each ``relink`` of the workload's groups that failed. Raises NotWritten, NotRead."""
        for group in record.standing:
            if group.place in self._stale_links:
                self.relink(group)

    def finish(self, record: Record, reason: str) -> Record:
        """End the workload: last values read and written, then the group removed and its RMID given back.

        May be called again for a record in ``ending``: what was done already is not done twice.
        """
        if record.state is State.PENDING and not self._standing(record):
            record = self._further_finished(record, reason)
            return self._over(record, State.COMPLETED, f"{reason}; it never had an RMID")
        if record.state is not State.ENDING and not record.part:
            record = self.before_end(record)
        if record.state is not State.ENDING:
            record = self.book.put(replace(record, state=State.ENDING, reason=reason))
        # The first one last: its seal says that all ends of the workload are written.
        record = self._further_finished(record, reason)
        if not self.snapshots.is_complete(record.place):
            try:
                record = self.follow_group(record)
                if self.snapshots.is_bare(record.place):
                    # Somebody removed its files: it ends all the same, and no total is made up of what is left.
                    record = self.book.put(replace(record, baseline=Quality.UNKNOWN))
                    self.snapshots.make_anew(record.place)
                time.sleep(REPORTING_LAG_S)
                record = self._end(record)
            except (NoSuchGroup, NotMounted) as error:
                return self.lose(record, str(error))
        self._remove_own(record)
        return self._over(record, State.COMPLETED, record.reason)

    def _further_finished(self, record: Record, reason: str) -> Record:
        for group in record.further:
            if not group.state.is_over:
                record = record.with_group(self.finish(group, reason))
        return record

    def _end(self, record: Record, state: State = State.COMPLETED, reason: str = "") -> Record:
        as_ = {"state": state, "reason": reason or record.reason}
        self.snapshots.keep_no_more(record.place)
        readings, now = self.tree.read(record.ref), utc_now()
        record = self.after_last_reading(self._kept(self._with_caveats(record, readings)))
        # In one file first: a domain that went offline has its last value there, and so has all that is not in a
        # file of its own yet when we are killed and the group goes away meanwhile.
        last = self.snapshots.checkpoint(record.place, now, readings, record.inodes)
        self.snapshots.end(record.place, now, last, self._sealing(replace(record, **as_), now))
        return record

    def _sealing(self, over: Record, completed_at: str) -> AbstractContextManager[None] | None:
        """Write the final qualities of the workload, as what it will be when it is over; not with a further group."""
        return None if over.part else self.quality.sealing(over, completed_at)

    def checkpoint(self, record: Record) -> None:
        """Keep the counters as they are now, for when a group goes away unasked. Raises NoSuchGroup, NotWritten."""
        live = {}
        for group in record.standing:
            live[group.place] = readings = self._read(group, must_keep=True)
            self._kept(self._with_caveats(group, readings))
        self.quality.update(self.book.get(record.key) or record, live)

    def _is_first_for_counters(self, record: Record) -> bool:
        """Whether no group with as high a priority lacks counters already, and the kernel assigns any at all."""
        first = next(iter(lacking_counters(self.book.all())), None)
        is_first = first is None or first.priority < record.priority
        return is_first and self.tree.bandwidth_mode() is Mode.ASSIGNED

    def assign_counters(self, group: Record) -> Record:
        """Assign the bandwidth counters that the group lacks and that are free. Raises NoSuchGroup, KernelRefused."""
        group = self.follow_group(group)
        return self.book.put(replace(group, unassigned=self._assigned(group.ref, group.unassigned)))

    def _assigned(self, ref: GroupRef, lacking: Lacking) -> Lacking:
        """Assign these counters to a group, as far as they are free. Returns those that it still lacks."""
        return tuple(
            (domain, name)
            for domain, name in lacking
            if not self.tree.assign_counter(ref, name, domain_number(domain))
        )

    def _with_caveats(self, group: Record, readings: Sequence[Reading]) -> Record:
        """The group with the caveats of what was just read of it. Raises NotRead."""
        now = caveats.of_simulation(readings, self.tree.inexact())
        if any(event(reading.event).restarts for reading in readings):
            now = caveats.together(caveats.of_mode(readings, self.tree.bandwidth_mode()), now)
        found = caveats.together(group.caveats, now)
        if group.transactions:
            found = caveats.with_change(found, group.transactions, self.tree.transactions())
        return group if found == group.caveats else replace(group, caveats=found)

    def _kept(self, group: Record) -> Record:
        """Write the group's caveats down: the mode may be another one at its end."""
        stands = self.book.get(group.key)
        known = next((other for other in stands.groups if other.part == group.part), None) if stands else None
        return group if known is None or known.caveats == group.caveats else self.book.put(group)

    def _standing(self, record: Record) -> Found | None:
        try:
            return self.find(record)
        except (NoSuchGroup, NotMounted):
            return None

    def _remove_own(self, record: Record) -> None:
        if found := self._standing(record):
            self.tree.remove(found.ref)

    def lose(self, record: Record, reason: str) -> Record:
        """A group went away without our doing: its last known values become its end values, and it is said why.

        With it goes the run, so the workload's groups that still stand are ended as they should be.
        """
        record = self._further_finished(record, reason)
        if self.snapshots.exists(record.place) and not self.snapshots.is_complete(record.place):
            if found := self._standing(record):
                standing = replace(record, class_=found.ref.class_, group_name=found.ref.name)
                ended = self._end(standing, State.LOST, reason)
                record = replace(record, caveats=ended.caveats)
            else:
                now, last = utc_now(), readings_of(self.snapshots.last_read(record.place))
                lost = replace(record, state=State.LOST, reason=reason)
                self.snapshots.end(record.place, now, last, self._sealing(lost, now))
        self._remove_own(record)
        return self._over(record, State.LOST, reason)

    def fail(self, record: Record, reason: str) -> Record:
        """The group cannot be made, and waiting will not help."""
        return self._over(record, State.FAILED, reason)

    def _over(self, record: Record, state: State, reason: str) -> Record:
        record = self._closed(record, state, reason)
        for group in record.groups:
            self._seen_on.pop(group.nonce, None)
            self._stale_links.discard(group.place)
        return record

    def _closed(self, record: Record, state: State, reason: str) -> Record:
        record = replace(record, state=state, reason=reason, completed_at=utc_now(), completed_ns=boot_ns())
        # What is lost goes on without a group, and is to have one again: unless it ended with its boot, or was known
        # by nothing but its group.
        if state is State.LOST and record.boot_id == self.mark.boot_id:
            record = record.without_claim(RECOVERED)
            if record.claims:
                return self.book.put(record)
        members = [
            replace(member, ended_at=record.completed_at) if member.lives else member for member in record.members
        ]
        return self.book.put(replace(record, members=tuple(members), claims=()))

    def discard(self, record: Record, before: Record | None) -> None:
        """Undo a group that was made for a call which then failed: nothing of it stays, and the run that ended
        ``before`` under its key stands again.
        """
        if record.state.has_group:
            self._remove_own(record)
        self._seen_on.pop(record.nonce, None)
        self.snapshots.delete(record.place)
        if record.part:
            whole = self.book.get(record.key)
            assert whole is not None
            others = tuple(group for group in whole.further if group.part != record.part)
            self.book.put(replace(whole, further=others))
        elif before is None:
            self.book.drop(record.key)
        else:
            self.snapshots.bring_back(before.key, before.generation)
            self.book.put(before)

    def readings(self, record: Record) -> Live:
        """The live counters; {} for a record that has no group, or whose last values are written."""
        if not record.state.has_group or self._has_ends(record):
            return {}
        _check_whole(record)
        return {group.place: self._read(group) for group in record.standing}

    def _read(self, group: Record, *, must_keep: bool = False) -> list[Reading]:
        """Read the group's counters, and keep the values for the case that the group is removed by somebody else.

        Raises NoSuchGroup, NotRead, and NotWritten if the values ``must_keep``.
        """
        begun_ns = time.monotonic_ns()
        readings = self.tree.read(self.find(group).ref)
        with contextlib.nullcontext() if must_keep else contextlib.suppress(NotWritten):
            self.snapshots.keep_read(group.created_at, begun_ns, group.place, readings, group.inodes)
        return readings

    def totals(self, record: Record, live: Live) -> list[Total]:
        """What was used since the baseline: up to the ``live`` readings, or up to the end values of an ended run."""
        if self._has_ends(record):
            return used(self.snapshots, record, {})
        for group in record.groups:
            if group.place in live:
                record = record.with_group(self._with_caveats(group, live[group.place]))
        found = used(self.snapshots, record, live)
        if live:
            self.quality.witness(record, live, found)
        return found

    def _has_ends(self, record: Record) -> bool:
        return record.state.is_over or (record.state is State.ENDING and self.snapshots.is_complete(record.place))


def _check_whole(record: Record) -> None:
    if record.is_torn:
        raise NoSuchGroup("the group was removed by somebody else in one of its classes")


def _is_recordable(ref: GroupRef) -> bool:
    try:
        return bool(valid_class(ref.name)) and valid_class(ref.class_) == ref.class_
    except InvalidClass:
        return False
