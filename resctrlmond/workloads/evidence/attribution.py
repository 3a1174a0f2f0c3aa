# SPDX-License-Identifier: Apache-2.0
"""Attribute writes to tasks files to the tasks that they have moved.

inotify reports that another program wrote to a tasks file, but not which task it moved. A workload whose task was
moved away has a wrong total, so each write must be explained:

1. The directory is listed. As many new tasks there as writes explain the writes (``arrivals.py``).
2. Otherwise each workload is inspected. A task that has left a workload for that directory explains the writes.
3. Otherwise the task has ended meanwhile. It may have been a task of any workload that had tasks which the write
   could move, and all these workloads become estimated.

Writes are judged after the file was closed, because a task may be written after the event that opens the file with
O_TRUNC, or two seconds after the first write, because a program may keep the file open.

Limits: inotify merges equal events, so several writes through one open file count as one. A living task may explain a
write that moved another task. A write that the kernel refuses is not explained either, if the program opened the file
with O_TRUNC: last_cmd_status does not prove that nothing was moved, because it has only the result of the last write,
and the newest kernels clear it when any program reads a file of a group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Mapping

import msgspec

from resctrlmond.resctrl.arrivals import membership_of
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef

# The nonces of groups, by the key of their workload.
Groups = Mapping[str, frozenset[int]]

# A program that writes continuously, or a call that has locked a workload, must not delay the result for ever.
_MAX_DELAY_S = 2.0
_MAX_DEPARTURES = 1000


class Writes(msgspec.Struct):
    """Writes to the tasks file of one directory.

    ``destination``: the directory that has the moved tasks now; the parent if the directory was removed.
    ``groups``: the groups that the tasks may have left. ``since`` (time.monotonic()): a time before the first write.
    ``number``: the number of writes. ``arrived``: the tasks that were found in the directory and have not ended.
    ``was_listed``: the directory was listed after the first write; ``is_listed``: after the last one.
    ``uninspected``: the workloads that are not inspected yet.
    """

    directory: str
    destination: str
    since: float
    groups: dict[str, frozenset[int]] = msgspec.field(default_factory=dict)
    number: int = 0
    arrived: set[int] = msgspec.field(default_factory=set)
    was_listed: bool = False
    is_listed: bool = False
    uninspected: set[str] = msgspec.field(default_factory=set)

    @property
    def is_explained(self) -> bool:
        """Whether as many tasks have arrived as were written."""
        return self.number <= len(self.arrived)

    @property
    def is_removed(self) -> bool:
        """Whether the directory was removed before it could be listed."""
        return self.directory != self.destination

    @property
    def is_overdue(self) -> bool:
        """Whether the result was delayed for too long."""
        return time.monotonic() - self.since > _MAX_DELAY_S


class Attribution:
    """Keeps the writes that are not explained yet. Not thread-safe.

    Writes are first open, while their directories are listed, and then unexplained, while workloads are inspected.
    """

    def __init__(self) -> None:
        self._open: dict[str, Writes] = {}
        self._unexplained: list[Writes] = []
        # The time.monotonic() of the last task that was found to have left its workload, by destination.
        self._departures: dict[str, float] = {}

    @property
    def has_open(self) -> bool:
        """Whether a directory must be listed, or its tasks file is still open for writing."""
        return bool(self._open)

    @property
    def uninspected(self) -> set[str]:
        """The workloads that must be inspected."""
        return {key for writes in self._unexplained for key in writes.uninspected}

    def add(self, directory: str, number: int, groups: Groups, since: float) -> None:
        """Add writes to a tasks file, made after ``since`` (time.monotonic()).

        ``number`` is 0 for a further write through a file that was open before.
        """
        writes = self._open.setdefault(directory, Writes(directory, directory, since))
        # The earlier writes through the open file were overdue and are closed, so this one is not counted yet.
        is_uncounted = bool(groups) and not writes.number
        writes.number += max(number, is_uncounted)
        writes.groups.update({key: nonces | writes.groups.get(key, frozenset()) for key, nonces in groups.items()})
        writes.is_listed = False

    def add_removed(self, directory: str, groups: Groups, since: float) -> None:
        """Add a directory that was removed, and to which tasks may have been moved after ``since``."""
        # rmdir moves the tasks of a group to its class, and the tasks of a class to the root.
        destination = "" if "/" not in directory else membership_of(directory).class_
        self._search(Writes(directory, destination, since, groups=dict(groups), number=1))

    def unlisted(self) -> list[str]:
        """Return the directories that were written to since they were listed. The caller lists them now."""
        found = [writes for writes in self._open.values() if not writes.is_listed]
        for writes in found:
            writes.was_listed = writes.is_listed = True
        return [writes.directory for writes in found]

    def add_arrivals(self, directory: str, tids: Iterable[int]) -> None:
        """Add tasks that were found in a directory after a write."""
        if directory in self._open:
            self._open[directory].arrived.update(tids)

    def close_listed(self, being_written: Container[str]) -> None:
        """Close the writes whose directories were listed after the last write and whose files were closed."""
        for directory, writes in list(self._open.items()):
            is_complete = writes.is_listed and directory not in being_written
            if is_complete or (writes.was_listed and writes.is_overdue):
                del self._open[directory]
                self._search(writes)

    def _search(self, writes: Writes) -> None:
        if writes.groups and not writes.is_explained and not self._has_departure(writes):
            writes.uninspected = set(writes.groups)
            self._unexplained.append(writes)

    def _has_departure(self, writes: Writes) -> bool:
        return self._departures.get(writes.destination, -math.inf) >= writes.since

    def add_departure(self, where: Membership) -> None:
        """Explain the writes to a directory by a task that left its workload and is there now."""
        now = time.monotonic()
        if len(self._departures) > _MAX_DEPARTURES:
            recent = {place: at for place, at in self._departures.items() if now - at < 2 * _MAX_DELAY_S}
            self._departures = recent
        self._departures[where.class_] = now
        if where.group:
            self._departures[GroupRef(where.class_, where.group).path] = now
        self._unexplained = [writes for writes in self._unexplained if not self._has_departure(writes)]

    def inspected(self, key: str) -> None:
        """Record that a workload was inspected, or has ended."""
        for writes in self._unexplained:
            writes.uninspected.discard(key)

    def pop_unexplained(self) -> list[Writes]:
        """Remove and return the writes that no inspection has explained, or that are overdue."""
        found = [writes for writes in self._unexplained if not writes.uninspected or writes.is_overdue]
        self._unexplained = [writes for writes in self._unexplained if writes.uninspected and not writes.is_overdue]
        return found

    def unexplained_for(self, key: str, nonce: int) -> list[Writes]:
        """Return the writes, not explained yet, that may have moved a task of this group."""
        kept = (*self._open.values(), *self._unexplained)
        return [writes for writes in kept if nonce in writes.groups.get(key, ()) and not writes.is_explained]
