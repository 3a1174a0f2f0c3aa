# SPDX-License-Identifier: Apache-2.0
"""Control groups (cgroup v2, and v1 beside it): find the control group of a process, and list its tasks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.errors import LACKS, NoSuchProcess, NotRead, PermissionDenied, ResctrlError, not_read
from resctrlmond.resctrl.mounts import Mount, mounts


class NoSuchCgroup(ResctrlError):
    """The path is not a control group of this host, or the control group was removed."""


# On a v1 host, the hierarchies in which every runtime creates control groups, the most reliable first.
_V1 = ("systemd", "pids", "memory", "cpu")
# The errnos of operations on a removed control group.
_REMOVED = (errno.ENOENT, errno.ENODEV)

# A walk over this many takes a second, in each sweep. A workload with its own control groups has tens of them, but a
# user who may create control groups can create any number.
MAX_BELOW = 10_000


def cgroup_of(pid: int) -> str:
    """Return the absolute path of a process's control group; "" if the process is in the root control group.

    On hybrid hosts the v2 hierarchy is preferred, unless the process is in its root.
    Raises NoSuchProcess, NotRead.
    """
    where = _where(pid)
    points: dict[str, str] = {}
    for mount in mounts():
        for name in _mounted_hierarchies(mount):
            # If a hierarchy is mounted twice, the older mount is the host's own.
            points.setdefault(name, mount.point)
    for name in ("", *_V1):
        inner = where.get(name, "/")
        # A path outside the mount's root ("/../x") belongs to another cgroup namespace, so it cannot be resolved.
        if inner != "/" and name in points and not (inner + "/").startswith("/../"):
            return points[name] + inner
    return ""


def member_test(cgroup: str) -> Callable[[int], bool]:
    """Return a test whether a thread is in the control group or below it; False for a thread that has ended.

    The test uses the hierarchy of ``cgroup``: on v1 hosts a process has a control group in each hierarchy.
    """
    above = [mount for mount in mounts() if _mounted_hierarchies(mount) and cgroup.startswith(mount.point + "/")]
    if not above:
        return lambda _: False
    mount = max(above, key=lambda mount: len(mount.point))
    names = _mounted_hierarchies(mount)
    inner = cgroup.removeprefix(mount.point)

    def holds(tid: int) -> bool:
        try:
            where = _where(tid)
        except NoSuchProcess:
            return False
        return any((where.get(name, "") + "/").startswith(inner + "/") for name in names)

    return holds


def _where(tid: int) -> dict[str, str]:
    """Return the thread's control group in each hierarchy, relative to its root (cgroups(7), /proc/PID/cgroup)."""
    path = f"/proc/{tid}/cgroup"
    try:
        with open(path, "rb") as table:
            text = os.fsdecode(table.read())
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            raise NoSuchProcess(f"no process {tid}", path=path, errno=error.errno) from error
        raise not_read(error, f"find the control group of thread {tid}", path) from error
    # A control group's name may contain any byte except a newline, so do not split at a carriage return.
    entries = [line.split(":", 2) for line in text.split("\n") if line]
    # "" is v2; "name=systemd" is a named v1 hierarchy; "cpu,cpuacct" are controllers mounted together.
    return {
        name.removeprefix("name="): inner.removesuffix(" (deleted)")
        for _, controllers, inner in entries
        for name in controllers.split(",")
    }


def _mounted_hierarchies(mount: Mount) -> list[str]:
    if mount.root != "/":
        return []
    if mount.fstype == "cgroup2":
        return [""]
    if mount.fstype == "cgroup":
        return [option.removeprefix("name=") for option in mount.options]
    return []


def check(path: str) -> str:
    """Return the canonical path of a control group that a caller has named.

    Raises NoSuchCgroup if it is not a control group, PermissionDenied for the root of a hierarchy, which has the
    tasks of the whole host, and NotRead if the host's mounts cannot be read.
    """
    try:
        real = os.path.realpath(path)
    except ValueError:  # the path has a NUL, or a character that cannot be encoded
        raise NoSuchCgroup("is not a path", path=repr(path)) from None
    roots = [mount.point for mount in mounts() if mount.fstype in ("cgroup", "cgroup2") and mount.root == "/"]
    if real in roots:
        raise PermissionDenied("is the root control group: it holds the whole host", path=real)
    inside = any(real.startswith(root + "/") for root in roots)
    if not inside or not os.path.exists(os.path.join(real, "cgroup.procs")):
        raise NoSuchCgroup("is not a control group", path=path, remedy="Give a path below /sys/fs/cgroup")
    return real


def is_there(path: str) -> bool:
    """Whether the control group's directory exists. Raises NotRead."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in _REMOVED:
            return False
        raise not_read(error, "look for the control group", path) from error
    return True


def tasks(path: str) -> list[int]:
    """List the thread IDs in a control group and all below it, including threaded ones; [] if it was removed.

    Raises NotRead, also if there are more than MAX_BELOW control groups below it.
    """
    return [tid for directory in _directories(path) for tid in _tasks_here(directory)]


def is_populated(path: str) -> bool:
    """Whether a task is in the control group or below; False also if it was removed. Raises NotRead."""
    file = os.path.join(path, "cgroup.events")
    try:
        # v2 reports it for the whole subtree (Documentation/admin-guide/cgroup-v2.rst, "cgroup.events").
        with open(file, encoding="ascii") as lines:
            return "populated 1\n" in lines
    except FileNotFoundError:
        return any(True for directory in _directories(path) for _ in _tasks_here(directory))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise not_read(error, "check whether the control group has tasks", file) from error


def cpu_time_ns(path: str) -> int | None:
    """Return the CPU time (ns) of all tasks of a control group, including ended ones; None if it is not known.

    From cpu.stat, which every control group of v2 has (Documentation/admin-guide/cgroup-v2.rst, "CPU"). Raises
    NotRead without descriptors or memory, which says nothing of the control group.
    """
    file = os.path.join(path, "cpu.stat")
    try:
        with open(file, encoding="ascii") as lines:
            values = dict(line.split() for line in lines)
        return int(values["usage_usec"]) * 1000
    except OSError as error:
        if error.errno in LACKS:
            raise not_read(error, "read the CPU time of the control group", file) from error
        return None
    except (ValueError, KeyError):
        return None


def _directories(path: str) -> Iterator[str]:
    # Not os.walk(), which recurses in Python 3.11: the workload chooses how deep its control groups are nested.
    waiting = [path]
    seen = 0
    while waiting:
        directory = waiting.pop()
        seen += 1
        if seen > MAX_BELOW:
            raise NotRead(f"has more than {MAX_BELOW} control groups below it, and is not looked through", path=path)
        try:
            with os.scandir(directory) as entries:
                below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            # A control group that was removed has no tasks; the tasks of one that cannot be listed are unknown.
            if error.errno not in _REMOVED:
                raise not_read(error, "list the control group", path) from error
            continue
        yield directory
        waiting.extend(reversed(below))


def _tasks_here(directory: str) -> list[int]:
    # v2 lists threads in cgroup.threads, also for a threaded control group, whose cgroup.procs cannot be read.
    # In v1 the file is called tasks.
    for name in ("cgroup.threads", "tasks"):
        try:
            with open(os.path.join(directory, name), encoding="ascii") as lines:
                return [int(line) for line in lines]
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENODEV:
                return []
            raise not_read(error, "list the tasks of the control group", os.path.join(directory, name)) from error
    return []
