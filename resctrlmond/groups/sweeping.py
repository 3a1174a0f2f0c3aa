# SPDX-License-Identifier: Apache-2.0
"""Putting the tasks of members into groups: each into the one of its class, also those that come late."""

from __future__ import annotations

import logging
from collections.abc import Callable

from resctrlmond.groups.joiners import Joiners
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.making import Making
from resctrlmond.groups.record import Member, Record, State
from resctrlmond.groups.takeover import TakeOver
from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import (
    LACKS,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    NotRead,
    ResctrlError,
    printable,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import How, Moved, move_cgroup, move_process, move_tree
from resctrlmond.resctrl.tree import GroupRef

log = logging.getLogger(__name__)

# Moves one member's tasks into a group.
Move = Callable[[GroupRef, How], Moved]


class Sweeping:
    """Puts the tasks of members into their groups. Whoever calls holds the record's key, but for ``sweep``."""

    def __init__(self, life: Lifecycle, making: Making) -> None:
        self.life = life
        self.take_over = TakeOver(life.book)
        self.book = life.book
        self.tree = life.tree
        self.making = making
        self.joiners = Joiners()
        # Called with the place of each task of a member that was found outside and is moved into its group.
        self.found_outside: Callable[[Membership], None] = lambda _: None

    def sweep(self, key: str) -> None:
        """Take in what joined the members from outside, and follow those that somebody moved to another class."""
        with self.book.writing(key):
            record = self.book.get(key)
            # One that is idle has members where their adoption failed.
            if record is None or record.state not in (State.ACTIVE, State.IDLE):
                return
            try:
                # In a group that somebody has just renamed its tasks are not outside.
                record = self.life.follow(record)
            except (NoSuchGroup, NotMounted):
                return  # its loss is about to be noted
            for member in record.living:
                record = self._take_in(record, member)

    def take_back(self, key: str) -> None:
        """Let members go on whose control group has tasks again, as after the restart of a service."""
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None or record.state not in (State.PENDING, State.ACTIVE, State.IDLE):
                return
            for member in record.awaited:
                try:
                    is_populated = cgroups.is_populated(member.cgroup)
                except NotRead as error:
                    if error.errno in LACKS:
                        raise
                    late = record.with_late(member, f"tasks that return to {member.id} are not detected: {error}")
                    record = self.book.put(late) if late != record else record
                    continue
                if not is_populated:
                    looked_at = self.joiners.look_at_empty(record, member)
                    record = self.book.put(looked_at) if looked_at is not record else record
                    continue
                # Its tasks have run outside until now. On disk before the first of them is moved.
                back = replace(member, ended_at="", awaited=False, started_at=utc_now(), late=True, left=0, reason="")
                why = f"{member.id} ran outside the group between its return and the next check of its control group"
                record = self.book.put(record.with_member(back).with_late(back, why))
                text = "%s: control group %s has tasks again; they are moved into the group, and the baseline is late"
                log.info(text, key, printable(member.cgroup))
                record = self._take_in(record, back)

    def _take_in(self, record: Record, member: Member) -> Record:
        try:
            record, moved = self._sweep(record, member)
        except NoSuchProcess:
            return record  # its end is about to be noted
        except ResctrlError as error:
            record, member = self._as_noted(record, member)
            record = record.with_member(replace(member, reason=str(error)))
            if member.cgroup and isinstance(error, NotRead) and error.errno not in LACKS:
                # As EACCES or too many control groups: no later sweep is going to see them either.
                record = record.with_late(
                    member, f"processes that join {member.id} from outside are not detected: {error}"
                )
            return self.book.put(record)
        if moved.moved:
            tasks = "1 task" if moved.moved == 1 else f"{moved.moved} tasks"
            log.info("%s: moved %s of member %s into the group", record.key, tasks, member.id)
        swept = record.member(member.id)
        if swept is None or not swept.has_tasks or not record.home(swept).state.has_group:
            return record
        # What was in the way of an earlier sweep is no more, and who stayed outside is told as it is now.
        swept = replace(swept, reason=why_outside(record, moved), left=moved.outside)
        swept = replace(swept, take_over=False, allow_class_change=False, tree=False)
        record = record.with_member(swept)
        if swept.left:
            # They may end before they are taken in.
            record = record.with_late(swept, f"tasks of {swept.id} stayed outside")
        record = self.joiners.look(record, swept)
        return self.book.put(replace(record, state=State.ACTIVE))

    def adopt(self, group: Record) -> Record | None:
        """Put the members of a group that came late into it; what they used before is lost, and said so."""
        record = self.book.get(group.key)
        if record is None or group.state is State.PENDING:
            return record
        for member in record.living:
            if not member.has_tasks or (record.home(member).part != group.part and not group.part):
                continue
            try:
                record, moved = self._sweep(record, member)
            except ResctrlError as error:
                # It may have ended by now, and was never in the group.
                record, outside = self._as_noted(record, member)
                late = replace(outside, late=True, joining=False, reason=str(error))
                record = self.book.put(record.with_member(late).with_late(late, _was_outside(member)))
                continue
            if record.home(member).part == group.part or moved.moved:
                late = replace(member, late=True, joining=False, left=moved.outside, reason="")
                late = replace(late, take_over=False, allow_class_change=False, tree=False)
                joined = record.with_member(late).with_late(late, _was_outside(member))
                record = self.book.put(replace(joined, state=State.ACTIVE))
        return record

    def _as_noted(self, record: Record, member: Member) -> tuple[Record, Member]:
        """Both as they stand after a sweep that failed: it may have noted that they are late, or in another class."""
        record = self.book.get(record.key) or record
        return record, record.member(member.id) or member

    def rejoin(self, record: Record) -> None:
        """See to it that every living member is in its group: a kill may have come before its tasks were moved."""
        if record.part:
            return  # done for all groups with the first one
        record = self.life.follow(record)
        for member in record.living:
            try:
                # What is moved now ran outside: the daemon was killed before it moved it, or it joined since.
                record, _ = self._sweep(record, member)
                record = replace(record, state=State.ACTIVE)
            except ResctrlError:
                record, _ = self._as_noted(record, member)
            joined = record.member(member.id) or member
            # Killed as it joined: nobody was answered, and nobody knows when its caller let it go.
            joined = replace(joined, joining=False, late=joined.late or member.joining)
            record = record.with_member(joined)
            why = f"resctrlmond was killed while {member.id} was put into the group"
            record = self.book.put(record.with_late(joined, why) if member.joining else record)

    def where(self, member: Member) -> Membership | None:
        """Where the member's first task is now; None if it has none."""
        for tid in [member.pid] if member.pid else cgroups.tasks(member.cgroup) if member.cgroup else []:
            try:
                return self.tree.membership(tid)
            except NoSuchProcess:
                continue
        return None

    def _sweep(self, record: Record, member: Member) -> tuple[Record, Moved]:
        if not record.home(member).state.has_group or not member.has_tasks:
            return record, Moved(0, 0)
        if member.cgroup:
            return self.spread(record, member, lambda ref, how: move_cgroup(self.tree, member.cgroup, ref, how), True)
        move = move_tree if member.tree else move_process
        with Process.open(member.pid, member.start_time) as process:
            return self.spread(record, member, lambda ref, how: move(self.tree, process, ref, how), True)

    def spread(self, record: Record, member: Member, move: Move, late: bool = False) -> tuple[Record, Moved]:
        """Move the member's tasks into its group, and those that are in other classes into groups there.

        ``late`` says that they ran when the group's baseline was read; what is found in other classes did. A workload
        that is in another class as a whole takes its group along. A group that has to wait for an RMID leaves its
        tasks ``astray``. Raises what moving and making raise.
        """
        if member.allow_class_change:
            return self._into(record, record.home(member), member, move, late)
        record, moved = self._into(record, record.home(member), member, move, late)
        for class_ in sorted(moved.astray):
            try:
                record, group = self._group_in(record, class_, moved)
            except ResctrlError:
                if late:
                    why = f"tasks of {member.id} in class {class_ or '/'} are in no group"
                    self.book.put(record.with_late(member, why))
                raise
            if group.state.has_group:
                record, more = self._into(record, group, member, move, late=True)
                moved = _together(more, moved)
        return record, moved

    def _into(self, record: Record, group: Record, member: Member, move: Move, late: bool) -> tuple[Record, Moved]:
        def say_so() -> None:
            # They ran outside until now, for as long as nobody looked: no total of this group is exact any more. On
            # disk before the first of them counts, so that no kill in between makes it exact.
            nonlocal record
            record = record.with_member(replace(member, late=True))
            record = self.book.put(record.with_late(replace(member, part=group.part), _was_outside(member)))

        past: dict[int, tuple[int, Membership]] = {}
        how = How(
            take_over=member.take_over,
            may_take=self.take_over.marker(record.key),
            through_class=member.allow_class_change,
            among=None if member.allow_class_change else [standing.ref for standing in record.standing],
            first=say_so if late else None,
            past=past if late else None,
        )
        moved = move(group.ref, how)
        for _, before in past.values():
            self.found_outside(before)
        return record, moved

    def _group_in(self, record: Record, class_: str, moved: Moved) -> tuple[Record, Record]:
        """The workload's group in that class, where some of its tasks are: its only one, if nobody is left in it."""
        group = next((group for group in record.groups if group.class_ == class_), None)
        if group is not None and group.state is not State.FAILED:
            return record, group
        if len(record.groups) == 1 and len(moved.astray) == 1 and not self.tree.tasks(record.ref):
            try:
                record = self.life.relocate(record, class_)
            except ResctrlError as error:
                log.info("%s: its group cannot follow to class %s: %s", record.key, class_ or "/", error)
            else:
                log.info("%s: somebody moved it to class %s, and its group followed", record.key, class_ or "/")
                return record, record
        group = self.making.further(record, class_)
        return record.with_group(group), group


def why_outside(record: Record, moved: Moved) -> str:
    """Why tasks in other classes are still outside: the groups there wait for an RMID. "" if none does."""
    reasons = [
        group.reason for group in record.groups if group.state is State.PENDING and group.class_ in moved.astray
    ]
    return "; ".join(dict.fromkeys(reasons))


def _together(last: Moved, before: Moved) -> Moved:
    """The outcome of two moves of the same tasks: what the last one saw, and the work of both."""
    return Moved(before.moved + last.moved, before.passes + last.passes, last.elsewhere, last.left, last.astray)


def _was_outside(member: Member) -> str:
    return f"tasks of {member.id} ran outside until they were put into the group"
