# SPDX-License-Identifier: Apache-2.0
"""What happens without a caller: recovery at start, ends that were seen, pending groups retried, snapshots pruned."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.errors import ForeignGroup, InvalidKey
from resctrlmond.groups.keys import canonical_key
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.plan import RECOVERED, Do, Step, claims_over, recover, waiting
from resctrlmond.groups.record import ROOT_PART, Claim, Member, Record, State
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.times import seconds_since, utc_now
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import (
    GroupExists,
    KernelRefused,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    PermissionDenied,
    ResctrlError,
)
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import Moved, move_cgroup, move_process
from resctrlmond.resctrl.tree import Found

log = logging.getLogger(__name__)

# What joins a container from outside (exec sessions) is not a child of its first process: its control group is
# looked through for such tasks this often.
SWEEP_S = 5.0


class Upkeep:
    """The manager's own initiative. Every step takes the key it works on."""

    def __init__(self, life: Lifecycle, settings: Callable[[], Settings]) -> None:
        self.life = life
        self.book = life.book
        self.settings = settings
        self._swept = time.monotonic()
        self._checkpointed: dict[str, float] = {}
        self._complaints: dict[str, str] = {}

    # -- start-up

    def recover(self) -> list[str]:
        """Take up where the last daemon stopped, whatever stopped it. Returns what an operator should know."""
        problems = [str(item) for item in self.book.load()]
        tree = self.life.tree
        plan = recover(self.book.all(), tree.scan(), self.life.mark.gid, self.life.mark.boot_id)
        # What goes wrong with one is no reason not to serve the others: the ticks will try it again.
        for step in plan.steps:
            with self._reported(step.record.key, problems), self.book.writing(step.record.key):
                self._take_up(step)
        self._serve_waiting(lambda key: self._reported(key, problems))
        for found in plan.leftovers:
            with self._reported(found.path, problems):
                problems.extend(self._leftover(found))
        for record in self.book.all():
            with self._reported(record.key, problems):
                if record.state.is_over and not self.life.snapshots.exists(record.key):
                    # Set aside for a run that was never begun.
                    self.life.snapshots.bring_back(record.key, record.generation)
                self.settle(record.key)
        with self._reported(self.life.snapshots.groups, problems):
            self.life.snapshots.sweep()
        return problems

    @contextlib.contextmanager
    def _reported(self, what: str, problems: list[str]) -> Iterator[None]:
        try:
            yield
        except (ResctrlError, OSError) as error:
            problems.append(f"{what}: {error}")

    def _take_up(self, step: Step) -> None:
        record = step.record
        if record.part and self._is_over(record.key):
            return  # its workload turned out to be lost
        match step.do:
            case Do.KEEP:
                self._rejoin(record)
            case Do.RELOCATE if step.found is not None:
                self._rejoin(self.life.relocated(record, step.found.ref.class_))
            case Do.RETRY:
                pass  # in its turn, when all others are seen to
            case Do.BASELINE if step.found is not None:
                record = replace(record, class_=step.found.ref.class_)
                self._adopt(self.life.baseline(record, Quality.EXACT))
            case Do.FINISH:
                self.life.finish(record, record.reason)
            case _:
                whole = self.book.get(record.key) or record
                self.life.lose(whole, "the group was gone when resctrlmond started")

    def _is_over(self, key: str) -> bool:
        record = self.book.get(key)
        return record is None or record.state.is_over

    def _rejoin(self, record: Record) -> None:
        """See to it that every living member is in its group: a kill may have come before its tasks were moved."""
        if record.part:
            return  # done for all groups with the first one
        self.life.check_identities(record)
        for member in record.living:
            try:
                was_outside = self._is_outside(record, member)
                moved = self._sweep(record, member)
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

    def _leftover(self, found: Found) -> Iterator[str]:
        """Our mark without a record: adopted if somebody is in it, else removed."""
        if self.life.tree.find(found.ref) != found:
            return  # a record had its name, and took it up
        if not self.life.tree.tasks(found.ref):
            self.life.tree.remove(found.ref)
            yield f"{found.path}: was ours, of no record and empty: removed"
            return
        try:
            key = canonical_key(found.ref.name.removeprefix(self.settings().group_prefix))
        except InvalidKey as error:
            yield f"{found.path}: is ours, of no record, and its name is no key: {error}"
            return
        with self.book.writing(key):
            standing = self.book.get(key)
            if standing is not None and not standing.state.is_over:
                if standing.claimed_by(RECOVERED) and all(found.ref != group.ref for group in standing.groups):
                    # Its workload was found in another class just now.
                    self._take_over(replace(self._unrecorded(key, found), part=found.ref.class_ or ROOT_PART))
                    yield f"{found.path}: was ours and of no record: adopted, with an unknown baseline"
                    return
                yield f"{found.path}: is ours, but the record of {key} speaks of another group: left alone"
                return
            if standing is not None:
                self.life.snapshots.set_aside(key, standing.generation)
            generation = standing.generation + 1 if standing else 1
            claims = (Claim(RECOVERED, utc_now()),)
            self._take_over(replace(self._unrecorded(key, found), generation=generation, claims=claims))
        yield f"{found.path}: was ours and of no record: adopted, with an unknown baseline"

    def _unrecorded(self, key: str, found: Found) -> Record:
        return Record(
            key=key,
            class_=found.ref.class_,
            group_name=found.ref.name,
            state=State.PENDING,
            nonce=found.nonce,
            boot_id=self.life.mark.boot_id,
            created_at=utc_now(),
        )

    def _take_over(self, record: Record) -> None:
        record = self.life.baseline(self.book.put(record), Quality.UNKNOWN)
        self.book.put(replace(record, state=State.ACTIVE, reason="adopted without its record"))

    # -- while running

    def tick(self) -> None:
        """Once a second: ends, retries, losses, pruning; and the control groups looked through every SWEEP_S."""
        settings = self.settings()
        is_sweep = time.monotonic() - self._swept >= SWEEP_S
        for record in self.book.all():
            with self._logged(record.key):
                try:
                    self._tick(record.key, settings)
                    if is_sweep:
                        self.sweep(record.key)
                except NotMounted:
                    self._unmounted(record.key)
        if is_sweep:
            self._swept = time.monotonic()
        self._serve_waiting(self._logged)
        for key in self.life.snapshots.set_aside_keys():
            with self._logged(key), self.book.writing(key):
                self.life.snapshots.prune(key, settings.snapshot_ttl_s)

    @contextlib.contextmanager
    def _logged(self, key: str) -> Iterator[None]:
        """Go on with the others whatever happens to this one, and say it once, not each second."""
        try:
            yield
        except (ResctrlError, OSError) as error:
            text = str(error)
            if self._complaints.get(key) != text:
                log.error("%s: %s", key, text)
            self._complaints[key] = text
        else:
            self._complaints.pop(key, None)

    def _tick(self, key: str, settings: Settings) -> None:
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None:
                return
            if record.state.is_over:
                if seconds_since(record.completed_at) >= settings.snapshot_ttl_s:
                    self.life.snapshots.delete(key)
                    self.book.drop(key)
                self._checkpointed.pop(key, None)
                return
            if record.state is State.ENDING:
                self.life.finish(record, record.reason)
            elif record.state is not State.PENDING:
                try:
                    self.life.check_identities(record)
                except NoSuchGroup as error:
                    self.life.lose(record, error.message)
            settled = self.settle(key)
            if settled is not None and settled.state in (State.ACTIVE, State.IDLE):
                self._checkpoint(settled, settings.checkpoint_interval_s)

    def _checkpoint(self, record: Record, interval_s: float) -> None:
        now = time.monotonic()
        # The first one as soon as the group is seen: a short life has one too, and so has one before a restart.
        if not interval_s or now - self._checkpointed.get(record.key, -math.inf) < interval_s:
            return
        with contextlib.suppress(NoSuchGroup):  # the next tick notes the loss
            self.life.checkpoint(record)
        self._checkpointed[record.key] = now

    def _serve_waiting(self, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        """Make the groups that wait for an RMID, in their order, until there is none for the next of them."""
        for waiting_group in waiting(self.book.all()):
            with guard(waiting_group.key), self.book.writing(waiting_group.key):
                record = self.book.get(waiting_group.key)
                for group in waiting([record] if record else []):
                    if group.part == waiting_group.part and not self._serve(group):
                        # One that comes free now is for this one, and not for who has waited less.
                        return

    def _serve(self, group: Record) -> bool:
        """Make the group; a reason that no waiting will end makes it fail. False if there is no RMID for it."""
        try:
            made = self.life.make(group)
        except (ForeignGroup, GroupExists, NoSuchClass, KernelRefused, PermissionDenied) as error:
            self.life.fail(group, str(error))
            return True
        self._adopt(made)
        return made.state is not State.PENDING

    def _unmounted(self, key: str) -> None:
        with self.book.writing(key):
            record = self.book.get(key)
            if record is not None and record.state.has_group:
                self.life.lose(record, "resctrl was unmounted, and every group with it")

    def _adopt(self, group: Record) -> None:
        """Put the members of a group that came late into it; what they used before is lost, and said so."""
        record = self.book.get(group.key)
        if record is None or group.state is State.PENDING:
            return
        for member in record.living:
            if record.home(member).part != group.part:
                continue
            try:
                moved = self._sweep(record, member)
            except ResctrlError as error:
                record = self.book.put(record.with_member(replace(member, reason=str(error))))
                continue
            late = replace(member, late=True, left=len(moved.left | moved.elsewhere), reason="")
            joined = record.with_member(late).with_late(late)
            record = self.book.put(replace(joined, state=State.ACTIVE))

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
            moved = self._sweep(record, member)
        except ResctrlError as error:
            return self.book.put(record.with_member(replace(member, reason=str(error))))
        if moved.moved:
            log.info("%s: %d tasks that joined %s were taken in", record.key, moved.moved, member.id)
        return record

    def _sweep(self, record: Record, member: Member) -> Moved:
        tree, home = self.life.tree, record.home(member)
        if not home.state.has_group:
            return Moved(0, 0)
        if member.cgroup:
            return move_cgroup(tree, member.cgroup, home.ref)
        if not member.pid:
            return Moved(0, 0)
        with Process.open(member.pid, member.start_time) as process:
            return move_process(tree, process, home.ref)

    # -- ends

    def settle(self, key: str) -> Record | None:
        """Note which members have ended, end the claims that go with them, and with the last claim the workload."""
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None or record.state.is_over:
                return record
            for member in filter(has_ended, record.living):
                record = self.end_member(record, member, "ended")
            settings = self.settings()
            over = claims_over(
                record,
                pod_is_gone=bool(record.pod_cgroup) and not os.path.isdir(record.pod_cgroup),
                group_is_empty=record.claimed_by(RECOVERED)
                and not any(self.life.tree.tasks(group.ref) for group in record.standing),
                linger_s=settings.linger_s,
                pod_linger_s=settings.pod_linger_s,
            )
            for owner in over:
                record = self.book.put(record.without_claim(owner))
            if not record.claims:
                return self.life.finish(record, record.reason or "its last member ended")
            return record

    def end_member(self, record: Record, member: Member, reason: str) -> Record:
        """Note a member's end; with the last one an active group is idle."""
        record = record.with_member(replace(member, ended_at=utc_now(), reason=member.reason or reason))
        if record.state is State.ACTIVE and not record.living:
            record = replace(record, state=State.IDLE)
        return self.book.put(record)


def has_ended(member: Member) -> bool:
    """Whether nothing of the member runs any more: its first process ended and its control group is empty."""
    if not member.pid and not member.cgroup:
        return False  # a sandbox without a process ends by word only
    if member.pid:
        try:
            with Process.open(member.pid, member.start_time):
                return False
        except NoSuchProcess:
            pass
    return not (member.cgroup and cgroups.is_populated(member.cgroup))
