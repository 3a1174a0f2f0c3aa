# SPDX-License-Identifier: Apache-2.0
"""Many hooks at once, as a node that boots runs them: each container is in its group before it runs, or is late."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.frames import FrameBuffer
from resctrlmond.api.varlink.messages import Reply
from resctrlmond.resctrl.processes import TICKS_PER_S
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.sim.messages import Operation
from tests.daemon.conftest import Machine, cgroup_root, end
from tests.daemon.containers import containers, state_of
from tests.hook.builds import compile_hook
from tests.wait import wait_until

# A call that takes so long is still running when the test has made others, also on a busy machine.
LONG_MS = 10_000


def start_hook(machine: Machine, id_: str, pid: int, *options: str, stage: str = "createRuntime") -> Any:
    command = [str(compile_hook()), stage, "--socket", machine.socket]
    command += ["--journal", "/nowhere", "--strict", *options]
    hook = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={})
    assert hook.stdin
    hook.stdin.write(state_of(id_, pid))
    hook.stdin.close()
    hook.stdin = None
    return hook


def outcome(hook: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Wait for the end of a hook; return its exit code and its standard error."""
    _, stderr = hook.communicate(timeout=120)
    return hook.returncode, stderr.decode()


def slow_down(machine: Machine, milliseconds: int, times: int | None = None) -> None:
    """Let the simulated kernel take longer for each new group; 0 ends that."""
    faults = [Fault(on=Operation.MKDIR, milliseconds=milliseconds, times=times)] if milliseconds else []
    Control(str(machine.top / "resctrl")).set_faults(*faults)


def connect(machine: Machine) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(60)
    connection.connect(machine.socket)
    return connection


def send(connection: socket.socket, id_: str, pid: int, **options: bool) -> None:
    parameters = {"stage": "createRuntime", "state": state_of(id_, pid).decode()}
    call = {"method": "org.resctrlmon.Hook.Run", "parameters": parameters, **options}
    connection.sendall(json.dumps(call).encode() + b"\0")


def replies(connection: socket.socket) -> Iterator[Reply]:
    frames = FrameBuffer(1 << 20)
    while data := connection.recv(1 << 16):
        frames.feed(data)
        while (found := frames.next()) is not None:
            yield wire.decode(found[0], Reply)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Machine]:
    """Return a machine with RMIDs for each container of a burst."""
    (tmp_path / "resctrl").mkdir()
    with (
        Simulation(str(tmp_path / "resctrl"), rmids=256) as simulation,
        contextlib.closing(Machine(tmp_path, simulation)) as machine,
    ):
        yield machine


def configure(machine: Machine, hook_queue_timeout: str) -> None:
    with machine.config.open("a") as config:
        config.write(f"hook_queue_timeout: {hook_queue_timeout}\n")


def test_containers_that_start_at_once_wait_for_their_groups(large: Machine) -> None:
    """Hooks gave up after their --timeout, however fast the daemon served those before them."""
    configure(large, "1min")
    large.start()
    with containers(100) as inits:
        # One after another, the groups take longer than the time-out.
        slow_down(large, 200)
        hooks = [start_hook(large, id_, init.pid, "--timeout", "15") for id_, init in inits.items()]
        assert [outcome(hook) for hook in hooks] == [(0, "")] * 100
        slow_down(large, 0)
        assert {id_: large.tasks(id_) for id_ in inits} == {id_: {init.pid} for id_, init in inits.items()}
        groups = {workload["key"]: workload["baseline"] for workload in large.call("List")["workloads"]}
        assert groups == dict.fromkeys(inits, "exact")


@pytest.mark.parametrize("bound", ["0", "3s"])
def test_container_is_in_its_group_when_its_hook_ends_or_late(large: Machine, bound: str) -> None:
    configure(large, bound)
    large.start()
    with containers(50) as inits, ThreadPoolExecutor(len(inits)) as runtimes:
        # The first group takes longer than all hooks wait, also if a busy machine starts them one after the other.
        first = Fault(on=Operation.MKDIR, milliseconds=LONG_MS, times=1)
        Control(str(large.top / "resctrl")).set_faults(first, Fault(on=Operation.MKDIR, milliseconds=50))

        def start(id_: str) -> tuple[int, str, bool]:
            code, stderr = outcome(start_hook(large, id_, inits[id_].pid, "--timeout", "1"))
            try:
                return code, stderr, inits[id_].pid in large.tasks(id_)
            except FileNotFoundError:
                return code, stderr, False

        outcomes = dict(zip(inits, runtimes.map(start, inits), strict=True))
        slow_down(large, 0)
        wait_until(lambda: len(large.call("List")["workloads"]) == len(inits))
        for id_, (code, stderr, is_inside) in outcomes.items():
            assert large.reaches(id_, "active")
            assert large.tasks(id_) == {inits[id_].pid}
            assert is_inside or (code == 1 and "gave up waiting" in stderr)
            # A hook may give up when the daemon is about to reply.
            baselines = {"late"} if not is_inside else {"exact", "late"} if code else {"exact"}
            assert large.group(id_)["baseline"] in baselines
        assert any(code for code, _, _ in outcomes.values()), "no hook gave up"


def test_hooks_give_up_soon_if_the_daemon_is_stopped_and_their_containers_are_late(machine: Machine) -> None:
    machine.start()
    assert machine.daemon is not None
    with containers(3) as inits:
        machine.daemon.send_signal(signal.SIGSTOP)
        # Time enough to send the call on a busy machine.
        for hook in [start_hook(machine, id_, init.pid, "--timeout", "5") for id_, init in inits.items()]:
            code, stderr = outcome(hook)
            assert (code, "gave up waiting for resctrlmond after 5 s;" in stderr) == (1, True)
        # The connections are accepted only now, when their hooks have ended.
        machine.daemon.send_signal(signal.SIGCONT)
        wait_until(lambda: len(machine.call("List")["workloads"]) == 3)
        for id_ in inits:
            assert machine.reaches(id_, "active")
            assert machine.group(id_)["baseline"] == "late"


@contextlib.contextmanager
def session(id_: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a control group that is named as systemd-logind names that of a user's session."""
    cgroup = cgroup_root() / f"session-{id_}.scope"
    cgroup.mkdir()
    process = subprocess.Popen(["sleep", "3600"])
    try:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        yield process
    finally:
        end(process)
        cgroup.rmdir()


def test_after_the_end_of_its_hook_a_container_is_only_added_from_its_own_control_group(machine: Machine) -> None:
    """The pid in its state may be that of another PID namespace."""
    machine.start()
    assert machine.daemon is not None
    with containers(1) as inits, session("7") as other:
        ((id_, init),) = inits.items()
        machine.daemon.send_signal(signal.SIGSTOP)
        refused = [("ff" * 32, init.pid), (id_[1:], init.pid), ("7", other.pid)]
        # The daemon accepts the connection of the last one after the others.
        for calls in (refused, [(id_, init.pid)]):
            hooks = [start_hook(machine, called, pid, "--timeout", "5") for called, pid in calls]
            assert [outcome(hook)[0] for hook in hooks] == [1] * len(hooks)
        machine.daemon.send_signal(signal.SIGCONT)
        wait_until(lambda: machine.call("List")["workloads"])
        # The daemon waits for the calls that are running.
        assert machine.stop() == 0
    assert machine.groups() == [id_]


def start_as(pid: int) -> subprocess.Popen[bytes]:
    """Start a process with the number of one that has ended."""
    while True:
        # proc_sys_kernel(5): the next process gets the next number, unless another process is started meanwhile.
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        child = subprocess.Popen(["sleep", "600"])
        if child.pid == pid:
            return child
        end(child)


def test_process_that_has_got_the_number_of_an_ended_container_is_not_moved(machine: Machine) -> None:
    """The call of a hook that gave up can be in the queue for long."""
    machine.start()
    with containers(2) as inits, connect(machine) as first, connect(machine) as second:
        (one, init), (two, ended) = inits.items()
        slow_down(machine, LONG_MS, times=1)
        send(first, one, init.pid)
        wait_until(lambda: os.listdir(machine.run / "records"))
        # The calls of one process run one after another.
        send(second, two, ended.pid, more=True)
        assert next(replies(second)).continues
        second.close()
        end(ended)
        # Start times are in clock ticks.
        time.sleep(2 / TICKS_PER_S)
        other = start_as(ended.pid)
        try:
            assert len(list(itertools.islice(replies(first), 1))) == 1
            wait_until(lambda: len(machine.call("List")["workloads"]) == 1)
            # The daemon waits for the calls that are running.
            assert machine.stop() == 0
            assert machine.groups() == [one]
            assert other.pid not in machine.tasks(one)
        finally:
            end(other)


def test_queued_call_is_answered_at_once_and_again_when_it_has_run(machine: Machine) -> None:
    configure(machine, "7s")
    machine.start()
    with containers(1) as inits:
        ((id_, init),) = inits.items()
        slow_down(machine, LONG_MS, times=1)
        # The second call waits for the first, because both are for the same workload.
        with connect(machine) as first, connect(machine) as second, connect(machine) as third:
            send(first, id_, init.pid, more=True)
            wait_until(lambda: os.listdir(machine.run / "records"))
            send(second, id_, init.pid, more=True)
            send(third, id_, init.pid)
            first.shutdown(socket.SHUT_WR)
            second.shutdown(socket.SHUT_WR)
            third.shutdown(socket.SHUT_WR)
            (reply,) = replies(first)
            assert (reply.continues, reply.error) == (None, None)
            *notices, reply = replies(second)
            assert {(bytes(one.parameters), one.continues) for one in notices} == {(b'{"queueTimeoutMs":7000}', True)}
            assert (json.loads(bytes(reply.parameters))["key"], reply.continues) == (id_, None)
            # A client without "more" expects one reply.
            (reply,) = replies(third)
            assert reply.continues is None


def test_daemon_that_stops_closes_the_connections_of_queued_calls(machine: Machine) -> None:
    """The hooks then call the next daemon."""
    machine.start()
    with containers(1) as inits, connect(machine) as first, connect(machine) as second:
        ((id_, init),) = inits.items()
        # Less than the 5 s that a daemon that stops waits for running calls.
        slow_down(machine, 3500, times=1)
        send(first, id_, init.pid, more=True)
        wait_until(lambda: os.listdir(machine.run / "records"))
        send(second, id_, init.pid, more=True)
        notice = next(replies(second))
        assert machine.stop() == 0
        (reply,) = replies(first)
        assert json.loads(bytes(reply.parameters))["moved"] == 1
        assert (notice.continues, list(replies(second))) == (True, [])
