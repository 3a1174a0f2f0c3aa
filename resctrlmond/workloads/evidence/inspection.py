# SPDX-License-Identifier: Apache-2.0
"""Inspect the tasks of a workload's groups, to find tasks that another program has moved.

Each inspection lists the tasks of the groups and compares them with the previous inspection of the same run:

- A task that was in a group and now runs in no group of the workload was moved out. The group becomes late.
- A process outside that a task of an exact group has started was moved out too, because it started in the group.
- A task that is new in a group, but started before the previous inspection, was moved in. The group becomes
  estimated.

Moves by the daemon are not counted. Limits: a task that was moved out and has ended is not found, nor is one that was
moved out and back between two inspections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import msgspec

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.arrivals import Arrival
from resctrlmond.resctrl.errors import NoSuchProcess
from resctrlmond.resctrl.foreign_writes import boot_ticks
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import TICKS_PER_S
from resctrlmond.resctrl.tree import Tree
from resctrlmond.workloads.evidence.pending_downgrades import downgraded_and_logged
from resctrlmond.workloads.evidence.run_state import ListedThread, Listing, RunStates
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Group, Workload

log = logging.getLogger(__name__)

# A thread that is forked while the kernel lists the tasks is older than the list, and may be missing in it.
_FORK_TICKS = TICKS_PER_S


class Inspector:
    """Compares the tasks of each workload's groups with those at its previous inspection.

    ``on_departure`` is called with the membership of each task that was found outside its groups.
    """

    def __init__(self, tree: Tree, runs: RunStates, on_departure: Callable[[Membership], None]) -> None:
        self._tree = tree
        self._on_departure = on_departure
        self._runs = runs

    def had(self, key: str, arrival: Arrival) -> bool:
        """Whether the thread was in a group of the workload at its last inspection."""
        listing = self._runs.of(key).listing
        thread = listing.threads.get(arrival.tid) if listing is not None else None
        return thread is not None and thread.start_time == arrival.start_time

    def inspect(self, workload: Workload, nested: frozenset[Membership] = frozenset()) -> Workload:
        """Return the workload with each group downgraded whose tasks were moved. Raises NoSuchGroup, NotMounted.

        ``nested`` are the groups of its nested workloads, in which tasks that its tasks have started belong.
        """
        run = self._runs.of(workload.key)
        before = run.listing
        now = Listing(boot_ticks())
        for group in workload.existing_groups:
            for tid in self._tree.tasks(group.ref):
                thread = before.threads.get(tid) if before is not None else None
                if thread is None:
                    found = processes.stat(tid)
                    if found is None:
                        continue
                    thread = ListedThread(processes.leader(tid), found.start_time, group.folder)
                    if self._was_moved_in(workload, group, tid, thread, before):
                        workload = downgraded_and_logged(workload, group, Quality.ESTIMATED, Reason.MOVED_IN.text())
                is_same = thread.folder == group.folder
                now.threads[tid] = thread if is_same else msgspec.structs.replace(thread, folder=group.folder)
        for folder in self._folders_left(workload, before, now, nested):
            group = workload.group(folder) or workload.first
            workload = downgraded_and_logged(workload, group, Quality.LATE, Reason.MOVED_OUT.text())
        run.listing = now
        return workload

    def _was_moved_in(
        self, workload: Workload, group: Group, tid: int, thread: ListedThread, before: Listing | None
    ) -> bool:
        """Whether a thread that is new in the group ran outside before, and the daemon did not move it."""
        start = thread.start_time
        if self._tree.own_writes.moved_since(tid, start):
            return False
        if before is not None:
            return start < before.at - _FORK_TICKS
        # After a restart the daemon's moves are not known, but it moves only the threads of members.
        if group.baseline is not Quality.EXACT or start >= group.created_ns * TICKS_PER_S // 10**9 - _FORK_TICKS:
            return False
        return all(
            member.pid != thread.pid and not (member.cgroup and cgroups.member_test(member.cgroup)(tid))
            for member in workload.members
        )

    def _folders_left(
        self, workload: Workload, before: Listing | None, now: Listing, nested: frozenset[Membership]
    ) -> set[str]:
        """Return the folders of the groups that a task has left: a task that was listed, or was forked there."""
        own = workload.memberships | nested

        def has_left(tid: int, start: int | None = None) -> bool:
            try:
                where = self._tree.membership(tid)
            except NoSuchProcess:
                return False
            # The kernel may have reset the membership of a thread that is exiting.
            if where in own or not processes.is_running(tid, start):
                return False
            self._on_departure(where)
            return True

        left = set()
        for tid, thread in (before.threads if before is not None else {}).items():
            was_moved_by_daemon = before is not None and self._tree.own_writes.moved_since(tid, before.at)
            if tid not in now.threads and not was_moved_by_daemon and has_left(tid, thread.start_time):
                left.add(thread.folder)
        # No task of an exact group has run outside, so each process that it has started began in the group.
        for group in workload.existing_groups:
            if group.baseline is Quality.EXACT and group.folder not in left:
                pids = {thread.pid for thread in now.threads.values() if thread.folder == group.folder}
                pids.update(
                    member.pid
                    for member in workload.living
                    if member.pid
                    and processes.is_same(member.pid, member.start_time)
                    and workload.group_of(member) == group
                )
                if any(tid not in now.threads and has_left(tid) for tid in _threads_below(pids)):
                    left.add(group.folder)
        return left


def _threads_below(pids: Iterable[int]) -> Iterator[int]:
    """Yield the threads of these processes and of their descendants."""
    found = dict.fromkeys(pids)
    waiting = list(found)
    for pid in waiting:
        yield from processes.threads(pid)
        children = [child for child in processes.children(pid) or [] if child not in found]
        found.update(dict.fromkeys(children))
        waiting += children
