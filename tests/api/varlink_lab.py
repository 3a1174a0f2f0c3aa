# SPDX-License-Identifier: Apache-2.0
"""A varlink server with an interface for tests, in a thread of its own, and a raw client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink.server import Interface, Limits, Method, Peer, Server, VarlinkError

NAME = "org.example.Lab"

DESCRIPTION = """\
# An interface for tests.
interface org.example.Lab

type Item (number: int)

# Answers with what it was given.
method Echo(text: string, someNumber: ?int, nested: ?[string]Item) -> (text: string)

# Who calls.
method WhoAmI() -> (pid: int, uid: int, gid: int, groups: []int, pidfd: int)

# Fails as told.
method Fail(how: string) -> ()

# Sleeps.
method Sleep(seconds: float) -> (slept: float)

# Counts; needs "more".
method Count(to: int, pause: ?float, fail: ?bool) -> (number: int)

# Says much, then nothing; needs "more".
method Bulky() -> (text: string)

# Refuses; needs "more".
method Refused() -> ()

# Answers one reply, or several with "more".
method Either() -> (number: int)

error Wanted (why: string)
"""


class Item(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Echo(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    text: str
    some_number: int | None = None
    nested: dict[str, Item] | None = None


class Fail(msgspec.Struct, forbid_unknown_fields=True):
    how: str


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    seconds: float


class Count(msgspec.Struct, forbid_unknown_fields=True):
    to: int
    pause: float | None = None
    fail: bool | None = None


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Text(msgspec.Struct):
    text: str


class Slept(msgspec.Struct):
    slept: float


class Number(msgspec.Struct):
    number: int


class Who(msgspec.Struct):
    pid: int
    uid: int
    gid: int
    groups: list[int]
    pidfd: int


class Lab:
    """The handlers, with what they saw."""

    def __init__(self) -> None:
        self.echoed: list[str] = []
        self.slept: list[float] = []
        self.closed_streams = 0

    async def echo(self, parameters: Echo, peer: Peer) -> Text:
        self.echoed.append(parameters.text)
        return Text(parameters.text)

    async def who_am_i(self, parameters: Nothing, peer: Peer) -> Who:
        return Who(peer.pid, peer.uid, peer.gid, sorted(peer.groups), peer.pidfd)

    async def fail(self, parameters: Fail, peer: Peer) -> Text | None:
        match parameters.how:
            case "wanted":
                raise VarlinkError(f"{NAME}.Wanted", {"why": "asked for"})
            case "bare":
                raise VarlinkError(f"{NAME}.Wanted")
            case "cancelled":
                future = asyncio.get_running_loop().create_future()
                future.cancel()
                await future
            case "surrogate":
                return Text("\udc80")
            case "error-surrogate":
                raise VarlinkError(f"{NAME}.Wanted", {"why": "\udc80"})
            case "disconnect":
                raise ConnectionResetError("of something else")
            case "exhausted":
                raise StopAsyncIteration
            case "unexpected":
                raise RuntimeError("the secret of the house")
        return None

    async def sleep(self, parameters: Sleep, peer: Peer) -> Slept:
        await asyncio.sleep(parameters.seconds)
        self.slept.append(parameters.seconds)
        return Slept(parameters.seconds)

    async def count(self, parameters: Count, peer: Peer) -> AsyncIterator[Number]:
        try:
            for number in range(parameters.to):
                if parameters.pause is not None:
                    await asyncio.sleep(parameters.pause)
                yield Number(number)
            if parameters.fail:
                raise VarlinkError(f"{NAME}.Wanted", {"why": "at the end"})
        finally:
            self.closed_streams += 1

    async def bulky(self, parameters: Nothing, peer: Peer) -> AsyncIterator[Text]:
        try:
            yield Text("x" * 4 * 1024 * 1024)
            await asyncio.sleep(60)
        finally:
            self.closed_streams += 1

    def refused(self, parameters: Nothing, peer: Peer) -> AsyncIterator[Number]:
        raise VarlinkError("org.varlink.service.PermissionDenied")

    async def one(self, parameters: Nothing, peer: Peer) -> Number:
        return Number(1)

    async def several(self, parameters: Nothing, peer: Peer) -> AsyncIterator[Number]:
        yield Number(1)
        yield Number(2)

    def interface(self) -> Interface:
        return Interface(
            NAME,
            DESCRIPTION,
            {
                "Echo": Method(Echo, self.echo),
                "WhoAmI": Method(Nothing, self.who_am_i),
                "Fail": Method(Fail, self.fail),
                "Sleep": Method(Sleep, self.sleep),
                "Count": Method(Count, stream=self.count),
                "Bulky": Method(Nothing, stream=self.bulky),
                "Refused": Method(Nothing, stream=self.refused),
                "Either": Method(Nothing, self.one, self.several),
            },
        )


class Running:
    """A server in a thread. ``close`` ends it and returns how long that took, in seconds."""

    def __init__(self, path: str, limits: Limits | None = None, listener: socket.socket | None = None) -> None:
        self.path = path
        self.lab = Lab()
        self._limits = limits
        self._listener = listener or listen(path)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._started.wait(60)
        assert self._thread.ident is not None
        self.thread_id = self._thread.ident

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(
            [self.lab.interface()],
            vendor="Example",
            product="lab",
            version="1",
            url="https://example.org",
            limits=self._limits,
            internal_error=f"{NAME}.InternalError",
        )
        await self.server.start(self._listener)
        self._started.set()
        await self._stop.wait()
        await self.server.close(self._grace_s)

    def close(self, grace_s: float = 5.0) -> float:
        before = time.monotonic()
        if self._thread.is_alive():
            self._grace_s = grace_s
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)
            assert not self._thread.is_alive()
        return time.monotonic() - before


@contextlib.contextmanager
def running(path: str, limits: Limits | None = None, listener: socket.socket | None = None) -> Iterator[Running]:
    server = Running(path, limits, listener)
    try:
        yield server
    finally:
        server.close()


class Wire:
    """A client that sends exactly what it is told."""

    def __init__(self, path: str, timeout_s: float = 60.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.socket.settimeout(timeout_s)
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def call(self, method: str, parameters: Any = None, **envelope: Any) -> None:
        call = {"method": method, **envelope}
        if parameters is not None:
            call["parameters"] = parameters
        self.send(json.dumps(call).encode() + b"\0")

    def reply(self) -> dict[str, Any]:
        """The next reply. Raises EOFError at the end of file."""
        while b"\0" not in self._data:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError(self._data)
            self._data += data
        message, _, self._data = self._data.partition(b"\0")
        reply: dict[str, Any] = json.loads(message)
        return reply

    def is_cut(self) -> bool:
        """Whether the server closes the connection, without a reply, within the time-out."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that other users can pass through, unlike pytest's."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)
        yield Path(directory)


def works(path: str) -> bool:
    """Whether a new connection is served."""
    with Wire(path) as wire:
        wire.call(f"{NAME}.Echo", {"text": "still here"})
        return wire.reply() == {"parameters": {"text": "still here"}}
