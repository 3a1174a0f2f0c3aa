# SPDX-License-Identifier: Apache-2.0
"""The connection of a synchronous varlink client. The two clients decode JSON with msgspec, and without it.

resctrlctl imports this module, so it imports little.
"""

from __future__ import annotations

# Not socket, which converts each constant to an enumeration: that takes a twentieth of the time of a verb.
import _socket
import abc
import contextlib
import errno
import os
import struct
import time

from resctrlmond.api.varlink.frames import FrameBuffer, ProtocolError, VarlinkError

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Any, Self, TypeVar, overload

    _T = TypeVar("_T")

_MAX_REPLY_BYTES = 64 * 1024 * 1024
# How long a call waits for its reply before ``on_wait`` is called.
_WAIT_S = 2.0
# Less than the size from which malloc(3) maps memory for each buffer.
_RECEIVE_BYTES = 65536


class DaemonUnavailable(ConnectionError):
    """No process listens on the socket, or the socket does not exist. ``path`` is the path of the socket."""

    def __init__(self, path: str, cause: OSError) -> None:
        remedy = "start it with 'systemctl start resctrlmond.socket'"
        super().__init__(cause.errno, f"resctrlmond is not running ({cause.strerror}); {remedy}", path)
        self.path = path


class Answer:
    """A reply: the name of an error, or None; whether another reply follows; and its parameters, not decoded."""

    __slots__ = ("continues", "error", "parameters")

    def __init__(self, error: str | None, parameters: Any, *, continues: bool) -> None:
        self.error = error
        self.parameters = parameters
        self.continues = continues


class BaseClient(abc.ABC):
    """A connection to the varlink socket at ``path``; a context manager.

    ``timeout_s`` limits the time to connect, and the time of each call until its reply is complete. After a failure,
    or if replies were not read, the connection is closed, and the next call opens a new one. Not for several threads
    at once. Calls raise VarlinkError for an error reply; DaemonUnavailable, PermissionError and TimeoutError with a
    message for the user; ProtocolError for an invalid reply; ConnectionError if the server closes the connection.
    """

    def __init__(self, path: str, timeout_s: float = 45.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._socket: _socket.socket | None = None
        self._frames = FrameBuffer(_MAX_REPLY_BYTES)
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
                connection.shutdown(_socket.SHUT_RDWR)

    @abc.abstractmethod
    def _encode(self, method: str, parameters: Any, *, more: bool) -> bytes:
        """Encode a call with the NUL that ends it."""

    @abc.abstractmethod
    def _decode(self, message: bytes) -> Answer:
        """Decode a reply. Raises ProtocolError if the message is not a varlink reply."""

    @abc.abstractmethod
    def _decode_parameters(self, method: str, parameters: Any, kind: Any) -> Any:
        """Decode the parameters of a reply as ``kind``. Raises ProtocolError if they do not fit it."""

    if TYPE_CHECKING:

        @overload
        def call(self, method: str, parameters: Any = None, *, descriptors: Sequence[int] = ()) -> dict[str, Any]: ...
        @overload
        def call(
            self, method: str, parameters: Any = None, *, reply: type[_T], descriptors: Sequence[int] = ()
        ) -> _T: ...

    def call(
        self,
        method: str,
        parameters: Any = None,
        *,
        reply: Any = dict,
        descriptors: Sequence[int] = (),
    ) -> Any:
        """Call a method, by its full name, and return the parameters of its reply as ``reply``.

        The server gets a copy of each of ``descriptors``.
        """
        deadline = time.monotonic() + self._timeout_s
        self._send(self._encode(method, parameters, more=False), deadline, descriptors)
        answer = self._receive(deadline)
        if answer.continues:
            self.close()
            raise ProtocolError(f"{method} answered one call with several replies")
        return self._result(method, answer, reply)

    if TYPE_CHECKING:

        @overload
        def stream(
            self, method: str, parameters: Any = None, *, timeout_s: float | None = None
        ) -> Iterator[dict[str, Any]]: ...
        @overload
        def stream(
            self, method: str, parameters: Any = None, *, reply: type[_T], timeout_s: float | None = None
        ) -> Iterator[_T]: ...

    def stream(
        self,
        method: str,
        parameters: Any = None,
        *,
        reply: Any = dict,
        timeout_s: float | None = None,
    ) -> Iterator[Any]:
        """Call a method with ``more`` and yield the parameters of each reply as ``reply``.

        ``timeout_s`` limits the wait for each reply (None: no limit). A last reply without parameters only ends the
        stream and is not yielded. Do not start another call before the iterator has ended or was closed with its
        ``close()``.
        """
        deadline = time.monotonic() + self._timeout_s
        self._send(self._encode(method, parameters, more=True), deadline)
        continues = True
        try:
            while continues:
                answer = self._receive(None if timeout_s is None else time.monotonic() + timeout_s)
                continues = answer.continues
                if continues or answer.error is not None or answer.parameters is not None:
                    yield self._result(method, answer, reply)
        finally:
            if continues:
                self.close()

    def _connected(self) -> _socket.socket:
        if self._socket is None:
            self._socket = connect(self._path, self._timeout_s)
            self._frames = FrameBuffer(_MAX_REPLY_BYTES)
        return self._socket

    def _result(self, method: str, answer: Answer, kind: Any) -> Any:
        if answer.error is not None:
            raise VarlinkError(answer.error, self._decode_parameters(method, answer.parameters, dict))
        return self._decode_parameters(method, answer.parameters, kind)

    def _send(self, message: bytes, deadline: float, descriptors: Sequence[int] = ()) -> None:
        connection = self._connected()
        with self._closing_on_failure():
            connection.settimeout(_remaining(deadline))
            # The first byte that is sent carries the descriptors (unix(7), SCM_RIGHTS).
            passed = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
            sent = connection.sendmsg([message], [passed]) if descriptors else 0
            connection.settimeout(_remaining(deadline))
            connection.sendall(message[sent:])

    def _receive(self, deadline: float | None) -> Answer:
        connection = self._socket
        if connection is None:
            raise ConnectionError(f"{self._path}: the connection was closed before the reply")
        with self._closing_on_failure():
            while (found := self._frames.next()) is None:
                data = self._received(connection, deadline)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                self._frames.feed(data)
            return self._decode(found[0])

    def _received(self, connection: _socket.socket, deadline: float | None) -> bytes:
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
            raise TimeoutError(errno.ETIMEDOUT, "resctrlmond did not answer in time", self._path) from error
        except (ConnectionResetError, BrokenPipeError) as error:
            self.close()
            text = "resctrlmond closed the connection: it is stopping, or has too many connections (see its journal)"
            raise ConnectionError(error.errno, text, self._path) from error
        except BaseException:
            self.close()
            raise


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def connect(path: str, timeout_s: float) -> _socket.socket:
    """Connect to the varlink socket at ``path``. Raises the errors of BaseClient."""
    connection, deadline = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM), time.monotonic() + timeout_s
    try:
        while timeout_s > 0:
            # Only a blocking connect() waits for room in the backlog, up to SO_SNDTIMEO (net/unix/af_unix.c,
            # unix_stream_connect()). With settimeout(), connect() fails at once.
            timeval = struct.pack("ll", int(timeout_s), max(1, int(timeout_s % 1 * 1_000_000)))
            connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, timeval)
            connection.connect(path)
            if _is_connected(connection):
                return connection
            timeout_s = deadline - time.monotonic()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    except OSError as error:
        connection.close()
        raise _explained(error, path) from error


def _is_connected(connection: _socket.socket) -> bool:
    """Whether a connect() that reported success was not interrupted: Python waits after EINTR as for TCP."""
    try:
        connection.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True


def _explained(error: OSError, path: str) -> OSError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED):
        return DaemonUnavailable(path, error)
    if error.errno in (errno.EACCES, errno.EPERM):
        text = "access denied; root and the members of the groups 'resctrlmon' and 'resctrlmon-read' may use it"
        return PermissionError(error.errno, text, path)
    if error.errno == errno.EAGAIN:
        return TimeoutError(errno.ETIMEDOUT, "resctrlmond accepts no connections at the moment", path)
    # Python raises OSError without an errno for a path that is too long.
    return OSError(error.errno or errno.ENAMETOOLONG, f"cannot connect: {error.strerror or error}", path)
