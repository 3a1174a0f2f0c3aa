# SPDX-License-Identifier: Apache-2.0
"""Encode and decode varlink messages: calls, replies and errors, as JSON that a NUL ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:
    from resctrlmond.resctrl.processes import Descriptor

# Parameters to encode: a struct, or a dict whose keys are used unchanged.
Parameters: TypeAlias = msgspec.Struct | dict[str, Any]

SERVICE = "org.varlink.service"
METHOD_NOT_IMPLEMENTED = f"{SERVICE}.MethodNotImplemented"
INTERFACE_NOT_FOUND = f"{SERVICE}.InterfaceNotFound"
METHOD_NOT_FOUND = f"{SERVICE}.MethodNotFound"
INVALID_PARAMETER = f"{SERVICE}.InvalidParameter"
PERMISSION_DENIED = f"{SERVICE}.PermissionDenied"
EXPECTED_MORE = f"{SERVICE}.ExpectedMore"

_T = TypeVar("_T")
_M = TypeVar("_M", "Call", "Reply")

# RecursionError: Python's recursion limit bounds the nesting that msgspec decodes.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class VarlinkError(Exception):
    """An error reply. A handler raises it in the server, and ``Client.call`` raises it in the client.

    ``name`` is fully qualified (``org.resctrlmon.Manager.NoSuchGroup``); ``parameters`` are the fields that the
    description of the interface declares for the error.
    """

    def __init__(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        super().__init__(name)
        self.name = name
        self.parameters = parameters or {}

    def __str__(self) -> str:
        fields = ", ".join(f"{field}={value!r}" for field, value in self.parameters.items())
        return f"{self.name}: {fields}" if fields else self.name


class ProtocolError(ConnectionError):
    """The peer violated the varlink protocol or sent too much. The connection cannot be used any more."""


# The most descriptors of one message. The methods of resctrlmond use one.
MAX_DESCRIPTORS = 16

# Parameters that are left out, and their texts in JSON.
_NONE = msgspec.Raw()
_OMITTED = (b"", b"null")


class Call(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A call. Unknown keys are refused, as in sd-varlink, so that a misspelt "oneway" is an error.

    ``parameters`` are decoded later: their type depends on the method.
    """

    method: str
    parameters: msgspec.Raw = _NONE
    oneway: bool | None = None
    more: bool | None = None
    upgrade: bool | None = None


class Reply(msgspec.Struct, omit_defaults=True):
    """A reply. With ``continues``, another reply to the same call follows."""

    parameters: msgspec.Raw = _NONE
    continues: bool | None = None
    error: str | None = None


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


def encode_parameters(parameters: Parameters | None) -> msgspec.Raw:
    """Encode the parameters of a call or reply. Empty parameters are left out.

    Raises TypeError or ValueError if JSON has no representation, as for a lone surrogate.
    """
    text = msgspec.json.encode(parameters or {})
    return _NONE if text == b"{}" else msgspec.Raw(text)


def error_reply(error: VarlinkError) -> Reply:
    """Return the reply for an error. Raises the errors of ``encode_parameters``."""
    return Reply(encode_parameters(error.parameters), error=error.name)


def encode(message: Call | Reply) -> bytes:
    """Encode a message with the NUL that ends it. There is no other NUL, because JSON escapes U+0000."""
    return msgspec.json.encode(message) + b"\0"


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Have msgspec describe replies, and these types of their parameters.

    To be called before several threads decode them. If two threads use a type for the first time at once, msgspec
    0.22 crashes (SIGSEGV): one uses the incomplete description that the other one creates (_core.c,
    StructInfo_Convert). The types of the fields are described too. A process with one thread does not need this.
    """
    for kind in (Reply, *kinds):
        msgspec.json.Decoder(kind)


def decode(message: bytes, kind: type[_M]) -> _M:
    """Decode a call or a reply. Raises ProtocolError if the message is not a varlink call or reply."""
    try:
        # msgspec does not check that undecoded parts are UTF-8.
        message.decode()
        decoded = msgspec.json.decode(message, type=kind)
    except _NOT_JSON as error:
        raise ProtocolError(f"a message is not a varlink {kind.__name__.lower()}: {error}") from error
    parameters = bytes(decoded.parameters)
    if parameters not in _OMITTED and not parameters.startswith(b"{"):
        raise ProtocolError("the parameters of a message are not a JSON object")
    if isinstance(decoded, Call) and decoded.oneway and decoded.more:
        raise ProtocolError("a call has both oneway and more")
    return decoded


def decode_parameters(raw: msgspec.Raw, kind: type[_T]) -> _T:
    """Decode the parameters of a call or reply as ``kind``. Omitted parameters, null and ``{}`` mean the same.

    Raises msgspec.ValidationError if they do not fit ``kind`` and ProtocolError if they are not JSON.
    """
    text = bytes(raw)
    try:
        return msgspec.json.decode(b"{}" if text in _OMITTED else text, type=kind)
    except msgspec.ValidationError:
        raise
    except _NOT_JSON as error:
        raise ProtocolError(f"parameters are not JSON: {error}") from error
