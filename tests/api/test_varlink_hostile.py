# SPDX-License-Identifier: Apache-2.0
"""The varlink server serves all other clients while one floods it, stalls or sends invalid data."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink.frames import FrameBuffer
from resctrlmond.api.varlink.server import Limits
from tests.api.varlink_server import NAME, RawClient, RunningServer, is_serving, running
from tests.wait import wait_until

ECHO = b'{"method":"org.example.Test.Echo","parameters":%s}\0'
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(str(tmp_path_factory.mktemp("server") / "socket")) as server:
        yield server


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        b" \0",
        b"{\0",
        b"[]\0",
        b'"method"\0',
        b"null\0",
        b"{}\0",
        b'{"method":5}\0',
        b'{"method":null}\0',
        b'{"method":"a.b"}x\0',
        b'{"method":"a.b","more":1}\0',
        b'{"method":"a.b","oneWay":true}\0',
        b'{"method":"a.b","parameters":5}\0',
        b'{"method":"a.b","parameters":[1]}\0',
        b'{"method":"a.b","parameters":"{}"}\0',
        b'{"method":"a.b","parameters":NaN}\0',
        b'\xef\xbb\xbf{"method":"a.b"}\0',
        b"GET / HTTP/1.1\r\n\r\n\0",
        b'{"method":"a.\xff"}\0',
        b'{"method":"a.b","parameters":{"unknown":"\xff"}}\0',
        b'{"method":"a.\xed\xa0\x80"}\0',
        b'{"method":"a.\\ud800"}\0',
        ECHO % b'{"text":"\\ud800"}',
        ECHO % b'{"text":"\\ud800\\u0041"}',
        ECHO % b'{"text":"\xed\xa0\x80"}',
        b"[" * 100_000 + b"]" * 100_000 + b"\0",
        # As deep as a message can be: Python 3.14 limits the bytes of the stack, not the number of calls.
        ECHO % (b'{"a":' * 300_000 + b"1" + b"}" * 300_000),
        ECHO % (b'{"text":' + b"[" * 500_000),
        b'{"x":' * 200_000 + b"1" + b"}" * 200_000 + b"\0",
    ],
    ids=lambda message: repr(message[:36]),
)
def test_message_that_is_not_a_call_closes_the_connection(server: RunningServer, message: bytes) -> None:
    with RawClient(server.path) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(message)
        assert client.is_closed()
    assert is_serving(server.path)


def test_complete_message_over_the_limit_closes_the_connection(server: RunningServer) -> None:
    with RawClient(server.path) as client:
        client.call(f"{NAME}.Echo", {"text": "x" * (MIB * 2 - 100)})
        assert len(client.reply()["parameters"]["text"]) == MIB * 2 - 100
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.call(f"{NAME}.Echo", {"text": "x" * MIB * 2})
            assert client.is_closed()
    assert is_serving(server.path)


def test_four_mib_without_an_end_close_the_connection(server: RunningServer) -> None:
    with RawClient(server.path) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.send(b'{"method":"' + b"x" * 4 * MIB)
        assert client.is_closed()
    assert is_serving(server.path)


class CountingBytes(bytearray):
    """Counts the bytes that ``find`` searches."""

    searched = 0

    def find(self, wanted: Any, start: Any = 0, end: Any = None) -> int:
        self.searched += len(self) - start
        return super().find(wanted, start, end)


def test_each_byte_of_a_message_in_many_pieces_is_searched_once() -> None:
    frames = FrameBuffer(2 * MIB)
    frames._data = searched = CountingBytes()
    for _ in range(32768):
        frames.feed(b" " * 64)
        assert frames.next() is None
    frames.feed(b"\0next")
    assert frames.next() == (b" " * 2 * MIB, ())
    assert searched.searched == 2 * MIB + len(b"\0next")
    assert len(frames) == len(b"next")


@given(
    messages=st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\0", b"")), max_size=6), data=st.data()
)
def test_frames_do_not_depend_on_the_pieces(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(message + b"\0" for message in messages) + b"unfinished"
    frames = FrameBuffer(30)
    found: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        frames.feed(stream[:size])
        stream = stream[size:]
        found += [message for message, _ in iter(frames.next, None)]
    assert found == messages


def test_slow_loris_is_disconnected_and_an_idle_client_is_not(tmp_path: Path) -> None:
    limits = Limits(receive_timeout_s=0.3)
    with running(str(tmp_path / "socket"), limits) as server, RawClient(server.path) as idle:
        with RawClient(server.path) as loris:
            begun = time.monotonic()
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                while time.monotonic() - begun < 60:
                    loris.send(b" ")
                    time.sleep(0.02)
            assert time.monotonic() - begun > 0.2
        # Half a message after a complete message.
        with RawClient(server.path) as loris:
            loris.send(ECHO % b'{"text":"a"}' + b"{")
            loris.reply()
            assert loris.is_closed()
        time.sleep(0.2)
        idle.call(f"{NAME}.Either")
        assert idle.reply() == {"parameters": {"number": 1}}


def test_client_that_does_not_read_is_disconnected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(send_timeout_s=0.3)
    with running(str(tmp_path / "socket"), limits) as server:
        with RawClient(server.path) as client:
            client.call(f"{NAME}.Echo", {"text": "x" * MIB})
            client.call(f"{NAME}.Echo", {"text": "never started"})
            assert is_serving(server.path)
            wait_until(lambda: not server.server._connections)
            with pytest.raises((EOFError, ConnectionResetError)):
                client.reply()
        with RawClient(server.path) as client:
            client.call(f"{NAME}.Count", {"to": 10**9}, more=True)
            assert is_serving(server.path)
            wait_until(lambda: server.handlers.closed_streams == 1)
        with RawClient(server.path) as client:
            client.call(f"{NAME}.Bulky", more=True)
            wait_until(lambda: server.handlers.closed_streams == 2)
        assert "never started" not in server.handlers.echoed
    assert caplog.records == []


def test_client_that_reads_a_stream_slowly_is_disconnected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A message now and then kept the stream, and the memory that it reserves, for ever."""
    with running(str(tmp_path / "socket"), Limits(stream_timeout_s=0.3)) as server:
        with RawClient(server.path) as client:
            client.call(f"{NAME}.Count", {"to": 10**9}, more=True)
            assert client.reply()["parameters"] == {"number": 0}

            def has_ended() -> bool:
                client.socket.recv(100)
                return server.handlers.closed_streams == 1

            wait_until(has_ended)
        assert is_serving(server.path)
    assert caplog.records == []


FLOOD = """
    import select, socket, sys

    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    call = b'{"method":"org.example.Test.Echo","parameters":{"text":"f"},"oneway":true}' + bytes(1)
    print("started", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        client.sendall(call * 1000)
"""


def test_flood_of_calls_does_not_starve_other_clients(server: RunningServer) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FLOOD), server.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
        assert flood.stdin is not None and flood.stdout is not None
        assert flood.stdout.readline() == b"started\n"
        wait_until(lambda: len(server.handlers.echoed) > 1000)
        flooded = len(server.handlers.echoed)
        for _ in range(20):
            assert is_serving(server.path)
        assert flood.poll() is None
        wait_until(lambda: len(server.handlers.echoed) - flooded > 1000)
        flood.stdin.close()
        flood.stdin = None
    assert flood.returncode == 0


def test_too_many_connections_of_one_uid_are_refused(tmp_path: Path) -> None:
    limits = Limits(connections=6, connections_per_uid=3, reserved_for_root=1)
    accepted = 6 if os.getuid() == 0 else 3
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(RawClient(server.path)) for _ in range(accepted)]
        for client in held:
            client.call(f"{NAME}.Either")
            assert client.reply() == {"parameters": {"number": 1}}
        with RawClient(server.path) as refused:
            assert refused.is_closed()
        held[0].socket.close()
        wait_until(lambda: _is_admitted(server.path))


def test_process_that_leaks_connections_leaves_connections_for_other_processes(tmp_path: Path) -> None:
    """1,024 connections of one agent of root left none for the hook."""
    limits = Limits(connections=6, connections_per_uid=4, connections_per_process=4, reserved_for_root=1)
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(RawClient(server.path))
            client.call(f"{NAME}.Either")
            assert client.reply() == {"parameters": {"number": 1}}
        with RawClient(server.path) as refused:
            assert refused.is_closed()
        hook = [sys.executable, "-m", "tests.api.test_varlink_hostile", server.path]
        assert subprocess.run(hook, check=False, timeout=100).returncode == 0


HOLD = """
import socket, sys
held = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for connection in held:
    connection.connect(sys.argv[1])
    connection.sendall(b'{"method":"org.example.Test.Either"}' + bytes(1))
    connection.recv(100)
print("held", flush=True)
sys.stdin.read()
"""


def test_processes_that_leak_connections_together_leave_connections_for_other_processes(tmp_path: Path) -> None:
    limits = Limits(connections=6, connections_per_uid=6, connections_per_process=3, reserved_for_root=0)
    path = str(tmp_path / "socket")
    with running(path, limits), contextlib.ExitStack() as stack:
        for _ in range(2):
            command = [sys.executable, "-c", HOLD, path, "3"]
            leak = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert leak.stdout is not None
            assert leak.stdout.readline() == b"held\n"
        hook = [sys.executable, "-m", "tests.api.test_varlink_hostile", path]
        assert subprocess.run(hook, check=False, timeout=100).returncode == (0 if os.getuid() == 0 else 1)


def test_full_server_closes_only_the_connection_that_is_idle_longest(tmp_path: Path) -> None:
    limits = Limits(connections=4, connections_per_uid=3, connections_per_process=3, reserved_for_root=1, idle_s=0.0)
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        held = []
        for _ in range(3):
            held.append(stack.enter_context(RawClient(server.path)))
            held[-1].call(f"{NAME}.Either")
            assert held[-1].reply() == {"parameters": {"number": 1}}
        connections = server.server._connections
        # A client has its reply before the server marks the connection as idle.
        wait_until(lambda: all(connection.idle_since is not None for connection in list(connections.values())))
        held[0].call(f"{NAME}.Sleep", {"seconds": 60.0})
        wait_until(lambda: server.handlers.begun == 1)
        # A connection with a running call is not idle, however long the call has been running.
        assert is_serving(server.path)
        assert held[1].is_closed()
        server.end_sleeps()
        assert held[0].reply() == {"parameters": {"slept": 60.0}}
        held[2].call(f"{NAME}.Either")
        assert held[2].reply() == {"parameters": {"number": 1}}


def test_hooks_of_hundreds_of_containers_are_served_at_once(server: RunningServer) -> None:
    """The 257th concurrent hook was disconnected, and its container started unmonitored."""
    # Each connection takes three of the 1024 descriptors that a process has at least.
    count = 270 if os.getuid() == 0 else 64
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(RawClient(server.path)) for _ in range(count)]
        for client in held:
            client.call(f"{NAME}.Either")
        assert [client.reply() for client in held] == [{"parameters": {"number": 1}}] * count


def _is_admitted(path: str) -> bool:
    try:
        return is_serving(path)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return False


def test_flood_of_connections_waits_in_the_backlog(tmp_path: Path) -> None:
    """With the listen(1) of asyncio's servers, 2 of 20 clients could connect while the server was busy."""
    limits = Limits(connections=250, connections_per_uid=200)
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        server.loop.call_soon_threadsafe(time.sleep, 0.5)
        time.sleep(0.1)
        clients = [stack.enter_context(RawClient(server.path)) for _ in range(200)]
        for client in clients:
            client.call(f"{NAME}.Either")
        assert all(client.reply() == {"parameters": {"number": 1}} for client in clients)


def test_the_backlog_of_a_passed_socket_is_not_changed(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    passed = socket.socket(socket.AF_UNIX)
    passed.bind(path)
    passed.listen(7)
    with running(path, listener=passed), contextlib.closing(listen(str(tmp_path / "own"))) as own:
        assert _backlog(path) == 7
        assert _backlog(str(tmp_path / "own")) == min(4096, _somaxconn())
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _backlog(path: str) -> int:
    # ss shows a listening socket's backlog as Send-Q.
    table = subprocess.run(["ss", "-xlH", "src", path], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"LISTEN +\d+ +(\d+) +{re.escape(path)} ", table)
    assert found is not None, table
    return int(found[1])


def _somaxconn() -> int:
    return int(Path("/proc/sys/net/core/somaxconn").read_text())


WITHOUT_DESCRIPTORS = """
    import contextlib, logging, os, resource, socket, sys
    from resctrlmond.api.varlink.server import Server
    from tests.api import varlink_server
    from tests.api.varlink_server import RunningServer, is_serving
    from tests.wait import wait_until

    events = []

    class RecordingServer(Server):
        def _accept(self, listener):
            events.append("accept")
            super()._accept(listener)

        def _resume(self, listener):
            events.append("resume")
            super()._resume(listener)

    logging.basicConfig(format="%(message)s")
    varlink_server.Server = RecordingServer
    server = RunningServer(sys.argv[1])
    before = len(os.listdir("/proc/self/fd"))
    assert is_serving(server.path)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before)
    client = socket.socket(socket.AF_UNIX)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)
    events.clear()
    client.connect(server.path)
    wait_until(lambda: len(events) >= 6)
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, hard))
    client.settimeout(60)
    client.sendall(b'{"method":"org.example.Test.Either"}' + bytes(1))
    print(client.recv(100).decode().strip(chr(0)))
    assert is_serving(server.path)
    client.close()
    server.close()
    # The kernel reports the listener as readable all the time: without the pause, the server would only accept.
    assert events[:6] == ["accept", "resume"] * 3, events[:6]
"""


def test_server_without_free_descriptors_retries_and_logs_once(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(WITHOUT_DESCRIPTORS), str(tmp_path / "socket")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout == '{"parameters":{"number":1}}\n'
    assert done.stderr.count("cannot accept connections, and will retry") == 1, done.stderr
    assert "Too many open files" in done.stderr


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with running(str(tmp_path / "socket")) as server:
        assert is_serving(server.path)
        served = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert is_serving(server.path)
            with RawClient(server.path) as client:
                client.call(f"{NAME}.Count", {"to": 5, "pause": 0.001}, more=True)
                client.reply()
            with RawClient(server.path) as client:
                client.send(b"not varlink\0")
                assert client.is_closed()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= served)
        with RawClient(server.path) as client:
            # The server closes descriptors that come with a call of a method that takes none.
            socket.send_fds(client.socket, [ECHO % b'{"text":"a"}'], [0, 1, 2])
            client.reply()
            wait_until(lambda: len(os.listdir("/proc/self/fd")) <= served + 3)
    assert len(os.listdir("/proc/self/fd")) == before


@given(
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from(
                [
                    b"\0",
                    b'{"method":"org.example.Test.Either"}\0',
                    b'{"method":"org.example.Test.Count","more":true,"parameters":{"to":2}}\0',
                    b'{"method":"org.varlink.service.GetInfo","oneway":true}\0',
                    b'{"method":',
                    b'"parameters":{',
                    b"}",
                ]
            ),
        ),
        max_size=8,
    ),
    cut=st.integers(1, 60),
)
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_end_with_a_closed_connection(server: RunningServer, pieces: list[bytes], cut: int) -> None:
    data = b"".join(pieces)
    with RawClient(server.path) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for start in range(0, len(data), cut):
            client.send(data[start : start + cut])
        client.socket.shutdown(socket.SHUT_WR)
        # The server closes the connection after any bytes.
        while client.socket.recv(65536):
            pass
    assert is_serving(server.path)


if __name__ == "__main__":
    sys.exit(not is_serving(sys.argv[1]))
