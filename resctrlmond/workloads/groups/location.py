# SPDX-License-Identifier: Apache-2.0
"""Find a group's directory, wherever another program renamed it to, and keep its record and its links in step."""

from __future__ import annotations

import logging
from collections.abc import Callable

from resctrlmond.resctrl.errors import (
    NoSuchGroup,
    NotMounted,
    printable,
)
from resctrlmond.resctrl.tree import Found, GroupRef
from resctrlmond.workloads.groups.context import Context
from resctrlmond.workloads.model.errors import InvalidClass, NotWritten
from resctrlmond.workloads.model.validation import valid_class
from resctrlmond.workloads.model.workload import Group, Workload, replace
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)


def is_recorded(ctx: Context, found: Found) -> bool:
    others = [other for workload in ctx.store.unfinished() for other in workload.existing_groups]
    return any(other.ref == found.ref or other.nonce == found.nonce for other in others)


def find(ctx: Context, key: str, group: Group) -> Found:
    """Find the directory of a group of the workload by mark and nonce, also if another program renamed it.

    Raises NoSuchGroup.
    """
    # Before the group: if a mount comes in between, the group is not found on it.
    mounting = ctx.tree.mounting()
    found = ctx.tree.find(group.ref)
    if found is None or not _is_of(ctx, key, group, found):
        ctx.tree.check_mounted()
        # A group that was removed with its mount is nowhere, and an observed one is known by its path. The whole tree
        # is searched only if another group is missing.
        scanned = [] if group.observed or went_with_mount(ctx, key, group) else ctx.tree.scan()
        renamed = next((other for other in scanned if _is_of(ctx, key, group, other)), None)
        if renamed is None:
            raise NoSuchGroup(_why_gone(ctx, key, group, found), path=ctx.tree.full_path(group.ref))
        found = renamed
    ctx.runs.of(key).of_group(group).mounted_on = mounting
    return found


def _is_of(ctx: Context, key: str, group: Group, found: Found) -> bool:
    if group.observed:
        # Inodes repeat after a mount: the runtime may have created a group there for another start of the container.
        is_there = (found.ref, found.inode) == (group.ref, group.nonce) and not went_with_mount(ctx, key, group)
        return is_there and found.gid != ctx.mark.gid
    return found.gid == ctx.mark.gid and found.nonce == group.nonce


def find_or_none(ctx: Context, key: str, group: Group) -> Found | None:
    try:
        return find(ctx, key, group)
    except (NoSuchGroup, NotMounted):
        return None


def went_with_mount(ctx: Context, key: str, group: Group) -> bool:
    """Whether the mount on which the group was found last is gone, so that no program removed the group itself."""
    mounted_on = ctx.runs.of(key).of_group(group).mounted_on
    return mounted_on is not None and mounted_on != ctx.tree.mounting()


def _why_gone(ctx: Context, key: str, group: Group, instead: Found | None) -> str:
    if went_with_mount(ctx, key, group):
        return "resctrl was unmounted and mounted again, which removed every group"
    if instead is not None:
        return "another group is in its place"
    if group.observed:
        return "the program that owns the group removed it before the last reading"
    return "the group was removed by another program"


def follow(ctx: Context, txn: Transaction) -> Workload:
    """Find all groups of the workload, and record those that another program renamed. Raises NoSuchGroup.

    One group that is gone is enough: the totals would lack what it counted. NotWritten is raised after all groups
    were found, and their paths are kept in memory: a start finds a group by its nonce.
    """
    unsaved = None
    for group in txn.workload.existing_groups:
        try:
            follow_group(ctx, txn, group)
        except NotWritten as error:
            unsaved = error
    check_whole(txn.workload)
    if unsaved is not None:
        raise unsaved
    return txn.workload


def follow_group(ctx: Context, txn: Transaction, group: Group) -> Group:
    """Find the group, and record its new path if another program renamed it. Raises NoSuchGroup, NotWritten."""
    found = find(ctx, txn.key, group)
    if found.ref == group.ref:
        return group
    if not _is_recordable(found.ref):
        # A record with this name could not be read back.
        ctx.tree.rename(found.ref, group.ref)
        log.warning("%s: another program renamed its group to %s; renamed back", txn.key, printable(found.ref.path))
        return group
    path = printable(found.ref.path)
    log.info("%s: another program renamed its group to %s, and the workload continues in it", txn.key, path)
    # Another program has renamed it already, so the path is kept in memory if it cannot be written.
    return relocated(ctx, txn.workload, group, found.ref, txn.restore)


def relocated(
    ctx: Context, workload: Workload, group: Group, ref: GroupRef, save: Callable[[Workload], Workload]
) -> Group:
    """Save the workload with its group at another path, by ``Transaction.save`` or ``Transaction.restore``."""
    group = replace(group, class_=ref.class_, name=ref.name)
    try:
        relink(ctx, workload, group)
    finally:
        # Also if the links cannot be changed: a group that is not at the path in its record would count as lost.
        group = save(workload.with_group(group)).group(group.folder) or group
    return group


def relink(ctx: Context, workload: Workload, group: Group) -> None:
    """Point the links of the group's snapshot at its directory. Raises NotWritten, NotRead."""
    state = ctx.runs.of(workload.key).of_group(group)
    state.has_stale_links = True
    ctx.snapshots.relink(workload.subfolder(group), ctx.tree.full_path(group.ref), workload.shows)
    state.has_stale_links = False


def relink_stale(ctx: Context, workload: Workload) -> None:
    """Repeat each ``relink`` of the workload's groups that failed. Raises NotWritten, NotRead."""
    for group in workload.existing_groups:
        if ctx.runs.of(workload.key).of_group(group).has_stale_links:
            relink(ctx, workload, group)


def _is_recordable(ref: GroupRef) -> bool:
    try:
        return bool(valid_class(ref.name)) and valid_class(ref.class_) == ref.class_
    except InvalidClass:
        return False


def check_whole(workload: Workload) -> None:
    if workload.has_ended_further_group:
        raise NoSuchGroup("the group was removed by another program in one of its classes")
