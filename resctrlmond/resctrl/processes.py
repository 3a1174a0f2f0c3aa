# SPDX-License-Identifier: Apache-2.0
"""Read processes from /proc, and hold a process by pidfd and start time, so that a reused number is detected."""

from __future__ import annotations

import contextlib
import errno
import os
import select
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self

from resctrlmond.resctrl import kernel_files
from resctrlmond.resctrl.errors import LACKS, NoSuchProcess, NotRead, not_read

# include/linux/sched.h: the task is a kernel thread.
_PF_KTHREAD = 0x00200000
# The task is exiting, or a zombie.
_PF_EXITING = 0x00000004
# The states of a task that a signal wakes, or that a signal or a tracer has stopped (proc_pid_stat(5)).
_SLEEPS = (b"S", b"T", b"t")
# The errnos of /proc for a thread that does not exist or has ended.
_GONE = (errno.ENOENT, errno.ESRCH)
# Clock ticks in a second, the unit of start times.
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_TICK = 10**9 // TICKS_PER_S
# The walk over parents ends after this many; a real chain of processes is shorter.
_MOST_GENERATIONS = 10_000
# The descendants are searched so often by the kernel's lists of children before the table of processes is read.
_MOST_SEARCHES = 3


class Stat(NamedTuple):
    """The parent process, flags and start time (clock ticks since boot) in /proc/TID/stat."""

    parent: int
    flags: int
    start_time: int

    @property
    def is_kernel_thread(self) -> bool:
        """Whether this is a kernel thread."""
        return bool(self.flags & _PF_KTHREAD)

    @property
    def is_exiting(self) -> bool:
        """Whether the thread is exiting or a zombie, and executes no user code."""
        return bool(self.flags & _PF_EXITING)


def stat(tid: int) -> Stat | None:
    """Return the thread's parent, flags and start time (proc_pid_stat(5)); None if there is no such thread.

    Raises NotRead.
    """
    fields = stat_fields(tid)
    if not fields:
        return None
    return Stat(parent=int(fields[1]), flags=int(fields[6]), start_time=int(fields[19]))


def is_same(tid: int, start_time: int) -> bool:
    """Return whether this very thread still exists, perhaps as a zombie. Raises NotRead."""
    found = stat(tid)
    return found is not None and found.start_time == start_time


def is_running(tid: int, start_time: int | None = None) -> bool:
    """Return whether the thread can execute user code; with ``start_time``, only this very thread. Raises NotRead."""
    found = stat(tid)
    return found is not None and not found.is_exiting and start_time in (None, found.start_time)


def may_be_forking(tid: int) -> bool:
    """Return whether a child may not be in the list of tasks yet whose fork by the thread has begun. Raises NotRead.

    Until it is, a fork does not sleep so that a signal wakes it (copy_process() in kernel/fork.c).
    """
    fields = stat_fields(tid)
    return bool(fields) and fields[0] not in _SLEEPS and not int(fields[6]) & _PF_EXITING


def stat_fields(tid: int) -> list[bytes]:
    """Return the fields of /proc/TID/stat from the third on; [] if there is no such thread. Raises NotRead."""
    path = f"/proc/{tid}/stat"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _GONE:
            check_visible(tid)
            return []
        raise not_read(error, f"read thread {tid}", path) from error
    # The name in parentheses may contain parentheses, so split at the last one.
    return text[text.rindex(b")") + 2 :].split()


def is_hidden(tid: int) -> bool:
    """Whether a thread exists that /proc does not show, or not let read (hidepid= in proc(5))."""
    try:
        # /proc/TID/stat is not shown by hidepid=2, and cannot be opened with hidepid=1.
        with open(f"/proc/{tid}/stat", "rb"):
            return False
    except OSError as error:
        if error.errno in LACKS:
            return False
    if not 0 < tid < 2**31:
        return False  # kill(2) sends to a process group then
    try:
        os.kill(tid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is not permitted to get a signal, so it exists
    return True


def check_visible(tid: int) -> None:
    """Raise NotRead if /proc hides a thread that exists, which must not pass for one that has ended."""
    if is_hidden(tid):
        remedy = "'resctrlctl status' explains how to let resctrlmond see it"
        raise NotRead("exists, and /proc hides it from resctrlmond (hidepid=)", path=f"/proc/{tid}", remedy=remedy)


def cpu_time_ns(pid: int) -> int | None:
    """Return an upper bound of the process's CPU time (ns), with ended threads; None if it has never run.

    The time of running threads is exact (proc_pid_schedstat(5)). If threads have ended, only the clock ticks of the
    whole process are known, which the kernel rounds down twice. Without CONFIG_SCHED_INFO only these are known, and
    0 is returned for a process that may never have run. Raises NotRead.
    """
    ticks = stat_fields(pid)
    of_threads, timeslices = 0, 0
    for tid in threads(pid):
        with contextlib.suppress(OSError, ValueError):
            used, _waited, slices = map(int, kernel_files.read(f"/proc/{pid}/task/{tid}/schedstat").split())
            of_threads += used
            timeslices += slices
    in_ticks = (int(ticks[11]) + int(ticks[12])) * _NS_PER_TICK if ticks else 0
    if in_ticks > of_threads:
        return in_ticks + 2 * _NS_PER_TICK
    if of_threads or timeslices or not os.path.exists("/proc/self/schedstat"):
        return of_threads
    return None


def family_cpu_time_ns(pid: int, children_ns: int = 0) -> int:
    """Return the CPU time (ns) of a process with one thread, and of its children that it has waited for.

    That of the children is known in clock ticks, twice rounded down: ``children_ns`` is what the process says, which
    is believed within these limits. Raises NotRead.
    """
    # cutime and cstime in proc_pid_stat(5).
    least_ns = sum(map(int, stat_fields(pid)[13:15])) * _NS_PER_TICK
    return (cpu_time_ns(pid) or 0) + min(max(children_ns, least_ns), least_ns + 2 * _NS_PER_TICK)


def descendants(pid: int) -> list[int]:
    """List the descendants of a process: all that exist during the whole call, and perhaps others.

    A process whose parent has ended is a child of init or of a subreaper, and is not found. The kernel lists the
    children of each thread, if it can (CONFIG_PROC_CHILDREN): the cost grows with the descendants, and not with the
    host's processes. If one may be missing because processes end meanwhile, the table of all processes is read.
    Raises NotRead.
    """
    return [*_parents_below(pid)]


def certain_children(pid: int) -> list[int]:
    """List the children of a process: all that exist during the whole call. As ``descendants``. Raises NotRead."""
    return [child for child, parent in _parents_below(pid).items() if parent == pid]


def _parents_below(pid: int) -> dict[int, int]:
    """Return the parent of each descendant of a process. Raises NotRead."""
    zombies: set[int] = set()
    for _ in range(_MOST_SEARCHES):
        found = _Search(pid)
        if not found.is_listed:
            break
        if found.is_complete(zombies):
            return found.parents
    return _parents_in_table(pid)


class _Search:
    """The descendants of a process, by the kernel's lists of children.

    ``parents``: the parent of each descendant. ``is_listed``: the kernel lists children.
    """

    __slots__ = ("_tids", "is_listed", "parents")

    def __init__(self, pid: int) -> None:
        self.parents: dict[int, int] = {}
        self.is_listed = True
        self._tids: list[int] = []
        waiting = [pid]
        while waiting:
            parent = waiting.pop()
            tids = threads(parent)
            found = children(parent, tids)
            if found is None:
                self.is_listed = False
                return
            new = [child for child in found if child != pid and child not in self.parents]
            self.parents.update(dict.fromkeys(new, parent))
            self._tids += tids
            waiting += new

    def is_complete(self, zombies: set[int]) -> bool:
        """Return whether no descendant can be missing.

        ``zombies`` are the threads that were zombies before the search; the zombies of now are added. Raises NotRead.
        """
        # The kernel follows its list from each child to the next, and adds new children at the end. It skips a child
        # only if an earlier one has left the list meanwhile (get_children_pid() in fs/proc/array.c). The children of
        # a thread that exits are moved to the list of another thread or process, before the state of the thread
        # becomes Z (exit_notify() in kernel/exit.c). So each child must still be there, and no thread may have begun
        # to exit, except for those that were zombies before.
        is_complete, before = True, zombies.copy()
        for tid in dict.fromkeys((*self._tids, *self.parents)):
            fields = stat_fields(tid)
            if fields and fields[0] == b"Z":
                zombies.add(tid)
                is_complete &= tid in before
            else:
                is_complete &= bool(fields) and not int(fields[6]) & _PF_EXITING
        return is_complete


def _parents_in_table(pid: int) -> dict[int, int]:
    """Return the parent of each descendant of a process, from the table of all processes. Raises NotRead."""
    children_of: dict[int, list[int]] = {}
    path = "/proc"
    try:
        names = os.listdir(path)
    except OSError as error:
        raise not_read(error, "list the processes", path) from error
    for number in [int(name) for name in names if name.isdecimal()]:
        found = stat(number)
        if found is not None:
            children_of.setdefault(found.parent, []).append(number)
    below: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        found_here = children_of.pop(parent, [])
        below.update(dict.fromkeys(found_here, parent))
        waiting += found_here
    return below


def children(pid: int, tids: Iterable[int] | None = None) -> list[int] | None:
    """List the children of a process and its zombies; None if the kernel does not list children.

    ``tids``: the threads of the process, if the caller knows them. A list that is not empty may lack a child, because
    another one has ended meanwhile: ``certain_children`` does not. Raises NotRead.
    """
    found: list[int] = []
    for tid in threads(pid) if tids is None else tids:
        path = f"/proc/{pid}/task/{tid}/children"
        try:
            found += map(int, kernel_files.read(path).split())
        except OSError as error:
            if error.errno in LACKS:
                raise not_read(error, f"list the children of process {pid}", path) from error
            if os.path.exists(f"/proc/{pid}/task/{tid}/stat"):
                return None
    return found


def is_descendant(tid: int, pid: int) -> bool:
    """Whether the thread's process is a descendant of the process ``pid``. Raises NotRead."""
    at = leader(tid)
    # Reused numbers could form a circle.
    for _ in range(_MOST_GENERATIONS):
        found = stat(at) if at > 1 else None
        if found is None:
            return False
        if found.parent == pid:
            return True
        at = found.parent
    return False


def pid_namespaces(pid: int) -> int:
    """Return the number of PID namespaces that a process is in, from the daemon's inwards; 0 if it has ended.

    From NSpid in /proc/PID/status, because /proc/PID/ns/pid needs CAP_SYS_PTRACE.
    Raises NotRead.
    """
    return len(_status(pid, "NSpid"))


def is_namespace_init(pid: int) -> bool:
    """Whether a process is the init of a nested PID namespace. Raises NotRead."""
    numbers = _status(pid, "NSpid")
    return len(numbers) > 1 and numbers[-1] == 1


def pidfd_numbers(pidfd: int) -> list[int]:
    """Return the numbers of a pidfd's process in the daemon's PID namespace and in each nested one.

    [] if the process has no number in the daemon's namespace, or was reaped.

    From NSpid in /proc/self/fdinfo/FD (Documentation/filesystems/proc.rst). Raises ValueError for a descriptor that
    is not a pidfd.
    """
    try:
        text = kernel_files.read(f"/proc/self/fdinfo/{pidfd}")
    except OSError as error:
        raise ValueError(f"{pidfd} is not an open descriptor") from error
    numbers = _numbers(text, "NSpid") or _numbers(text, "Pid")
    if not numbers:
        raise ValueError(f"{pidfd} is not a pidfd")
    # Pid is -1 after the process was reaped, and 0 if it is not in the daemon's PID namespace or a nested one.
    return numbers if numbers[0] > 0 else []


class Descriptor:
    """A file descriptor from a caller, closed by ``close`` or when this object is deleted."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def leader(tid: int) -> int:
    """Return the process ID of a thread; 0 if it has ended. Raises NotRead."""
    return next(iter(_status(tid, "Tgid")), 0)


def _status(tid: int, name: str) -> list[int]:
    """Return the numbers in one line of /proc/TID/status (proc_pid_status(5)); [] if there is no such thread."""
    path = f"/proc/{tid}/status"
    try:
        text = kernel_files.read(path)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise not_read(error, f"read thread {tid}", path) from error
    return _numbers(text, name)


def _numbers(text: bytes, name: str) -> list[int]:
    """Return the numbers in the line ``NAME:`` of a file, which is not its first line; [] if there is none."""
    after = text.partition(f"\n{name}:".encode())[2]
    return [int(number) for number in after.partition(b"\n")[0].split()]


def threads(pid: int) -> list[int]:
    """List the thread IDs of a process; [] if it has ended. Raises NotRead."""
    path = f"/proc/{pid}/task"
    try:
        return [int(name) for name in os.listdir(path)]
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise not_read(error, f"list the threads of process {pid}", path) from error


class Process:
    """A process that is held by a pidfd, which this object owns and closes."""

    __slots__ = ("is_kernel_thread", "pid", "pidfd", "start_time")

    def __init__(self, pid: int, pidfd: int, start_time: int, is_kernel_thread: bool) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.start_time = start_time
        self.is_kernel_thread = is_kernel_thread

    @classmethod
    def open(cls, pid: int, start_time: int | None = None) -> Self:
        """Open a pidfd of the process ``pid`` with that ``start_time``. Raises NoSuchProcess, NotRead."""
        # pidfd_open(2) accepts only a pid_t.
        if not 0 < pid < 2**31:
            raise NoSuchProcess(f"{pid} is not a process id")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # The number is that of a thread that is not a thread group leader: EINVAL, since Linux 6.15 ENOENT.
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                raise NoSuchProcess(f"there is no process {pid}", errno=error.errno) from error
            raise not_read(error, f"hold process {pid}", f"/proc/{pid}") from error
        try:
            found = stat(pid)
            if found is not None:
                process = cls(pid, pidfd, found.start_time, found.is_kernel_thread)
                # While the process has not ended, /proc/PID is about this process, because its number is not reused.
                if not process.has_ended() and start_time in (None, found.start_time):
                    return process
            raise NoSuchProcess(f"process {pid} has ended")
        except BaseException:
            os.close(pidfd)
            raise

    @classmethod
    def of_pidfd(cls, descriptor: Descriptor) -> Self:
        """Open the process of a pidfd, which remains the caller's.

        Raises ValueError if it is not the pidfd of a process, NoSuchProcess, NotRead.
        """
        numbers = pidfd_numbers(descriptor.fileno())
        if not numbers:
            raise NoSuchProcess("the process of the pidfd has ended, or is in no PID namespace of this host")
        try:
            found = cls.open(numbers[0])
        except NoSuchProcess:
            if leader(numbers[0]) not in (0, numbers[0]):
                raise ValueError(f"the pidfd is of the thread {numbers[0]}, not of a process") from None
            raise
        # The number is unchanged after the process with that number was opened, so both are the same process.
        if pidfd_numbers(descriptor.fileno()) != numbers:
            found.close()
            raise NoSuchProcess(f"process {numbers[0]} has ended")
        return found

    def has_ended(self) -> bool:
        """Whether the process has ended; it may be a zombie."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def threads(self) -> list[int]:
        """List its thread IDs; [] if it has ended. Raises NotRead."""
        return threads(self.pid)

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
