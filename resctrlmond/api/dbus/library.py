# SPDX-License-Identifier: Apache-2.0
"""The seam to the D-Bus library: dbus-fast, or dbus-next, which it was forked from. Nothing else imports them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
from typing import TYPE_CHECKING, Any

from resctrlmond.api.dbus.gate import BUS_NAME, SEND_BUFFER_BYTES, Gate

__all__ = ["BUS_NAME", "LIBRARY", "Bus", "BusUnavailable", "DBusError", "Message", "MessageType", "Variant"]

# Names the library to use where both are installed: dbus_fast or dbus_next.
VARIABLE = "RESCTRLMOND_DBUS_LIBRARY"
_LIBRARIES = ("dbus_fast", "dbus_next")
_CONNECT_TIMEOUT_S = 10.0
_DISCONNECT_TIMEOUT_S = 2.0

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
    """There is no bus at the address, it let us not in, or it went away during a call."""


class Bus(MessageBus):
    """A connection to a bus. Made within a coroutine only: dbus-next asks for the running loop when it is made.

    ``cause`` says why the connection ended, once it has. ``gate`` keeps from the library what it must not decode, and
    all file descriptors, which the library would never close.
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
    async def open(cls, address: str | None, folder: str) -> Bus:
        """Connect to the bus at the address (None: the system bus), by way of ``folder``. Raises BusUnavailable."""
        bus = gate = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                gate = await Gate.open(address)
                with gate.entrance(folder) as entrance:
                    bus = cls(entrance, gate)
                    await bus.connect()
        except BaseException as error:
            if bus is not None:
                bus._release()
            if gate is not None:
                await gate.close()
            if not isinstance(error, Exception):
                raise
            # Whatever it is: the libraries have no common type for an address that makes no sense.
            raise BusUnavailable(f"cannot connect to the bus: {_words(error)}") from error
        writer: Any = bus._writer
        writer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        writer.sock = _PatientSocket(writer.sock)
        bus._watcher = asyncio.create_task(bus._watch())
        return bus

    async def until_disconnected(self) -> None:
        """Return when the connection has ended, whoever ended it, and everything of it is closed."""
        await self._ended.wait()

    async def _watch(self) -> None:
        # Awaited here alone: who awaits the library's future and is cancelled would cancel it for everybody.
        ended: Any = self.wait_for_disconnect  # without annotations in some versions
        try:
            await ended()
        except Exception as error:
            self.cause = _words(error)
        self._release()
        # What the library has sent, it sent before it ended the connection.
        await self.gate.close(_DISCONNECT_TIMEOUT_S)
        self._ended.set()

    async def close(self) -> None:
        """Disconnect, after what was sent so far."""
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
        """Send without waiting; what cannot be sent, because the bus went away, is lost.

        Raises what the library raises for a message that it cannot write.
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
        """Return when all that was posted has left the process, or the connection has ended."""
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
        """Call a method of the bus itself and return its first value. Raises DBusError, BusUnavailable."""
        if not self.connected:
            raise BusUnavailable("the connection to the bus was lost")
        call = Message(
            destination=BUS_NAME,
            path=_BUS_PATH,
            interface=interface,
            member=member,
            signature=signature,
            body=[*body],
        )
        try:
            reply = await self.call(call)
        except (OSError, EOFError) as error:
            raise BusUnavailable(f"the connection to the bus was lost: {_words(error)}") from error
        if reply is None:
            raise BusUnavailable("the connection to the bus was lost")
        if reply.message_type is MessageType.ERROR:
            raise DBusError(reply.error_name or f"{BUS_NAME}.Error.Failed", str(reply.body[0]) if reply.body else "")
        return reply.body[0] if reply.body else None

    async def own(self, name: str) -> bool:
        """Take a name, if nobody has it; whether that worked. Raises DBusError, BusUnavailable."""
        reply = await self.ask("RequestName", "su", name, int(NameFlag.DO_NOT_QUEUE))
        return RequestNameReply(reply) in (RequestNameReply.PRIMARY_OWNER, RequestNameReply.ALREADY_OWNER)

    def _sent(self, future: asyncio.Future[Any]) -> None:
        self._unsent.discard(future)
        # A future whose exception nobody looks at is logged as a bug.
        if not future.cancelled():
            future.exception()

    def _release(self) -> None:
        # dbus-next leaves the socket to the garbage collector.
        for name in ("_stream", "_sock"):
            part = getattr(self, name, None)
            if part is not None:
                with contextlib.suppress(OSError):
                    part.close()


class _PatientSocket:
    """The socket as the libraries' writers use it: where no byte can be sent now, none was sent.

    Both writers go on after a part was sent, as soon as the socket is writable again, but take EAGAIN for the end
    of the connection: a buffer that is full exactly at the end of a message would cut us off.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0


def wants_reply(call: Message) -> bool:
    """Whether the caller waits for an answer."""
    return not call.flags & MessageFlag.NO_REPLY_EXPECTED


def _words(error: Exception) -> str:
    # EOFError and TimeoutError bring none.
    return str(error) or type(error).__name__
