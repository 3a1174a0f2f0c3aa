# SPDX-License-Identifier: Apache-2.0
"""Read the CPU time of a process and of its descendants, as far as the kernel adds it up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import msgspec

from resctrlmond.resctrl.processes import Process, children, stat_fields

# include/linux/sched.h: the task is exiting.
_PF_EXITING = 0x00000004
_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")
# utime, stime, cutime and cstime of /proc/PID/stat, each rounded down to a clock tick.
_TIMES = slice(11, 15)
# The time of one process is rounded down by at most this (ns).
SLACK = (_TIMES.stop - _TIMES.start) * _NS_PER_TICK


class TreeTime(msgspec.Struct, frozen=True):
    """The CPU time (ns) of a process tree. ``slack``: an upper limit (ns) of the rounding errors of its parts."""

    ns: int
    slack: int


NOTHING = TreeTime(0, 0)


def of_tree(process: Process) -> TreeTime | None:
    """Return the CPU time of a process, of its running descendants, and of those that their parents have waited for.

    None if it is unknown: the process is exiting, or the kernel does not list children (CONFIG_PROC_CHILDREN). The
    sum does not include descendants whose parent ignores SIGCHLD, or whose parent has ended. A descendant that ends
    meanwhile may be counted twice. The cost is proportional to the threads of the tree.
    Raises NotRead.
    """
    # Children before their parents: the time of a child that ends meanwhile is added to its parent.
    return _sum_of(process, reversed)


def of_tree_at_least(process: Process) -> TreeTime | None:
    """Return a lower bound: as ``of_tree``, but a descendant that ends meanwhile may be missing."""
    return _sum_of(process, lambda pids: pids)


def _sum_of(process: Process, order: Callable[[list[int]], Iterable[int]]) -> TreeTime | None:
    pids = [process.pid]
    for pid in pids:
        found_here = children(pid)
        if found_here is None:
            return None
        pids += found_here
    found = {pid: fields for pid in order(pids) if (fields := stat_fields(pid))}
    own = found.get(process.pid)
    # When it ends, the kernel kills its PID namespace, and no longer adds up times.
    if process.has_ended() or own is None or int(own[6]) & _PF_EXITING:
        return None
    ticks = sum(int(field) for fields in found.values() for field in fields[_TIMES])
    return TreeTime(ticks * _NS_PER_TICK, len(found) * SLACK)
