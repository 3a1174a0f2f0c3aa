# SPDX-License-Identifier: Apache-2.0
"""The synchronous client of the varlink interface."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from resctrlmond.api.signatures import Q, R, Signature
from resctrlmond.api.varlink.frames import FrameBuffer, ProtocolError, VarlinkError
from resctrlmond.api.varlink.messages import Parameters, Reply
from resctrlmond.client import protocol

_T = TypeVar("_T")

# How long a call waits for its reply before ``on_wait`` is called.
_WAIT_S = 2.0
# The pause of ``follow`` after a failure.
_AGAIN_S = 1.0
# Less than the size from which malloc(3) maps memory for each buffer.
_RECEIVE_BYTES = 65536


class Client:
    """A connection to the varlink socket at ``path``; a context manager.

    ``timeout_s`` limits the time to connect, and the time of each call until its reply is complete. After a failure,
    or if replies were not read, the connection is closed, and the next call opens a new one. Not for several threads
    at once. Calls raise VarlinkError for an error reply; DaemonUnavailable, PermissionError and TimeoutError with a
    message for the user; ProtocolError for an invalid reply; ConnectionError if the server closes the connection.
    """

    def __init__(self, path: str, timeout_s: float = protocol.TIMEOUT_S) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._frames = FrameBuffer(protocol.MAX_REPLY_BYTES)
        # Called once if a call with a time limit waits for its reply for longer than usual.
        self.on_wait: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self._connected()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def interrupt(self) -> None:
        """End the call that another thread makes: it raises ConnectionError, and the server sees the hangup."""
        if (connection := self._socket) is not None:
            # The other thread may have closed it.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @overload
    def call(self, method: Signature[Q, R], parameters: Q | None = None, *, descriptors: Sequence[int] = ()) -> R: ...
    @overload
    def call(
        self, method: str, parameters: Parameters | None = None, *, descriptors: Sequence[int] = ()
    ) -> dict[str, Any]: ...
    @overload
    def call(
        self, method: str, parameters: Parameters | None = None, *, reply: type[_T], descriptors: Sequence[int] = ()
    ) -> _T: ...

    def call(
        self,
        method: Signature[Any, Any] | str,
        parameters: Parameters | None = None,
        *,
        reply: Any = dict,
        descriptors: Sequence[int] = (),
    ) -> Any:
        """Call a method, and return the parameters of its reply.

        A method of another service is called by its full name; the parameters of its reply are decoded as ``reply``.
        The server gets a copy of each of ``descriptors``.
        """
        name, kind = _named(method, reply)
        deadline = time.monotonic() + self._timeout_s
        self._send(protocol.encode(name, parameters, more=False), deadline, descriptors)
        answer = self._receive(deadline)
        if answer.continues:
            self.close()
            raise ProtocolError(f"{name} answered one call with several replies")
        return protocol.result(name, answer, kind)

    @overload
    def stream(
        self, method: Signature[Q, R], parameters: Q | None = None, *, timeout_s: float | None = None
    ) -> Iterator[R]: ...
    @overload
    def stream(
        self, method: str, parameters: Parameters | None = None, *, timeout_s: float | None = None
    ) -> Iterator[dict[str, Any]]: ...
    @overload
    def stream(
        self, method: str, parameters: Parameters | None = None, *, reply: type[_T], timeout_s: float | None = None
    ) -> Iterator[_T]: ...

    def stream(
        self,
        method: Signature[Any, Any] | str,
        parameters: Parameters | None = None,
        *,
        reply: Any = dict,
        timeout_s: float | None = None,
    ) -> Iterator[Any]:
        """Call a method with ``more`` and yield the parameters of each reply, as ``call`` does.

        ``timeout_s`` limits the wait for each reply (None: no limit). A last reply without parameters only ends the
        stream and is not yielded. Do not start another call before the iterator has ended or was closed with its
        ``close()``.
        """
        name, kind = _named(method, reply)
        deadline = time.monotonic() + self._timeout_s
        self._send(protocol.encode(name, parameters, more=True), deadline)
        continues = True
        try:
            while continues:
                answer = self._receive(None if timeout_s is None else time.monotonic() + timeout_s)
                continues = bool(answer.continues)
                if protocol.is_result(answer):
                    yield protocol.result(name, answer, kind)
        finally:
            if continues:
                self.close()

    def follow(
        self, method: Signature[Q, R], parameters: Q | None = None, *, on_failure: Callable[[Exception], None]
    ) -> Iterator[R]:
        """Yield the replies of a method that replies without end, also after restarts of the daemon.

        Each failure is passed to ``on_failure``; the method is called again, on a new connection, a second later.
        """
        while True:
            try:
                yield from self.stream(method, parameters)
            except (OSError, VarlinkError) as error:
                on_failure(error)
            self.close()
            time.sleep(_AGAIN_S)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = connect(self._path, self._timeout_s)
            self._frames = FrameBuffer(protocol.MAX_REPLY_BYTES)
        return self._socket

    def _send(self, message: bytes, deadline: float, descriptors: Sequence[int] = ()) -> None:
        connection = self._connected()
        with self._closing_on_failure():
            connection.settimeout(_remaining(deadline))
            # The first byte that is sent carries the descriptors (unix(7), SCM_RIGHTS).
            sent = socket.send_fds(connection, [message], descriptors) if descriptors else 0
            connection.settimeout(_remaining(deadline))
            connection.sendall(message[sent:])

    def _receive(self, deadline: float | None) -> Reply:
        connection = self._socket
        if connection is None:
            raise ConnectionError(f"{self._path}: the connection was closed before the reply")
        with self._closing_on_failure():
            while (found := self._frames.next()) is None:
                data = self._received(connection, deadline)
                if not data:
                    raise ConnectionResetError
                self._frames.feed(data)
            return protocol.decode(found[0])

    def _received(self, connection: socket.socket, deadline: float | None) -> bytes:
        if self.on_wait is not None and deadline is not None and _remaining(deadline) > _WAIT_S:
            connection.settimeout(_WAIT_S)
            try:
                return connection.recv(_RECEIVE_BYTES)
            except TimeoutError:
                on_wait, self.on_wait = self.on_wait, None
                on_wait()
        connection.settimeout(None if deadline is None else _remaining(deadline))
        return connection.recv(_RECEIVE_BYTES)

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        # After an interrupted call, a new connection is necessary: the next call would get the late reply.
        try:
            yield
        except TimeoutError as error:
            self.close()
            raise protocol.late(self._path) from error
        except (ConnectionResetError, BrokenPipeError) as error:
            self.close()
            raise protocol.closed(self._path) from error
        except BaseException:
            self.close()
            raise


def _named(method: Signature[Any, Any] | str, reply: Any) -> tuple[str, Any]:
    return (method, reply) if isinstance(method, str) else (method.full_name, method.reply)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def connect(path: str, timeout_s: float) -> socket.socket:
    """Connect to the varlink socket at ``path``. Raises the errors of Client."""
    connection, deadline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), time.monotonic() + timeout_s
    try:
        while timeout_s > 0:
            # Only a blocking connect() waits for room in the backlog, up to SO_SNDTIMEO (net/unix/af_unix.c,
            # unix_stream_connect()). With settimeout(), connect() fails at once.
            timeval = struct.pack("ll", int(timeout_s), max(1, int(timeout_s % 1 * 1_000_000)))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            connection.connect(path)
            if _is_connected(connection):
                return connection
            timeout_s = deadline - time.monotonic()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    except OSError as error:
        connection.close()
        raise protocol.cannot_connect(error, path) from error


def _is_connected(connection: socket.socket) -> bool:
    """Whether a connect() that reported success was not interrupted: Python waits after EINTR as for TCP."""
    try:
        connection.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True
