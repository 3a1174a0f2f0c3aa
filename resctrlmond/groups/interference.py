# SPDX-License-Identifier: Apache-2.0
"""Mark groups whose tasks or CPUs another program changes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.doubts import Doubt, Doubts, Groups
from resctrlmond.groups.lifecycle import Lifecycle
from resctrlmond.groups.record import Member, Record, State
from resctrlmond.groups.sweeping import Sweeping
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.arrivals import Arrival, Arrivals, place_of
from resctrlmond.resctrl.errors import NoSuchGroup, NoSuchProcess, NotMounted, NotRead, ResctrlError
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
# How soon workloads that a call has locked are looked at again, and a tasks file that is still open for writing.
_AGAIN_S = 0.1
_OPEN_S = 0.005
# A call of react is followed by a pause of _PAUSES times the CPU time of its quick part, within these limits: a
# program that writes to schemata all the time costs about 5% of a processor, with the threads that wake each other.
_SHORTEST_REST_S = 0.02
_LONGEST_REST_S = 0.25
# So many lists of directories that are gone do not matter.
_FEW = 100
# The kernel's words for a task that has ended, in info/last_cmd_status.
_REFUSED = re.compile(r"^No task (\d+)$", re.MULTILINE)

_TAKEN = "another program moved tasks out of the group, and what they use outside is not counted"
_WRITTEN = "another program wrote to {} of the group, and the use of other tasks may be counted"
_STRANGER = "another program moved tasks into the group, and their use is counted"
_CPUS = "another program gave the group CPUs ({}), and the use of other tasks there is counted"
_UNSEEN = (
    "another program wrote to {}, and a task that it moved had ended before it could be seen; it may have been one "
    "of this workload"
)
_MISSED = (
    "another program removed {} before resctrlmond could see which tasks were moved there; one of this workload may "
    "have been"
)
_LOST = "another program wrote to resctrl too often for each write to be seen; a task may have been moved"


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
    because a task may have left its group. If the task that was moved has ended, it may have been one of any
    workload, and each is marked. What no event shows, for example without inotify, is looked for with each sweep.
    ``wake`` is called when events were read that ask for a ``react``.
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
        self._hits: dict[str, dict[int, set[tuple[Quality, str]]]] = {}
        # The workloads to look at because of a write, and whether events were missed.
        self._suspects: dict[str, bool] = {}
        self._not_before = 0.0
        self._trouble = ""
        self._looks: dict[str, _Look] = {}
        self._arrivals = Arrivals(self.tree)
        self._doubts = Doubts()
        # Living threads of workloads that were seen outside, by workload, until that is looked at.
        self._movers: dict[str, list[Arrival]] = {}
        self._listing = threading.Lock()
        self._list_not_before = 0.0
        # When events were read last (time.monotonic()).
        self._gathered = time.monotonic()
        self.rest_s = 0.0
        sweeping.found_outside = self._found_outside

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

        Returns after how many seconds it is to be called again; 0 if only after the next write. For ``rest_s`` it
        should not be called.
        """
        if self._foreign is None:
            return 0
        if not self._reacting.acquire(blocking=False):
            return _AGAIN_S
        try:
            begun = time.thread_time()
            self._look_around()
            self._collect()
            rest_s = _PAUSES * (time.thread_time() - begun)
            self.rest_s = min(_LONGEST_REST_S, max(_SHORTEST_REST_S, rest_s))
            is_busy = self._mark_all(guard)
            if self._suspects and time.monotonic() >= self._not_before:
                begun = time.thread_time()
                self._look_at_all(guard)
                self._not_before = time.monotonic() + max(_SHORTEST_PAUSE_S, _PAUSES * (time.thread_time() - begun))
                is_busy = self._mark_all(guard)
            now = time.monotonic()
            again = [_AGAIN_S] if is_busy else []
            if self._suspects:
                again.append(max(_AGAIN_S, self._not_before - now))
            if self._doubts.is_counting:
                again.append(max(_OPEN_S, self._list_not_before - now))
            return min(again, default=0)
        finally:
            self._reacting.release()

    def _mark_all(self, guard: Callable[[str], AbstractContextManager[None]]) -> bool:
        """Mark the workloads that something was written about. Returns whether a call has locked one of them."""
        is_busy = False
        for key in list(self._hits):
            with guard(key), self.book.writing_if_free(key) as is_free:
                is_busy |= not is_free
                record = self.book.get(key) if is_free else None
                # One that ends is marked by its end.
                if record is not None and record.state in (State.PENDING, State.ACTIVE, State.IDLE):
                    self._marked(record)
        return is_busy

    def _look_at_all(self, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        # First those of which a task has been seen outside: it may end.
        suspects = sorted(self._suspects.copy().items(), key=lambda one: (one[0] not in self._movers, one[0]))
        for key, is_thorough in suspects:
            # A task that is moved meanwhile may live for a short time.
            self._collect()
            with guard(key), self.book.writing_if_free(key) as is_free:
                if is_free:
                    self._suspects.pop(key, None)
                    for arrival in self._movers.pop(key, ()):
                        now = processes.stat(arrival.tid)
                        if now is None or now.is_exiting or now.start_time != arrival.start_time:
                            self._hit(key, Quality.LATE, _TAKEN)
                    self.sweeping.sweep(key)
                    self.inspect(key, is_thorough=is_thorough)
                    with self._guard:
                        self._doubts.looked_at(key)
        with self._guard:
            unexplained = self._doubts.unexplained()
        for doubt in unexplained:
            self._hit_groups(doubt.groups, self._why(doubt))

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
        self._movers.pop(key, None)
        with self._guard:
            self._hits.pop(key, None)
            self._doubts.looked_at(key)

    # -- called by the lifecycle of a group, with the key held

    def _created(self, ref: GroupRef) -> None:
        if self._foreign is not None:
            self._foreign.watch(ref.path)
            self._arrivals.begin_empty(ref.path)
            # What was written until now cannot have moved a task of the new group.
            if self._gather():
                self.wake()

    def _before_end(self, record: Record) -> Record:
        """The record after a last look at the tasks of its groups, if another program may have moved one."""
        if self._collect(is_end=True):
            self.wake()
        if self._movers.pop(record.key, None):
            self._hit(record.key, Quality.LATE, _TAKEN)
        if record.key not in self._suspects and not self._has_trouble:
            return record
        try:
            return self.book.put(self._looked_at(record))
        except (NoSuchGroup, NotMounted):
            return record  # its loss is about to be recorded

    def _after_last_reading(self, group: Record) -> Record:
        """The record of one group after all writes to it."""
        if self._collect(is_end=True):
            self.wake()
        whole = self.book.get(group.key)
        if whole is None:
            return group
        with self._guard:
            doubtful = self._doubts.about(group.key, group.nonce)
        for doubt in doubtful:
            self._hit_groups({group.key: frozenset({group.nonce})}, self._why(doubt))
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
        if self._foreign.look_around(self.tree.mounting()):
            self._list_all()
        elif len(self._arrivals) > 2 * self._foreign.watches + _FEW:
            self._arrivals.keep(self._foreign.directories)
        if self._foreign.trouble != self._trouble:
            self._trouble = self._foreign.trouble
            if self._trouble:
                text = "what other programs write to resctrl is found up to 5 s late, or not at all: %s"
                log.warning(text, self._trouble)
            else:
                log.info("what other programs write to resctrl is found at once again")

    def _list_all(self) -> None:
        """List each class and group, to tell later which tasks were moved there."""
        assert self._foreign is not None
        directories = self._foreign.directories
        self._arrivals.keep(directories)
        for directory in directories:
            if self._is_ours(directory):
                # A list costs a walk over all threads of the host, for each of thousands of groups.
                self._arrivals.begin_unread(directory)
                continue
            with contextlib.suppress(ResctrlError):
                self._arrivals.begin(directory)

    def _is_ours(self, directory: str) -> bool:
        place = place_of(directory)
        try:
            found = self.tree.find(GroupRef(place.class_, place.group)) if place.group else None
        except ResctrlError:
            return False
        return found is not None and found.gid == self.life.mark.gid

    def _collect(self, *, is_end: bool = False) -> bool:
        """Read the events, and list the directories that were written to. Returns whether there was anything.

        ``is_end``: a workload ends, and is marked by what is known then.
        """
        is_new = self._gather()
        if self._foreign is None or not self._doubts.is_counting or not self._listing.acquire(blocking=is_end):
            return is_new
        try:
            if is_end or time.monotonic() >= self._list_not_before:
                begun = time.thread_time()
                self._list_written()
                self._list_not_before = time.monotonic() + _PAUSES * (time.thread_time() - begun)
            is_new |= self._gather()
            with self._guard:
                self._doubts.settle(self._foreign.is_being_written)
                for key in self._doubts.waiting:
                    self._suspects.setdefault(key, False)
        finally:
            self._listing.release()
        return is_new

    def _gather(self) -> bool:
        """Read the events, and keep what they ask for. Returns whether there was anything."""
        since, self._gathered = self._gathered, time.monotonic()
        written = self._foreign.take() if self._foreign is not None else Written()
        if not written:
            return False
        for directory, what in _files(written):
            if (owner := self._owner(directory)) is not None:
                self._hit_groups({owner.key: frozenset({owner.nonce})}, _WRITTEN.format(what))
        for directory in sorted(written.created):
            self._arrivals.begin_empty(directory)
            with self._guard:
                # Lists the tasks that were moved there before it was watched.
                self._doubts.written(directory, 0, {}, since)
        for directory in sorted(written.renamed):
            with contextlib.suppress(ResctrlError):
                self._arrivals.begin(directory)
                self._arrivals.begin(place_of(directory).class_)
        writes = self._without_refused(written)
        for directory, number in sorted(writes.items()):
            groups = self._groups_that_may_lose_tasks_to(directory)
            with self._guard:
                self._doubts.written(directory, number, groups, since)
        for directory in sorted(written.missed):
            groups = self._groups_that_may_lose_tasks_to(directory)
            with self._guard:
                self._doubts.missed(directory, groups, since)
        if written.is_lost:
            self._hit_groups(self._groups_that_may_lose_tasks_to(""), _LOST)
            self._list_all()
        if written.tasks or written.missed or written.is_incomplete:
            # A task that joined one group has left another.
            for record in self.book.all():
                if record.standing:
                    self._suspects[record.key] = written.is_incomplete or self._suspects.get(record.key, False)
        return True

    def _without_refused(self, written: Written) -> Counter[str]:
        """The numbers of writes, without one that the kernel refused because its task had ended.

        Such a write raises an event if it opens the file with O_TRUNC, as shells do. The text must be of this write:
        it is the only one, and the daemon has not tried to move that task.
        """
        writes = written.tasks.copy()
        if writes.total() == 1 and all(written.closed[directory] <= 1 for directory in writes):
            refused = _REFUSED.search(self.tree.last_cmd_status())
            own = self.tree.own_writes
            if refused is not None and not own.moved_since(int(refused[1]), boot_ticks() - 10 * TICKS_PER_S):
                writes = Counter(dict.fromkeys(writes, 0))
        return writes

    def _groups_that_may_lose_tasks_to(self, directory: str) -> Groups:
        """The groups of ours with tasks that a write to that directory can move: to a group, only those of its class.

        A workload without a member has not had a task.
        """
        place = place_of(directory)
        return {
            record.key: frozenset(
                group.nonce for group in record.standing if not place.group or group.class_ == place.class_
            )
            for record in self.book.all()
            if record.standing and record.members
        }

    def _list_written(self) -> None:
        """List the directories that were written to, and keep which workloads' tasks came there."""
        with self._guard:
            directories = self._doubts.to_list()
        for directory in directories:
            try:
                arrivals = self._arrivals.look(directory)
            except ResctrlError as error:
                log.debug("%s cannot be listed: %s", directory, error)
                continue
            self._note_movers(arrivals)
            with self._guard:
                self._doubts.arrived(directory, [arrival.tid for arrival in arrivals])

    def _note_movers(self, arrivals: list[Arrival]) -> None:
        records = [record for record in self.book.all() if record.standing] if arrivals else []
        of_cgroup = {member.cgroup: record for record in records for member in record.living if member.cgroup}
        of_process = {
            (member.pid, member.start_time): record for record in records for member in record.living if member.pid
        }
        owners: dict[int, Record | None] = {}
        for arrival in arrivals:
            if arrival.pid not in owners:
                owners[arrival.pid] = _owner_of(arrival.pid, of_cgroup, of_process)
            owner = owners[arrival.pid] or next(
                (record for record in records if self._was_in(record.key, arrival)), None
            )
            if owner is not None and arrival.where not in _homes(owner):
                self._movers.setdefault(owner.key, []).append(arrival)
                self._suspects.setdefault(owner.key, False)

    def _was_in(self, key: str, arrival: Arrival) -> bool:
        """Whether the thread was in a group of the workload when that was looked at last."""
        look = self._looks.get(key)
        thread = look.threads.get(arrival.tid) if look is not None else None
        return thread is not None and thread.start_time == arrival.start_time

    def _found_outside(self, where: Membership) -> None:
        with self._guard:
            self._doubts.left(where)

    def _why(self, doubt: Doubt) -> str:
        path = os.path.join(self.tree.path, doubt.directory)
        return _MISSED.format(path) if doubt.is_gone else _UNSEEN.format(os.path.join(path, "tasks"))

    def _hit(self, key: str, quality: Quality, why: str) -> None:
        """Keep a mark for all groups of a workload."""
        record = self.book.get(key)
        if record is not None:
            self._hit_groups({key: frozenset(group.nonce for group in record.standing)}, why, quality)

    def _hit_groups(self, groups: Groups, why: str, quality: Quality = Quality.ESTIMATED) -> None:
        """Keep a mark for groups, until the record has it."""
        with self._guard:
            for key, nonces in groups.items():
                for nonce in nonces:
                    self._hits.setdefault(key, {}).setdefault(nonce, set()).add((quality, why))

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
                for quality, why in sorted(hits.get(group.nonce, ())):
                    marked = self._worse(marked, group, quality, why)
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
        homes = _homes(record)

        def has_left(tid: int, start: int | None = None) -> bool:
            try:
                where = self.tree.membership(tid)
            except NoSuchProcess:
                return False
            # Of a thread that ends meanwhile nobody can tell where it ran.
            thread = processes.stat(tid)
            is_alive = thread is not None and not thread.is_exiting and start in (None, thread.start_time)
            if where in homes or not is_alive:
                return False
            self._found_outside(where)
            return True

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


def _homes(record: Record) -> set[Membership]:
    return {Membership(group.ref.class_, group.ref.name) for group in record.standing}


def _owner_of(
    pid: int, of_cgroup: Mapping[str, Record], of_process: Mapping[tuple[int, int], Record]
) -> Record | None:
    """The workload of a process: by its control group, or by a member that it descends from."""
    with contextlib.suppress(NoSuchProcess, NotRead):
        path = cgroups.cgroup_of(pid)
        while path.strip("/"):
            if path in of_cgroup:
                return of_cgroup[path]
            path = os.path.dirname(path)
        seen: set[int] = set()
        while pid > 1 and pid not in seen and (found := processes.stat(pid)) is not None:
            if (pid, found.start_time) in of_process:
                return of_process[pid, found.start_time]
            seen.add(pid)
            pid = found.parent
    return None


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
