# SPDX-License-Identifier: Apache-2.0
"""How a workload gets its groups and its members: the steps of Create and Assign, undone where the call fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resctrlmond.groups.keys import is_pod_uid
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.outcomes import Assigned
from resctrlmond.groups.record import ROOT_PART, Claim, Member, Record, State
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.target import FOLLOW, Assignment, Target, check_free
from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl.errors import ClassMismatch, NoSuchGroup, RmidsExhausted
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tasks import Moved


class Joining:
    """Makes groups for workloads and takes members in. Whoever calls holds the key."""

    def __init__(self, life: Lifecycle, settings: Callable[[], Settings]) -> None:
        self.life = life
        self.book = life.book
        self.tree = life.tree
        self.settings = settings

    def create(
        self,
        key: str,
        class_: str,
        *,
        owner: str,
        attributes: Mapping[str, str],
        may_wait: bool,
        priority: int | None,
    ) -> Record:
        """A group without a task yet, or the one that stands; see Manager.create, which checked the words."""
        record = self.living(key)
        if record is None:
            ended = self.book.get(key)
            record = self._new(key, "" if class_ == FOLLOW else class_, ended, class_ == FOLLOW)
            return self._make(claimed(record, owner, attributes, priority), ended, may_wait)
        if not may_wait:
            _check_has_rmid(record)
        if class_ != FOLLOW and all(class_ != group.class_ for group in record.groups):
            record = self._in_class(record, class_)
        return self.book.put(claimed(record, owner, attributes, priority))

    def assign(self, key: str, moving: Target, where: Membership | None, assignment: Assignment) -> Assigned:
        """Take the target, which is at ``where``, in as a member; see Manager.assign, which checked the words."""
        before = self.living(key)
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

    def living(self, key: str) -> Record | None:
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

    def known_living(self, key: str) -> Record:
        """The record of a run that goes on. Raises NoSuchGroup."""
        record = self.living(key) or self.book.known(key)
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
            group_name=key if is_pod_uid(key) else self.settings().group_prefix + key,
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
    record = claimed(record.with_member(member), assignment.owner, assignment.attributes, assignment.priority)
    record = replace(record, pod_cgroup=assignment.pod_cgroup or record.pod_cgroup)
    return record.with_late(member) if member.late else record


def claimed(
    record: Record, owner: str, attributes: Mapping[str, str] | None = None, priority: int | None = None
) -> Record:
    """The record with ``owner``'s claim, and what came with it: attributes are added, a priority is taken over."""
    record = record.with_claim(Claim(owner, utc_now()))
    if priority is not None:
        record = replace(record, priority=priority)
    return replace(record, attributes={**record.attributes, **(attributes or {})})
