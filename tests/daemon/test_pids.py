# SPDX-License-Identifier: Apache-2.0
"""The process of a request: a pid of the daemon's PID namespace, or a pidfd from any namespace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from resctrlmond.client import VarlinkError
from tests.daemon.conftest import MANAGER, Machine, StartProcess, end
from tests.wait import wait_until

# Calls the socket with a message and file descriptors, and prints the reply.
_CALL = """
import socket, sys
path, message, *descriptors = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(path)
    socket.send_fds(connection, [message.encode() + bytes(1)], [int(number) for number in descriptors])
    reply = b""
    while not reply.endswith(bytes(1)):
        reply += connection.recv(65536) or sys.exit("cut")
print(reply[:-1].decode())
"""


@pytest.fixture
def child(process: StartProcess) -> subprocess.Popen[bytes]:
    return process()


def assign(machine: Machine, *wrapper: str, descriptors: tuple[int, ...] = (), **parameters: Any) -> dict[str, Any]:
    """Call Assign in another process, and return the reply."""
    message = json.dumps({"method": f"{MANAGER}.Assign", "parameters": {"key": "k", "claim": "me", **parameters}})
    command = [*wrapper, sys.executable, "-c", _CALL, machine.socket, message, *map(str, descriptors)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, pass_fds=descriptors)
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


IN_OTHER_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


def test_pid_of_another_pid_namespace_is_refused(machine: Machine, child: subprocess.Popen[bytes]) -> None:
    machine.start()
    reply = assign(machine, *IN_OTHER_PID_NAMESPACE, pid=child.pid)
    assert reply["error"] == f"{MANAGER}.PermissionDenied"
    assert "another PID namespace" in reply["parameters"]["message"]
    assert machine.groups() == []
    assert assign(machine, pid=child.pid)["parameters"]["workload"]["state"] == "active"
    assert machine.tasks("k") == {child.pid}


@pytest.mark.parametrize("wrapper", [(), IN_OTHER_PID_NAMESPACE], ids=["same namespace", "other namespace"])
def test_pidfd_identifies_its_process_from_every_pid_namespace(
    machine: Machine, child: subprocess.Popen[bytes], wrapper: tuple[str, ...]
) -> None:
    machine.start()
    pidfd = os.pidfd_open(child.pid)
    other = os.open("/dev/null", os.O_RDONLY)
    try:
        reply = assign(machine, *wrapper, descriptors=(other, pidfd), pidFd=1)
        assert reply["parameters"]["workload"]["members"][0]["pid"] == child.pid
        assert machine.tasks("k") == {child.pid}
    finally:
        os.close(pidfd)
        os.close(other)


def test_descriptor_that_is_not_of_a_process_is_refused(machine: Machine, child: subprocess.Popen[bytes]) -> None:
    machine.start()
    other, pidfd = os.open("/dev/null", os.O_RDONLY), os.pidfd_open(child.pid)
    try:
        for index in (-1, 1, 2**40):
            reply = assign(machine, descriptors=(pidfd,), pidFd=index)
            assert reply["error"] == f"{MANAGER}.InvalidRequest"
            message = f"there is no descriptor {index} for pidFd: 1 came with the message"
            assert reply["parameters"]["message"] == message
        assert "not a pidfd" in assign(machine, descriptors=(other,), pidFd=0)["parameters"]["message"]
        assert "exactly one" in assign(machine, descriptors=(pidfd,), pidFd=0, pid=child.pid)["parameters"]["message"]
        end(child)
        assert assign(machine, descriptors=(pidfd,), pidFd=0)["error"] == f"{MANAGER}.NoSuchProcess"
        assert machine.groups() == []
    finally:
        os.close(other)
        os.close(pidfd)


def test_passed_descriptors_are_closed(machine: Machine, child: subprocess.Popen[bytes]) -> None:
    machine.start()
    with pytest.raises(VarlinkError):
        machine.call("Assign", key="k", claim="me", pidFd=0)
    assert machine.daemon
    pidfd = os.pidfd_open(child.pid)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(machine.socket)
        connection.settimeout(60)
        for _ in range(20):
            message = {"method": f"{MANAGER}.Get", "parameters": {"key": "none"}}
            socket.send_fds(connection, [json.dumps(message).encode() + b"\0"], [pidfd] * 16)
            assert b"NoSuchWorkload" in connection.recv(65536)
        folder = f"/proc/{machine.daemon.pid}/fdinfo"
        wait_until(lambda: all(f"\nPid:\t{child.pid}\n" not in _text(f"{folder}/{fd}") for fd in os.listdir(folder)))
        # With more descriptors than any method takes, the daemon closes them and the connection.
        for _ in range(2):
            socket.send_fds(connection, [b"{"], [pidfd] * 16)
        assert connection.recv(65536) == b""
    os.close(pidfd)
    assert machine.call("Status")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""
