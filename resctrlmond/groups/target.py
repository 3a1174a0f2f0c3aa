# SPDX-License-Identifier: Apache-2.0
"""What is to be put into a group: one process with its threads, or a control group with all below it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from resctrlmond.groups.errors import InvalidRequest
from resctrlmond.groups.record import Member
from resctrlmond.groups.times import utc_now
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NoSuchProcess, PermissionDenied
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import Moved, move_cgroup, move_process
from resctrlmond.resctrl.tree import GroupRef, Tree

# The class of the workload's first task, whichever that is.
FOLLOW = "follow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Everything that Assign may be told.

    Exactly one of ``pid`` and ``cgroup`` says what to move. ``own_cgroup`` is the control group that holds the
    process and nothing else, ``pod_cgroup`` the one whose going away ends the pod; "" where there is none.
    ``class_`` FOLLOW takes the class where the process is. ``may_wait``: without a free RMID the group is pending.
    """

    key: str
    owner: str
    pid: int | None = None
    cgroup: str | None = None
    class_: str = FOLLOW
    allow_class_change: bool = False
    take_over: bool = False
    member: str | None = None
    kind: str = "process"
    own_cgroup: str = ""
    pod_cgroup: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    may_wait: bool = True


class Target(Protocol):
    """Something that can be moved into a group."""

    def membership(self, tree: Tree) -> Membership | None:
        """Where its first task is; None if it has no task."""

    def move(self, tree: Tree, ref: GroupRef, *, take_over: bool, through_class: bool) -> Moved:
        """Move all its tasks; see resctrlmond.resctrl.tasks."""

    def member(self, assignment: Assignment) -> Member:
        """How the record notes it."""


@contextlib.contextmanager
def opened(assignment: Assignment) -> Iterator[Target]:
    """The target of an assignment, held for the time of the call.

    Raises InvalidRequest, NoSuchProcess, NoSuchCgroup, and PermissionDenied for what nobody may move.
    """
    if (assignment.pid is None) == (assignment.cgroup is None):
        raise InvalidRequest("Assign takes a pid or a control group, and exactly one of them")
    if assignment.cgroup is not None:
        yield _Cgroup(cgroups.check(assignment.cgroup))
        return
    assert assignment.pid is not None
    with Process.open(assignment.pid) as process:
        _refuse_the_host_itself(process)
        yield _Process(process)


def _refuse_the_host_itself(process: Process) -> None:
    if process.pid == 1:
        raise PermissionDenied("process 1 is the host's init, no workload")
    if process.is_kernel_thread:
        raise PermissionDenied(f"process {process.pid} is a kernel thread, no workload")
    if process.pid == os.getpid():
        raise PermissionDenied(f"process {process.pid} is resctrlmond itself")


class _Process:
    def __init__(self, process: Process) -> None:
        self._process = process

    def membership(self, tree: Tree) -> Membership:
        return tree.membership(self._process.pid)

    def move(self, tree: Tree, ref: GroupRef, *, take_over: bool, through_class: bool) -> Moved:
        return move_process(tree, self._process, ref, take_over=take_over, through_class=through_class)

    def member(self, assignment: Assignment) -> Member:
        return Member(
            id=assignment.member or f"pid-{self._process.pid}",
            kind=assignment.kind,
            owner=assignment.owner,
            pid=self._process.pid,
            start_time=self._process.start_time,
            cgroup=assignment.own_cgroup,
            started_at=utc_now(),
        )


class _Cgroup:
    def __init__(self, path: str) -> None:
        self._path = path

    def membership(self, tree: Tree) -> Membership | None:
        for tid in cgroups.tasks(self._path):
            try:
                return tree.membership(tid)
            except NoSuchProcess:
                continue
        return None

    def move(self, tree: Tree, ref: GroupRef, *, take_over: bool, through_class: bool) -> Moved:
        return move_cgroup(tree, self._path, ref, take_over=take_over, through_class=through_class)

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
