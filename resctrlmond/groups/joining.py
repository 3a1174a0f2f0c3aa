# SPDX-License-Identifier: Apache-2.0
"""How a workload gets its groups and its members: the steps of Create and Assign, undone where the call fails."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping

from resctrlmond.groups.accounting import worst
from resctrlmond.groups.keys import merged_attributes
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.making import Making, check_has_rmid
from resctrlmond.groups.outcomes import Assigned
from resctrlmond.groups.record import MAX_LATE_REASONS, EndRule, Member, Record, State
from resctrlmond.groups.resuming import Resuming
from resctrlmond.groups.sweeping import Sweeping, why_outside
from resctrlmond.groups.target import FOLLOW, Assignment, Target, check_free
from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl.errors import ClassMismatch, NoSuchGroup, NoSuchProcess, undoing
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tasks import How, Moved, put_back
from resctrlmond.resctrl.tree import GroupRef


class Joining:
    """Makes groups for workloads and takes members in. Whoever calls holds the key."""

    def __init__(self, life: Lifecycle, making: Making, sweeping: Sweeping, resuming: Resuming) -> None:
        self.life = life
        self.book = life.book
        self.tree = life.tree
        self.making = making
        self.sweeping = sweeping
        self.resuming = resuming

    def create(
        self,
        key: str,
        class_: str,
        *,
        owner: str,
        ends: EndRule | None,
        attributes: Mapping[str, str],
        may_wait: bool,
        priority: int | None,
    ) -> Record:
        """A group without a task yet, or the one that stands; see Manager.create, which checked the words."""
        record = self.living(key)
        if record is None:
            ended = self.book.get(key)
            record = self.making.new(key, "" if class_ == FOLLOW else class_, ended, class_ == FOLLOW)
            return self.making.make(claimed(record, owner, ends, attributes, priority), ended, may_wait)
        if not may_wait:
            check_has_rmid(record)
        self.book.checked(claimed(record, owner, ends, attributes, priority))
        if class_ != FOLLOW and all(class_ != group.class_ for group in record.groups):
            record = self._in_class(record, class_)
        return self.book.put(claimed(record, owner, ends, attributes, priority))

    def assign(self, key: str, moving: Target, where: Membership | None, assignment: Assignment) -> Assigned:
        """Take the target, which is at ``where``, in as a member; see Manager.assign, which checked the words."""
        before = self.living(key)
        check_free(before, where, assignment)
        if assignment.late is False and self._in_no_group(before, moving.children()):
            assignment = dataclasses.replace(assignment, late=True)  # no process has a child before it runs
        fresh = moving.member(assignment)
        member = _as_noted(before, fresh)
        is_noted = member is not fresh
        if before is not None and member.allow_class_change and assignment.class_ == FOLLOW:
            # It waits to be moved to that class: where it still is says nothing.
            class_ = before.home(member).class_
            assignment = dataclasses.replace(assignment, class_=class_, allow_class_change=True)
        member = replace(member, take_over=assignment.take_over, allow_class_change=assignment.allow_class_change)
        member = replace(member, tree=assignment.tree)
        ended = self.book.get(key) if before is None else None
        if before is None:
            record = self.making.new(key, assignment.class_for(where), ended)
            # With its member from the first word on: a claim without one would never end by itself.
            coming = replace(member, joining=True)
            record = self.making.make(
                _joined(record, coming, assignment),
                ended,
                assignment.may_wait,
                use_reserve=assignment.is_from_runtime,
            )
        else:
            record = before
        past: dict[int, tuple[int, Membership]] = {}
        try:
            if before is not None:
                if not assignment.may_wait:
                    check_has_rmid(before)
                record, member = self._in_place(before, member, where, assignment)
            # On disk before the member's first task is moved.
            waits = record.home(member).state is State.PENDING
            outside = self._in_no_group(record, moving.tasks()) if waits else frozenset()
            noted = replace(member, joining=not waits, left=len(outside))
            if not is_noted:
                record = self.sweeping.joiners.forget_member(record, member.id)
            record = self.sweeping.joiners.begin(_joined(record, noted, assignment), noted)
            record = self.book.put(self.book.checked(record, use_reserve=assignment.is_from_runtime))
            if waits:
                return Assigned(record, Moved(0, 0, left=outside))
            record, moved = self._move(record, member, moving, assignment, past)
            # As it stands: what was found in another class made it late.
            joined = record.member(member.id) or member
            member = replace(joined, left=moved.outside, reason=why_outside(record, moved))
            member = replace(member, joining=False, take_over=False, allow_class_change=False, tree=False)
            member, why = self._judged(record, member, moving, assignment, moved.moved if is_noted else None)
            record = record.with_member(member)
            if member.late or member.left or why:
                record = record.with_late(member, why)
            return Assigned(self.book.put(replace(record, state=State.ACTIVE)), moved, member.descendants)
        except Exception:
            # A group that stands on keeps none of those that are no member of it.
            put_back(self.tree, past)
            with undoing(key):
                self._undo(record, before, ended, member.id if is_noted and past else "")
            raise

    def _move(
        self,
        record: Record,
        member: Member,
        moving: Target,
        assignment: Assignment,
        past: dict[int, tuple[int, Membership]],
    ) -> tuple[Record, Moved]:
        def move(ref: GroupRef, how: How) -> Moved:
            may_take = self.sweeping.take_over.marker(record.key)
            return moving.move(ref, dataclasses.replace(how, past=past, may_take=may_take))

        if assignment.class_ == FOLLOW:
            return self.sweeping.spread(record, member, move)
        # All of it into the class that was named, or nothing; also what is in the workload's group of another class.
        how = How(take_over=member.take_over, own=_places(record), through_class=member.allow_class_change)
        return record, move(record.home(member).ref, how)

    def _judged(
        self, record: Record, member: Member, moving: Target, assignment: Assignment, moved_again: int | None
    ) -> tuple[Member, str]:
        """The member, whose tasks have been moved, as late if a task of it may have run outside; and why it is.

        ``moved_again`` is how many tasks were moved of a member that was in the workload already, else None. All is
        looked at after the last move: what has happened outside by then has happened.
        """
        late = assignment.late if assignment.cgroup is None else None
        if late is not False:
            outside = self._in_no_group(record, moving.descendants())
            member = replace(member, descendants=len(outside))
        if moved_again is not None:
            if late:
                return replace(member, late=True), _ran_before(member)
            if not moved_again:
                return member, ""
            return replace(member, late=True), _outside_until_again(member)
        # The caller holds the process until it is answered, or gives up. If it still waits now, after the last move,
        # the process was held all that time: whatever becomes of the answer, it runs in its group only.
        is_given_up = late is False and not assignment.is_awaited()
        used_ns = moving.cpu_time_ns() if member.late or is_given_up or late is None else None
        if not member.late and not is_given_up and used_ns is None:
            return member, _hides_joiners(member)
        member = replace(member, late=True, ran_before_ns=used_ns or 0)
        return member, _GIVEN_UP.format(member.id) if is_given_up else _ran_before(member)

    def _in_no_group(self, record: Record | None, tids: Iterable[int]) -> frozenset[int]:
        """Those of the threads that are in none of the workload's groups."""
        homes = _places(record) if record else frozenset()
        outside = set()
        for tid in tids:
            with contextlib.suppress(NoSuchProcess):
                if self.tree.membership(tid) not in homes:
                    outside.add(tid)
        return frozenset(outside)

    def living(self, key: str) -> Record | None:
        """The record of a run that goes on; one that has ended without our seeing it is closed first."""
        record = self.book.get(key)
        if record is not None and record.state is State.ENDING:
            record = self.life.finish(record, record.reason)
        if record is not None and record.state.has_group:
            try:
                record = self.life.follow(record)
            except NoSuchGroup as error:
                record = self.life.lose(record, error.message)
        if record is not None and record.is_interrupted:
            record = self.resuming.resume(record)
        return None if record is None or record.state.is_over else record

    def known_living(self, key: str) -> Record:
        """The record of a run that goes on. Raises NoSuchGroup."""
        record = self.living(key) or self.book.known(key)
        if record.state.is_over:
            raise NoSuchGroup(f"the workload {key} has ended ({record.state})")
        return record

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
            group = self.making.further(self.book.put(record), wanted, assignment.may_wait)
        reason = group.reason if group.state is State.PENDING else ""
        return record.with_group(group), replace(member, part=group.part, reason=reason)

    def _in_class(self, record: Record, class_: str) -> Record:
        if record.class_ == class_:
            return record
        if any(member.has_tasks for member in record.living):
            raise ClassMismatch(
                f"the group of {record.key} is in class {record.class_ or '/'}, not in {class_ or '/'}",
                path=self.tree.full_path(record.ref),
                remedy="Use Move (resctrlctl move) to move the whole group to another class",
            )
        return self.life.relocate(replace(record, follows=False), class_)

    def _undo(self, record: Record, before: Record | None, ended: Record | None, again: str) -> None:
        """Undo a failed Assign.

        ``again`` is the member's id if the member was in the workload before and tasks of it were moved, else "":
        what these did outside until then cannot be undone.
        """
        if before is None:
            for group in (self.book.get(record.key) or record).further:
                self.life.discard(group, None)
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
        restored = replace(before, **of_the_group, state=state)
        member = restored.member(again) if again else None
        if member is not None:
            restored = _with_quality_of(stands, restored, {group.part: group.nonce for group in before.groups})
            late = replace(member, late=True)
            restored = restored.with_member(late).with_late(late, _outside_until_again(late))
        self.book.put(restored)


_GIVEN_UP = "{}: its caller did not wait for the reply, so it may have run before it was in the group"

# Kinds of members that processes may join from outside; what a process starts is in its group.
_CONTAINERS = frozenset({"container", "sandbox"})
# What a record says of the directory rather than of the workload.
_OF_THE_GROUP = ("class_", "nonce", "boot_id", "created_at", "created_ns", "in_limbo", "reason", "inodes")


def _places(record: Record) -> frozenset[Membership]:
    """The groups of the workload, as a task's membership names them."""
    return frozenset(Membership(group.ref.class_, group.ref.name) for group in record.standing)


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


def _hides_joiners(member: Member) -> str:
    """Why the baseline of a container is late if what joins the container cannot be seen; "" if that can be seen.

    A process that joins a container from outside (podman exec) is not a child of its init, and is found by the
    control group. To find it by namespace, every process of the host would have to be asked, over and over.
    """
    if member.cgroup or member.kind not in _CONTAINERS:
        return ""
    return f"{member.id} has no control group of its own, so processes that join it from outside are not detected"


def _outside_until_again(member: Member) -> str:
    return f"tasks of {member.id} were outside the group until it was assigned again"


def _with_quality_of(stands: Record, restored: Record, nonces: Mapping[str, int]) -> Record:
    """The restored record, no group of which has a better baseline than on disk.

    ``nonces`` are those that its groups had, by their part: a group that was made anew has a baseline of its own.
    """
    for group in stands.groups:
        old = next((old for old in restored.groups if old.part == group.part), None)
        if old is None or nonces.get(group.part) != group.nonce:
            continue
        reasons = tuple(dict.fromkeys((*old.late_reasons, *group.late_reasons)))[:MAX_LATE_REASONS]
        baseline = worst(old.baseline, group.baseline)
        restored = restored.with_group(replace(old, baseline=baseline, late_reasons=reasons))
    return restored


def _ran_before(member: Member) -> str:
    """Why the member is late, in a sentence for those who read its totals."""
    used = f" and had used up to {member.ran_before_ns / 1e9:.3f} s of CPU time" if member.ran_before_ns else ""
    text = f"{member.id} ran{used} before it was put into the group"
    if not member.descendants:
        return text
    stayed = "1 descendant" if member.descendants == 1 else f"{member.descendants} descendants"
    return f"{text}; {stayed} stayed outside"


def _joined(record: Record, member: Member, assignment: Assignment) -> Record:
    """The record with its new member, and the claim that comes with it."""
    record = claimed(
        record.with_member(member),
        assignment.owner,
        assignment.ends,
        assignment.attributes,
        assignment.priority,
        fitting=assignment.is_from_runtime,
    )
    record = replace(record, pod_cgroup=assignment.pod_cgroup or record.pod_cgroup)
    return record.with_late(member) if member.late else record


def claimed(
    record: Record,
    owner: str,
    ends: EndRule | None = None,
    attributes: Mapping[str, str] | None = None,
    priority: int | None = None,
    *,
    fitting: bool = False,
) -> Record:
    """The record with ``owner``'s claim, and what came with it: attributes are added, a priority is taken over.

    An attribute that another owner set stays as it is while that owner claims the workload. ``fitting``: leave out
    attributes that would exceed a limit. Otherwise that raises InvalidAttributes.
    """
    record = record.with_claim(owner, utc_now(), ends)
    if priority is not None:
        further = tuple(replace(group, priority=priority) for group in record.further)
        record = replace(record, priority=priority, further=further)
    others = {name for name, by in record.attribute_owners.items() if by != owner and record.claimed_by(by)}
    new = {name: value for name, value in (attributes or {}).items() if name not in others}
    merged = merged_attributes(record.attributes, new, fitting=fitting)
    owners = {**record.attribute_owners, **{name: owner for name in new if name in merged}}
    return replace(record, attributes=merged, attribute_owners=owners)
