# SPDX-License-Identifier: Apache-2.0
"""What happens without a caller: recovery at start, ends that were seen, pending groups retried, snapshots pruned."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator

from resctrlmond.groups.accounting import Quality, worst
from resctrlmond.groups.errors import ForeignGroup, InvalidKey
from resctrlmond.groups.keys import canonical_key
from resctrlmond.groups.lifecycle import Lifecycle, replace
from resctrlmond.groups.plan import RECOVERED, Do, Step, claims_over, recover
from resctrlmond.groups.record import Claim, Member, Record, State
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
        match step.do:
            case Do.KEEP:
                self._rejoin(record)
            case Do.RELOCATE if step.found is not None:
                self._rejoin(self.life.relocated(record, step.found.ref.class_))
            case Do.RETRY:
                self.retry(record)
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
                was_outside = self._is_outside(record, member)
                moved = self._sweep(record, member)
            except ResctrlError:
                continue
            record = replace(record, state=State.ACTIVE)
            if was_outside and moved.moved:
                joined = record.with_member(replace(member, late=True))
                record = replace(joined, baseline=worst(record.baseline, Quality.LATE))
            self.book.put(record)

    def _is_outside(self, record: Record, member: Member) -> bool:
        if not member.pid:
            return record.state is State.IDLE
        where = self.life.tree.membership(member.pid)
        return (where.class_, where.group) != (record.class_, record.group_name)

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
                yield f"{found.path}: is ours, but the record of {key} speaks of another group: left alone"
                return
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
        yield f"{found.path}: was ours and of no record: adopted, with an unknown baseline"

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
                return
            if record.state is State.PENDING:
                self.retry(record)
            elif record.state is State.ENDING:
                self.life.finish(record, record.reason)
            else:
                try:
                    self.life.check_identity(record)
                except NoSuchGroup as error:
                    self.life.lose(record, error.message)
        self.settle(key)

    def retry(self, record: Record) -> None:
        """Make the group of a record that waits for it; a reason that no waiting will end makes the run fail."""
        try:
            made = self.life.make(record)
        except (ForeignGroup, GroupExists, NoSuchClass, KernelRefused, PermissionDenied) as error:
            self.life.fail(record, str(error))
        else:
            self._adopt(made)

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
            joined = record.with_member(replace(member, late=True, left=len(moved.left | moved.elsewhere)))
            quality = worst(record.baseline, Quality.LATE)
            record = self.book.put(replace(joined, state=State.ACTIVE, baseline=quality))

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
