# SPDX-License-Identifier: Apache-2.0
"""Mark groups whose tasks or CPUs another program changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.lifecycle import Lifecycle
from resctrlmond.groups.record import Member, Record, State
from resctrlmond.groups.sweeping import Sweeping
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchGroup, NoSuchProcess, NotMounted, ResctrlError
from resctrlmond.resctrl.foreign_writes import ForeignWrites, Written, boot_ticks
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import TICKS_PER_S
from resctrlmond.resctrl.tree import GroupRef

log = logging.getLogger(__name__)

# A look at all workloads is followed by a pause of so many times its length: writes of other programs, however many,
# cost this part of one processor at most.
_PAUSES = 20
_SHORTEST_PAUSE_S = 0.05
# A thread that is forked while the tasks of a group are listed started before, and may be missing in the list.
_FORK_TICKS = TICKS_PER_S
# How soon workloads that a call has locked are looked at again.
_AGAIN_S = 0.1

_TAKEN = "another program moved tasks out of the group, and what they use outside is not counted"
_WRITTEN = "another program wrote to {} of the group, and the use of other tasks may be counted"
_STRANGER = "another program moved tasks into the group, and their use is counted"
_CPUS = "another program gave the group CPUs ({}), and the use of other tasks there is counted"


@dataclass(slots=True)
class _Look:
    """The threads in the groups of one run at a time (clock ticks since boot)."""

    generation: int
    at: int
    threads: dict[int, _Thread] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Thread:
    """Its process, its start time (clock ticks since boot), and the part of the group that it was in."""

    pid: int
    start_time: int
    part: str


class Interference:
    """Marks groups for what other programs write to resctrl.

    A write to a file of a group of ours marks the group. Each write to a tasks file leads to a look at all workloads,
    because a task may have left its group. What no event shows, for example without inotify, is looked for with each
    sweep. ``wake`` is called when events were read that ask for a ``react``.
    """

    def __init__(self, life: Lifecycle, sweeping: Sweeping) -> None:
        self.life = life
        self.book = life.book
        self.tree = life.tree
        self.sweeping = sweeping
        self.wake: Callable[[], None] = lambda: None
        self._foreign: ForeignWrites | None = None
        self._guard = threading.Lock()
        self._reacting = threading.Lock()
        # What other programs wrote to groups of ours, by workload and nonce, until the record says it.
        self._hits: dict[str, dict[int, set[str]]] = {}
        # The workloads to look at because of a write, and whether events were missed.
        self._suspects: dict[str, bool] = {}
        self._not_before = 0.0
        self._trouble = ""
        self._looks: dict[str, _Look] = {}

    @property
    def fd(self) -> int:
        """The descriptor that is readable after a write; -1 if there is none."""
        return self._foreign.fd if self._foreign is not None else -1

    def start(self) -> None:
        """Watch the tree from now on."""
        self._foreign = ForeignWrites(self.tree.path, self.tree.own_writes)
        self._look_around()
        self.life.created = self._created
        self.life.before_end = self._before_end
        self.life.after_last_reading = self._after_last_reading

    def close(self) -> None:
        """Stop watching the tree."""
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None

    def react(self, guard: Callable[[str], AbstractContextManager[None]]) -> float:
        """Mark what was written to groups of ours, and look at all workloads if something was written elsewhere.

        Returns after how many seconds it is to be called again; 0 if only after the next write.
        """
        if self._foreign is None:
            return 0
        if not self._reacting.acquire(blocking=False):
            return _AGAIN_S
        try:
            self._look_around()
            self._collect()
            is_busy = False
            for key in list(self._hits):
                with guard(key), self.book.writing_if_free(key) as is_free:
                    is_busy |= not is_free
                    record = self.book.get(key) if is_free else None
                    # One that ends is marked by its end.
                    if record is not None and record.state in (State.PENDING, State.ACTIVE, State.IDLE):
                        self._marked(record)
            if self._suspects and time.monotonic() >= self._not_before:
                begun = time.monotonic()
                for key, is_thorough in sorted(self._suspects.copy().items()):
                    with guard(key), self.book.writing_if_free(key) as is_free:
                        if is_free:
                            self._suspects.pop(key, None)
                            self.sweeping.sweep(key)
                            self.inspect(key, is_thorough=is_thorough)
                now = time.monotonic()
                self._not_before = now + max(_SHORTEST_PAUSE_S, _PAUSES * (now - begun))
            if self._suspects:
                return max(_AGAIN_S, self._not_before - time.monotonic())
            return _AGAIN_S if is_busy else 0
        finally:
            self._reacting.release()

    def inspect(self, key: str, *, is_thorough: bool = False) -> None:
        """Look at the workload's groups, as far as no event shows what happens to them. Takes the key.

        ``is_thorough``: nothing was watched until now.
        """
        with self.book.writing(key):
            record = self.book.get(key)
            if record is None or record.state not in (State.ACTIVE, State.IDLE):
                return
            is_thorough |= self._has_trouble
            if not is_thorough and not self._has_uncontrolled(record):
                return
            try:
                record = self.life.follow(record)
                for group in record.standing if is_thorough else ():
                    record = self._with_cpus(record, group)
                record = self._looked_at(record)
            except (NoSuchGroup, NotMounted):
                return  # its loss is about to be recorded
            self.book.put(record)

    def forget(self, key: str) -> None:
        """Drop what is known of a workload that is over."""
        self._looks.pop(key, None)
        self._suspects.pop(key, None)
        with self._guard:
            self._hits.pop(key, None)

    # -- called by the lifecycle of a group, with the key held

    def _created(self, ref: GroupRef) -> None:
        if self._foreign is not None:
            self._foreign.watch(ref.path)

    def _before_end(self, record: Record) -> Record:
        """The record after a last look at the tasks of its groups, if another program may have moved one."""
        if self._collect():
            self.wake()
        if record.key not in self._suspects and not self._has_trouble:
            return record
        try:
            return self.book.put(self._looked_at(record))
        except (NoSuchGroup, NotMounted):
            return record  # its loss is about to be recorded

    def _after_last_reading(self, group: Record) -> Record:
        """The record of one group after all writes to it."""
        if self._collect():
            self.wake()
        whole = self.book.get(group.key)
        if whole is None:
            return group
        marked = self._marked(whole.with_group(group))
        group = next((other for other in marked.groups if other.part == group.part), group)
        try:
            with_cpus = self._with_cpus(marked, group)
        except ResctrlError:
            with_cpus = marked
        self.book.put(with_cpus)
        return next((other for other in with_cpus.groups if other.part == group.part), group)

    # -- what was written

    def _look_around(self) -> None:
        if self._foreign is None:
            return
        self._foreign.look_around(self.tree.mounting())
        if self._foreign.trouble != self._trouble:
            self._trouble = self._foreign.trouble
            if self._trouble:
                text = "what other programs write to resctrl is found up to 5 s late, or not at all: %s"
                log.warning(text, self._trouble)

    def _collect(self) -> bool:
        """Read the events, and keep what they ask for. Returns whether there was anything."""
        written = self._foreign.take() if self._foreign is not None else Written()
        if not written:
            return False
        for directory, what in _files(written):
            if (owner := self._owner(directory)) is not None:
                with self._guard:
                    self._hits.setdefault(owner.key, {}).setdefault(owner.nonce, set()).add(what)
        if written.tasks or written.is_incomplete:
            # A task that joined one group has left another.
            for record in self.book.all():
                if record.standing:
                    self._suspects[record.key] = written.is_incomplete or self._suspects.get(record.key, False)
        return True

    def _owner(self, directory: str) -> Record | None:
        """The group of ours whose directory that is."""
        class_, _, name = directory.rpartition("mon_groups/")
        if not name:
            return None
        ref = GroupRef(class_.rstrip("/"), name)
        groups = [group for record in self.book.all() for group in record.groups if not group.state.is_over]
        owner = next((group for group in groups if group.ref == ref), None)
        if owner is not None:
            return owner
        # Somebody may have renamed it just now.
        try:
            found = self.tree.find(ref)
        except ResctrlError:
            return None
        if found is None or found.gid != self.life.mark.gid:
            return None
        return next((group for group in groups if group.nonce == found.nonce), None)

    def _marked(self, record: Record) -> Record:
        """The record with a mark for each write to a group of it; written down."""
        with self._guard:
            hits = self._hits.pop(record.key, {})
        try:
            marked = record
            for group in record.groups:
                for what in sorted(hits.get(group.nonce, ())):
                    marked = self._worse(marked, group, Quality.ESTIMATED, _WRITTEN.format(what))
            return self.book.put(marked) if marked is not record else record
        except Exception:
            with self._guard:
                self._hits[record.key] = hits
            raise

    def _worse(self, record: Record, group: Record, quality: Quality, why: str) -> Record:
        group = next(other for other in record.groups if other.part == group.part)
        worse = record.made_worse(group, quality, why)
        if worse != record:
            log.warning("%s: %s", record.key, why)
        return worse

    # -- what is found without events

    def _has_uncontrolled(self, record: Record) -> bool:
        """Whether tasks of it may be in no control group of a member: only a group's list of tasks has them all."""
        return any(member.pid and not member.cgroup for member in record.members)

    @property
    def _has_trouble(self) -> bool:
        return self._foreign is None or bool(self._foreign.trouble)

    def _with_cpus(self, record: Record, group: Record) -> Record:
        cpus = self.tree.cpus(group.ref)
        return self._worse(record, group, Quality.ESTIMATED, _CPUS.format(cpus)) if cpus else record

    def _looked_at(self, record: Record) -> Record:
        """The record after a look at the tasks of its groups. Raises NoSuchGroup, NotMounted."""
        before = self._looks.get(record.key)
        if before is not None and before.generation != record.generation:
            before = None
        now = _Look(record.generation, boot_ticks())
        for group in record.standing:
            for tid in self.tree.tasks(group.ref):
                thread = before.threads.get(tid) if before is not None else None
                if thread is None:
                    found = processes.stat(tid)
                    if found is None:
                        continue
                    thread = _Thread(processes.leader(tid), found.start_time, group.part)
                    if self._is_stranger(record, group, tid, thread, before):
                        record = self._worse(record, group, Quality.ESTIMATED, _STRANGER)
                now.threads[tid] = replace(thread, part=group.part) if thread.part != group.part else thread
        for part in self._parts_left(record, before, now):
            group = next((group for group in record.groups if group.part == part), record)
            record = self._worse(record, group, Quality.LATE, _TAKEN)
        self._looks[record.key] = now
        return record

    def _is_stranger(self, record: Record, group: Record, tid: int, thread: _Thread, before: _Look | None) -> bool:
        """Whether a thread that is in the group now ran outside before, and the daemon did not move it."""
        start = thread.start_time
        if self.tree.own_writes.moved_since(tid, start):
            return False
        if before is not None:
            return start < before.at - _FORK_TICKS
        # After a restart nobody knows which threads the daemon moved: only those of members.
        if group.baseline is not Quality.EXACT or start >= group.created_ns * TICKS_PER_S // 10**9 - _FORK_TICKS:
            return False
        return all(
            member.pid != thread.pid and not (member.cgroup and cgroups.member_test(member.cgroup)(tid))
            for member in record.members
        )

    def _parts_left(self, record: Record, before: _Look | None, now: _Look) -> set[str]:
        """The parts of the groups that a task has left: one that was in it, or one that was forked in it."""
        homes = {Membership(group.ref.class_, group.ref.name) for group in record.standing}

        def has_left(tid: int, start: int | None = None) -> bool:
            try:
                where = self.tree.membership(tid)
            except NoSuchProcess:
                return False
            # Of a thread that ends meanwhile nobody can tell where it ran.
            thread = processes.stat(tid)
            is_alive = thread is not None and not thread.is_exiting and start in (None, thread.start_time)
            return where not in homes and is_alive

        left = set()
        for tid, thread in (before.threads if before is not None else {}).items():
            is_ours = before is not None and self.tree.own_writes.moved_since(tid, before.at)
            if tid not in now.threads and not is_ours and has_left(tid, thread.start_time):
                left.add(thread.part)
        # No task of an exact group has run outside, so each process that it has started began in it.
        for group in record.standing:
            if group.baseline is Quality.EXACT and group.part not in left:
                pids = {thread.pid for thread in now.threads.values() if thread.part == group.part}
                pids.update(member.pid for member in record.living if _runs(member) and record.home(member) == group)
                if any(tid not in now.threads and has_left(tid) for tid in _threads_below(pids)):
                    left.add(group.part)
        return left


def _files(written: Written) -> Iterator[tuple[str, str]]:
    for directory in sorted(written.tasks):
        yield directory, "tasks"
    for directory in sorted(written.cpus):
        yield directory, "cpus"


def _runs(member: Member) -> bool:
    first = processes.stat(member.pid) if member.pid else None
    return first is not None and first.start_time == member.start_time


def _threads_below(pids: Iterable[int]) -> Iterator[int]:
    """The threads of these processes and of their descendants."""
    found = dict.fromkeys(pids)
    waiting = list(found)
    for pid in waiting:
        yield from processes.threads(pid)
        children = [child for child in processes.children(pid) or [] if child not in found]
        found.update(dict.fromkeys(children))
        waiting += children
