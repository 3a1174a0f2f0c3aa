# SPDX-License-Identifier: Apache-2.0
"""The start-up plan: what each group needs, decided without side effects from the records and the directories."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from resctrlmond.resctrl.tree import Found
from resctrlmond.workloads.model.workload import Group, GroupState, State, Workload


class Do(enum.Enum):
    """The step that a group needs at start-up."""

    KEEP = "its directory is there, perhaps in another class or under another name: continue"
    RETRY = "it has no directory yet: create it; or it is observed, and was not read yet"
    BASELINE = "its directory was created, but no begin values were written and no task has joined"
    FINISH = "its end had begun: complete it"
    RECORD_LOSS = "its directory is gone"


class Step(msgspec.Struct, frozen=True):
    """One group, and what it needs."""

    do: Do
    key: str
    group: Group


class StartPlan(msgspec.Struct, frozen=True):
    """The start-up plan: steps for every workload that is not over, and marked directories without a record."""

    steps: tuple[Step, ...]
    leftovers: tuple[Found, ...]


def plan_start(workloads: Iterable[Workload], tree: Sequence[Found], gid: int, boot_id: str) -> StartPlan:
    """Match groups with the directories that have the mark (``gid``): by nonce, at any path.

    An observed group has no mark, and is matched by path and inode. A group of another boot matches nothing, because
    its directory ended with that boot.
    """
    marked = {found.nonce: found for found in tree if found.gid == gid}
    others = {(found.ref, found.inode): found for found in tree if found.gid != gid}
    steps = []
    for workload in workloads:
        if workload.state.is_over:
            continue
        is_ending = workload.state is State.ENDING or workload.has_ended_further_group
        own = []
        for group in workload.groups:
            same_boot = group.boot_id == boot_id
            if group.observed:
                found = others.get((group.ref, group.nonce)) if same_boot else None
            else:
                found = marked.pop(group.nonce, None) if same_boot and group.nonce else None
            # The other groups end with the first one, and none of them before it.
            if not group.folder:
                own.append(Step(_what(workload, group, found, same_boot), workload.key, group))
            elif not (is_ending or group.state.is_over):
                own.append(Step(_what(None, group, found, same_boot), workload.key, group))
        # The run ends with any of its groups.
        steps += [step for step in own if step.do is Do.RECORD_LOSS][:1] or own
    return StartPlan(tuple(steps), tuple(marked.values()))


def _what(workload: Workload | None, group: Group, found: Found | None, same_boot: bool) -> Do:
    if group.state is GroupState.ENDING:
        return Do.FINISH
    if workload is not None and workload.has_ended_further_group:
        return Do.RECORD_LOSS
    if group.state is GroupState.PENDING:
        if not same_boot:
            return Do.RECORD_LOSS
        return Do.BASELINE if found and not group.observed else Do.RETRY
    return Do.KEEP if found else Do.RECORD_LOSS
