# SPDX-License-Identifier: Apache-2.0
"""Record findings of the watch of systemd's units about exact services."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NoSuchProcess
from resctrlmond.workloads.groups import placement
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key
from resctrlmond.workloads.model.workload import Workload, replace


def downgrade(ctx: Context, key: str, member: str, quality: Quality, reasons: Iterable[str]) -> Workload | None:
    """Give the group of a member no better a baseline than ``quality``; return None if the run has ended."""
    with ctx.store.transaction(canonical_key(key)) as txn:
        workload = txn.find()
        found = workload.member(member) if workload is not None else None
        if workload is None or found is None or workload.state.is_over:
            return None
        for why in reasons:
            workload = workload.downgraded(workload.group_of(found), quality, why)
        return txn.save(workload)


def has_exact_service(ctx: Context) -> bool:
    """Return whether a service of which all commands have called is exact so far."""
    services = (one for one in ctx.store.unfinished() if any(member.commands for member in one.members))
    return any(service.worst_baseline is Quality.EXACT for service in services)


def find_leavers(ctx: Context, inner: str) -> None:
    """Search the exact services that have started tasks of a control group, which systemd names ``inner``.

    The tasks have left their service, whose group counts them until the search. Raises NotRead.
    """
    keys, path = set(), cgroups.path_of(inner) if inner.strip("/") else ""
    for tid in cgroups.tasks(path) if path else ():
        with contextlib.suppress(NoSuchProcess):
            keys.add(ctx.take_over.exact_service_at(ctx.tree.membership(tid)))
    for key in sorted(keys - {""}):
        with ctx.store.transaction(key) as txn:
            placement.sweep(ctx, txn)


def note_commands(ctx: Context, key: str, member: str, until_us: int) -> None:
    """Record until when all commands of a service are known (``Member.known_until_us``)."""
    with ctx.store.transaction(canonical_key(key)) as txn:
        workload = txn.find()
        found = workload.member(member) if workload is not None else None
        if workload is not None and found is not None and not workload.state.is_over:
            txn.save(workload.with_member(replace(found, known_until_us=until_us)))
