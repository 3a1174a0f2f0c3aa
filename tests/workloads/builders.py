# SPDX-License-Identifier: Apache-2.0
"""Workloads for tests that need no manager."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.workload import Group, GroupState, State, Workload
from resctrlmond.workloads.records.store import Store

_STANDING = (State.ACTIVE, State.IDLE)


def group_state(state: State) -> GroupState:
    """The state of the first group of a workload in that state."""
    return GroupState.CREATED if state in _STANDING else GroupState(state.value)


def workload(key: str, state: State = State.ACTIVE, **fields: Any) -> Workload:
    """A workload with one group; ``fields`` are of either."""
    of_group = {name: fields.pop(name) for name in list(fields) if name in Group.__struct_fields__}
    group = Group(**{"name": key, "state": group_state(state), **of_group})
    return Workload(key=key, groups=(group,), is_active=state is State.ACTIVE, **fields)


def save(store: Store, workload: Workload) -> Workload:
    """Save a workload as its own transaction."""
    with store.transaction(workload.key) as txn:
        return txn.save(workload)


def drop(store: Store, key: str) -> None:
    """Remove a workload."""
    with store.transaction(key) as txn:
        txn.drop()


def total_of(totals: Iterable[Total], event: str = "mbm_total_bytes") -> Total:
    """Return the total of one event."""
    return next(total for total in totals if total.event.name == event)
