# SPDX-License-Identifier: Apache-2.0
"""A daemon on a simulated machine, and the exporter as a process that serves it over real HTTP."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from resctrlmond.api.sockets import listen
from resctrlmond.sim.fuse.mount import Simulation
from tests.daemon.conftest import Machine, StartProcess, process

__all__ = ["Machine", "StartProcess", "process"]

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
_WAIT_S = 60.0
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class UnixConnection(http.client.HTTPConnection):
    """A connection over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def request(connection: http.client.HTTPConnection, path: str = "/metrics", **headers: str) -> Reply:
    """Send a request, and return its reply. Names of headers have "_" in the place of "-"."""
    with contextlib.closing(connection):
        connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        reply = connection.getresponse()
        return Reply(reply.status, dict(reply.getheaders()), reply.read())


class Exposition:
    """The samples of one scrape, in OpenMetrics, which its strict parser has accepted."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Family] = {
            family.name: family
            for family in parse_openmetrics(text)  # type: ignore[no-untyped-call]
        }
        samples = [sample for family in self.families.values() for sample in family.samples]
        self.samples = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}

    def value(self, name: str, /, **labels: str) -> float | None:
        """Return the value of the sample with exactly these labels; None if there is none."""
        return self.samples.get((f"resctrlmond_{name}", frozenset(labels.items())))

    def having(self, name: str, /, **labels: str) -> list[dict[str, str]]:
        """Return the labels of all samples of the name that have these labels."""
        found = [dict(of) for known, of in self.samples if known == f"resctrlmond_{name}"]
        return [of for of in found if labels.items() <= of.items()]


class Exporter:
    """An exporter as a process, with a unix socket that the test opened, as systemd does."""

    def __init__(self, top: Path, manager_socket: str, *options: str) -> None:
        self.path = str(top / "exporter.sock")
        self.log = top / "exporter.log"
        self._manager_socket = manager_socket
        self._options = options
        self._listener = listen(self.path)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; a request waits in the socket until it serves."""
        # A reading that takes longer than the default time-out on a busy machine is not a failure.
        options = ("--manager-socket", self._manager_socket, "--timeout", "60", *self._options)
        self._process = start(self._listener, self.log, *options)

    @property
    def pid(self) -> int:
        """Return its process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Stop it with SIGTERM, and return its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_WAIT_S)

    def close(self) -> None:
        self._listener.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def get(self, path: str = "/metrics", **headers: str) -> Reply:
        """Send a request."""
        return request(UnixConnection(self.path), path, **headers)

    def scrape(self) -> Exposition:
        """Return all samples."""
        reply = self.get(accept=OPENMETRICS)
        assert reply.status == 200
        return Exposition(reply.text)


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Return a port of the address that no other program gets during the block, and at which a server can listen.

    A socket that does not listen is bound to it. A server with SO_REUSEADDR can use it too, and the kernel does not
    choose it for others.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


def start(listener: socket.socket, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start an exporter with a listening socket from systemd, as descriptor 3."""
    return start_all([listener], log, *options)


def start_all(listeners: Sequence[socket.socket], log: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start an exporter with listening sockets from one socket unit, as descriptors from 3 on."""
    # LISTEN_PID must be the pid of the exporter, so a process sets it and then executes the exporter. The sockets
    # take high numbers first, because the number 3 may be that of another one.
    script = (
        "import os, sys; given = [int(number) for number in sys.argv[1].split(',')]; "
        "high = [os.dup2(number, 50 + number) for number in given]; "
        "[os.dup2(number, 3 + index) for index, number in enumerate(high)]; "
        "os.environ['LISTEN_PID'] = str(os.getpid()); "
        "os.execv(sys.executable, [sys.executable, '-m', 'resctrlmond.exporter', *sys.argv[2:]])"
    )
    numbers = [listener.fileno() for listener in listeners]
    command = [sys.executable, "-c", script, ",".join(map(str, numbers)), *options]
    names = ":".join("http" for _ in listeners)
    environment = {**os.environ, "LISTEN_FDS": str(len(listeners)), "LISTEN_FDNAMES": names}
    with log.open("ab") as output:
        return subprocess.Popen(command, env=environment, stderr=output, pass_fds=numbers)


@contextlib.contextmanager
def machine_of(top: Path, profile: str, *rmids: int, residue: int | None = None) -> Iterator[Machine]:
    """Return a simulated machine without a daemon. ``rmids`` is how many it has, if not those of the profile.

    ``residue`` is the seed of the counts that its RMIDs have from former use; None for no former use.
    """
    (top / "resctrl").mkdir()
    # The daemon ends before the simulation that it uses.
    with (
        Simulation(str(top / "resctrl"), profile, *rmids, residue=residue) as simulation,
        contextlib.closing(Machine(top, simulation)) as machine,
    ):
        yield machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_of(tmp_path, "intel-aet-perf") as machine:
        yield machine


@pytest.fixture
def exporter(machine: Machine) -> Iterator[Exporter]:
    """Return an exporter that is started, of a daemon that is not."""
    with contextlib.closing(Exporter(machine.top, machine.socket)) as exporter:
        exporter.start()
        yield exporter
