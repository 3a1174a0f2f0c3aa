# SPDX-License-Identifier: Apache-2.0
"""What a varlink connection carries: NUL-terminated JSON messages, calls, replies and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from resctrlmond.resctrl.processes import Descriptor

# What ``parameters`` may be on the way out: a struct, or a dict whose keys go on the wire as they are.
Parameters: TypeAlias = msgspec.Struct | dict[str, Any]

SERVICE = "org.varlink.service"
METHOD_NOT_IMPLEMENTED = f"{SERVICE}.MethodNotImplemented"
INTERFACE_NOT_FOUND = f"{SERVICE}.InterfaceNotFound"
METHOD_NOT_FOUND = f"{SERVICE}.MethodNotFound"
INVALID_PARAMETER = f"{SERVICE}.InvalidParameter"
PERMISSION_DENIED = f"{SERVICE}.PermissionDenied"
EXPECTED_MORE = f"{SERVICE}.ExpectedMore"

_T = TypeVar("_T")
_Envelope = TypeVar("_Envelope", "Call", "Reply")

# RecursionError: msgspec counts its nesting against Python's recursion limit, which so bounds the depth.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# msgspec's words for what is wrong, as "... - at `$.keys[0].name`" and "Object ... field `pid`". The path is
# looked for first: a field that is missing further down belongs to the parameter at the top.
_PATH = re.compile(r" - at `\$\.([^.\[`]+)[^`]*`\Z")
_FIELD = re.compile(r" field `(.*)`\Z", re.DOTALL)


class VarlinkError(Exception):
    """An error reply: raised by a handler on one side, and by the client's call on the other.

    ``name`` is fully qualified (``org.resctrlmon.Manager.NoSuchGroup``); ``parameters`` are the fields that
    the interface's description gives that error.
    """

    def __init__(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        super().__init__(name)
        self.name = name
        self.parameters = parameters or {}

    def __str__(self) -> str:
        fields = ", ".join(f"{field}={value!r}" for field, value in self.parameters.items())
        return f"{self.name}: {fields}" if fields else self.name


class ProtocolError(ConnectionError):
    """The other side does not speak varlink, or too much at once; the connection is of no further use."""


# Our methods take one.
MAX_DESCRIPTORS = 16

# What stands for omitted parameters, in both directions.
_NONE = msgspec.Raw()


class Call(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request as it is on the wire.

    Other keys make it no call, as for sd-varlink: a misspelt "oneway" must not go unseen. ``parameters`` stay
    undecoded until the method, and so their type, is known.
    """

    method: str
    parameters: msgspec.Raw = _NONE
    oneway: bool | None = None
    more: bool | None = None
    upgrade: bool | None = None


class Reply(msgspec.Struct, omit_defaults=True):
    """An answer as it is on the wire; with ``continues`` another one to the same call follows."""

    parameters: msgspec.Raw = _NONE
    continues: bool | None = None
    error: str | None = None


class FrameBuffer:
    """Cuts a byte stream into messages, each byte being looked at once.

    ``max_message`` bounds a message in bytes, without its NUL. What lies behind a complete message is kept for
    the next one, so at most ``max_message`` bytes plus those of one ``feed`` are held.

    File descriptors belong to the message that holds the last byte of the ``feed`` that they came with: a
    recvmsg(2) does not read past what was sent with descriptors (net/unix/af_unix.c, unix_stream_read_generic()).
    """

    def __init__(self, max_message: int) -> None:
        self._max = max_message
        self._data = bytearray()
        self._searched = 0
        # By the number of bytes that were fed up to them; of all bytes, those that were given out.
        self._descriptors: list[tuple[int, Descriptor]] = []
        self._taken = 0

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes, descriptors: Sequence[Descriptor] = ()) -> None:
        """Append what was read from the socket. Raises ProtocolError if too many descriptors wait for a message."""
        self._data += data
        end = self._taken + len(self._data)
        self._descriptors += [(end, descriptor) for descriptor in descriptors]
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ProtocolError(f"more than {MAX_DESCRIPTORS} file descriptors come with a message")

    def descriptors(self) -> tuple[Descriptor, ...]:
        """Those that came with the message which ``next`` returned last; each is given once."""
        found = tuple(descriptor for end, descriptor in self._descriptors if end <= self._taken)
        self._descriptors = [one for one in self._descriptors if one[0] > self._taken]
        return found

    def next(self) -> bytes | None:
        """The next complete message without its NUL; None when there is none yet.

        Raises ProtocolError for a message over the bound, ended or not.
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
    """Parameters for a Call or Reply; empty ones are left out, as the canonical encoding has it.

    Raises TypeError or ValueError for what JSON cannot carry, such as a lone surrogate.
    """
    text = msgspec.json.encode(parameters or {})
    return _NONE if text == b"{}" else msgspec.Raw(text)


def error_reply(error: VarlinkError) -> Reply:
    """The reply that carries an error. Raises as ``encode_parameters``."""
    return Reply(encode_parameters(error.parameters), error=error.name)


def encode(message: Call | Reply) -> bytes:
    """A message with the NUL that ends it: JSON escapes U+0000, so it is the only one."""
    return msgspec.json.encode(message) + b"\0"


def decode_call(message: bytes) -> Call:
    """The request in a message. Raises ProtocolError for whatever is no varlink call."""
    call = _decode(message, Call)
    if call.oneway and call.more:
        raise ProtocolError("a call has both oneway and more")
    return call


def decode_reply(message: bytes) -> Reply:
    """The reply in a message. Raises ProtocolError for whatever is no varlink reply."""
    return _decode(message, Reply)


def decode_parameters(raw: msgspec.Raw, kind: type[_T]) -> _T:
    """The parameters of a decoded call or reply as ``kind``; omitted, null and ``{}`` are the same.

    Raises msgspec.ValidationError where they do not fit ``kind`` (``parameter_at_fault`` names the field),
    and ProtocolError where they are no JSON.
    """
    try:
        return msgspec.json.decode(_object(raw), type=kind)
    except msgspec.ValidationError:
        raise
    except _NOT_JSON as error:
        raise ProtocolError(f"parameters are not JSON: {error}") from error


def parameter_at_fault(error: msgspec.ValidationError) -> str:
    """The name of the top-level parameter that a validation error is about."""
    text = str(error)
    found = _PATH.search(text) or _FIELD.search(text)
    return found[1] if found else "parameters"


def _decode(message: bytes, kind: type[_Envelope]) -> _Envelope:
    try:
        # msgspec skips over undecoded parts without looking whether they are UTF-8.
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
