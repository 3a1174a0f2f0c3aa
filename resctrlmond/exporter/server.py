# SPDX-License-Identifier: Apache-2.0
"""Serve metrics over HTTP, on a socket that is open already."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import logging
import re
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from resctrlmond.api.peer import credentials
from resctrlmond.exporter import tls
from resctrlmond.exporter.collector import Exporter
from resctrlmond.exporter.failures import Failure, Failures

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

# The most that a client may take for its request, with the TLS handshake, and then to read the reply.
_CLIENT_S = 10.0
# Each connection has a thread.
MAX_CONNECTIONS = 32
# Many times the request of Prometheus. Python accepts 100 headers of 64 KiB, and takes 30 MiB to decode them.
_MAX_REQUEST = 32 * 1024
# How long a new connection waits for the place of one that was interrupted.
_PLACE_S = 1.0
# How long a client can always read its reply.
_READING_S = 1.0
# The part of the time-out of Prometheus that the calls of the daemon may take.
_SHARE = 0.8
_FULL = f"{MAX_CONNECTIONS} connections are open"
_SLOW = f"the client took more than {_CLIENT_S:g} s for its request, or to read the reply"
# The kernel's number for a user that has none in this user namespace (user_namespaces(7)).
_OVERFLOW_UID = 65534
_REFUSED = re.compile(r"\s*q=0(\.0*)?\s*")
_OPENMETRICS = "application/openmetrics-text"
_TEXT = [("Content-Type", "text/plain; charset=utf-8")]


class Application:
    """The WSGI application: ``/metrics`` in OpenMetrics or in Prometheus text, as the client accepts.

    A scrape waits for the daemon for ``timeout_s`` at most, or for a share of the time-out that Prometheus states.
    """

    def __init__(self, exporter: Exporter, timeout_s: float) -> None:
        self._exporter = exporter
        self._timeout_s = timeout_s

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [*_TEXT, ("Allow", "GET")])
            return [b"Use GET\n"]
        match _path(environ["PATH_INFO"]):
            case "/metrics":
                return self._metrics(environ, start_response)
            case "/":
                start_response("200 OK", _TEXT)
                return [b"resctrlmon-exporter: the metrics are at /metrics\n"]
            case _:
                start_response("404 Not Found", _TEXT)
                return [b"The metrics are at /metrics\n"]

    def _metrics(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        encoder, content_type = _encoder(environ.get("HTTP_ACCEPT", ""))
        stated = _stated_timeout_s(environ.get("HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS", ""))
        timeout_s = min(self._timeout_s, stated * _SHARE) if stated else self._timeout_s
        is_openmetrics = content_type.startswith(_OPENMETRICS)
        # The version of the client, which can be any number, does not change the text.
        form = f"{is_openmetrics} {content_type.partition('; escaping=')[2]}"
        body = self._exporter.text(form, encoder, timeout_s, with_start_times=is_openmetrics)
        headers = [("Content-Type", content_type)]
        if _accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
            body = gzip.compress(body, compresslevel=1)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body]


def _path(target: str) -> str:
    """Return the path of a request. Clients may send the whole address, as to a proxy (RFC 9112, 3.2.2)."""
    scheme, separator, rest = target.partition("://")
    return "/" + rest.partition("/")[2] if separator and scheme.lower() in ("http", "https") else target


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return the format that the client accepts: its encoder and content type. The default is Prometheus text."""
    try:
        # The version of the client becomes a part of the content type.
        return choose_encoder(accept if accept.isascii() and accept.isprintable() else "")
    except TypeError:  # a version that is not a number
        return choose_encoder("")


def _accepts_gzip(accept: str) -> bool:
    """Return whether the client accepts gzip. A weight of 0 refuses it, which prometheus_client does not check."""
    codings = [coding.partition(";") for coding in accept.lower().split(",")]
    return any(name.strip() == "gzip" and not _REFUSED.fullmatch(weight) for name, _, weight in codings)


def _stated_timeout_s(header: str) -> float | None:
    try:
        stated = float(header)
    except ValueError:
        return None
    return stated if 0 < stated < float("inf") else None


class Room:
    """The places for connections, which several servers can share. Thread-safe.

    A connection whose client has to act is in ``_waiting``, by its thread: a request has not arrived, or a reply was
    not read for ``_READING_S``. If all places are taken, the one of them that has waited longest is interrupted for a
    new connection.
    """

    def __init__(self, places: int, failures: Failures | None = None) -> None:
        self.failures = failures or Failures()
        self._places = threading.BoundedSemaphore(places)
        # Until when the client may take. It can be interrupted in the last _CLIENT_S of this time.
        self._waiting: dict[int, tuple[socket.socket, float]] = {}
        # The threads whose connections were interrupted, which are counted already.
        self._interrupted: set[int] = set()
        self._guard = threading.Lock()

    def enter(self) -> bool:
        """Take a place. Return False if the connections that have all of them wait for the daemon."""
        if self._places.acquire(blocking=False):
            return True
        with self._guard:
            oldest = min(self._waiting, key=lambda thread: self._waiting[thread][1], default=None)
            if oldest is None or self._waiting[oldest][1] - _CLIENT_S > time.monotonic():
                self.failures.add(Failure.FULL, _FULL)
                return False
            self._interrupt(oldest, Failure.FULL, _FULL)
            del self._waiting[oldest]
        if self._places.acquire(timeout=_PLACE_S):
            return True
        self.failures.add(Failure.FULL, _FULL)
        return False

    def leave(self) -> None:
        """Give back the place of this thread, or of a thread that could not be started."""
        with self._guard:
            self._waiting.pop(threading.get_ident(), None)
            self._interrupted.discard(threading.get_ident())
        self._places.release()

    def wait_for_client(self, connection: socket.socket, until: float) -> None:
        """Record that the client of this thread's connection has to act until then (time.monotonic())."""
        with self._guard:
            self._waiting[threading.get_ident()] = connection, until

    def deadline(self) -> float:
        """Return until when the client of this thread's connection has to act (time.monotonic())."""
        with self._guard:
            return self._waiting.get(threading.get_ident(), (None, 0.0))[1]

    def stop_waiting(self) -> None:
        """Record that this thread does not wait for its client."""
        with self._guard:
            self._waiting.pop(threading.get_ident(), None)

    def fail(self, failure: Failure, reason: str, client: str) -> None:
        """Count the failure of this thread's connection, unless it was interrupted."""
        with self._guard:
            is_counted = threading.get_ident() in self._interrupted
        if not is_counted:
            self.failures.add(failure, reason, client)

    def interrupt_late(self) -> None:
        """Interrupt the clients that were too slow: the time-out of a socket is that of each byte."""
        now = time.monotonic()
        with self._guard:
            for thread, (_, until) in self._waiting.items():
                if now > until:
                    self._interrupt(thread, Failure.SLOW, _SLOW)

    def _interrupt(self, thread: int, failure: Failure, reason: str) -> None:
        if thread not in self._interrupted:
            self._interrupted.add(thread)
            self.failures.add(failure, reason)
        with contextlib.suppress(OSError):
            # Not shutdown() of ssl, which another thread uses.
            socket.socket.shutdown(self._waiting[thread][0], socket.SHUT_RDWR)


class _Lines:
    """The lines of a request, up to ``_MAX_REQUEST`` bytes."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = _MAX_REQUEST
        self._is_first = True

    def readline(self, size: int) -> bytes:
        """Return a line.

        Raises HTTPException, which is answered, if there were too many bytes before the line, or if the client sends
        no more: Python takes the end of the connection for the end of the headers.
        """
        line = self._file.readline(min(size, self._left))
        self._left -= len(line)
        if not line and not self._is_first:
            raise http.client.HTTPException("the request is longer than allowed, or incomplete")
        self._is_first = False
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Reply(ServerHandler):
    """Writes a reply. ``failure`` is why the client did not get it: wsgiref logs some failures, and drops others."""

    request_handler: WSGIRequestHandler
    failure: OSError | None = None

    def _write(self, data: bytes) -> None:
        try:
            super()._write(data)
        except OSError as error:
            self.failure = error
            # The one that wsgiref takes for the end of the connection.
            raise ConnectionAbortedError from error


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S
    server: Server

    def setup(self) -> None:
        """Limit the request."""
        super().setup()
        self.rfile = _Lines(self.rfile)  # type: ignore[assignment]

    def parse_request(self) -> bool:
        """Parse the request, which has arrived as a whole unless it is not valid."""
        is_valid = super().parse_request()
        self.server.record_request()
        return is_valid

    def handle(self) -> None:
        """Answer the request. Raises OSError if the client does not read the reply."""
        self.raw_requestline = self.rfile.readline(_MAX_REQUEST)
        if not self.parse_request():
            return
        request: Any = self.rfile
        out: Any = self.wfile
        reply = _Reply(request, out, self.get_stderr(), self.get_environ(), multithread=False)
        reply.request_handler = self
        reply.run(self.server.answer)
        if reply.failure is not None:
            raise reply.failure

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)


def _process(connection: socket.socket) -> str:
    """Return the process that connected to a unix socket, as the log names it."""
    try:
        pid, uid, _ = credentials(connection)
    except OSError:
        return "the unix socket"
    # The number of a process in another PID namespace can be 0. PrivateUsers= of the unit hides most users.
    names = [f"process {pid}"] * bool(pid) + [f"uid {uid}"] * (uid != _OVERFLOW_UID)
    return " of ".join(names) or "the unix socket"


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """Serves ``application`` on a listening socket, which it owns; over TLS with ``secure``."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        application: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]],
        room: Room,
        secure: ssl.SSLContext | None = None,
    ) -> None:
        # Not that of TCPServer, which creates a socket: the unit allows none of the internet.
        socketserver.BaseServer.__init__(self, listener.getsockname(), _Handler)
        self.socket = listener
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()
        self.set_app(self.answer)
        self._application = application
        self._tls = secure
        self._room = room
        # The connection of each thread.
        self._connections = threading.local()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. The address of a client of a unix socket is the name of its process."""
        connection, address = super().get_request()
        return connection, (_process(connection), 0) if connection.family == socket.AF_UNIX else address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, or close the connection if there are too many."""
        if not self._room.enter():
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.leave()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request of a connection."""
        self._connections.own = request
        self._room.wait_for_client(request, time.monotonic() + _CLIENT_S)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.leave()

    def record_request(self) -> None:
        """Record that the request of this thread's connection has arrived."""
        self._room.stop_waiting()

    def answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Return the reply, which the client has a limited time to read."""
        reply = self._application(environ, start_response)
        self._room.wait_for_client(self._connections.own, time.monotonic() + _READING_S + _CLIENT_S)
        return reply

    def service_actions(self) -> None:
        """Interrupt clients that are too slow."""
        self._room.interrupt_late()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer the request, after the TLS handshake."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        until = self._room.deadline()
        request.settimeout(_CLIENT_S)
        # The handshake is not that of wrap_socket(), which takes the descriptor away from the socket that can be
        # interrupted, so that silent clients would keep their places.
        with self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as secured:
            self._connections.own = secured
            self._room.wait_for_client(secured, until)
            try:
                # The time-out is that of the whole handshake.
                secured.do_handshake()
            except TimeoutError:
                raise
            except OSError as error:
                self._room.fail(Failure.TLS, tls.reason(error), client_address[0])
                return
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Count and log the failure of a connection."""
        match sys.exc_info()[1]:
            case TimeoutError():
                self._room.fail(Failure.SLOW, _SLOW, client_address[0])
            case OSError() as error:
                reason = f"it failed before the reply was read: {error.strerror or error}"
                self._room.fail(Failure.CLOSED, reason, client_address[0])
            case _:
                log.exception("a request failed")
