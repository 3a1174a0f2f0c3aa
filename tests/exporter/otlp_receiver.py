# SPDX-License-Identifier: Apache-2.0
"""A receiver of OTLP, over real HTTP and real gRPC, that decodes the messages, and adds up what it has got."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

Attributes = frozenset[tuple[str, str | int]]


@dataclass(frozen=True, slots=True)
class Point:
    """A point as it was received. ``temporality``: "" for a gauge."""

    resource: Attributes
    name: str
    unit: str
    attributes: Attributes
    temporality: str
    start_ns: int
    time_ns: int
    value: int | float

    @property
    def stream(self) -> tuple[Attributes, str, Attributes]:
        return self.resource, self.name, self.attributes

    def of(self, name: str) -> str | int | None:
        """Return an attribute of the point or of its resource."""
        return {**dict(self.resource), **dict(self.attributes)}.get(name)


class Received:
    """The points that a receiver has accepted. ``accepts`` is called for each message, and can refuse it.

    ``refuses`` is called with the points of each message, and can refuse it. ``reply`` is the reply to one that is
    accepted.
    """

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.points: list[Point] = []
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.accepts: Callable[[], bool] = lambda: True
        self.refuses: Callable[[list[Point]], bool] = lambda _: False
        self.reply = ExportMetricsServiceResponse()

    def receive(self, request: ExportMetricsServiceRequest, headers: dict[str, str]) -> bool:
        """Keep the points of a message, unless it is refused. Return whether it was accepted."""
        with self.guard:
            self.requests += 1
            self.headers.append(headers)
            points = list(decoded(request))
            if not self.accepts() or self.refuses(points):
                return False
            self.points += points
            return True

    def all(self, name: str = "", **attributes: str | int) -> list[Point]:
        """Return the points of a metric with these attributes, which have "_" in the place of "."."""
        wanted = {of.replace("_", "."): value for of, value in attributes.items()}
        with self.guard:
            return [
                one
                for one in self.points
                if (not name or one.name == name) and all(one.of(key) == value for key, value in wanted.items())
            ]

    def used(self, name: str, **attributes: str | int) -> Decimal:
        """Return the use that a backend adds up: the last point of each stream and start, or all deltas."""
        found = self.all(name, **attributes)
        if any(one.temporality == "delta" for one in found):
            assert {one.temporality for one in found} == {"delta"}
            return sum((Decimal(one.value) for one in found), Decimal(0))
        last = {(one.stream, one.start_ns): Decimal(one.value) for one in sorted(found, key=lambda of: of.time_ns)}
        return sum(last.values(), Decimal(0))


def decoded(request: ExportMetricsServiceRequest) -> Iterator[Point]:
    """Return all points of a message."""
    for of_resource in request.resource_metrics:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                kind = metric.WhichOneof("data")
                data = metric.sum if kind == "sum" else metric.gauge
                assert kind in ("sum", "gauge")
                temporality = ""
                if kind == "sum":
                    assert metric.sum.is_monotonic
                    word = AggregationTemporality.Name(metric.sum.aggregation_temporality)
                    temporality = word.rpartition("_")[2].lower()
                for point in data.data_points:
                    value = point.as_int if point.WhichOneof("value") == "as_int" else point.as_double
                    yield Point(
                        resource,
                        metric.name,
                        metric.unit,
                        _attributes(point.attributes),
                        temporality,
                        point.start_time_unix_nano,
                        point.time_unix_nano,
                        value,
                    )


def _attributes(found: Any) -> Attributes:
    def value(of: KeyValue) -> str | int:
        return of.value.string_value if of.value.HasField("string_value") else of.value.int_value

    pairs = [(of.key, value(of)) for of in found]
    assert len(pairs) == len(dict(pairs))
    return frozenset(pairs)


class _Handler(http.server.BaseHTTPRequestHandler):
    received: Received

    def do_POST(self) -> None:
        assert self.path == "/v1/metrics"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        request = ExportMetricsServiceRequest.FromString(body)
        is_accepted = self.received.receive(request, {name.lower(): text for name, text in self.headers.items()})
        # 400 is not tried again by the SDK itself: the next push does.
        self.send_response(200 if is_accepted else 400)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        if is_accepted:
            self.wfile.write(self.received.reply.SerializeToString())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def over_http(tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, Received]]:
    """Run a receiver over HTTP. Return its address, and what it receives."""
    received = Received()
    handler = type("Handler", (_Handler,), {"received": received})
    with _HttpServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            place = "http://127.0.0.1" if tls is None else "https://localhost"
            yield f"{place}:{server.server_address[1]}", received
        finally:
            server.shutdown()
            thread.join()


class _HttpServer(http.server.ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that ends the connection, as one does that does not accept the certificate."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Servicer(MetricsServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> ExportMetricsServiceResponse:  # noqa: N802
        headers = {of.key: of.value for of in context.invocation_metadata()}
        if not self._received.receive(request, headers):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the receiver was told to refuse it")
        return self._received.reply


@contextlib.contextmanager
def over_grpc() -> Iterator[tuple[str, Received]]:
    """Run a receiver over gRPC. Return its address, and what it receives."""
    received = Received()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_MetricsServiceServicer_to_server(Servicer(received), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}", received
        finally:
            server.stop(None).wait()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Return the address of a receiver that accepts connections, and never reads or answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def answering(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Run a server over HTTP that reads each message, and answers as ``answer`` does. Return its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(ConnectionError):
                answer(self)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
