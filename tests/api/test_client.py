# SPDX-License-Identifier: Apache-2.0
"""The synchronous varlink client: replies, errors, time-outs, and servers that send invalid data."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from resctrlmond.api.signatures import Signature
from resctrlmond.api.sockets import listen
from resctrlmond.client import Client, DaemonUnavailable, ProtocolError, VarlinkError
from resctrlmond.client.synchronous import connect
from tests.api.varlink_server import NAME, Count, Echo, Number, RunningServer, Text, public_directory, running
from tests.wait import wait_until


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.path, timeout_s=60) as client:
        yield client


def test_calls_with_structs_and_with_dicts(client: Client) -> None:
    assert client.call(f"{NAME}.Echo", {"text": "a"}) == {"text": "a"}
    assert client.call(f"{NAME}.Echo", Echo(text="b", some_number=2), reply=Text) == Text("b")
    assert client.call(f"{NAME}.Either", reply=Number) == Number(1)
    assert client.call(f"{NAME}.Fail", {"how": "not"}) == {}


def test_error_replies(client: Client) -> None:
    with pytest.raises(VarlinkError) as caught:
        client.call(f"{NAME}.Fail", {"how": "wanted"})
    assert (caught.value.name, caught.value.parameters) == (f"{NAME}.Wanted", {"why": "asked for"})
    assert str(caught.value) == f"{NAME}.Wanted: why='asked for'"
    with pytest.raises(VarlinkError) as caught:
        client.call(f"{NAME}.Fail", {"how": "bare"})
    assert str(caught.value) == f"{NAME}.Wanted"
    assert client.call(f"{NAME}.Echo", {"text": "next call"}) == {"text": "next call"}


def test_stream(client: Client) -> None:
    numbers = client.stream(f"{NAME}.Count", Count(to=3), reply=Number)
    assert list(numbers) == [Number(0), Number(1), Number(2)]
    assert list(client.stream(f"{NAME}.Count", {"to": 0}, reply=Number)) == []
    assert list(client.stream(f"{NAME}.Count", {"to": 2, "pause": 0.01})) == [{"number": 0}, {"number": 1}]


def test_error_in_a_stream_is_raised(client: Client) -> None:
    items = client.stream(f"{NAME}.Count", {"to": 1, "fail": True}, reply=Number)
    assert next(items) == Number(0)
    with pytest.raises(VarlinkError, match="at the end"):
        next(items)
    assert client.call(f"{NAME}.Echo", {"text": "next call"}) == {"text": "next call"}


def test_stream_that_is_left_early_does_not_reply_to_the_next_call(server: RunningServer, client: Client) -> None:
    items = client.stream(f"{NAME}.Count", {"to": 10**9})
    assert [next(items), next(items)] == [{"number": 0}, {"number": 1}]
    items.close()  # type: ignore[attr-defined]  # it is a generator
    assert client.call(f"{NAME}.Echo", {"text": "fresh"}) == {"text": "fresh"}
    wait_until(lambda: server.handlers.closed_streams == 1)


def test_stream_with_a_closed_connection_fails(client: Client) -> None:
    items = client.stream(f"{NAME}.Count", {"to": 10**9})
    next(items)
    client.close()
    with pytest.raises(ConnectionError, match="was closed"):
        for _ in items:
            pass


def test_time_out_of_a_call(server: RunningServer) -> None:
    with Client(server.path, timeout_s=0.2) as client:
        with pytest.raises(TimeoutError, match="did not answer in time") as caught:
            client.call(f"{NAME}.Sleep", {"seconds": 60.0})
        assert caught.value.filename == server.path
        # The late reply is not returned for the next call, which a busy machine may answer later.
        client._timeout_s = 60.0
        server.end_sleeps()
        assert client.call(f"{NAME}.Echo", {"text": "fresh"}) == {"text": "fresh"}


def test_time_out_between_the_replies_of_a_stream(client: Client) -> None:
    items = client.stream(f"{NAME}.Count", {"to": 2, "pause": 5.0}, timeout_s=0.1)
    with pytest.raises(TimeoutError, match="did not answer in time"):
        next(items)


def test_error_if_the_daemon_is_not_running(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(DaemonUnavailable, match=r"is not running.*systemctl start resctrlmond\.socket") as caught:
        Client(missing).call(f"{NAME}.Either")
    assert (caught.value.path, caught.value.errno) == (missing, errno.ENOENT)
    stale = str(tmp_path / "stale")
    listen(stale).close()
    with pytest.raises(DaemonUnavailable) as caught, Client(stale):
        pass
    assert caught.value.errno == errno.ECONNREFUSED
    with pytest.raises(OSError, match="cannot connect: AF_UNIX path too long"):
        Client(str(tmp_path / ("x" * 120))).call(f"{NAME}.Either")


def test_client_connects_again_after_a_restart_of_the_server(server: RunningServer) -> None:
    client = Client(server.path, timeout_s=60)
    assert client.call(f"{NAME}.Either") == {"number": 1}
    server.close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        client.call(f"{NAME}.Either")
    with pytest.raises(DaemonUnavailable):
        client.call(f"{NAME}.Either")
    with running(server.path):
        assert client.call(f"{NAME}.Either") == {"number": 1}
        client.close()


def test_follow_continues_after_a_restart_of_the_server(server: RunningServer) -> None:
    failures: list[Exception] = []
    count = Signature("Count", Count, Number, NAME)
    client = Client(server.path)
    numbers = client.follow(count, Count(to=1), on_failure=failures.append)
    assert next(numbers) == Number(0)
    server.close()
    restarted = contextlib.ExitStack()
    timer = threading.Timer(1.5, lambda: restarted.enter_context(running(server.path)))
    timer.start()
    with restarted, contextlib.closing(client):
        assert next(numbers) == Number(0)
    assert failures


DENIED = """
    import os, sys
    from resctrlmond.client import Client

    if os.getuid() == 0:
        os.setgroups([])
        os.setuid(12345)
    try:
        Client(sys.argv[1]).call("a.b")
    except PermissionError as error:
        print(error)
"""


def test_permission_denied_is_reported() -> None:
    with public_directory() as directory, listen(str(directory / "socket"), 0o000):
        path = str(directory / "socket")
        command = [sys.executable, "-c", textwrap.dedent(DENIED), path]
        root = Path(__file__).parents[2]
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=root).stdout
    assert "access denied; root and the members of the groups 'resctrlmon' and 'resctrlmon-read'" in output
    assert path in output


def test_client_waits_while_the_backlog_is_full(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        filler = stack.enter_context(socket.socket(socket.AF_UNIX))
        filler.connect(path)
        before = time.monotonic()
        with pytest.raises(TimeoutError, match="accepts no connections"):
            connect(path, 0.3)
        assert time.monotonic() - before > 0.2
        # The client connects as soon as the backlog has room.
        timer = threading.Timer(0.2, lambda: stack.enter_context(listener.accept()[0]))
        timer.start()
        with Client(path, timeout_s=60):
            timer.join()


def test_client_waits_on_after_a_signal_while_the_backlog_is_full(tmp_path: Path) -> None:
    """After Ctrl-Z and fg, the call failed, because the socket was not connected: connect() had failed with EINTR."""
    path = str(tmp_path / "socket")
    signals = threading.Semaphore(0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        filler = stack.enter_context(socket.socket(socket.AF_UNIX))
        filler.connect(path)

        def accept_after_signals() -> None:
            for _ in range(3):
                assert signals.acquire(timeout=60)
            stack.enter_context(listener.accept()[0])

        before = signal.signal(signal.SIGALRM, lambda *_: signals.release())
        stack.callback(signal.signal, signal.SIGALRM, before)
        accepting = threading.Thread(target=accept_after_signals)
        accepting.start()
        stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with contextlib.closing(connect(path, 60)) as connection:
            assert connection.getpeername() == path
        accepting.join()


@contextlib.contextmanager
def replying(path: str, *pieces: bytes) -> Iterator[None]:
    """Serve one connection: reply with ``pieces`` to its first bytes, and close it."""
    listener = listen(path)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
        listener.close()


# The error of Python 3.14, and of earlier versions.
DEEP = "Stack overflow|recursion"


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (b"[]\0", ProtocolError, "not a varlink reply"),
        (b"\xff\0", ProtocolError, "not a varlink reply"),
        (b'{"parameters":5}\0', ProtocolError, "not a JSON object"),
        (b'{"parameters":{"text":"\\ud800"}}\0', ProtocolError, "not a varlink reply"),
        (b'{"parameters":{"text":5}}\0', ProtocolError, "the reply to .* is not valid"),
        (b'{"parameters":{}}\0', ProtocolError, "the reply to .* is not valid"),
        (b'{"continues":true}\0', ProtocolError, "several replies"),
        (b'{"parameters":' + b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000 + b"}\0", ProtocolError, DEEP),
        (b'{"parameters"', ConnectionError, "closed the connection"),
        (b"", ConnectionError, "closed the connection"),
    ],
    ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else None,
)
def test_invalid_reply_is_an_error(tmp_path: Path, reply: bytes, error: type[Exception], text: str) -> None:
    path = str(tmp_path / "socket")
    with replying(path, reply), Client(path, timeout_s=60) as client, pytest.raises(error, match=text):
        client.call(f"{NAME}.Echo", {"text": "a"}, reply=Text)


def test_reply_over_the_limit_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    flood = [b"x" * 1024 * 1024] * 65
    too_long = pytest.raises(ProtocolError, match="longer than 67108864 bytes")
    with replying(path, *flood), Client(path, timeout_s=60) as client, too_long:
        client.call("a.b")


def test_reply_that_arrives_byte_by_byte_does_not_extend_the_time_out(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listener = listen(path)
    stop = threading.Event()

    def send_slowly() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not stop.wait(0.05):
                connection.sendall(b" ")

    thread = threading.Thread(target=send_slowly)
    thread.start()
    before = time.monotonic()
    with Client(path, timeout_s=0.4) as client, pytest.raises(TimeoutError):
        client.call("a.b")
    assert time.monotonic() - before < 30
    stop.set()
    thread.join()
    listener.close()


def test_values_that_json_cannot_represent_are_not_sent(client: Client) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        client.call(f"{NAME}.Echo", {"text": "\udc80"})
    assert client.call(f"{NAME}.Either") == {"number": 1}


def test_reply_types_are_checked(client: Client) -> None:
    class Strict(msgspec.Struct, forbid_unknown_fields=True):
        pass

    with pytest.raises(ProtocolError, match="unknown field `number`"):
        client.call(f"{NAME}.Either", reply=Strict)
