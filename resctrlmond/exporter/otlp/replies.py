# SPDX-License-Identifier: Apache-2.0
"""Check the replies of a receiver: the SDK takes a redirect for success, and reads without a limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

# A reply has some hundred bytes.
_MAX_REPLY = 64 * 1024
_PROTOBUF = "application/x-protobuf"

# The answers to a message that the receiver will not accept later either: it is wrong or too large. Some take a wrong
# value for an error of their own.
_REFUSALS = frozenset({400, 413, 422, 500})
_GRPC_REFUSALS = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "INTERNAL"})


class Replies:
    """The answer of the receiver to the last message. ``report`` is called with each decoded reply."""

    def __init__(self, report: Callable[[ExportMetricsServiceResponse], None]) -> None:
        self.report = report
        self.is_refusal = False


class Stub:
    """A stub of gRPC that keeps the replies."""

    def __init__(self, stub: Any, replies: Replies) -> None:
        self._stub = stub
        self._replies = replies

    def Export(self, **arguments: Any) -> ExportMetricsServiceResponse:  # noqa: N802 - the name of the method
        """Send a message. Raises grpc.RpcError."""
        try:
            reply: ExportMetricsServiceResponse = self._stub.Export(**arguments)
        except Exception as error:
            code = error.code() if hasattr(error, "code") else None
            self._replies.is_refusal = getattr(code, "name", "") in _GRPC_REFUSALS
            raise
        self._replies.report(reply)
        return reply


class Session(requests.Session):
    """A session that keeps the replies, and refuses redirects and replies that are too long or too slow."""

    def __init__(self, replies: Replies) -> None:
        super().__init__()
        self._replies = replies

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send a request, and return the reply, whose text has arrived. Raises RequestException."""
        self._replies.is_refusal = False
        begun, limit_s = time.monotonic(), options.get("timeout")
        response = super().send(request, **{**options, "stream": True, "allow_redirects": False})
        with response:
            if 300 <= response.status_code < 400:
                place = response.headers.get("Location", "another address")
                raise requests.TooManyRedirects(f"it redirects to {place}: if that is the receiver, set its address")
            data = bytearray()
            # One byte at a time, which the connection buffers: a larger read waits until all of it has arrived.
            for byte in response.iter_content(1):
                data += byte
                if len(data) > _MAX_REPLY:
                    raise requests.RequestException(f"its reply is longer than {_MAX_REPLY} bytes")
                if isinstance(limit_s, int | float) and time.monotonic() - begun > limit_s:
                    raise requests.ReadTimeout("its reply did not arrive as a whole in time")
        self._replies.is_refusal = response.status_code in _REFUSALS
        # As requests keeps it.
        response._content = bytes(data)
        if response.ok and response.headers.get("Content-Type", "").partition(";")[0].strip() == _PROTOBUF:
            # Whatever it is, the receiver has accepted the message.
            with contextlib.suppress(DecodeError):
                self._replies.report(ExportMetricsServiceResponse.FromString(bytes(data)))
        return response
