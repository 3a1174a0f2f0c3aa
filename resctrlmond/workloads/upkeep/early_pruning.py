# SPDX-License-Identifier: Apache-2.0
"""Removal of ended runs before ``snapshot_ttl`` if their files take too much memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import msgspec

from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store

log = logging.getLogger(__name__)

# Files in /run count against MemoryMax= of the unit. A run that used 32 L3 caches takes up to 1 MiB, because each
# value that no other file of the run has takes a page: 2000 runs in snapshot_ttl would fill the 2 GiB.
MAX_ENDED_BYTES = 512 << 20
# The size of an inode and its directory entry (shmem_inode_cache and dentry in /proc/slabinfo).
_INODE_BYTES = 1024
_LOG_EVERY_S = 60.0


class _Run(msgspec.Struct, frozen=True, order=True):
    """An ended run. ``is_current``: its files are in groups/, because no later run has its key."""

    completed_ns: int
    key: str
    generation: int
    is_current: bool


class EarlyPruner:
    """The limit ``most_bytes`` on the files of all ended runs. The runs that ended first are removed first."""

    def __init__(self, store: Store, snapshots: Snapshots, most_bytes: int = MAX_ENDED_BYTES) -> None:
        self._store = store
        self._snapshots = snapshots
        self.most_bytes = most_bytes
        # By key and generation. The files of an ended run do not change, so each run is measured once: otherwise each
        # tick after a change takes 67 ms with 300 ended runs, as much as 20 createRuntimes.
        self._sizes: dict[tuple[str, int], int] = {}
        # The state of the store and of the snapshots, and the limit, when all files were found to fit. Without it, an
        # idle minute with 300 ended runs takes 1.04 times the CPU time.
        self._fitting_at: object = None
        self._removed = 0
        self._logged = float("-inf")

    def prune(self) -> None:
        """Remove the oldest ended runs until the others fit.

        A run whose key is locked is skipped; the next call retries. Raises NotWritten.
        """
        now = self._store.changes, self._snapshots.completed.changes, self.most_bytes
        if now != self._fitting_at:
            self._fitting_at = now if self._prune() else None
        if self._removed and time.monotonic() - self._logged >= _LOG_EVERY_S:
            text = "removed %d ended run%s before snapshot_ttl, because the files of all took more than %d MiB. "
            text += "Set a shorter snapshot_ttl, or collect the values sooner"
            log.warning(text, self._removed, "" if self._removed == 1 else "s", self.most_bytes >> 20)
            self._removed, self._logged = 0, time.monotonic()

    def _prune(self) -> bool:
        """Remove the oldest runs until the others fit. Returns whether they do."""
        runs = sorted(self._ended())
        sizes = {(run.key, run.generation): self._size(run) for run in runs}
        self._sizes = sizes
        surplus = sum(sizes.values()) - self.most_bytes
        for run in runs:
            if surplus <= 0:
                break
            # A run that failed has no files.
            if sizes[run.key, run.generation] and self._remove(run):
                surplus -= sizes[run.key, run.generation]
                self._removed += 1
        return surplus <= 0

    def _ended(self) -> Iterator[_Run]:
        for workload in self._store.finished():
            yield _Run(workload.first.completed_ns, workload.key, workload.generation, True)
        for key, generation, completed_ns in self._snapshots.completed.runs():
            yield _Run(completed_ns, key, generation, False)

    def _size(self, run: _Run) -> int:
        known = self._sizes.get((run.key, run.generation))
        if known is not None:
            return known
        snapshots = self._snapshots
        top = snapshots.path(run.key) if run.is_current else snapshots.completed.path(run.key, run.generation)
        found: dict[int, int] = {}
        for directory, folders, names in os.walk(top):
            for name in (*folders, *names):
                try:
                    status = os.lstat(os.path.join(directory, name))
                except FileNotFoundError:
                    continue
                # Equal values are links to one file.
                found[status.st_ino] = status.st_blocks * 512 + _INODE_BYTES
        return sum(found.values())

    def _remove(self, run: _Run) -> bool:
        with self._store.transaction_if_free(run.key) as txn:
            if txn is None:
                return False
            if not run.is_current:
                self._snapshots.completed.delete(run.key, run.generation)
                return True
            workload = txn.find()
            if workload is None or workload.generation != run.generation or not workload.state.is_over:
                return False
            self._snapshots.delete(run.key)
            txn.drop()
            return True
