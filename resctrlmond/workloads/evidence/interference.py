# SPDX-License-Identifier: Apache-2.0
"""Lower the quality of groups whose tasks or CPUs another program changes.

A total is exact only if every task of the workload was in its group all the time, and no other task was. Another
program can break this by a write to resctrl, so the daemon watches all of resctrl with inotify:

- A write to the tasks or cpus file of a workload's group makes the group estimated.
- The witness shows what became of the tasks of workloads that it weighs (``verdict.is_weighed``); for others:
- A write to any tasks file may have moved a task out of a workload's group. All workloads are inspected, and a group
  that a task has left becomes late (``inspection.py``).
- A write to a file by which bandwidth counters are reset makes the bandwidth of the group, or of all groups,
  estimated.
- If the task that was moved has ended before it is found, each workload that may have had it becomes estimated
  (``attribution.py``).

Without inotify, each sweep inspects all workloads. Then a task that was moved and has ended is not found.

Limits: a write that the kernel refuses counts as a write if the program opened the file with O_TRUNC, as shells do,
because the kernel may have moved the first tasks of a list before it refused a later one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.arrivals import Arrival, Arrivals, membership_of
from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.resctrl.errors import NoSuchGroup, NoSuchProcess, NotMounted, NotRead, ResctrlError
from resctrlmond.resctrl.foreign_writes import COUNTERS, ForeignWrites, Written
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.evidence.attribution import Attribution, Groups, Writes
from resctrlmond.workloads.evidence.inspection import Inspector
from resctrlmond.workloads.evidence.pending_downgrades import PendingDowngrades, downgraded_and_logged
from resctrlmond.workloads.evidence.run_state import RunStates
from resctrlmond.workloads.figures import caveats
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.figures.verdict import is_weighed
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Group, State, Workload
from resctrlmond.workloads.records.store import Store, Transaction

log = logging.getLogger(__name__)

Guard = Callable[[str], AbstractContextManager[None]]
# Inspects one workload: ``Interference.inspect`` or ``Interference.inspect_with_cpus``.
Inspect = Callable[[Transaction], None]

# The end of a workload in another state saves its downgrades.
_UNFINISHED = (State.PENDING, State.ACTIVE, State.IDLE)

# After an inspection of all workloads, pause for this multiple of its CPU time: writes of other programs, however
# frequent, cost 5% of one processor at most.
_PAUSE_FACTOR = 20
_MIN_PAUSE_S = 0.05
# The delay before the next try if a call has locked a workload, and if a tasks file is still open for writing.
_RETRY_S = 0.1
_OPEN_RETRY_S = 0.005
# After each call of react, pause for _PAUSE_FACTOR times the CPU time of reading the events, within these limits.
_MIN_REST_S = 0.02
_MAX_REST_S = 0.25
# Writes to a group, which may have moved something into it.
_MAY_HAVE_MOVED_IN = frozenset(
    {*(Reason.WRITTEN.text(file=file) for file in ("tasks", "cpus")), Reason.EVENTS_LOST.text()}
)
# The events whose counters can be reset.
_RESTARTING = tuple(name for name, event in EVENTS.items() if event.restarts)
# A reading waits so long for a thread that processes events: it may hang in the kernel.
_EVENTS_WAIT_S = 2.0
# Drop the lists of removed directories only if there are more than this.
_MAX_STALE_LISTS = 100


class Interference:
    """Watches the tree, inspects workloads after writes of other programs, and downgrades their groups.

    ``wake`` is called when events were read that require a call of ``react``. Thread-safe.
    """

    def __init__(self, tree: Tree, store: Store, runs: RunStates, mark: Mark) -> None:
        self._tree = tree
        self._store = store
        self._mark = mark
        self.wake: Callable[[], None] = lambda: None
        # Called with the directories that other programs created, and when events were lost.
        self.on_created: Callable[[Iterable[str]], None] = lambda _directories: None
        self.on_events_lost: Callable[[], None] = lambda: None
        # Called with the bandwidth events whose counters another program may have reset, and the reason.
        self.on_counters_reset: Callable[[Iterable[str], str], None] = lambda _events, _why: None
        self._foreign: ForeignWrites | None = None
        self._guard = threading.Lock()
        self._react_lock = threading.Lock()
        self._events_lock = threading.Lock()
        self._downgrades = PendingDowngrades()
        # The workloads to inspect after a write, and whether events were missed, so that CPUs are inspected too.
        self._to_inspect: dict[str, bool] = {}
        self._inspect_not_before = 0.0
        self._trouble = ""
        self._arrivals = Arrivals(self._tree)
        self._attribution = Attribution()
        self._inspector = Inspector(self._tree, runs, self.found_outside)
        # By workload: its threads that were seen outside alive, until the workload is inspected.
        self._departed: dict[str, list[Arrival]] = {}
        self._list_lock = threading.Lock()
        self._list_not_before = 0.0
        # The time.monotonic() at which events were last read.
        self._events_read_at = time.monotonic()
        self.rest_s = 0.0

    @property
    def fd(self) -> int:
        """The descriptor that is readable after a write; -1 without inotify."""
        return self._foreign.fd if self._foreign is not None else -1

    def start(self) -> None:
        """Watch the tree from now on."""
        self._foreign = ForeignWrites(self._tree.path, self._tree.own_writes)
        self._update_watches()

    def close(self) -> None:
        """Stop watching the tree."""
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None

    def react(self, guard: Guard, inspect: Callable[[Transaction, Inspect], None]) -> float:
        """Downgrade the groups that were written to, and inspect all workloads after a write to a tasks file.

        ``guard`` handles the errors of one workload, by its key. ``inspect`` gets a transaction, and what inspects
        the groups. Returns the seconds until the next call; 0 if it is due only after the next write. For ``rest_s``
        the caller should not call it again.
        """
        if self._foreign is None:
            return 0
        if not self._react_lock.acquire(blocking=False):
            return _RETRY_S
        try:
            begun = time.thread_time()
            self._update_watches()
            self._process_writes()
            rest_s = _PAUSE_FACTOR * (time.thread_time() - begun)
            self.rest_s = min(_MAX_REST_S, max(_MIN_REST_S, rest_s))
            is_busy = self._save_all_downgrades(guard)
            if self._to_inspect and time.monotonic() >= self._inspect_not_before:
                begun = time.thread_time()
                self._inspect_all(guard, inspect)
                self._inspect_not_before = time.monotonic() + max(
                    _MIN_PAUSE_S, _PAUSE_FACTOR * (time.thread_time() - begun)
                )
                is_busy = self._save_all_downgrades(guard)
            now = time.monotonic()
            again = [_RETRY_S] if is_busy else []
            if self._to_inspect:
                again.append(max(_RETRY_S, self._inspect_not_before - now))
            if self._attribution.has_open:
                again.append(max(_OPEN_RETRY_S, self._list_not_before - now))
            return min(again, default=0)
        finally:
            self._react_lock.release()

    def _save_all_downgrades(self, guard: Guard) -> bool:
        """Save the pending downgrades of all workloads. Returns whether a call has locked one of the workloads."""
        is_busy = False
        for key in self._downgrades.keys:
            with guard(key), self._store.transaction_if_free(key) as txn:
                is_busy |= txn is None
                workload = txn.find() if txn is not None else None
                if txn is not None and workload is not None and workload.state in _UNFINISHED:
                    self._downgrades.save(txn)
        return is_busy

    def _inspect_all(self, guard: Guard, inspect: Callable[[Transaction, Inspect], None]) -> None:
        # First the workloads with a task that was seen outside, because the task may end.
        due = sorted(self._to_inspect.copy().items(), key=lambda item: (item[0] not in self._departed, item[0]))
        for key, has_missed_events in due:
            # A task that another program moves meanwhile may end soon.
            self._process_writes()
            with guard(key), self._store.transaction_if_free(key) as txn:
                if txn is not None:
                    self._to_inspect.pop(key, None)
                    inspect_groups = self.inspect_with_cpus if has_missed_events else self.inspect
                    self._inspect_one(txn, functools.partial(inspect, txn, inspect_groups))
        with self._guard:
            unexplained = self._attribution.pop_unexplained()
        for writes in unexplained:
            self._downgrades.add(writes.groups, self._reason(writes))

    def _inspect_one(self, txn: Transaction, inspect: Callable[[], None]) -> None:
        """Inspect a workload, and downgrade it if its tasks were seen outside. Raises what ``inspect`` raises."""
        departed = self._departed.pop(txn.key, [])
        try:
            if not all(processes.is_running(arrival.tid, arrival.start_time) for arrival in departed):
                self._add_downgrade(txn.key, Quality.LATE, Reason.MOVED_OUT.text())
            inspect()
        except Exception as error:
            # A task that was moved may end before the next inspection.
            self._add_downgrade(txn.key, Quality.ESTIMATED, Reason.NOT_INSPECTED.text(error=error))
            raise
        finally:
            with self._guard:
                self._attribution.inspected(txn.key)
        workload = txn.find()
        if workload is not None and any(self._is_outside(workload, arrival) for arrival in departed):
            # The inspection has not found it, for example for lack of descriptors, and it may end soon.
            self._add_downgrade(txn.key, Quality.LATE, Reason.MOVED_OUT.text())

    def _is_outside(self, workload: Workload, arrival: Arrival) -> bool:
        """Whether the thread is, or may be, in none of the workload's groups, although a total is still exact."""
        if all(group.baseline is not Quality.EXACT for group in workload.existing_groups):
            return False
        try:
            own = workload.memberships | self._store.nested_memberships(workload)
            return self._tree.membership(arrival.tid) not in own
        except ResctrlError:
            return True

    def inspect(self, txn: Transaction) -> None:
        """Inspect the workload's groups if its tasks can leave them without an event or another check.

        Downgrades groups whose tasks another program has moved. Raises NoSuchGroup, NotMounted.
        """
        if self.has_trouble:
            self.inspect_with_cpus(txn)
        # A task that is in no control group of a member is found only in a group's list of tasks.
        elif any(member.pid and not member.cgroup for member in txn.workload.members):
            self._inspect(txn, txn.workload)

    def inspect_with_cpus(self, txn: Transaction) -> None:
        """Inspect the tasks and the CPUs of the workload's groups, because events were missed.

        Downgrades groups whose tasks another program has moved, or to which it gave CPUs. Raises NoSuchGroup,
        NotMounted.
        """
        workload = txn.workload
        for group in workload.existing_groups:
            workload = self._with_cpus(workload, group)
        self._inspect(txn, workload)

    def _inspect(self, txn: Transaction, workload: Workload) -> None:
        if not is_weighed(workload):
            workload = self._inspector.inspect(workload, self._store.nested_memberships(workload))
        txn.save(workload)

    def forget(self, key: str) -> None:
        """Drop the evidence about a workload that has ended."""
        self._to_inspect.pop(key, None)
        self._departed.pop(key, None)
        self._downgrades.forget(key)
        with self._guard:
            self._attribution.inspected(key)

    # -- creation and end of a group

    def unreported(self) -> AbstractContextManager[None]:
        """Do not wake the event loop for events in the block, parts of which change resctrl (see ``changing``).

        If each change woke it, a createRuntime would take 1.08 times the CPU time.
        """
        return self._foreign.unreported() if self._foreign is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Do not wake the event loop for events in the block, which changes resctrl; read them at its end.

        The loop would compete with the calling thread for Python's lock. If the block hangs in the kernel, the ticks
        read the events (``take_gone``).
        """
        with self.unreported():
            try:
                yield
            finally:
                self.read_events()

    def creating(self, ref: GroupRef) -> AbstractContextManager[None]:
        """Expect a new group of the daemon, which the block creates and watches."""
        return self._foreign.expecting(ref.path) if self._foreign is not None else contextlib.nullcontext()

    def watch(self, ref: GroupRef) -> None:
        """Watch a new group of the daemon."""
        if self._foreign is not None:
            self._foreign.watch(ref.path)
            self._arrivals.begin_empty(ref.path)

    def read_events(self) -> None:
        """Read the events until now, so that no thread is woken for the daemon's own writes only.

        Does not wait for another thread: a container may be starting.
        """
        if self._read_events(wait_s=0):
            self.wake()

    def read_all_events(self) -> bool:
        """Read and process the events until now. Return False if another thread that has read some hangs.

        The caller must not hold a lock that the processing needs.
        """
        found = self._read_events(wait_s=_EVENTS_WAIT_S)
        if found:
            self.wake()
        return found is not None

    def before_end(self, txn: Transaction) -> None:
        """Inspect the workload a last time if another program may have moved one of its tasks."""
        if self._process_writes(is_end=True):
            self.wake()
        if self._departed.pop(txn.key, None):
            self._add_downgrade(txn.key, Quality.LATE, Reason.MOVED_OUT.text())
        if txn.key in self._to_inspect or self.has_trouble:
            with contextlib.suppress(NoSuchGroup, NotMounted):  # the caller records the loss
                self._inspect(txn, txn.workload)
        # Those that come later are of writes after the last reading, or shortly before it (``after_last_reading``).
        self._downgrades.save(txn)

    def after_last_reading(self, txn: Transaction, group: Group) -> tuple[Group, bool]:
        """Save the downgrades by all writes until now.

        Return the group with them, and whether another program may have moved tasks or CPUs into it since
        ``before_end``.
        """
        if self._process_writes(is_end=True):
            self.wake()
        is_written = not _MAY_HAVE_MOVED_IN.isdisjoint(self._downgrades.reasons(txn.key, group.nonce))
        with self._guard:
            unexplained = self._attribution.unexplained_for(txn.key, group.nonce)
        for writes in unexplained:
            self._downgrades.add({txn.key: frozenset({group.nonce})}, self._reason(writes))
        txn.save_group(group)
        self._downgrades.save(txn)
        with contextlib.suppress(NoSuchGroup, NotMounted):  # removed, so it has no CPUs
            txn.save(self._with_cpus(txn.workload, group))
        return txn.workload.group(group.folder) or group, is_written

    def take_gone(self) -> set[str] | None:
        """Return the classes and groups that were removed or renamed since the last call; None if any may have been.

        Each is a path relative to the tree, also that of ``mon_groups`` of a removed class.
        """
        foreign = self._foreign
        if foreign is None:
            return None
        # Before the events: if a mount comes in between, its groups are found missing by the next call.
        mounting = self._tree.mounting()
        # Does not wait for a thread that may hang in the kernel: what that has read is returned by a later call.
        self.read_events()
        return foreign.take_gone(mounting)

    def reports_removal(self, ref: GroupRef) -> bool:
        """Whether ``take_gone`` will return the group or its class when it is removed or renamed."""
        return self._foreign is not None and self._foreign.is_watched(ref.path)

    def found_outside(self, where: Membership) -> None:
        """Record that a task of a workload, not ended, was found outside its groups: it explains writes there."""
        with self._guard:
            self._attribution.add_departure(where)

    # -- events

    def _update_watches(self) -> None:
        foreign = self._foreign
        if foreign is None:
            return
        if foreign.update_watches(self._tree.mounting()):
            self._list_all(foreign)
        elif len(self._arrivals) > 2 * foreign.watches + _MAX_STALE_LISTS:
            self._arrivals.keep(lambda: foreign.directories)
        if foreign.trouble != self._trouble:
            self._trouble = foreign.trouble
            if self._trouble:
                text = "what other programs write to resctrl is found up to 5 s late, or not at all: %s"
                log.warning(text, self._trouble)
            else:
                log.info("what other programs write to resctrl is found at once again")

    def _list_all(self, foreign: ForeignWrites) -> None:
        """List each class and group, to find later which tasks were moved there."""
        self._arrivals.keep(lambda: foreign.directories)
        for directory in foreign.directories:
            if self._is_own(directory):
                # For each list the kernel walks over all threads of the host, and there may be thousands of groups.
                # With lists that cost no walk, the recovery of 500 groups takes 1.03 times the CPU time.
                self._arrivals.begin_unread(directory)
                continue
            with contextlib.suppress(ResctrlError):
                self._arrivals.begin(directory)

    def _is_own(self, directory: str) -> bool:
        membership = membership_of(directory)
        try:
            found = self._tree.find(GroupRef(membership.class_, membership.group)) if membership.group else None
        except ResctrlError:
            return False
        return found is not None and found.gid == self._mark.gid

    def _process_writes(self, *, is_end: bool = False) -> bool:
        """Read the events, and list the directories that were written to. Returns whether there were events.

        ``is_end``: a workload ends and cannot be downgraded later, so do not wait for a pause.
        """
        is_new = bool(self._read_events())
        if self._foreign is None or not self._attribution.has_open or not self._list_lock.acquire(blocking=is_end):
            return is_new
        try:
            if is_end or time.monotonic() >= self._list_not_before:
                begun = time.thread_time()
                self._list_written()
                self._list_not_before = time.monotonic() + _PAUSE_FACTOR * (time.thread_time() - begun)
            is_new |= bool(self._read_events())
            with self._guard:
                self._attribution.close_listed(self._foreign.being_written)
                for key in self._attribution.uninspected:
                    self._to_inspect.setdefault(key, False)
        finally:
            self._list_lock.release()
        return is_new

    def _read_events(self, *, wait_s: float = -1) -> bool | None:
        """Read and process the events. Return whether there were any.

        Another thread may have read events and not processed them yet. Wait for it for ``wait_s`` at most, -1 is
        without limit, and return None if it is not ready then.
        """
        if not self._events_lock.acquire(blocking=wait_s != 0, timeout=wait_s or -1):
            return None
        try:
            since, self._events_read_at = self._events_read_at, time.monotonic()
            foreign = self._foreign
            if foreign is None or not (written := foreign.take()):
                return False
            self._process(foreign, written, since)
            return True
        finally:
            self._events_lock.release()

    def _process(self, foreign: ForeignWrites, written: Written, since: float) -> None:
        for directory, what in _files(written):
            if (owner := self._owner(directory)) is not None:
                key, nonce = owner
                workload = self._store.get(key)
                if what != "tasks" or workload is None or not is_weighed(workload):
                    self._downgrades.add({key: frozenset({nonce})}, Reason.WRITTEN.text(file=what))
        self._process_resets(written)
        for directory in sorted(written.created):
            self._arrivals.begin_empty(directory)
            with self._guard:
                # No write is counted, but the directory will be listed: tasks may have been moved there already.
                self._attribution.add(directory, 0, {}, since)
        for directory in sorted(written.renamed):
            with contextlib.suppress(ResctrlError):
                self._arrivals.begin(directory)
                self._arrivals.begin(membership_of(directory).class_)
        for directory, number in sorted(written.tasks.items()):
            groups = self._groups_that_may_lose_tasks_to(directory)
            with self._guard:
                self._attribution.add(directory, number, groups, since)
        for directory in sorted(written.missed):
            groups = self._groups_that_may_lose_tasks_to(directory)
            with self._guard:
                self._attribution.add_removed(directory, groups, since)
        self.on_created(written.created | written.renamed | written.missed)
        if written.is_lost:
            self.on_events_lost()
            self._downgrades.add(self._groups_that_may_lose_tasks_to(""), Reason.EVENTS_LOST.text())
            self._list_all(foreign)
        if written.tasks or written.missed or written.is_incomplete:
            # A task that was moved to one group has left another.
            for workload in self._store.unfinished():
                if workload.existing_groups:
                    has_missed_events = written.is_incomplete or self._to_inspect.get(workload.key, False)
                    self._to_inspect[workload.key] = has_missed_events

    def _process_resets(self, written: Written) -> None:
        """Add downgrades of the events whose counters these writes may have reset.

        A counter that is reset and then counts more than before is not found by its readings.
        """
        for directory in sorted(written.counters):
            path = os.path.join(self._tree.path, directory, COUNTERS)
            why, owner = Reason.RESET_BY_WRITE.text(file=path), self._owner(directory)
            if owner is not None:
                self._downgrades.add({owner[0]: frozenset({owner[1]})}, why, events=_RESTARTING)
            self.on_counters_reset(_RESTARTING, why)
        for file in sorted(written.configuration):
            why = Reason.RESET_BY_WRITE.text(file=os.path.join(self._tree.path, file))
            name = caveats.event_of(file.removeprefix("info/"))
            events = (name,) if name in _RESTARTING else _RESTARTING
            groups = {
                workload.key: frozenset(group.nonce for group in workload.existing_groups)
                for workload in self._store.unfinished()
            }
            self._downgrades.add(groups, why, events=events)
            self.on_counters_reset(events, why)

    def _groups_that_may_lose_tasks_to(self, directory: str) -> Groups:
        """Return the groups whose tasks a write to the directory can move. A group accepts only tasks of its class.

        A workload without a member has never had a task. The witness shows what becomes of those that it weighs.
        """
        membership = membership_of(directory)
        return {
            workload.key: frozenset(
                group.nonce
                for group in workload.existing_groups
                if not membership.group or group.class_ == membership.class_
            )
            for workload in self._store.unfinished()
            if workload.existing_groups and workload.members and not is_weighed(workload)
        }

    def _list_written(self) -> None:
        """List the directories that were written to, and find the tasks that were moved there."""
        with self._guard:
            directories = self._attribution.unlisted()
        for directory in directories:
            try:
                arrivals = self._arrivals.find(directory)
            except ResctrlError as error:
                log.debug("%s cannot be listed: %s", directory, error)
                continue
            try:
                self._find_departed(arrivals)
            except NotRead as error:
                groups = self._groups_that_may_lose_tasks_to(directory)
                self._downgrades.add(groups, Reason.NOT_INSPECTED.text(error=error))
            with self._guard:
                self._attribution.add_arrivals(directory, [arrival.tid for arrival in arrivals])

    def _find_departed(self, arrivals: list[Arrival]) -> None:
        """Find which of these tasks belong to workloads, and inspect these workloads soon. Raises NotRead."""
        # A runtime moves the process of an observed container out of the workload in which the runtime runs.
        living = self._store.unfinished() if arrivals else []
        workloads = [
            workload
            for workload in living
            if workload.existing_groups and not workload.is_observed and not is_weighed(workload)
        ]
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
                owners[arrival.pid] = _workload_of(arrival.pid, of_cgroup, of_process)
            owner = owners[arrival.pid] or next(
                (workload for workload in workloads if self._inspector.had(workload.key, arrival)), None
            )
            if owner is not None and arrival.where not in owner.memberships:
                self._departed.setdefault(owner.key, []).append(arrival)
                self._to_inspect.setdefault(owner.key, False)

    def _reason(self, writes: Writes) -> str:
        path = os.path.join(self._tree.path, writes.directory)
        if writes.is_removed:
            return Reason.REMOVED_UNSEEN.text(path=path)
        return Reason.MOVED_UNSEEN.text(path=os.path.join(path, "tasks"))

    def _add_downgrade(self, key: str, quality: Quality, why: str) -> None:
        """Add a pending downgrade of all groups of a workload."""
        workload = self._store.get(key)
        if workload is not None:
            self._downgrades.add({key: frozenset(group.nonce for group in workload.existing_groups)}, why, quality)

    def _owner(self, directory: str) -> tuple[str, int] | None:
        """Return the key and nonce of the workload's group in this directory, None if it is not a workload's."""
        membership = membership_of(directory)
        if not membership.group:
            return None
        ref = GroupRef(membership.class_, membership.group)
        own = [
            (workload.key, group)
            for workload in self._store.unfinished()
            for group in workload.groups
            if not group.state.is_over
        ]
        for key, group in own:
            if group.ref == ref:
                return key, group.nonce
        # Another program may have renamed the group.
        try:
            found = self._tree.find(ref)
        except ResctrlError:
            return None
        if found is None or found.gid != self._mark.gid:
            return None
        return next(((key, group.nonce) for key, group in own if group.nonce == found.nonce), None)

    # -- without events

    @property
    def has_trouble(self) -> bool:
        """Whether some writes of other programs are not reported."""
        return self._foreign is None or bool(self._foreign.trouble)

    def _with_cpus(self, workload: Workload, group: Group) -> Workload:
        cpus = self._tree.cpus(group.ref)
        if not cpus:
            return workload
        return downgraded_and_logged(workload, group, Quality.ESTIMATED, Reason.HAS_CPUS.text(cpus=cpus))


def _files(written: Written) -> Iterator[tuple[str, str]]:
    for directory in sorted(written.tasks):
        yield directory, "tasks"
    for directory in sorted(written.cpus):
        yield directory, "cpus"


def _workload_of(
    pid: int, of_cgroup: Mapping[str, Workload], of_process: Mapping[tuple[int, int], Workload]
) -> Workload | None:
    """Return the workload of a process: by its control group, or by a member that it descends from.

    Raises NotRead.
    """
    with contextlib.suppress(NoSuchProcess):
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
