# SPDX-License-Identifier: Apache-2.0
"""The verbs Release and Reconcile: end the claims of an owner."""

from __future__ import annotations

from collections.abc import Iterable

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.groups import ends, placement, removal
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import NoSuchClaim, NoSuchWorkload
from resctrlmond.workloads.model.validation import canonical_key, reason_text
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.profiles.requests import Reconciled, Released
from resctrlmond.workloads.records.totals import shown
from resctrlmond.workloads.verbs.read import current_totals, nested_totals


def release(
    ctx: Context,
    key: str,
    *,
    owner: str,
    reason: str = "released",
    commands: frozenset[str] | None = None,
    has_ended: bool = True,
) -> Released:
    """End ``owner``'s claim. The workload ends with its last claim. Return the totals, also if it was over.

    A service of which other ``commands`` are known by now (``Member.commands``) keeps its claim: it was started
    again. ``has_ended``: the unit has ended, not only the watch of it.

    Raises NoSuchWorkload, and NoSuchClaim if the workload is not over and ``owner`` has no claim on it.
    """
    key = canonical_key(key)
    with ctx.store.transaction(key) as txn:
        workload = txn.workload
        is_over = workload.state.is_over
        if not is_over and not workload.is_claimed_by(owner) and workload.claims:
            owners = ", ".join(claim.owner for claim in workload.claims)
            raise NoSuchClaim(f"{owner} has no claim on {key}", remedy=f"It is claimed by {owners}")
        member = workload.member(key)
        if commands is not None and member is not None and commands != frozenset(member.commands):
            pass  # processes of the next start are in the group
        elif workload.is_interrupted or (not is_over and workload.without_claim(owner).claims):
            txn.save(removal.without_claim(workload, owner))
        elif workload.state is State.ENDING:
            ends.finish_again(ctx, txn)
        elif not is_over:
            if txn.workload.part_of or not txn.workload.proof.cgroups:
                # Tasks in its groups return to the workload around it, and others are not seen by the witness.
                placement.sweep(ctx, txn)
            # The last claim is removed by the write that records the end: a daemon that is killed after it
            # completes this end, and one that is killed before it has not begun.
            removal.finish(ctx, txn, reason_text(reason), without_claims=[owner], has_ended=has_ended)
        workload = txn.workload
        totals = shown(workload, current_totals(ctx, workload))
        released = Released(workload, workload.state.is_over, totals, nested_totals(ctx, workload, totals))
    if released.completed:
        # Before the next group is created, because the kernel would give it the counters that became free.
        ctx.callbacks.serve_counters()
    return released


def reconcile(ctx: Context, owner: str, keys: Iterable[str]) -> Reconciled:
    """End ``owner``'s claims on all workloads but ``keys``. The claims of other owners are not changed."""
    failures: dict[str, ResctrlError] = {}
    living = set()
    for key in keys:
        try:
            living.add(canonical_key(key))
        except ResctrlError as error:
            failures[key] = error
    kept, released = [], []
    for workload in ctx.store.all():
        if not workload.is_claimed_by(owner):
            continue
        if workload.key in living:
            kept.append(workload.key)
            continue
        try:
            release(ctx, workload.key, owner=owner, reason="not in its owner's Reconcile list")
            released.append(workload.key)
        except ResctrlError as error:
            failures[workload.key] = error
    for key in sorted(living.difference(kept)):
        missing = NoSuchClaim if ctx.store.get(key) else NoSuchWorkload
        failures[key] = missing(f"{owner} has no claim on {key}", remedy="Create or assign it")
    return Reconciled(kept, released, failures)
