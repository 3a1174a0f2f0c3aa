# SPDX-License-Identifier: Apache-2.0
"""The hands of the manager: each step in the life of one group, in the order that survives being cut anywhere."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

import msgspec

from resctrlmond.groups.accounting import Quality, Total, totals, worst
from resctrlmond.groups.book import Book
from resctrlmond.groups.errors import ForeignGroup
from resctrlmond.groups.record import Record, State
from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl.counters import Reading
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    GroupExists,
    KernelRefused,
    NoSuchGroup,
    NotMounted,
    ResctrlError,
    RmidsExhausted,
)
from resctrlmond.resctrl.tree import Found, GroupRef, Tree

# Cores hand their energy counts over every 2 ms at the latest, also after a task's death (the cover letter of the
# AET series): a last reading is taken after that.
REPORTING_LAG_S = 0.004

replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Mark:
    """What makes a group ours: the group id that the kernel gives it at birth, in this boot."""

    gid: int
    boot_id: str


class Lifecycle:
    """Makes, moves and ends the groups of records. Whoever calls holds the record's key."""

    def __init__(self, tree: Tree, book: Book, snapshots: Snapshots, mark: Mark) -> None:
        self.tree = tree
        self.book = book
        self.snapshots = snapshots
        self.mark = mark

    def make(self, record: Record, quality: Quality = Quality.EXACT) -> Record:
        """Make the record's group and write its baseline down: from ``pending`` to ``idle``.

        The record stands before the group does, and the baseline before a task can join. Without a free RMID the
        record stays ``pending``, with the reason. Raises ForeignGroup, NoSuchClass, KernelRefused, NotMounted and
        NotWritten, and leaves no group then.
        """
        # The clock's second with a random rest: looks like a time to a person, and no two are alike. A record that
        # waits keeps its own, which no group bears yet: nothing is written, or told, each time that it is tried.
        nonce = record.nonce or time.time_ns() // 10**9 * 10**9 + secrets.randbelow(10**9)
        record = self.book.put(
            replace(
                record,
                state=State.PENDING,
                nonce=nonce,
                boot_id=self.mark.boot_id,
                created_at=record.created_at or utc_now(),
            )
        )
        try:
            found, begun = self._create(record, quality)
        except RmidsExhausted as error:
            return self.book.put(replace(record, reason=str(error), in_limbo=error.in_limbo))
        if found.gid != self.mark.gid:
            self.tree.remove(record.ref)
            raise KernelRefused(
                f"the new group has group id {found.gid} instead of our mark {self.mark.gid}",
                path=found.path,
                remedy="Run resctrlmond with the group resctrlmon (Group= in its unit)",
            )
        try:
            return self.baseline(record, begun)
        except ResctrlError:
            if begun is quality:  # not one that has tasks and was only taken up
                self._remove_own(record)
            raise

    def _create(self, record: Record, quality: Quality) -> tuple[Found, Quality]:
        ref = record.ref
        try:
            return self.tree.create(ref, record.nonce), quality
        except GroupExists as error:
            standing = self.tree.find(ref)
            if standing is None:
                raise
            if standing.gid != self.mark.gid:
                raise ForeignGroup(
                    "a monitoring group of this name stands there and is not ours",
                    path=standing.path,
                    remedy="It is left alone. Choose another key, or remove it if nobody needs it",
                ) from error
            if any(other.ref == ref and other.state.has_group for other in self.book.all()):
                raise  # of another key, from before group_prefix was changed
            # Ours, but of no record: a run that was cut between two steps, or whose record was lost.
            begun = worst(quality, Quality.UNKNOWN) if self.tree.tasks(ref) else quality
            return self.tree.set_nonce(ref, record.nonce), begun

    def baseline(self, record: Record, quality: Quality) -> Record:
        """Read the begin values and write them down."""
        record = replace(record, created_at=utc_now())
        readings = self.tree.read(record.ref)
        self.snapshots.begin(record.key, record.created_at, self.tree.full_path(record.ref), readings)
        return self.book.put(replace(record, state=State.IDLE, reason="", in_limbo=False, baseline=quality))

    def check_identity(self, record: Record) -> Found:
        """The record's own group; NoSuchGroup if it is gone or another one stands in its place."""
        found = self.tree.find(record.ref)
        if found is None or found.gid != self.mark.gid or found.nonce != record.nonce:
            self.tree.check_mounted()
            raise NoSuchGroup(
                "the group was removed by somebody else" if found is None else "another group stands in its place",
                path=self.tree.full_path(record.ref),
            )
        return found

    def relocate(self, record: Record, class_: str) -> Record:
        """Move the group to another class: by rename, or made anew there if it never had a member and rename is not
        offered. Raises NoSuchClass, ClassMismatch, GroupExists.
        """
        if not record.state.has_group:
            return self.book.put(replace(record, class_=class_))
        self.check_identity(record)
        target = GroupRef(class_, record.group_name)
        try:
            self.tree.rename(record.ref, target)
        except KernelRefused as error:
            # Without a task, but with a past: its counters would be lost.
            if record.members or self.tree.tasks(record.ref):
                raise ClassMismatch(
                    f"the group stands in class {record.class_ or '/'} and this kernel does not move groups",
                    path=error.path,
                    errno=error.errno,
                    status=error.status,
                ) from error
            moving = self.book.put(replace(record, class_=class_, state=State.PENDING))
            self.tree.remove(record.ref)
            return self.make(moving, record.baseline)
        return self.relocated(record, class_)

    def relocated(self, record: Record, class_: str) -> Record:
        """Note that the group stands in another class now."""
        record = replace(record, class_=class_)
        self.snapshots.relink(record.key, self.tree.full_path(record.ref))
        return self.book.put(record)

    def finish(self, record: Record, reason: str) -> Record:
        """End the workload: last values read and written, then the group removed and its RMID given back.

        May be called again for a record in ``ending``: what was done already is not done twice.
        """
        if record.state is State.PENDING and not self._stands(record):
            return self._over(record, State.COMPLETED, f"{reason}; it never had an RMID")
        if record.state is not State.ENDING:
            record = self.book.put(replace(record, state=State.ENDING, reason=reason))
        if not self.snapshots.is_complete(record.key):
            try:
                self.check_identity(record)
                time.sleep(REPORTING_LAG_S)
                self.snapshots.end(record.key, utc_now(), self.tree.read(record.ref))
            except (NoSuchGroup, NotMounted) as error:
                return self.lose(record, str(error))
        self._remove_own(record)
        return self._over(record, State.COMPLETED, record.reason)

    def _stands(self, record: Record) -> bool:
        try:
            self.check_identity(record)
        except (NoSuchGroup, NotMounted):
            return False
        return True

    def _remove_own(self, record: Record) -> None:
        if self._stands(record):
            self.tree.remove(record.ref)

    def lose(self, record: Record, reason: str) -> Record:
        """The group went away without our doing: close its snapshot without end values, and say why."""
        if self.snapshots.exists(record.key) and not self.snapshots.is_complete(record.key):
            self.snapshots.end(record.key, utc_now(), [])
        return self._over(record, State.LOST, reason)

    def fail(self, record: Record, reason: str) -> Record:
        """The group cannot be made, and waiting will not help."""
        return self._over(record, State.FAILED, reason)

    def _over(self, record: Record, state: State, reason: str) -> Record:
        now = utc_now()
        members = tuple(replace(member, ended_at=now) if member.lives else member for member in record.members)
        return self.book.put(
            replace(record, state=state, reason=reason, completed_at=now, members=members, claims=())
        )

    def discard(self, record: Record, before: Record | None) -> None:
        """Undo a group that was made for a call which then failed: nothing of it stays, and the run that ended
        ``before`` under its key stands again.
        """
        if record.state.has_group:
            self._remove_own(record)
        self.snapshots.delete(record.key)
        if before is None:
            self.book.drop(record.key)
        else:
            self.snapshots.bring_back(before.key, before.generation)
            self.book.put(before)

    def readings(self, record: Record) -> list[Reading]:
        """The live counters; [] for a record that has no group, or whose last values are written."""
        if not record.state.has_group or self._has_ends(record):
            return []
        self.check_identity(record)
        return self.tree.read(record.ref)

    def totals(self, record: Record, readings: list[Reading]) -> list[Total]:
        """What was used since the baseline: up to ``readings``, or up to the end values of an ended run."""
        last = self.snapshots.end_values(record.key) if self._has_ends(record) else readings
        return totals(self.snapshots.begin_values(record.key), last, record.baseline)

    def _has_ends(self, record: Record) -> bool:
        return record.state.is_over or (record.state is State.ENDING and self.snapshots.is_complete(record.key))
