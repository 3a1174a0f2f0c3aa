# SPDX-License-Identifier: Apache-2.0
"""Doubts about groups whose CPUs or counters other programs change, by the writes that the witness has recorded.

- After a write to the cpus file of a group, other tasks count in it on these CPUs.
- Some writes reset bandwidth counters: of one group (to mbm_L3_assignments), or of all (to mbm_assign_mode, and to
  files that state what an event counts). A counter that is reset and then counts more than before is not found by its
  readings.
- The kernel's work for a task may count in another group after a write to kernel_mode.

A write that fails may have changed something before, except to a cpus file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence

from resctrlmond.resctrl.counters import EVENTS, Kind
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.witness import Moves, Write
from resctrlmond.workloads.figures.reasons import Reason, doubt, text_of
from resctrlmond.workloads.model.workload import Doubt, Group, Workload

_CPUS = frozenset({"cpus", "cpus_list"})
# The file of a group that assigns counters of one resource.
_COUNTERS = re.compile(r"mbm_.+_assignments")
_MODE, _FILTER, _CONFIG = "mbm_assign_mode", "event_filter", "_config"
# They select the group in which the kernel counts its work for a task.
_KERNEL_MODES = frozenset({"kernel_mode", "kernel_mode_assignment"})
# The events whose counters can be reset.
_RESTARTING = tuple(name for name, event in EVENTS.items() if event.restarts)
_CUMULATIVE = tuple(name for name, event in EVENTS.items() if event.kind is Kind.CUMULATIVE)
_OVERWRITTEN = "the witness has overwritten writes to resctrl that resctrlmond had not read"


def doubt_by(write: Write) -> Doubt | None:
    """Return the doubt that a write raises, about one group (``is_about_group``) or about all; None if it is none."""
    path = f"{write.parent}/{write.file}"
    if write.file in _CPUS:
        return None if write.is_refused else doubt(Reason.HAS_CPUS)
    if write.file in _KERNEL_MODES:
        return doubt(Reason.KERNEL_WORK, cause=f"another program wrote to {path}")
    if write.file == _FILTER:
        name = write.parent
    elif write.file == _MODE or _COUNTERS.fullmatch(write.file):
        name = ""
    elif write.file.endswith(_CONFIG):
        name = write.file.removesuffix(_CONFIG)
    else:
        return None
    return doubt(Reason.RESET_BY_WRITE, events=(name,) if name in _RESTARTING else _RESTARTING, file=path)


def is_about_group(write: Write) -> bool:
    """Whether a write to the file changes one group: the one with its directory."""
    return write.file in _CPUS or bool(_COUNTERS.fullmatch(write.file))


def has_tasks_of_others(doubts: Iterable[Doubt]) -> bool:
    """Whether tasks of others may count in a group by these doubts."""
    return any(one.reason in (Reason.HAS_CPUS.name, Reason.CHANGES_UNKNOWN.name) for one in doubts)


def with_writes(
    workload: Workload, moves: Moves, writes: Sequence[Write], directory: Callable[[Group], int | None]
) -> Workload:
    """Return the workload with the doubts by the writes of other programs since it was looked at, of all ``moves``.

    ``directory`` returns the inode number of a group, None if it is not at its path. Raises its errors.
    """
    for group in workload.existing_groups:
        since_ns = max(group.created_ns, workload.proof.until_ns)
        if moves.since_ns > since_ns:
            workload = workload.doubted(group, doubt(Reason.CHANGES_UNKNOWN, cause=_OVERWRITTEN))
        for write in writes:
            found = doubt_by(write) if write.until_ns >= since_ns else None
            # Another program may have renamed the group, so that its directory is not known now.
            if found and (not is_about_group(write) or directory(group) in (write.directory, None)):
                workload = workload.doubted(group, found)
    return workload


class Resets:
    """Reports the writes after which counters of all groups may have begun again. Thread-safe.

    ``read`` returns the recorded writes, and those of other programs among them. Raises NotRead.
    """

    def __init__(self, read: Callable[[], tuple[Moves, Sequence[Write]]]) -> None:
        self._read = read
        self._guard = threading.Lock()
        # The start of the witness, and the last number that was read.
        self._last = 0, 0
        # Called with the events whose counters another program may have reset, and the reason.
        self.on_reset: Callable[[Iterable[str], str], None] = lambda _events, _why: None
        # Called if it is not known whether there was one.
        self.on_unknown: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Do not report earlier writes."""
        try:
            moves, _ = self._read()
        except NotRead:
            return  # so the next call reports that they are not known
        self._last = moves.begun_ns, moves.last

    def report(self) -> bool:
        """Report the writes until now. Return False if some are still being recorded."""
        with self._guard:
            begun_ns, last = self._last
            try:
                moves, writes = self._read()
            except NotRead:
                self.on_unknown()
                return True
            if moves.begun_ns != begun_ns or moves.before > last:
                self.on_unknown()
            for write in writes:
                found = doubt_by(write) if write.number > last or moves.begun_ns != begun_ns else None
                if found and found.reason == Reason.KERNEL_WORK.name:
                    self.on_reset(_CUMULATIVE, text_of(found))
                elif found and found.events:
                    self.on_reset(found.events, text_of(found))
            self._last = moves.begun_ns, moves.last
            return moves.is_whole
