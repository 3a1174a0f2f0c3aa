# SPDX-License-Identifier: Apache-2.0
"""Remove ended runs before snapshot_ttl if their files take too much memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from resctrlmond.groups.lifecycle import Lifecycle
from resctrlmond.groups.record import Record

log = logging.getLogger(__name__)

# Files in /run count against MemoryMax= of the unit. A run that used 32 L3 caches takes up to 1 MiB, because each
# value that no other file of the run has takes a page: 2000 runs in snapshot_ttl would fill the 2 GiB.
MAX_ENDED_BYTES = 512 << 20
# Of an inode with its entry in the directory (shmem_inode_cache and dentry in /proc/slabinfo).
_INODE_BYTES = 1024
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class _Run:
    """An ended run. ``is_current``: its files are in groups/, because no later run has its key."""

    completed_ns: int
    key: str
    generation: int
    is_current: bool


class EarlyPruning:
    """Keeps the files of ended runs below ``most_bytes`` in all: removes the runs that ended first."""

    def __init__(self, life: Lifecycle, most_bytes: int = MAX_ENDED_BYTES) -> None:
        self._life = life
        self.most_bytes = most_bytes
        # By the key and generation of a run. Its files do not change any more.
        self._sizes: dict[tuple[str, int], int] = {}
        # What had ended, and the limit, when all files were found to fit.
        self._fitting: object = None
        self._removed = 0
        self._logged = float("-inf")

    def prune(self) -> None:
        """Remove the oldest runs until the others fit. A run whose key is locked is left for the next time.

        Raises NotWritten.
        """
        current = {(record.key, record.generation) for record in self._ended_records()}
        ended = current, self._life.snapshots.changes, self.most_bytes
        if ended != self._fitting:
            self._fitting = ended if self._prune() else None
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
            # What failed has no files.
            if sizes[run.key, run.generation] and self._remove(run):
                surplus -= sizes[run.key, run.generation]
                self._removed += 1
        return surplus <= 0

    def _ended_records(self) -> Iterator[Record]:
        return (record for record in self._life.book.all() if record.state.is_over and not record.is_interrupted)

    def _ended(self) -> Iterator[_Run]:
        for record in self._ended_records():
            yield _Run(record.completed_ns, record.key, record.generation, True)
        for key, generation, completed_ns in self._life.snapshots.set_aside_runs():
            yield _Run(completed_ns, key, generation, False)

    def _size(self, run: _Run) -> int:
        known = self._sizes.get((run.key, run.generation))
        if known is not None:
            return known
        snapshots = self._life.snapshots
        top = snapshots.path(run.key) if run.is_current else snapshots.aside(run.key, run.generation)
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
        book, snapshots = self._life.book, self._life.snapshots
        with book.writing_if_free(run.key) as is_free:
            if not is_free:
                return False
            if not run.is_current:
                snapshots.delete_set_aside(run.key, run.generation)
                return True
            record = book.get(run.key)
            if record is None or record.generation != run.generation or not record.state.is_over:
                return False
            snapshots.delete(run.key)
            book.drop(run.key)
            return True
