# SPDX-License-Identifier: Apache-2.0
"""Take-over: one workload takes tasks of another workload, whose totals are not exact from then on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads import reasons
from resctrlmond.workloads.accounting import Quality
from resctrlmond.workloads.store import Store


class TakeOver:
    """The lock order for a take-over, in which the workload that loses a task is marked late before the task moves.

    Marking needs a transaction of the losing workload while that of the taking workload is open. Two threads cannot
    deadlock, because only the thread that has the ``turn`` waits for a second transaction, and it acquired the turn
    before its first transaction.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.RLock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn within the context. A thread that has a transaction must not wait for the turn."""
        with self._turn:
            yield

    def marker(self, key: str) -> Callable[[Membership], bool]:
        """Return the function to call before the workload ``key`` takes a task out of a group.

        The function marks the workload of that group late in its record, and returns whether the task may be taken
        now. It returns False if another thread has the turn: the task stays where it is until a later sweep.
        """
        marked: set[Membership] = set()

        def mark(where: Membership) -> bool:
            if where not in marked:
                if not self._turn.acquire(blocking=False):
                    return False
                try:
                    self._mark(key, where)
                finally:
                    self._turn.release()
                marked.add(where)
            return True

        return mark

    def _mark(self, key: str, where: Membership) -> None:
        ref = GroupRef(where.class_, where.group)
        owner = next((workload for workload in self._store.all() if workload.group_at(ref) is not None), None)
        if owner is None or owner.key == key:
            return
        with self._store.transaction(owner.key) as txn:
            workload = txn.find()
            group = workload.group_at(ref) if workload is not None else None
            if group is not None:
                txn.save_group(group.made_worse(Quality.LATE, reasons.taken_over(key)))
