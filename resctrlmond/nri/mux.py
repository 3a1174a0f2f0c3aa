# SPDX-License-Identifier: Apache-2.0
"""The multiplexer of NRI: two byte streams over one socket, in frames (nri, pkg/net/multiplex/mux.go)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# Connection of the Plugin service (the runtime calls the adapter), and of the Runtime service (the adapter calls).
PLUGIN = 1
RUNTIME = 2

# The connection ID and the length of the payload, big-endian.
_HEADER = struct.Struct(">II")

# A Go peer reads the beginning of each message into a buffer of 4096 bytes, and drops the connection if that frame is
# larger. Further frames may be as large as those of NRI's own writer.
FIRST_PAYLOAD = 4096
MAX_PAYLOAD = (4 << 20) + 10
# NRI before 0.7 sends frames up to this size.
MAX_INBOUND = (16 << 20) + 10


class MuxError(Exception):
    """The peer sent a frame that is not valid in NRI. The connection cannot be used any more."""


def frames(connection: int, message: bytes) -> bytes:
    """Encode one message as frames of a connection, to be written in one piece.

    A frame never contains parts of two messages: the reader of a Go peer loses the second one.
    """
    parts = [message[:FIRST_PAYLOAD]]
    parts += [message[at : at + MAX_PAYLOAD] for at in range(FIRST_PAYLOAD, len(message), MAX_PAYLOAD)]
    return b"".join(_HEADER.pack(connection, len(part)) + part for part in parts)


class Demultiplexer:
    """Splits the byte stream of the socket into its connections. Buffers at most the header of one frame."""

    def __init__(self) -> None:
        self._header = b""
        self._connection = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the next pieces of the connections' streams, as (connection ID, bytes). Raises MuxError."""
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
