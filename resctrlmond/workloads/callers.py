# SPDX-License-Identifier: Apache-2.0
"""Processes of commands of exact services that are about to call, before they execute the command.

Their call moves them into the group of the service, and then they are not late. Searches for tasks outside
leave them to it.
"""

from __future__ import annotations

from resctrlmond import unit_exec
from resctrlmond.resctrl import processes
from resctrlmond.workloads.clock import boot_ns

# Such a process has called, or given up, after this time (s).
COMMAND_GRACE_S = unit_exec.LONGEST_WAIT_S + 5.0


def is_about_to_call(tid: int) -> bool:
    """Return whether this may be the process of a command that calls before it executes the command."""
    # The age is limited, because any process can have such a name.
    found = processes.stat(tid)
    if found is None or not unit_exec.may_call(tid):
        return False
    return boot_ns() / 1e9 - found.start_time / processes.TICKS_PER_S < COMMAND_GRACE_S
