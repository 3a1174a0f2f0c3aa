# SPDX-License-Identifier: Apache-2.0
"""The asyncio client of the varlink interface."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from resctrlmond.api.signatures import Q, R, Signature
from resctrlmond.api.varlink.frames import ProtocolError
from resctrlmond.api.varlink.messages import Reply
from resctrlmond.client import protocol

# The time between two attempts to connect while the backlog of the daemon's socket is full.
_BACKLOG_S = 0.05

_T = TypeVar("_T")


class AsyncClient:
    """A connection to the varlink socket at ``path``, in one event loop.

    ``timeout_s`` limits the time of each call, including that to connect. After a failure, a cancelled call, or a
    stream that was not read to its end, the connection is closed, and the next call opens a new one. Calls do not
    overlap. They raise the errors of ``Client``.

    ``repeats``: calls are idempotent. If the connection ends before the reply, as with a restart of the daemon, the
    call is repeated once on a new connection.
    """

    def __init__(self, path: str, timeout_s: float = protocol.TIMEOUT_S, *, repeats: bool = False) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._repeats = repeats
        self._socket: socket.socket | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._is_closed = False

    def close(self) -> None:
        """Close the connection. A current call raises ConnectionError, and the server sees the hangup."""
        self._is_closed = True
        self._disconnect()

    async def call(
        self, method: Signature[Q, R], parameters: Q | None = None, *, descriptors: Sequence[int] = ()
    ) -> R:
        """Call a method, and return its reply. The server gets a copy of each of ``descriptors``."""

        async def attempt() -> R:
            async with self._failures(self._timeout_s):
                await self._send(protocol.encode(method.full_name, parameters, more=False), descriptors)
                reply = await self._receive()
                if reply.continues:
                    raise ProtocolError(f"{method.full_name} answered one call with several replies")
            return protocol.result(method.full_name, reply, method.reply)

        return await self._repeated(attempt)

    async def pages(self, method: Signature[Q, R], parameters: Q | None = None) -> list[R]:
        """Call a method that returns a list in several replies, and return them."""

        async def attempt() -> list[R]:
            return [page async for page in self.stream(method, parameters, timeout_s=self._timeout_s)]

        return await self._repeated(attempt)

    async def stream(
        self, method: Signature[Q, R], parameters: Q | None = None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[R, None]:
        """Call a method with ``more`` and yield each reply, as ``Client.stream`` does.

        ``timeout_s`` limits the wait for each reply (None: no limit). Use contextlib.aclosing() for an iterator that
        may not be read to its end.
        """
        self._is_closed = False
        async with self._failures(self._timeout_s):
            await self._send(protocol.encode(method.full_name, parameters, more=True))
        continues = True
        try:
            while continues:
                async with self._failures(timeout_s):
                    reply = await self._receive()
                continues = bool(reply.continues)
                if protocol.is_result(reply):
                    yield protocol.result(method.full_name, reply, method.reply)
        finally:
            if continues:
                self._disconnect()

    async def _repeated(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        self._is_closed = False
        try:
            return await attempt()
        except (protocol.DaemonUnavailable, ProtocolError):
            raise
        except ConnectionError:
            if self._is_closed or not self._repeats:
                raise
            return await attempt()

    async def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        if self._socket is None:
            connected = await self._connect()
            if self._is_closed:
                connected.close()
                raise ConnectionError(f"{self._path}: the connection was closed before the call")
            self._streams = await asyncio.open_unix_connection(sock=connected, limit=protocol.MAX_REPLY_BYTES)
            self._socket = connected
        assert self._streams is not None
        # The first byte that is sent carries the descriptors (unix(7), SCM_RIGHTS).
        sent = socket.send_fds(self._socket, [message], descriptors) if descriptors else 0
        _, writer = self._streams
        writer.write(message[sent:])
        await writer.drain()

    async def _connect(self) -> socket.socket:
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            while True:
                try:
                    connecting.connect(self._path)
                except BlockingIOError:
                    # The kernel does not report when the backlog has room (net/unix/af_unix.c, unix_poll()).
                    await asyncio.sleep(_BACKLOG_S)
                else:
                    return connecting
        except OSError as error:
            connecting.close()
            raise protocol.cannot_connect(error, self._path) from error
        except BaseException:
            connecting.close()
            raise

    async def _receive(self) -> Reply:
        if self._streams is None:
            raise ConnectionError(f"{self._path}: the connection was closed before the reply")
        reader, _ = self._streams
        return protocol.decode((await reader.readuntil(b"\0"))[:-1])

    def _disconnect(self) -> None:
        if self._streams is not None:
            _, writer = self._streams
            writer.transport.abort()
        self._streams = self._socket = None

    @contextlib.asynccontextmanager
    async def _failures(self, timeout_s: float | None) -> AsyncIterator[None]:
        # After an interrupted call, a new connection is necessary: the next call would get the late reply.
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            self._disconnect()
            raise protocol.late(self._path) from error
        except (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError) as error:
            self._disconnect()
            raise protocol.closed(self._path) from error
        except asyncio.LimitOverrunError as error:
            self._disconnect()
            raise ProtocolError(f"a message is longer than {protocol.MAX_REPLY_BYTES} bytes") from error
        except BaseException:
            self._disconnect()
            raise
