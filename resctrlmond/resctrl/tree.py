# SPDX-License-Identifier: Apache-2.0
"""Read and change a mounted resctrl filesystem: its classes and monitoring groups."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Self

import msgspec

from resctrlmond.resctrl import bandwidth, counters, errors, kernel_files
from resctrlmond.resctrl.membership import KernelMembership, Membership, MembershipReader, SimulatedMembership
from resctrlmond.resctrl.mounts import Mounting, mount_of, mounting_at
from resctrlmond.resctrl.undo import undoing

DEFAULT_PATH = "/sys/fs/resctrl"
# Extended attribute by which the simulator identifies itself.
SIMULATION_ATTRIBUTE = "user.resctrlmond.simulation"
SIMULATION_FSTYPE = "fuse.resctrlmond-sim"
# Type and vendor of the processors. ProcSubset=pid of the unit hides /proc/cpuinfo.
MODALIAS = "/sys/devices/system/cpu/modalias"
# Extended attributes of a simulated machine: why its figures are not exact, and its modalias.
INEXACT_ATTRIBUTE = "user.resctrlmond.inexact"
MODALIAS_ATTRIBUTE = "user.resctrlmond.modalias"
_MON = "_MON"
_KERNEL_MODE = "info/kernel_mode"

_MON_GROUPS = "mon_groups"
# Directories of a control group that are not control groups themselves.
_NOT_CLASSES = frozenset({"info", "mon_data", _MON_GROUPS})
# These errnos do not show that resctrl is unmounted, so the groups are not given up.
_UNKNOWN = errors.LACKS | {errno.EIO}
# rdtgroup_init() creates the mount point, and is called only if the processor can control or monitor resources.
_NO_RESCTRL = (
    "The kernel creates it only if the processor has resource control or monitoring, and CONFIG_X86_CPU_RESCTRL (or "
    "the like) is set. 'resctrlctl doctor' explains what is missing; without the hardware, try the commands on a "
    "simulated machine: resctrlmond --simulate /tmp/sim"
)
# The unit of the witness has it keep 1024 records, and each write of a task makes two of them.
_WRITES_BETWEEN_READS = 200
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class GroupRef(msgspec.Struct, frozen=True, order=True):
    """The location of a monitoring group: its control group ("" for the root) and the name of its directory."""

    class_: str
    name: str

    @property
    def path(self) -> str:
        """The path of the directory, relative to the tree."""
        groups = f"{self.class_}/{_MON_GROUPS}" if self.class_ else _MON_GROUPS
        return f"{groups}/{self.name}"


class Found(msgspec.Struct, frozen=True):
    """A monitoring group that exists: ``gid`` is its mark, ``nonce`` its directory's mtime in ns.

    The mtime of a directory that nobody has set is not stable, but its ``inode`` is, until the next mount.
    """

    ref: GroupRef
    gid: int
    nonce: int
    path: str
    inode: int


class Capacity(msgspec.Struct, frozen=True):
    """The RMIDs and events of one monitoring resource (``L3_MON``, ``PERF_PKG_MON``)."""

    resource: str
    rmids: int
    events: tuple[str, ...]


class Tree:
    """A resctrl filesystem at a path.

    No descriptor stays open on it between two calls, so that the daemon never prevents an unmount.
    """

    def __init__(self, path: str, simulation: str | None) -> None:
        self.path = path
        self.simulation = simulation
        self._membership: MembershipReader = KernelMembership() if simulation is None else SimulatedMembership(path)
        # last_cmd_status is one text for the whole host: another operation of the daemon must not come between an
        # operation and the read of its text. The kernel serializes operations anyway (rdtgroup_mutex).
        self._command_lock = threading.Lock()
        # Called after each _WRITES_BETWEEN_READS moves of tasks, before the witness forgets the first of them.
        self.on_many_writes: Callable[[], None] = lambda: None
        self._writes = 0
        # Both in one tuple, because threads read groups at the same time. Without the layout, a createRuntime takes
        # 1.08 times the CPU time.
        self._layout: tuple[Mounting, counters.Layout] = ((0, 0), ())
        # The configuration of the bandwidth events on a mount whose configuration cannot change. Without it, a
        # createRuntime takes 1.07 times the CPU time.
        self._fixed_configuration: tuple[Mounting, bandwidth.Configuration] | None = None

    @classmethod
    def open(cls, path: str = DEFAULT_PATH, *, allow_simulation: bool = False) -> Self:
        """Return the resctrl that is mounted at ``path``.

        A simulator is accepted only with ``allow_simulation``. Raises NotMounted for everything else: a plain
        directory, another filesystem, a bind mount of a part of resctrl.
        """
        path = os.path.abspath(path)
        simulation = _identify(path)
        if simulation is not None and not allow_simulation:
            raise errors.NotMounted(
                "is a simulated resctrl",
                path=path,
                remedy="Ask for it by name (--simulate), or mount the real one",
            )
        return cls(path, simulation)

    def check_mounted(self) -> None:
        """Raise NotMounted if resctrl is not mounted at the path, or NotRead if this is unknown."""
        if _identify(self.path) != self.simulation:
            raise errors.NotMounted("is another filesystem than before", path=self.path)

    def mounting(self) -> Mounting:
        """Return the identity of the mount at the path, which is new after each mount; (0, 0) if it is unknown."""
        return mounting_at(self.path)

    # -- reading the tree

    def full_path(self, ref: GroupRef) -> str:
        """Return the absolute path of the group's directory."""
        return f"{self.path}/{ref.path}"

    def classes(self) -> list[str]:
        """List the control groups that can have monitoring groups, the root ("") first."""
        names = self._directories("")
        if "info" not in names:
            self.check_mounted()
        # Only a control group has mon_groups; its name can be any.
        return ["", *(name for name in names if name not in _NOT_CLASSES and self._can_have_groups(name))]

    def has_class(self, class_: str) -> bool:
        """Whether the control group exists; "" is the root, which always exists."""
        if self._can_have_groups(class_):
            return True
        self.check_mounted()
        return False

    def no_such_class(self, class_: str) -> errors.NoSuchClass:
        """Return the error for a class that does not exist, or that cannot have monitoring groups."""
        return errors.NoSuchClass(
            "there is no such class",
            path=os.path.join(self.path, class_).rstrip("/"),
            remedy="'resctrlctl status' lists the classes",
        )

    def groups(self) -> list[GroupRef]:
        """List every monitoring group of the host, of all programs."""
        found: list[GroupRef] = []
        for class_ in self.classes():
            # Another program may remove the class meanwhile.
            with contextlib.suppress(errors.NoSuchGroup):
                found += [GroupRef(class_, name) for name in self._directories(os.path.join(class_, _MON_GROUPS))]
        return found

    def scan(self) -> list[Found]:
        """Find every monitoring group of the host, of all programs."""
        groups = map(self.find, self.groups())
        return [group for group in groups if group is not None]

    def find(self, ref: GroupRef) -> Found | None:
        """Return the group, or None if it does not exist or resctrl is not mounted (see check_mounted())."""
        path = self.full_path(ref)
        try:
            with self._typed("look at the monitoring group", path):
                status = os.stat(path, follow_symlinks=False)
        except (errors.NoSuchGroup, errors.NotMounted):
            return None
        return Found(ref, status.st_gid, status.st_mtime_ns, path, status.st_ino)

    def read(self, directory: GroupRef | str, mounting: Mounting | None = None) -> list[counters.Reading]:
        """Read all counters of a group, or of a class by its path in the tree, in order of domain and event.

        ``mounting``: the mount of the group, if the caller knows it. Raises NoSuchGroup.
        """
        # Only a new mount changes the events of a domain. Identified before a group of it is opened.
        mounting = mounting or self.mounting()
        path = directory if isinstance(directory, str) else directory.path
        with self._opened(path, "read the counters") as fd:
            mounting_known, known = self._layout
            readings, layout = counters.read_mon_data(fd, known if mounting == mounting_known else ())
            self._layout = mounting, layout
            return readings

    def tasks(self, directory: GroupRef | str) -> list[int]:
        """List the thread IDs in a group, or in a class and its groups by its path in the tree.

        Slow, because the kernel walks over all threads of the host.
        """
        path = directory if isinstance(directory, str) else directory.path
        text = self._read_text(f"{path}/tasks" if path else "tasks", "list the tasks of the group")
        # Kernels with resctrl for devices list groups of these, as "iommu_group:4".
        return [int(line) for line in text.split() if line.isdecimal()]

    def cpus(self, ref: GroupRef) -> str:
        """Return the CPUs whose tasks without a group are counted in this one, such as "0-3"; "" for none."""
        return self._read_text(os.path.join(ref.path, "cpus_list"), "list the CPUs of the group").strip()

    def membership(self, tid: int) -> Membership:
        """Return the class and group of a thread, in constant time. Raises NoSuchProcess, NotMounted."""
        try:
            return self._membership.of(tid)
        except errors.ResctrlError:
            # /proc shows that the kernel's resctrl is not mounted, but not that a simulator is not.
            if self.simulation is not None:
                self.check_mounted()
            raise

    def capacity(self) -> list[Capacity]:
        """Return the capacity of each monitoring resource. Raises MonitoringUnavailable if there is none."""
        resources = [name for name in self._directories("info") if name.endswith(_MON)]
        if not resources:
            raise errors.MonitoringUnavailable(
                "offers no monitoring",
                path=os.path.join(self.path, "info"),
                remedy="The CPU has none, or rdt= on the kernel command line disables it",
            )
        return [
            Capacity(
                resource=resource,
                rmids=int(self._read_text(f"info/{resource}/num_rmids", "read the number of RMIDs")),
                events=counters.offered(self._read_text(f"info/{resource}/mon_features", "read the events")),
            )
            for resource in resources
        ]

    def free_rmids(self) -> int:
        """Return the number of RMIDs that no class and no group has.

        Includes those in limbo, which the kernel does not state (rdtgroup.c, alloc_rmid()). Raises
        MonitoringUnavailable, NotMounted, NotRead.
        """
        total = min(resource.rmids for resource in self.capacity())
        # Each class, including the root class, has one as well.
        return total - len(self.classes()) - len(self.groups())

    def bandwidth_configuration(self, mounting: Mounting | None = None) -> bandwidth.Configuration:
        """Return how the bandwidth events of groups count now. Raises NotRead, NotMounted.

        ``mounting``: the mount of a group of which the counters are read next.
        """
        mounting = mounting or self.mounting()
        if self._fixed_configuration is not None and self._fixed_configuration[0] == mounting:
            return self._fixed_configuration[1]
        modes, files, is_fixed = list[bandwidth.Mode](), list[str](), any(mounting)
        resources, modalias = self._bandwidth_resources(), self._read_modalias()
        for resource, features in resources.items():
            assign_mode = self._read_text_if_there(f"info/{resource}/mbm_assign_mode")
            modes.append(bandwidth.mode_of(assign_mode, features, modalias))
            # AMD's BMEC has one file for each event in mon_features; mbm_event has one in each event's directory.
            of_resource = [f"{resource}/{name}" for name in features.split() if name.endswith("_config")]
            if modes[-1] is bandwidth.Mode.ASSIGNED:
                of_resource = [f"{resource}/event_configs/{name}/event_filter" for name in features.split()]
            files += of_resource
            is_fixed = is_fixed and bool(features) and not (assign_mode or of_resource)
        with self._command_lock:  # reading event_filter clears last_cmd_status
            texts = {file: self._read_text_if_there(f"info/{file}").strip() for file in files}
        kernel_mode = self._read_text_if_there(_KERNEL_MODE)
        found = bandwidth.Configuration(
            bandwidth.worst_mode(modes),
            {file: text for file, text in texts.items() if text},
            bandwidth.kernel_mode_of(kernel_mode),
        )
        # The kernel creates the files of info with the mount, and mon_features changes with the mode only.
        if is_fixed and not kernel_mode:
            self._fixed_configuration = mounting, found
        return found

    def _bandwidth_resources(self) -> dict[str, str]:
        """Return the text of mon_features of each resource with bandwidth events; of ``L3_MON`` if none has any."""
        found = {}
        for resource in self._directories("info"):
            if resource.endswith(_MON):
                features = self._read_text_if_there(f"info/{resource}/mon_features")
                if any(counters.event(name).restarts for name in features.split()):
                    found[resource] = features
        return found or {f"L3{_MON}": self._read_text_if_there(f"info/L3{_MON}/mon_features")}

    def bandwidth(self) -> bandwidth.Bandwidth:
        """Return how memory bandwidth is counted now, with the assignable counters. Raises NotRead, NotMounted."""
        modes, can_assign, modalias = list[bandwidth.Mode](), False, self._read_modalias()
        number, available = dict[str, int](), dict[str, int]()
        for resource, features in self._bandwidth_resources().items():
            name = resource.removesuffix(_MON)
            assign_mode = self._read_text_if_there(f"info/{resource}/mbm_assign_mode")
            modes.append(bandwidth.mode_of(assign_mode, features, modalias))
            can_assign |= bandwidth.can_assign(assign_mode)
            number |= bandwidth.by_domain(name, self._read_text_if_there(f"info/{resource}/num_mbm_cntrs"))
            if modes[-1] is bandwidth.Mode.ASSIGNED:
                with self._command_lock:  # reading it clears last_cmd_status
                    text = self._read_text_if_there(f"info/{resource}/available_mbm_cntrs")
                available |= bandwidth.by_domain(name, text)
        return bandwidth.Bandwidth(
            bandwidth.worst_mode(modes),
            can_assign,
            number,
            available,
            bandwidth.kernel_mode_of(self._read_text_if_there(_KERNEL_MODE)),
        )

    def inexact(self) -> str:
        """Return why the figures of a simulation are not exact now, "" if they can be.

        On some hosts a simulator does not see every task. The kernel's resctrl always counts all tasks.
        """
        if self.simulation is None:
            return ""
        try:
            return os.getxattr(self.path, INEXACT_ATTRIBUTE).decode("utf-8", "replace")
        except OSError:
            return ""  # unmounted, which the next reading reports

    def last_cmd_status(self) -> str:
        """Return the kernel's text about the last command, "" if it cannot be read."""
        try:
            return self._read_text("info/last_cmd_status", "read the last status")
        except errors.ResctrlError:
            return ""

    # -- changing the tree

    def create(self, ref: GroupRef, nonce: int) -> Found:
        """Create a monitoring group with ``nonce`` as its mtime.

        kernfs gives it the group ID of this process at mkdir. Raises NoSuchClass, GroupExists, RmidsExhausted,
        KernelRefused. If only the mtime cannot be set, the group is removed again.
        """
        path = self.full_path(ref)
        try:
            with self._command(errors.CREATE, path):
                self._make_directory(path)
        except errors.NoSuchGroup as error:
            raise self.no_such_class(ref.class_) from error
        try:
            return self.set_nonce(ref, nonce)
        except (errors.NoSuchGroup, errors.NotMounted):
            raise
        except errors.ResctrlError:
            with undoing(path):
                self.remove(ref)
            raise

    def _make_directory(self, path: str) -> None:
        """Create a directory; after an error, last_cmd_status has the text of this command only. Raises OSError."""
        # Not os.makedirs(): if resctrl is not mounted, nothing must be created.
        try:
            os.mkdir(path, 0o755)
        except OSError:
            # Before Linux 6.16 mkdir appends to the text of earlier commands, and an error of the VFS leaves it. An
            # empty list of tasks clears it. To clear it before each mkdir would cost each group three calls.
            with contextlib.suppress(OSError):
                _write(f"{self.path}/tasks", b"\n")
            os.mkdir(path, 0o755)

    def set_nonce(self, ref: GroupRef, nonce: int) -> Found:
        """Set the mtime of the group's directory to ``nonce``. kernfs keeps it as long as the directory exists."""
        path = self.full_path(ref)
        with self._typed("mark the monitoring group", path):
            os.utime(path, ns=(nonce, nonce), follow_symlinks=False)
        found = self.find(ref)
        if found is None:
            raise errors.NoSuchGroup("was removed by another program as soon as it was created", path=path)
        return found

    def remove(self, ref: GroupRef) -> bool:
        """Remove a group; its tasks return to its class. Returns False if the group did not exist."""
        path = self.full_path(ref)
        try:
            with self._typed("remove the monitoring group", path):
                os.rmdir(path)
        except errors.NoSuchGroup:
            return False
        return True

    def rename(self, old: GroupRef, new: GroupRef) -> None:
        """Rename a group, which keeps its RMID and counters; its tasks change to the new class.

        Raises KernelRefused if the kernel does not support it (before 6.5), or the group monitors CPUs.
        """
        source, target = self.full_path(old), self.full_path(new)
        # rename() fails with ENOENT both for a missing source and for a missing target class, so check the class.
        if not self.has_class(new.class_):
            raise self.no_such_class(new.class_)
        with self._command(f"move the monitoring group to {target}", source):
            os.rename(source, target)

    def write_task(self, directory: str, tid: int) -> None:
        """Move one thread into a group or class, given by its directory relative to the tree.

        Raises NoSuchProcess, ClassMismatch, NoSuchGroup, PermissionDenied, KernelRefused.
        """
        self._write_task(directory, tid, None)

    def _write_task(self, directory: str, tid: int, before: Membership | None) -> bool:
        path = f"{self.path}/{directory}/tasks" if directory else f"{self.path}/tasks"
        if tid <= 0:
            # 0 would move the calling thread. The number of a process in another PID namespace reads as 0.
            raise errors.NoSuchProcess(f"{tid} is not a task id", path=path)
        try:
            with self._command(f"move task {tid}", path):
                if before is not None and self.membership(tid) != before:
                    return False
                # Decimal without leading zeros, because the kernel reads a leading zero as octal.
                _write(path, b"%d\n" % tid)
                self._count_write()
        except errors.KernelRefused as error:
            # The newest kernels clear last_cmd_status at each operation on a group, also of another program. Then the
            # membership of the task shows the reason.
            class_ = directory.partition(f"{_MON_GROUPS}/")[0].rstrip("/")
            has_no_status = error.errno == errno.EINVAL and not error.status
            if not has_no_status or class_ == directory or self.membership(tid).class_ == class_:
                raise
            raise errors.ClassMismatch(
                error.message, path=path, errno=error.errno, remedy=errors.OTHER_CLASS_REMEDY
            ) from error
        return True

    def write_task_from(self, before: Membership, directory: str, tid: int) -> bool:
        """Move one thread as ``write_task`` does, and return True; return False if it is not at ``before`` any more.

        A concurrent ``write_task`` prevails: it comes before the look or after the move.
        """
        return self._write_task(directory, tid, before)

    def take_out(self, ref: GroupRef, tid: int) -> None:
        """Move one thread out of a group, to the default group of its class, unless it is in another group by now.

        A concurrent ``write_task`` prevails: it comes before the look or after the move. Raises NoSuchProcess,
        NoSuchGroup, PermissionDenied, KernelRefused.
        """
        path = os.path.join(self.path, ref.class_, "tasks")
        with self._command(f"move task {tid}", path):
            if self.membership(tid) == Membership(ref.class_, ref.name):
                _write(path, b"%d\n" % tid)
                self._count_write()

    def _count_write(self) -> None:
        self._writes += 1
        if self._writes % _WRITES_BETWEEN_READS == 0:
            self.on_many_writes()

    def assign_counter(self, ref: GroupRef, event: str, domain: str) -> bool:
        """Assign a bandwidth counter of one domain to the group; False if all counters there are in use.

        False also if the group has no file that assigns them. Raises NoSuchGroup, NotMounted, KernelRefused
        (``mbm_event`` is not the mode).
        """
        file, number = bandwidth.assignments_file(domain)
        if not file:
            return False
        path = os.path.join(self.full_path(ref), file)
        try:
            with self._command(f"assign a counter for {event} in {domain}", path):
                _write(path, f"{event}:{number}=e\n".encode())
        except errors.NoSuchGroup:
            if self.find(ref) is None:
                raise
            return False
        except errors.KernelRefused as error:
            if error.errno == errno.ENOSPC:
                return False
            raise
        return True

    # -- helpers

    def _typed(self, what: str, path: str) -> errors.Converted:
        """Convert errors of operations that never set last_cmd_status (reading, rmdir, utime)."""
        return errors.Converted(self._error, what, path)

    @contextlib.contextmanager
    def _command(self, what: str, path: str) -> Iterator[None]:
        with self._command_lock:
            try:
                yield
            except OSError as error:
                raise self._error(error, what, path, self.last_cmd_status()) from error

    def _error(self, error: OSError, what: str, path: str, status: str = "") -> errors.ResctrlError:
        typed = errors.from_oserror(error, what, path, status)
        if not isinstance(typed, errors.NoSuchGroup):
            return typed
        try:
            self.check_mounted()
        except errors.NotMounted as not_mounted:
            return not_mounted
        return typed

    @contextlib.contextmanager
    def _opened(self, directory: str, what: str) -> Iterator[int]:
        path = f"{self.path}/{directory}"
        with self._typed(what, path):
            fd = os.open(path, _DIRECTORY)
            try:
                yield fd
            finally:
                os.close(fd)

    def _directories(self, directory: str) -> list[str]:
        with self._opened(directory, "list the directory") as fd, os.scandir(fd) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def _can_have_groups(self, class_: str) -> bool:
        path = os.path.join(self.path, class_, _MON_GROUPS)
        try:
            with self._typed("look for the class", path):
                return stat.S_ISDIR(os.stat(path).st_mode)
        except (errors.NoSuchGroup, errors.NotMounted):
            return False

    def _read_text_if_there(self, file: str) -> str:
        path = os.path.join(self.path, file)
        try:
            return kernel_files.read(path).decode("utf-8", "replace")
        except FileNotFoundError:
            # An older kernel, or nothing is counted there. check_mounted() reads the whole table of mounts, so it is
            # called only if resctrl itself is missing: every reading calls this function.
            if not os.path.isdir(os.path.join(self.path, "info")):
                self.check_mounted()
            return ""
        except OSError as error:
            raise self._error(error, "read how bandwidth is counted", path) from error

    def _read_modalias(self) -> str:
        """Return the type and vendor of the processors, "" if they cannot be read."""
        try:
            if self.simulation is not None:
                return os.getxattr(self.path, MODALIAS_ATTRIBUTE).decode("utf-8", "replace")
            with open(MODALIAS, encoding="utf-8", errors="replace") as opened:
                return opened.read()
        except OSError:
            return ""

    def _read_text(self, file: str, what: str) -> str:
        path = f"{self.path}/{file}"
        with self._typed(what, path):
            return kernel_files.read(path).decode("utf-8", "replace")


def _write(path: str, command: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, command)  # one write is one command
    finally:
        os.close(fd)


def _identify(path: str) -> str | None:
    """Return None for the kernel's resctrl, or the simulator's profile. Raises NotMounted for anything else."""
    remedy = f"Mount it: mount -t resctrl resctrl {path}"
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _UNKNOWN:
            raise errors.not_read(error, "check whether resctrl is mounted", path) from error
        if path == DEFAULT_PATH and error.errno == errno.ENOENT:
            remedy = _NO_RESCTRL
        what = "does not exist" if error.errno == errno.ENOENT else "is not a directory"
        raise errors.NotMounted(what, path=path, errno=error.errno or 0, remedy=remedy) from error
    try:
        mount = mount_of(fd)
    finally:
        os.close(fd)
    if mount is not None and mount.root == "/" and os.path.realpath(path) == mount.point:
        if mount.fstype == "resctrl":
            return None
        if mount.fstype == SIMULATION_FSTYPE:
            return _profile(path)
    raise errors.NotMounted(
        f"is not a resctrl filesystem but {mount.fstype if mount else 'nothing that is mounted'}",
        path=path,
        remedy=remedy,
    )


def _profile(path: str) -> str:
    try:
        return os.getxattr(path, SIMULATION_ATTRIBUTE).decode("ascii", "replace")
    except OSError as error:
        if error.errno in _UNKNOWN:
            raise errors.not_read(error, "check which simulator is mounted", path) from error
        raise errors.NotMounted("is not a simulator of resctrlmond", path=path, errno=error.errno or 0) from error
