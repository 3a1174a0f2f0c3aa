# SPDX-License-Identifier: Apache-2.0
"""Find the control group and the first process of a container, and the control group of a pod."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import NoSuchProcess
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.resctrl.processes import leader, stat

_POD = re.compile(r"(?:.*-)?pod(.+)")


def own_cgroup(pid: int, container: str) -> str:
    """Return the control group that holds the process and is named for the container; "" if there is none.

    A match also proves that the pid still belongs to the container. crun may create another control group below it.
    """
    with contextlib.suppress(NoSuchProcess):
        path = cgroups.cgroup_of(pid)
        while len(path) > 1:
            if _is_named_for(container, os.path.basename(path)):
                return path
            path = os.path.dirname(path)
    return ""


def declared_cgroup(cgroups_path: str, container: str) -> str:
    """Return the existing control group of the container that an OCI ``cgroupsPath`` means; "" if there is none.

    The value is a path below the root of the hierarchy, or ``slice:prefix:name`` if systemd creates the scope
    ``prefix-name.scope`` (runc, docs/systemd.md). Paths of CRI-O with cgroupfs are the name of the directory. All
    runtimes name the directory for the container; a directory with another name would contain other processes.
    """
    inner = inner_path(cgroups_path)
    if not _is_named_for(container, os.path.basename(inner)):
        return ""
    found = [place for place in _candidates(inner) if os.path.isdir(place)]
    # On a v1 host that also has the unified hierarchy, both may have the directory, but only one has the tasks.
    return next(filter(cgroups.is_populated, found), found[0] if found else "")


def first_process(cgroup: str) -> int:
    """Return the only process in the control group; 0 if there are none or several."""
    there = {leader(tid) for tid in cgroups.tasks(cgroup)} - {0}
    return there.pop() if len(there) == 1 else 0


def started(pid: int) -> int:
    """Return the start time of the process, field 22 of /proc/PID/stat; 0 if it does not exist."""
    found = stat(pid) if pid else None
    return found.start_time if found else 0


def is_left(pid: int, container: str, cgroups_path: str) -> bool:
    """Whether a container that is reported as running has any process, as far as this host shows."""
    if pid and own_cgroup(pid, container):
        return True
    declared = declared_cgroup(cgroups_path, container)
    if declared:
        return cgroups.is_populated(declared)
    # The control group was removed, or was never reported: only the pid is left.
    return not cgroups_path and bool(pid) and started(pid) > 0


def pod_cgroup(pid: int, uid: str, cgroup_parent: str) -> str:
    """Return the control group of the process that is named for the pod, or the declared one; "" if there is none."""
    with contextlib.suppress(NoSuchProcess):
        path = os.path.dirname(cgroups.cgroup_of(pid))
        while len(path) > 1:
            if _is_named_for_pod(uid, os.path.basename(path)):
                return path
            path = os.path.dirname(path)
    inner = pod_path(cgroup_parent, uid)
    return next(filter(os.path.isdir, _candidates(inner)), "") if inner else ""


def pod_path(cgroup_parent: str, uid: str) -> str:
    """Return the path of a declared parent below the root of the hierarchy; "" if it is not named for the pod."""
    is_slice = cgroup_parent.endswith(".slice") and "/" not in cgroup_parent
    inner = _slice_path(cgroup_parent) if is_slice else os.path.normpath("/" + cgroup_parent).lstrip("/")
    return inner if _is_named_for_pod(uid, os.path.basename(inner)) else ""


def _is_named_for(container: str, name: str) -> bool:
    # If the kubelet has the systemd driver and the runtime has not, "slice:prefix:name" is the name of the directory.
    return name == container or name.endswith((f"-{container}", f"-{container}.scope", f":{container}"))


def _is_named_for_pod(uid: str, name: str) -> bool:
    # pod<uid> (cgroupfs), kubepods-burstable-pod<uid with underscores>.slice (systemd). kubepods is not of a pod "s".
    found = _POD.fullmatch(name.removesuffix(".slice"))
    return found is not None and re.sub("[-_]", "", found[1]) == re.sub("[-_]", "", uid)


def inner_path(cgroups_path: str) -> str:
    """Return the path below the root of the hierarchy that an OCI ``cgroupsPath`` means; "" for none."""
    if not cgroups_path:
        return ""
    slice_, colon, unit = cgroups_path.partition(":")
    if not colon:
        return os.path.normpath("/" + cgroups_path).lstrip("/")
    prefix, _, name = unit.partition(":")
    unit = name if name.endswith(".slice") else f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    return os.path.normpath("/" + os.path.join(_slice_path(slice_), unit)).lstrip("/")


def _slice_path(slice_: str) -> str:
    """Return the path of a slice: a-b.slice is in a.slice (systemd.slice(5))."""
    if slice_ in ("", "-.slice"):
        return ""
    words = slice_.removesuffix(".slice").split("-")
    return os.path.join(*("-".join(words[:end]) + ".slice" for end in range(1, len(words) + 1)))


def _candidates(inner: str) -> Iterator[str]:
    hierarchies = [mount for mount in mounts() if mount.fstype in ("cgroup2", "cgroup") and mount.root == "/"]
    for mount in sorted(hierarchies, key=lambda mount: mount.fstype != "cgroup2"):
        if inner:
            yield os.path.join(mount.point, inner)
