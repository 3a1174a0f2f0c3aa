# SPDX-License-Identifier: Apache-2.0
"""The verbs of all interfaces. Each is declared once: its request, its function, its reply and errors."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from resctrlmond import __version__
from resctrlmond.api import hooks, signatures, translate, types
from resctrlmond.api.access import Access, Caller, Policy, is_privileged
from resctrlmond.api.budget import ReplyBudget
from resctrlmond.api.errors import name_of
from resctrlmond.api.hook_queue import HookQueue
from resctrlmond.api.lists import MAX_LIST_BYTES, MAX_PAGES_BYTES, REPLY_BYTES, bounded, first_page, pages
from resctrlmond.api.oci import InvalidOciState
from resctrlmond.api.pods import pods_of
from resctrlmond.api.signatures import HOOK, MANAGER, UNIT, Signature
from resctrlmond.api.text import text
from resctrlmond.api.watches import Watches
from resctrlmond.api.workers import Lane, Workers
from resctrlmond.resctrl.cgroups import NoSuchCgroup
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    GroupExists,
    KernelRefused,
    MonitoringUnavailable,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    NotRead,
    OutOfResources,
    PermissionDenied,
    ProcessChanged,
    ResctrlError,
    RmidsExhausted,
)
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.caveats import lacking_sentence
from resctrlmond.workloads.groups import plan
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model import owners
from resctrlmond.workloads.model.clock import seconds_since_ns
from resctrlmond.workloads.model.errors import (
    AlreadyMonitored,
    ForeignGroup,
    InvalidAttributes,
    InvalidClass,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    NoSuchClaim,
    NoSuchWorkload,
    NotWatched,
    NotWritten,
    TooSlow,
)
from resctrlmond.workloads.model.states import FOLLOW, CallKind, NameKind, Quality
from resctrlmond.workloads.model.workload import EndRule, State, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member, remove_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import get, nested_totals, read
from resctrlmond.workloads.verbs.release import reconcile, release

P = ParamSpec("P")
T = TypeVar("T")

INTERFACES = {
    MANAGER: """
Monitoring groups of Linux resctrl on this host: one for each workload (a pod, container, service or command), kept as
long as the workload lives, with what it used.

Root may call every method. Root and the members of the groups resctrlmon and resctrlmon-read may call the methods
that only read.
Times are RFC 3339 in UTC. Values of counters are strings, exactly as the kernel wrote them. A field with "?" may be
absent.

Every error except InternalError has a message, which states what failed and why, and, if they are known, the path,
the name of the errno, the kernel's explanation from last_cmd_status (status), and what to do (remedy).
""",
    HOOK: """
The interface of the OCI hook, resctrlmon-oci-hook. Its errors are those of org.resctrlmon.Manager.
""",
    UNIT: """
The interface of resctrlmon-unit-exec, on a socket of its own. Its errors are those of org.resctrlmon.Manager.

Every user may call it.
""",
}

# The most concurrent calls of all readers, and of one reader's user. The lanes of these calls have four threads.
_READERS, _OF_ONE_READER = 3, 2


class Verb(msgspec.Struct, frozen=True):
    """A verb. ``run`` is the blocking call; it runs in a thread of ``lane``, for callers with ``access``.

    ``handle`` is a coroutine function in the place of ``run``, which it calls if needed.
    ``pages`` yields the reply in several parts, for calls with *more* over varlink. ``follow`` yields replies without
    end, in the event loop: such a verb is only for calls with *more*. ``errors`` are the errors of this verb other
    than ``COMMON_ERRORS``. ``description`` is for the interfaces and the manual page, in the markup of
    scdoc(5).
    """

    signature: Signature[Any, Any]
    lane: Lane
    access: Access
    run: Callable[[Manager, Any, Caller], types.Reply]
    pages: Callable[[Manager, Any], Iterator[types.Reply]] | None = None
    follow: Callable[[Service, Caller], AsyncGenerator[types.Reply, None]] | None = None
    handle: Callable[[Service, Caller], Awaitable[types.Reply]] | None = None
    errors: tuple[type[ResctrlError], ...] = ()
    description: str = ""

    @property
    def name(self) -> str:
        """Return the name without its interface."""
        return self.signature.name

    @property
    def full_name(self) -> str:
        """Return the name with its varlink interface."""
        return self.signature.full_name

    @property
    def interface(self) -> str:
        """Return the name of its varlink interface."""
        return self.signature.interface

    @property
    def request(self) -> type[types.Request]:
        """Return the type of its request."""
        request: type[types.Request] = self.signature.request
        return request

    @property
    def reply(self) -> type[types.Reply]:
        """Return the type of its reply."""
        reply: type[types.Reply] = self.signature.reply
        return reply

    @property
    def reply_bytes(self) -> int:
        """Return the bytes to reserve for the reply before the call; 0 for verbs that change something or follow."""
        if self.access is not Access.READ or self.follow:
            return 0
        return MAX_PAGES_BYTES if self.pages else MAX_LIST_BYTES


class Service:
    """Runs verbs for the interfaces: waits for a thread, and calls the function of the verb.

    Each interface checks the access of the caller, in one place (``varlink.connection.Connection._resolve`` and
    ``dbus.objects.Objects.resolve``), before it calls a method of this class.
    """

    def __init__(self, manager: Manager, policy: Policy, workers: Workers) -> None:
        self.manager = manager
        self.policy = policy
        self.workers = workers
        self.budget = ReplyBudget()
        self.hooks = HookQueue(
            lambda: manager.context.config.settings.hook_queue_timeout_s,
            on_end=partial(manager.latencies.add, CallKind.HOOK),
        )
        # Set by the daemon if it watches units: put the process of a caller into the workload of its unit.
        self.assign_unit: Callable[[Caller], Awaitable[Workload]] | None = None
        self.watches = Watches(manager.context, workers, partial(reported, manager))
        self._readers = asyncio.Semaphore(_READERS)
        # A semaphore exists as long as a call of its user runs.
        self._by_uid: weakref.WeakValueDictionary[int, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def call(self, verb: Verb, request: types.Request, caller: Caller) -> types.Reply:
        """Run a verb for a caller that may call it. Raises ResctrlError."""
        begun = time.monotonic()
        try:
            if verb.handle is not None:
                return await verb.handle(self, caller)
            return await self.run(caller, verb.lane, verb.run, self.manager, request, caller)
        finally:
            if verb.lane is not Lane.HOOKS:  # the queue counts these
                kind = CallKind.READ if verb.access is Access.READ else CallKind.CHANGE
                self.manager.latencies.add(kind, time.monotonic() - begun)

    def follow(self, verb: Verb, _request: types.Request, caller: Caller) -> AsyncGenerator[types.Reply, None]:
        """Run a verb that follows, for a caller that may call it: yield replies until it is closed."""
        assert verb.follow is not None
        return verb.follow(self, caller)

    async def stream(self, verb: Verb, request: types.Request, caller: Caller) -> AsyncGenerator[types.Reply, None]:
        """Run a verb that has pages for a caller that may call it, and yield the pages. Raises ResctrlError."""
        assert verb.pages is not None
        found = verb.pages(self.manager, request)
        while True:
            page = await self.run(caller, verb.lane, next, found, None)
            if page is None:
                return
            yield page

    async def run(self, caller: Caller, lane: Lane, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread of the lane. Raises its errors.

        Calls of readers wait: one thread stays free for root and one for other users.
        """
        if is_privileged(caller.uid):
            return await self.workers.run(lane, function, *args, **kwargs)
        async with self._by_uid.setdefault(caller.uid, asyncio.Semaphore(_OF_ONE_READER)), self._readers:
            return await self.workers.run(lane, function, *args, **kwargs)


def reported(manager: Manager, workload: Workload) -> types.Workload:
    """Convert a workload to the type of the interfaces, with its current path and snapshot."""
    ctx = manager.context
    path = ctx.tree.full_path(workload.first.ref) if workload.state.has_group else None
    snapshot, companion = ctx.snapshots.path_if_exists(workload.key), manager.companions.get(workload.key)
    return translate.workload_of(workload, path, snapshot, companion, manager.unit_memory.get(workload.key, ""))


def _owner(claim: str | None, caller: Caller, ends: EndRule | None = None, *, may_be_reserved: bool = False) -> str:
    """Return the owner of a claim.

    Raises InvalidRequest if the name is empty, or if it or the rule for the claim's end is reserved for the daemon.
    """
    if claim in owners.RESERVED_OWNERS and not may_be_reserved:
        raise InvalidRequest(f"the claim {claim} is reserved for resctrlmond", remedy="Choose another name")
    if claim == "":
        raise InvalidRequest("the claim has no name", remedy=f"Name its owner, or leave it out for uid:{caller.uid}")
    if ends is EndRule.TASKS:
        raise InvalidRequest(
            f"the rule {ends} is reserved for resctrlmond", remedy="Choose another rule for the claim's end"
        )
    return claim or f"uid:{caller.uid}"


def _create(manager: Manager, request: types.CreateRequest, caller: Caller) -> types.WorkloadReply:
    workload = create(
        manager.context,
        request.key,
        owner=_owner(request.claim, caller, request.end_rule),
        ends=request.end_rule,
        class_=FOLLOW if request.class_ is None else request.class_,
        attributes=request.attributes,
        may_wait=request.allow_pending is not False,
        priority=request.priority,
        facts=request.facts,
    )
    return types.WorkloadReply(workload=reported(manager, workload))


def _pidfd(request: types.AssignRequest, caller: Caller) -> Descriptor | None:
    """Return the pidfd of Assign, if it names one. Raises InvalidRequest if it did not come with the message."""
    if request.pid is not None:
        caller.check_pid(request.pid, remedy="Pass a pidfd in its place (pidFd)")
    if request.pid_fd is None:
        return None
    if not 0 <= request.pid_fd < len(caller.descriptors):
        raise InvalidRequest(
            f"there is no descriptor {request.pid_fd} for pidFd: {len(caller.descriptors)} came with the message",
            remedy="Pass a pidfd together with the message, and give its index, counted from 0",
        )
    return caller.descriptors[request.pid_fd]


def _assign(manager: Manager, request: types.AssignRequest, caller: Caller) -> types.AssignReply:
    done = assign(
        manager.context,
        Assignment(
            key=request.key,
            owner=_owner(request.claim, caller, request.end_rule),
            ends=request.end_rule,
            pid=request.pid,
            pidfd=_pidfd(request, caller),
            cgroup=request.cgroup,
            own_cgroup=request.own_cgroup or "",
            late=request.late,
            is_awaited=caller.waits,
            include_descendants=bool(request.include_descendants),
            class_=FOLLOW if request.class_ is None else request.class_,
            allow_class_change=bool(request.allow_class_change),
            take_over=bool(request.take_over),
            nested=bool(request.nested),
            member=request.member,
            kind=request.kind or "process",
            attributes=request.attributes or {},
            may_wait=request.allow_pending is not False,
            priority=request.priority,
            facts=request.facts,
            exposed=request.exposed or "",
        ),
    )
    return types.AssignReply(
        workload=reported(manager, done.workload),
        moved=done.moved.moved,
        passes=done.moved.passes,
        tasks_outside=done.moved.outside,
        descendants_outside=done.descendants_outside,
    )


def _release(manager: Manager, request: types.ReleaseRequest, caller: Caller) -> types.ReleaseReply:
    # Reserved names are accepted too, so that root can end a claim of the daemon.
    owner = _owner(request.claim, caller, may_be_reserved=True)
    done = release(manager.context, request.key, owner=owner, reason=request.reason or "released")
    return types.ReleaseReply(
        workload=reported(manager, done.workload),
        completed=done.completed,
        totals=[translate.total(total) for total in done.totals],
        nested=[translate.total(total) for total in done.nested] or None,
    )


def _add_member(manager: Manager, request: types.AddMemberRequest, caller: Caller) -> types.WorkloadReply:
    owner = _owner(request.claim, caller)
    workload = add_member(manager.context, request.key, request.member, owner=owner, kind=request.kind or "sandbox")
    return types.WorkloadReply(workload=reported(manager, workload))


def _remove_member(manager: Manager, request: types.RemoveMemberRequest, _caller: Caller) -> types.WorkloadReply:
    workload = remove_member(manager.context, request.key, request.member, reason=request.reason or "removed")
    return types.WorkloadReply(workload=reported(manager, workload))


def _expose(manager: Manager, request: types.ExposeRequest, _caller: Caller) -> types.ExposeReply:
    return types.ExposeReply(path=manager.exposures.expose(request.key, request.member, request.cgroup or ""))


def _reconcile(manager: Manager, request: types.ReconcileRequest, caller: Caller) -> types.ReconcileReply:
    done = reconcile(manager.context, _owner(request.claim, caller), request.keys)
    failures = [
        types.Failure(key=key, error=name_of(error).name, message=str(error)) for key, error in done.failures.items()
    ]
    return types.ReconcileReply(kept=done.kept, released=done.released, failures=failures)


def _move(manager: Manager, request: types.MoveRequest, _caller: Caller) -> types.WorkloadReply:
    return types.WorkloadReply(workload=reported(manager, move(manager.context, request.key, request.class_)))


def _list(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.ListReply:
    return types.ListReply(workloads=bounded(_workloads(manager)), foreign=_foreign(manager))


def _list_pages(manager: Manager, _request: types.NoParameters) -> Iterator[types.ListReply]:
    def page(workloads: list[types.Workload], is_first: bool) -> types.ListReply:
        return types.ListReply(workloads=workloads, foreign=_foreign(manager) if is_first else [])

    return pages(_workloads(manager), page)


def _workloads(manager: Manager) -> Iterator[types.Workload]:
    return (reported(manager, workload) for workload in manager.context.store.all())


def _foreign(manager: Manager) -> list[types.Foreign]:
    return [translate.foreign(found) for found in manager.watcher.look().foreign]


def _list_unwatched(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.ListUnwatchedReply:
    return types.ListUnwatchedReply(containers=bounded(map(translate.unwatched, manager.context.unwatched.all())))


def _report_pods(manager: Manager, request: types.ReportPodsRequest, caller: Caller) -> types.ReportPodsReply:
    count = manager.pods.report(
        _owner(request.claim, caller),
        request.sandboxes or (),
        removed=request.removed or (),
        replace_all=bool(request.replace_all),
    )
    return types.ReportPodsReply(count=count)


def _list_pods(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.ListPodsReply:
    sandboxes, reports = manager.pods.all()
    return types.ListPodsReply(pods=bounded(pods_of(sandboxes, list(_workloads(manager)))), reported=reports)


def _pod_pages(manager: Manager, _request: types.NoParameters) -> Iterator[types.ListPodsReply]:
    sandboxes, reports = manager.pods.all()

    def page(pods: list[types.Pod], is_first: bool) -> types.ListPodsReply:
        return types.ListPodsReply(pods=pods, reported=reports if is_first else [])

    return pages(pods_of(sandboxes, list(_workloads(manager))), page)


def _get(manager: Manager, request: types.KeyRequest, _caller: Caller) -> types.WorkloadReply:
    return types.WorkloadReply(workload=reported(manager, get(manager.context, request.key)))


def _read(manager: Manager, request: types.KeyRequest, _caller: Caller) -> types.ReadReply:
    workload, readings, totals = read(manager.context, request.key)
    return types.ReadReply(
        workload=reported(manager, workload),
        readings=[translate.reading(reading) for reading in readings],
        totals=[translate.total(total) for total in totals],
        domains=translate.domain_uses(totals, readings) or None,
        nested=[translate.total(total) for total in nested_totals(manager.context, workload, totals)] or None,
    )


def _read_all(manager: Manager, request: types.ReadAllRequest, _caller: Caller) -> types.ReadAllReply:
    found, has_more = first_page(_usages(manager, request), REPLY_BYTES)
    return types.ReadAllReply(usages=found, next=found[-1].workload.key if has_more else "")


def _read_all_pages(manager: Manager, request: types.ReadAllRequest) -> Iterator[types.ReadAllReply]:
    return pages(_usages(manager, request), lambda usages, _is_first: types.ReadAllReply(usages=usages))


def _usages(manager: Manager, request: types.ReadAllRequest) -> Iterator[types.Usage]:
    for usage in manager.usages.read_all(with_ended=bool(request.with_ended)):
        if request.after is None or usage.workload.key > request.after:
            yield translate.usage(usage, reported(manager, usage.workload), with_domains=bool(request.domains))


def _machine(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.MachineReply:
    found = manager.machine.get()
    return types.MachineReply(
        since=found.since, read_at=found.read_at, pools=list(map(translate.pool_use, found.pools))
    )


def _sums(manager: Manager, request: types.SumsRequest, _caller: Caller) -> types.SumsReply:
    found = manager.usages.read_sums(NameKind if request.by is None else [request.by])
    names = (translate.name_sums(grouping, of) for grouping, of_grouping in found.names.items() for of in of_grouping)
    return types.SumsReply(
        since=found.since,
        reset=found.reset or None,
        read_at=found.read_at,
        lost=found.lost,
        names=bounded(names),
    )


def _watch(_manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.WatchReply:
    raise InvalidRequest("Watch has several replies", remedy="Call it over varlink, with 'more'")


def _read_foreign(manager: Manager, request: types.ForeignRequest, _caller: Caller) -> types.ReadForeignReply:
    found, readings = manager.watcher.read_foreign(GroupRef(request.class_, request.name))
    return types.ReadForeignReply(
        foreign=translate.foreign(found), readings=[translate.reading(reading) for reading in readings]
    )


def _assign_self(_manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.AssignSelfReply:
    raise AssertionError("AssignSelf is not a blocking call")


async def _assign_unit(service: Service, caller: Caller) -> types.AssignSelfReply:
    if service.assign_unit is None:
        raise NotWatched("no systemd unit is watched", remedy="Select units: resctrlctl units enable '*.service'")
    workload = await service.assign_unit(caller)
    exact = workload.state.has_group and all(group.baseline is Quality.EXACT for group in workload.groups)
    return types.AssignSelfReply(key=workload.key, state=workload.state, exact=exact)


def _status(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.StatusReply:
    workloads = manager.context.store.all()
    waiting = plan.waiting(workloads)
    pending = sum(workload.state is State.PENDING for workload in workloads)
    # Only a failed request for an RMID shows whether RMIDs are in limbo.
    in_limbo = any(queued.group.in_limbo for queued in waiting) if waiting else None
    seen = manager.watcher.look()
    unmounted = str(seen.unmounted) if seen.unmounted else ""
    lacking = lacking_sentence(lacking.workload.key for lacking in plan.lacking_counters(workloads))
    inexact = f"no figure of this simulation is exact: {seen.inexact}" if seen.inexact else ""
    alerts = (*manager.alerts.values(), seen.hangs, unmounted, lacking, inexact)
    problems = [*manager.problems, *filter(None, alerts)]
    return types.StatusReply(
        version=__version__,
        mount=manager.context.tree.path,
        mounted=seen.unmounted is None,
        simulation=manager.context.tree.simulation,
        rmids=min((resource.rmids for resource in seen.capacity), default=0),
        rmids_used=seen.used,
        pending=pending,
        in_limbo=in_limbo,
        oldest_pending_ms=_oldest_pending_ms(workloads),
        groups=sum(workload.state.has_group for workload in workloads),
        foreign=[translate.foreign(found) for found in seen.foreign],
        classes=[text(class_) for class_ in seen.classes],
        capacity=[types.Capacity(resource=one.resource, rmids=one.rmids, events=one.events) for one in seen.capacity],
        bandwidth=translate.bandwidth(seen.bandwidth) if seen.bandwidth else None,
        latencies=tuple(translate.latencies(manager.latencies)),
        problems=problems,
    )


def _oldest_pending_ms(workloads: Iterable[Workload]) -> int | None:
    begun = [one.first.created_ns for one in workloads if one.state is State.PENDING and one.first.created_ns]
    return int(seconds_since_ns(min(begun)) * 1000) if begun else None


# The errors of every verb. InternalError, which is not raised, stands for every other exception.
COMMON_ERRORS: tuple[type[ResctrlError], ...] = (
    InvalidRequest,
    PermissionDenied,
    NotMounted,
    KernelRefused,
    OutOfResources,
    NotWritten,
    NotRead,
)
_CREATE_ERRORS: tuple[type[ResctrlError], ...] = (
    InvalidKey,
    InvalidClass,
    InvalidAttributes,
    LimitExceeded,
    NoSuchGroup,
    NoSuchClass,
    RmidsExhausted,
    MonitoringUnavailable,
    GroupExists,
    ForeignGroup,
    NotWatched,
)
_ASSIGN_ERRORS: tuple[type[ResctrlError], ...] = (
    *_CREATE_ERRORS,
    ClassMismatch,
    AlreadyMonitored,
    NoSuchCgroup,
    NoSuchProcess,
    ProcessChanged,
)

# To add a verb, add a row and a function here, its signature in signatures.py, its request and reply in types.py, and
# a function in workloads/verbs. "make interfaces" generates the rest.
_TABLE = (
    Verb(
        signatures.CREATE,
        Lane.CHANGE,
        Access.WRITE,
        _create,
        errors=_CREATE_ERRORS,
        description="""
Create a workload's monitoring group, without a task yet, and claim the workload. If the workload exists and has not
ended, only add the claim and the attributes; its group does not change.
""",
    ),
    Verb(
        signatures.ASSIGN,
        Lane.CHANGE,
        Access.WRITE,
        _assign,
        errors=_ASSIGN_ERRORS,
        description="""
Put a process with all its threads, or a control group with all control groups below it, into the workload's group,
and claim the workload. Exactly one of *pid*, *pidFd* and *cgroup* is required. If the workload does not exist, create
it, as *Create* does. The baseline is read before the first task joins.
""",
    ),
    Verb(
        signatures.RELEASE,
        Lane.CHANGE,
        Access.WRITE,
        _release,
        errors=(InvalidKey, NoSuchWorkload, NoSuchClaim),
        description="""
End an owner's claim. A workload ends with its last claim: the end values are read and written, the group is removed,
and its RMID becomes free. If the workload has already ended, return its totals again, for any *claim*.
""",
    ),
    Verb(
        signatures.ADD_MEMBER,
        Lane.CHANGE,
        Access.WRITE,
        _add_member,
        errors=(InvalidKey, LimitExceeded, NoSuchWorkload),
        description="""
Add a member that has no task of its own, such as a pod's sandbox, to an existing workload, and claim the
workload.
""",
    ),
    Verb(
        signatures.REMOVE_MEMBER,
        Lane.CHANGE,
        Access.WRITE,
        _remove_member,
        errors=(InvalidKey, NoSuchWorkload),
        description="""
Record that a member has ended. The daemon itself detects the end of a member that has tasks.
""",
    ),
    Verb(
        signatures.EXPOSE,
        Lane.RECORDS,
        Access.WRITE,
        _expose,
        errors=(InvalidKey, LimitExceeded),
        description="""
Create the directory with the figures of a workload for its containers, if there is none, and return its path. The
caller can then mount it into a container that is being created. The workload need not exist yet. See *expose* in
*resctrlmond-profiles*(5).
""",
    ),
    Verb(
        signatures.RECONCILE,
        Lane.CHANGE,
        Access.WRITE,
        _reconcile,
        errors=(InvalidKey,),
        description="""
End an owner's claims on all workloads except *keys*. Claims of other owners do not change. An owner that was not
running calls this method when it starts again.
""",
    ),
    Verb(
        signatures.MOVE,
        Lane.CHANGE,
        Access.WRITE,
        _move,
        errors=(
            InvalidKey,
            InvalidClass,
            NoSuchWorkload,
            NoSuchGroup,
            NoSuchClass,
            ClassMismatch,
            GroupExists,
            ForeignGroup,
        ),
        description="""
Move the whole group to another class. It keeps its RMID and its counters; its tasks change class. The error is
*ClassMismatch* if the workload has groups in several classes, or if it has tasks and the kernel cannot move groups
(before Linux 6.5).
""",
    ),
    Verb(
        signatures.REPORT_PODS,
        Lane.RECORDS,
        Access.WRITE,
        _report_pods,
        errors=(InvalidKey, InvalidAttributes, LimitExceeded),
        description="""
Report the pods that an owner knows, also those without a group, for *ListPods*. A report changes no group. Reports
are kept in memory only: an owner must report again after a restart of the daemon.
""",
    ),
    Verb(
        signatures.LIST,
        Lane.RECORDS,
        Access.READ,
        _list,
        _list_pages,
        errors=(LimitExceeded,),
        description="""
List all workloads, and the monitoring groups of other programs, without counters.

Over varlink, a call with *more* (*varlinkctl --more*) returns a list of any length, in several replies of about 256
KiB; *foreign* is in the first one. Without *more*, and over D-Bus, a list of more than 2 MiB fails with
*LimitExceeded*.
""",
    ),
    Verb(
        signatures.LIST_PODS,
        Lane.RECORDS,
        Access.READ,
        _list_pods,
        _pod_pages,
        errors=(LimitExceeded,),
        description="""
List all pods that an owner reported, and all other pods with a workload that has not ended. Long lists are returned
as by *List*, with *reported* in the first reply.
""",
    ),
    Verb(
        signatures.LIST_UNWATCHED,
        Lane.RECORDS,
        Access.READ,
        _list_unwatched,
        errors=(LimitExceeded,),
        description="""
List the containers and the units of systemd that run and are in no group because of their profiles. The daemon keeps
this list in memory only: after a restart, it has all units, and the containers that start, or that an owner assigns,
from then on.
""",
    ),
    Verb(
        signatures.GET,
        Lane.RECORDS,
        Access.READ,
        _get,
        errors=(InvalidKey, NoSuchWorkload),
        description="""
Return one workload.
""",
    ),
    Verb(
        signatures.READ,
        Lane.COUNTERS,
        Access.READ,
        _read,
        errors=(InvalidKey, NoSuchWorkload, NoSuchGroup),
        description="""
Return one workload with its current counters, and with what it used since its baseline.
""",
    ),
    Verb(
        signatures.READ_ALL,
        Lane.COUNTERS,
        Access.READ,
        _read_all,
        _read_all_pages,
        description="""
Return all workloads with what they used since their baselines. The counters are read at most every half second,
however many clients call this: *readAt* is the time of each reading.

Over varlink, a call with *more* (*varlinkctl --more*) returns all workloads in several replies of about 256 KiB.
Otherwise a reply has at most 512 KiB: if workloads are left, it has *next*, for *after* in the next call.
""",
    ),
    Verb(
        signatures.WATCH,
        Lane.RECORDS,
        Access.READ,
        _watch,
        follow=lambda service, caller: service.watches.stream(caller, service.run),
        errors=(LimitExceeded, TooSlow),
        description="""
List the workloads that have not ended, as _present_, and then report what happens to workloads, until the client
closes the connection. Call this with *more* (*varlinkctl --more*); D-Bus has signals instead.

The changes of one workload are in their order, and changes within 10 ms become one. But every run that ends is
reported, with its totals, also if several runs of a key end within that time. Counters are not read for this: call
*ReadAll* for the use of workloads that have not ended.

A client that does not read for long gets the error *TooSlow*, or its connection is closed.
""",
    ),
    Verb(
        signatures.MACHINE,
        Lane.COUNTERS,
        Access.READ,
        _machine,
        description="""
Return what the whole machine used since the daemon began to count, by pool: the groups of workloads, those of other
programs, and the tasks that are in no group. Nothing that the hardware counted is left out or counted twice; where
that cannot be shown, the quality is _estimated_. From the first call on, the counters continue over restarts and
kills of the daemon, and none falls while *since* stays the same. While no daemon runs, changes of other programs are
not seen: after a restart, the counters of their groups and of tasks in no group are _estimated_, and so is the pool
_uncore_, which is computed from them. The pool _tracked_ is _estimated_ if another program removed the group of a
workload, or may have removed it: after a kill during the removal of a group, the daemon cannot know whether it or
another program removed the group.
A reason for _estimated_ lasts until the pools begin again. The counters are read at most every half second, however
many clients call this.
""",
    ),
    Verb(
        signatures.SUMS,
        Lane.COUNTERS,
        Access.READ,
        _sums,
        errors=(LimitExceeded,),
        description="""
Return what all workloads used since the boot, by namespace, slice, user and profile: those that have ended, also
after their records and files are removed, and those that run until now. Each run is counted once, also after a kill
of the daemon. No number falls when a workload ends. The counters are read at most every half second, however many
clients call this.
""",
    ),
    Verb(
        signatures.READ_FOREIGN,
        Lane.COUNTERS,
        Access.READ,
        _read_foreign,
        errors=(InvalidClass, NoSuchGroup),
        description="""
Return a monitoring group of another program with its current counters. There are no totals, because its baseline is
not known.
""",
    ),
    Verb(
        signatures.STATUS,
        Lane.RECORDS,
        Access.READ,
        _status,
        description="""
Return the state of the daemon and of the machine.
""",
    ),
    Verb(
        signatures.RUN,
        Lane.HOOKS,
        Access.WRITE,
        hooks.run,
        errors=(InvalidOciState, *_ASSIGN_ERRORS),
        description="""
Handle one stage of a container's life, for *resctrlmon-oci-hook*(8).

If many containers start at once, a call has to wait. With *more*, it then gets a reply with *queueTimeoutMs* at once
and every 2 seconds, and the other fields in the last reply.
""",
    ),
    Verb(
        signatures.ASSIGN_SELF,
        Lane.COMMANDS,
        Access.SELF,
        _assign_self,
        handle=_assign_unit,
        errors=_ASSIGN_ERRORS,
        description="""
Put the calling process into the workload of its own systemd service, before it executes a command of the service,
for *resctrlmon-unit-exec*(8). The caller is the process that has connected. It must be the process that systemd has
started for the command, and *units* in *resctrlmond.yaml*(5) must select the service.

With *more*, the caller gets an empty reply at once and every half second until the last one.
""",
    ),
)
VERBS = {verb.name: verb for verb in _TABLE}
assert len(VERBS) == len(_TABLE)
