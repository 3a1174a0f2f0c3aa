# SPDX-License-Identifier: Apache-2.0
"""Split a stream into varlink messages, and the errors of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resctrlmond.resctrl.processes import Descriptor

# The most descriptors of one message. The methods of resctrlmond use one.
MAX_DESCRIPTORS = 16


class VarlinkError(Exception):
    """An error reply. A handler raises it in the server, and ``Client.call`` raises it in the client.

    ``name`` is fully qualified (``org.resctrlmon.Manager.NoSuchGroup``); ``parameters`` are the fields that the
    description of the interface declares for the error.
    """

    def __init__(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        super().__init__(name)
        self.name = name
        self.parameters = parameters or {}

    @property
    def short_name(self) -> str:
        """The name without its interface."""
        return self.name.rpartition(".")[2]

    @property
    def message(self) -> str:
        """The cause of the failure in one sentence; the name of an error without a message."""
        return str(self.parameters.get("message") or self.name)

    def __str__(self) -> str:
        fields = ", ".join(f"{field}={value!r}" for field, value in self.parameters.items())
        return f"{self.name}: {fields}" if fields else self.name


class ProtocolError(ConnectionError):
    """The peer violated the varlink protocol or sent too much.

    The connection cannot be used any more, except after an UnexpectedReply.
    """


class UnexpectedReply(ProtocolError):
    """The parameters of a reply do not fit the client's types, as with a server of another version."""


class FrameBuffer:
    """Splits a byte stream into messages. Searches each byte once.

    ``max_message`` limits the bytes of a message without its NUL. Bytes after a complete message are kept for the
    next one, so the buffer holds at most ``max_message`` bytes and those of one ``feed``.

    File descriptors belong to the message that holds the last byte of the ``feed`` that they came with: a
    recvmsg(2) does not read past what was sent with descriptors (net/unix/af_unix.c, unix_stream_read_generic()).
    """

    def __init__(self, max_message: int) -> None:
        self._max = max_message
        self._data = bytearray()
        self._searched = 0
        # Each descriptor with the number of bytes that were fed when it came; and the number of bytes taken out.
        self._descriptors: list[tuple[int, Descriptor]] = []
        self._taken = 0

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes, descriptors: Sequence[Descriptor] = ()) -> None:
        """Append bytes and descriptors from the socket. Raises ProtocolError if there are too many descriptors."""
        self._data += data
        end = self._taken + len(self._data)
        self._descriptors += [(end, descriptor) for descriptor in descriptors]
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ProtocolError(f"more than {MAX_DESCRIPTORS} file descriptors come with a message")

    def next(self) -> tuple[bytes, tuple[Descriptor, ...]] | None:
        """Return the next complete message without its NUL, and its descriptors; None if there is none yet.

        Raises ProtocolError if a message is too long, whether or not it is complete.
        """
        end = self._data.find(0, self._searched)
        if max(end, 0) > self._max or (end < 0 and len(self._data) > self._max):
            raise ProtocolError(f"a message is longer than {self._max} bytes")
        if end < 0:
            self._searched = len(self._data)
            return None
        message = bytes(self._data[:end])
        del self._data[: end + 1]
        self._taken += end + 1
        self._searched = 0
        descriptors = tuple(descriptor for end, descriptor in self._descriptors if end <= self._taken)
        self._descriptors = self._descriptors[len(descriptors) :]
        return message, descriptors
