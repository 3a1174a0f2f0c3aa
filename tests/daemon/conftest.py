# SPDX-License-Identifier: Apache-2.0
"""The daemon as a process of its own on a simulated machine, with a service manager's sockets around it."""

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

from resctrlmond.api.varlink.client import Client
from resctrlmond.sim.fuse.mount import Simulation

MANAGER = "org.resctrlmon.Manager"


class Machine:
    """A simulated resctrl that outlives its daemons, and at most one daemon on it."""

    def __init__(self, top: Path, simulation: Simulation | None = None) -> None:
        self.top = top
        self.simulation = simulation
        self.module = "resctrlmond"
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
        place = ["--simulate", str(self.top), "--config", str(self.config)]
        return [sys.executable, "-m", self.module, *place, *options]

    def start(self, *wrapper: str, **environment: str) -> None:
        """Start a daemon and wait until it says that it is ready."""
        self._begin(*wrapper, **environment)
        assert self.told("READY=1"), self.log.read_text()

    def begin_on(self, listener: socket.socket) -> None:
        """Start a daemon and pass it a socket as systemd does; not waited for."""
        with contextlib.ExitStack() as stack:
            if listener.fileno() != 3:
                if Path("/proc/self/fd/3").exists():
                    kept = os.dup(3)
                    stack.callback(os.close, kept)
                    stack.callback(os.dup2, kept, 3)
                os.dup2(listener.fileno(), 3)
            # LISTEN_PID is the daemon's: set by a shell that then becomes it.
            shell = ("sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh")
            self._begin(*shell, LISTEN_FDS="1", LISTEN_FDNAMES="varlink")

    def _begin(self, *wrapper: str, **environment: str) -> None:
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [*wrapper, *self.command()],
                env={**os.environ, "NOTIFY_SOCKET": self.notify_path, **environment},
                stderr=log,
                pass_fds=(3,) if "LISTEN_FDNAMES" in environment else (),
            )

    def told(self, wanted: str, timeout_s: float = 60) -> list[str]:
        """The first message with that line, and those lines; [] if none comes in time."""
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

    def kill(self) -> None:
        """As the kernel kills what takes too much memory: at once."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()
        self.daemon = None

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        code = self.daemon.wait(60)
        self.daemon = None
        return code

    def stop_in_spite_of_hanging_calls(self) -> int:
        """Send SIGTERM, end the calls that hang in resctrl once the daemon gives them up; return its exit code."""
        assert self.daemon is not None
        assert self.simulation is not None
        self.daemon.send_signal(signal.SIGTERM)
        # No process ends while a thread of it hangs in the kernel, so the filesystem is taken away.
        while "hung in the kernel" not in self.log.read_text():
            time.sleep(0.01)
        os.kill(self.simulation.pid, signal.SIGKILL)
        return self.stop()

    def call(self, verb: str, **parameters: Any) -> dict[str, Any]:
        with Client(self.socket) as client:
            method = verb if "." in verb else f"{MANAGER}.{verb}"
            return client.call(method, {key.rstrip("_"): value for key, value in parameters.items()})

    def group(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("Get", key=key)["group"]
        return found

    def groups(self) -> list[str]:
        return sorted(os.listdir(self.top / "resctrl" / "mon_groups"))

    def tasks(self, group: str) -> set[int]:
        return {int(tid) for tid in (self.top / "resctrl" / "mon_groups" / group / "tasks").read_text().split()}

    def reaches(self, key: str, state: str, timeout_s: float = 60) -> bool:
        """Whether the workload comes into that state."""
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
    # The machine is closed first: no daemon is left on a tree that goes.
    with (
        Simulation(str(tmp_path / "resctrl"), "intel-rdt") as simulation,
        contextlib.closing(Machine(tmp_path, simulation)) as made,
    ):
        yield made


@pytest.fixture
def process() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Makes processes that sleep until the test is over."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.wait()
