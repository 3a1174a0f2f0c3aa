# SPDX-License-Identifier: Apache-2.0
"""Targets of an assignment: a process with its threads (and its descendants), or a control group with its subtree."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

import msgspec

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchProcess, PermissionDenied
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import CgroupTasks, ProcessTasks, Tasks
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.evidence.callers import is_about_to_call
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import AlreadyMonitored, ForeignGroup, InvalidRequest
from resctrlmond.workloads.model.owners import OF_UNITS, SYSTEMD
from resctrlmond.workloads.model.states import FOLLOW
from resctrlmond.workloads.model.validation import check_word
from resctrlmond.workloads.model.workload import Member, Workload
from resctrlmond.workloads.profiles.requests import Assignment, UnitCommand

# include/linux/threads.h, PID_MAX_LIMIT on 64 bits.
MAX_PID = 1 << 22
# include/uapi/linux/limits.h, PATH_MAX with its NUL.
MAX_PATH_LENGTH = 4095


def check_free(workload: Workload | None, where: Membership | None, assignment: Assignment) -> None:
    """Raise AlreadyMonitored if the target is in a group of another workload and the assignment has no take-over.

    Raises ForeignGroup if the workload is observed.
    """
    if workload is not None and workload.is_observed:
        raise only_observed(workload)
    if where is None or not where.group or assignment.take_over:
        return
    here = GroupRef(where.class_, where.group)
    if workload is not None and any(group.ref == here for group in workload.groups):
        return
    raise already_monitored(where)


def only_observed(workload: Workload) -> ForeignGroup:
    """Return the error for a change of a workload whose group is of another program."""
    return ForeignGroup(
        f"the group of {workload.key} belongs to another program, and is only observed",
        remedy="Use another key, or have the program that created the group change it",
    )


def already_monitored(where: Membership) -> AlreadyMonitored:
    """Return the error for a task that is in a group of another workload or program."""
    return AlreadyMonitored(
        f"the task is already in the monitoring group {where.group!r} of class {where.class_ or '/'}",
        remedy="A task is in one group only. Use --take-over (takeOver) to take it out of that group",
    )


class Target(Protocol):
    """The process or control group of an assignment."""

    @property
    def tasks(self) -> Tasks:
        """Its threads, to be moved."""

    @property
    def process(self) -> Process | None:
        """The process, held by its pidfd; None for a control group."""

    def membership(self) -> Membership | None:
        """Return the class and the group of the first task; None if the target has no task."""

    def cpu_time_ns(self) -> int | None:
        """Return an upper bound of the CPU time (ns) used so far; 0 if unknown, None if the tasks have never run."""

    def children(self) -> list[int]:
        """Return the child processes, [] if finding them would need a scan of all processes."""

    def descendants(self) -> list[int]:
        """Return the descendant processes that are not part of the target."""

    def member(self, assignment: Assignment) -> Member:
        """Return the member that the assignment adds to the workload."""


@contextlib.contextmanager
def opened(tree: Tree, assignment: Assignment) -> Iterator[Target]:
    """Open the target of an assignment. A process is held by a pidfd within the context.

    Raises InvalidRequest, NoSuchProcess, NoSuchCgroup. Raises PermissionDenied for process 1, kernel threads and the
    daemon itself.
    """
    if sum(one is not None for one in (assignment.pid, assignment.pidfd, assignment.cgroup)) != 1:
        raise InvalidRequest("Assign requires exactly one of pid, pidFd and cgroup")
    if assignment.cgroup is not None:
        if assignment.include_descendants:
            raise InvalidRequest(
                "includeDescendants requires a process: a control group always includes all control groups below it"
            )
        check_word("cgroup", assignment.cgroup, MAX_PATH_LENGTH)
        yield _Cgroup(tree, CgroupTasks(cgroups.check(assignment.cgroup)))
        return
    own = assignment.own_cgroup
    if own and not assignment.is_from_runtime:
        own = cgroups.check(own)
    with _process(assignment) as process:
        if process.pid == 1:
            raise PermissionDenied("process 1 is the init process of the host, not a workload")
        if process.is_kernel_thread:
            raise PermissionDenied(f"process {process.pid} is a kernel thread, not a workload")
        if process.pid == os.getpid():
            raise PermissionDenied(f"process {process.pid} is resctrlmond itself")
        # A runtime that waits for its hook keeps the process, so the number has been that of the same process.
        is_known = not own or (assignment.is_from_runtime and assignment.is_awaited())
        if not is_known and not cgroups.member_test(own)(process.pid):
            raise InvalidRequest(f"process {process.pid} is not in the control group of ownCgroup: {own}")
        if assignment.unit_command is not None:
            command = assignment.unit_command
            yield _UnitCommand(tree, process, own, ProcessTasks(process), command)
            return
        yield _Process(tree, process, own, ProcessTasks(process, assignment.include_descendants))


def _process(assignment: Assignment) -> Process:
    if assignment.pidfd is not None:
        try:
            return Process.of_pidfd(assignment.pidfd)
        except ValueError as error:
            raise InvalidRequest(f"the descriptor that was passed cannot be used: {error}") from error
    assert assignment.pid is not None
    if assignment.pid > MAX_PID:
        raise NoSuchProcess(f"there is no process {assignment.pid}: the largest process id is {MAX_PID}")
    return Process.open(assignment.pid)


class _Process(msgspec.Struct, frozen=True):
    _tree: Tree
    process: Process
    _own_cgroup: str
    tasks: ProcessTasks

    def membership(self) -> Membership:
        return self._tree.membership(self.process.pid)

    def cpu_time_ns(self) -> int | None:
        below = processes.descendants(self.process.pid) if self.tasks.with_descendants else []
        used = [processes.cpu_time_ns(pid) for pid in (self.process.pid, *below)]
        return None if set(used) == {None} else sum(time or 0 for time in used)

    def children(self) -> list[int]:
        # This list, which not every kernel has, may lack a child if another one ends, so it only shows that there are
        # some.
        has_none = processes.children(self.process.pid) == []
        return [] if has_none else processes.certain_children(self.process.pid)

    def descendants(self) -> list[int]:
        # Descendants in the process's own control group are found by that control group.
        return [] if self.tasks.with_descendants or self._own_cgroup else processes.descendants(self.process.pid)

    def member(self, assignment: Assignment) -> Member:
        return Member(
            id=assignment.member or f"pid-{self.process.pid}",
            kind=assignment.kind,
            owner=assignment.owner,
            pid=self.process.pid,
            start_time=self.process.start_time,
            cgroup=self._own_cgroup,
            started_at=utc_now(),
            late=self.cpu_time_ns() is not None if assignment.late is None else assignment.late,
            include_descendants=self.tasks.with_descendants,
            init=processes.is_namespace_init(self.process.pid),
            profile=assignment.choice.name if assignment.choice else "",
            profile_source=assignment.choice.source if assignment.choice else "",
        )


class _UnitCommand(msgspec.Struct, frozen=True):
    """The process of a service's command, as a part of the control group of the service."""

    _tree: Tree
    process: Process
    _cgroup: str
    tasks: ProcessTasks
    _command: UnitCommand

    def membership(self) -> Membership:
        return self._tree.membership(self.process.pid)

    def cpu_time_ns(self) -> int:
        # With what the process itself used, which is systemd's code before the command.
        return cgroups.cpu_time_ns(self._cgroup) or 0

    def children(self) -> list[int]:
        # All other tasks of the service, because none of them may be outside.
        held = processes.threads(self.process.pid)
        others = [tid for tid in cgroups.tasks(self._cgroup) if tid not in held]
        return [tid for tid in others if not is_about_to_call(tid)]

    def descendants(self) -> list[int]:
        return []  # they are in the control group

    def member(self, assignment: Assignment) -> Member:
        return Member(
            id=assignment.member or assignment.key,
            kind=assignment.kind,
            owner=assignment.owner,
            cgroup=self._cgroup,
            started_at=utc_now(),
            late=bool(assignment.late),
            profile=assignment.choice.name if assignment.choice else "",
            profile_source=assignment.choice.source if assignment.choice else "",
            keeps_class=assignment.class_ != FOLLOW,
            commands=self._command.commands,
        )


class _Cgroup(msgspec.Struct, frozen=True):
    _tree: Tree
    tasks: CgroupTasks
    process: None = None

    def membership(self) -> Membership | None:
        for tid in cgroups.tasks(self.tasks.path):
            try:
                return self._tree.membership(tid)
            except NoSuchProcess:
                continue
        return None

    def cpu_time_ns(self) -> int | None:
        # Without tasks, the CPU time is that of earlier processes, which are not part of this workload.
        return cgroups.cpu_time_ns(self.tasks.path) or 0 if cgroups.is_populated(self.tasks.path) else None

    def children(self) -> list[int]:
        return []

    def descendants(self) -> list[int]:
        return []

    def member(self, assignment: Assignment) -> Member:
        # Tasks of a control group ran before the assignment. Those of a unit may have ended meanwhile.
        return Member(
            id=assignment.member or os.path.basename(self.tasks.path),
            kind=assignment.kind,
            owner=assignment.owner,
            cgroup=self.tasks.path,
            started_at=utc_now(),
            late=assignment.owner in OF_UNITS or cgroups.is_populated(self.tasks.path),
            profile=assignment.choice.name if assignment.choice else "",
            profile_source=assignment.choice.source if assignment.choice else "",
            keeps_class=assignment.owner == SYSTEMD and assignment.class_ != FOLLOW,
        )
