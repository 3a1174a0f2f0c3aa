# SPDX-License-Identifier: Apache-2.0
"""Find the workload whose group is in a directory, also if another program has just renamed it."""

from __future__ import annotations

from resctrlmond.resctrl.tree import Found, GroupRef
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.workload import Group, GroupState, Workload
from resctrlmond.workloads.records.store import Store


def owner_of(store: Store, mark: Mark, ref: GroupRef, found: Found | None) -> tuple[Workload, Group] | None:
    """Return the workload that is not finished whose group was found at a path, and the group.

    ``found`` is None if the directory was removed or renamed meanwhile: then the record decides. The cost grows with
    the workloads only if the group was renamed, or is being created.
    """
    workload = store.owner_of(ref)
    group = workload.group_at(ref) if workload is not None else None
    is_same = group and (found is None or group.observed or (found.gid, found.nonce) == (mark.gid, group.nonce))
    if workload is not None and group is not None and is_same:
        return workload, group
    if found is None or found.gid != mark.gid:
        return None
    groups = [(other, group) for other in store.unfinished() for group in other.groups if not group.state.is_over]
    for other, group in groups:
        # A new directory gets its nonce after its creation.
        if group.nonce == found.nonce or (group.state is GroupState.PENDING and group.ref == ref):
            return other, group
    return None
