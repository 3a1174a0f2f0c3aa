# SPDX-License-Identifier: Apache-2.0
"""A varlink server with an interface for tests, in a thread, and a client that sends any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from resctrlmond.api.access import Caller
from resctrlmond.api.sockets import listen
from resctrlmond.api.varlink.server import Interface, Limits, Method, Server, VarlinkError

NAME = "org.example.Test"

DESCRIPTION = """\
# An interface for tests.
interface org.example.Test

type Item (number: int)

# Returns its text.
method Echo(text: string, someNumber: ?int, nested: ?[string]Item) -> (text: string)

# Returns the credentials of the caller.
method WhoAmI() -> (pid: int, uid: int, groups: []int)

# Fails in a given way.
method Fail(how: string) -> ()

# Sleeps.
method Sleep(seconds: float) -> (slept: float)

# Counts with "more".
method Count(to: int, pause: ?float, fail: ?bool) -> (number: int)

# Sends a large reply and a small one with "more".
method Bulky() -> (text: string)

# Refuses a call with "more".
method Refused() -> ()

# Returns one reply, or several with "more".
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


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Text(msgspec.Struct):
    text: str


class Slept(msgspec.Struct):
    slept: float


class Number(msgspec.Struct):
    number: int


class Credentials(msgspec.Struct):
    pid: int
    uid: int
    groups: list[int]


class Handlers:
    """Handlers of the interface, with a record of their calls."""

    def __init__(self) -> None:
        self.echoed: list[str] = []
        self.slept: list[float] = []
        # The number of calls of Sleep and Count that have begun.
        self.begun = 0
        self.wake = asyncio.Event()
        self.closed_streams = 0

    async def echo(self, parameters: Echo, caller: Caller) -> Text:
        self.echoed.append(parameters.text)
        return Text(parameters.text)

    async def who_am_i(self, parameters: NoParameters, caller: Caller) -> Credentials:
        return Credentials(caller.pid, caller.uid, sorted(caller.groups))

    async def fail(self, parameters: Fail, caller: Caller) -> Text | None:
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
                raise ConnectionResetError("another connection")
            case "exhausted":
                raise StopAsyncIteration
            case "unexpected":
                raise RuntimeError("an internal secret")
        return None

    async def sleep(self, parameters: Sleep, caller: Caller) -> Slept:
        self.begun += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), parameters.seconds)
        self.slept.append(parameters.seconds)
        return Slept(parameters.seconds)

    async def count(self, parameters: Count, caller: Caller) -> AsyncGenerator[Number, None]:
        self.begun += 1
        try:
            for number in range(parameters.to):
                await asyncio.sleep(parameters.pause or 0)
                yield Number(number)
            if parameters.fail:
                raise VarlinkError(f"{NAME}.Wanted", {"why": "at the end"})
        finally:
            self.closed_streams += 1

    async def bulky(self, parameters: NoParameters, caller: Caller) -> AsyncGenerator[Text, None]:
        try:
            yield Text("x" * 4 * 1024 * 1024)
            # The server sends the first item when it has the second one.
            yield Text("")
        finally:
            self.closed_streams += 1

    async def refused(self, parameters: NoParameters, caller: Caller) -> AsyncGenerator[Number, None]:
        raise VarlinkError("org.varlink.service.PermissionDenied")
        yield Number(0)  # makes this function a generator

    async def single(self, parameters: msgspec.Struct, caller: Caller) -> Number:
        return Number(1)

    async def several(self, parameters: NoParameters, caller: Caller) -> AsyncGenerator[Number, None]:
        yield Number(1)
        yield Number(2)

    def interface(self) -> Interface:
        return Interface(
            NAME,
            DESCRIPTION,
            {
                "Echo": Method(Echo, self.echo),
                "WhoAmI": Method(NoParameters, self.who_am_i),
                "Fail": Method(Fail, self.fail),
                "Sleep": Method(Sleep, self.sleep),
                "Count": Method(Count, self.single, self.count),
                "Bulky": Method(NoParameters, self.single, self.bulky),
                "Refused": Method(NoParameters, self.single, self.refused),
                "Either": Method(NoParameters, self.single, self.several),
            },
        )


class RunningServer:
    """A varlink server in a thread."""

    def __init__(self, path: str, limits: Limits | None = None, listener: socket.socket | None = None) -> None:
        self.path = path
        self.handlers = Handlers()
        self._limits = limits
        self._listener = listener or listen(path)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._started.wait(60)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(
            [self.handlers.interface()],
            vendor="Example",
            product="tests",
            version="1",
            url="https://example.org",
            limits=self._limits,
            internal_error=f"{NAME}.InternalError",
        )
        await self.server.start(self._listener)
        self._started.set()
        await self._stop.wait()
        await self.server.close(self._grace_s)

    def end_sleeps(self) -> None:
        """End the calls of Sleep before their time."""
        self.loop.call_soon_threadsafe(self.handlers.wake.set)

    def close(self, grace_s: float = 5.0) -> float:
        """Stop the server, and return the seconds that this took."""
        before = time.monotonic()
        if self._thread.is_alive():
            self._grace_s = grace_s
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(120)
            assert not self._thread.is_alive()
        return time.monotonic() - before


@contextlib.contextmanager
def running(
    path: str, limits: Limits | None = None, listener: socket.socket | None = None
) -> Iterator[RunningServer]:
    """Yield a server that is closed at the end."""
    server = RunningServer(path, limits, listener)
    try:
        yield server
    finally:
        server.close()


class RawClient:
    """A client that sends the given bytes without a check."""

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
        """Return the next reply. Raises EOFError if the server has closed the connection."""
        while b"\0" not in self._data:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError(self._data)
            self._data += data
        message, _, self._data = self._data.partition(b"\0")
        reply: dict[str, Any] = json.loads(message)
        return reply

    def is_closed(self) -> bool:
        """Wait until the server closes the connection; return false if it sends a reply before."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """Yield a directory in which other users can open files, unlike pytest's."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)
        yield Path(directory)


def is_serving(path: str) -> bool:
    """Return whether the server replies on a new connection."""
    with RawClient(path) as client:
        client.call(f"{NAME}.Echo", {"text": "still serving"})
        return client.reply() == {"parameters": {"text": "still serving"}}
