# SPDX-License-Identifier: Apache-2.0
"""Ends: which members are over, which claims with them, and with the last claim the workload."""

from __future__ import annotations

import logging
from collections.abc import Callable

from resctrlmond.groups import caveats
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.plan import claims_over
from resctrlmond.groups.record import EndRule, Member, Record, State
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.times import boot_ns, utc_now
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NoSuchProcess, printable
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import GroupRef

log = logging.getLogger(__name__)

_AWAITED = "its control group is empty or gone; tasks that appear at its path are moved into the group"


class Ends:
    """Notes ends, by what can be seen and by the word of who knows. Every step takes the key it works on."""

    def __init__(self, life: Lifecycle, settings: Callable[[], Settings]) -> None:
        self.life = life
        self.book = life.book
        self.settings = settings
        # Of a group that is known by nothing but its tasks, one of them that was seen in it.
        self._occupants: dict[GroupRef, int] = {}

    def settle(self, key: str) -> Record | None:
        """Note which members have ended, end the claims that go with them, and with the last claim the workload."""
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None or (record.state.is_over and not record.is_interrupted):
                return record
            for member in filter(has_ended, record.living):
                record = self._ended(record, member)
            for owner in self._over(record):
                record = self.book.put(record.without_claim(owner))
            if not record.claims and not record.state.is_over:
                return self.life.finish(record, record.reason or "its last member ended")
            return record

    def note_unseen(self, key: str) -> None:
        """Mark the totals of a workload that ended while no daemon ran: its end values are read too late.

        For the start, before anything ends.
        """
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None or not self._ended_unseen(record):
                return
            # A process that a member left behind may run in the group. None can if the end is that of a control
            # group or of a PID namespace.
            others = [member.id for member in record.members if _may_leave_processes(member)]
            for group in record.standing if others else ():
                if not self.life.snapshots.is_complete(group.place):
                    begin = self.life.snapshots.begin_values(group.place)
                    found = caveats.with_unseen_end(group.caveats, begin, others[-1])
                    record = record.with_group(replace(group, caveats=found))
            self.book.put(record)

    def _ended_unseen(self, record: Record) -> bool:
        """Whether the workload's end is over, as far as the members and claims of a record from before the start say.

        A claim that ends by another rule than that of its members counts whatever they do, until somebody ends it.
        """
        if record.state is State.ENDING:
            return True
        with_members = all(claim.ends in (EndRule.MEMBERS, EndRule.CONTAINER) for claim in record.claims)
        if not (record.standing and record.claims and with_members) or record.pod_cgroup:
            return False
        return all(map(has_ended, record.living)) if record.living else bool(self._over(record))

    def _over(self, record: Record) -> list[str]:
        settings = self.settings()
        return claims_over(
            record,
            pod_is_gone=bool(record.pod_cgroup) and not cgroups.is_there(record.pod_cgroup),
            group_is_empty=record.claimed_until(EndRule.TASKS)
            and all(self._is_empty(group.ref) for group in record.standing),
            linger_s=settings.linger_s,
            pod_linger_s=settings.pod_linger_s,
        )

    def _ended(self, record: Record, member: Member) -> Record:
        if member.pid:
            return self.end_member(record, member, "ended")
        # A service has a new control group of the same path after each restart.
        record = self.end_member(record, replace(member, awaited=True, reason=""), _AWAITED)
        if record.claimed_by(member.owner):
            text = (
                "%s: control group %s is empty or gone; tasks that appear at this path are moved into the group, late"
            )
            log.info(text, record.key, printable(member.cgroup))
        return record

    def _is_empty(self, ref: GroupRef) -> bool:
        """Whether no task is in the group. The kernel's list of them, for which it walks every thread of the machine,
        is read only when the task that was seen in it last has left.
        """
        occupant = self._occupants.pop(ref, None)
        if occupant is None or not self._holds(ref, occupant):
            occupant = next(iter(self.life.tree.tasks(ref)), None)
        if occupant is not None:
            self._occupants[ref] = occupant
        return occupant is None

    def _holds(self, ref: GroupRef, tid: int) -> bool:
        try:
            return self.life.tree.membership(tid) == Membership(ref.class_, ref.name)
        except NoSuchProcess:
            return False

    def end_member(self, record: Record, member: Member, reason: str) -> Record:
        """Note a member's end; with the last one an active group is idle."""
        record = record.with_member(replace(member, ended_at=utc_now(), reason=member.reason or reason))
        if not member.awaited:  # what an awaited control group uses from now on is compared with its entry
            others = {name: used for name, used in record.other_cpu_ns.items() if name != member.id}
            record = replace(record, other_cpu_ns=others)
        record = replace(record, idle_ns=boot_ns())
        if record.state is State.ACTIVE and not record.living:
            record = replace(record, state=State.IDLE)
        return self.book.put(record)


def _may_leave_processes(member: Member) -> bool:
    """Whether processes of the member may run on after its end, or it runs itself."""
    if member.lives and not has_ended(member):
        return True
    return bool(member.pid) and not (member.cgroup or member.init)


def has_ended(member: Member) -> bool:
    """Whether nothing of the member runs any more: its first process ended and its control group is empty."""
    if not member.pid and not member.cgroup:
        return False  # a sandbox without a process ends by word only
    return not runs(member) and not (member.cgroup and cgroups.is_populated(member.cgroup))


def runs(member: Member) -> bool:
    """Whether its first process is known, and runs. Raises NotRead."""
    if not member.pid:
        return False
    try:
        with Process.open(member.pid, member.start_time):
            return True
    except NoSuchProcess:
        return False
