# SPDX-License-Identifier: Apache-2.0
"""The groups that wait for an RMID or for bandwidth counters: their order, and why they are late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from resctrlmond.workloads.model.states import State
from resctrlmond.workloads.model.workload import Group, GroupState, Workload


class InWorkload(NamedTuple):
    """A group and its workload."""

    workload: Workload
    group: Group


def waiting(workloads: Iterable[Workload]) -> list[InWorkload]:
    """The groups that wait for an RMID, in the order in which they are to get one: by priority, then by age.

    The other groups of a workload wait until its first one stands. Before these are the observed groups that were not
    read yet, which have an RMID.
    """
    groups = [
        InWorkload(workload, group)
        for workload in workloads
        if not workload.state.is_over and workload.state is not State.ENDING
        for group in workload.groups
        if group.state is GroupState.PENDING and (not group.folder or workload.state.has_group)
    ]
    return sorted(groups, key=_rank)


def _rank(of: InWorkload) -> tuple[bool, int, int, str, str]:
    return not of.group.observed, -of.workload.priority, of.group.created_ns, of.workload.key, of.group.folder


def served_before(workload: Workload, workloads: Iterable[Workload]) -> Group | None:
    """The first of the waiting groups that are to get an RMID before a new group of ``workload``."""
    # Without a reason it has not been refused an RMID: it is being created at this moment.
    others = (of for of in waiting(workloads) if of.group.reason and of.workload.key != workload.key)
    return next((of.group for of in others if of.workload.priority >= workload.priority), None)


def lacking_counters(workloads: Iterable[Workload]) -> list[InWorkload]:
    """The groups that lack bandwidth counters, in the order in which they are to get them: as for RMIDs."""
    groups = [
        InWorkload(workload, group)
        for workload in workloads
        for group in workload.existing_groups
        if group.unassigned and group.state is not GroupState.ENDING
    ]
    return sorted(groups, key=_rank)
