# SPDX-License-Identifier: Apache-2.0
"""Take-over: one workload takes tasks of another workload, whose totals are not exact from then on.

Any workload may take tasks of a unit, without a take-over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.evidence.group_owner import owner_of
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.workload import replace
from resctrlmond.workloads.records.store import Store


class TakeOver:
    """Makes the workload that loses a task late, before the other workload takes the task.

    This needs transactions of both workloads at once. Two threads cannot deadlock, because only the thread that has
    the ``turn`` waits for a second transaction, and it acquired the turn before its first one.
    """

    def __init__(self, tree: Tree, store: Store, mark: Mark) -> None:
        self._tree = tree
        self._store = store
        self._mark = mark
        self._turn = threading.RLock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn within the context. A thread that has a transaction must not wait for the turn."""
        with self._turn:
            yield

    def may_take_for(self, key: str) -> Callable[[Membership], bool]:
        """Return the function to call before the workload ``key`` takes a task out of a group.

        The function makes the workload of that group late in its record, and returns whether the task may be taken
        now. It returns False if another thread has the turn, or if the group was removed or renamed meanwhile: the
        task stays where it is until a later sweep.
        """
        late: set[Membership] = set()

        def may_take(where: Membership) -> bool:
            if where not in late:
                if not self._turn.acquire(blocking=False):
                    return False
                try:
                    if not self._make_late(key, where):
                        return False
                finally:
                    self._turn.release()
                late.add(where)
            return True

        return may_take

    def _make_late(self, key: str, where: Membership) -> bool:
        """Make the workload late to which the group belongs. Return False if there is no such group now."""
        ref = GroupRef(where.class_, where.group)
        if (found := self._tree.find(ref)) is None:
            return False
        owner = owner_of(self._store, self._mark, ref, found)
        if owner is None:
            self._store.note_loss_of_unreadable(where.group)
        if owner is None or owner[0].key == key:
            return True
        with self._store.transaction(owner[0].key) as txn:
            workload = txn.find()
            groups = workload.groups if workload is not None else ()
            group = next((group for group in groups if group.nonce == owner[1].nonce), None)
            if workload is not None and group is not None:
                late = workload.doubted(group, doubt(Reason.MOVED_OUT, by=f"workload {key} took them over"))
                # The task does not return to the workload around this one.
                txn.save(replace(late, left_tasks=bool(late.part_of)))
        return True
