# SPDX-License-Identifier: Apache-2.0
"""ttrpc as NRI uses it: unary calls with one message in each direction (containerd/ttrpc, PROTOCOL.md)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from resctrlmond.nri.nri_pb2 import Request, Response, Status

# The length of the data, stream ID, type and flags, big-endian.
_HEADER = struct.Struct(">IIBB")
MAX_DATA = 4 << 20

REQUEST: Final = 1
RESPONSE: Final = 2

# Status codes of gRPC.
OK = 0
INVALID_ARGUMENT = 3
RESOURCE_EXHAUSTED = 8
UNIMPLEMENTED = 12


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``data`` is empty for an ``oversize`` message, which exceeds ttrpc's limit and is skipped."""

    stream: int
    kind: int
    data: bytes
    oversize: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request. ``timeout_ns`` is the time that is left for the response, 0 if there is no limit."""

    stream: int
    service: str
    method: str
    payload: bytes
    timeout_ns: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a call of the adapter."""

    stream: int
    code: int
    text: str
    payload: bytes


class Reader:
    """Splits the stream of a connection into messages. Buffers at most one message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._discard = 0

    @property
    def is_between_messages(self) -> bool:
        """Whether the stream may end here."""
        return not self._buffer and not self._discard

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that these bytes complete."""
        if self._discard:
            passed = min(self._discard, len(data))
            self._discard -= passed
            data = data[passed:]
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            length, stream, kind, _flags = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if length > MAX_DATA:
                # Skip the message, as Go's reader does: the stream gets an error, and the connection continues.
                self._discard = max(0, end - len(self._buffer))
                del self._buffer[:end]
                yield Message(stream, kind, b"", oversize=length)
                continue
            if len(self._buffer) < end:
                return
            message = Message(stream, kind, bytes(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
            yield message


class Server:
    """The called side of a connection: decodes messages into calls or refusals."""

    def __init__(self) -> None:
        self._last_stream = 0

    def decode(self, message: Message) -> Call | bytes | None:
        """Return the call, or the refusal to send, or None if the message needs no response."""
        if message.kind != REQUEST:
            return None
        # IDs may have gaps: Go uses an ID when it refuses to send a message that is too long.
        if message.stream % 2 == 0 or message.stream <= self._last_stream:
            return refusal(message.stream, INVALID_ARGUMENT, f"stream id {message.stream} is not odd and rising")
        self._last_stream = message.stream
        if message.oversize:
            text = f"message length {message.oversize} exceed maximum message size of {MAX_DATA}"
            return refusal(message.stream, RESOURCE_EXHAUSTED, text)
        try:
            request = Request.FromString(message.data)
            return Call(message.stream, request.service, request.method, request.payload, request.timeout_nano)
        # Some builds of the library check the UTF-8 of a string only when it is read.
        except (DecodeError, ValueError) as error:
            return refusal(message.stream, INVALID_ARGUMENT, f"not a ttrpc request: {error}")


class Caller:
    """The calling side of a connection."""

    def __init__(self) -> None:
        self._next_stream = 1

    def request(self, service: str, method: str, payload: bytes) -> bytes:
        """Encode a call."""
        stream = self._next_stream
        self._next_stream += 2
        return _message(stream, REQUEST, Request(service=service, method=method, payload=payload).SerializeToString())

    def decode(self, message: Message) -> Answer | None:
        """Return the response in a message; None if the message is not a response."""
        if message.kind != RESPONSE:
            return None
        if message.oversize:
            return Answer(message.stream, RESOURCE_EXHAUSTED, f"an answer of {message.oversize} bytes", b"")
        try:
            response = Response.FromString(message.data)
            return Answer(message.stream, response.status.code, response.status.message, response.payload)
        except (DecodeError, ValueError) as error:
            return Answer(message.stream, INVALID_ARGUMENT, f"not a ttrpc response: {error}", b"")


def response(stream: int, payload: bytes) -> bytes:
    """Encode the response to a successful call."""
    return _message(stream, RESPONSE, Response(payload=payload).SerializeToString())


def refusal(stream: int, code: int, text: str) -> bytes:
    """Encode the response to a failed call."""
    # Errors quote text of the runtime: limit it, so that the response fits into one frame of the multiplexer.
    status = Status(code=code, message=text.encode()[:1024].decode(errors="ignore"))
    return _message(stream, RESPONSE, Response(status=status).SerializeToString())


def _message(stream: int, kind: int, data: bytes) -> bytes:
    return _HEADER.pack(len(data), stream, kind, 0) + data
