# SPDX-License-Identifier: Apache-2.0
"""Doubts about groups that are not saved yet, because a call may have locked the workload."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from resctrlmond.workloads.figures.reasons import text_of
from resctrlmond.workloads.model.workload import Doubt, Group, Workload
from resctrlmond.workloads.records.store import Transaction

log = logging.getLogger(__name__)

# The nonces of groups, by the key of their workload.
Groups = Mapping[str, frozenset[int]]


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

    def of(self, key: str, nonce: int) -> list[Doubt]:
        """Return the pending doubts about a group."""
        with self._guard:
            return list(self._pending.get(key, {}).get(nonce, ()))

    def save(self, txn: Transaction) -> None:
        """Save the doubts about the workload. If that fails, they stay pending."""
        with self._guard:
            pending = self._pending.pop(txn.key, {})
        try:
            workload = txn.workload
            for group in workload.groups:
                workload = doubted_and_logged(workload, group, *pending.get(group.nonce, ()))
            txn.save(workload)
        except Exception:
            for nonce, doubts in pending.items():
                for doubt in doubts:
                    self.add({txn.key: frozenset({nonce})}, doubt)
            raise

    def forget(self, key: str) -> None:
        """Drop the doubts about a workload that has ended."""
        with self._guard:
            self._pending.pop(key, None)


def doubted_and_logged(workload: Workload, group: Group, *doubts: Doubt) -> Workload:
    """Return the workload with doubts about the group, and log each that is new."""
    for doubt in doubts:
        worse = workload.doubted(group, doubt)
        if worse != workload:
            log.warning("%s: %s", workload.key, text_of(doubt))
        workload = worse
    return workload
