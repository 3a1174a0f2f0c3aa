# SPDX-License-Identifier: Apache-2.0
"""Serve metrics over HTTP, on a socket that is open already."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from resctrlmond.exporter.collector import Exporter

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

# The most that a client may take for its request, with the handshake of TLS, and then to read the reply.
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
        match environ["PATH_INFO"]:
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
        body = self._exporter.render(encoder, timeout_s, with_start_times=is_openmetrics)
        headers = [("Content-Type", content_type)]
        if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
            body = gzip.compress(body, compresslevel=1)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body]


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return the format that the client accepts: its encoder and content type. The default is Prometheus text."""
    try:
        # The version of the client becomes a part of the content type.
        return choose_encoder(accept if accept.isascii() and accept.isprintable() else "")
    except TypeError:  # a version that is not a number
        return choose_encoder("")


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

    def __init__(self, places: int) -> None:
        self._places = threading.BoundedSemaphore(places)
        # Until when the client may take. It can be interrupted in the last _CLIENT_S of this time.
        self._waiting: dict[int, tuple[socket.socket, float]] = {}
        self._guard = threading.Lock()

    def enter(self) -> bool:
        """Take a place. Return False if the connections that have all of them wait for the daemon."""
        if self._places.acquire(blocking=False):
            return True
        with self._guard:
            oldest = min(self._waiting, key=lambda thread: self._waiting[thread][1], default=None)
            if oldest is None or self._waiting[oldest][1] - _CLIENT_S > time.monotonic():
                return False
            _interrupt(self._waiting.pop(oldest)[0])
        return self._places.acquire(timeout=_PLACE_S)

    def leave(self) -> None:
        """Give back the place."""
        self._places.release()

    def wait_for_client(self, connection: socket.socket, until: float) -> None:
        """Record that the client of this thread's connection has to act until then (time.monotonic())."""
        with self._guard:
            self._waiting[threading.get_ident()] = connection, until

    def until(self) -> float:
        """Return until when the client of this thread's connection may take."""
        with self._guard:
            return self._waiting.get(threading.get_ident(), (None, 0.0))[1]

    def has_acted(self) -> None:
        """Record that this thread does not wait for its client."""
        with self._guard:
            self._waiting.pop(threading.get_ident(), None)

    def interrupt_late(self) -> None:
        """Interrupt the clients that were too slow: the time-out of a socket is that of each byte."""
        now = time.monotonic()
        with self._guard:
            for connection, until in self._waiting.values():
                if now > until:
                    _interrupt(connection)


def _interrupt(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Not shutdown() of ssl, which another thread uses.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


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
        self.server.has_request()
        return is_valid

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """Serves ``application`` on a listening socket, which it owns; over TLS with ``tls``."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        application: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]],
        room: Room,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        # Not that of TCPServer, which creates a socket: the unit allows none of the internet.
        socketserver.BaseServer.__init__(self, listener.getsockname(), _Handler)
        self.socket = listener
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()
        self.set_app(self._answer)
        self._application = application
        self._tls = tls
        self._room = room
        # The connection of each thread.
        self._connections = threading.local()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. A client of a unix socket has no address."""
        connection, address = super().get_request()
        return connection, address or ("", 0)

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
            self._room.has_acted()
            self._room.leave()

    def has_request(self) -> None:
        """Record that the request of this thread's connection has arrived."""
        self._room.has_acted()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        reply = self._application(environ, start_response)
        self._room.wait_for_client(self._connections.own, time.monotonic() + _READING_S + _CLIENT_S)
        return reply

    def service_actions(self) -> None:
        """Interrupt clients that are too slow."""
        self._room.interrupt_late()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer the request, after the handshake of TLS."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        until = self._room.until()
        request.settimeout(_CLIENT_S)
        # The time-out is that of the whole handshake.
        with self._tls.wrap_socket(request, server_side=True) as secured:
            self._connections.own = secured
            self._room.wait_for_client(secured, until)
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log the failure of a connection."""
        if isinstance(sys.exc_info()[1], OSError):
            log.debug("a connection failed: %s", sys.exc_info()[1])
        else:
            log.exception("a request failed")


def tls_context(certfile: str, keyfile: str | None, client_cafile: str | None) -> ssl.SSLContext:
    """Return the context of a server; with ``client_cafile``, clients need a certificate that it signed.

    Raises OSError that names the file.
    """
    context, file = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certfile
    try:
        context.load_cert_chain(certfile, keyfile)
        if client_cafile is not None:
            file = client_cafile
            context.load_verify_locations(client_cafile)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise OSError(
            f"cannot use the certificate {file}, or its key: {error.strerror or error}. Check that the files are in "
            "PEM, and name the key with --keyfile if it is in another file"
        ) from error
    return context
