# SPDX-License-Identifier: Apache-2.0
"""The daemon as a process on a simulated machine, with the sockets of a service manager."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.client import Client
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.sim.fuse.mount import Simulation

MANAGER = "org.resctrlmon.Manager"
StartProcess = Callable[[], "subprocess.Popen[bytes]"]
MoveToCgroup = Callable[[str, int], None]

# The init process of a container while its hooks run: it waits for a line before it executes the program.
_INIT = "import os, sys; sys.stdin.readline(); os.execvp('sleep', ['sleep', '600'])"


class Machine:
    """A simulated resctrl that outlives its daemons, and at most one daemon on it."""

    def __init__(self, top: Path, simulation: Simulation | None = None) -> None:
        self.top = top
        self.simulation = simulation
        self.module = "resctrlmond"
        # Further options of the daemon.
        self.options: tuple[str, ...] = ()
        self.run = top / "run"
        self.config = top / "resctrlmond.yaml"
        self.config.write_text("group: 4242\nlog_level: debug\nlinger: 0\nsnapshot_ttl: 1h\n")
        self.socket = str(self.run / MANAGER)
        self.log = top / "log"
        self.notify_path = str(top / "notify")
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(self.notify_path)
        self.notify.settimeout(20)
        self.daemon: subprocess.Popen[bytes] | None = None

    def command(self, *options: str) -> list[str]:
        """Return the command line of a daemon on this machine."""
        return [
            sys.executable,
            "-m",
            self.module,
            "--simulate",
            str(self.top),
            "--config",
            str(self.config),
            *self.options,
            *options,
        ]

    def start(self, *wrapper: str, **environment: str) -> None:
        """Start a daemon and wait until it is ready."""
        self.spawn(*wrapper, **environment)
        assert self.wait_for_notify("READY=1"), self.log.read_text()

    def start_with_socket(self, listener: socket.socket) -> None:
        """Start a daemon with a socket from systemd, and do not wait until it is ready."""
        with contextlib.ExitStack() as stack:
            if listener.fileno() != 3:
                if Path("/proc/self/fd/3").exists():
                    saved = os.dup(3)
                    stack.callback(os.close, saved)
                    stack.callback(os.dup2, saved, 3)
                os.dup2(listener.fileno(), 3)
            # LISTEN_PID must be the pid of the daemon, so a shell sets it and then executes the daemon.
            shell = ("sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh")
            self.spawn(*shell, LISTEN_FDS="1", LISTEN_FDNAMES="varlink")

    def spawn(self, *wrapper: str, **environment: str) -> None:
        """Start a daemon, and do not wait until it is ready."""
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [*wrapper, *self.command()],
                env={**os.environ, "NOTIFY_SOCKET": self.notify_path, **environment},
                stderr=log,
                pass_fds=(3,) if "LISTEN_FDNAMES" in environment else (),
            )

    def wait_for_notify(self, wanted: str, timeout_s: float = 60) -> list[str]:
        """Wait for a message to the service manager; return the lines of the first that has a line with this prefix.

        Returns [] if there is none in time.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self.notify.settimeout(left)
            try:
                lines = self.notify.recv(4096).decode().split("\n")
            except TimeoutError:
                break
            if any(line.startswith(wanted) for line in lines):
                return lines
        return []

    def reload(self) -> list[str]:
        """Send SIGHUP and wait until the daemon is ready again; return the lines of its RELOADING message."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGHUP)
        lines = self.wait_for_notify("RELOADING=1")
        assert lines
        assert self.wait_for_notify("READY=1")
        return lines

    def kill(self) -> None:
        """Kill the daemon with SIGKILL, as the kernel does if memory is exhausted."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()
        self.daemon = None

    def stop(self) -> int:
        """Stop the daemon with SIGTERM, and return its exit code."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        code = self.daemon.wait(60)
        self.daemon = None
        return code

    def stop_with_hanging_calls(self) -> int:
        """Stop a daemon whose calls hang in the kernel: end them once it gives up. Return its exit code."""
        assert self.daemon is not None
        assert self.simulation is not None
        self.daemon.send_signal(signal.SIGTERM)
        # A process with a thread that hangs in the kernel cannot end, so end the simulator.
        while "hung in the kernel" not in self.log.read_text():
            time.sleep(0.01)
        os.kill(self.simulation.pid, signal.SIGKILL)
        return self.stop()

    def call(self, verb: str, **parameters: Any) -> dict[str, Any]:
        with Client(self.socket) as client:
            method = verb if "." in verb else f"{MANAGER}.{verb}"
            return client.call(method, {key.rstrip("_"): value for key, value in parameters.items()})

    def group(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("Get", key=key)["workload"]
        return found

    def groups(self) -> list[str]:
        return sorted(os.listdir(self.top / "resctrl" / "mon_groups"))

    def tasks(self, group: str) -> set[int]:
        return {int(tid) for tid in (self.top / "resctrl" / "mon_groups" / group / "tasks").read_text().split()}

    def reaches(self, key: str, state: str, timeout_s: float = 60) -> bool:
        """Wait for a state of a workload; return whether it was reached in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.group(key)["state"] == state:
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        if self.daemon is not None:
            self.kill()
        self.notify.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "resctrl").mkdir()
    # The daemon ends before the simulation that it uses.
    with (
        Simulation(str(tmp_path / "resctrl"), "intel-rdt") as simulation,
        contextlib.closing(Machine(tmp_path, simulation)) as machine,
    ):
        yield machine


@pytest.fixture
def process() -> Iterator[StartProcess]:
    """Return a function that starts processes, which sleep until the end of the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return started[-1]

    yield start
    for child in started:
        end(child)


@pytest.fixture
def init() -> Iterator[StartProcess]:
    """Return a function that starts the init process of a container, in a control group of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def cgroup_of(child: subprocess.Popen[bytes]) -> Path:
        return cgroup_root() / f"resctrlmond-hook-{os.getpid()}-{child.pid}"

    def start() -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", _INIT], stdin=subprocess.PIPE)
        started.append(child)
        cgroup_of(child).mkdir()
        (cgroup_of(child) / "cgroup.procs").write_text(str(child.pid))
        return child

    yield start
    for child in started:
        end(child)
        cgroup_of(child).rmdir()
        assert child.stdin
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


@pytest.fixture
def move_to_cgroup() -> Iterator[MoveToCgroup]:
    """Return a function that moves a process into a control group, which is created and removed at the end."""
    created: list[Path] = []

    def move(name: str, pid: int) -> None:
        path = cgroup_root() / name
        created.extend(directory for directory in [*reversed(path.parents), path] if not directory.exists())
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.procs").write_text(str(pid))

    yield move
    for path in reversed(created):
        for pid in (path / "cgroup.procs").read_text().split():
            (cgroup_root() / "cgroup.procs").write_text(pid)
        path.rmdir()


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait for its end."""
    child.kill()
    child.wait()


def run_daemon(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run a daemon that does not start; return its exit code and its standard error."""
    command = [sys.executable, "-m", "resctrlmond", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def cgroup_root() -> Path:
    """Return the mount point of the unified hierarchy."""
    return Path(next(mount.point for mount in mounts() if mount.fstype == "cgroup2"))
