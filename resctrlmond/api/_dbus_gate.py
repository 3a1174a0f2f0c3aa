# SPDX-License-Identifier: Apache-2.0
"""A gate between the bus and the D-Bus library: no message is decoded before its header has been checked.

The libraries decode a message as a whole, in the event loop, however long it is (the bus allows 32 MiB and more), and
they end the connection for a header that they do not understand. The gate relays the library's connection, byte by
byte until the handshake is over and message by message afterwards. It needs nothing of the libraries but that they
connect to an address, so it works with each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

BUS_NAME = "org.freedesktop.DBus"

METHOD_CALL = 1
_NO_REPLY_EXPECTED = 1
_PROTOCOL_VERSION = 1

# Byte order, type, flags, version, length of the body, serial, length of the header fields.
_FIXED = 16
# A path, an interface and a member of 255 characters, a sender, a destination and a signature: what our callers need.
MAX_FIELDS_BYTES = 8 * 1024
# What a caller that may only read can need: a key, or the names of an interface and a property.
MAX_SMALL_BODY = 16 * 1024
# A ReportPods with the sandboxes of a whole node.
MAX_LARGE_BODY = 1024 * 1024
# Large messages that wait for their senders' credentials.
_MAX_HELD_BYTES = 4 * MAX_LARGE_BODY

_RECEIVE_BYTES = 65536
_SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"

# The header fields (D-Bus specification, "Header Fields"): name and type by code.
_FIELDS = {
    1: ("path", b"o"),
    2: ("interface", b"s"),
    3: ("member", b"s"),
    4: ("error_name", b"s"),
    5: ("reply_serial", b"u"),
    6: ("destination", b"s"),
    7: ("sender", b"s"),
    8: ("signature", b"g"),
    9: ("unix_fds", b"u"),
}


class BadAddress(ValueError):
    """An address that names no Unix socket."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a message says; "" for a field that is missing. The bus itself sets ``sender``."""

    kind: int
    flags: int
    serial: int
    path: str = ""
    interface: str = ""
    member: str = ""
    sender: str = ""

    @property
    def wants_reply(self) -> bool:
        """Whether the sender waits for an answer."""
        return self.kind == METHOD_CALL and not self.flags & _NO_REPLY_EXPECTED


@dataclass(frozen=True, slots=True)
class Frame:
    """The fixed part of a header: the order of the bytes ("<" or ">"), and the lengths of what follows."""

    order: str
    kind: int
    flags: int
    serial: int
    fields_bytes: int
    body_bytes: int

    @property
    def padded_fields_bytes(self) -> int:
        """The header fields with the padding up to the body."""
        return self.fields_bytes + -self.fields_bytes % 8


def parse_frame(data: bytes) -> Frame:
    """Read the first 16 bytes of a message. Raises ValueError if they do not begin one."""
    order = {b"l": "<", b"B": ">"}.get(data[:1])
    if order is None or data[3] != _PROTOCOL_VERSION:
        raise ValueError("this is not the beginning of a D-Bus message")
    body_bytes, serial, fields_bytes = struct.unpack_from(f"{order}3I", data, 4)
    return Frame(order, data[1], data[2], serial, fields_bytes, body_bytes)


def parse_header(frame: Frame, fields: bytes) -> Header:
    """Read the header fields, each a byte and a variant. Raises ValueError for an unknown or a wrong one."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < frame.fields_bytes:
            at += -at % 8
            name, kind = _FIELDS[fields[at]]
            if fields[at + 1 : at + 4] != b"\1" + kind + b"\0":
                raise ValueError(f"the header field {name} has the wrong type")
            at += 4
            if kind == b"g":
                length, at = fields[at], at + 1
            else:
                (length,) = struct.unpack_from(f"{frame.order}I", fields, at)
                at += 4
            if kind == b"u":
                continue
            if name in found or at + length >= frame.fields_bytes or fields[at + length]:
                raise ValueError(f"the header field {name} is damaged")
            found[name] = fields[at : at + length].decode()
            at += length + 1
    except (KeyError, IndexError, struct.error) as error:
        raise ValueError(f"the header is damaged: {error!r}") from error
    names = ("path", "interface", "member", "sender")
    return Header(frame.kind, frame.flags, frame.serial, **{name: found.get(name, "") for name in names})


class HeldCall:
    """A large method call, complete and not decoded. ``forward`` hands it to the library, ``drop`` forgets it."""

    def __init__(self, header: Header, data: bytes, gate: Gate) -> None:
        self.header = header
        self.size = len(data)
        self._data = data
        self._gate = gate

    async def forward(self) -> None:
        """Let the library decode it. A connection that has ended loses it."""
        try:
            await self._gate.deliver(self._data)
        finally:
            self.drop()

    def drop(self) -> None:
        """Free its memory."""
        if self._data:
            self._gate.held_bytes -= self.size
            self._data = b""


class Gate:
    """Relays one connection to the bus. Lives in the event loop.

    Method calls with a body of at most 16 KiB pass, and all that the bus itself sends. A call with a body of up to
    1 MiB goes to ``on_large``, which decides by the sender's credentials. The body of a longer one, or of one that
    comes while 4 MiB are held already, is thrown away, and ``on_refused`` gets the reason.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.on_large: Callable[[HeldCall], None] = HeldCall.drop
        self.on_refused: Callable[[Header, str], None] = lambda _header, _why: None
        self.held_bytes = 0
        self._bus = connection
        self._library: socket.socket | None = None
        self._begun = False
        self._delivering = asyncio.Lock()
        self._relaying: asyncio.Task[None] | None = None
        self._buffer = bytearray()

    @classmethod
    async def open(cls, address: str | None = None) -> Gate:
        """Connect to the bus at the address (None: the system bus). Raises OSError, BadAddress."""
        loop = asyncio.get_running_loop()
        trouble: OSError | None = None
        for path in _socket_paths(address or os.environ.get("DBUS_SYSTEM_BUS_ADDRESS") or _SYSTEM_BUS):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                await loop.sock_connect(connection, path)
            except OSError as error:
                connection.close()
                trouble = error
            except BaseException:
                connection.close()
                raise
            else:
                return cls(connection)
        raise trouble or BadAddress("the address names no Unix socket")

    @contextlib.contextmanager
    def entrance(self) -> Iterator[str]:
        """The address at which the library connects, once; it is gone when the context ends."""
        with (
            tempfile.TemporaryDirectory(prefix="resctrlmond-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            path = os.path.join(folder, "bus")
            listener.bind(path)
            listener.listen(1)
            listener.setblocking(False)
            accepting = asyncio.create_task(self._relay(listener))
            self._relaying = accepting
            yield f"unix:path={quote(path).replace('~', '%7e')}"

    async def deliver(self, data: bytes) -> None:
        """Hand a whole message to the library, after those that are under way."""
        with contextlib.suppress(OSError):
            async with self._delivering:
                if self._library is not None:
                    await asyncio.get_running_loop().sock_sendall(self._library, data)

    async def close(self, grace_s: float = 0.0) -> None:
        """End the relay and close both sides; within ``grace_s``, what the library has sent still goes to the bus."""
        if self._relaying is not None:
            if grace_s:
                await asyncio.wait([self._relaying], timeout=grace_s)
            self._relaying.cancel()
            await asyncio.gather(self._relaying, return_exceptions=True)
        await self._close_sockets()

    async def _close_sockets(self) -> None:
        self._bus.close()
        if self._library is None:
            return
        # A deliver() of another task may wait in sock_sendall(): close() alone would leave it waiting for ever on a
        # number that another descriptor may have by then.
        with contextlib.suppress(OSError):
            self._library.shutdown(socket.SHUT_RDWR)
        try:
            async with self._delivering:
                pass
        finally:
            self._library.close()

    async def _relay(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._library, _ = await loop.sock_accept(listener)
            self._library.setblocking(False)
            ways = [asyncio.create_task(way) for way in (self._outward(), self._inward())]
            try:
                # The library ends the connection after its last message; the bus whenever it likes.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            await self._close_sockets()

    async def _outward(self) -> None:
        assert self._library is not None
        loop = asyncio.get_running_loop()
        last = b""
        while data := await loop.sock_recv(self._library, _RECEIVE_BYTES):
            # The bus sends its first message after this line.
            self._begun = self._begun or b"\r\nBEGIN\r\n" in last + data
            last = data[-16:]
            await loop.sock_sendall(self._bus, data)

    async def _inward(self) -> None:
        while True:
            data = await self._some()
            # Asked after the wait: BEGIN may have passed outward meanwhile.
            if self._begun:
                break
            await self.deliver(data)
        self._buffer[:0] = data
        while True:
            # Everybody else's turn: neither sock_recv() nor sock_sendall() yields if it need not wait.
            await asyncio.sleep(0)
            await self._pass_message()

    async def _pass_message(self) -> None:
        start = await self._exactly(_FIXED)
        frame = parse_frame(start)
        if frame.fields_bytes > MAX_FIELDS_BYTES:
            await self._skip(frame.padded_fields_bytes + frame.body_bytes)
            return
        fields = await self._exactly(frame.padded_fields_bytes)
        try:
            header = parse_header(frame, fields)
        except ValueError:
            await self._skip(frame.body_bytes)
            return
        if frame.kind != METHOD_CALL:
            # Nobody else has anything to tell us, and a signal needs no match to be sent to one connection.
            if header.sender == BUS_NAME and frame.body_bytes <= MAX_LARGE_BODY:
                await self.deliver(start + fields + await self._exactly(frame.body_bytes))
            else:
                await self._skip(frame.body_bytes)
        elif frame.body_bytes <= MAX_SMALL_BODY:
            await self.deliver(start + fields + await self._exactly(frame.body_bytes))
        else:
            await self._hold(header, start + fields, frame.body_bytes)

    async def _hold(self, header: Header, head: bytes, body_bytes: int) -> None:
        size = len(head) + body_bytes
        why = ""
        if body_bytes > MAX_LARGE_BODY:
            why = f"the arguments take {body_bytes} bytes, more than {MAX_LARGE_BODY}"
        elif self.held_bytes + size > _MAX_HELD_BYTES:
            why = "too many large messages wait already"
        if why:
            await self._skip(body_bytes)
            self.on_refused(header, why)
            return
        self.held_bytes += size
        self.on_large(HeldCall(header, head + await self._exactly(body_bytes), self))

    async def _some(self) -> bytes:
        """What has come, at least one byte. Raises EOFError."""
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            return data
        data = await asyncio.get_running_loop().sock_recv(self._bus, _RECEIVE_BYTES)
        if not data:
            raise EOFError
        return data

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await asyncio.get_running_loop().sock_recv(self._bus, _RECEIVE_BYTES)
            if not data:
                raise EOFError
            self._buffer += data
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _skip(self, size: int) -> None:
        while size > 0:
            data = await self._some()
            if len(data) > size:
                self._buffer += data[size:]
            size -= len(data)
            await asyncio.sleep(0)


def _socket_paths(address: str) -> Iterator[bytes]:
    """The Unix sockets that an address lists, in its order (D-Bus specification, "Server Addresses")."""
    for one in filter(None, address.split(";")):
        transport, _, options = one.partition(":")
        values = dict(option.partition("=")[::2] for option in options.split(","))
        if transport == "unix" and "path" in values:
            yield unquote_to_bytes(values["path"])
        elif transport == "unix" and "abstract" in values:
            yield b"\0" + unquote_to_bytes(values["abstract"])
