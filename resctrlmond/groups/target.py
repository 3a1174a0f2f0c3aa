# SPDX-License-Identifier: Apache-2.0
"""What is to be put into a group: one process with its threads, or a control group with all below it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from resctrlmond.groups.errors import AlreadyMonitored, InvalidRequest
from resctrlmond.groups.keys import check_word, valid_class
from resctrlmond.groups.record import EndRule, Member, Record
from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.errors import NoSuchProcess, PermissionDenied
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Descriptor, Process
from resctrlmond.resctrl.tasks import How, Moved, move_cgroup, move_process, move_tree
from resctrlmond.resctrl.tree import GroupRef, Tree

# The class of the workload's first task, whichever that is.
FOLLOW = "follow"

# include/linux/threads.h, PID_MAX_LIMIT on 64 bits.
MAX_PID = 1 << 22
# include/uapi/linux/limits.h, PATH_MAX with its NUL.
MAX_PATH_LENGTH = 4095


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Everything that Assign may be told.

    Exactly one of ``pid``, ``pidfd`` and ``cgroup`` says what to move. ``own_cgroup`` is the control group that holds
    the process and nothing else, ``pod_cgroup`` the one whose going away ends the pod; "" where there is none.
    ``late``: whether the process has run user code already; False is the caller's word that it has not, and None has
    it looked for, as it always is of a control group. ``is_awaited``: whether the caller, whose word that is, still
    waits for the answer, and so still holds the process. ``tree``: with a pid, all its descendants too.
    ``class_`` FOLLOW takes the class where the process is. ``may_wait``: without a free RMID the group is pending,
    and gets one in order of ``priority`` (None: as it is, at first 0). ``ends`` is the rule by which the claim of
    ``owner`` ends (None: EndRule.RELEASE for a new claim, unchanged for an existing one).
    ``is_from_runtime``: the caller is a hook, which cannot ask again with less: attributes over the limit are left
    out, and the room that is reserved for hooks is used.
    """

    key: str
    owner: str
    ends: EndRule | None = None
    pid: int | None = None
    pidfd: Descriptor | None = None
    cgroup: str | None = None
    class_: str = FOLLOW
    allow_class_change: bool = False
    take_over: bool = False
    member: str | None = None
    kind: str = "process"
    own_cgroup: str = ""
    late: bool | None = None
    is_awaited: Callable[[], bool] = field(default=lambda: True, compare=False)
    tree: bool = False
    pod_cgroup: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    may_wait: bool = True
    priority: int | None = None
    is_from_runtime: bool = False

    def class_for(self, where: Membership | None) -> str:
        """The class that the group is to be in, for a target that is there now. Raises InvalidClass."""
        if self.class_ != FOLLOW:
            return valid_class(self.class_)
        return where.class_ if where else ""


def check_free(record: Record | None, where: Membership | None, assignment: Assignment) -> None:
    """Raise AlreadyMonitored if the target is in another group than the ``record``'s, and is not to be taken over."""
    if where is None or not where.group or assignment.take_over:
        return
    if record is not None and any(
        (where.class_, where.group) == (group.ref.class_, group.ref.name) for group in record.groups
    ):
        return
    raise AlreadyMonitored(
        f"the task is already in the monitoring group {where.group!r} of class {where.class_ or '/'}",
        remedy="A task is in one group only. Use --take-over (takeOver) to take it out of that group",
    )


class Target(Protocol):
    """Something that can be moved into a group."""

    def membership(self) -> Membership | None:
        """Where its first task is; None if it has no task."""

    def tasks(self) -> list[int]:
        """Its thread ids now."""

    def cpu_time_ns(self) -> int | None:
        """At most so much CPU time (ns) its tasks have used; 0 if it is not known, None if they have never run."""

    def children(self) -> list[int]:
        """The processes of which it is the parent, as far as that is known without a look at every process."""

    def descendants(self) -> list[int]:
        """The processes that it has started and that are no part of it."""

    def move(self, ref: GroupRef, how: How) -> Moved:
        """Move all its tasks; see resctrlmond.resctrl.tasks."""

    def member(self, assignment: Assignment) -> Member:
        """How the record notes it."""


@contextlib.contextmanager
def opened(tree: Tree, assignment: Assignment) -> Iterator[Target]:
    """The target of an assignment, held for the time of the call.

    Raises InvalidRequest, NoSuchProcess, NoSuchCgroup, and PermissionDenied for what nobody may move.
    """
    if sum(one is not None for one in (assignment.pid, assignment.pidfd, assignment.cgroup)) != 1:
        raise InvalidRequest("Assign requires exactly one of pid, pidFd and cgroup")
    if assignment.cgroup is not None:
        if assignment.tree:
            raise InvalidRequest(
                "includeDescendants requires a process: a control group always includes all control groups below it"
            )
        check_word("cgroup", assignment.cgroup, MAX_PATH_LENGTH)
        yield _Cgroup(tree, cgroups.check(assignment.cgroup))
        return
    own = cgroups.check(assignment.own_cgroup) if assignment.own_cgroup else ""
    with _process(assignment) as process:
        _refuse_the_host_itself(process)
        if own and not cgroups.member_test(own)(process.pid):
            raise InvalidRequest(f"process {process.pid} is not in the control group of ownCgroup: {own}")
        yield _Process(tree, process, own, assignment.tree)


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


def _refuse_the_host_itself(process: Process) -> None:
    if process.pid == 1:
        raise PermissionDenied("process 1 is the init process of the host, not a workload")
    if process.is_kernel_thread:
        raise PermissionDenied(f"process {process.pid} is a kernel thread, not a workload")
    if process.pid == os.getpid():
        raise PermissionDenied(f"process {process.pid} is resctrlmond itself")


class _Process:
    def __init__(self, tree: Tree, process: Process, own_cgroup: str, with_descendants: bool) -> None:
        self._tree = tree
        self._process = process
        self._own_cgroup = own_cgroup
        self._with_descendants = with_descendants

    def membership(self) -> Membership:
        return self._tree.membership(self._process.pid)

    def tasks(self) -> list[int]:
        below = processes.descendants(self._process.pid) if self._with_descendants else []
        return self._process.threads() + [tid for pid in below for tid in processes.threads(pid)]

    def cpu_time_ns(self) -> int | None:
        below = processes.descendants(self._process.pid) if self._with_descendants else []
        used = [processes.cpu_time_ns(pid) for pid in (self._process.pid, *below)]
        return None if set(used) == {None} else sum(time or 0 for time in used)

    def children(self) -> list[int]:
        return processes.children(self._process.pid) or []

    def descendants(self) -> list[int]:
        # What is in its own control group is taken in by that.
        return [] if self._with_descendants or self._own_cgroup else processes.descendants(self._process.pid)

    def move(self, ref: GroupRef, how: How) -> Moved:
        move = move_tree if self._with_descendants else move_process
        return move(self._tree, self._process, ref, how)

    def member(self, assignment: Assignment) -> Member:
        return Member(
            id=assignment.member or f"pid-{self._process.pid}",
            kind=assignment.kind,
            owner=assignment.owner,
            pid=self._process.pid,
            start_time=self._process.start_time,
            cgroup=self._own_cgroup,
            started_at=utc_now(),
            late=self.cpu_time_ns() is not None if assignment.late is None else assignment.late,
            tree=self._with_descendants,
            init=processes.is_namespace_init(self._process.pid),
        )


class _Cgroup:
    def __init__(self, tree: Tree, path: str) -> None:
        self._tree = tree
        self._path = path

    def membership(self) -> Membership | None:
        for tid in cgroups.tasks(self._path):
            try:
                return self._tree.membership(tid)
            except NoSuchProcess:
                continue
        return None

    def tasks(self) -> list[int]:
        return cgroups.tasks(self._path)

    def cpu_time_ns(self) -> int | None:
        # What ran in it before and has ended is not of this workload.
        return cgroups.cpu_time_ns(self._path) or 0 if cgroups.is_populated(self._path) else None

    def children(self) -> list[int]:
        return []

    def descendants(self) -> list[int]:
        return []

    def move(self, ref: GroupRef, how: How) -> Moved:
        return move_cgroup(self._tree, self._path, ref, how)

    def member(self, assignment: Assignment) -> Member:
        # What is in a control group ran before it was assigned, and this is said.
        return Member(
            id=assignment.member or os.path.basename(self._path),
            kind=assignment.kind,
            owner=assignment.owner,
            cgroup=self._path,
            started_at=utc_now(),
            late=cgroups.is_populated(self._path),
        )
