# SPDX-License-Identifier: Apache-2.0
"""The function of each verb: from its request to its reply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resctrlmond import __version__
from resctrlmond.api import translate, types
from resctrlmond.api.access import Caller
from resctrlmond.api.errors import name_of
from resctrlmond.api.lists import REPLY_BYTES, bounded, first_page, pages
from resctrlmond.api.pods import pods_of
from resctrlmond.api.service import Service, reported
from resctrlmond.api.text import text
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.caveats import lacking_sentence
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import queue_order
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model import owners
from resctrlmond.workloads.model.clock import boot_ns, seconds_since_ns
from resctrlmond.workloads.model.errors import InvalidRequest, NotWatched
from resctrlmond.workloads.model.states import FOLLOW, NameKind, Quality
from resctrlmond.workloads.model.workload import EndRule, State, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member, remove_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import nested_totals, read, with_proofs
from resctrlmond.workloads.verbs.release import reconcile, release


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


def run_create(manager: Manager, request: types.CreateRequest, caller: Caller) -> types.WorkloadReply:
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


def run_assign(manager: Manager, request: types.AssignRequest, caller: Caller) -> types.AssignReply:
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


def run_release(manager: Manager, request: types.ReleaseRequest, caller: Caller) -> types.ReleaseReply:
    # Reserved names are accepted too, so that root can end a claim of the daemon.
    owner = _owner(request.claim, caller, may_be_reserved=True)
    done = release(manager.context, request.key, owner=owner, reason=request.reason or "released")
    return types.ReleaseReply(
        workload=reported(manager, done.workload),
        completed=done.completed,
        totals=[translate.total(total) for total in done.totals],
        nested=[translate.total(total) for total in done.nested] or None,
    )


def run_add_member(manager: Manager, request: types.AddMemberRequest, caller: Caller) -> types.WorkloadReply:
    owner = _owner(request.claim, caller)
    workload = add_member(manager.context, request.key, request.member, owner=owner, kind=request.kind or "sandbox")
    return types.WorkloadReply(workload=reported(manager, workload))


def run_remove_member(manager: Manager, request: types.RemoveMemberRequest, _caller: Caller) -> types.WorkloadReply:
    workload = remove_member(manager.context, request.key, request.member, reason=request.reason or "removed")
    return types.WorkloadReply(workload=reported(manager, workload))


def run_expose(manager: Manager, request: types.ExposeRequest, _caller: Caller) -> types.ExposeReply:
    return types.ExposeReply(path=manager.exposures.expose(request.key, request.member, request.cgroup or ""))


def run_reconcile(manager: Manager, request: types.ReconcileRequest, caller: Caller) -> types.ReconcileReply:
    done = reconcile(manager.context, _owner(request.claim, caller), request.keys)
    failures = [
        types.Failure(key=key, error=name_of(error).name, message=str(error)) for key, error in done.failures.items()
    ]
    return types.ReconcileReply(kept=done.kept, released=done.released, failures=failures)


def run_move(manager: Manager, request: types.MoveRequest, _caller: Caller) -> types.WorkloadReply:
    return types.WorkloadReply(workload=reported(manager, move(manager.context, request.key, request.class_)))


def run_list(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.ListReply:
    return types.ListReply(workloads=bounded(_workloads(manager)), foreign=_foreign(manager))


def list_pages(manager: Manager, _request: types.NoParameters) -> Iterator[types.ListReply]:
    def page(workloads: list[types.Workload], is_first: bool) -> types.ListReply:
        return types.ListReply(workloads=workloads, foreign=_foreign(manager) if is_first else [])

    return pages(_workloads(manager), page)


def _workloads(manager: Manager) -> Iterator[types.Workload]:
    return (reported(manager, workload) for workload in manager.context.store.all())


def _foreign(manager: Manager) -> list[types.Foreign]:
    return [translate.foreign(found) for found in manager.watcher.look().foreign]


def run_list_unwatched(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.ListUnwatchedReply:
    return types.ListUnwatchedReply(containers=bounded(map(translate.unwatched, manager.context.unwatched.all())))


def run_report_pods(manager: Manager, request: types.ReportPodsRequest, caller: Caller) -> types.ReportPodsReply:
    count = manager.pods.report(
        _owner(request.claim, caller),
        request.sandboxes or (),
        removed=request.removed or (),
        replace_all=bool(request.replace_all),
    )
    return types.ReportPodsReply(count=count)


def run_list_pods(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.ListPodsReply:
    sandboxes, reports = manager.pods.all()
    return types.ListPodsReply(pods=bounded(pods_of(sandboxes, list(_workloads(manager)))), reported=reports)


def pod_pages(manager: Manager, _request: types.NoParameters) -> Iterator[types.ListPodsReply]:
    sandboxes, reports = manager.pods.all()

    def page(pods: list[types.Pod], is_first: bool) -> types.ListPodsReply:
        return types.ListPodsReply(pods=pods, reported=reports if is_first else [])

    return pages(pods_of(sandboxes, list(_workloads(manager))), page)


def run_get(manager: Manager, request: types.KeyRequest, _caller: Caller) -> types.GetReply:
    workload, proofs = with_proofs(manager.context, request.key)
    return types.GetReply(workload=reported(manager, workload), proofs=list(map(translate.proof, proofs)))


def run_read(manager: Manager, request: types.KeyRequest, _caller: Caller) -> types.ReadReply:
    workload, readings, totals = read(manager.context, request.key)
    read_ns = boot_ns() if workload.existing_groups else workload.first.completed_ns
    return types.ReadReply(
        workload=reported(manager, workload),
        read_ns=read_ns or None,
        readings=[translate.reading(reading) for reading in readings],
        totals=[translate.total(total) for total in totals],
        domains=translate.domain_uses(totals, readings) or None,
        nested=[translate.total(total) for total in nested_totals(manager.context, workload, totals)] or None,
    )


def run_read_all(manager: Manager, request: types.ReadAllRequest, _caller: Caller) -> types.ReadAllReply:
    found, has_more = first_page(_usages(manager, request), REPLY_BYTES)
    return types.ReadAllReply(usages=found, next=found[-1].workload.key if has_more else "")


def read_all_pages(manager: Manager, request: types.ReadAllRequest) -> Iterator[types.ReadAllReply]:
    return pages(_usages(manager, request), lambda usages, _is_first: types.ReadAllReply(usages=usages))


def _usages(manager: Manager, request: types.ReadAllRequest) -> Iterator[types.Usage]:
    for usage in manager.usages.read_all(with_ended=bool(request.with_ended)):
        if request.after is None or usage.workload.key > request.after:
            yield translate.usage(usage, reported(manager, usage.workload), with_domains=bool(request.domains))


def run_machine(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.MachineReply:
    found = manager.machine.get()
    return types.MachineReply(
        since=found.since, read_at=found.read_at, pools=list(map(translate.pool_use, found.pools))
    )


def run_sums(manager: Manager, request: types.SumsRequest, _caller: Caller) -> types.SumsReply:
    found = manager.usages.read_sums(NameKind if request.by is None else [request.by])
    names = (translate.name_sums(grouping, of) for grouping, of_grouping in found.names.items() for of in of_grouping)
    return types.SumsReply(
        since=found.since,
        reset=found.reset or None,
        read_at=found.read_at,
        lost=found.lost,
        names=bounded(names),
    )


def run_watch(_manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.WatchReply:
    raise InvalidRequest("Watch has several replies", remedy="Call it over varlink, with 'more'")


def run_read_foreign(manager: Manager, request: types.ForeignRequest, _caller: Caller) -> types.ReadForeignReply:
    found, readings = manager.watcher.read_foreign(GroupRef(request.class_, request.name))
    return types.ReadForeignReply(
        foreign=translate.foreign(found), readings=[translate.reading(reading) for reading in readings]
    )


def run_assign_self(_manager: Manager, _request: types.AssignSelfRequest, _caller: Caller) -> types.AssignSelfReply:
    raise AssertionError("AssignSelf is not a blocking call")


async def assign_unit(service: Service, request: types.AssignSelfRequest, caller: Caller) -> types.AssignSelfReply:
    if service.assign_unit is None:
        raise NotWatched("no systemd unit is watched", remedy="Select units: resctrlctl units enable '*.service'")
    workload = await service.assign_unit(caller, (request.children_us or 0) * 1000)
    exact = workload.state.has_group and baseline_of(workload) is Quality.EXACT
    return types.AssignSelfReply(key=workload.key, state=workload.state, exact=exact)


def run_status(manager: Manager, _request: types.NoParameters, _caller: Caller) -> types.StatusReply:
    workloads = manager.context.store.all()
    waiting = queue_order.waiting(workloads)
    pending = sum(workload.state is State.PENDING for workload in workloads)
    # Only a failed request for an RMID shows whether RMIDs are in limbo.
    in_limbo = any(queued.group.in_limbo for queued in waiting) if waiting else None
    seen = manager.watcher.look()
    unmounted = str(seen.unmounted) if seen.unmounted else ""
    lacking = lacking_sentence(lacking.workload.key for lacking in queue_order.lacking_counters(workloads))
    inexact = f"no figure of this simulation is exact: {seen.inexact}" if seen.inexact else ""
    mode = seen.bandwidth.kernel_mode if seen.bandwidth else ""
    why = Reason.KERNEL_WORK.text(cause=f"info/kernel_mode is {mode}")
    of_kernel = f"no total is exact: {why}" if mode else ""
    alerts = (*manager.alerts.values(), seen.hangs, unmounted, lacking, inexact, of_kernel, seen.unwitnessed)
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
