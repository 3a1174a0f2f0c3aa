# SPDX-License-Identifier: Apache-2.0
"""A proxy between the bus and the D-Bus library, so that no message is decoded before its header is checked.

The libraries decode a whole message in the event loop, for any length (the bus allows 32 MiB and more), and they
close the connection if they do not understand a header. The gate relays the connection of the library: bytes until
the end of the handshake, then messages. The library only has to connect to an address, so the gate works with each
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

import msgspec

from resctrlmond.api.connections import receive
from resctrlmond.resctrl.processes import Descriptor

BUS_NAME = "org.freedesktop.DBus"

METHOD_CALL = 1
_NO_REPLY_EXPECTED = 1
_PROTOCOL_VERSION = 1

# Byte order, type, flags, version, length of the body, serial, length of the header fields.
_FIXED = 16
# Enough for a path, an interface and a member of 255 characters each, a sender, a destination and a signature.
MAX_FIELDS_BYTES = 8 * 1024
# Enough for a ReportPods with all pods of a node.
MAX_LARGE_BODY = 1024 * 1024
_RECEIVE_BYTES = 65536
# Small, because replies to root are sent after the contents of the buffers.
SEND_BUFFER_BYTES = 8 * 1024
# At most 4 MiB.
_REMEMBERED_HEADERS = 512
# The most descriptors of one message, unless the bus is configured otherwise (dbus-daemon(1), max_message_unix_fds).
_MAX_DESCRIPTORS = 16
_SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"

# The header fields (D-Bus specification, "Header Fields"): name and signature by code.
_FIELDS = {
    1: ("path", b"\1o\0"),
    2: ("interface", b"\1s\0"),
    3: ("member", b"\1s\0"),
    4: ("error_name", b"\1s\0"),
    5: ("reply_serial", b"\1u\0"),
    6: ("destination", b"\1s\0"),
    7: ("sender", b"\1s\0"),
    8: ("signature", b"\1g\0"),
    9: ("unix_fds", b"\1u\0"),
}


# The name of the socket at which the library connects.
ENTRANCE = ".dbus"


class BadAddress(ValueError):
    """An address that names no Unix socket."""


class Fields(NamedTuple):
    """The header fields that are used here; "" for a missing field. The bus itself sets ``sender``."""

    path: str = ""
    interface: str = ""
    member: str = ""
    sender: str = ""
    signature: str = ""
    destination: str = ""


class Frame(NamedTuple):
    """The fixed part of a header: the order of the bytes ("<" or ">"), and the lengths of what follows."""

    order: str
    kind: int
    flags: int
    serial: int
    fields_bytes: int
    body_bytes: int

    @property
    def padded_fields_bytes(self) -> int:
        """Return the size of the header fields with the padding before the body."""
        return self.fields_bytes + -self.fields_bytes % 8


class Header:
    """The whole header of a message."""

    __slots__ = ("body_bytes", "interface", "member", "path", "sender", "serial", "signature", "wants_reply")

    def __init__(self, frame: Frame, fields: Fields) -> None:
        self.path, self.interface, self.member, self.sender, self.signature, _ = fields
        self.serial = frame.serial
        self.body_bytes = frame.body_bytes
        self.wants_reply = frame.kind == METHOD_CALL and not frame.flags & _NO_REPLY_EXPECTED


_LENGTH = {order: struct.Struct(f"{order}I") for order in "<>"}
_FIXED_PART = {order: struct.Struct(f"{order}4B3I") for order in "<>"}


def parse_frame(data: bytes | bytearray) -> Frame:
    """Parse the first 16 bytes of a message. Raises ValueError if they are not valid."""
    order = {b"l": "<", b"B": ">"}.get(bytes(data[:1]))
    if order is None or data[3] != _PROTOCOL_VERSION:
        raise ValueError("this is not the beginning of a D-Bus message")
    _, kind, flags, _, body_bytes, serial, fields_bytes = _FIXED_PART[order].unpack_from(data)
    return Frame(order, kind, flags, serial, fields_bytes, body_bytes)


def parse_fields(order: str, fields: bytes, size: int) -> Fields:
    """Parse ``size`` bytes of header fields, each a byte and a variant. Raises ValueError if one is not valid."""
    found: dict[str, str] = {}
    unpack = _LENGTH[order].unpack_from
    at = 0
    try:
        while at < size:
            at += -at % 8
            name, kind = _FIELDS[fields[at]]
            if not fields.startswith(kind, at + 1):
                raise ValueError(f"the header field {name} has the wrong type")
            if kind == b"\1g\0":
                length = fields[at + 4]
                at += 5
            else:
                (length,) = unpack(fields, at + 4)
                at += 8
            if kind == b"\1u\0":
                continue
            if name in found or at + length >= size or fields[at + length]:
                raise ValueError(f"the header field {name} is damaged")
            found[name] = fields[at : at + length].decode()
            at += length + 1
    except (KeyError, IndexError, struct.error) as error:
        raise ValueError(f"the header is damaged: {error!r}") from error
    found.pop("error_name", None)
    return Fields(**found)


# Most callers repeat their calls, also those that flood the daemon. The bus takes 20 us for a message: parsing must
# take less, or the messages to the daemon fill the bus, which then refuses those of root too.
_parse_cached = functools.lru_cache(_REMEMBERED_HEADERS)(parse_fields)


class MessageSizes:
    """Finds the destinations and sizes of the messages in a stream of bytes."""

    def __init__(self) -> None:
        self._head = bytearray()
        # The size of the header, as far as it is known, and the bytes of the body that are still missing.
        self._wanted = _FIXED
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[str, int]]:
        """Yield the destination (or "") and size of each message whose header ends in ``data``. Raises ValueError."""
        at = 0
        while True:
            skipped = min(self._left, len(data) - at)
            self._left -= skipped
            at += skipped
            part = data[at : at + self._wanted - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) < self._wanted:
                return
            frame = parse_frame(self._head)
            whole = _FIXED + frame.padded_fields_bytes
            if self._wanted < whole:
                self._wanted = whole
                continue
            fields = parse_fields(frame.order, bytes(self._head[_FIXED:]), frame.fields_bytes)
            self._head.clear()
            self._wanted = _FIXED
            self._left = frame.body_bytes
            yield fields.destination, whole + frame.body_bytes


class HeldCall(msgspec.Struct, frozen=True):
    """A method call that is complete but not decoded: its header, all its bytes, and its descriptors."""

    header: Header
    data: bytes
    descriptors: tuple[Descriptor, ...]

    @property
    def size(self) -> int:
        """Return the number of its bytes."""
        return len(self.data)


class Gate:
    """Relays one connection to the bus. Belongs to the event loop.

    Relays the messages of ``senders``, at first only of the bus itself, and method calls of others. ``wants_call``
    decides by the header of a call: if it returns False, the body is discarded as it arrives; otherwise ``on_call``
    gets the complete call. The gate never waits for the library, so it sees a call of root at once, however many
    calls came before it. Therefore it must read faster than the bus sends.

    File descriptors are removed from the stream and belong to their call: the library gets none.

    ``on_sent`` gets the destination ("" for a signal) and the size of each message to the bus.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.wants_call: Callable[[Header], bool] = lambda _header: False
        self.on_call: Callable[[HeldCall], None] = lambda _call: None
        self.on_sent: Callable[[str, int], None] = lambda _destination, _size: None
        self.senders = {BUS_NAME}
        self._bus = connection
        self._library: socket.socket | None = None
        self._begun = False
        self._delivering = asyncio.Lock()
        self._relaying: asyncio.Task[None] | None = None
        self._buffer = bytearray()
        # The number of bytes taken out of the buffer; and each descriptor with the number of bytes up to the end of
        # the read that it came with. That read ends within the message of the descriptor.
        self._taken = 0
        self._descriptors: list[tuple[int, Descriptor]] = []

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
        raise trouble or BadAddress("the address does not name a Unix socket")

    @contextlib.contextmanager
    def entrance(self, folder: str, name: str = ENTRANCE) -> Iterator[str]:
        """Listen on an address for the one connection of the library, and yield the address.

        The address is the socket ``name`` in ``folder``, to which only the daemon's user can connect. It is removed
        afterwards.
        """
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            # A daemon that was killed left it.
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # The file gets the mode of the socket's inode (net/unix/af_unix.c, unix_bind_bsd()).
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(path)
            try:
                listener.listen(1)
                listener.setblocking(False)
                self._relaying = asyncio.create_task(self._relay(listener))
                yield f"unix:path={quote(path).replace('~', '%7e')}"
            finally:
                os.unlink(path)

    async def deliver(self, data: bytes) -> None:
        """Send a whole message to the library, after those before it. Do nothing if the connection has ended."""
        with contextlib.suppress(OSError):
            async with self._delivering:
                if self._library is not None:
                    await asyncio.get_running_loop().sock_sendall(self._library, data)

    async def close(self, grace_s: float = 0.0) -> None:
        """Close both sides. For at most ``grace_s``, still relay what the library has sent to the bus."""
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
        # deliver() of another task may wait in sock_sendall(). After close() alone, it would wait for ever, on the
        # number of another file.
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
            tasks = [asyncio.create_task(relay) for relay in (self._outward(), self._inward())]
            try:
                # The library closes the connection after its last message; the bus can close it at any time.
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._close_sockets()

    async def _outward(self) -> None:
        assert self._library is not None
        loop = asyncio.get_running_loop()
        sizes = MessageSizes()
        last = b""
        while data := await loop.sock_recv(self._library, _RECEIVE_BYTES):
            messages = data
            if not self._begun:
                # The bus sends its first message after this line.
                _, begin, messages = (last + data).partition(b"\r\nBEGIN\r\n")
                self._begun = bool(begin)
                last = data[-16:]
            for destination, size in sizes.feed(messages):
                self.on_sent(destination, size)
            await loop.sock_sendall(self._bus, data)

    async def _inward(self) -> None:
        while True:
            await self._receive()
            # Checked after the wait: the library may have sent BEGIN meanwhile.
            if self._begun:
                break
            await self.deliver(self._take(len(self._buffer)))
        while True:
            await self._pass_message()

    async def _pass_message(self) -> None:
        start = await self._exactly(_FIXED)
        frame = parse_frame(start)
        size = frame.padded_fields_bytes
        if frame.fields_bytes > MAX_FIELDS_BYTES:
            await self._skip(size + frame.body_bytes)
            return
        fields = await self._exactly(size)
        try:
            header = Header(frame, _parse_cached(frame.order, fields, frame.fields_bytes))
        except ValueError:
            await self._skip(frame.body_bytes)
            return
        if frame.kind == METHOD_CALL:
            is_wanted = self.wants_call(header)
        else:
            # Other senders are refused too: a signal to one connection needs no match rule.
            is_wanted = header.sender in self.senders and frame.body_bytes <= MAX_LARGE_BODY
        if not is_wanted:
            await self._skip(frame.body_bytes)
            return
        body = await self._exactly(frame.body_bytes)
        descriptors = self._taken_descriptors()
        message = start + fields + body
        if frame.kind == METHOD_CALL:
            self.on_call(HeldCall(header, message, descriptors))
        else:
            await self.deliver(message)

    async def _receive(self) -> None:
        """Receive bytes into the buffer. Raises EOFError."""
        # Let other tasks run: a read yields only if it has to wait.
        await asyncio.sleep(0)
        data, descriptors = await receive(self._bus, _RECEIVE_BYTES, _MAX_DESCRIPTORS)
        if not data:
            raise EOFError
        self._buffer += data
        end = self._taken + len(self._buffer)
        self._descriptors += [(end, descriptor) for descriptor in descriptors]

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._receive()
        return self._take(size)

    async def _skip(self, size: int) -> None:
        while size > len(self._buffer):
            size -= len(self._take(len(self._buffer)))
            await self._receive()
        del self._buffer[:size]
        self._taken += size
        if self._descriptors:
            self._taken_descriptors()

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._taken += size
        return data

    def _taken_descriptors(self) -> tuple[Descriptor, ...]:
        """Remove and return the descriptors of the message that was taken last."""
        if not self._descriptors:
            return ()
        # _skip() calls this too, so no descriptor of an earlier message is left.
        found = tuple(descriptor for end, descriptor in self._descriptors if end <= self._taken)
        self._descriptors = [one for one in self._descriptors if one[0] > self._taken]
        return found


def _socket_paths(address: str) -> Iterator[bytes]:
    """Yield the Unix sockets of an address, in its order (D-Bus specification, "Server Addresses")."""
    for one in filter(None, address.split(";")):
        transport, _, options = one.partition(":")
        values = dict(option.partition("=")[::2] for option in options.split(","))
        if transport == "unix" and "path" in values:
            yield unquote_to_bytes(values["path"])
        elif transport == "unix" and "abstract" in values:
            yield b"\0" + unquote_to_bytes(values["abstract"])
