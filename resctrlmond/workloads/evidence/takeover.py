# SPDX-License-Identifier: Apache-2.0
"""Take-over: one workload takes tasks of another workload, whose totals are not exact from then on.

Any workload may take tasks of a unit, without a take-over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.model.workload import Workload, replace
from resctrlmond.workloads.records.store import Store


class TakeOver:
    """Makes the workload that loses a task late, before the other workload takes the task.

    This needs transactions of both workloads at once. Two threads cannot deadlock, because only the thread that has
    the ``turn`` waits for a second transaction, and it acquired the turn before its first one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.RLock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn within the context. A thread that has a transaction must not wait for the turn."""
        with self._turn:
            yield

    def may_take_for(self, key: str) -> Callable[[Membership], bool]:
        """Return the function to call before the workload ``key`` takes a task out of a group.

        The function makes the workload of that group late in its record, and returns whether the task may be taken
        now. It returns False if another thread has the turn: the task stays where it is until a later sweep.
        """
        late: set[Membership] = set()

        def may_take(where: Membership) -> bool:
            if where not in late:
                if not self._turn.acquire(blocking=False):
                    return False
                try:
                    self._make_late(key, where)
                finally:
                    self._turn.release()
                late.add(where)
            return True

        return may_take

    def _owner(self, where: Membership) -> Workload | None:
        return self._store.owner_of(GroupRef(where.class_, where.group))

    def _make_late(self, key: str, where: Membership) -> None:
        ref = GroupRef(where.class_, where.group)
        owner = self._owner(where)
        if owner is None:
            self._store.note_loss_of_unreadable(where.group)
        if owner is None or owner.key == key:
            return
        with self._store.transaction(owner.key) as txn:
            workload = txn.find()
            group = workload.group_at(ref) if workload is not None else None
            if workload is not None and group is not None:
                late = workload.doubted(group, doubt(Reason.MOVED_OUT, by=f"workload {key} took them over"))
                # The task does not return to the workload around this one.
                txn.save(replace(late, left_tasks=bool(late.part_of)))
