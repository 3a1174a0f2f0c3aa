# SPDX-License-Identifier: Apache-2.0
"""Conditions of the host that take away what resctrlmond can show, each found by a look at what is missing.

A kernel that does not list children (CONFIG_PROC_CHILDREN) is not one of them, because the table of processes has
them. Neither is a second mount of resctrl: the kernel reports writes to all of them.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable

from resctrlmond.resctrl import cgroups, processes
from resctrlmond.resctrl.tree import Tree

# The descriptors that a living member takes, and about those of sockets, watches and calls that run.
_PER_MEMBER = 2
_OTHERS = 200


def found(tree: Tree) -> list[Callable[[], str]]:
    """Return a function for each condition that the host has now. It returns a text, "" when the condition is over.

    Raises ResctrlError.
    """
    conditions = (hidden_processes, missing_cgroups, functools.partial(few_descriptors, tree))
    return [condition for condition in conditions if condition()]


def hidden_processes() -> str:
    """Return a text if /proc hides processes from resctrlmond; "" if it does not."""
    # The init of each PID namespace always exists, and is root's, with all capabilities.
    if not processes.is_hidden(1):
        return ""
    return (
        "/proc hides processes from resctrlmond (hidepid= in proc(5)): it can put none of them into a group. Start "
        "it by its unit, which has a /proc of its own (ProcSubset=), or mount /proc again with hidepid=0, or with "
        "gid= of the group resctrlmon"
    )


def missing_cgroups() -> str:
    """Return a text if the host has no control groups of version 2; "" if it has. Raises NotRead."""
    if cgroups.has_version_2():
        return ""
    return (
        "no control groups of version 2 (cgroup2) are mounted, and those of version 1 do not state the CPU time by "
        "which a container, pod or service is exact: their totals are estimated at best. Boot with "
        "systemd.unified_cgroup_hierarchy=1"
    )


def few_descriptors(tree: Tree) -> str:
    """Return a text if resctrlmond may open too few files to use all RMIDs; "" if it may not. Raises ResctrlError."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    rmids = min(of.rmids for of in tree.capacity())
    needed = _PER_MEMBER * rmids + _OTHERS
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    return (
        f"resctrlmond may open {limit} files, and about {needed} are needed to use all {rmids} RMIDs: workloads "
        f"beyond that fail. Set LimitNOFILE={needed} or more in its unit"
    )
