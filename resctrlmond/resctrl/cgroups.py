# SPDX-License-Identifier: Apache-2.0
"""Control groups of processes (cgroup v2, and v1 beside it): which one a process is in, and who is in one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from resctrlmond.resctrl.errors import NoSuchProcess, PermissionDenied, ResctrlError
from resctrlmond.resctrl.mounts import Mount, mounts


class NoSuchCgroup(ResctrlError):
    """The path is no control group of this host, or it is gone."""


# On a v1 host, the hierarchies that every runtime puts its containers in, the most telling first.
_V1 = ("systemd", "pids", "memory", "cpu")


def cgroup_of(pid: int) -> str:
    """The absolute path of the control group that a process is in; "" if only in the root, which tells nothing.

    On v1 hybrid hosts the unified hierarchy is preferred where the process has a control group of its own in it.
    Raises NoSuchProcess.
    """
    path = f"/proc/{pid}/cgroup"
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            entries = [line.rstrip("\n").split(":", 2) for line in lines]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            raise NoSuchProcess(f"no process {pid}", path=path, errno=error.errno) from error
        raise
    where = {name: inner for _, controllers, inner in entries for name in _hierarchies(controllers)}
    mounted = {name: mount for mount in mounts() for name in _mounted_hierarchies(mount)}
    for name in ("", *_V1):
        inner = where.get(name, "/").removesuffix(" (deleted)")
        mount = mounted.get(name)
        # A path that leads out of the mount's root ("/../x") is another cgroup namespace's: not ours to follow.
        if inner != "/" and mount is not None and not inner.startswith("/.."):
            return mount.point + inner
    return ""


def _hierarchies(controllers: str) -> list[str]:
    # "" is v2; "name=systemd" is a named v1 hierarchy; "cpu,cpuacct" are controllers mounted together.
    return [name.removeprefix("name=") for name in controllers.split(",")]


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

    Raises NoSuchCgroup if it is none, PermissionDenied for the root of a hierarchy, whose tasks are everybody's.
    """
    real = os.path.realpath(path)
    roots = [mount.point for mount in mounts() if mount.fstype in ("cgroup", "cgroup2") and mount.root == "/"]
    if real in roots:
        raise PermissionDenied("is the root control group: it holds the whole host", path=real)
    inside = any(real.startswith(root + "/") for root in roots)
    if not inside or not os.path.exists(os.path.join(real, "cgroup.procs")):
        raise NoSuchCgroup("is no control group", path=path, remedy="Give the path below /sys/fs/cgroup")
    return real


def tasks(path: str) -> list[int]:
    """The thread ids in a control group and in all below it, threaded ones included; [] if it is gone."""
    return [tid for directory in _directories(path) for tid in _tasks_here(directory)]


def is_populated(path: str) -> bool:
    """Whether a task is in the control group or below; False also when it is gone."""
    try:
        # v2 knows it for the whole subtree (Documentation/admin-guide/cgroup-v2.rst, "cgroup.events").
        with open(os.path.join(path, "cgroup.events"), encoding="ascii") as lines:
            return "populated 1\n" in lines
    except FileNotFoundError:
        return any(True for directory in _directories(path) for _ in _tasks_here(directory))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise


def _directories(path: str) -> Iterator[str]:
    for directory, _, _ in os.walk(path):
        yield directory


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
            raise
    return []
