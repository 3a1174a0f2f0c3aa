# SPDX-License-Identifier: Apache-2.0
"""Serve one varlink connection: read calls, run them one after another, and write their replies.

The checks of a call, from the bytes of the socket to the call of the manager:

1. ``server.Server``: room for another connection of this user and process, when the connection is accepted.
2. ``frames.FrameBuffer``: the length of the message, by the rights of the peer, and the number of descriptors.
3. ``messages.decode``: the JSON object of a varlink call.
4. ``Connection._resolve``: the interface and the method exist; the caller may call the method
   (``access.Policy``, only here); then the types of the parameters.
5. ``budget.ReplyBudget``: for calls that only read, memory for the reply.
6. ``service.Service``: for readers a free thread (``workers.Lane``). ``hook_queue.HookQueue``: the turn of a hook.
   ``unit_starts.UnitStarts``: whether systemd has started the caller, and the limit of refused calls.
7. The function of the verb: owner, PID namespace and descriptors. The manager checks keys, classes and paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import socket
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any

import msgspec

from resctrlmond.api.access import Caller, is_privileged
from resctrlmond.api.budget import Lease, ReplyBudget
from resctrlmond.api.connections import HangupWatch, receive
from resctrlmond.api.errors import name_of, parameter_at_fault, parameters
from resctrlmond.api.peer import Presence
from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.frames import MAX_DESCRIPTORS, FrameBuffer, VarlinkError
from resctrlmond.api.varlink.messages import Call, Reply
from resctrlmond.api.varlink.methods import Interface, Method
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.processes import Descriptor
from resctrlmond.workloads.model.clock import boot_ns

_log = logging.getLogger(__name__)

_RECEIVE_BYTES = 65536


class Limits(msgspec.Struct, frozen=True):
    """Limits of the server for its clients.

    ``message_bytes`` limits a message of uid 0 and of the server's own user, ``message_bytes_of_others`` a message of
    other users: the server decodes a message before it checks the caller's rights, and the methods that other users
    may call need no more than a key. The server closes a connection if a message is incomplete after
    ``receive_timeout_s``, or if the client does not read a reply within ``send_timeout_s``, or if the replies to one
    call wait for it for ``stream_timeout_s`` in all: others may wait for the memory that the call reserves. An idle
    connection has no time limit, nor an endless stream, which reserves no memory.

    Of all ``connections``, ``reserved_for_root`` are for uid 0 only. Any other uid may have ``connections_per_uid``.
    One process of uid 0 may have ``connections_per_process``: an agent that leaks connections must not exclude the
    hooks, which are one process for each container. At each of these limits, the server closes the connection that
    has been idle longest, if it has been idle for ``idle_s``. If all ``connections`` are taken, the server closes an
    idle connection of the process with the most connections at once for a process of uid 0 that has fewer.
    """

    message_bytes: int = 2 * 1024 * 1024
    message_bytes_of_others: int = 16 * 1024
    # The hooks of all containers that a node may start at once.
    connections: int = 1024
    connections_per_uid: int = 64
    reserved_for_root: int = 800
    connections_per_process: int = 512
    idle_s: float = 10.0
    receive_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    stream_timeout_s: float = 120.0


class Connection:
    """One accepted connection. ``serve`` runs in its own task; the server then calls ``close``."""

    def __init__(
        self,
        connection: socket.socket,
        caller: Caller,
        presence: Presence,
        *,
        interfaces: Mapping[str, Interface],
        limits: Limits,
        hangups: HangupWatch,
        internal_error: str,
        budget: ReplyBudget,
    ) -> None:
        self._budget = budget
        self.caller = caller
        self._presence = presence
        self._socket = connection
        self._interfaces = interfaces
        self._limits = limits
        self._hangups = hangups
        self._internal_error = internal_error
        privileged = is_privileged(caller.uid)
        # The kernel closes descriptors of other users.
        self._descriptors_at_once = MAX_DESCRIPTORS if privileged else 0
        self._frames = FrameBuffer(limits.message_bytes if privileged else limits.message_bytes_of_others)
        self._draining = False
        # The loop's time since which no call has been running; None while a call is running.
        self.idle_since: float | None = asyncio.get_running_loop().time()
        # Whether the task can be cancelled at once: between calls, and in streams, which only read.
        self._interruptible = True

    def drain(self, task: asyncio.Task[None]) -> None:
        """End ``task``, which runs ``serve``: at once between calls and in streams, otherwise after the reply."""
        self._draining = True
        self.idle_since = None
        if self._interruptible:
            task.cancel()

    def close(self) -> None:
        """Close the socket, after all that refers to it."""
        self._presence.close()
        self._socket.close()

    async def serve(self) -> None:
        """Answer calls, one after another, until the peer closes the connection or violates a rule or limit."""
        try:
            while not self._draining and (received := await self._receive()) is not None:
                self._interruptible = False
                self.idle_since = None
                descriptors = received[1]
                call = self._answer(wire.decode(received[0], Call), descriptors)
                # Hundreds of calls may wait in a queue, and each message may have megabytes.
                del received
                await call
                # Not after a cancellation: the thread of the call still runs, and may use the descriptors.
                for descriptor in descriptors:
                    descriptor.close()
                self._interruptible = True
                self.idle_since = asyncio.get_running_loop().time()
                # Let other tasks run: a call that fails at once waits for nothing.
                await asyncio.sleep(0)
        except OSError as error:
            # ProtocolError and TimeoutError are OSErrors. _outcome() handles the errors of handlers.
            _log.debug("closed the connection of process %d, uid %d: %s", self.caller.pid, self.caller.uid, error)

    async def _receive(self) -> tuple[bytes, tuple[Descriptor, ...]] | None:
        # Return the next message and its descriptors; None at the end of file, even within a message.
        deadline = None
        while (received := self._frames.next()) is None:
            if len(self._frames):
                # Let other tasks run: receive() yields only if it has to wait.
                await asyncio.sleep(0)
                deadline = deadline or asyncio.get_running_loop().time() + self._limits.receive_timeout_s
            async with asyncio.timeout_at(deadline) if deadline else contextlib.nullcontext():
                data, descriptors = await receive(self._socket, _RECEIVE_BYTES, self._descriptors_at_once)
            if not data:
                return None
            self._frames.feed(data, descriptors)
        return received

    async def _answer(self, call: Call, descriptors: tuple[Descriptor, ...]) -> None:
        try:
            method, parameters = self._resolve(call)
        except (VarlinkError, ResctrlError) as error:
            if not call.oneway:
                await self._send(_error_reply(error))
            return
        # The rest of the message is not needed while the call runs.
        call = msgspec.structs.replace(call, parameters=msgspec.Raw())
        caller = dataclasses.replace(self.caller, descriptors=descriptors, received_ns=boot_ns())
        if call.oneway:
            caller = dataclasses.replace(caller, waits=lambda: False)
        async with contextlib.AsyncExitStack() as stack:
            lease = await self._lease(stack, method.reply_bytes) if method.reply_bytes else None
            if call.more and not call.oneway and method.stream is not None:
                await self._answer_stream(call.method, method.stream(parameters, caller), method.is_endless)
                return
            reply = await self._reply(call, method, parameters, caller)
            if lease is not None:
                lease.shrink(len(bytes(reply.parameters)))
            if not call.oneway:
                await self._send(reply)

    async def _reply(self, call: Call, method: Method[Any], parameters: Any, caller: Caller) -> Reply:
        """Wait in the method's queue and notify the peer of that. Return the reply of the method's handler."""
        queued = method.queue(parameters, caller) if method.queue is not None else None
        if queued is None:
            return await self._outcome(call.method, method.handler(parameters, caller))
        self._interruptible = True
        async with queued.begun(self._announce if call.more else lambda _notice: None):
            self._interruptible = False
            return await self._outcome(call.method, method.handler(parameters, caller))

    def _announce(self, notice: msgspec.Struct) -> None:
        """Send a reply after which another one follows, without waiting."""
        # AF_UNIX sends such a short message as a whole or not at all (net/unix/af_unix.c, unix_stream_sendmsg()).
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._socket.send(wire.encode(Reply(wire.encode_parameters(notice), continues=True)))

    def _resolve(self, call: Call) -> tuple[Method[Any], Any]:
        """Return the method of a call, if the caller may call it, and the decoded parameters.

        No other code checks the access of a call. Raises VarlinkError if there is no such method or the parameters do
        not fit, the errors of ``Method.check``, and ProtocolError if the parameters are not JSON.
        """
        name, _, member = call.method.rpartition(".")
        if name not in self._interfaces:
            raise VarlinkError(wire.INTERFACE_NOT_FOUND, {"interface": name})
        method = self._interfaces[name].methods.get(member)
        if method is None:
            raise VarlinkError(wire.METHOD_NOT_FOUND, {"method": call.method})
        if method.check is not None:
            method.check(self.caller)
        if call.upgrade:
            raise VarlinkError(wire.METHOD_NOT_IMPLEMENTED, {"method": call.method})
        try:
            return method, wire.decode_parameters(call.parameters, method.parameters)
        except msgspec.ValidationError as error:
            raise VarlinkError(wire.INVALID_PARAMETER, {"parameter": parameter_at_fault(error)}) from error

    async def _send(self, reply: Reply, timeout_s: float = math.inf) -> float:
        """Send a reply. Return for how long it has waited for the peer, in seconds."""
        rest = memoryview(wire.encode(reply))
        with contextlib.suppress(BlockingIOError, InterruptedError):
            rest = rest[self._socket.send(rest) :]
        if not rest:
            return 0.0
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        async with asyncio.timeout(min(self._limits.send_timeout_s, timeout_s)):
            await loop.sock_sendall(self._socket, rest)
        return loop.time() - begun_s

    async def _lease(self, stack: contextlib.AsyncExitStack, size: int) -> Lease:
        """Wait for memory for a reply. If the peer closes the connection meanwhile, end the task."""
        task = asyncio.current_task()
        assert task is not None
        self._interruptible = True
        with self._hangups.watching(self._socket, task.cancel):
            lease = await stack.enter_async_context(self._budget.lease(self.caller.uid, size))
        self._interruptible = False
        return lease

    async def _answer_stream(
        self, method: str, items: AsyncGenerator[msgspec.Struct, None], is_endless: bool
    ) -> None:
        """Send each item as a reply, all but the last with ``continues``.

        Whether an item is the last one is known when the next one exists: unless the stream is endless, it waits.
        """
        task = asyncio.current_task()
        assert task is not None
        self._interruptible = True
        left_s = math.inf if is_endless else self._limits.stream_timeout_s
        async with contextlib.aclosing(items):
            with self._hangups.watching(self._socket, task.cancel):
                reply = await self._outcome(method, anext(items, None))
                while reply.error is None:
                    if is_endless:
                        await self._send(msgspec.structs.replace(reply, continues=True))
                        reply = await self._outcome(method, anext(items))
                        continue
                    following = await self._outcome(method, anext(items, None))
                    if following == Reply():
                        break
                    left_s -= await self._send(msgspec.structs.replace(reply, continues=True), left_s)
                    reply = following
                await self._send(reply, left_s)

    async def _outcome(self, method: str, result: Awaitable[msgspec.Struct | None]) -> Reply:
        """Return the reply with the result of a handler, or with its error. Log errors that have no name."""
        try:
            try:
                return Reply(wire.encode_parameters(await result))
            except (VarlinkError, ResctrlError) as error:
                return _error_reply(error)
        except (Exception, asyncio.CancelledError):
            # The handler may have awaited a cancelled future, which must not end the connection.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            _log.exception("%s failed for process %d, uid %d", method, self.caller.pid, self.caller.uid)
            return Reply(error=self._internal_error)


def _error_reply(error: VarlinkError | ResctrlError) -> Reply:
    if isinstance(error, ResctrlError):
        error = VarlinkError(name_of(error).varlink, parameters(error))
    return wire.error_reply(error)
