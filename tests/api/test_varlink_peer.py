# SPDX-License-Identifier: Apache-2.0
"""The server knows its peers by the connection, never by what they say."""

from __future__ import annotations

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

from resctrlmond.api.peer import Peer
from resctrlmond.api.varlink.server import Limits
from tests.api.varlink_lab import NAME, RunningServer, Wire, public_directory, running
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
    client.sendall(b'{"method":"org.example.Lab.WhoAmI"' + padding + b"}" + bytes(1))
    reply = client.recv(65536)
    assert reply
    print(os.getpid(), reply.decode().strip(chr(0)))
"""


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with public_directory() as directory, running(str(directory / "socket")) as server:
        os.chmod(server.path, 0o666)
        yield server


def who_is(server: RunningServer, uid: int, gid: int, groups: list[int]) -> tuple[int, dict[str, Any]]:
    arguments = [server.path, *map(str, (uid, gid, *groups))]
    command = [sys.executable, "-c", textwrap.dedent(CALLER), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    pid, _, reply = answer.partition(" ")
    return int(pid), json.loads(reply)["parameters"]


def test_credentials_are_those_of_the_connection(server: RunningServer) -> None:
    as_root = os.getuid() == 0
    uid, gid = (12345, 23456) if as_root else (os.getuid(), os.getgid())
    groups = [3, 70000] if as_root else sorted(os.getgroups())
    pid, who = who_is(server, uid, gid, groups)
    assert (who["pid"], who["uid"], who["gid"], who["groups"]) == (pid, uid, gid, groups)


def test_too_many_groups_count_as_none(server: RunningServer) -> None:
    if os.getuid() == 0:
        assert who_is(server, 12345, 1, list(range(256)))[1]["groups"] == list(range(256))
        assert who_is(server, 12345, 1, list(range(257)))[1]["groups"] == []
    else:
        assert who_is(server, os.getuid(), 1, [])[1]["groups"] == sorted(os.getgroups())


def test_pidfd_is_the_peers_and_closed_with_the_connection(server: RunningServer) -> None:
    with Wire(server.path) as wire:
        wire.call(f"{NAME}.WhoAmI")
        pidfd = wire.reply()["parameters"]["pidfd"]
        if pidfd >= 0:
            assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
            assert not os.get_inheritable(pidfd)
    server.close()
    if pidfd >= 0:
        with pytest.raises(OSError):
            os.fstat(pidfd)


def test_readers_may_not_send_large_messages(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of the group, who may only read, sent 2 MiB over each of 60 connections, again and again: all that was
    decoded before it was refused, and a hook's call took a second or more."""
    own = os.getuid()
    monkeypatch.setenv("PADDING", "1000000")
    assert who_is(server, own, os.getgid(), [])[1]["uid"] == own
    if own == 0:
        with pytest.raises(subprocess.CalledProcessError):
            who_is(server, 12345, 12345, [])
        monkeypatch.setenv("PADDING", "10000")
        assert who_is(server, 12345, 12345, [])[1]["uid"] == 12345


def test_peer_is_a_value() -> None:
    peer = Peer(1, 2, 3, frozenset({4}))
    assert peer == Peer(1, 2, 3, frozenset({4}), pidfd=-1)
    peer.close()


def test_root_has_connections_that_others_cannot_take() -> None:
    limits = Limits(connections=2, connections_per_uid=1, reserved_for_root=1)
    as_root = os.getuid() == 0
    uid, gid = (12345, 12345) if as_root else (os.getuid(), os.getgid())
    with public_directory() as directory, running(str(directory / "socket"), limits) as server:
        os.chmod(server.path, 0o666)
        with Wire(server.path) as held:
            held.call(f"{NAME}.WhoAmI")
            held.reply()
            with pytest.raises(subprocess.CalledProcessError):
                who_is(server, uid, gid, [])
            with Wire(server.path) as second:
                if as_root:
                    second.call(f"{NAME}.WhoAmI")
                    assert second.reply()["parameters"]["uid"] == 0
                else:
                    assert second.is_cut()


LEAVE = """
import os, socket, sys
if os.getuid() == 0:
    os.setuid(int(sys.argv[3]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(sys.argv[2].encode() + bytes(1))
"""


def test_a_connection_of_another_user_that_has_left_is_not_served() -> None:
    """Connections that were closed after one call made root wait for seconds. A trusted caller may leave: oneway."""
    call = '{"method":"org.example.Lab.Echo","parameters":{"text":"%s"},"oneway":true}'
    with public_directory() as directory, running(str(directory / "socket")) as server:
        os.chmod(server.path, 0o666)
        served = threading.Event()
        server.loop.call_soon_threadsafe(served.wait, 60)
        own = os.getuid()
        for uid in (12345, 0) if own == 0 else (own,):
            command = [sys.executable, "-c", LEAVE, server.path, call % f"of {uid}", str(uid)]
            subprocess.run(command, check=True)
        served.set()
        wait_until(lambda: f"of {own}" in server.lab.echoed)
        assert "of 12345" not in server.lab.echoed


def test_a_peer_at_the_limit_of_descriptors_has_an_unknown_pid_namespace() -> None:
    """The last free descriptor is the pidfd: /proc/self/fdinfo can no longer be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        free = os.dup(ours.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        try:
            peer = Peer.of(ours)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # Without SO_PEERPIDFD (Linux before 6.5) the free descriptor reads /proc/PID/status.
        assert peer.pid_namespaces == (0 if peer.pidfd >= 0 else 1)
        peer.close()
