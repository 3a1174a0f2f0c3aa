# SPDX-License-Identifier: Apache-2.0
"""Detect that no task of a workload has run since the last sweep, so that the next one finds nothing new.

The kernel reports no task that joins a control group (cgroup.events does not), so each sweep searches the members for
tasks outside their groups. A task that has joined uses nothing before it runs, and then the CPU time of the control
group grows. A member without a control group gets new tasks only if one of its tasks forks, and so runs. Moves by
writes to resctrl are reported (``interference.py``).

If all sweeps searched all workloads, an idle minute with 500 containers would take 7 times the CPU time; if no
checkpoint was skipped, 1.9 times.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from resctrlmond.workloads.evidence.run_state import Activity
from resctrlmond.workloads.model.workload import GroupState, Workload

# A workload with more threads is searched by each sweep: reading the CPU time of each costs more than the search.
_MAX_THREADS = 16


def activity(workload: Workload, threads: Collection[int] | None) -> Activity | None:
    """Return the CPU times of the workload's tasks; None if they are not all known, or a search has work to do.

    ``threads`` are the threads in its groups; None if these are not known.
    """
    members = [member for member in workload.living if member.has_tasks]
    if any(group.state is not GroupState.CREATED for group in workload.groups):
        return None
    if any(member.tasks_outside or member.reason or member.joining for member in members):
        return None
    paths = [os.path.join(member.cgroup, "cpu.stat") for member in members if member.cgroup]
    if len(paths) < len(members):
        if threads is None or len(threads) > _MAX_THREADS:
            return None
        paths += [f"/proc/{tid}/schedstat" for tid in sorted(threads)]
    found = tuple(map(_cpu_time, paths))
    return found if all(found) else None


def _cpu_time(path: str) -> bytes:
    """Return the first line of cpu.stat (v2), or of schedstat of a thread; b"" if it states no CPU time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            line = os.read(fd, 256).partition(b"\n")[0]
        finally:
            os.close(fd)
    except OSError:
        return b""
    # Without CONFIG_SCHED_INFO, schedstat has only zeros; cpu.stat of v1 begins with nr_periods.
    is_known = line.startswith(b"usage_usec ") or (line[:1].isdigit() and line != b"0 0 0")
    return line if is_known else b""
