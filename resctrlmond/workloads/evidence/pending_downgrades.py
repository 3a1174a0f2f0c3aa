# SPDX-License-Identifier: Apache-2.0
"""Downgrades of groups that are not saved yet, because a call may have locked the workload."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

from resctrlmond.workloads.figures import caveats
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Group, Workload, replace
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

# The nonces of groups, by the key of their workload.
Groups = Mapping[str, frozenset[int]]
# The quality, its reason, and the events; none for all.
_Downgrade = tuple[Quality, str, tuple[str, ...]]


class PendingDowngrades:
    """The downgrades by workload and nonce. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._pending: dict[str, dict[int, set[_Downgrade]]] = {}

    @property
    def keys(self) -> list[str]:
        """The workloads with pending downgrades."""
        return list(self._pending)

    def add(
        self, groups: Groups, why: str, quality: Quality = Quality.ESTIMATED, events: tuple[str, ...] = ()
    ) -> None:
        """Add a downgrade of groups, or of these events of them."""
        with self._guard:
            for key, nonces in groups.items():
                for nonce in nonces:
                    self._pending.setdefault(key, {}).setdefault(nonce, set()).add((quality, why, events))

    def reasons(self, key: str, nonce: int) -> set[str]:
        """Return the reasons for which a group has pending downgrades."""
        with self._guard:
            return {why for _, why, _ in self._pending.get(key, {}).get(nonce, ())}

    def save(self, txn: Transaction) -> None:
        """Save the downgrades of the workload. If that fails, they stay pending."""
        with self._guard:
            pending = self._pending.pop(txn.key, {})
        try:
            workload = txn.workload
            for group in workload.groups:
                for quality, why, events in sorted(pending.get(group.nonce, ())):
                    if events:
                        workload = _with_caveats(workload, group, events, why)
                    else:
                        workload = downgraded_and_logged(workload, group, quality, why)
            txn.save(workload)
        except Exception:
            with self._guard:
                kept = self._pending.setdefault(txn.key, {})
                for nonce, downgrades in pending.items():
                    kept.setdefault(nonce, set()).update(downgrades)
            raise

    def forget(self, key: str) -> None:
        """Drop the downgrades of a workload that has ended."""
        with self._guard:
            self._pending.pop(key, None)


def downgraded_and_logged(workload: Workload, group: Group, quality: Quality, reason: str) -> Workload:
    """Return the workload with the group's quality lowered, and log the reason if it is new."""
    worse = workload.downgraded(group, quality, reason)
    if worse != workload:
        log.warning("%s: %s", workload.key, reason)
    return worse


def _with_caveats(workload: Workload, group: Group, events: Iterable[str], why: str) -> Workload:
    """Return the workload with a caveat of a group for these events, and log it if it is new."""
    now = workload.group(group.folder) or group
    found = now.caveats
    for name in events:
        found = caveats.with_reason(found, name, why)
    if found == now.caveats:
        return workload
    log.warning("%s: %s", workload.key, why)
    return workload.with_group(replace(now, caveats=found))
