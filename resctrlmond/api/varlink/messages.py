# SPDX-License-Identifier: Apache-2.0
"""Encode and decode varlink messages: calls, replies and errors, as JSON that a NUL ends."""

from __future__ import annotations

import re
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

_T = TypeVar("_T")
_Envelope = TypeVar("_Envelope", "Call", "Reply")

# RecursionError: Python's recursion limit bounds the nesting that msgspec decodes.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# The messages of msgspec end in "... - at `$.keys[0].name`" or "... field `pid`". The path is searched first: if a
# nested field is missing, the invalid parameter is the one at the top.
_PATH = re.compile(r" - at `\$\.([^.\[`]+)[^`]*`\Z")
_FIELD = re.compile(r" field `(.*)`\Z", re.DOTALL)


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

# Parameters that are left out.
_NONE = msgspec.Raw()


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

    def descriptors(self) -> tuple[Descriptor, ...]:
        """Return the descriptors of the message that ``next`` returned last, and remove them from the buffer."""
        found = tuple(descriptor for end, descriptor in self._descriptors if end <= self._taken)
        self._descriptors = [one for one in self._descriptors if one[0] > self._taken]
        return found

    def next(self) -> bytes | None:
        """Return the next complete message without its NUL; None if there is none yet.

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
        return message


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


def decode_call(message: bytes) -> Call:
    """Decode a call. Raises ProtocolError if the message is not a varlink call."""
    call = _decode(message, Call)
    if call.oneway and call.more:
        raise ProtocolError("a call has both oneway and more")
    return call


def decode_reply(message: bytes) -> Reply:
    """Decode a reply. Raises ProtocolError if the message is not a varlink reply."""
    return _decode(message, Reply)


def decode_parameters(raw: msgspec.Raw, kind: type[_T]) -> _T:
    """Decode the parameters of a call or reply as ``kind``. Omitted parameters, null and ``{}`` mean the same.

    Raises msgspec.ValidationError if they do not fit ``kind`` (``parameter_at_fault`` returns the field), and
    ProtocolError if they are not JSON.
    """
    try:
        return msgspec.json.decode(_object(raw), type=kind)
    except msgspec.ValidationError:
        raise
    except _NOT_JSON as error:
        raise ProtocolError(f"parameters are not JSON: {error}") from error


def parameter_at_fault(error: msgspec.ValidationError) -> str:
    """Return the name of the top-level parameter that a validation error is about."""
    text = str(error)
    found = _PATH.search(text) or _FIELD.search(text)
    return found[1] if found else "parameters"


def _decode(message: bytes, kind: type[_Envelope]) -> _Envelope:
    try:
        # msgspec does not check that undecoded parts are UTF-8.
        message.decode()
        envelope = msgspec.json.decode(message, type=kind)
    except _NOT_JSON as error:
        raise ProtocolError(f"a message is not a varlink {kind.__name__.lower()}: {error}") from error
    if not _object(envelope.parameters).startswith(b"{"):
        raise ProtocolError("the parameters of a message are not a JSON object")
    return envelope


def _object(raw: msgspec.Raw) -> bytes:
    text = bytes(raw)
    return b"{}" if text in (b"", b"null") else text
