# SPDX-License-Identifier: Apache-2.0
"""The only module that imports the D-Bus library: dbus-fast, or dbus-next, from which dbus-fast was forked."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
from typing import TYPE_CHECKING, Any

from resctrlmond.api.dbus.gate import BUS_NAME, ENTRANCE, SEND_BUFFER_BYTES, Gate

__all__ = [
    "BUS_NAME",
    "LIBRARY",
    "NO_REPLY",
    "Bus",
    "BusUnavailable",
    "DBusError",
    "Message",
    "MessageType",
    "Variant",
]

# The environment variable that selects the library if both are installed: dbus_fast or dbus_next.
VARIABLE = "RESCTRLMOND_DBUS_LIBRARY"
_LIBRARIES = ("dbus_fast", "dbus_next")
_CONNECT_TIMEOUT_S = 10.0
_DISCONNECT_TIMEOUT_S = 2.0
# A reply can be lost: the bus drops it if too many messages to the daemon are unread (dbus-daemon(1),
# max_outgoing_bytes), and the gate if it is too long. Otherwise it arrives after those messages: up to 5 s later.
REPLY_TIMEOUT_S = 10.0
NO_REPLY = "org.freedesktop.DBus.Error.NoReply"

if TYPE_CHECKING:
    from dbus_fast import BusType, DBusError, Message, MessageFlag, MessageType, NameFlag, RequestNameReply, Variant
    from dbus_fast.aio import MessageBus

    LIBRARY = "dbus_fast"
else:

    def _library():
        wanted = os.environ.get(VARIABLE)
        missing = None
        for name in _LIBRARIES:
            if wanted in (None, "", name):
                try:
                    return importlib.import_module(name)
                except ImportError as error:
                    missing = error
        raise ImportError(f"D-Bus requires {wanted or 'dbus_fast or dbus_next'}") from missing

    _package = _library()
    LIBRARY = _package.__name__
    BusType, NameFlag, RequestNameReply = _package.BusType, _package.NameFlag, _package.RequestNameReply
    DBusError, Variant = _package.DBusError, _package.Variant
    Message, MessageFlag, MessageType = _package.Message, _package.MessageFlag, _package.MessageType
    MessageBus = importlib.import_module(f"{LIBRARY}.aio").MessageBus

_BUS_PATH = "/org/freedesktop/DBus"


class BusUnavailable(ConnectionError):
    """The bus cannot be reached, refused the connection, or closed it during a call."""


class Bus(MessageBus):
    """A connection to a bus. Create it in a coroutine: dbus-next needs the running loop.

    ``cause`` is why the connection ended. ``gate`` keeps messages that must not be decoded from the library, and all
    file descriptors, which the library would never close.
    """

    def __init__(self, address: str, gate: Gate) -> None:
        self.gate = gate
        self._unsent: set[asyncio.Future[Any]] = set()
        self.cause = "closed"
        self._ended = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        try:
            super().__init__(bus_address=address, bus_type=BusType.SYSTEM, negotiate_unix_fd=True)
        except BaseException:
            self._release()
            raise

    @classmethod
    async def open(cls, address: str | None, folder: str, entrance_name: str = ENTRANCE) -> Bus:
        """Connect to a bus (None: the system bus), with a socket in ``folder``. Raises BusUnavailable."""
        bus = gate = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                gate = await Gate.open(address)
                with gate.entrance(folder, entrance_name) as entrance:
                    bus = cls(entrance, gate)
                    await bus.connect()
        except BaseException as error:
            if bus is not None:
                bus._release()
            if gate is not None:
                await gate.close()
            if not isinstance(error, Exception):
                raise
            # Any exception: the libraries have no common type for an invalid address.
            raise BusUnavailable(f"cannot connect to the bus: {_words(error)}") from error
        writer: Any = bus._writer
        writer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        writer.sock = _RetryingSocket(writer.sock)
        bus._watcher = asyncio.create_task(bus._watch())
        return bus

    async def until_disconnected(self) -> None:
        """Wait until the connection has ended, on either side, and all its sockets are closed."""
        await self._ended.wait()

    async def _watch(self) -> None:
        # The only place that awaits the library's future: a cancelled task would cancel the future for all others.
        ended: Any = self.wait_for_disconnect  # without annotations in some versions
        try:
            await ended()
        except Exception as error:
            self.cause = _words(error)
        self._release()
        # The library has sent its last messages before it closed the connection.
        await self.gate.close(_DISCONNECT_TIMEOUT_S)
        self._ended.set()

    async def close(self) -> None:
        """Disconnect after the messages so far were sent."""
        if self.connected and self._unsent:
            await asyncio.wait(self._unsent, timeout=_DISCONNECT_TIMEOUT_S)
        if self.connected:
            self.disconnect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * _DISCONNECT_TIMEOUT_S):
                    await self.until_disconnected()
        self._release()
        await self.gate.close()

    def post(self, message: Message) -> None:
        """Send a message without waiting. The message is lost if the connection ends.

        Raises the errors of the library for a message that cannot be encoded.
        """
        if not self.connected:
            return
        try:
            sent = self.send(message)
        except Exception:
            if self.connected:
                raise
            return
        self._unsent.add(sent)
        sent.add_done_callback(self._sent)

    async def flush(self) -> None:
        """Wait until all posted messages were written to the socket, or the connection has ended."""
        unsent: set[asyncio.Future[Any]] = set(self._unsent)
        if not unsent:
            return
        ended = asyncio.create_task(self._ended.wait())
        try:
            while unsent and not ended.done():
                done, _ = await asyncio.wait({*unsent, ended}, return_when=asyncio.FIRST_COMPLETED)
                unsent -= done
        finally:
            ended.cancel()

    async def ask(self, member: str, signature: str, *body: Any, interface: str = BUS_NAME) -> Any:
        """Call a method of the bus itself and return its first value. Raises DBusError, BusUnavailable.

        Without a reply in time, the error is ``NO_REPLY``.
        """
        return await self.ask_peer(BUS_NAME, _BUS_PATH, interface, member, signature, *body)

    async def ask_peer(
        self, destination: str, path: str, interface: str, member: str, signature: str = "", *body: Any
    ) -> Any:
        """Call a method of a sender whose messages the gate relays. See ``ask``."""
        if not self.connected:
            raise BusUnavailable("the connection to the bus was lost")
        call = Message(
            destination=destination,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=[*body],
        )
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                reply = await self.call(call)
        except TimeoutError as error:
            who = "the bus" if destination == BUS_NAME else destination
            raise DBusError(NO_REPLY, f"{who} did not reply to {member} within {REPLY_TIMEOUT_S:.0f} s") from error
        except (OSError, EOFError) as error:
            raise BusUnavailable(f"the connection to the bus was lost: {_words(error)}") from error
        if reply is None:
            raise BusUnavailable("the connection to the bus was lost")
        if reply.message_type is MessageType.ERROR:
            raise DBusError(reply.error_name or f"{BUS_NAME}.Error.Failed", str(reply.body[0]) if reply.body else "")
        return reply.body[0] if reply.body else None

    def tell(self, member: str, signature: str, *body: Any) -> None:
        """Call a method of the bus itself without waiting for the reply."""
        call = Message(
            destination=BUS_NAME,
            path=_BUS_PATH,
            interface=BUS_NAME,
            member=member,
            flags=MessageFlag.NO_REPLY_EXPECTED,
            signature=signature,
            body=[*body],
        )
        self.post(call)

    async def own(self, name: str) -> bool:
        """Request a name on the bus. Return False if another connection owns it. Raises DBusError, BusUnavailable."""
        reply = await self.ask("RequestName", "su", name, int(NameFlag.DO_NOT_QUEUE))
        return RequestNameReply(reply) in (RequestNameReply.PRIMARY_OWNER, RequestNameReply.ALREADY_OWNER)

    def _sent(self, future: asyncio.Future[Any]) -> None:
        self._unsent.discard(future)
        # asyncio logs an exception that is never retrieved as a bug.
        if not future.cancelled():
            future.exception()

    def _release(self) -> None:
        # The loop would call a reader that is left for the next socket with its number, or once more.
        loop, connection = asyncio.get_running_loop(), getattr(self, "_sock", None)
        if connection is not None and (descriptor := connection.fileno()) >= 0:
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)
        # dbus-next leaves the socket to the garbage collector.
        for name in ("_stream", "_sock"):
            part = getattr(self, name, None)
            if part is not None:
                with contextlib.suppress(OSError):
                    part.close()


class _RetryingSocket:
    """A socket for the writers of the libraries: ``send`` returns 0 where it would block.

    Both writers continue after a partial write when the socket is writable, but they treat EAGAIN as the end of the
    connection: it would be closed if the buffer were full exactly at the end of a message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0


def wants_reply(call: Message) -> bool:
    """Return whether the caller expects a reply."""
    return not call.flags & MessageFlag.NO_REPLY_EXPECTED


def _words(error: Exception) -> str:
    # EOFError and TimeoutError have no text.
    silent = {TimeoutError: "it did not reply in time", EOFError: "it closed the connection"}
    return str(error) or silent.get(type(error), type(error).__name__)
