# SPDX-License-Identifier: Apache-2.0
"""One varlink connection on the server's side: reads calls, has them answered, writes the replies in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from resctrlmond.api.budget import Lease, ReplyBudget
from resctrlmond.api.peer import Peer, is_trusted
from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.messages import Call, FrameBuffer, Reply, VarlinkError
from resctrlmond.api.varlink.service import Service
from resctrlmond.api.varlink.streams import HangupWatch, receive, send_all

_log = logging.getLogger(__name__)

_RECEIVE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take of the server.

    ``message_bytes`` bounds one message of uid 0 and of the server's own user, ``message_bytes_of_others`` that of
    all others: what they send is decoded before it is known whether they may call that, and what they may call takes
    no more than a key. A connection is cut when a message that has begun is not complete after ``receive_timeout_s``,
    or a reply is not read within ``send_timeout_s``; it may be idle for ever. Of ``connections`` in all,
    ``reserved_for_root`` are for uid 0 only; any other uid may hold ``connections_per_uid``. One process of uid 0 may
    hold ``connections_per_process``: every container's hook is a process of its own, so an agent that leaks
    connections cannot lock hooks out. At each of these limits, the connection that has been idle longest makes room
    if it has been idle for ``idle_s``. If all ``connections`` are taken, an idle one of the process with the most
    makes room at once for a process of uid 0 with fewer.
    """

    message_bytes: int = 2 * 1024 * 1024
    message_bytes_of_others: int = 16 * 1024
    # As many containers as a node may start at once, each with a hook that would go unheard otherwise.
    connections: int = 1024
    connections_per_uid: int = 64
    reserved_for_root: int = 800
    connections_per_process: int = 512
    idle_s: float = 10.0
    receive_timeout_s: float = 30.0
    send_timeout_s: float = 30.0


class Connection:
    """One accepted connection. ``serve`` runs in a task of its own; who started it closes the connection."""

    def __init__(
        self,
        connection: socket.socket,
        peer: Peer,
        *,
        service: Service,
        limits: Limits,
        hangups: HangupWatch,
        internal_error: str,
        budget: ReplyBudget,
    ) -> None:
        self._budget = budget
        self.peer = peer
        self._socket = connection
        self._service = service
        self._limits = limits
        self._hangups = hangups
        self._internal_error = internal_error
        trusted = is_trusted(peer.uid)
        # Those of others the kernel closes as they arrive.
        self._descriptors_at_once = wire.MAX_DESCRIPTORS if trusted else 0
        self._frames = FrameBuffer(limits.message_bytes if trusted else limits.message_bytes_of_others)
        self._draining = False
        # Since when no call has been under way, by the loop's clock; None while one is.
        self.idle_since: float | None = asyncio.get_running_loop().time()
        # Whether nothing would be left half done: between calls, and in streams, which may have no end.
        self._interruptible = True

    def drain(self, task: asyncio.Task[None]) -> None:
        """End ``task``, which runs ``serve``: at once between calls and in streams, else after this reply."""
        self._draining = True
        self.idle_since = None
        if self._interruptible:
            task.cancel()

    def close(self) -> None:
        """Close the socket and the peer's pidfd."""
        self.peer.presence.close()
        self._socket.close()
        self.peer.close()

    async def serve(self) -> None:
        """Answer calls, one after another, until the peer ends or breaks the protocol or a limit."""
        try:
            while not self._draining and (message := await self._receive()) is not None:
                self._interruptible = False
                self.idle_since = None
                descriptors = self._frames.descriptors()
                self.peer = dataclasses.replace(self.peer, descriptors=descriptors)
                await self._answer(wire.decode_call(message))
                # Not if this is cancelled: the call's thread goes on, and may use them.
                for descriptor in descriptors:
                    descriptor.close()
                self._interruptible = True
                self.idle_since = asyncio.get_running_loop().time()
        except OSError as error:
            # Also ProtocolError and TimeoutError. Handlers' own errors never come here.
            _log.debug("closed the connection of process %d, uid %d: %s", self.peer.pid, self.peer.uid, error)

    async def _receive(self) -> bytes | None:
        # The next message; None at the end of file, be it in the middle of a message.
        loop = asyncio.get_running_loop()
        deadline = None
        while True:
            # sock_recv() and sock_sendall() only yield to others when they have to wait.
            await asyncio.sleep(0)
            message = self._frames.next()
            if message is not None:
                return message
            if deadline is None and len(self._frames):
                deadline = loop.time() + self._limits.receive_timeout_s
            async with asyncio.timeout_at(deadline):
                data, descriptors = await receive(self._socket, _RECEIVE_BYTES, self._descriptors_at_once)
            if not data:
                return None
            self._frames.feed(data, descriptors)

    async def _send(self, reply: Reply) -> None:
        async with asyncio.timeout(self._limits.send_timeout_s):
            await asyncio.get_running_loop().sock_sendall(self._socket, wire.encode(reply))

    async def _answer(self, call: Call) -> None:
        try:
            method, parameters = self._service.resolve(call, self.peer)
        except VarlinkError as error:
            if not call.oneway:
                await self._send(wire.error_reply(error))
            return
        async with contextlib.AsyncExitStack() as stack:
            lease = await self._leased(stack, method.reply_bytes)
            if call.more and method.stream is not None:
                await self._answer_stream(call.method, _opened(method.stream, parameters, self.peer))
                return
            # resolve() refuses a call without "more" where there is no handler.
            assert method.handler is not None
            peer = self.peer.unheard() if call.oneway else self.peer
            reply = await self._outcome(call.method, functools.partial(method.handler, parameters, peer))
            if reply is not None and not call.oneway:
                lease.shrink(len(bytes(reply.parameters)))
                await self._send(reply)

    async def _leased(self, stack: contextlib.AsyncExitStack, size: int) -> Lease:
        """Wait for a lease. A peer that hangs up meanwhile ends the connection: only reads wait."""
        entering = stack.enter_async_context(self._budget.lease(self.peer.uid, size))
        if not size:
            return await entering
        task = asyncio.current_task()
        assert task is not None
        self._interruptible = True
        with self._hangups.watching(self._socket, task.cancel):
            lease = await entering
        self._interruptible = False
        return lease

    async def _answer_stream(self, method: str, items: AsyncGenerator[msgspec.Struct, None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._interruptible = True
        async with contextlib.aclosing(items):
            with self._hangups.watching(self._socket, task.cancel):
                step = functools.partial(self._outcome, method, items.__anext__, may_end=True)
                await send_all(step, self._send)

    async def _outcome(
        self, method: str, step: Callable[[], Awaitable[msgspec.Struct | None]], *, may_end: bool = False
    ) -> Reply | None:
        # What a handler, or one step of a stream, came to; None: the stream is at its end.
        try:
            try:
                return Reply(wire.encode_parameters(await step()))
            except VarlinkError as error:
                return wire.error_reply(error)
        except (Exception, asyncio.CancelledError) as error:
            if may_end and isinstance(error, StopAsyncIteration):
                return None
            # A handler may stumble over a cancelled future of its own; that does not end the connection.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            _log.exception("%s failed for process %d, uid %d", method, self.peer.pid, self.peer.uid)
            return Reply(error=self._internal_error)


async def _opened(
    stream: Callable[[Any, Peer], AsyncIterator[msgspec.Struct]], parameters: Any, peer: Peer
) -> AsyncGenerator[msgspec.Struct, None]:
    # Makes the opening of a stream, where access is often refused, a part of its first step.
    items = stream(parameters, peer)
    try:
        async for item in items:
            yield item
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
