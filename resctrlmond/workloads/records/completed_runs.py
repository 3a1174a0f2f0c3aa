# SPDX-License-Identifier: Apache-2.0
"""The files of ended runs whose keys have later runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from resctrlmond.workloads.model.clock import boot_ns_at, seconds_since_ns
from resctrlmond.workloads.records.atomic_files import (
    make_folders,
    read_text,
    remove,
    writing,
)


class CompletedRuns:
    """The folders ``completed/KEY/GENERATION/`` of earlier runs."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # The completion times (clock.boot_ns()) of earlier runs, by path: a change of the system clock does not alter
        # the age of a run that this daemon has ended or seen.
        self._completed_ns: dict[str, int] = {}
        # How often a run was added or taken out.
        self.changes = 0

    def path(self, key: str, generation: int) -> str:
        """Return the path of the folder of a run."""
        return os.path.join(self.folder, key, str(generation))

    def add(self, key: str, generation: int, source: str, completed_ns: int, mode: int) -> None:
        """Move the folder ``source`` of a run here; folders are created with ``mode``. Raises NotWritten.

        ``completed_ns`` is the time at which the run was completed (``clock.boot_ns()``), 0 if unknown.
        """
        target = self.path(key, generation)
        with writing(target):
            make_folders(os.path.dirname(target), mode)
            remove(target)
            os.rename(source, target)
        self._completed_ns.pop(target, None)
        if completed_ns:
            self._completed_ns[target] = completed_ns
        self.changes += 1

    def take_out(self, key: str, generation: int, target: str) -> None:
        """Move the folder of a run, if it is here, to ``target``. Raises NotWritten."""
        source = self.path(key, generation)
        with writing(source), contextlib.suppress(FileNotFoundError):
            os.rename(source, target)
        self._completed_ns.pop(source, None)
        self.changes += 1

    def has(self, key: str) -> bool:
        """Return whether there are runs of that key."""
        return os.path.isdir(os.path.join(self.folder, key))

    def list_keys(self) -> list[str]:
        """Return the keys of the runs. Raises NotWritten."""
        with writing(self.folder):
            try:
                with os.scandir(self.folder) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return []  # removed from outside; add() creates it again

    def runs(self) -> Iterator[tuple[str, int, int]]:
        """Yield the key, the generation and the completion time of each run.

        The time is that of ``clock.boot_ns()``, 0 if the run's files do not state it. Raises NotWritten.
        """
        for key in self.list_keys():
            with writing(key), contextlib.suppress(FileNotFoundError):
                for name in os.listdir(os.path.join(self.folder, key)):
                    if name.isdecimal():
                        yield key, int(name), self._completed_at_ns(os.path.join(self.folder, key, name)) or 0

    def delete(self, key: str, generation: int) -> None:
        """Remove a run. Raises NotWritten."""
        run = self.path(key, generation)
        with writing(run):
            self._remove(run)

    def prune(self, key: str, ttl_s: float) -> None:
        """Remove the runs of that key that were completed at least ``ttl_s`` seconds ago, or at an unknown time.

        Raises NotWritten.
        """
        folder = os.path.join(self.folder, key)
        with writing(folder):
            for generation in os.listdir(folder):
                run = os.path.join(folder, generation)
                completed_ns = self._completed_at_ns(run)
                if completed_ns is None or seconds_since_ns(completed_ns) >= ttl_s:
                    self._remove(run)
            if not os.listdir(folder):
                os.rmdir(folder)

    def _remove(self, run: str) -> None:
        remove(run)
        self._completed_ns.pop(run, None)

    def _completed_at_ns(self, run: str) -> int | None:
        """Return the completion time (``clock.boot_ns()``) of a run; None if its files do not state it."""
        then = self._completed_ns.get(run)
        if then is None:
            then = boot_ns_at(read_text(os.path.join(run, "completed_at")))
        if then is not None:
            self._completed_ns[run] = then
        return then
