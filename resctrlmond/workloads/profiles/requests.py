# SPDX-License-Identifier: Apache-2.0
"""The requests and replies of the verbs, if they are more than a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.resctrl.tasks import Moved
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.states import FOLLOW
from resctrlmond.workloads.model.workload import EndRule, Workload
from resctrlmond.workloads.profiles.profile import Choice


class UnitCommand(msgspec.Struct, frozen=True):
    """The command of a service that the process of an Assign is about to execute.

    ``commands`` are those of ``Member`` with it. What the process has used until then is not missing, if it is at
    most ``most_before_ns`` (CPU time in ns), with that of its children, which it says was ``children_ns``.
    """

    commands: tuple[str, ...]
    most_before_ns: int = 0
    children_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The request of Assign.

    Exactly one of ``pid``, ``pidfd`` and ``cgroup`` is given. ``own_cgroup`` is the control group that holds the
    process and nothing else, ``pod_cgroup`` the one whose removal ends the pod; "" if there is none. ``sandbox`` is
    the id of the container that keeps the namespaces of the pod, "" if it is not known. ``late``: whether the process
    has executed user code. False is the caller's statement that it has not; with None, and for each control group,
    the daemon finds out. ``is_awaited`` returns whether the caller still waits for the reply, and
    so still holds the process. ``include_descendants``: with a pid, also all its descendants. ``class_`` FOLLOW takes
    the class where the process is. ``may_wait``: if no RMID is free, the group is pending, and gets one in the order
    of ``priority`` (None: unchanged, 0 at first). ``ends`` is the rule by which the claim of ``owner`` ends (None:
    EndRule.RELEASE for a new claim, unchanged for an existing one). ``is_from_runtime``: the caller is a hook, which
    cannot repeat the request with less: attributes over the limit are left out, and the reserve of records is used.
    Its ``own_cgroup`` is what the kernel states for the process. ``nested``: if the process is in the group of
    another workload, the new workload begins inside that one, which does not become late by that.
    ``unit_command``: the process is held before a command of a service, and the member is the control group of the
    service, which ``own_cgroup`` names. ``facts`` are those by which a profile is selected,
    None for no selection; ``choice`` is then the profile of the container, and ``choice_of_workload`` that of its
    pod. ``exposed``: see ``Member.exposed``.
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
    include_descendants: bool = False
    pod_cgroup: str = ""
    sandbox: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    may_wait: bool = True
    priority: int | None = None
    is_from_runtime: bool = False
    nested: bool = False
    unit_command: UnitCommand | None = None
    facts: Facts | None = None
    choice: Choice | None = None
    choice_of_workload: Choice | None = None
    exposed: str = ""


class Assigned(msgspec.Struct, frozen=True):
    """The reply of Assign. ``descendants_outside`` counts the processes below the target that stayed outside."""

    workload: Workload
    moved: Moved
    descendants_outside: int = 0


class Released(msgspec.Struct, frozen=True):
    """The reply of Release: ``completed`` if that was the last claim, and the totals so far.

    ``nested`` are those of the nested workloads, which ``totals`` lack.
    """

    workload: Workload
    completed: bool
    totals: list[Total]
    nested: list[Total]


class Reconciled(msgspec.Struct, frozen=True):
    """The reply of Reconcile: the keys whose claims were kept and released; ``failures`` by key."""

    kept: list[str]
    released: list[str]
    failures: dict[str, ResctrlError]
