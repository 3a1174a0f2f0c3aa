# SPDX-License-Identifier: Apache-2.0
"""A hook waits while the daemon starts or restarts, but not for a daemon that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from resctrlmond.client import Client
from resctrlmond.daemon.startup import Exit
from resctrlmond.service.start_lock import SUFFIX
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from tests.daemon.conftest import Machine, StartProcess, end
from tests.hook.builds import compile_hook
from tests.wait import wait_until


@pytest.fixture
def listener(machine: Machine) -> Iterator[socket.socket]:
    """Return a listening socket that stays open while daemons restart, as that of a systemd socket unit."""
    machine.run.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(machine.socket)
        listener.listen(64)
        yield listener


def slow_next_start(machine: Machine, process: StartProcess, seconds: int) -> None:
    """Kill the daemon, and slow down a counter that the next daemon reads during its start."""
    child = process()
    machine.call("Assign", key="slow", pid=child.pid, claim="engine", endRule="container")
    machine.kill()
    end(child)
    slow = Fault(on=Operation.READ, group="mon_groups/slow", milliseconds=seconds * 1000, times=1)
    Control(str(machine.top / "resctrl")).set_faults(slow)


def is_locked(machine: Machine) -> bool:
    """Return whether a daemon holds the start lock."""
    try:
        file = os.open(machine.socket + SUFFIX, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        os.lockf(file, os.F_TEST, 0)
    except PermissionError:
        return True
    finally:
        os.close(file)
    return False


def hook(machine: Machine, container: str, pid: int, *options: str) -> subprocess.Popen[bytes]:
    """Start the hook of a container."""
    command = [str(compile_hook()), "createRuntime", "--socket", machine.socket, *options]
    state = {"ociVersion": "1.0.2", "id": container, "status": "created", "pid": pid, "bundle": "/b"}
    run = subprocess.Popen([*command, "--strict"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdin
    run.stdin.write(json.dumps(state).encode())
    run.stdin.close()
    run.stdin = None
    return run


@contextlib.contextmanager
def running_hook(machine: Machine, container: str, pid: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the hook of a container, and wait for its end."""
    with hook(machine, container, pid, *options) as run:
        yield run


def test_a_container_that_starts_while_the_daemon_starts_is_in_its_group(
    machine: Machine, process: StartProcess, listener: socket.socket
) -> None:
    """The hook of the first container after a stop of the service gave up after 2 s, and the container ran
    unmonitored."""
    machine.start_with_socket(listener)
    assert machine.wait_for_notify("READY=1")
    slow_next_start(machine, process, 3)
    machine.start_with_socket(listener)
    wait_until(lambda: is_locked(machine))
    child = process()
    options = ("--timeout", "1", "--start-timeout", "60")
    with running_hook(machine, "early", child.pid, *options) as run:
        assert run.communicate(timeout=60)[1] == b""
    assert machine.wait_for_notify("READY=1")
    assert machine.tasks("early") == {child.pid}
    assert not is_locked(machine)


def test_a_container_that_starts_while_the_daemon_restarts_is_in_its_group(
    machine: Machine, process: StartProcess, listener: socket.socket
) -> None:
    machine.start_with_socket(listener)
    assert machine.wait_for_notify("READY=1")
    for number in range(3):
        children = [process() for _ in range(4)]
        # The first two hooks can reach the daemon that stops; the others wait at the socket for the next one.
        with contextlib.ExitStack() as stack:
            options = ("--timeout", "20", "--start-timeout", "60")
            runs = [
                stack.enter_context(running_hook(machine, f"c{number}{i}", children[i].pid, *options))
                for i in range(2)
            ]
            assert machine.stop() == Exit.OK
            runs += [
                stack.enter_context(running_hook(machine, f"c{number}{i}", children[i].pid, *options)) for i in (2, 3)
            ]
            machine.start_with_socket(listener)
            for run in runs:
                assert run.communicate(timeout=60)[1] == b""
        assert machine.wait_for_notify("READY=1")
        for i, child in enumerate(children):
            assert machine.tasks(f"c{number}{i}") == {child.pid}


def test_hook_does_not_wait_for_a_start_that_hangs_in_the_kernel(
    machine: Machine, process: StartProcess, listener: socket.socket
) -> None:
    machine.start_with_socket(listener)
    assert machine.wait_for_notify("READY=1")
    slow_next_start(machine, process, 25)
    machine.start_with_socket(listener)
    wait_until(lambda: is_locked(machine))
    options = ("--timeout", "1", "--start-timeout", "3600")
    with running_hook(machine, "early", process().pid, *options) as run:
        _, stderr = run.communicate(timeout=60)
    assert b"gave up waiting for resctrlmond after 1 s" in stderr
    assert not machine.wait_for_notify("READY=1", 0.01), "the start no longer hangs"


# Executes a command with two listening sockets, that of systemd-report first: systemd passes them in any order.
TWO_SOCKETS = """\
import fcntl, os, socket, sys
high = []
for path in sys.argv[1:3]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    high.append(fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD, 10))
for number, descriptor in enumerate(high, 3):
    os.dup2(descriptor, number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="report:varlink")
os.execv(sys.argv[3], sys.argv[3:])
"""


def test_daemon_with_the_socket_of_systemd_report_serves_both(machine: Machine, process: StartProcess) -> None:
    machine.run.mkdir(exist_ok=True)
    report = str(machine.top / "org.resctrlmon.Workload")
    machine.start(sys.executable, "-c", TWO_SOCKETS, report, machine.socket)
    # The lock is beside the socket that hooks connect to.
    assert os.path.exists(machine.socket + SUFFIX)
    assert not os.path.exists(report + SUFFIX)
    machine.call("Assign", key="web", pid=process().pid)
    with Client(report) as client:
        metrics = list(client.stream("io.systemd.Metrics.List"))
        assert {metric["object"] for metric in metrics} == {"web"}
