# SPDX-License-Identifier: Apache-2.0
"""Encode calls, decode replies, and explain the errors of the connection, for both clients."""

from __future__ import annotations

import errno
import threading
from typing import TypeVar

import msgspec

from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.frames import UnexpectedReply, VarlinkError
from resctrlmond.api.varlink.messages import Call, Parameters, Reply

MAX_REPLY_BYTES = 64 * 1024 * 1024
# Assign lists a large control group repeatedly until it finds no new task, and a List waits behind other lists.
TIMEOUT_S = 45.0

_DESCRIBING = threading.Lock()

_T = TypeVar("_T")


class DaemonUnavailable(ConnectionError):
    """No process listens on the socket, or the socket does not exist. ``path`` is the path of the socket."""

    def __init__(self, path: str, cause: OSError) -> None:
        remedy = "start it with 'systemctl start resctrlmond.socket'"
        super().__init__(cause.errno, f"resctrlmond is not running ({cause.strerror}); {remedy}", path)
        self.path = path


def encode(method: str, parameters: Parameters | None, *, more: bool) -> bytes:
    """Encode a call with the NUL that ends it. Raises TypeError or ValueError if JSON has no representation."""
    return wire.encode(Call(method, wire.encode_parameters(parameters), more=more or None))


def decode(message: bytes) -> Reply:
    """Decode a reply. Raises ProtocolError if the message is not a varlink reply."""
    _describe(Reply)
    return wire.decode(message, Reply)


def result(method: str, reply: Reply, kind: type[_T]) -> _T:
    """Return the parameters of a reply. Raises VarlinkError for an error reply, and ProtocolError."""
    if reply.error is not None:
        raise VarlinkError(reply.error, _parameters(method, reply, dict))
    return _parameters(method, reply, kind)


def is_result(reply: Reply) -> bool:
    """Return whether the reply of a stream has a result. A last reply without parameters only ends the stream."""
    return bool(reply.continues or reply.error is not None or bytes(reply.parameters))


def _parameters(method: str, reply: Reply, kind: type[_T]) -> _T:
    _describe(kind)
    try:
        return wire.decode_parameters(reply.parameters, kind)
    except msgspec.ValidationError as error:
        raise UnexpectedReply(f"the reply to {method} is not valid: {error}") from error


def _describe(kind: type) -> None:
    """Have msgspec describe the type and those of its fields, if it has not, before it is decoded.

    If two threads use a type for the first time at once, msgspec 0.22 crashes (SIGSEGV): one uses the incomplete
    description that the other one creates (_core.c, StructInfo_Convert).
    """
    with _DESCRIBING:
        msgspec.json.Decoder(kind)


def cannot_connect(error: OSError, path: str) -> OSError:
    """Return the error to raise if the connection cannot be opened, with a message for the user."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED):
        return DaemonUnavailable(path, error)
    if error.errno in (errno.EACCES, errno.EPERM):
        text = "access denied; root and the members of the groups 'resctrlmon' and 'resctrlmon-read' may use it"
        return PermissionError(error.errno, text, path)
    if error.errno == errno.EAGAIN:
        return TimeoutError(errno.ETIMEDOUT, "resctrlmond accepts no connections at the moment", path)
    # Python raises OSError without an errno for a path that is too long.
    return OSError(error.errno or errno.ENAMETOOLONG, f"cannot connect: {error.strerror or error}", path)


def closed(path: str) -> ConnectionError:
    """Return the error to raise if the daemon closes the connection before its reply."""
    text = "resctrlmond closed the connection: it is stopping, or has too many connections (see its journal)"
    return ConnectionError(errno.ECONNRESET, text, path)


def late(path: str) -> TimeoutError:
    """Return the error to raise if the reply does not come in time."""
    return TimeoutError(errno.ETIMEDOUT, "resctrlmond did not answer in time", path)
