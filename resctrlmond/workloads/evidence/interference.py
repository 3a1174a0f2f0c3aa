# SPDX-License-Identifier: Apache-2.0
"""Lower the quality of groups whose CPUs or counters another program changes.

resctrlmond-witness records moves of tasks. The daemon watches other writes to resctrl with inotify:

- A write to the cpus file of a workload's group makes the group estimated: other tasks count in it there.
- A write to a file by which bandwidth counters are reset makes the bandwidth of the group, or of all groups,
  estimated.
- Lost events make all groups estimated.

Without inotify, each sweep looks for CPUs that the groups have, and no figure is exact.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from resctrlmond.resctrl.counters import EVENTS, Kind
from resctrlmond.resctrl.errors import NoSuchGroup, NotMounted, ResctrlError
from resctrlmond.resctrl.foreign_writes import KERNEL_MODES, ForeignWrites, Written
from resctrlmond.resctrl.membership import membership_of
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.evidence.group_owner import owner_of
from resctrlmond.workloads.evidence.pending_doubts import Doubts, Groups, PendingDoubts, doubted_and_logged
from resctrlmond.workloads.figures import caveats
from resctrlmond.workloads.figures.reasons import Reason, doubt, text_of
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.workload import Group, State, Workload
from resctrlmond.workloads.records.store import Store, Transaction

log = logging.getLogger(__name__)

Guard = Callable[[str], AbstractContextManager[None]]

# The end of a workload in another state saves its doubts.
_UNFINISHED = (State.PENDING, State.ACTIVE, State.IDLE)

# The delay before the next try if a call has locked a workload.
_RETRY_S = 0.1
# After each call of react, pause for this multiple of its CPU time, within these limits: writes of other programs,
# however frequent, cost 5% of one processor at most.
_PAUSE_FACTOR = 20
_MIN_REST_S = 0.02
_MAX_REST_S = 0.25
# Writes to a group, or events that may have been one, since which tasks of others may count in it.
_MAY_HAVE_TASKS_OF_OTHERS = frozenset({Reason.HAS_CPUS.name, Reason.CHANGES_UNKNOWN.name})
# The events whose counters can be reset.
_RESTARTING = tuple(name for name, event in EVENTS.items() if event.restarts)
_CUMULATIVE = tuple(name for name, event in EVENTS.items() if event.kind is Kind.CUMULATIVE)
# A reading waits so long for a thread that processes events: it may hang in the kernel.
_EVENTS_WAIT_S = 2.0
_EVENTS_LOST = (
    "their writes to resctrl were not seen, because they were too many or because the kernel's events could not be "
    "read"
)


class Interference:
    """Watches the tree, and records doubts about the groups that other programs change.

    ``wake`` is called when events were read that require a call of ``react``. Thread-safe.
    """

    def __init__(self, tree: Tree, store: Store, mark: Mark) -> None:
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
        self._react_lock = threading.Lock()
        self._events_lock = threading.Lock()
        self._doubts = PendingDoubts()
        self._hangs = False
        self._trouble = ""
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

    def react(self, guard: Guard) -> float:
        """Record doubts about the groups that other programs have changed.

        ``guard`` handles the errors of one workload, by its key. Returns the seconds until the next call; 0 if it is
        due only after the next write. For ``rest_s`` the caller should not call it again.
        """
        if self._foreign is None:
            return 0
        if not self._react_lock.acquire(blocking=False):
            return _RETRY_S
        try:
            begun = time.thread_time()
            self._update_watches()
            self._read_events()
            is_busy = self._save_all_doubts(guard)
            rest_s = _PAUSE_FACTOR * (time.thread_time() - begun)
            self.rest_s = min(_MAX_REST_S, max(_MIN_REST_S, rest_s))
            return _RETRY_S if is_busy else 0
        finally:
            self._react_lock.release()

    def _save_all_doubts(self, guard: Guard) -> bool:
        """Save the pending doubts of all workloads. Returns whether a call has locked one of the workloads."""
        is_busy = False
        for key in self._doubts.keys:
            with guard(key), self._store.transaction_if_free(key) as txn:
                is_busy |= txn is None
                workload = txn.find() if txn is not None else None
                if txn is not None and workload is not None and workload.state in _UNFINISHED:
                    self._doubts.save(txn)
        return is_busy

    def look_for_cpus(self, txn: Transaction) -> None:
        """Record doubts about the groups to which another program gave CPUs. Raises NoSuchGroup, NotMounted."""
        for group in txn.workload.existing_groups:
            txn.save(self._with_cpus(txn.workload, group))

    def forget(self, key: str) -> None:
        """Drop the evidence about a workload that has ended."""
        self._doubts.forget(key)

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

    def read_events(self) -> None:
        """Read the events until now, so that no thread is woken for the daemon's own writes only.

        Does not wait for another thread: a container may be starting.
        """
        if self._read_events(wait_s=0):
            self.wake()

    def read_all_events(self) -> bool:
        """Read and process the events until now. Return False if another thread that has read some hangs.

        The caller must not hold a lock that the processing needs. Only the first call waits for that thread.
        """
        found = self._read_events(wait_s=0 if self._hangs else _EVENTS_WAIT_S)
        self._hangs = found is None
        if found:
            self.wake()
        return not self._hangs

    def doubts_until_now(self, key: str) -> Doubts:
        """Return the doubts about a workload by all writes until now that may not be in its record.

        Read the record after this call: then it has all others.
        """
        is_whole = self.read_all_events() and not self._trouble
        found = self._doubts.of(key)
        workload = self._store.get(key)
        if is_whole or workload is None:
            return found
        lost = doubt(Reason.CHANGES_UNKNOWN, cause=_EVENTS_LOST)
        return {group.nonce: (*found.get(group.nonce, ()), lost) for group in workload.groups}

    def before_end(self, txn: Transaction) -> None:
        """Save the doubts by all writes until now, because the workload ends."""
        self.read_events()
        if self._trouble:
            nonces = frozenset(group.nonce for group in txn.workload.existing_groups)
            self._doubts.add({txn.key: nonces}, doubt(Reason.CHANGES_UNKNOWN, cause=_EVENTS_LOST))
        # Those that come later are of writes after the last reading, or shortly before it (``after_last_reading``).
        self._doubts.save(txn)

    def after_last_reading(self, txn: Transaction, group: Group) -> tuple[Group, bool]:
        """Save the doubts by all writes until now.

        Return the group with them, and whether tasks of others may count in it since ``before_end``.
        """
        if self._read_events():
            self.wake()
        pending = self._doubts.of(txn.key).get(group.nonce, ())
        is_written = any(one.reason in _MAY_HAVE_TASKS_OF_OTHERS for one in pending)
        txn.save_group(group)
        self._doubts.save(txn)
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

    # -- events

    def _update_watches(self) -> None:
        foreign = self._foreign
        if foreign is None:
            return
        foreign.update_watches(self._tree.mounting())
        if foreign.trouble != self._trouble:
            self._trouble = foreign.trouble
            if self._trouble:
                text = "no total is exact, because writes of other programs to resctrl are not seen: %s"
                log.warning(text, self._trouble)
            else:
                log.info("writes of other programs to resctrl are detected at once again")

    def _read_events(self, *, wait_s: float = -1) -> bool | None:
        """Read and process the events. Return whether there were any.

        Another thread may have read events and not processed them yet. Wait for it for ``wait_s`` at most, -1 is
        without limit, and return None if it is not ready then.
        """
        if not self._events_lock.acquire(blocking=wait_s != 0, timeout=wait_s or -1):
            return None
        try:
            foreign = self._foreign
            if foreign is None or not (written := foreign.take()):
                return False
            self._process(written)
            return True
        finally:
            self._events_lock.release()

    def _process(self, written: Written) -> None:
        for directory in sorted(written.cpus):
            if (owner := self._owner(directory)) is not None:
                key, nonce = owner
                self._doubts.add({key: frozenset({nonce})}, doubt(Reason.HAS_CPUS))
        self._process_resets(written)
        self.on_created(written.created)
        if written.is_lost:
            self.on_events_lost()
            self._doubts.add(self._all_groups(), doubt(Reason.CHANGES_UNKNOWN, cause=_EVENTS_LOST))

    def _all_groups(self) -> Groups:
        return {
            workload.key: frozenset(group.nonce for group in workload.existing_groups)
            for workload in self._store.unfinished()
        }

    def _process_resets(self, written: Written) -> None:
        """Add doubts about the events whose counters these writes may have reset.

        A counter that is reset and then counts more than before is not found by its readings.
        """
        for file in sorted(written.counters):
            path = os.path.join(self._tree.path, file)
            reset = doubt(Reason.RESET_BY_WRITE, events=_RESTARTING, file=path)
            if (owner := self._owner(os.path.dirname(file))) is not None:
                self._doubts.add({owner[0]: frozenset({owner[1]})}, reset)
            self.on_counters_reset(_RESTARTING, text_of(reset))
        for file in sorted(written.configuration & KERNEL_MODES):
            path = os.path.join(self._tree.path, file)
            changed = doubt(Reason.KERNEL_WORK, cause=f"another program wrote to {path}")
            self._doubts.add(self._all_groups(), changed)
            self.on_counters_reset(_CUMULATIVE, text_of(changed))
        for file in sorted(written.configuration - KERNEL_MODES):
            name = caveats.event_of(file.removeprefix("info/"))
            events = (name,) if name in _RESTARTING else _RESTARTING
            reset = doubt(Reason.RESET_BY_WRITE, events=events, file=os.path.join(self._tree.path, file))
            self._doubts.add(self._all_groups(), reset)
            self.on_counters_reset(events, text_of(reset))

    def _owner(self, directory: str) -> tuple[str, int] | None:
        """Return the key and nonce of the workload's group in this directory, None if it is not a workload's."""
        membership = membership_of(directory)
        if not membership.group:
            return None
        ref = GroupRef(membership.class_, membership.group)
        try:
            found = self._tree.find(ref)
        except ResctrlError:
            found = None
        owner = owner_of(self._store, self._mark, ref, found)
        return (owner[0].key, owner[1].nonce) if owner is not None else None

    # -- without events

    @property
    def has_trouble(self) -> bool:
        """Whether some writes of other programs are not reported."""
        return self._foreign is None or bool(self._foreign.trouble)

    def _with_cpus(self, workload: Workload, group: Group) -> Workload:
        has_cpus = self._tree.cpus(group.ref)
        return doubted_and_logged(workload, group, doubt(Reason.HAS_CPUS)) if has_cpus else workload
