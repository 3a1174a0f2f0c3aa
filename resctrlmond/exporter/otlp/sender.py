# SPDX-License-Identifier: Apache-2.0
"""Send points with the exporters of OpenTelemetry's SDK, which is imported here only: Debian 13 does not have it."""

from __future__ import annotations

import enum
import logging
import os
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from resctrlmond import __version__
from resctrlmond.exporter.otlp import tls
from resctrlmond.exporter.otlp.figures import Attributes
from resctrlmond.exporter.otlp.ledger import Temporality
from resctrlmond.exporter.otlp.points import Name, Part, Point
from resctrlmond.exporter.otlp.replies import Channel, Replies, Session, Stub
from resctrlmond.workloads.model.validation import reason_text

log = logging.getLogger(__name__)

_TEMPORALITIES = {
    Temporality.CUMULATIVE: AggregationTemporality.CUMULATIVE,
    Temporality.DELTA: AggregationTemporality.DELTA,
}
_SCOPE = InstrumentationScope("resctrlmond.exporter", __version__)
_PATH = "/v1/metrics"
_CREDENTIAL_PROVIDERS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_METRICS_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)
# The time-out of a push, and its default: those of the SDK.
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_TIMEOUT_S = 10.0
# The SDK reads an address for metrics only, and a base address.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Protocol(enum.StrEnum):
    """The transport, in the words of OTEL_EXPORTER_OTLP_PROTOCOL."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


_DEFAULTS = {Protocol.HTTP: "http://localhost:4318", Protocol.GRPC: "http://localhost:4317"}


class _LastMessages(logging.Handler):
    """Keeps the last warning and the last error of the SDK: its exporters return no reason for a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: dict[int, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of the record."""
        self._texts[min(record.levelno, logging.ERROR)] = record.getMessage()

    def clear(self) -> None:
        """Forget all messages."""
        self._texts.clear()

    def text(self) -> str:
        """Return the reason of a failure. That of the last attempt is a warning, unless there was only one."""
        found = self._texts.get(logging.WARNING) or self._texts.get(logging.ERROR) or "no reason was given"
        return found.rstrip(".")


class SendFailure(NamedTuple):
    """Why a message was not accepted. ``is_refusal``: the receiver does not accept this message, but may others."""

    reason: str
    is_refusal: bool


class Sender:
    """Sends to the receiver at ``url``, or at that of the environment. Headers and TLS are those of the environment.

    Raises ImportError if the exporter of the protocol is not installed, and ValueError for a setting in the
    environment that the SDK does not accept.
    """

    def __init__(self, url: str | None, protocol: Protocol, temporality: Temporality) -> None:
        from_environment = next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
        self.url = without_user(url or from_environment or _DEFAULTS[protocol])
        self._temporality = _TEMPORALITIES[temporality]
        self._messages = _LastMessages()
        sdk = logging.getLogger("opentelemetry")
        sdk.addHandler(self._messages)
        # A failure is reported once, not at each attempt.
        sdk.propagate = False
        # It logs each reply with a wrong header, and a traceback.
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._attributes: Attributes = {
            name: value
            for name, value in OTELResourceDetector().detect().attributes.items()
            if isinstance(value, str)
        }
        self._rejected = ""
        timeout = next(filter(None, map(os.environ.get, _TIMEOUTS)), None)
        self._replies = Replies(self._report, float(timeout or _TIMEOUT_S))
        tls.check_files(needs_key=protocol is Protocol.GRPC)
        self._exporter = _exporter(url, protocol, self._replies)

    @property
    def attributes(self) -> Attributes:
        """Return the attributes of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, which each resource gets."""
        return self._attributes

    def send(self, parts: Iterable[Part]) -> SendFailure | None:
        """Send the points of some resources in one message. Return why the receiver did not accept it, or None."""
        self._messages.clear()
        self._replies.clear()
        data = MetricsData([self._resource(*one) for one in _merged(parts)])
        try:
            result = self._exporter.export(data)
        except Exception as error:  # the SDK does not catch all of those of its libraries
            reason = f"{type(error).__name__}: {error}"
        else:
            if result is MetricExportResult.SUCCESS:
                return None
            reason = self._replies.failure or self._messages.text()
        return SendFailure(reason_text(reason), self._replies.is_refusal)

    def _report(self, reply: ExportMetricsServiceResponse) -> None:
        """Log which points the receiver has rejected, when its reason changes. They must not be sent again."""
        found = reply.partial_success
        if not found.rejected_data_points and not found.error_message:
            return
        reason = reason_text(found.error_message) or "no reason was given"
        if reason != self._rejected:
            log.warning("%s has rejected %d points of a message: %s", self.url, found.rejected_data_points, reason)
        self._rejected = reason

    def _resource(self, attributes: Attributes, points: Iterable[Point]) -> ResourceMetrics:
        by_metric: dict[tuple[Name, bool], list[NumberDataPoint]] = {}
        for point in points:
            found = NumberDataPoint(dict(point.attributes), point.start_ns or 0, point.time_ns, point.value)
            by_metric.setdefault((point.metric, point.start_ns is None), []).append(found)
        metrics = [
            Metric(name.name, name.text, name.unit, Gauge(found) if is_gauge else self._sum(found))
            for (name, is_gauge), found in by_metric.items()
        ]
        return ResourceMetrics(Resource(dict(attributes)), [ScopeMetrics(_SCOPE, metrics, "")], "")

    def _sum(self, points: Sequence[NumberDataPoint]) -> Sum:
        return Sum(points, self._temporality, is_monotonic=True)


def _merged(parts: Iterable[Part]) -> Iterable[tuple[Attributes, list[Point]]]:
    """Return the points of each resource: the SDK sends only one of two resources that are equal."""
    merged: dict[tuple[tuple[str, str | int], ...], list[Point]] = {}
    for part in parts:
        merged.setdefault(tuple(sorted(part.attributes.items())), []).extend(part.points)
    return [(dict(attributes), points) for attributes, points in merged.items()]


def _exporter(url: str | None, protocol: Protocol, replies: Replies) -> MetricExporter:
    if protocol is Protocol.GRPC:
        # It writes three lines for each attempt to connect that fails.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415 - one of two is imported
            OTLPMetricExporter as OverGrpc,
        )
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (  # noqa: PLC0415
            MetricsServiceStub,
        )

        class Reporter(OverGrpc):
            """Has a stub that reports the replies. The SDK creates one again when the connection is lost."""

            def _initialize_channel_and_stub(self) -> None:
                super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
                stub = MetricsServiceStub(Channel(self._channel))  # type: ignore[no-untyped-call]
                self._client = Stub(stub, replies)  # type: ignore[assignment]

        return Reporter(endpoint=url)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter as OverHttp,
    )

    # A provider of credentials has a session of its own.
    has_provider = any(os.environ.get(name) for name in _CREDENTIAL_PROVIDERS)
    session = None if has_provider else Session(replies)
    return OverHttp(endpoint=with_path(url) if url else None, session=session)


def with_path(url: str) -> str:
    """Return the address of metrics of a receiver: "/v1/metrics", if the address has no path."""
    parts = urllib.parse.urlsplit(url)
    return url if parts.path.strip("/") else urllib.parse.urlunsplit(parts._replace(path=_PATH))


def without_user(url: str) -> str:
    """Return the address without a user and a password, for messages."""
    scheme, slashes, rest = url.partition("//")
    place, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{place.rpartition('@')[2]}{slash}{path}"
