# SPDX-License-Identifier: Apache-2.0
"""Apply the profile of a container, or of a unit, to its assignment: its group, its class and its priority."""

from __future__ import annotations

import dataclasses
import logging
from typing import NoReturn, TypeGuard

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.service.rate_limit import RateLimit
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import NotWatched
from resctrlmond.workloads.model.owners import OCI, SYSTEMD
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.states import FOLLOW
from resctrlmond.workloads.model.validation import attribute_value, canonical_key, is_own_key, is_pod_uid
from resctrlmond.workloads.model.workload import EndRule, Workload
from resctrlmond.workloads.profiles.profile import Choice, Watch, select, select_for_pod, select_for_unit, user_of
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.profiles.unwatched import UnwatchedContainer
from resctrlmond.workloads.verbs.excluded import by_profile, mark_excluded

log = logging.getLogger(__name__)
# A container that crashes in a loop repeats its message each time.
log.addFilter(RateLimit())

_MAX_NAME = 256
_REMEDY = "See resctrlmond-profiles(5)"


def choose_for_pod(ctx: Context, key: str, owner: str, facts: Facts | None) -> Choice | None:
    """Return the profile of a pod that has no container yet; None for no selection.

    Raises NotWatched if the pod has no group of its own.
    """
    if facts is None or not ctx.config.profiles.by_name:
        return None
    choice = select_for_pod(ctx.config.profiles, facts, owner=owner)
    _warn_of_unknown(key, choice)
    if choice.watch is not Watch.POD:
        raise NotWatched(_why(choice), remedy=_REMEDY)
    return choice


def choose_for_unit(ctx: Context, key: str, path: str) -> Choice:
    """Return the profile of a unit with that control group: of one that has a workload, the profile of that.

    A profile with Watch.NONE applies to a unit with a workload too.
    """
    if not ctx.config.profiles.by_name:
        return Choice()
    inner = cgroups.below_mount(path)
    choice = select_for_unit(ctx.config.profiles, key, cgroup=inner, user=user_of(inner))
    workload = ctx.store.get(key)
    if choice.watch is Watch.NONE or not _is_running_unit(workload):
        return choice
    return Choice(ctx.config.profile_of(workload), workload.profile_source)


def leave_out_unit(ctx: Context, key: str, path: str, choice: Choice) -> str:
    """Record that a unit is in no group because of its profile; return the reason."""
    reason = _why(choice)
    unit = UnwatchedContainer(
        id=key,
        name="",
        pod="",
        profile=choice.name,
        source=choice.source,
        reason=reason,
        since=utc_now(),
        cgroup=path,
        is_unit=True,
    )
    ctx.unwatched.add(unit)
    return reason


def with_profile(ctx: Context, assignment: Assignment) -> Assignment:
    """Return the assignment with the group, the class and the priority of the profile of the container, or unit.

    A member that runs already keeps its profile. Raises NotWatched if the container is in no group.
    """
    if assignment.owner == SYSTEMD:
        return _with_profile_of_unit(ctx, assignment)
    facts, profiles, member = assignment.facts, ctx.config.profiles, assignment.member
    if facts is None or member is None:
        return assignment
    key = canonical_key(assignment.key)
    pod = "" if is_own_key(key, member) else key
    if pod and _runs_in(ctx, assignment, member):
        return _with_own_group(assignment, facts)
    if not profiles.by_name or _runs_in(ctx, assignment, key):
        return assignment
    choice = of_pod = select(profiles, facts, owner=assignment.owner, cgroup=_cgroup(assignment))
    if pod:
        of_pod = select_for_pod(profiles, facts, owner=assignment.owner)
        if assignment.kind == "sandbox":
            choice = of_pod
    _warn_of_unknown(member, choice)
    assignment = dataclasses.replace(assignment, choice=choice, choice_of_workload=of_pod)
    # An id in the form of a pod's UID would be the key of a pod.
    has_own_group = bool(pod) and choice.watch is Watch.CONTAINER and not is_pod_uid(member)
    if pod and (has_own_group or choice.watch is Watch.NONE):
        # First, so that a daemon that is killed in between leaves no exact pod that lacks the container.
        with ctx.store.transaction(pod) as txn:
            mark_excluded(ctx, txn, by_profile(member, choice.name))
    if choice.watch is Watch.NONE or (has_own_group and assignment.kind == "sandbox"):
        _leave_out(ctx, assignment, choice, facts, pod)
    if has_own_group:
        assignment = _with_own_group(assignment, facts)
    return _with_class(ctx, _with_priority(ctx, assignment))


def _with_profile_of_unit(ctx: Context, assignment: Assignment) -> Assignment:
    """Return the assignment with the class of the unit's profile. A workload that is not over keeps its profile."""
    workload = ctx.store.get(canonical_key(assignment.key))
    if not _is_running_unit(workload):
        assignment = dataclasses.replace(assignment, choice_of_workload=assignment.choice)
        # A container in a slice could be moved to the class before its runtime calls the hook.
        return assignment if assignment.key.endswith(".slice") else _with_class(ctx, assignment)
    known = workload.member(assignment.member or "")
    if known is None or not known.keeps_class:
        return assignment
    return dataclasses.replace(assignment, class_=workload.group_of(known).class_, allow_class_change=True)


def _is_running_unit(workload: Workload | None) -> TypeGuard[Workload]:
    return workload is not None and not workload.state.is_over and workload.is_claimed_by(SYSTEMD)


def warn_of_class(assignment: Assignment, why: str) -> None:
    """Log that a container, or a unit, stays in its class, although its profile names another one."""
    log.warning(
        "%s %s stays in its class, although its profile %s names the class %s: %s",
        "unit" if assignment.owner == SYSTEMD else "container",
        assignment.member,
        assignment.choice.name if assignment.choice else "",
        assignment.class_ or "/",
        why,
    )


def priority_of(ctx: Context, key: str, choice: Choice | None) -> int | None:
    """Return the priority for a workload without a run; None for no change."""
    workload = ctx.store.get(key)
    if choice is None or choice.profile is None or (workload is not None and not workload.state.is_over):
        return None
    return choice.profile.priority


def _runs_in(ctx: Context, assignment: Assignment, key: str) -> bool:
    """Whether this very process or control group is a living member of the workload with that key."""
    workload = ctx.store.get(key)
    if workload is None or workload.is_observed or assignment.member is None:
        return False
    known = workload.member(assignment.member)
    if known is None or not known.is_living:
        return False
    return known.pid == assignment.pid if assignment.pid else known.cgroup == assignment.cgroup


def _with_own_group(assignment: Assignment, facts: Facts) -> Assignment:
    """Return the assignment to a workload of the container alone.

    The claim is the daemon's: the caller ends those of its own that it does not know (Reconcile).
    """
    assert assignment.member is not None
    named = {"pod.uid": canonical_key(assignment.key)}
    if facts.container:
        named["container.name"] = attribute_value(facts.container)
    return dataclasses.replace(
        assignment,
        key=assignment.member,
        owner=OCI,
        ends=EndRule.CONTAINER,
        pod_cgroup="",
        attributes={**assignment.attributes, **named},
        choice_of_workload=assignment.choice,
    )


def _with_priority(ctx: Context, assignment: Assignment) -> Assignment:
    if assignment.priority is not None:
        return assignment
    priority = priority_of(ctx, canonical_key(assignment.key), assignment.choice_of_workload)
    return dataclasses.replace(assignment, priority=priority)


def _with_class(ctx: Context, assignment: Assignment) -> Assignment:
    profile = assignment.choice.profile if assignment.choice else None
    if profile is None or profile.class_ is None or assignment.class_ != FOLLOW:
        return assignment
    named = dataclasses.replace(assignment, class_=profile.class_, allow_class_change=True)
    if ctx.tree.has_class(profile.class_):
        return named
    warn_of_class(named, "there is no such class")
    return assignment


def _leave_out(ctx: Context, assignment: Assignment, choice: Choice, facts: Facts, pod: str) -> NoReturn:
    """Record that a container is in no group. Raises NotWatched."""
    reason = _why(choice)
    found = processes.stat(assignment.pid) if assignment.pid else None
    ctx.unwatched.add(
        UnwatchedContainer(
            id=assignment.member or "",
            name=attribute_value(facts.container)[:_MAX_NAME],
            pod=pod,
            profile=choice.name,
            source=choice.source,
            reason=reason,
            since=utc_now(),
            pid=assignment.pid or 0,
            start_time=found.start_time if found else 0,
            cgroup=assignment.cgroup or "",
        )
    )
    raise NotWatched(reason, remedy=_REMEDY)


def _why(choice: Choice) -> str:
    of_pod = choice.watch is Watch.CONTAINER
    text = "only the containers of the pod have groups" if of_pod else "it is in no group"
    return f"{text}, because of its profile {choice.name} ({choice.source})"


def _warn_of_unknown(name: str, choice: Choice) -> None:
    if choice.unknown:
        profile = f"profile {choice.name}" if choice.profile else "no profile"
        log.warning("%s: %s: the default applies (%s)", name, choice.unknown, profile)


def _cgroup(assignment: Assignment) -> str:
    """Return the control group of the container, below the mount point. Raises NoSuchProcess, NotRead."""
    path = assignment.cgroup or assignment.own_cgroup
    if not path and assignment.pid:
        path = cgroups.cgroup_of(assignment.pid)
    return cgroups.below_mount(path) if path else ""
