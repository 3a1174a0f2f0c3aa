# SPDX-License-Identifier: Apache-2.0
"""A process that stays the same one: held by pidfd and start time, so that a reused number is no confusion."""

from __future__ import annotations

import errno
import os
import select
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from resctrlmond.resctrl.errors import NoSuchProcess, not_read

# include/linux/sched.h: the task is a kernel thread.
_PF_KTHREAD = 0x00200000
# The task is on its way out, or a zombie.
_PF_EXITING = 0x00000004
# What /proc says of a thread that is not there (any more).
_GONE = (errno.ENOENT, errno.ESRCH)
# Clock ticks in a second, the unit of start times.
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_TICK = 10**9 // TICKS_PER_S
# A chain of processes longer than this is no user's; the walk must end.
_MOST_GENERATIONS = 10_000


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/TID/stat tells of a thread: its parent process, flags and start time (clock ticks since boot)."""

    parent: int
    flags: int
    start_time: int

    @property
    def is_kernel_thread(self) -> bool:
        """Whether this is a thread of the kernel itself."""
        return bool(self.flags & _PF_KTHREAD)

    @property
    def is_exiting(self) -> bool:
        """Whether it executes nothing any more."""
        return bool(self.flags & _PF_EXITING)


def stat(tid: int) -> Stat | None:
    """The thread's parent, flags and start time (proc_pid_stat(5)); None if there is no such thread.

    Raises NotRead.
    """
    fields = stat_fields(tid)
    if not fields:
        return None
    return Stat(parent=int(fields[1]), flags=int(fields[6]), start_time=int(fields[19]))


def stat_fields(tid: int) -> list[bytes]:
    """The fields of /proc/TID/stat from the third on; [] if there is no such thread. Raises NotRead."""
    path = f"/proc/{tid}/stat"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise not_read(error, f"look at thread {tid}", path) from error
    # The name in parentheses may hold anything, parentheses too: count from the last one.
    return text[text.rindex(b")") + 2 :].split()


def cpu_time_ns(pid: int) -> int | None:
    """At most so much CPU time (ns) has the process used, ended threads included; None if it has never run.

    Living threads are known to the nanosecond (proc_pid_schedstat(5)); with ended ones only the clock ticks of the
    whole process are left, which the kernel rounds down twice. Without CONFIG_SCHED_INFO there are only these, and
    0 of them is no proof: 0 is returned then. Raises NotRead.
    """
    ticks = stat_fields(pid)
    of_threads, timeslices = 0, 0
    for tid in threads(pid):
        used = _schedstat(pid, tid)
        if used is not None:
            of_threads += used[0]
            timeslices += used[1]
    in_ticks = (int(ticks[11]) + int(ticks[12])) * _NS_PER_TICK if ticks else 0
    if in_ticks > of_threads:
        return in_ticks + 2 * _NS_PER_TICK
    if of_threads or timeslices or not os.path.exists("/proc/self/schedstat"):
        return of_threads
    return None


def _schedstat(pid: int, tid: int) -> tuple[int, int] | None:
    """The CPU time (ns) of one thread, and how often it was put on a CPU; None if that is not known."""
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", encoding="ascii") as file:
            used, _waited, timeslices = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return used, timeslices


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` has started, their children and so on, from the table of all processes.

    A process whose parent has ended is init's (or a subreaper's) child, and is not found. Raises NotRead.
    """
    children: dict[int, list[int]] = {}
    path = "/proc"
    try:
        names = os.listdir(path)
    except OSError as error:
        raise not_read(error, "list the processes", path) from error
    for number in [int(name) for name in names if name.isdecimal()]:
        found = stat(number)
        if found is not None:
            children.setdefault(found.parent, []).append(number)
    below: list[int] = []
    waiting = [pid]
    while waiting:
        found_here = children.pop(waiting.pop(), [])
        below += found_here
        waiting += found_here
    return below


def children(pid: int) -> list[int] | None:
    """The children of a process, ended ones that were not waited for too; None if the kernel does not list them."""
    found: list[int] = []
    for tid in threads(pid):
        try:
            with open(f"/proc/{pid}/task/{tid}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
        except OSError:
            if os.path.exists(f"/proc/{pid}/task/{tid}/stat"):
                return None
    return found


def is_descendant(tid: int, pid: int) -> bool:
    """Whether the thread ``tid`` is of a process that descends from the process ``pid``. Raises NotRead."""
    at = leader(tid)
    # A reused number could close a circle.
    for _ in range(_MOST_GENERATIONS):
        found = stat(at) if at > 1 else None
        if found is None:
            return False
        if found.parent == pid:
            return True
        at = found.parent
    return False


def pid_namespaces(pid: int) -> int:
    """In how many nested PID namespaces, counted from ours, a process has a number; 1 is ours alone, 0 is gone.

    From NSpid in /proc/PID/status, which anybody may read, where /proc/PID/ns/pid needs CAP_SYS_PTRACE.
    Raises NotRead.
    """
    return len(_status(pid, "NSpid"))


def is_namespace_init(pid: int) -> bool:
    """Whether a process is the first one of a PID namespace other than ours. Raises NotRead."""
    numbers = _status(pid, "NSpid")
    return len(numbers) > 1 and numbers[-1] == 1


def pidfd_numbers(pidfd: int) -> list[int]:
    """The numbers of a pidfd's process in our PID namespace and in each one nested in it; [] if it has none in ours,
    or has been reaped.

    From NSpid in /proc/self/fdinfo/FD (Documentation/filesystems/proc.rst). Raises ValueError for a descriptor that
    is not a pidfd.
    """
    try:
        with open(f"/proc/self/fdinfo/{pidfd}", "rb") as lines:
            fields = dict(line.rstrip().split(b":", 1) for line in lines if b":" in line)
    except OSError as error:
        raise ValueError(f"{pidfd} is not an open descriptor") from error
    if b"Pid" not in fields:
        raise ValueError(f"{pidfd} is not a pidfd")
    numbers = [int(number) for number in fields.get(b"NSpid", fields[b"Pid"]).split()]
    # Pid is -1 once the process has been reaped, and 0 if it is in no PID namespace below ours.
    return numbers if numbers[0] > 0 else []


class Descriptor:
    """A file descriptor that somebody passed: closed by ``close``, or when nothing refers to this object any more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def close(self) -> None:
        """Close it; nobody may use it any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def leader(tid: int) -> int:
    """The process that a thread is of, by the number of its first thread; 0 if it is gone. Raises NotRead."""
    return next(iter(_status(tid, "Tgid")), 0)


def _status(tid: int, name: str) -> list[int]:
    """The numbers of one line of /proc/TID/status (proc_pid_status(5)); [] if there is no such thread."""
    path = f"/proc/{tid}/status"
    try:
        with open(path, "rb") as lines:
            found = next((line for line in lines if line.startswith(f"{name}:".encode())), b"")
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise not_read(error, f"look at thread {tid}", path) from error
    return [int(number) for number in found.split()[1:]]


def threads(pid: int) -> list[int]:
    """The thread ids of a process now; [] once it is gone. Raises NotRead."""
    path = f"/proc/{pid}/task"
    try:
        return [int(name) for name in os.listdir(path)]
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise not_read(error, f"list the threads of process {pid}", path) from error


class Process:
    """One living process, held by a pidfd that this object owns and closes."""

    def __init__(self, pid: int, pidfd: int, start_time: int, is_kernel_thread: bool) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.start_time = start_time
        self.is_kernel_thread = is_kernel_thread

    @classmethod
    def open(cls, pid: int, start_time: int | None = None) -> Self:
        """Hold the process ``pid``, if it is the one with that ``start_time``. Raises NoSuchProcess, NotRead."""
        # What is no pid_t cannot even be asked for.
        if not 0 < pid < 2**31:
            raise NoSuchProcess(f"{pid} is not a process id")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # The number is a thread's that leads no process: EINVAL, and since Linux 6.15 ENOENT.
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                raise NoSuchProcess(f"there is no process {pid}", errno=error.errno) from error
            raise not_read(error, f"hold process {pid}", f"/proc/{pid}") from error
        try:
            found = stat(pid)
            # While the pidfd shows it alive, the number is its own: what /proc tells is about this process.
            if found is None or _has_ended(pidfd) or start_time not in (None, found.start_time):
                raise NoSuchProcess(f"process {pid} has ended")
        except BaseException:
            os.close(pidfd)
            raise
        return cls(pid, pidfd, found.start_time, found.is_kernel_thread)

    @classmethod
    def of_pidfd(cls, descriptor: Descriptor) -> Self:
        """Hold the process of a pidfd. Raises ValueError if it is not one of a process, NoSuchProcess, NotRead."""
        numbers = pidfd_numbers(descriptor.fileno())
        if not numbers:
            raise NoSuchProcess("the process of the pidfd has ended, or is in no PID namespace of this host")
        try:
            found = cls.open(numbers[0])
        except NoSuchProcess:
            if leader(numbers[0]) not in (0, numbers[0]):
                raise ValueError(f"the pidfd is of the thread {numbers[0]}, not of a process") from None
            raise
        # Still its number after the process of that number is held: they are the same process.
        if pidfd_numbers(descriptor.fileno()) != numbers:
            found.close()
            raise NoSuchProcess(f"process {numbers[0]} has ended")
        return found

    def has_ended(self) -> bool:
        """Whether it has exited (it may still be a zombie)."""
        return _has_ended(self.pidfd)

    def threads(self) -> list[int]:
        """Its thread ids now; [] once it is gone. Raises NotRead."""
        return threads(self.pid)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
