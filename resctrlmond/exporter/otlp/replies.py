# SPDX-License-Identifier: Apache-2.0
"""Check the replies of a receiver: the SDK takes a redirect for success, and reads without a limit."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager, ProxyManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from resctrlmond.exporter.otlp import tls

# A reply has some hundred bytes.
_MAX_REPLY = 64 * 1024
_PROTOBUF = "application/x-protobuf"
_AGAIN_S = 0.2

# The answers to a message that the receiver will not accept later either: it is wrong or too large. Some take a wrong
# value for an error of their own.
_REFUSALS = frozenset({400, 413, 422, 500})
_GRPC_REFUSALS = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "INTERNAL"})


class Replies:
    """The answer of the receiver to the last message. ``report`` is called with each decoded reply.

    ``limit_s``: the time for one request. The SDK derives a longer one if the clock is set back. ``failure``: why the
    last request of the message failed, where the SDK logs less.
    """

    def __init__(self, report: Callable[[ExportMetricsServiceResponse], None], limit_s: float) -> None:
        self.report = report
        self.limit_s = limit_s
        self.is_refusal = False
        self.failure = ""

    def clear(self) -> None:
        """Forget the answer to the message before."""
        self.is_refusal, self.failure = False, ""


class Channel:
    """A channel of gRPC. A reply that cannot be decoded becomes an empty one: the message was accepted."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return the function that calls a method."""
        return self._channel.unary_unary(*arguments, **{**options, "response_deserializer": _decoded})


def _decoded(data: bytes) -> ExportMetricsServiceResponse:
    try:
        return ExportMetricsServiceResponse.FromString(data)
    except DecodeError:
        return ExportMetricsServiceResponse()


class Stub:
    """A stub of gRPC that keeps the replies."""

    def __init__(self, stub: Any, replies: Replies) -> None:
        self._stub = stub
        self._replies = replies

    def Export(self, *, timeout: float, **arguments: Any) -> ExportMetricsServiceResponse:  # noqa: N802 - the method
        """Send a message. Raises grpc.RpcError."""
        try:
            reply: ExportMetricsServiceResponse = self._stub.Export(
                timeout=min(timeout, self._replies.limit_s), **arguments
            )
        except Exception as error:
            # Errors other than grpc.RpcError have neither.
            if hasattr(error, "code") and hasattr(error, "details"):
                code = error.code().name
                self._replies.is_refusal = code in _GRPC_REFUSALS
                # The SDK does not log a message again within some seconds, whatever the code is.
                # The last attempt may have had no time, and the one before had a reason.
                if code != "DEADLINE_EXCEEDED" or not self._replies.failure:
                    details = error.details() or "no reason was given"
                    self._replies.failure = f"{code}: {tls.reason_of_grpc(details)}"
            raise
        self._replies.report(reply)
        return reply


class _Interruptible:
    """A connection of urllib3 that names itself before each request."""

    sock: socket.socket | None
    current: Callable[[_Interruptible], None]

    def request(self, *arguments: Any, **options: Any) -> None:
        """Send a request."""
        self.current(self)
        super().request(*arguments, **options)  # type: ignore[misc]

    def interrupt(self) -> None:
        """Let the thread that waits for the receiver fail. Another thread may call this."""
        sock = self.sock
        if sock is not None:
            # Not the method of SSLSocket, which changes what the other thread uses.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Adapter(HTTPAdapter):
    """Uses connections that can be interrupted. ``current`` is called with the connection of each request."""

    def __init__(self, current: Callable[[_Interruptible], None]) -> None:
        members = {"current": staticmethod(current)}
        # The names are part of messages.
        plain = type("HTTPConnection", (_Interruptible, HTTPConnection), members)
        tls = type("HTTPSConnection", (_Interruptible, HTTPSConnection), members)
        self._pools = {
            "http": type("HTTPConnectionPool", (HTTPConnectionPool,), {"ConnectionCls": plain}),
            "https": type("HTTPSConnectionPool", (HTTPSConnectionPool,), {"ConnectionCls": tls}),
        }
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        """Create the pools of connections."""
        super().init_poolmanager(*arguments, **options)
        manager: PoolManager = self.poolmanager
        manager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> ProxyManager:
        """Return the pools of connections of a proxy."""
        manager: ProxyManager = super().proxy_manager_for(*arguments, **options)
        manager.pool_classes_by_scheme = self._pools
        return manager


class Session(requests.Session):
    """A session that keeps the replies, and refuses redirects and replies that are too long or too slow."""

    def __init__(self, replies: Replies) -> None:
        super().__init__()
        self._replies = replies
        self._connection: _Interruptible | None = None
        # A reply of some bytes may become some GB when it is decompressed.
        self.headers["Accept-Encoding"] = "identity"
        adapter = _Adapter(self._note)
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def merge_environment_settings(self, *arguments: Any, **options: Any) -> Any:
        """Return the settings of a request. REQUESTS_CA_BUNDLE does not replace the authority of the receiver."""
        found = super().merge_environment_settings(*arguments, **options)
        return found if self.verify is True else {**found, "verify": self.verify}

    def _note(self, connection: _Interruptible) -> None:
        self._connection = connection

    def _interrupt_after(self, limit_s: float, is_over: threading.Event) -> None:
        """Interrupt the request when its time is over, again and again: a connection that opens has no socket yet."""
        while not is_over.wait(limit_s):
            limit_s = _AGAIN_S
            connection = self._connection
            if connection is not None:
                connection.interrupt()

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send a request, and return the reply, whose text has arrived. Raises RequestException."""
        self._replies.is_refusal = False
        given = options.get("timeout")
        limit_s = min(given, self._replies.limit_s) if isinstance(given, int | float) else self._replies.limit_s
        options |= {"timeout": limit_s, "stream": True, "allow_redirects": False}
        begun = time.monotonic()
        # The time-out of a socket is that of each read: a receiver that sends one byte a second never exceeds it.
        is_over = threading.Event()
        threading.Thread(target=self._interrupt_after, args=(limit_s, is_over), name="limit", daemon=True).start()
        try:
            response = super().send(request, **options)
            with response:
                data = self._read(response, begun + limit_s)
        except requests.RequestException as error:
            if time.monotonic() - begun < limit_s:
                self._replies.failure = tls.reason(error, request.url or "")
                raise
            # The last attempt may have had no time, and the one before had a reason.
            self._replies.failure = self._replies.failure or f"it did not answer within {limit_s:.3g} s"
            raise requests.ReadTimeout(self._replies.failure) from error
        finally:
            is_over.set()
            self._connection = None
        self._replies.is_refusal = response.status_code in _REFUSALS
        if not response.ok:
            self._replies.failure = f"it answered {response.status_code} {response.reason}".rstrip()
        # As requests keeps it.
        response._content = data
        if response.ok and response.headers.get("Content-Type", "").partition(";")[0].strip() == _PROTOBUF:
            # Whatever it is, the receiver has accepted the message.
            self._replies.report(_decoded(data))
        return response

    def _read(self, response: requests.Response, until: float) -> bytes:
        """Return the text of a reply, as far as it arrives. Raises RequestException for a redirect or a long text."""
        if 300 <= response.status_code < 400:
            place = response.headers.get("Location", "another address")
            raise requests.TooManyRedirects(f"it redirects to {place}: if that is the receiver, set its address")
        data = bytearray()
        # The status says whether the message is accepted. If the rest is lost, a delta must not be sent again.
        with contextlib.suppress(HTTPError, OSError):
            # One byte at a time, which the connection buffers: a larger read waits until all of it has arrived.
            for byte in response.raw.stream(1, decode_content=False):
                data += byte
                # A connection that ends with the reply cannot be interrupted any more.
                if len(data) > _MAX_REPLY or time.monotonic() > until:
                    break
        if len(data) > _MAX_REPLY:
            raise requests.RequestException(f"its reply is longer than {_MAX_REPLY} bytes")
        return bytes(data)
