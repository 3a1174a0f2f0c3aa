# SPDX-License-Identifier: Apache-2.0
"""What happens without a caller: recovery at start, ends that were seen, pending groups retried, snapshots pruned."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.errors import ForeignGroup, InvalidKey
from resctrlmond.groups.keys import canonical_key
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.plan import RECOVERED, Do, Step, claims_over, recover
from resctrlmond.groups.record import Claim, Member, Record, State
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.times import seconds_since, utc_now
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import (
    KernelRefused,
    NoSuchClass,
    NoSuchProcess,
    NotMounted,
    PermissionDenied,
    ResctrlError,
)
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import Moved, move_cgroup, move_process
from resctrlmond.resctrl.tree import Found

log = logging.getLogger(__name__)


class Upkeep:
    """The manager's own initiative. Every step takes the key it works on."""

    def __init__(self, life: Lifecycle, settings: Callable[[], Settings]) -> None:
        self.life = life
        self.book = life.book
        self.settings = settings

    # -- start-up

    def recover(self) -> list[str]:
        """Take up where the last daemon stopped, whatever stopped it. Returns what an operator should know."""
        problems = [str(item) for item in self.book.load()]
        tree = self.life.tree
        plan = recover(self.book.all(), tree.scan(), self.life.mark.gid, self.life.mark.boot_id)
        for step in plan.steps:
            with self.book.writing(step.record.key):
                try:
                    self._take_up(step)
                except (ResctrlError, OSError) as error:
                    problems.append(f"{step.record.key}: {error}")
                    self.book.put(replace(step.record, reason=str(error)))
        problems.extend(self._leftover(found) for found in plan.leftovers)
        for record in self.book.all():
            self.settle(record.key)
        return problems

    def _take_up(self, step: Step) -> None:
        record = step.record
        match step.do:
            case Do.KEEP:
                self._rejoin(record)
            case Do.RELOCATE if step.found is not None:
                self._rejoin(self.life.relocated(record, step.found.ref.class_))
            case Do.RETRY:
                self._adopt(self.life.make(record))
            case Do.BASELINE if step.found is not None:
                record = replace(record, class_=step.found.ref.class_)
                self._adopt(self.life.baseline(record, Quality.EXACT))
            case Do.FINISH:
                self.life.finish(record, record.reason)
            case _:
                self.life.lose(record, "the group was gone when resctrlmond started")

    def _rejoin(self, record: Record) -> None:
        """See to it that every living member is in the group: a kill may have come before its tasks were moved."""
        for member in record.living:
            try:
                moved = self._sweep(record, member)
            except (NoSuchProcess, ResctrlError):
                continue
            if moved.moved:
                late = replace(member, late=True)
                record = self.book.put(replace(record.with_member(late), state=State.ACTIVE))

    def _leftover(self, found: Found) -> str:
        """Our mark without a record: adopted if somebody is in it, else removed."""
        if not self.life.tree.tasks(found.ref):
            self.life.tree.remove(found.ref)
            return f"{found.path}: was ours, of no record and empty: removed"
        try:
            key = canonical_key(found.ref.name.removeprefix(self.settings().group_prefix))
        except InvalidKey as error:
            return f"{found.path}: is ours, of no record, and its name is no key: {error}"
        with self.book.writing(key):
            standing = self.book.get(key)
            if standing is not None and not standing.state.is_over:
                return f"{found.path}: is ours, but the record of {key} speaks of another group: left alone"
            if standing is not None:
                self.life.snapshots.set_aside(key, standing.generation)
            record = Record(
                key=key,
                class_=found.ref.class_,
                group_name=found.ref.name,
                state=State.PENDING,
                generation=standing.generation + 1 if standing else 1,
                nonce=found.nonce,
                boot_id=self.life.mark.boot_id,
                created_at=utc_now(),
                claims=(Claim(RECOVERED, utc_now()),),
            )
            record = self.life.baseline(self.book.put(record), Quality.UNKNOWN)
            self.book.put(replace(record, state=State.ACTIVE, reason="adopted without its record"))
        return f"{found.path}: was ours and of no record: adopted, with an unknown baseline"

    # -- while running

    def tick(self) -> None:
        """Once a second: ends, retries, losses, pruning."""
        settings = self.settings()
        for record in self.book.all():
            try:
                self._tick(record.key, settings)
            except NotMounted:
                self._unmounted(record.key)
            except (ResctrlError, OSError) as error:
                log.error("%s: %s", record.key, error)
        self.life.snapshots.prune(settings.snapshot_ttl_s)

    def _tick(self, key: str, settings: Settings) -> None:
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None:
                return
            if record.state.is_over:
                if seconds_since(record.completed_at) >= settings.snapshot_ttl_s:
                    self.life.snapshots.delete(key)
                    self.book.drop(key)
                return
            if record.state is State.PENDING:
                self._retry(record)
            elif record.state is State.ENDING:
                self.life.finish(record, record.reason)
            elif self.life.tree.find(record.ref) is None:
                self.life.tree.check_mounted()
                self.life.lose(record, "somebody else removed the group")
        self.settle(key)

    def _retry(self, record: Record) -> None:
        try:
            self._adopt(self.life.make(record))
        except (ForeignGroup, NoSuchClass, KernelRefused, PermissionDenied) as error:
            self.life.fail(record, str(error))

    def _unmounted(self, key: str) -> None:
        with self.book.writing(key):
            record = self.book.get(key)
            if record is not None and record.state.has_group:
                self.life.lose(record, "resctrl was unmounted, and every group with it")

    def _adopt(self, record: Record) -> None:
        """Put the members of a group that came late into it; what they used before is lost, and said so."""
        if record.state is State.PENDING:
            return
        for member in record.living:
            try:
                moved = self._sweep(record, member)
            except ResctrlError as error:
                record = self.book.put(record.with_member(replace(member, reason=str(error))))
                continue
            member = replace(member, late=True, left=len(moved.left | moved.elsewhere))
            record = self.book.put(replace(record.with_member(member), state=State.ACTIVE, baseline=Quality.LATE))

    def _sweep(self, record: Record, member: Member) -> Moved:
        tree = self.life.tree
        if member.cgroup:
            return move_cgroup(tree, member.cgroup, record.ref)
        if not member.pid:
            return Moved(0, 0)
        with Process.open(member.pid, member.start_time) as process:
            return move_process(tree, process, record.ref)

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
                group_is_empty=record.claimed_by(RECOVERED) and not self.life.tree.tasks(record.ref),
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
