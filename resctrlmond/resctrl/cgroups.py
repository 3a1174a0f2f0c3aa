# SPDX-License-Identifier: Apache-2.0
"""Control groups of processes (cgroup v2, and v1 beside it): which one a process is in, and who is in one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.errors import NoSuchProcess, NotRead, PermissionDenied, ResctrlError, not_read
from resctrlmond.resctrl.mounts import Mount, mounts


class NoSuchCgroup(ResctrlError):
    """The path is no control group of this host, or it is gone."""


# On a v1 host, the hierarchies that every runtime puts its containers in, the most telling first.
_V1 = ("systemd", "pids", "memory", "cpu")
# What a control group's directory answers once it is removed.
_GONE = (errno.ENOENT, errno.ENODEV)

# To look at so many takes a second, each time that they are swept. A workload with control groups of its own has
# tens; who may make them may make any number.
MAX_BELOW = 10_000


def cgroup_of(pid: int) -> str:
    """The absolute path of the control group that a process is in; "" if only in the root, which tells nothing.

    On v1 hybrid hosts the unified hierarchy is preferred where the process has a control group of its own in it.
    Raises NoSuchProcess, NotRead.
    """
    where = _where(pid)
    points: dict[str, str] = {}
    for mount in mounts():
        for name in _mounted_hierarchies(mount):
            # Where a hierarchy is mounted twice, the host's own place is the older one.
            points.setdefault(name, mount.point)
    for name in ("", *_V1):
        inner = where.get(name, "/")
        # A path that leads out of the mount's root ("/../x") is another cgroup namespace's: not ours to follow.
        if inner != "/" and name in points and not (inner + "/").startswith("/../"):
            return points[name] + inner
    return ""


def member_test(cgroup: str) -> Callable[[int], bool]:
    """A test whether a thread is in the control group or below it; False for a thread that is gone.

    It asks about the hierarchy that ``cgroup`` is of: on v1 hosts a process has another place in each.
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
    """Hierarchy -> the thread's control group in it, from the hierarchy's root (cgroups(7), /proc/PID/cgroup)."""
    path = f"/proc/{tid}/cgroup"
    try:
        with open(path, "rb") as table:
            text = os.fsdecode(table.read())
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            raise NoSuchProcess(f"no process {tid}", path=path, errno=error.errno) from error
        raise not_read(error, f"tell the control group of thread {tid}", path) from error
    # A control group's name may hold every byte but the newline: a carriage return ends no line.
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
    """The canonical path of a control group that may be swept, given by a caller.

    Raises NoSuchCgroup if it is none, PermissionDenied for the root of a hierarchy, whose tasks are everybody's,
    NotRead where the host's mounts cannot be read.
    """
    try:
        real = os.path.realpath(path)
    except ValueError:  # a NUL, or what no encoding has
        raise NoSuchCgroup("is no path", path=repr(path)) from None
    roots = [mount.point for mount in mounts() if mount.fstype in ("cgroup", "cgroup2") and mount.root == "/"]
    if real in roots:
        raise PermissionDenied("is the root control group: it holds the whole host", path=real)
    inside = any(real.startswith(root + "/") for root in roots)
    if not inside or not os.path.exists(os.path.join(real, "cgroup.procs")):
        raise NoSuchCgroup("is not a control group", path=path, remedy="Give a path below /sys/fs/cgroup")
    return real


def is_there(path: str) -> bool:
    """Whether the control group's directory stands. Raises NotRead."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise not_read(error, "look for the control group", path) from error
    return True


def tasks(path: str) -> list[int]:
    """The thread ids in a control group and all below it, also of threaded ones; [] if it is gone.

    Raises NotRead, also for one that has more than MAX_BELOW others below it.
    """
    return [tid for directory in _directories(path) for tid in _tasks_here(directory)]


def is_populated(path: str) -> bool:
    """Whether a task is in the control group or below; False also when it is gone. Raises NotRead."""
    file = os.path.join(path, "cgroup.events")
    try:
        # v2 knows it for the whole subtree (Documentation/admin-guide/cgroup-v2.rst, "cgroup.events").
        with open(file, encoding="ascii") as lines:
            return "populated 1\n" in lines
    except FileNotFoundError:
        return any(True for directory in _directories(path) for _ in _tasks_here(directory))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise not_read(error, "tell whether the control group has tasks", file) from error


def cpu_time_ns(path: str) -> int | None:
    """The CPU time (ns) that all tasks of a control group have used, ended ones included; None if it is not known.

    From cpu.stat, which every control group of v2 has (Documentation/admin-guide/cgroup-v2.rst, "CPU").
    """
    try:
        with open(os.path.join(path, "cpu.stat"), encoding="ascii") as lines:
            values = dict(line.split() for line in lines)
        return int(values["usage_usec"]) * 1000
    except (OSError, ValueError, KeyError):
        return None


def _directories(path: str) -> Iterator[str]:
    # Not os.walk(), which recurses in Python 3.11: how deep its control groups are is the workload's own choice.
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
            # One that is gone has no tasks; of one that cannot be listed nobody knows.
            if error.errno not in _GONE:
                raise not_read(error, "list the control group", path) from error
            continue
        yield directory
        waiting.extend(reversed(below))


def _tasks_here(directory: str) -> list[int]:
    # v2 lists threads in cgroup.threads, of a threaded control group too, whose cgroup.procs cannot be read;
    # v1 calls the same file tasks.
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
