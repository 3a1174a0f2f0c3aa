# SPDX-License-Identifier: Apache-2.0
"""The server identifies a peer by the credentials of its connection, never by the content of a message."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api.peer import caller_of, credentials
from resctrlmond.api.varlink.server import Limits
from tests.api.varlink_server import NAME, RawClient, RunningServer, public_directory, running
from tests.wait import wait_until

# Calls WhoAmI as the uid, gid and groups of its arguments.
CALLER = """
    import os, socket, sys

    path, uid, gid, *groups = sys.argv[1:]
    if os.getuid() == 0:
        os.setgroups([int(group) for group in groups])
        os.setgid(int(gid))
        os.setuid(int(uid))
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    padding = b" " * int(os.environ.get("PADDING", "0"))
    client.sendall(b'{"method":"org.example.Test.WhoAmI"' + padding + b"}" + bytes(1))
    reply = client.recv(65536)
    assert reply
    print(os.getpid(), reply.decode().strip(chr(0)))
"""


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with public_directory() as directory, running(str(directory / "socket")) as server:
        os.chmod(server.path, 0o666)
        yield server


def credentials_of(server: RunningServer, uid: int, gid: int, groups: list[int]) -> tuple[int, dict[str, Any]]:
    """Call WhoAmI in a process of the given user; return its pid and the reply."""
    arguments = [server.path, *map(str, (uid, gid, *groups))]
    command = [sys.executable, "-c", textwrap.dedent(CALLER), *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    pid, _, reply = output.partition(" ")
    return int(pid), json.loads(reply)["parameters"]


def test_credentials_are_those_of_the_connection(server: RunningServer) -> None:
    as_root = os.getuid() == 0
    uid, gid = (12345, 23456) if as_root else (os.getuid(), os.getgid())
    groups = [3, 70000] if as_root else sorted(os.getgroups())
    pid, found = credentials_of(server, uid, gid, groups)
    assert (found["pid"], found["uid"], found["groups"]) == (pid, uid, sorted({gid, *groups}))


def test_peer_with_too_many_groups_has_none(server: RunningServer) -> None:
    if os.getuid() == 0:
        assert credentials_of(server, 12345, 1, list(range(256)))[1]["groups"] == list(range(256))
        assert credentials_of(server, 12345, 1, list(range(257)))[1]["groups"] == [1]
    else:
        assert credentials_of(server, os.getuid(), 1, [])[1]["groups"] == sorted({os.getgid(), *os.getgroups()})


def pidfds_of(pid: int) -> list[int]:
    """Return the descriptors of this process that refer to a process."""
    found = []
    for name in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):
            if f"Pid:\t{pid}\n" in Path(f"/proc/self/fdinfo/{name}").read_text():
                found.append(int(name))
    return found


def test_pidfd_identifies_the_peer_and_is_closed_with_the_connection(server: RunningServer) -> None:
    assert pidfds_of(os.getpid()) == []
    with RawClient(server.path) as client:
        client.call(f"{NAME}.WhoAmI")
        client.reply()
        # None on Linux before 6.5.
        if pidfds := pidfds_of(os.getpid()):
            (pidfd,) = pidfds
            assert not os.get_inheritable(pidfd)
    server.close()
    assert pidfds_of(os.getpid()) == []


def test_readers_cannot_send_large_messages(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of 2 MiB from 60 connections of a reader were decoded before they were refused, and delayed a hook's
    call by a second or more."""
    own = os.getuid()
    monkeypatch.setenv("PADDING", "1000000")
    assert credentials_of(server, own, os.getgid(), [])[1]["uid"] == own
    if own == 0:
        with pytest.raises(subprocess.CalledProcessError):
            credentials_of(server, 12345, 12345, [])
        monkeypatch.setenv("PADDING", "10000")
        assert credentials_of(server, 12345, 12345, [])[1]["uid"] == 12345


def test_some_connections_are_reserved_for_root() -> None:
    limits = Limits(connections=2, connections_per_uid=1, reserved_for_root=1)
    as_root = os.getuid() == 0
    uid, gid = (12345, 12345) if as_root else (os.getuid(), os.getgid())
    with public_directory() as directory, running(str(directory / "socket"), limits) as server:
        os.chmod(server.path, 0o666)
        with RawClient(server.path) as held:
            held.call(f"{NAME}.WhoAmI")
            held.reply()
            with pytest.raises(subprocess.CalledProcessError):
                credentials_of(server, uid, gid, [])
            with RawClient(server.path) as second:
                if as_root:
                    second.call(f"{NAME}.WhoAmI")
                    assert second.reply()["parameters"]["uid"] == 0
                else:
                    assert second.is_closed()


# Sends a message as another user, and exits without reading a reply.
SEND_AND_EXIT = """
import os, socket, sys
if os.getuid() == 0:
    os.setuid(int(sys.argv[3]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(sys.argv[2].encode() + bytes(1))
"""


def test_call_of_another_user_that_has_disconnected_is_not_served() -> None:
    """Calls of closed connections delayed root for seconds. A oneway call of root is served after it disconnects."""
    call = '{"method":"org.example.Test.Echo","parameters":{"text":"%s"},"oneway":true}'
    with public_directory() as directory, running(str(directory / "socket")) as server:
        os.chmod(server.path, 0o666)
        served = threading.Event()
        server.loop.call_soon_threadsafe(served.wait, 60)
        own = os.getuid()
        for uid in (12345, 0) if own == 0 else (own,):
            command = [sys.executable, "-c", SEND_AND_EXIT, server.path, call % f"from {uid}", str(uid)]
            subprocess.run(command, check=True)
        served.set()
        wait_until(lambda: f"from {own}" in server.handlers.echoed)
        assert "from 12345" not in server.handlers.echoed


def test_pid_namespace_of_a_peer_is_unknown_without_free_descriptors() -> None:
    """The pidfd takes the last free descriptor, so /proc/self/fdinfo cannot be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own_end, other_end = socket.socketpair()
    with own_end, other_end:
        free = os.dup(own_end.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        try:
            caller, presence = caller_of(own_end, credentials(own_end))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # Without SO_PEERPIDFD (before Linux 6.5) the descriptor is free for /proc/PID/status.
        has_pidfd = pidfds_of(os.getpid()) != []
        presence.close()
        assert caller.pid_namespaces == (0 if has_pidfd else 1)
