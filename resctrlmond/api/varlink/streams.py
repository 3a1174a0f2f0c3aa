# SPDX-License-Identifier: Apache-2.0
"""A connection beside its messages: descriptors that come with them, several replies, and whether anybody listens."""

from __future__ import annotations

import array
import asyncio
import contextlib
import select
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import msgspec

from resctrlmond.api.varlink.messages import Reply
from resctrlmond.resctrl.processes import Descriptor

# A C int, as SCM_RIGHTS carries them.
_FD = array.array("i")


async def receive(connection: socket.socket, size: int, descriptors: int) -> tuple[bytes, list[Descriptor]]:
    """Up to ``size`` bytes of a non-blocking socket, b"" at the end, and at most ``descriptors`` that came with them.

    Descriptors above that number are closed by the kernel.
    """
    if not descriptors:
        return await asyncio.get_running_loop().sock_recv(connection, size), []
    room = socket.CMSG_SPACE(descriptors * _FD.itemsize)
    while True:
        try:
            data, ancillary, _, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            await _readable(connection)
            continue
        numbers = array.array(_FD.typecode)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers.frombytes(content[: len(content) - len(content) % _FD.itemsize])
        return data, [Descriptor(number) for number in numbers]


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(connection, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(connection)


async def send_all(
    produce: Callable[[], Coroutine[Any, Any, Reply | None]], send: Callable[[Reply], Awaitable[None]]
) -> None:
    """Send every reply that ``produce`` gives, up to None or an error, all but the last with ``continues``.

    Only the reply itself can say that it is the last. So one is held back while ``produce`` computes the next,
    but not while it waits for something to happen: then the held one goes out, and should nothing follow after
    all, an empty reply ends the call. When cancelled, ``produce`` is cancelled and waited for.
    """
    held: Reply | None = None
    while True:
        step = asyncio.create_task(produce())
        try:
            # Lets the step run until it ends or waits.
            await asyncio.sleep(0)
            if held is not None and not step.done():
                await send(_continued(held))
                held = None
            reply = await step
        finally:
            if not step.done():
                step.cancel()
                await asyncio.wait([step])
        if reply is None:
            await send(held or Reply())
            return
        if held is not None:
            await send(_continued(held))
        if reply.error is not None:
            await send(reply)
            return
        held = reply


def _continued(reply: Reply) -> Reply:
    return msgspec.structs.replace(reply, continues=True)


def has_left(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection."""
    ends = select.poll()
    # POLLHUP comes unasked.
    ends.register(connection, 0)
    return bool(ends.poll(0))


class HangupWatch:
    """Tells when the peer of a connection has closed it.

    While a stream is answered nothing is read, so the end of file would go unseen; and end of file may also mean
    a peer that has no more calls, but reads on. The hang-up of both directions is what epoll reports of a
    descriptor for which no event was asked. Needs a running event loop; owns an epoll descriptor until ``close``.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        asyncio.get_running_loop().add_reader(self._epoll, self._hung_up)

    @contextlib.contextmanager
    def watching(self, connection: socket.socket, callback: Callable[[], object]) -> Iterator[None]:
        """Within the context, call ``callback`` once if the peer closes the connection."""
        descriptor = connection.fileno()
        self._epoll.register(descriptor, 0)
        self._callbacks[descriptor] = callback
        try:
            yield
        finally:
            self._forget(descriptor)

    def close(self) -> None:
        """Stop watching; no context may be open any more."""
        asyncio.get_running_loop().remove_reader(self._epoll)
        self._epoll.close()

    def _hung_up(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            callback = self._callbacks[descriptor]
            self._forget(descriptor)
            callback()

    def _forget(self, descriptor: int) -> None:
        if self._callbacks.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
