# SPDX-License-Identifier: Apache-2.0
"""The asyncio client: replies, errors, time-outs, cancelled calls, descriptors, and restarts of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from resctrlmond.api.signatures import Signature
from resctrlmond.api.sockets import listen
from resctrlmond.client import DaemonUnavailable, ProtocolError, UnexpectedReply, VarlinkError
from resctrlmond.client.asynchronous import AsyncClient
from tests.api.test_client import DEEP, replying
from tests.api.varlink_server import (
    NAME,
    Count,
    Echo,
    Fail,
    NoParameters,
    Number,
    RunningServer,
    Sleep,
    Slept,
    Text,
    running,
)

ECHO = Signature("Echo", Echo, Text, NAME)
EITHER = Signature("Either", NoParameters, Number, NAME)
FAIL = Signature("Fail", Fail, Text, NAME)
SLEEP = Signature("Sleep", Sleep, Slept, NAME)
COUNT = Signature("Count", Count, Number, NAME)
AS_TEXT = Signature("Either", NoParameters, Text, NAME)


def run(path: str, test: Callable[[AsyncClient], Awaitable[None]], timeout_s: float = 60.0) -> None:
    """Run a test with a client."""

    async def with_client() -> None:
        with closing(AsyncClient(path, timeout_s, repeats=True)) as client:
            await test(client)

    asyncio.run(with_client())


def test_calls_and_their_errors(server: RunningServer) -> None:
    async def test(client: AsyncClient) -> None:
        assert await client.call(ECHO, Echo(text="a")) == Text("a")
        with pytest.raises(VarlinkError) as caught:
            await client.call(FAIL, Fail(how="wanted"))
        assert (caught.value.name, caught.value.short_name) == (f"{NAME}.Wanted", "Wanted")
        with pytest.raises(UnexpectedReply, match="missing required field `text`"):
            await client.call(AS_TEXT)
        assert await client.call(EITHER) == Number(1)

    run(server.path, test)


def test_streams(server: RunningServer) -> None:
    async def test(client: AsyncClient) -> None:
        assert await client.pages(COUNT, Count(to=3)) == [Number(0), Number(1), Number(2)]
        assert [number async for number in client.stream(EITHER)] == [Number(1), Number(2)]
        with pytest.raises(VarlinkError, match="at the end"):
            await client.pages(COUNT, Count(to=1, fail=True))
        async with aclosing(client.stream(COUNT, Count(to=10**9))) as numbers:
            assert await anext(numbers) == Number(0)
        assert await client.call(ECHO, Echo(text="fresh")) == Text("fresh")
        with pytest.raises(TimeoutError, match="did not answer in time"):
            await anext(client.stream(COUNT, Count(to=2, pause=5.0), timeout_s=0.1))

    run(server.path, test)


def test_time_out_and_cancellation_of_a_call(server: RunningServer) -> None:
    async def test(client: AsyncClient) -> None:
        with pytest.raises(TimeoutError, match="did not answer in time") as caught:
            await client.call(SLEEP, Sleep(seconds=0.9))
        assert caught.value.filename == server.path
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.1):
                await client.call(SLEEP, Sleep(seconds=0.9))
        # No late reply is returned for the next call.
        client._timeout_s = 60.0
        assert await client.call(ECHO, Echo(text="fresh")) == Text("fresh")

    run(server.path, test, 0.3)


def test_close_ends_the_call(server: RunningServer) -> None:
    async def test(client: AsyncClient) -> None:
        call = asyncio.create_task(client.call(SLEEP, Sleep(seconds=50)))
        while server.handlers.begun < 1:
            await asyncio.sleep(0.01)
        client.close()
        with pytest.raises(ConnectionError):
            await call
        # It was not repeated.
        assert server.handlers.begun == 1
        assert await client.call(EITHER) == Number(1)

    run(server.path, test)


def test_calls_are_repeated_after_a_restart_of_the_server(server: RunningServer) -> None:
    async def test(client: AsyncClient) -> None:
        assert await client.call(EITHER) == Number(1)
        server.close()
        with pytest.raises(DaemonUnavailable, match="is not running"):
            await client.call(EITHER)
        with running(server.path):
            assert await client.call(EITHER) == Number(1)
        with running(server.path):
            assert await client.pages(COUNT, Count(to=1)) == [Number(0)]
        with running(server.path):
            client._repeats = False
            with pytest.raises(ConnectionError, match="closed the connection"):
                await client.call(EITHER)

    run(server.path, test)


def test_client_waits_while_the_backlog_is_full(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)

        async def test(client: AsyncClient) -> None:
            begun = time.monotonic()
            with pytest.raises(TimeoutError):
                await client.call(EITHER)
            assert time.monotonic() - begun > 0.2
            client._timeout_s = 60.0
            call = asyncio.create_task(client.call(EITHER))
            await asyncio.sleep(0.2)
            stack.enter_context(listener.accept()[0])
            connection = stack.enter_context((await asyncio.to_thread(listener.accept))[0])
            assert await asyncio.to_thread(connection.recv, 65536) == b'{"method":"org.example.Test.Either"}\0'
            connection.sendall(b'{"parameters":{"number":7}}\0')
            assert await call == Number(7)

        run(path, test, 0.3)


def test_descriptors_are_passed(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with listen(path) as listener, contextlib.ExitStack() as stack:
        pidfd = os.pidfd_open(os.getpid())
        stack.callback(os.close, pidfd)

        async def test(client: AsyncClient) -> None:
            call = asyncio.create_task(client.call(EITHER, descriptors=[pidfd]))
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                message, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 65536, 4)
                assert message.endswith(b"\0")
                for each in descriptors:
                    stack.callback(os.close, each)
                assert [os.readlink(f"/proc/self/fd/{each}") for each in descriptors] == ["anon_inode:[pidfd]"]
                connection.sendall(b'{"parameters":{"number":7}}\0')
                assert await call == Number(7)

        run(path, test)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (b"[]\0", ProtocolError, "not a varlink reply"),
        (b'{"continues":true}\0', ProtocolError, "several replies"),
        (b'{"parameters":' + b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000 + b"}\0", ProtocolError, DEEP),
        (b"x" * 65 * 1024 * 1024, ProtocolError, "longer than 67108864 bytes"),
        (b'{"parameters"', ConnectionError, "closed the connection"),
    ],
    ids=["not an object", "several replies", "nested", "long", "cut"],
)
def test_invalid_reply_is_an_error(tmp_path: Path, reply: bytes, error: type[Exception], text: str) -> None:
    path = str(tmp_path / "socket")

    async def test(client: AsyncClient) -> None:
        client._repeats = False
        with pytest.raises(error, match=text):
            await client.call(EITHER)

    with replying(path, reply):
        run(path, test)


def test_synchronous_client_imports_neither_asyncio_nor_the_daemon() -> None:
    code = "import sys, resctrlmond.client; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    own = {name.removeprefix("resctrlmond.") for name in modules if name.startswith("resctrlmond.")}
    client = {"client", "client.protocol", "client.synchronous"}
    api = {"api", "api.types", "api.signatures", "api.varlink", "api.varlink.frames", "api.varlink.messages"}
    vocabulary = {f"workloads.model.{name}" for name in ("changes", "reports", "states")} | {"resctrl.kinds"}
    assert own <= client | api | vocabulary | {"resctrl", "workloads", "workloads.model"}
    assert "asyncio" not in modules
