# SPDX-License-Identifier: Apache-2.0
"""The multiplexer of NRI: two byte streams over one socket, as frames (nri, pkg/net/multiplex/mux.go)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# The Plugin service: the runtime calls, we answer. The Runtime service: we call.
PLUGIN = 1
RUNTIME = 2

# Connection id and length of the payload, big-endian.
_HEADER = struct.Struct(">II")

# A Go peer reads each message's beginning into a buffer of 4096 bytes and drops the whole connection if the frame
# there is larger. What follows may come in frames as large as a writer of NRI makes them.
FIRST_PAYLOAD = 4096
MAX_PAYLOAD = (4 << 20) + 10
# NRI before 0.7 allowed itself that much.
MAX_INBOUND = (16 << 20) + 10


class MuxError(Exception):
    """The peer sent what is no frame of NRI's; the connection is of no more use."""


def frames(connection: int, message: bytes) -> bytes:
    """One whole message as frames on a connection, to be written in one piece.

    A message has frames of its own: a Go peer's reader loses bytes of a frame that holds the next message too.
    """
    parts = [message[:FIRST_PAYLOAD]]
    parts += [message[at : at + MAX_PAYLOAD] for at in range(FIRST_PAYLOAD, len(message), MAX_PAYLOAD)]
    return b"".join(_HEADER.pack(connection, len(part)) + part for part in parts)


class Demultiplexer:
    """Takes the socket's bytes apart, however they are cut. It keeps at most a frame's header."""

    def __init__(self) -> None:
        self._header = b""
        self._connection = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The next pieces of the connections' streams, as (connection id, bytes). Raises MuxError."""
        view = memoryview(data)
        while view:
            if self._left:
                piece, view = view[: self._left], view[self._left :]
                self._left -= len(piece)
                yield self._connection, bytes(piece)
            else:
                missing = _HEADER.size - len(self._header)
                self._header += bytes(view[:missing])
                view = view[missing:]
                if len(self._header) == _HEADER.size:
                    self._begin()

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here."""
        return not self._left and not self._header

    def _begin(self) -> None:
        self._connection, self._left = _HEADER.unpack(self._header)
        self._header = b""
        if self._left > MAX_INBOUND:
            raise MuxError(f"a frame of {self._left} bytes on connection {self._connection}: this is not NRI")
