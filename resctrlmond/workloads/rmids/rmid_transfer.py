# SPDX-License-Identifier: Apache-2.0
"""Take the RMID of a systemd unit for a workload of a higher priority that waits for one.

The run of the unit ends as by a release: its end values are written before its group is removed. The unit waits for
another RMID then, at its own priority. Only workloads that the watch of units claims alone give up their RMIDs, and
only to a strictly higher priority, so two units of the same priority never take from one another.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from resctrlmond.resctrl import cgroups, tasks
from resctrlmond.resctrl.errors import (
    NoSuchGroup,
    NotMounted,
    RmidsExhausted,
)
from resctrlmond.workloads.groups import creation, removal
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.groups.queue_order import InWorkload
from resctrlmond.workloads.groups.runs import wait_again
from resctrlmond.workloads.groups.units import is_overflow, is_unit
from resctrlmond.workloads.model.clock import boot_ns, seconds_since_ns
from resctrlmond.workloads.model.workload import State, Workload

log = logging.getLogger(__name__)

# For how long a unit keeps an RMID at least, so that workloads that start and end do not cut its run to pieces.
MIN_RUN_S = 30.0
# For how long a group waits while RMIDs are in limbo: one of them most often becomes free within some seconds.
LIMBO_S = 5.0
# For how long an RMID that was taken, and that no waiting group has got yet, keeps another one from being taken.
UNUSED_S = 60.0


def used(ctx: Context) -> None:
    """Record that a waiting group got an RMID, which may be one that was taken for it."""
    del ctx.memory.taken_ns[:1]


def take(ctx: Context, queue: Iterable[InWorkload], guard: Callable[[str], AbstractContextManager[None]]) -> None:
    """End the run of one unit, if the first group of the ``queue`` was refused an RMID, and has a higher priority.

    The RMID of the unit is in limbo then, and the first group in the queue gets it as soon as the kernel frees it.
    One unit at most is ended by each call, and none while the RMIDs that were taken before suffice, or if the first
    group would have to leave the RMID to others. ``guard`` handles the errors of one workload, by its key.
    """
    groups = [queued for queued in queue if not queued.group.observed]
    taken = ctx.memory.taken_ns
    taken[:] = [then for then in taken if seconds_since_ns(then) < UNUSED_S]
    if not groups or _is_freed_soon(groups[0]):
        return
    kept = creation.kept_from(ctx, groups[0].workload)
    if kept and ctx.tree.free_rmids() < kept:
        return  # the RMID would be kept for others
    for victim in _victims(ctx, groups[0].workload.priority):
        if sum(queued.workload.priority > victim.priority for queued in groups) <= len(taken):
            return
        with guard(victim.key), ctx.store.transaction_if_free(victim.key) as txn:
            workload = txn.find() if txn is not None else None
            if txn is None or workload is None or not _may_yield(workload, groups[0].workload.priority):
                continue
            to = groups[0].workload.key
            log.info(
                "%s: its RMID is for %s, which has a higher priority (%d)", txn.key, to, groups[0].workload.priority
            )
            taken.append(boot_ns())
            before = txn.workload
            removal.finish(
                ctx,
                txn,
                f"its RMID was needed for {to}, which has a higher priority",
                take_out=functools.partial(_take_out, ctx),
            )
            wait_again(ctx, txn, before, _refused(ctx, before, to))
        return


def _take_out(ctx: Context, workload: Workload) -> None:
    """Move all tasks out of the groups, each to no group of its class, before the end values are read.

    What a task uses between that reading and the removal of the group would be in no pool of the machine.
    """
    for group in workload.existing_groups:
        with contextlib.suppress(NoSuchGroup, NotMounted):  # its loss is recorded by the end of the run
            tasks.empty(ctx.tree, group.ref)


def _is_freed_soon(queued: InWorkload) -> bool:
    return queued.group.in_limbo and seconds_since_ns(queued.group.created_ns) < LIMBO_S


def _victims(ctx: Context, priority: int) -> list[Workload]:
    """Return the units that may give up their RMIDs to that priority: of the lowest one, and the least used first."""
    found = [workload for workload in ctx.store.unfinished() if _may_yield(workload, priority)]
    lowest = min((workload.priority for workload in found), default=0)
    return sorted((one for one in found if one.priority == lowest), key=lambda one: (_cpu_share(one), one.key))


def _may_yield(workload: Workload, priority: int) -> bool:
    is_running = workload.state in (State.ACTIVE, State.IDLE)
    is_settled = seconds_since_ns(workload.first.created_ns) >= MIN_RUN_S
    is_own = is_unit(workload) and not is_overflow(workload)
    return is_running and is_settled and workload.priority < priority and is_own


def _cpu_share(workload: Workload) -> float:
    """Return the CPU time that the unit has used per second of its run; -1 if no task runs in it."""
    if workload.state is State.IDLE:
        return -1.0
    used_ns = 0
    for member in workload.living:
        now = cgroups.cpu_time_ns(member.cgroup) if member.cgroup else None
        used_ns += max((now or 0) - member.cpu_time_before_ns, 0)
    return used_ns / 1e9 / max(seconds_since_ns(workload.first.created_ns), 1.0)


def _refused(ctx: Context, workload: Workload, to: str) -> RmidsExhausted:
    return RmidsExhausted(
        f"cannot keep the monitoring group: its RMID was needed for {to}, which has a higher priority",
        path=ctx.tree.full_path(workload.first.ref),
        remedy="It gets the next free RMID of its priority. To prevent this, watch fewer systemd units, or give it a "
        "higher priority in a profile",
    )
