# SPDX-License-Identifier: Apache-2.0
"""No client stops, starves or fills up the varlink server."""

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

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink.messages import FrameBuffer
from resctrlmond.api.varlink.server import Limits
from tests.api.varlink_lab import NAME, RunningServer, Wire, running, works
from tests.wait import wait_until

ECHO = b'{"method":"org.example.Lab.Echo","parameters":%s}\0'
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(str(tmp_path_factory.mktemp("lab") / "socket")) as server:
        yield server


def cpu_of_thread(server: RunningServer) -> float:
    """Seconds of CPU that the server's thread has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(server.thread_id))


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
        # Python 3.14 counts the stack's bytes, not calls: as deep as a message may be.
        ECHO % (b'{"a":' * 300_000 + b"1" + b"}" * 300_000),
        ECHO % (b'{"text":' + b"[" * 500_000),
        b'{"x":' * 200_000 + b"1" + b"}" * 200_000 + b"\0",
    ],
    ids=lambda message: repr(message[:36]),
)
def test_message_that_is_not_a_call_closes_the_connection(server: RunningServer, message: bytes) -> None:
    with Wire(server.path) as wire, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        wire.send(message)
        assert wire.is_cut()
    assert works(server.path)


def test_a_message_over_the_cap_is_cut_though_it_is_complete(server: RunningServer) -> None:
    with Wire(server.path) as wire:
        wire.call(f"{NAME}.Echo", {"text": "x" * (MIB * 2 - 100)})
        assert len(wire.reply()["parameters"]["text"]) == MIB * 2 - 100
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.call(f"{NAME}.Echo", {"text": "x" * MIB * 2})
            assert wire.is_cut()
    assert works(server.path)


def test_four_mib_without_an_end_are_cut(server: RunningServer) -> None:
    before = cpu_of_thread(server)
    with Wire(server.path) as wire:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.send(b'{"method":"' + b"x" * 4 * MIB)
        assert wire.is_cut()
    assert works(server.path)
    # Searching all anew with each read took 0.18 s for 2 MiB, and four times that for twice as much.
    assert cpu_of_thread(server) - before < 0.1


def test_a_message_in_many_pieces_costs_linear_time() -> None:
    frames = FrameBuffer(2 * MIB)
    before = time.process_time()
    for _ in range(32768):
        frames.feed(b" " * 64)
        assert frames.next() is None
    frames.feed(b"\0behind")
    message = frames.next()
    # Searching all anew with each piece takes several seconds.
    assert time.process_time() - before < 0.5
    assert message == b" " * 2 * MIB
    assert len(frames) == len(b"behind")


@given(
    messages=st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\0", b"")), max_size=6), data=st.data()
)
def test_frames_do_not_depend_on_the_pieces(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(message + b"\0" for message in messages) + b"unfinished"
    frames = FrameBuffer(30)
    cut: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        frames.feed(stream[:size])
        stream = stream[size:]
        cut += iter(frames.next, None)
    assert cut == messages


def test_slow_loris_is_cut_and_the_idle_are_not(tmp_path: Path) -> None:
    limits = Limits(receive_timeout_s=0.3)
    with running(str(tmp_path / "socket"), limits) as server, Wire(server.path) as idle:
        with Wire(server.path) as loris:
            begun = time.monotonic()
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                while time.monotonic() - begun < 5:
                    loris.send(b" ")
                    time.sleep(0.02)
            assert 0.2 < time.monotonic() - begun < 3
        # Half a message behind a complete one.
        with Wire(server.path) as loris:
            loris.send(ECHO % b'{"text":"a"}' + b"{")
            loris.reply()
            assert loris.is_cut()
        time.sleep(0.2)
        idle.call(f"{NAME}.Either")
        assert idle.reply() == {"parameters": {"number": 1}}


def test_a_client_that_does_not_read_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(send_timeout_s=0.3)
    with running(str(tmp_path / "socket"), limits) as server:
        with Wire(server.path) as deaf:
            deaf.call(f"{NAME}.Echo", {"text": "x" * MIB})
            deaf.call(f"{NAME}.Echo", {"text": "never begun"})
            assert works(server.path)
            time.sleep(0.6)
            with pytest.raises((EOFError, ConnectionResetError)):
                deaf.reply()
        with Wire(server.path) as deaf:
            deaf.call(f"{NAME}.Count", {"to": 10**9}, more=True)
            assert works(server.path)
            wait_until(lambda: server.lab.closed_streams == 1)
        with Wire(server.path) as deaf:
            deaf.call(f"{NAME}.Bulky", more=True)
            wait_until(lambda: server.lab.closed_streams == 2)
        assert "never begun" not in server.lab.echoed
    assert caplog.records == []


FLOOD = """
    import socket, sys, time

    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    call = b'{"method":"org.example.Lab.Echo","parameters":{"text":"f"},"oneway":true}' + bytes(1)
    stop = time.monotonic() + 1.0
    print("begun", flush=True)
    while time.monotonic() < stop:
        client.sendall(call * 1000)
"""


def test_a_flood_of_calls_does_not_starve_the_others(server: RunningServer) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FLOOD), server.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"begun\n"
        served = 0
        while flood.poll() is None:
            assert works(server.path)
            served += 1
    assert flood.returncode == 0
    assert len(server.lab.echoed) - served > 1000
    assert served > 20


def test_too_many_connections_of_one_uid_are_refused(tmp_path: Path) -> None:
    limits = Limits(connections=6, connections_per_uid=3, reserved_for_root=1)
    mine = 6 if os.getuid() == 0 else 3
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(Wire(server.path)) for _ in range(mine)]
        for wire in held:
            wire.call(f"{NAME}.Either")
            assert wire.reply() == {"parameters": {"number": 1}}
        with Wire(server.path) as refused:
            assert refused.is_cut()
        held[0].socket.close()
        wait_until(lambda: _works_now(server.path))


def test_a_process_that_leaks_connections_leaves_room_for_those_of_others(tmp_path: Path) -> None:
    """1,024 connections of one root agent locked the hook out."""
    limits = Limits(connections=6, connections_per_uid=4, connections_per_process=4, reserved_for_root=1)
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            wire = stack.enter_context(Wire(server.path))
            wire.call(f"{NAME}.Either")
            assert wire.reply() == {"parameters": {"number": 1}}
        with Wire(server.path) as refused:
            assert refused.is_cut()
        hook = [sys.executable, "-m", "tests.api.test_varlink_hostile", server.path]
        assert subprocess.run(hook, check=False, timeout=100).returncode == 0


HOLD = """
import socket, sys
held = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for connection in held:
    connection.connect(sys.argv[1])
    connection.sendall(b'{"method":"org.example.Lab.Either"}' + bytes(1))
    connection.recv(100)
print("held", flush=True)
sys.stdin.read()
"""


def test_processes_that_leak_connections_together_leave_room_for_those_of_others(tmp_path: Path) -> None:
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


def test_a_full_door_closes_what_has_been_idle_longest_and_nothing_else(tmp_path: Path) -> None:
    limits = Limits(connections=4, connections_per_uid=3, connections_per_process=3, reserved_for_root=1, idle_s=0.0)
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        held = []
        for _ in range(3):
            held.append(stack.enter_context(Wire(server.path)))
            held[-1].call(f"{NAME}.Either")
            assert held[-1].reply() == {"parameters": {"number": 1}}
        served = server.server._connections
        # A reply is here before the server has noted that it is sent.
        wait_until(lambda: all(one.idle_since is not None for one in list(served.values())))
        held[0].call(f"{NAME}.Sleep", {"seconds": 5.0})
        wait_until(lambda: any(one.idle_since is None for one in list(served.values())))
        # One that is being answered is not idle, however long ago it began.
        assert works(server.path)
        assert held[1].is_cut()
        assert held[0].reply() == {"parameters": {"slept": 5.0}}
        held[2].call(f"{NAME}.Either")
        assert held[2].reply() == {"parameters": {"number": 1}}


def test_a_node_that_starts_hundreds_of_containers_at_once_is_served(server: RunningServer) -> None:
    """The 257th hook at a time was cut off, and its container started unmonitored."""
    # Three descriptors each, of the 1024 that a process has at least.
    at_once = 270 if os.getuid() == 0 else 64
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(Wire(server.path)) for _ in range(at_once)]
        for wire in held:
            wire.call(f"{NAME}.Either")
        assert [wire.reply() for wire in held] == [{"parameters": {"number": 1}}] * at_once


def _works_now(path: str) -> bool:
    try:
        return works(path)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return False


def test_a_flood_of_connections_waits_in_the_backlog(tmp_path: Path) -> None:
    """The listen(1) of asyncio's servers let 2 of 20 through while the server was busy."""
    limits = Limits(connections=250, connections_per_uid=200)
    with running(str(tmp_path / "socket"), limits) as server, contextlib.ExitStack() as stack:
        server.loop.call_soon_threadsafe(time.sleep, 0.5)
        time.sleep(0.1)
        wires = [stack.enter_context(Wire(server.path)) for _ in range(200)]
        for wire in wires:
            wire.call(f"{NAME}.Either")
        assert all(wire.reply() == {"parameters": {"number": 1}} for wire in wires)


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


STARVED = """
    import contextlib, logging, os, resource, socket, sys, time
    from tests.api.varlink_lab import RunningServer, works
    from tests.wait import wait_until

    logging.basicConfig(format="%(message)s")
    server = RunningServer(sys.argv[1])
    quiet = len(os.listdir("/proc/self/fd"))
    assert works(server.path)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == quiet)
    client = socket.socket(socket.AF_UNIX)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)
    client.connect(server.path)
    before = time.process_time()
    time.sleep(1.3)
    spent = time.process_time() - before
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, hard))
    client.settimeout(10)
    client.sendall(b'{"method":"org.example.Lab.Either"}' + bytes(1))
    print(client.recv(100).decode().strip(chr(0)))
    assert works(server.path)
    client.close()
    server.close()
    assert spent < 0.3, spent
"""


def test_running_out_of_descriptors_is_survived(tmp_path: Path) -> None:
    """The listener stays, tries again, and says so once."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(STARVED), str(tmp_path / "socket")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout == '{"parameters":{"number":1}}\n'
    assert done.stderr.count("cannot accept connections, and will retry") == 1, done.stderr
    assert "Too many open files" in done.stderr


def test_no_descriptor_is_left_over(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with running(str(tmp_path / "socket")) as server:
        assert works(server.path)
        served = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert works(server.path)
            with Wire(server.path) as wire:
                wire.call(f"{NAME}.Count", {"to": 5, "pause": 0.001}, more=True)
                wire.reply()
            with Wire(server.path) as wire:
                wire.send(b"no varlink\0")
                assert wire.is_cut()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= served)
        with Wire(server.path) as wire:
            # Descriptors sent along to a method that takes none are closed.
            socket.send_fds(wire.socket, [ECHO % b'{"text":"a"}'], [0, 1, 2])
            wire.reply()
            wait_until(lambda: len(os.listdir("/proc/self/fd")) <= served + 3)
    assert len(os.listdir("/proc/self/fd")) == before


@given(
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from(
                [
                    b"\0",
                    b'{"method":"org.example.Lab.Either"}\0',
                    b'{"method":"org.example.Lab.Count","more":true,"parameters":{"to":2}}\0',
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
def test_arbitrary_bytes_in_arbitrary_pieces(server: RunningServer, pieces: list[bytes], cut: int) -> None:
    data = b"".join(pieces)
    with Wire(server.path) as wire, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for start in range(0, len(data), cut):
            wire.send(data[start : start + cut])
        wire.socket.shutdown(socket.SHUT_WR)
        # Whatever it was: the server comes to an end with it.
        while wire.socket.recv(65536):
            pass
    assert works(server.path)


if __name__ == "__main__":
    sys.exit(not works(sys.argv[1]))
