# SPDX-License-Identifier: Apache-2.0
"""Control groups (cgroup v2, and v1 beside it): find the control group of a process, and list its tasks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator

import msgspec

from resctrlmond.resctrl import kernel_files
from resctrlmond.resctrl.errors import LACKS, NoSuchProcess, NotRead, PermissionDenied, ResctrlError, not_read
from resctrlmond.resctrl.mounts import Mount, mounts
from resctrlmond.resctrl.processes import check_visible


class NoSuchCgroup(ResctrlError):
    """The path is not a control group of this host, or the control group was removed."""


# On a v1 host, the hierarchies in which every runtime creates control groups, the most reliable first.
_V1 = ("systemd", "pids", "memory", "cpu")
# The errnos of operations on a removed control group.
_REMOVED = (errno.ENOENT, errno.ENODEV)

_LINKS_IF_NONE_BELOW = 2

# A walk over this many takes a second, in each sweep. A workload with its own control groups has tens of them, but a
# user who may create control groups can create any number.
MAX_BELOW = 10_000


def cgroup_of(pid: int) -> str:
    """Return the absolute path of a process's control group; "" if the process is in the root control group.

    On hybrid hosts the v2 hierarchy is preferred, unless the process is in its root, or in the control group of a
    container that only v1 has. Raises NoSuchProcess, NotRead.
    """
    where = _where(pid)
    # A path outside the mount's root ("/../x") belongs to another cgroup namespace, so it cannot be resolved.
    inside = {name: inner for name, inner in where.items() if inner != "/" and not (inner + "/").startswith("/../")}
    wanted = [name for name in ("", *_V1) if name in inside]
    if not wanted:
        return ""
    # systemd creates its control groups in both. A runtime without systemd creates those of containers in v1, and the
    # process stays in the runtime's service in v2.
    if {"", "systemd"} <= inside.keys() and not (inside[""] + "/").startswith(inside["systemd"] + "/"):
        wanted.sort(key=lambda name: not name)

    def path_in(hierarchies: Iterable[_Hierarchy]) -> tuple[_Hierarchy, str] | None:
        for name in wanted:
            for hierarchy in hierarchies:
                # If a hierarchy is mounted twice, the older mount is the host's own.
                if name in hierarchy.names:
                    return hierarchy, hierarchy.point + inside[name]
        return None

    found = _find(path_in)
    return found[1] if found else ""


def path_of(inner: str) -> str:
    """Return the absolute path of a control group that systemd names relative to the root; "" if there is none.

    Raises NotRead.
    """

    def path_in(hierarchies: Iterable[_Hierarchy]) -> tuple[_Hierarchy, str] | None:
        ordered = sorted(hierarchies, key=lambda found: "" not in found.names)
        named = [found for found in ordered if found.names & {"", "systemd"}]
        return next(((found, found.point + inner) for found in named if _identity(found.point + inner)), None)

    found = _find(path_in)
    return found[1] if found else ""


def below_mount(path: str) -> str:
    """Return the path of a control group below the mount point of its hierarchy; "" if it is in none.

    Raises NotRead.
    """
    found = _find(lambda hierarchies: _above(path, hierarchies))
    return path.removeprefix(found[0].point) if found else ""


def member_test(cgroup: str) -> Callable[[int], bool]:
    """Return a test whether a thread is in the control group or below it; False for a thread that has ended.

    The test uses the hierarchy of ``cgroup``: on v1 hosts a process has a control group in each hierarchy.
    Raises NotRead.
    """
    found = _find(lambda hierarchies: _above(cgroup, hierarchies))
    if not found:
        return lambda _: False
    names = found[0].names
    inner = cgroup.removeprefix(found[0].point)

    def holds(tid: int) -> bool:
        try:
            where = _where(tid)
        except NoSuchProcess:
            return False
        return any((where.get(name, "") + "/").startswith(inner + "/") for name in names)

    return holds


class _Hierarchy(msgspec.Struct, frozen=True):
    """A mounted hierarchy of control groups. ``identity`` is the device and inode of its root directory.

    ``names`` are "" for v2; the controllers, or the name, of a v1 hierarchy.
    """

    names: frozenset[str]
    point: str
    identity: tuple[int, int]

    def contains(self, path: str) -> bool:
        """Return whether the path, which has the prefix ``point``, is still in this hierarchy, or does not exist.

        Something else may have been mounted at ``point``, or between it and the path. Raises NotRead.
        """
        # All control groups of a hierarchy are on its device (fs/kernfs/mount.c, kernfs_fill_super()).
        there = _identity(path)
        return _identity(self.point) == self.identity and (there is None or there[0] == self.identity[0])


# The hierarchies when the table of mounts was last read. The table has a line for each mount of each container, and
# changes with each container start: it is read again only if these have no answer, or one that is no longer mounted.
# Otherwise a createRuntime takes 1.1 times the CPU time on a host with 25 mounts, and more with more mounts.
_known: tuple[_Hierarchy, ...] = ()


def _find(search: Callable[[Iterable[_Hierarchy]], tuple[_Hierarchy, str] | None]) -> tuple[_Hierarchy, str] | None:
    """Search the mounted hierarchies for a path, and return its hierarchy and the path. Raises NotRead."""
    global _known  # noqa: PLW0603 - one for the process, as its mount namespace; replaced in one step
    found = search(_known)
    if found and found[0].contains(found[1]):
        return found
    _known = tuple(_mounted())
    found = search(_known)
    return found if found and found[0].contains(found[1]) else None


def _mounted() -> Iterator[_Hierarchy]:
    for mount in mounts():
        names = _names(mount)
        # Another mount may hide this one.
        if names and (identity := _identity(mount.point)) and identity[0] == mount.device:
            yield _Hierarchy(frozenset(names), mount.point, identity)


def _above(path: str, hierarchies: Iterable[_Hierarchy]) -> tuple[_Hierarchy, str] | None:
    """Return the hierarchy of which the path is a part, and the path; None if it is in none."""
    above = [found for found in hierarchies if (path + "/").startswith(found.point + "/")]
    return (max(above, key=lambda found: len(found.point)), path) if above else None


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and the inode of a directory; None if it does not exist. Raises NotRead."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in LACKS:
            raise not_read(error, "find where control groups are mounted", path) from error
        return None
    return status.st_dev, status.st_ino


def _where(tid: int) -> dict[str, str]:
    """Return the thread's control group in each hierarchy, relative to its root (cgroups(7), /proc/PID/cgroup)."""
    path = f"/proc/{tid}/cgroup"
    try:
        text = os.fsdecode(kernel_files.read(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            check_visible(tid)
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


def _names(mount: Mount) -> list[str]:
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
    found = _find(lambda hierarchies: _above(real, hierarchies))
    if found and found[0].point == real:
        raise PermissionDenied("is the root control group: it holds the whole host", path=real)
    if not os.path.exists(real):
        raise NoSuchCgroup(
            "does not exist", path=path, remedy="Give the path of a control group below /sys/fs/cgroup"
        )
    if not found or not os.path.exists(os.path.join(real, "cgroup.procs")):
        raise NoSuchCgroup("is not a control group", path=path, remedy="Give a path below /sys/fs/cgroup")
    return real


def has_version_2() -> bool:
    """Whether a hierarchy of version 2 is mounted. Raises NotRead."""
    return any("" in hierarchy.names for hierarchy in _mounted())


def is_there(path: str) -> bool:
    """Whether the control group's directory exists. Raises NotRead."""
    return inode(path) is not None


def inode(path: str) -> int | None:
    """Return the inode number of the control group's directory; None if it does not exist. Raises NotRead."""
    try:
        return os.stat(path).st_ino
    except OSError as error:
        if error.errno in _REMOVED:
            return None
        raise not_read(error, "look for the control group", path) from error


def inodes_to(path: str) -> list[tuple[str, int | None]]:
    """Return the name and the inode number of each directory from the root control group to a path.

    The inode number is None if the directory does not exist. [] if the path is not in the hierarchy of v2. Raises
    NotRead.
    """
    found = _find(lambda hierarchies: _above(path, hierarchies))
    if not found or "" not in found[0].names:
        return []
    at = found[0].point
    levels = [("", inode(at))]
    for name in filter(None, path.removeprefix(at).split("/")):
        at = f"{at}/{name}"
        levels.append((name, inode(at)))
    return levels


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
        return b"populated 1\n" in kernel_files.read(file)
    except FileNotFoundError:
        return any(True for directory in _directories(path) for _ in _tasks_here(directory))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise not_read(error, "check whether the control group has tasks", file) from error


def cpu_time_ns(path: str) -> int | None:
    """Return the CPU time (ns) of all tasks of a control group, including ended ones; None if it is not known.

    From cpu.stat, which every control group of v2 has (Documentation/admin-guide/cgroup-v2.rst, "CPU"). Raises
    NotRead without descriptors or memory, which does not depend on the control group.
    """
    file = f"{path}/cpu.stat"
    try:
        values = dict(line.split() for line in kernel_files.read(file).splitlines())
        return int(values[b"usage_usec"]) * 1000
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
            below = _below(directory)
        except OSError as error:
            # A control group that was removed has no tasks; the tasks of one that cannot be listed are unknown.
            if error.errno not in _REMOVED:
                raise not_read(error, "list the control group", path) from error
            continue
        yield directory
        waiting.extend(reversed(below))


def _below(directory: str) -> list[str]:
    """List the control groups directly below one. Raises OSError."""
    # The link count of a directory is 2 more than the number of directories in it (fs/kernfs/inode.c). Without this
    # look, the list of tasks takes 2.4 times the CPU time, and the recovery of 500 containers 1.07 times.
    if os.stat(directory).st_nlink == _LINKS_IF_NONE_BELOW:
        return []
    with os.scandir(directory) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _tasks_here(directory: str) -> list[int]:
    # v2 lists threads in cgroup.threads, also for a threaded control group, whose cgroup.procs cannot be read.
    # In v1 the file is called tasks.
    for name in ("cgroup.threads", "tasks"):
        try:
            return [int(line) for line in kernel_files.read(f"{directory}/{name}").splitlines()]
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENODEV:
                return []
            raise not_read(error, "list the tasks of the control group", f"{directory}/{name}") from error
    return []
