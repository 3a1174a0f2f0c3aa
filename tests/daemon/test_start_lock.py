# SPDX-License-Identifier: Apache-2.0
"""A hook that comes while a daemon starts or stops: it waits for the next daemon, but not for one that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from resctrlmond import oci_hook
from resctrlmond.daemon.startup import Exit
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.control.messages import Operation
from resctrlmond.start_lock import SUFFIX
from tests.daemon.conftest import Machine
from tests.wait import wait_until

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def listener(machine: Machine) -> Iterator[socket.socket]:
    """The socket that systemd keeps while daemons come and go."""
    machine.run.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(machine.socket)
        made.listen(64)
        yield made


def slow_next_start(machine: Machine, process: Start, seconds: int) -> None:
    """Kill the daemon. The kernel needs so many seconds for a counter that the next one reads before it is ready."""
    child = process()
    machine.call("Assign", key="slow", pid=child.pid, claim="engine", endRule="container")
    machine.kill()
    child.kill()
    child.wait()
    slow = Fault(on=Operation.READ, group="mon_groups/slow", milliseconds=seconds * 1000, times=1)
    Control(str(machine.top / "resctrl")).set_faults(slow)


def is_locked(machine: Machine) -> bool:
    """Whether a daemon holds its start lock."""
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
    """The hook of a container, which waits for the daemon."""
    command = [sys.executable, "-IS", oci_hook.__file__, "createRuntime", "--socket", machine.socket, *options]
    state = {"ociVersion": "1.0.2", "id": container, "status": "created", "pid": pid, "bundle": "/b"}
    run = subprocess.Popen([*command, "--strict"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdin
    run.stdin.write(json.dumps(state).encode())
    run.stdin.close()
    run.stdin = None
    return run


@contextlib.contextmanager
def hooked(machine: Machine, container: str, pid: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    with hook(machine, container, pid, *options) as run:
        yield run


def test_a_container_that_starts_while_the_daemon_starts_is_in_its_group(
    machine: Machine, process: Start, listener: socket.socket
) -> None:
    """The first container after a stop of the service waited 2 s in vain, and ran unmonitored."""
    machine.begin_on(listener)
    assert machine.told("READY=1")
    slow_next_start(machine, process, 3)
    machine.begin_on(listener)
    wait_until(lambda: is_locked(machine))
    child = process()
    with hooked(machine, "early", child.pid, "--timeout", "1", "--start-timeout", "60") as run:
        assert run.communicate(timeout=60) == (None, b"")
    assert machine.told("READY=1")
    assert machine.tasks("early") == {child.pid}
    assert not is_locked(machine)


def test_a_container_that_starts_while_the_daemon_restarts_is_in_its_group(
    machine: Machine, process: Start, listener: socket.socket
) -> None:
    machine.begin_on(listener)
    assert machine.told("READY=1")
    for number in range(3):
        children = [process() for _ in range(4)]
        # Some reach the daemon that stops, the others the socket.
        with contextlib.ExitStack() as stack:
            options = ("--timeout", "20", "--start-timeout", "60")
            runs = [
                stack.enter_context(hooked(machine, f"c{number}{i}", children[i].pid, *options)) for i in range(2)
            ]
            assert machine.stop() == Exit.OK
            runs += [stack.enter_context(hooked(machine, f"c{number}{i}", children[i].pid, *options)) for i in (2, 3)]
            machine.begin_on(listener)
            for run in runs:
                assert run.communicate(timeout=60) == (None, b"")
        assert machine.told("READY=1")
        for i, child in enumerate(children):
            assert machine.tasks(f"c{number}{i}") == {child.pid}


def test_a_start_that_hangs_in_the_kernel_keeps_no_hook_waiting(
    machine: Machine, process: Start, listener: socket.socket
) -> None:
    machine.begin_on(listener)
    assert machine.told("READY=1")
    slow_next_start(machine, process, 25)
    machine.begin_on(listener)
    wait_until(lambda: is_locked(machine))
    with hooked(machine, "early", process().pid, "--timeout", "1", "--start-timeout", "3600") as run:
        _, said = run.communicate(timeout=60)
    assert b"gave up waiting for resctrlmond after 1 s" in said
    assert not machine.told("READY=1", 0.01), "the start hangs still"
