# SPDX-License-Identifier: Apache-2.0
"""Interrupts the daemon itself at its n-th system call, by a kill or an error, and looks at what is left of it."""

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
from tests.crash.blow import Blow
from tests.crash.deeds import DEEDS
from tests.crash.harness import ANY, CHANGES
from tests.crash.site import Site
from tests.crash.sweep import Point

# The event loop's own.
_DOORS = "accept4,recvfrom,recvmsg,sendto,sendmsg,socket,getsockopt"
# Waiting itself is only ever interrupted (epoll_wait(2)).
_WAITS = "epoll_pwait,epoll_wait"
_CALLS = {
    Blow.KILL: f"{CHANGES},sendto,sendmsg",
    Blow.EIO: ANY,  # sockets never say it
    Blow.ENOSPC: f"{CHANGES},epoll_ctl",  # max_user_watches
    Blow.EINTR: f"openat,read,write,{_DOORS},{_WAITS}",
    Blow.EMFILE: "openat,/^pidfd_open,accept4,recvmsg,socket",
}
START = "start"
_STARTS = {
    Blow.KILL: f"{_CALLS[Blow.KILL]},flock,socket,bind,listen",
    Blow.EIO: f"{ANY},flock,listen",
    Blow.ENOSPC: f"{_CALLS[Blow.ENOSPC]},bind",
    Blow.EINTR: "openat,read,write,flock,sendto",
    Blow.EMFILE: "openat,/^pidfd_open,socket",
}
_READS = ("openat", "read", "newfstatat", "getdents64")
# A tracer that lets go of a living process takes milliseconds.
_LETS_GO_S = 0.5


class DaemonHarness:
    """Blows on one daemon's deeds, counted by what became of them."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.trace = str(site.top / "trace")

    def points(self, name: str, blow: Blow) -> list[Point]:
        """The system calls of the deed that the blow may fall on."""
        if name == START:
            return self._start_points(blow)
        act = DEEDS[name].before(self.site)
        with self._traced("-e", f"trace={_CALLS[blow]}", "-o", self.trace):
            act()
        self._back_to_rest(is_loss=DEEDS[name].is_loss)
        return _numbered(self.trace)

    def strike(self, name: str, blow: Blow, call: str, number: int) -> str:
        """One blow; raises AssertionError where it did harm. Returns how the deed ended."""
        if name == START:
            return self._strike_start(blow, call, number)
        act = DEEDS[name].before(self.site)
        inject = f"inject={call}:{blow.value}:when={number}"
        with self._traced("-e", f"trace={call}", "-e", inject, "-o", "/dev/null"):
            how = act()
        assert how != "InternalError", how
        if self.site.is_dead():
            how = "killed" if blow is Blow.KILL else how
            assert blow is Blow.KILL or name == "stop", "the daemon ended"
        self._back_to_rest(is_loss=DEEDS[name].is_loss)
        return "refused" if how[0].isupper() else how

    # -- the start itself

    def _start_points(self, blow: Blow) -> list[Point]:
        self._leave_much_to_do()
        self._start("-y", "-e", f"trace={_STARTS[blow]}", "-o", self.trace)
        self._back_to_rest()
        return _numbered(self.trace, self._is_of_the_start)

    def _is_of_the_start(self, line: str) -> bool:
        """Most of what a start reads are Python's modules; how Python itself begins is not ours either."""
        if line.startswith(_READS):
            return (f"{self.site.top}/" in line or "/proc/" in line) and f"{self.site.machine.log}>" not in line
        return True

    def _strike_start(self, blow: Blow, call: str, number: int) -> str:
        self._leave_much_to_do()
        inject = f"inject={call}:{blow.value}:when={number}"
        how = self._start("-e", f"trace={call}", "-e", inject, "-o", "/dev/null")
        assert how != "killed" or blow is Blow.KILL, "the daemon was killed"
        self._back_to_rest()
        return how

    def _leave_much_to_do(self) -> None:
        """One workload ended while no daemon ran, one lives in two classes, one group is of no record."""
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
            pass  # what the last daemon said
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

    # -- hands

    def _back_to_rest(self, *, is_loss: bool = False) -> None:
        if self.site.is_dead():
            self.site.restart()
        self.site.check()
        self.site.drain(is_loss=is_loss)

    @contextlib.contextmanager
    def _traced(self, *tracing: str) -> Iterator[None]:
        pid = self.site.pid
        strace = subprocess.Popen(["strace", "-f", "-qq", *tracing, "-p", str(pid)], stderr=subprocess.PIPE)
        while not _all_traced(pid, strace.pid):
            assert strace.poll() is None, strace.communicate()[1]
            time.sleep(0.002)
        try:
            yield
        finally:
            # A tracer that is stopped in the middle of a fault leaves ENOSYS, which no call here returns.
            deadline = time.monotonic() + 60
            while not _all_asleep(pid) and time.monotonic() < deadline:
                time.sleep(0.002)
            strace.send_signal(signal.SIGINT)
            # It may wait for ever for a process of several threads that it has killed itself.
            with contextlib.suppress(subprocess.TimeoutExpired):
                strace.wait(_LETS_GO_S)
            strace.kill()
            strace.communicate()


def _all_traced(pid: int, tracer: int) -> bool:
    line = f"TracerPid:\t{tracer}\n"
    return all(line in status.read_text() for status in _threads(pid))


def _all_asleep(pid: int) -> bool:
    """Whether no thread is between two calls or within a blow: it waits in the kernel, or is dead."""
    try:
        states = [status.read_text().partition("State:\t")[2][:1] for status in _threads(pid)]
    except OSError:
        return False  # one ended while we looked
    return not set(states) & {"R", "t"}


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/status"))


def _numbered(trace: str, is_ours: Callable[[str], bool] = lambda _line: True) -> list[Point]:
    """Return the system calls of the trace, those of each name by their numbers in any thread.

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
    """Makes machines for the blows on one deed, each in a folder of its own."""

    @contextlib.contextmanager
    def machine(top: Path) -> Iterator[DaemonHarness]:
        (top / "resctrl").mkdir(parents=True)
        settings = DEEDS[name].settings if name in DEEDS else ""
        with (
            Simulation(str(top / "resctrl"), "intel-rdt", 2000, virtual_cpus=2),
            contextlib.closing(Site(top, settings)) as site,
        ):
            yield DaemonHarness(site)

    return machine
