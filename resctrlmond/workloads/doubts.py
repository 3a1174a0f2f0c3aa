# SPDX-License-Identifier: Apache-2.0
"""Writes of other programs to tasks files, until the task that each has moved is known, or known to be unknown."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from resctrlmond.resctrl.arrivals import place_of
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef

# The nonces of groups, by the key of their workload.
Groups = Mapping[str, frozenset[int]]

# A program that writes all the time, or a call that has locked a workload, must not put off the answer for ever.
_LONGEST_S = 2.0
# Newer kernels clear last_cmd_status when a tasks file is read, so the daemon waits a little until it is closed.
_OPEN_S = 0.1
_MOST_PLACES = 1000


@dataclass(slots=True)
class Doubt:
    """Writes to one tasks file, and the living tasks that they have moved.

    ``tasks_in``: the directory that these are in now, another one if theirs is gone.
    ``groups``: those that the tasks may have been in. ``since`` (time.monotonic()): when nothing had been written.
    ``added``: when the first event was read.
    ``was_listed``: the directory has been listed since the first write, ``is_listed``: since the last one.
    ``is_refused``: the kernel has refused the only write.
    ``waiting``: the workloads that have not been looked at yet for tasks that have left them.
    """

    directory: str
    tasks_in: str
    since: float
    added: float = field(default_factory=time.monotonic)
    groups: dict[str, frozenset[int]] = field(default_factory=dict)
    writes: int = 0
    arrived: set[int] = field(default_factory=set)
    was_listed: bool = False
    is_listed: bool = False
    is_refused: bool = False
    waiting: set[str] = field(default_factory=set)

    @property
    def is_explained(self) -> bool:
        """Whether as many living tasks were found as were written, or the kernel has refused the write."""
        return self.is_refused or self.writes <= len(self.arrived)

    @property
    def is_gone(self) -> bool:
        """Whether the directory was removed before it could be listed."""
        return self.directory != self.tasks_in

    @property
    def is_old(self) -> bool:
        """Whether the answer has been put off for too long."""
        return time.monotonic() - self.since > _LONGEST_S


class Doubts:
    """The writes that are not explained yet. A write is explained by a living task that it moved.

    First the tasks that came to each directory are counted. If these are too few, the workloads are looked at for
    tasks that left them. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._counting: dict[str, Doubt] = {}
        self._looking: list[Doubt] = []
        # When a task that had left its workload was found last, by the directory that it had been moved to.
        self._left: dict[str, float] = {}

    @property
    def is_counting(self) -> bool:
        """Whether directories are to be listed, or closed by the program that writes."""
        return bool(self._counting)

    @property
    def waiting(self) -> set[str]:
        """The workloads to look at."""
        return {key for doubt in self._looking for key in doubt.waiting}

    def written(self, directory: str, writes: int, groups: Groups, since: float) -> None:
        """Add writes to a tasks file, which were made after ``since`` (time.monotonic())."""
        doubt = self._counting.setdefault(directory, Doubt(directory, directory, since))
        # A write through an open file whose earlier writes were judged after _LONGEST_S is not counted yet.
        is_new = bool(groups) and not doubt.writes
        doubt.writes += max(writes, is_new)
        doubt.groups.update({key: nonces | doubt.groups.get(key, frozenset()) for key, nonces in groups.items()})
        doubt.is_listed = doubt.is_refused = False

    def missed(self, directory: str, groups: Groups, since: float) -> None:
        """Add a directory that is gone, and to which tasks may have been moved after ``since``."""
        # rmdir moves the tasks of a group to its class, and those of a class to the root.
        tasks_in = "" if "/" not in directory else place_of(directory).class_
        self._look(Doubt(directory, tasks_in, since, groups=dict(groups), writes=1))

    def to_list(self, being_written: Container[str]) -> list[str]:
        """Return the directories that were written to, which the caller lists now."""
        now = time.monotonic()
        found = [
            doubt
            for doubt in self._counting.values()
            if not doubt.is_listed and (doubt.directory not in being_written or now - doubt.added > _OPEN_S)
        ]
        for doubt in found:
            doubt.was_listed = doubt.is_listed = True
        return [doubt.directory for doubt in found]

    def arrived(self, directory: str, tids: Iterable[int]) -> None:
        """Add living tasks that came to a directory."""
        if directory in self._counting:
            self._counting[directory].arrived.update(tids)

    def only_write(self, directory: str) -> Doubt | None:
        """Return the doubt about a directory to which one write was made, None if there is none."""
        doubt = self._counting.get(directory)
        return doubt if doubt is not None and doubt.writes == 1 else None

    def settle(self, being_written: Container[str]) -> None:
        """Close the counts of directories to which nothing was written since they were listed."""
        for directory, doubt in list(self._counting.items()):
            is_settled = doubt.is_listed and directory not in being_written
            if is_settled or (doubt.was_listed and doubt.is_old):
                del self._counting[directory]
                self._look(doubt)

    def _look(self, doubt: Doubt) -> None:
        if doubt.groups and not doubt.is_explained and not self._is_of_ours(doubt):
            doubt.waiting = set(doubt.groups)
            self._looking.append(doubt)

    def _is_of_ours(self, doubt: Doubt) -> bool:
        return self._left.get(doubt.tasks_in, -math.inf) >= doubt.since

    def left(self, where: Membership) -> None:
        """Drop the doubts about the directories to which a living task was moved that has left its workload."""
        now = time.monotonic()
        if len(self._left) > _MOST_PLACES:
            self._left = {place: at for place, at in self._left.items() if now - at < 2 * _LONGEST_S}
        self._left[where.class_] = now
        if where.group:
            self._left[GroupRef(where.class_, where.group).path] = now
        self._looking = [doubt for doubt in self._looking if not self._is_of_ours(doubt)]

    def looked_at(self, key: str) -> None:
        """Wait no more for the look at a workload."""
        for doubt in self._looking:
            doubt.waiting.discard(key)

    def unexplained(self) -> list[Doubt]:
        """Remove and return the doubts that remain, after a look at each workload that is not locked."""
        found = [doubt for doubt in self._looking if not doubt.waiting or doubt.is_old]
        self._looking = [doubt for doubt in self._looking if doubt.waiting and not doubt.is_old]
        return found

    def about(self, key: str, nonce: int) -> list[Doubt]:
        """Those that a task of this group may be the reason for, as far as is known now."""
        doubts = (*self._counting.values(), *self._looking)
        return [doubt for doubt in doubts if nonce in doubt.groups.get(key, ()) and not doubt.is_explained]
