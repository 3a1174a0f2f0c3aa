# SPDX-License-Identifier: Apache-2.0
"""Processes of commands of exact services that are about to call, before they execute the command.

Their call moves them into the group of the service, and then they are not late. Searches for tasks outside
leave them to it. Any process can have the name of such a process, and join the control group of a service: so a
process that was left to its call, and has not called, has run outside.
"""

from __future__ import annotations

from resctrlmond.host import unit_exec
from resctrlmond.resctrl import processes
from resctrlmond.workloads.model.clock import boot_ns

# Such a process has called, or given up, after this time (s).
COMMAND_GRACE_S = unit_exec.LONGEST_WAIT_S + 5.0


class LeftCallers:
    """The processes that were left to their calls, and have not called yet, by the key of the service.

    Each method needs the transaction of the workload.
    """

    def __init__(self) -> None:
        # The start times (clock ticks since boot) of the processes, by number.
        self._left: dict[str, dict[int, int]] = {}

    def leave(self, key: str, tid: int) -> bool:
        """Return whether this may be the process of a command that calls, and is to be left alone until then."""
        start_time = _start_if_about_to_call(tid)
        if start_time is None:
            return False
        # systemd's own process starts others before it executes the command, and these end before that.
        parent = processes.stat(tid)
        above = _start_if_about_to_call(parent.parent) if parent is not None and parent.parent > 1 else None
        if parent is not None and above is not None:
            tid, start_time = parent.parent, above
        self._left.setdefault(key, {})[tid] = start_time
        return True

    def called(self, key: str, pid: int) -> None:
        """Record that a process has called, and is in the group."""
        self._left.get(key, {}).pop(pid, None)

    def take_missing(self, key: str) -> bool:
        """Return whether a process was left that has not called, and will not call any more. Forget those."""
        left = self._left.get(key, {})
        gone = [tid for tid, start_time in left.items() if _start_if_about_to_call(tid) != start_time]
        for tid in gone:
            del left[tid]
        return bool(gone)

    def forget(self, key: str) -> None:
        """Forget the processes of a service whose run has ended or begins."""
        self._left.pop(key, None)


def _start_if_about_to_call(tid: int) -> int | None:
    """Return the start time of a process (clock ticks since boot) if it may be about to call; else None."""
    # The age is limited, because any process can have such a name.
    found = processes.stat(tid)
    if found is None or found.is_exiting or not unit_exec.may_call(tid):
        return None
    is_new = boot_ns() / 1e9 - found.start_time / processes.TICKS_PER_S < COMMAND_GRACE_S
    return found.start_time if is_new else None
