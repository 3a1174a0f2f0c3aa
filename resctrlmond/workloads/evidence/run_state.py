# SPDX-License-Identifier: Apache-2.0
"""The state of each run that is in memory only. It begins with the run, and ends with it."""

from __future__ import annotations

import threading

import msgspec

from resctrlmond.resctrl.mounts import Mounting
from resctrlmond.workloads.evidence.watched import Members
from resctrlmond.workloads.model.workload import Group, Workload
from resctrlmond.workloads.records.store import Store

# The CPU times of a workload's tasks, as the kernel writes them. Compare for equality only.
Activity = tuple[bytes, ...]


class TakenCheckpoint(msgspec.Struct):
    """A checkpoint of ``workload``, and the CPU times of its tasks before the counters were read.

    ``is_final``: the tasks had not run since the checkpoint before it. So the readings include what the hardware
    counts or reports only after a task has stopped: core energy, and the modified cache lines that it left.
    ``skipped``: how many checkpoints were skipped since then.
    """

    workload: Workload
    activity: Activity
    is_final: bool
    skipped: int = 0


class DirectoryState(msgspec.Struct):
    """The state of the directory of a group.

    ``mounted_on`` is the mount on which it was found last. ``has_stale_links``: the links of its snapshot to live
    counters could not be changed after it moved. ``occupant`` is a task that was found in it.
    """

    mounted_on: Mounting | None = None
    has_stale_links: bool = False
    occupant: int | None = None


class RunState(msgspec.Struct, eq=False):
    """The state of one run of a workload.

    ``groups`` has the states of its groups' directories, by nonce. A tick found the groups of the workload ``found``,
    and they were not removed or renamed since then. Ticks skip the workload ``unchanged`` while its watched members
    are the same. A sweep found all tasks of the workload ``sleeping`` in their groups, after it had read their CPU
    times. An idle minute with 500 containers takes 20 times the CPU time without ``found``, 10 times without
    ``unchanged``, 7 times without ``sleeping``, and 1.9 times without ``taken``.

    ``checkpointed_at`` is the time.monotonic() of the last checkpoint, ``taken`` or skipped; None before the first.
    ``kept_numbers`` are the numbers of the checkpoints (``Snapshots.keep_read``) for which the file ``quality`` was
    written.

    ``resume_try`` is the time.monotonic() of the last try to resume the run after a loss, and the number of failed
    tries. ``empty_since_ns`` is when an overflow workload lost its last member (``overflow.py``).
    """

    generation: int
    groups: dict[int, DirectoryState] = msgspec.field(default_factory=dict)
    found: Workload | None = None
    unchanged: tuple[Workload, Members] | None = None
    sleeping: tuple[Workload, Activity] | None = None
    checkpointed_at: float | None = None
    taken: TakenCheckpoint | None = None
    kept_numbers: list[int] | None = None
    resume_try: tuple[float, int] | None = None
    empty_since_ns: int | None = None

    def of_group(self, group: Group) -> DirectoryState:
        """Return the state of the directory of a group."""
        return self.groups.setdefault(group.nonce, DirectoryState())


class RunStates:
    """The states of the runs, by key. Thread-safe.

    What must survive a run, or is known before it, is elsewhere: containers that are not counted in their pod
    (``Memory.excluded``), and evidence that an event has brought and that is still to be used (``interference.py``).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._states: dict[str, RunState] = {}
        self._lock = threading.Lock()
        # After a removal, the generations of the key begin again.
        store.on_dropped = self.forget

    def of(self, key: str) -> RunState:
        """Return the state of the present run of the key. Each new run, also after a loss, begins with a new one."""
        # Within the lock, so that a thread that knows the run before cannot replace the state of the present one.
        with self._lock:
            workload = self._store.get(key)
            generation = workload.generation if workload is not None else 0
            state = self._states.get(key)
            if state is None or state.generation != generation:
                state = RunState(generation)
                if workload is not None and not workload.is_finished:
                    self._states[key] = state
            return state

    def all(self) -> list[RunState]:
        """Return the states of all runs that have one."""
        return list(self._states.values())

    def forget(self, key: str) -> None:
        """Forget the state of a run that has ended."""
        with self._lock:
            self._states.pop(key, None)
