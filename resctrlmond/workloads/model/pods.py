# SPDX-License-Identifier: Apache-2.0
"""Inventory of the pods that owners report, also of pods without a group. It is in memory: owners report again."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from resctrlmond.workloads.model.changes import ContainerState
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import InvalidRequest, LimitExceeded
from resctrlmond.workloads.model.reports import Report, ReportedContainer, Sandbox
from resctrlmond.workloads.model.validation import canonical_key, check_attributes, check_member_id, check_word

# Declared in a module that clients can import without this one.
__all__ = ["ContainerState", "Report", "ReportedContainer", "Sandbox"]

# Ten times the pods of a kubelet (--max-pods is 110; a replaced sandbox counts until its removal).
MAX_SANDBOXES = 2000
MAX_CONTAINERS = 1000
MAX_OWNERS = 16
# The size of all owners' sandboxes as JSON: 2,000 sandboxes with labels of 4 KiB each.
MAX_BYTES = 16 * 1024 * 1024


class ReportedSandbox(NamedTuple):
    """A reported sandbox, the key of its workload, and its size in bytes as JSON."""

    key: str
    sandbox: Sandbox
    size: int = 0


class Inventory:
    """The sandboxes that owners report, by owner and id. The methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandboxes: dict[str, dict[str, ReportedSandbox]] = {}
        self._at: dict[str, str] = {}

    def report(
        self, owner: str, sandboxes: Iterable[Sandbox] = (), *, removed: Iterable[str] = (), replace_all: bool = False
    ) -> int:
        """Add or replace these sandboxes of ``owner``, and drop those whose ids are in ``removed``.

        With ``replace_all``, all other sandboxes of the owner are dropped too. Returns the number of sandboxes that
        the owner has now. An error changes nothing. Raises InvalidRequest, InvalidKey, InvalidAttributes,
        LimitExceeded.
        """
        check_word("claim", owner)
        new = {
            sandbox.id: ReportedSandbox(_checked(sandbox), sandbox, len(msgspec.json.encode(sandbox)))
            for sandbox in sandboxes
        }
        forgotten = set(removed)
        with self._lock:
            before = {} if replace_all else self._sandboxes.get(owner, {})
            after = {name: one for name, one in {**before, **new}.items() if name not in forgotten}
            if len(after) > MAX_SANDBOXES:
                raise InvalidRequest(f"{len(after)} sandboxes are more than {MAX_SANDBOXES}")
            if owner not in self._sandboxes and len(self._sandboxes) >= MAX_OWNERS:
                raise InvalidRequest(f"{MAX_OWNERS} owners report pods already")
            others = [one for name, own in self._sandboxes.items() if name != owner for one in own.values()]
            size = sum(one.size for one in (*others, *after.values()))
            if size > MAX_BYTES:
                raise LimitExceeded(f"all sandboxes together would take {size} bytes, more than {MAX_BYTES}")
            self._sandboxes[owner] = after
            self._at[owner] = utc_now()
            return len(after)

    def all(self) -> tuple[list[ReportedSandbox], list[Report]]:
        """Return the sandboxes of all owners, and the time of each owner's last report."""
        with self._lock:
            sandboxes = [one for of_owner in self._sandboxes.values() for one in of_owner.values()]
            return sandboxes, [Report(owner, at) for owner, at in self._at.items()]


def _checked(sandbox: Sandbox) -> str:
    """Validate all texts of a sandbox, and return the key of its workload.

    Raises InvalidRequest, InvalidKey, InvalidAttributes.
    """
    check_member_id(sandbox.id)
    check_attributes(sandbox.labels)
    check_attributes({"name": sandbox.name, "namespace": sandbox.namespace, "reason": sandbox.reason or ""})
    if len(sandbox.containers) > MAX_CONTAINERS:
        raise InvalidRequest(f"sandbox {sandbox.id} has more than {MAX_CONTAINERS} containers")
    for container in sandbox.containers:
        check_member_id(container.id)
        check_attributes({"name": container.name, "reason": container.reason or ""})
    return canonical_key(sandbox.uid or sandbox.id)
