# SPDX-License-Identifier: Apache-2.0
"""The host that is measured: a simulated resctrl, a private bus, the daemon as a process, a process to monitor."""

from __future__ import annotations

import compileall
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from resctrlmond.sim.fuse.mount import Simulation
from tests.api.private_bus import PrivateBus

ROOT = Path(__file__).parents[2]
# More than the containers of a burst.
RMIDS = 1024
# How long a daemon may take to report that it is ready, and to end, in seconds.
_START_S = 30.0
_STOP_S = 60.0
# msgspec imports typing_extensions if it is there: with the tools of this folder, but not where only the package is
# installed.
AS_INSTALLED = "import sys; sys.modules['typing_extensions'] = None"
IDLE = ("-c", "import asyncio; print(flush=True); asyncio.run(asyncio.sleep(3600))")
_MOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    point = f"{sys.argv[1]}/mounts/{number}"
    os.makedirs(point)
    if libc.mount(b"none", point.encode(), b"tmpfs", 0, b"size=0"):
        raise OSError(ctypes.get_errno(), "mount", point)
"""
THREADED = """
import sys, threading
for _ in range(int(sys.argv[1]) - 1): threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
sys.stdin.read()
"""


def compile_modules() -> None:
    """Write the bytecode of all modules, as an installation does: a start that compiles takes twice as long."""
    for package in ("resctrlmond", "resctrlctl"):
        compileall.compile_dir(ROOT / package, quiet=1)


@contextlib.contextmanager
def constant(tree: Path) -> Iterator[None]:
    """A look-alike of resctrl in C, with constant counters, while the block runs."""
    program = ROOT / "build" / "constant-resctrl"
    command = ["make", "-s", "-C", str(ROOT), str(program.relative_to(ROOT))]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    with subprocess.Popen([program, tree], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        if not server.stdout.readline():
            raise OSError(f"constant-resctrl was not mounted on {tree}: its own message stands above")
        try:
            yield
        finally:
            server.communicate(timeout=10)  # it unmounts and ends with its input


class Host:
    """Everything below one folder; as a context manager it mounts the tree and starts the bus.

    The tree is a simulation, or ``is_constant``.
    """

    def __init__(self, folder: Path, *, is_constant: bool = False) -> None:
        self.folder = folder
        self._is_constant = is_constant
        self.tree = folder / "resctrl"
        self.varlink = str(folder / "run" / "org.resctrlmon.Manager")
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._notify.settimeout(_START_S)
        self.tree.mkdir()
        (folder / "bus").mkdir()
        self.bus = PrivateBus(folder / "bus")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The tree and the bus."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._notify)
            stack.enter_context(constant(self.tree) if self._is_constant else Simulation(str(self.tree), rmids=RMIDS))
            self.bus.start()
            stack.callback(self.bus.stop)
            yield

    @contextlib.contextmanager
    def daemon(self, *, dbus: bool = True) -> Iterator[tuple[int, float]]:
        """The daemon while the block runs: its pid, and the seconds from its spawn to READY=1."""
        environment = os.environ | {
            "NOTIFY_SOCKET": str(self.folder / "notify"),
            "DBUS_SYSTEM_BUS_ADDRESS": self.bus.address,
        }
        self._drain()
        started = time.perf_counter()
        # unshare(1) executes the command in its own process.
        serve = f"{AS_INSTALLED}; from tests.bench.serve import main; main({str(self.folder)!r}, dbus={dbus})"
        command = ["unshare", "--mount", sys.executable, "-c", serve]
        with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
            try:
                self._until("READY=1")
                yield process.pid, time.perf_counter() - started
            finally:
                self._stop(process)

    def mount(self, daemon: int, first: int, end: int) -> None:
        """Mount filesystems number ``first`` to ``end`` in the daemon's mount namespace, which is its own."""
        arguments = [str(self.folder), str(first), str(end)]
        subprocess.run(
            ["nsenter", "--mount", "--target", str(daemon), sys.executable, "-c", _MOUNT, *arguments], check=True
        )

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """End the daemon: with SIGTERM, or with SIGKILL if it does not stop."""
        try:
            # Not STOPPING=1: messages of a busy daemon may have filled the socket, which nobody reads.
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_S)
        finally:
            # Popen waits for the process without a limit.
            process.kill()

    def _drain(self) -> None:
        """Discard the messages of an earlier daemon: its READY=1 must not count for the next one."""
        self._notify.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self._notify.recv(4096):
                pass
        self._notify.settimeout(_START_S)

    def _until(self, word: str) -> None:
        while word not in self._notify.recv(4096).decode().split("\n"):
            pass


@contextlib.contextmanager
def python(*arguments: str) -> Iterator[int]:
    """A Python process that has printed a line and waits: its pid."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def threaded(threads: int) -> contextlib.AbstractContextManager[int]:
    """A process that has so many threads and does nothing: its pid."""
    return python("-c", THREADED, str(threads))


def spawn(command: list[str], stdin: str = os.devnull) -> None:
    """Run a command to its end, without its output, with as little of our own around it as there can be."""
    files = [
        (os.POSIX_SPAWN_OPEN, 0, stdin, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    ]
    pid = os.posix_spawn(command[0], command, {}, file_actions=files)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"{command} ended with wait status {status}"


def spawn_at_once(commands: Iterable[tuple[list[str], str]]) -> int:
    """Run commands, each with the path of its standard input, at the same time. Return how many of them failed."""
    pids = []
    for command, stdin in commands:
        files = [
            (os.POSIX_SPAWN_OPEN, 0, stdin, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        pids.append(os.posix_spawn(command[0], command, {}, file_actions=files))
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


def resident(pid: int) -> float:
    """Return the process's resident memory in bytes (proc_pid_smaps(5)). PSS depends on other processes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("Rss:"))
