# SPDX-License-Identifier: Apache-2.0
"""Take-over: tasks that one workload of ours takes from another, which is no longer exact from then on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from resctrlmond.groups.book import Book
from resctrlmond.groups.record import Record
from resctrlmond.resctrl.membership import Membership


class TakeOver:
    """Marks the workload that loses a task, before it does.

    The key of the workload that takes is locked while that of the other one is needed. Two threads cannot wait for
    each other's keys: only the thread that has the ``turn`` waits for a second key, and it took the turn before its
    first one.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._turn = threading.RLock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn. Only a thread that holds no key may wait for it."""
        with self._turn:
            yield

    def marker(self, key: str) -> Callable[[Membership], bool]:
        """The function to call before the workload ``key`` takes a task out of a group: whether it may take it now.

        It marks the workload of that group as late, on disk. False without the turn: the task stays there this time.
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
        owner = next((record for record in self._book.all() if _part(record, where) is not None), None)
        if owner is None or owner.key == key:
            return
        with self._book.writing(owner.key):
            record = self._book.get(owner.key)
            group = _part(record, where) if record is not None else None
            if record is not None and group is not None:
                self._book.put(record.made_late(group, f"workload {key} took over one of its tasks"))


def _part(record: Record, where: Membership) -> Record | None:
    """The workload's group that stands there."""
    here = (group for group in record.standing if (group.ref.class_, group.ref.name) == (where.class_, where.group))
    return next(here, None)
