# SPDX-License-Identifier: Apache-2.0
"""Doubts about groups that are not saved yet, because a call may have locked the workload."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from resctrlmond.workloads.figures.reasons import text_of
from resctrlmond.workloads.model.workload import Doubt, Group, Workload
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

# The nonces of groups, by the key of their workload.
Groups = Mapping[str, frozenset[int]]
# Doubts by the nonce of the group.
Doubts = Mapping[int, Sequence[Doubt]]


class PendingDoubts:
    """The doubts by workload and nonce. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._pending: dict[str, dict[int, list[Doubt]]] = {}

    @property
    def keys(self) -> list[str]:
        """The workloads with pending doubts."""
        return list(self._pending)

    def add(self, groups: Groups, doubt: Doubt) -> None:
        """Add a doubt about groups."""
        with self._guard:
            for key, nonces in groups.items():
                for nonce in nonces:
                    known = self._pending.setdefault(key, {}).setdefault(nonce, [])
                    if doubt not in known:
                        known.append(doubt)

    def of(self, key: str) -> Doubts:
        """Return the doubts about a workload that may not be in its record yet."""
        with self._guard:
            return {nonce: tuple(found) for nonce, found in self._pending.get(key, {}).items()}

    def save(self, txn: Transaction) -> None:
        """Save the doubts about the workload. They stay pending until the record has them."""
        pending, workload = self.of(txn.key), txn.workload
        for group in workload.groups:
            workload = doubted_and_logged(workload, group, *pending.get(group.nonce, ()))
        txn.save(workload)
        with self._guard:
            left = {
                nonce: [doubt for doubt in doubts if doubt not in pending.get(nonce, ())]
                for nonce, doubts in self._pending.pop(txn.key, {}).items()
            }
            if any(left.values()):
                self._pending[txn.key] = left

    def forget(self, key: str) -> None:
        """Drop the doubts about a workload that has ended."""
        with self._guard:
            self._pending.pop(key, None)


def with_doubts(workload: Workload, doubts: Doubts) -> Workload:
    """Return the workload with these doubts."""
    for group in workload.groups:
        workload = workload.doubted(group, *doubts.get(group.nonce, ()))
    return workload


def doubted_and_logged(workload: Workload, group: Group, *doubts: Doubt) -> Workload:
    """Return the workload with doubts about the group, and log each that is new."""
    for doubt in doubts:
        worse = workload.doubted(group, doubt)
        if worse != workload:
            log.warning("%s: %s", workload.key, text_of(doubt))
        workload = worse
    return workload
