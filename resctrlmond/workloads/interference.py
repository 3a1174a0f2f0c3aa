# SPDX-License-Identifier: Apache-2.0
"""Mark groups whose tasks or CPUs another program changes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.arrivals import Arrival, Arrivals, place_of
from resctrlmond.resctrl.errors import NoSuchGroup, NoSuchProcess, NotMounted, NotRead, ResctrlError
from resctrlmond.resctrl.foreign_writes import ForeignWrites, Written, boot_ticks
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import TICKS_PER_S
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.accounting import Quality
from resctrlmond.workloads.doubts import Doubt, Doubts, Groups
from resctrlmond.workloads.mark import Mark
from resctrlmond.workloads.model import Group, Member, State, Workload
from resctrlmond.workloads.store import Store, Transaction

log = logging.getLogger(__name__)

Guard = Callable[[str], AbstractContextManager[None]]

# A workload in another state is marked by its end.
_MARKED = (State.PENDING, State.ACTIVE, State.IDLE)

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
# How the kernel refuses a write to a tasks file, in info/last_cmd_status (rdtgroup_tasks_write()).
_REFUSED = re.compile(
    r"^(No task|No permission to move task|Can't move task to different control group|Task list parsing error pid"
    r"|Invalid pid|Pseudo-locking in progress)\b",
    re.MULTILINE,
)

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
    """Its process, its start time (clock ticks since boot), and the folder of the group that it was in."""

    pid: int
    start_time: int
    folder: str


class Interference:
    """Marks groups for what other programs write to resctrl.

    A write to a file of a workload's group marks the group. Each write to a tasks file leads to a look at all
    workloads, because a task may have left its group. If the task that was moved has ended, it may have been one of
    any workload, and each is marked. What no event shows, for example without inotify, is looked for with each sweep.
    ``wake`` is called when events were read that ask for a ``react``.
    """

    def __init__(self, tree: Tree, store: Store, mark: Mark) -> None:
        self._tree = tree
        self._store = store
        self._mark = mark
        self.wake: Callable[[], None] = lambda: None
        self._foreign: ForeignWrites | None = None
        self._guard = threading.Lock()
        self._reacting = threading.Lock()
        self._gathering = threading.Lock()
        # The marks for writes of other programs, by workload and nonce, until the workload has them.
        self._hits: dict[str, dict[int, set[tuple[Quality, str]]]] = {}
        # The workloads to look at because of a write, and whether events were missed.
        self._suspects: dict[str, bool] = {}
        self._not_before = 0.0
        self._trouble = ""
        self._looks: dict[str, _Look] = {}
        self._arrivals = Arrivals(self._tree)
        self._doubts = Doubts()
        # Living threads of workloads that were seen outside, by workload, until that is looked at.
        self._movers: dict[str, list[Arrival]] = {}
        self._listing = threading.Lock()
        self._list_not_before = 0.0
        # When events were read last (time.monotonic()).
        self._gathered = time.monotonic()
        self.rest_s = 0.0

    @property
    def fd(self) -> int:
        """The descriptor that is readable after a write; -1 if there is none."""
        return self._foreign.fd if self._foreign is not None else -1

    def start(self) -> None:
        """Watch the tree from now on."""
        self._foreign = ForeignWrites(self._tree.path, self._tree.own_writes)
        self._look_around()

    def close(self) -> None:
        """Stop watching the tree."""
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None

    def react(self, guard: Guard, look: Callable[[Transaction, bool], None]) -> float:
        """Mark what was written to our groups, and ``look`` at all workloads if something was written elsewhere.

        ``guard`` handles the errors of one workload, by its key. ``look`` is called with a transaction, and whether
        nothing was watched until now. Returns after how many seconds it is to be called again; 0 if only after the
        next write. For ``rest_s`` it should not be called.
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
                self._look_at_all(guard, look)
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

    def _mark_all(self, guard: Guard) -> bool:
        """Mark the workloads that something was written about. Returns whether a call has locked one of them."""
        is_busy = False
        for key in list(self._hits):
            with guard(key), self._store.transaction_if_free(key) as txn:
                is_busy |= txn is None
                workload = txn.find() if txn is not None else None
                if txn is not None and workload is not None and workload.state in _MARKED:
                    self._save_marks(txn)
        return is_busy

    def _look_at_all(self, guard: Guard, look: Callable[[Transaction, bool], None]) -> None:
        # First the workloads of which a task has been seen outside: it may end.
        suspects = sorted(self._suspects.copy().items(), key=lambda one: (one[0] not in self._movers, one[0]))
        for key, is_thorough in suspects:
            # A task that is moved meanwhile may live for a short time.
            self._collect()
            with guard(key), self._store.transaction_if_free(key) as txn:
                if txn is not None:
                    self._suspects.pop(key, None)
                    for arrival in self._movers.pop(key, ()):
                        now = processes.stat(arrival.tid)
                        if now is None or now.is_exiting or now.start_time != arrival.start_time:
                            self._hit(key, Quality.LATE, _TAKEN)
                    look(txn, is_thorough)
                    with self._guard:
                        self._doubts.looked_at(key)
        with self._guard:
            unexplained = self._doubts.unexplained()
        for doubt in unexplained:
            self._hit_groups(doubt.groups, self._why(doubt))

    def must_inspect(self, workload: Workload) -> bool:
        """Whether tasks of the workload can leave its groups without an event or another check."""
        # Only a group's list of tasks has the tasks that are in no control group of a member.
        return self._has_trouble or any(member.pid and not member.cgroup for member in workload.members)

    def inspect(self, txn: Transaction, *, is_thorough: bool = False) -> None:
        """Look at the tasks of the workload's groups, and mark the groups whose tasks another program has moved.

        ``is_thorough``: nothing was watched until now, so look at the CPUs of the groups too. Raises NoSuchGroup,
        NotMounted.
        """
        workload = txn.workload
        for group in workload.standing if is_thorough or self._has_trouble else ():
            workload = self._with_cpus(workload, group)
        txn.save(self._looked_at(workload))

    def forget(self, key: str) -> None:
        """Drop what is known of a workload that is over."""
        self._looks.pop(key, None)
        self._suspects.pop(key, None)
        self._movers.pop(key, None)
        with self._guard:
            self._hits.pop(key, None)
            self._doubts.looked_at(key)

    # -- the life of a group

    def watch(self, ref: GroupRef) -> None:
        """Watch a new group."""
        if self._foreign is not None:
            self._foreign.watch(ref.path)
            self._arrivals.begin_empty(ref.path)
            # Earlier writes cannot have moved a task of the new group. A container's start does not wait for this.
            if self._gather(is_blocking=False):
                self.wake()

    def before_end(self, txn: Transaction) -> None:
        """Look at the tasks of the workload's groups a last time, if another program may have moved one."""
        if self._collect(is_end=True):
            self.wake()
        if self._movers.pop(txn.key, None):
            self._hit(txn.key, Quality.LATE, _TAKEN)
        if txn.key in self._suspects or self._has_trouble:
            with contextlib.suppress(NoSuchGroup, NotMounted):  # its loss is about to be recorded
                txn.save(self._looked_at(txn.workload))

    def after_last_reading(self, txn: Transaction, group: Group) -> Group:
        """Return the group with the marks of all writes to it, saved."""
        if self._collect(is_end=True):
            self.wake()
        with self._guard:
            doubtful = self._doubts.about(txn.key, group.nonce)
        for doubt in doubtful:
            self._hit_groups({txn.key: frozenset({group.nonce})}, self._why(doubt))
        txn.save_group(group)
        self._save_marks(txn)
        with contextlib.suppress(NoSuchGroup, NotMounted):  # all is read
            txn.save(self._with_cpus(txn.workload, group))
        return txn.workload.group(group.folder) or group

    def found_outside(self, where: Membership) -> None:
        """Record that a living task of a workload was found outside its groups, and moved back."""
        with self._guard:
            self._doubts.left(where)

    # -- what was written

    def _look_around(self) -> None:
        if self._foreign is None:
            return
        if self._foreign.look_around(self._tree.mounting()):
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
            found = self._tree.find(GroupRef(place.class_, place.group)) if place.group else None
        except ResctrlError:
            return False
        return found is not None and found.gid == self._mark.gid

    def _collect(self, *, is_end: bool = False) -> bool:
        """Read the events, and list the directories that were written to. Returns whether there was anything.

        ``is_end``: a workload ends, and is marked by what is known then.
        """
        is_new = self._gather()
        is_new |= self._find_refused()
        if self._foreign is None or not self._doubts.is_counting or not self._listing.acquire(blocking=is_end):
            return is_new
        try:
            if is_end or time.monotonic() >= self._list_not_before:
                begun = time.thread_time()
                self._list_written(set() if is_end else self._foreign.being_written)
                self._list_not_before = time.monotonic() + _PAUSES * (time.thread_time() - begun)
            is_new |= self._gather()
            # A file that is closed only now may have a refused write that is not found yet.
            being_written = self._foreign.being_written
            is_new |= self._find_refused()
            with self._guard:
                self._doubts.settle(being_written)
                for key in self._doubts.waiting:
                    self._suspects.setdefault(key, False)
        finally:
            self._listing.release()
        return is_new

    def _gather(self, *, is_blocking: bool = True) -> bool:
        """Read the events, and keep what they ask for. Returns whether there was anything.

        Another thread may have read some events and not kept them yet, so it waits for that, if ``is_blocking``.
        """
        if not self._gathering.acquire(blocking=is_blocking):
            return False
        try:
            return self._read_events()
        finally:
            self._gathering.release()

    def _read_events(self) -> bool:
        since, self._gathered = self._gathered, time.monotonic()
        written = self._foreign.take() if self._foreign is not None else Written()
        if not written:
            return False
        for directory, what in _files(written):
            if (owner := self._owner(directory)) is not None:
                key, nonce = owner
                self._hit_groups({key: frozenset({nonce})}, _WRITTEN.format(what))
        for directory in sorted(written.created):
            self._arrivals.begin_empty(directory)
            with self._guard:
                # Lists the tasks that were moved there before it was watched.
                self._doubts.written(directory, 0, {}, since)
        for directory in sorted(written.renamed):
            with contextlib.suppress(ResctrlError):
                self._arrivals.begin(directory)
                self._arrivals.begin(place_of(directory).class_)
        for directory, number in sorted(written.tasks.items()):
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
            for workload in self._store.all():
                if workload.standing:
                    self._suspects[workload.key] = written.is_incomplete or self._suspects.get(workload.key, False)
        return True

    def _find_refused(self) -> bool:
        """Find a write that the kernel has refused, and read the events again. Returns whether there was anything.

        A refused write raises an event if it opens the file with O_TRUNC, as shells do, and last_cmd_status has the
        reason. That text is of the last command on the host, so the file must be closed, and no tasks file may be
        written to or closed until the text is read, by the daemon either.
        """
        closed = self._foreign.last_closed() if self._foreign is not None else None
        if self._foreign is None or closed is None:
            return False
        with self._guard:
            doubt = self._doubts.only_write(closed[0])
        if doubt is None or doubt.is_refused or not _REFUSED.search(self._tree.last_cmd_status()):
            return False
        # A write of the daemon that has ended has raised IN_CLOSE_WRITE.
        has_own_write = self._tree.own_writes.quiet() is None
        is_new = self._gather()
        with self._guard:
            is_same = doubt is self._doubts.only_write(closed[0]) and closed == self._foreign.last_closed()
            doubt.is_refused = is_same and not has_own_write
        return is_new

    def _groups_that_may_lose_tasks_to(self, directory: str) -> Groups:
        """Return the groups with tasks that a write to that directory can move: to a group, only those of its class.

        A workload without a member has not had a task.
        """
        place = place_of(directory)
        return {
            workload.key: frozenset(
                group.nonce for group in workload.standing if not place.group or group.class_ == place.class_
            )
            for workload in self._store.all()
            if workload.standing and workload.members
        }

    def _list_written(self, being_written: set[str]) -> None:
        """List the directories that were written to, and keep which workloads' tasks came there."""
        with self._guard:
            directories = self._doubts.to_list(being_written)
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
        workloads = [workload for workload in self._store.all() if workload.standing] if arrivals else []
        of_cgroup = {member.cgroup: workload for workload in workloads for member in workload.living if member.cgroup}
        of_process = {
            (member.pid, member.start_time): workload
            for workload in workloads
            for member in workload.living
            if member.pid
        }
        owners: dict[int, Workload | None] = {}
        for arrival in arrivals:
            if arrival.pid not in owners:
                owners[arrival.pid] = _owner_of(arrival.pid, of_cgroup, of_process)
            owner = owners[arrival.pid] or next(
                (workload for workload in workloads if self._was_in(workload.key, arrival)), None
            )
            if owner is not None and arrival.where not in _homes(owner):
                self._movers.setdefault(owner.key, []).append(arrival)
                self._suspects.setdefault(owner.key, False)

    def _was_in(self, key: str, arrival: Arrival) -> bool:
        """Whether the thread was in a group of the workload when that was looked at last."""
        look = self._looks.get(key)
        thread = look.threads.get(arrival.tid) if look is not None else None
        return thread is not None and thread.start_time == arrival.start_time

    def _why(self, doubt: Doubt) -> str:
        path = os.path.join(self._tree.path, doubt.directory)
        return _MISSED.format(path) if doubt.is_gone else _UNSEEN.format(os.path.join(path, "tasks"))

    def _hit(self, key: str, quality: Quality, why: str) -> None:
        """Keep a mark for all groups of a workload."""
        workload = self._store.get(key)
        if workload is not None:
            self._hit_groups({key: frozenset(group.nonce for group in workload.standing)}, why, quality)

    def _hit_groups(self, groups: Groups, why: str, quality: Quality = Quality.ESTIMATED) -> None:
        """Keep a mark for groups, until the workload is marked."""
        with self._guard:
            for key, nonces in groups.items():
                for nonce in nonces:
                    self._hits.setdefault(key, {}).setdefault(nonce, set()).add((quality, why))

    def _owner(self, directory: str) -> tuple[str, int] | None:
        """The key and nonce of the group of a workload whose directory that is."""
        place = place_of(directory)
        if not place.group:
            return None
        ref = GroupRef(place.class_, place.group)
        ours = [
            (workload.key, group)
            for workload in self._store.all()
            for group in workload.groups
            if not group.state.is_over
        ]
        for key, group in ours:
            if group.ref == ref:
                return key, group.nonce
        # Another program may have renamed it just now.
        try:
            found = self._tree.find(ref)
        except ResctrlError:
            return None
        if found is None or found.gid != self._mark.gid:
            return None
        return next(((key, group.nonce) for key, group in ours if group.nonce == found.nonce), None)

    def _save_marks(self, txn: Transaction) -> None:
        """Mark the groups of the workload for each write to them."""
        with self._guard:
            hits = self._hits.pop(txn.key, {})
        try:
            workload = txn.workload
            for group in workload.groups:
                for quality, why in sorted(hits.get(group.nonce, ())):
                    workload = self._worse(workload, group, quality, why)
            txn.save(workload)
        except Exception:
            with self._guard:
                kept = self._hits.setdefault(txn.key, {})
                for nonce, marks in hits.items():
                    kept.setdefault(nonce, set()).update(marks)
            raise

    def _worse(self, workload: Workload, group: Group, quality: Quality, why: str) -> Workload:
        worse = workload.made_worse(group, quality, why)
        if worse != workload:
            log.warning("%s: %s", workload.key, why)
        return worse

    # -- what is found without events

    @property
    def _has_trouble(self) -> bool:
        return self._foreign is None or bool(self._foreign.trouble)

    def _with_cpus(self, workload: Workload, group: Group) -> Workload:
        cpus = self._tree.cpus(group.ref)
        return self._worse(workload, group, Quality.ESTIMATED, _CPUS.format(cpus)) if cpus else workload

    def _looked_at(self, workload: Workload) -> Workload:
        """The workload after a look at the tasks of its groups. Raises NoSuchGroup, NotMounted."""
        before = self._looks.get(workload.key)
        if before is not None and before.generation != workload.generation:
            before = None
        now = _Look(workload.generation, boot_ticks())
        for group in workload.standing:
            for tid in self._tree.tasks(group.ref):
                thread = before.threads.get(tid) if before is not None else None
                if thread is None:
                    found = processes.stat(tid)
                    if found is None:
                        continue
                    thread = _Thread(processes.leader(tid), found.start_time, group.folder)
                    if self._is_stranger(workload, group, tid, thread, before):
                        workload = self._worse(workload, group, Quality.ESTIMATED, _STRANGER)
                now.threads[tid] = replace(thread, folder=group.folder) if thread.folder != group.folder else thread
        for folder in self._folders_left(workload, before, now):
            group = workload.group(folder) or workload.first
            workload = self._worse(workload, group, Quality.LATE, _TAKEN)
        self._looks[workload.key] = now
        return workload

    def _is_stranger(self, workload: Workload, group: Group, tid: int, thread: _Thread, before: _Look | None) -> bool:
        """Whether a thread that is in the group now ran outside before, and the daemon did not move it."""
        start = thread.start_time
        if self._tree.own_writes.moved_since(tid, start):
            return False
        if before is not None:
            return start < before.at - _FORK_TICKS
        # After a restart nobody knows which threads the daemon moved: only those of members.
        if group.baseline is not Quality.EXACT or start >= group.created_ns * TICKS_PER_S // 10**9 - _FORK_TICKS:
            return False
        return all(
            member.pid != thread.pid and not (member.cgroup and cgroups.member_test(member.cgroup)(tid))
            for member in workload.members
        )

    def _folders_left(self, workload: Workload, before: _Look | None, now: _Look) -> set[str]:
        """The folders of the groups that a task has left: one that was in it, or one that was forked in it."""
        homes = _homes(workload)

        def has_left(tid: int, start: int | None = None) -> bool:
            try:
                where = self._tree.membership(tid)
            except NoSuchProcess:
                return False
            # The class of a thread that is exiting says nothing about where it ran.
            thread = processes.stat(tid)
            is_alive = thread is not None and not thread.is_exiting and start in (None, thread.start_time)
            if where in homes or not is_alive:
                return False
            self.found_outside(where)
            return True

        left = set()
        for tid, thread in (before.threads if before is not None else {}).items():
            is_ours = before is not None and self._tree.own_writes.moved_since(tid, before.at)
            if tid not in now.threads and not is_ours and has_left(tid, thread.start_time):
                left.add(thread.folder)
        # No task of an exact group has run outside, so each process that it has started began in it.
        for group in workload.standing:
            if group.baseline is Quality.EXACT and group.folder not in left:
                pids = {thread.pid for thread in now.threads.values() if thread.folder == group.folder}
                pids.update(
                    member.pid for member in workload.living if _runs(member) and workload.group_of(member) == group
                )
                if any(tid not in now.threads and has_left(tid) for tid in _threads_below(pids)):
                    left.add(group.folder)
        return left


def _files(written: Written) -> Iterator[tuple[str, str]]:
    for directory in sorted(written.tasks):
        yield directory, "tasks"
    for directory in sorted(written.cpus):
        yield directory, "cpus"


def _homes(workload: Workload) -> set[Membership]:
    return {Membership(group.ref.class_, group.ref.name) for group in workload.standing}


def _owner_of(
    pid: int, of_cgroup: Mapping[str, Workload], of_process: Mapping[tuple[int, int], Workload]
) -> Workload | None:
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
