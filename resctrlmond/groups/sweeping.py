# SPDX-License-Identifier: Apache-2.0
"""Taking tasks in that were not there from the first: late ones, and those that join a member from outside."""

from __future__ import annotations

import logging

from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.record import Member, Record, State
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import Moved, move_cgroup, move_process

log = logging.getLogger(__name__)


class Sweeping:
    """Puts the tasks of members into their groups. Whoever calls holds the record's key, but for ``sweep``."""

    def __init__(self, life: Lifecycle) -> None:
        self.life = life
        self.book = life.book

    def sweep(self, key: str) -> None:
        """Take in what joined the members' control groups since, from outside."""
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None or record.state is not State.ACTIVE:
                return
            for member in record.living:
                if member.cgroup:
                    record = self._take_in(record, member)

    def _take_in(self, record: Record, member: Member) -> Record:
        try:
            moved = self._move(record, member)
        except ResctrlError as error:
            return self.book.put(record.with_member(replace(member, reason=str(error))))
        if moved.moved:
            log.info("%s: %d tasks that joined %s were taken in", record.key, moved.moved, member.id)
        return record

    def adopt(self, group: Record) -> None:
        """Put the members of a group that came late into it; what they used before is lost, and said so."""
        record = self.book.get(group.key)
        if record is None or group.state is State.PENDING:
            return
        for member in record.living:
            if record.home(member).part != group.part:
                continue
            try:
                moved = self._move(record, member)
            except ResctrlError as error:
                record = self.book.put(record.with_member(replace(member, reason=str(error))))
                continue
            late = replace(member, late=True, left=len(moved.left | moved.elsewhere), reason="")
            joined = record.with_member(late).with_late(late)
            record = self.book.put(replace(joined, state=State.ACTIVE))

    def rejoin(self, record: Record) -> None:
        """See to it that every living member is in its group: a kill may have come before its tasks were moved."""
        if record.part:
            return  # done for all groups with the first one
        self.life.check_identities(record)
        for member in record.living:
            try:
                was_outside = self._is_outside(record, member)
                moved = self._move(record, member)
            except ResctrlError:
                continue
            record = replace(record, state=State.ACTIVE)
            if was_outside and moved.moved:
                late = replace(member, late=True)
                record = record.with_member(late).with_late(late)
            self.book.put(record)

    def _is_outside(self, record: Record, member: Member) -> bool:
        if not member.pid:
            return record.state is State.IDLE
        where = self.life.tree.membership(member.pid)
        ref = record.home(member).ref
        return (where.class_, where.group) != (ref.class_, ref.name)

    def _move(self, record: Record, member: Member) -> Moved:
        tree, home = self.life.tree, record.home(member)
        if not home.state.has_group:
            return Moved(0, 0)
        if member.cgroup:
            return move_cgroup(tree, member.cgroup, home.ref)
        if not member.pid:
            return Moved(0, 0)
        with Process.open(member.pid, member.start_time) as process:
            return move_process(tree, process, home.ref)
