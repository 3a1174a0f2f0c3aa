# SPDX-License-Identifier: Apache-2.0
"""Receive bytes with file descriptors from a unix socket, and detect that its peer has closed the connection."""

from __future__ import annotations

import array
import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator

from resctrlmond.resctrl.processes import Descriptor

# SCM_RIGHTS carries descriptors as C ints.
_FD = array.array("i")


async def receive(connection: socket.socket, size: int, descriptors: int) -> tuple[bytes, list[Descriptor]]:
    """Return up to ``size`` bytes, b"" at the end of file, and up to ``descriptors`` file descriptors.

    The socket does not block. The kernel closes descriptors above that number.
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
    # Not the socket: a selector that does not know it formats it for an error, which takes four system calls.
    fd = connection.fileno()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


def has_left(connection: socket.socket) -> bool:
    """Return whether the peer has closed the connection."""
    poll = select.poll()
    # poll(2) always reports POLLHUP.
    poll.register(connection, 0)
    return bool(poll.poll(0))


class HangupWatch:
    """Detects that the peer of a connection has closed it, while the server does not read from the connection.

    An end of file would not be enough: a peer that sends no more calls may still read replies. epoll(7) always
    reports EPOLLHUP, which means that both directions are closed. Belongs to the running event loop; owns an epoll
    descriptor until ``close``.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        asyncio.get_running_loop().add_reader(self._epoll, self._hung_up)

    @contextlib.contextmanager
    def watching(self, connection: socket.socket, callback: Callable[[], object]) -> Iterator[None]:
        """Call ``callback`` once if the peer closes the connection within the context."""
        descriptor = connection.fileno()
        self._epoll.register(descriptor, 0)
        self._callbacks[descriptor] = callback
        try:
            yield
        finally:
            self._forget(descriptor)

    def close(self) -> None:
        """Close the epoll descriptor. All contexts of ``watching`` must have ended."""
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
