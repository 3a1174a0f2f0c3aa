# SPDX-License-Identifier: Apache-2.0
"""Processes of commands of exact services that are about to call, before they execute the command.

Their call moves them into the group of the service, and what they have used until then is known. So searches for
tasks outside leave them to it. Any process can have the name of such a process, and is outside for longer then.
"""

from __future__ import annotations

from resctrlmond.host import unit_exec
from resctrlmond.resctrl import cgroups, processes
from resctrlmond.workloads.model.clock import boot_ns
from resctrlmond.workloads.model.workload import Workload

# Such a process has called, or given up, after this time (s).
_GRACE_S = unit_exec.LONGEST_WAIT_S + 5.0


def is_about_to_call(tid: int) -> bool:
    """Return whether this may be a process that calls, or one that systemd's own process has started before that."""
    found = processes.stat(tid)
    if found is None or found.is_exiting or not unit_exec.may_call(tid):
        return False
    # The age is limited, because any process can have such a name.
    return boot_ns() / 1e9 - found.start_time / processes.TICKS_PER_S < _GRACE_S


def holds_callers_only(path: str) -> bool:
    """Return whether the control group has tasks, all of which may be about to call. Raises NotRead."""
    tids = cgroups.tasks(path)
    return bool(tids) and all(map(is_about_to_call, tids))


def has_caller(workload: Workload) -> bool:
    """Return whether a process of an exact service may be about to call. Raises NotRead."""
    paths = (member.cgroup for member in workload.members if member.commands)
    return any(is_about_to_call(tid) for path in paths for tid in cgroups.tasks(path))
