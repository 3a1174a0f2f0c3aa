# SPDX-License-Identifier: Apache-2.0
"""Encode and decode varlink messages: calls, replies and errors, as JSON that a NUL ends."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

from resctrlmond.api.varlink.frames import ProtocolError, VarlinkError

# Parameters to encode: a struct, or a dict whose keys are used unchanged.
Parameters: TypeAlias = msgspec.Struct | dict[str, Any]

SERVICE = "org.varlink.service"
METHOD_NOT_IMPLEMENTED = f"{SERVICE}.MethodNotImplemented"
INTERFACE_NOT_FOUND = f"{SERVICE}.InterfaceNotFound"
METHOD_NOT_FOUND = f"{SERVICE}.MethodNotFound"
INVALID_PARAMETER = f"{SERVICE}.InvalidParameter"
EXPECTED_MORE = f"{SERVICE}.ExpectedMore"

_T = TypeVar("_T")
_M = TypeVar("_M", "Call", "Reply")

# RecursionError: Python's recursion limit bounds the nesting that msgspec decodes.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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
