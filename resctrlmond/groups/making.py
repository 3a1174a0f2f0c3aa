# SPDX-License-Identifier: Apache-2.0
"""New runs and new groups: made in fairness to those that wait, and gone again where their call fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from resctrlmond.groups.keys import is_pod_uid
from resctrlmond.groups.lifecycle import Lifecycle
from resctrlmond.groups.plan import served_before
from resctrlmond.groups.record import ROOT_PART, Record, State
from resctrlmond.groups.settings import Settings
from resctrlmond.groups.times import boot_ns, utc_now
from resctrlmond.resctrl.errors import RmidsExhausted, no_rmid_remedy, undoing


class Making:
    """Makes runs and groups. Whoever calls holds the key."""

    def __init__(self, life: Lifecycle, settings: Callable[[], Settings]) -> None:
        self.life = life
        self.book = life.book
        self.settings = settings

    def new(self, key: str, class_: str, ended: Record | None, follows: bool = False) -> Record:
        """A record for a new run; the ``ended`` one under the same key is moved aside, whole."""
        if ended is not None:
            self.life.snapshots.set_aside(key, ended.generation, ended.completed_ns)
        return Record(
            key=key,
            class_=class_,
            follows=follows,
            group_name=key if is_pod_uid(key) else self.settings().group_prefix + key,
            state=State.PENDING,
            generation=ended.generation + 1 if ended else 1,
        )

    def make(self, record: Record, ended: Record | None, may_wait: bool, *, use_reserve: bool = False) -> Record:
        """Make the group, or have it wait for an RMID. Where that fails, the ``ended`` run stands as before.

        Raises what Lifecycle.make does, LimitExceeded, and RmidsExhausted if it may not wait.
        """
        try:
            self.book.checked(record, use_reserve=use_reserve)
            # Queued groups get free RMIDs before new requests do.
            first = served_before(record, self.book.all())
            if first is None:
                return self.life.make(record, may_wait=may_wait)
            error = self._queued_behind(first, record)
            if not may_wait:
                raise error
            return self.life.wait(record, error)
        except Exception:
            with undoing(record.key):
                self.life.discard(record, ended)
            raise

    def _queued_behind(self, first: Record, record: Record) -> RmidsExhausted:
        return RmidsExhausted(
            "cannot create the monitoring group: workloads of the same or a higher priority already wait for an RMID",
            path=self.life.tree.full_path(record.ref),
            in_limbo=first.in_limbo,
            remedy=no_rmid_remedy(first.in_limbo),
        )

    def further(self, record: Record, class_: str, may_wait: bool = True) -> Record:
        """One more group of the workload, in another class than those it has."""
        # The name of the class is taken where somebody moved that class's group to another one.
        taken = {group.part for group in record.further if group.class_ != class_}
        names = itertools.chain([class_ or ROOT_PART], map(str, itertools.count(2)))
        group = Record(
            key=record.key,
            part=next(name for name in names if name not in taken),
            class_=class_,
            group_name=record.group_name,
            state=State.PENDING,
            priority=record.priority,
            boot_id=self.life.mark.boot_id,
            created_at=utc_now(),
            created_ns=boot_ns(),
            # The first group is waited for first; the tick will make this one after it.
            reason=record.reason,
        )
        if record.state is State.PENDING:
            return self.book.put(group)
        return self.make(group, None, may_wait)


def check_has_rmid(record: Record) -> None:
    """Raise RmidsExhausted if the group waits for an RMID."""
    if record.state is State.PENDING:
        raise RmidsExhausted(record.reason, in_limbo=record.in_limbo)
