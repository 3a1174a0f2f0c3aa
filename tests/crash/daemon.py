# SPDX-License-Identifier: Apache-2.0
"""Interrupt the daemon at a system call, by SIGKILL or an error, and check the state that it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from resctrlmond.sim.fuse.mount import Simulation
from tests.crash.fault import Fault
from tests.crash.harness import ANY, CHANGES
from tests.crash.operations import OPERATIONS, Operation
from tests.crash.site import Site
from tests.crash.sweep import Point

# The system calls of the event loop on sockets.
_SOCKETS = "accept4,recvfrom,recvmsg,sendto,sendmsg,socket,getsockopt"
# EINTR is the only error of a wait that a valid call can get (epoll_wait(2)).
_WAITS = "epoll_pwait,epoll_wait"
_CALLS = {
    Fault.KILL: f"{CHANGES},sendto,sendmsg",
    Fault.EIO: ANY,  # not an error of sockets
    Fault.ENOSPC: f"{CHANGES},epoll_ctl",  # max_user_watches
    Fault.EINTR: f"openat,read,write,{_SOCKETS},{_WAITS}",
    Fault.EMFILE: "openat,/^pidfd_open,accept4,recvmsg,socket",
}
START = "start"
_STARTS = {
    Fault.KILL: f"{_CALLS[Fault.KILL]},flock,socket,bind,listen",
    Fault.EIO: f"{ANY},flock,listen",
    Fault.ENOSPC: f"{_CALLS[Fault.ENOSPC]},bind",
    Fault.EINTR: "openat,read,write,flock,sendto",
    Fault.EMFILE: "openat,/^pidfd_open,socket",
}
_READS = ("openat", "read", "newfstatat", "getdents64")
# strace detaches from a living process within milliseconds.
_DETACH_S = 0.5


class DaemonHarness:
    """Injects faults into the operations of one daemon."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.trace = str(site.top / "trace")

    def points(self, name: str, fault: Fault) -> list[Point]:
        """Return the system calls of the operation at which the fault can be injected."""
        if name == START:
            return self._start_points(fault)
        act = OPERATIONS[name].before(self.site)
        with self._traced("-e", f"trace={_CALLS[fault]}", "-o", self.trace):
            act()
        self._recover_and_check(OPERATIONS[name])
        return _numbered(self.trace)

    def inject(self, name: str, fault: Fault, call: str, number: int) -> str:
        """Inject a fault, and return how the operation ended. Raises AssertionError if a check fails afterwards."""
        if name == START:
            return self._strike_start(fault, call, number)
        act = OPERATIONS[name].before(self.site)
        inject = f"inject={call}:{fault.value}:when={number}"
        with self._traced("-e", f"trace={call}", "-e", inject, "-o", "/dev/null"):
            outcome = act()
        assert outcome != "InternalError", outcome
        if self.site.is_dead():
            outcome = "killed" if fault is Fault.KILL else outcome
            assert fault is Fault.KILL or name == "stop", "the daemon ended"
        self._recover_and_check(OPERATIONS[name])
        return "refused" if outcome[0].isupper() else outcome

    # -- the start

    def _start_points(self, fault: Fault) -> list[Point]:
        self._prepare_recovery()
        self._start("-y", "-e", f"trace={_STARTS[fault]}", "-o", self.trace)
        self._recover_and_check()
        return _numbered(self.trace, self._is_of_the_start)

    def _is_of_the_start(self, line: str) -> bool:
        """Return whether a system call at the start is the daemon's: most of them read Python's modules."""
        if line.startswith(_READS):
            return (f"{self.site.top}/" in line or "/proc/" in line) and f"{self.site.machine.log}>" not in line
        return True

    def _strike_start(self, fault: Fault, call: str, number: int) -> str:
        self._prepare_recovery()
        inject = f"inject={call}:{fault.value}:when={number}"
        outcome = self._start("-e", f"trace={call}", "-e", inject, "-o", "/dev/null")
        assert outcome != "killed" or fault is Fault.KILL, "the daemon was killed"
        self._recover_and_check()
        return outcome

    def _prepare_recovery(self) -> None:
        """Leave an ended workload, a living one in two classes, and a group without a record to the next daemon."""
        site = self.site
        ended, living, gold = site.process(), site.process(), site.process("gold")
        site.use(site.assigned(ended), ended)
        key = site.assigned(living, member="c1")
        site.use(key, living)
        site.assigned(gold, key=key, member="c2")
        site.use(key, gold)
        site.machine.kill()
        site.end(ended)
        os.mkdir(site.top / "resctrl" / "mon_groups" / "unrecorded")

    def _start(self, *tracing: str) -> str:
        machine = self.site.machine
        while machine.wait_for_notify("", 0.01):
            pass  # the notifications of the last daemon
        with machine.log.open("ab") as log:
            machine.daemon = subprocess.Popen(
                ["strace", "-f", "-qq", *tracing, *machine.command()],
                env={**os.environ, "NOTIFY_SOCKET": machine.notify_path},
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while machine.daemon.poll() is None and time.monotonic() < deadline:
            if machine.wait_for_notify("READY=1", 0.1):
                break
        code = machine.daemon.poll()
        if code is None:
            os.killpg(machine.daemon.pid, signal.SIGKILL)
            machine.daemon.wait()
        machine.daemon = None
        return "done" if code is None else "killed" if code == -signal.SIGKILL else f"exit code {code}"

    # -- steps

    def _recover_and_check(self, operation: Operation | None = None) -> None:
        if self.site.is_dead():
            self.site.restart()
        self.site.check()
        if operation is None:
            self.site.drain()
        else:
            self.site.drain(is_loss=operation.is_loss, prunes=operation.prunes)

    @contextlib.contextmanager
    def _traced(self, *tracing: str) -> Iterator[None]:
        pid = self.site.pid
        strace = subprocess.Popen(["strace", "-f", "-qq", *tracing, "-p", str(pid)], stderr=subprocess.PIPE)
        # A thread beside the operation may meet the fault before all threads are traced.
        while not self.site.is_dead() and not _all_traced(pid, strace.pid):
            assert strace.poll() is None, strace.communicate()[1]
            time.sleep(0.002)
        try:
            yield
        finally:
            # If strace is stopped while it injects a fault, the call returns ENOSYS.
            deadline = time.monotonic() + 60
            while not _all_asleep(pid) and time.monotonic() < deadline:
                time.sleep(0.002)
            strace.send_signal(signal.SIGINT)
            # strace may wait for ever for a process of several threads that it has killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                strace.wait(_DETACH_S)
            strace.kill()
            strace.communicate()


def _all_traced(pid: int, tracer: int) -> bool:
    line = f"TracerPid:\t{tracer}\n"
    try:
        return all(line in status.read_text() for status in _threads(pid))
    except OSError:
        return False  # a thread has ended since the listing


def _all_asleep(pid: int) -> bool:
    """Return whether each thread waits in the kernel or is dead: none is between two calls or within a fault."""
    try:
        states = [status.read_text().partition("State:\t")[2][:1] for status in _threads(pid)]
    except OSError:
        return False  # a thread has ended since the listing
    return not set(states) & {"R", "t"}


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/status"))


def _numbered(trace: str, is_ours: Callable[[str], bool] = lambda _line: True) -> list[Point]:
    """Return the system calls of the trace by their names and their numbers in any thread.

    A fault is injected into the call with that number in each thread: if one of them is not the daemon's, it is left
    out. The calls of threads at a start are also covered by the manager's "recovery".
    """
    made: Counter[tuple[str, str]] = Counter()
    points: set[Point] = set()
    others: set[Point] = set()
    with open(trace, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            thread, _, rest = line.partition(" ")
            rest = rest.strip()
            if "(" in rest and "resumed>" not in rest:
                call = rest.partition("(")[0]
                made[call, thread] += 1
                (points if is_ours(rest) else others).add((call, made[call, thread]))
    return sorted(points - others)


def machine_for(name: str) -> Callable[[Path], AbstractContextManager[DaemonHarness]]:
    """Return a function that mounts a simulation and starts a daemon in a folder of its own for one operation."""

    @contextlib.contextmanager
    def machine(top: Path) -> Iterator[DaemonHarness]:
        (top / "resctrl").mkdir(parents=True)
        settings = OPERATIONS[name].settings if name in OPERATIONS else ""
        with (
            Simulation(str(top / "resctrl"), "intel-rdt", 2000, virtual_cpus=2),
            contextlib.closing(Site(top, settings)) as site,
        ):
            yield DaemonHarness(site)

    return machine
