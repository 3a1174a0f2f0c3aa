# SPDX-License-Identifier: Apache-2.0
"""A refused resource keeps no other back, and only what the receiver has accepted is taken for accepted."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import itertools
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import requests
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceResponse,
)

from resctrlmond.exporter.otlp.ledger import Temporality
from resctrlmond.exporter.otlp.points import Name, Part, Point
from resctrlmond.exporter.otlp.replies import Replies, Session
from resctrlmond.exporter.otlp.sender import Protocol, Sender, SendFailure
from tests.exporter.conftest import Machine
from tests.exporter.otlp_receiver import Point as Got
from tests.exporter.otlp_receiver import Received, answering, over_grpc, over_http, silent
from tests.exporter.test_otlp import pushes, pushing
from tests.wait import wait_until

Handler = http.server.BaseHTTPRequestHandler


@pytest.fixture(params=list(Protocol))
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return Protocol(request.param)


@pytest.fixture
def receiver(protocol: Protocol) -> Iterator[tuple[str, Received]]:
    with over_grpc() if protocol is Protocol.GRPC else over_http() as found:
        yield found


def part(key: str = "k") -> Part:
    point = Point(Name("resctrl.workload.core_energy", "J", ""), {}, 1, 2, 1.5)
    return Part({"resctrl.workload.key": key}, [point])


@contextlib.contextmanager
def full_backlog() -> Iterator[tuple[str, int]]:
    """Return an address to which a connection is neither opened nor refused: its queue is full (listen(2))."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        yield address


def has_key(*keys: str) -> Callable[[list[Got]], bool]:
    return lambda points: any(one.of("resctrl.workload.key") in keys for one in points)


@pytest.mark.parametrize("temporality", Temporality)
def test_refused_resource_keeps_no_other_back(
    machine: Machine, protocol: Protocol, receiver: tuple[str, Received], temporality: Temporality
) -> None:
    url, received = receiver
    machine.start()
    keys = [f"k{number}" for number in range(9)]
    for key in keys:
        machine.call("Create", key=key, claim="me")
    received.refuses = has_key("k3", "k7")
    options = ["--otlp-protocol", protocol, "--otlp-temporality", temporality]
    options += ["--otlp-state", str(machine.top / "state")]
    with pushing(machine, url, *options) as exporter:
        accepted = set(keys) - {"k3", "k7"}
        wait_until(lambda: accepted <= {one.of("resctrl.workload.key") for one in received.all()})
        assert received.all("resctrl.up")
        wait_until(lambda: all(f"figures of {key}:" in exporter.log.read_text() for key in ("k3", "k7")))
        pushes(received, 20)
        log = exporter.log.read_text()
        assert log.count("does not accept the figures of k3") == 1
        assert "cannot push to" not in log
        received.refuses = lambda _: False
        wait_until(lambda: received.all(resctrl_workload_key="k3") and received.all(resctrl_workload_key="k7"))


def test_receiver_that_refuses_everything_gets_few_messages(machine: Machine) -> None:
    machine.start()
    for number in range(40):
        machine.call("Create", key=f"k{number}", claim="me")
    with over_http() as (url, received):
        received.accepts = lambda: False
        with pushing(machine, url, "--interval", "3600") as exporter:
            wait_until(lambda: "cannot push to" in exporter.log.read_text())
            assert received.requests <= 1 + 2 * 8
            before = received.requests
            assert exporter.stop() == 0
            assert received.requests <= before + 1 + 2 * 8


def test_points_that_the_receiver_rejects_are_logged_once(
    protocol: Protocol, receiver: tuple[str, Received], caplog: pytest.LogCaptureFixture
) -> None:
    """The protocol forbids to send them again, and the SDK ignores them."""
    url, received = receiver
    sender = Sender(url, protocol, Temporality.CUMULATIVE)
    partial = ExportMetricsPartialSuccess(rejected_data_points=7, error_message="too \x1b[31mold")
    received.reply = ExportMetricsServiceResponse(partial_success=partial)
    for _ in range(2):
        assert sender.send([part()]) is None
    assert caplog.text.count("has rejected 7 points of a message: too [31mold") == 1
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirect_is_not_taken_for_success(status: int) -> None:
    """The SDK reports success, although nothing has got the points."""

    def redirect(request: Handler) -> None:
        request.send_response(status)
        request.send_header("Location", "https://elsewhere/v1/metrics")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with answering(redirect) as url:
        failure = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()])
    assert failure is not None
    assert "redirects to https://elsewhere/v1/metrics" in failure.reason


def test_reply_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply_for_ever(request: Handler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(4096):
            request.wfile.write(b"x" * 65536)

    with answering(reply_for_ever) as url:
        failure = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()])
    assert failure is not None
    assert "its reply is longer than" in failure.reason


TRICKLES = {"headers": b"HTTP/1.1 200 OK\r\nX-", "interim": b"", "error": b"HTTP/1.1 503 Busy\r\n\r\n"}


@pytest.mark.parametrize("part_of_reply", TRICKLES)
def test_reply_that_trickles_does_not_stop_the_pushes(monkeypatch: pytest.MonkeyPatch, part_of_reply: str) -> None:
    """Each read of the connection is in time, but not the reply."""
    is_over = threading.Event()
    piece = b"HTTP/1.1 100 Continue\r\n\r\n" if part_of_reply == "interim" else b"x"

    def trickle(request: Handler) -> None:
        request.wfile.write(TRICKLES[part_of_reply])
        while not is_over.wait(0.05):
            request.wfile.write(piece)

    done: list[SendFailure | None] = []
    # Longer at the next attempt if the machine was too slow for the status to arrive within the time.
    for limit_s in (1, 10):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(limit_s))
        is_over.clear()
        with answering(trickle) as url:
            sender = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
            pushed = threading.Thread(target=lambda sender=sender: done.append(sender.send([part()])), daemon=True)
            pushed.start()
            pushed.join(60)
            is_in_time = not pushed.is_alive()
            is_over.set()
        assert is_in_time
        if (done[-1] is None) == (part_of_reply == "headers"):
            break
    # The status has arrived: a delta must not be sent again.
    assert (done[-1] is None) == (part_of_reply == "headers")


def test_time_that_passed_while_connecting_does_not_let_a_reply_trickle_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first address of the host does not answer, and a connection has no socket until it is open."""
    is_over = threading.Event()

    def trickle(request: Handler) -> None:
        while not is_over.wait(0.05):
            request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    done: list[BaseException] = []
    with answering(trickle) as url, full_backlog() as address:
        port = urllib.parse.urlsplit(url).port
        places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", of) for of in (address, ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)

        def post() -> None:
            try:
                Session(Replies(lambda _: None, 0.5)).post(url, b"x", timeout=3600)
            except requests.RequestException as error:
                done.append(error)

        posted = threading.Thread(target=post, daemon=True)
        posted.start()
        posted.join(60)
        is_in_time = not posted.is_alive()
        is_over.set()
    assert is_in_time
    assert "it did not answer within 0.5 s" in str(done)


def test_time_limit_of_a_request_does_not_depend_on_the_clock() -> None:
    """The SDK derives a time-out of an hour if the clock is set back by an hour during a push."""
    with silent() as url, pytest.raises(requests.ReadTimeout, match=r"it did not answer within 0.5 s"):
        Session(Replies(lambda _: None, 0.5)).post(url, b"x", timeout=3600)


def test_attempt_without_time_leaves_the_reason_of_the_one_before() -> None:
    """The SDK tries again until the end of the time: the last attempt can have none, which urllib3 refuses."""

    def busy(request: Handler) -> None:
        request.send_response(503, "Out of disk")
        request.send_header("Content-Length", "0")
        request.end_headers()

    replies = Replies(lambda _: None, 60)
    with answering(busy) as url:
        Session(replies).post(url, b"x", timeout=60.0)
        with pytest.raises(ValueError, match="timeout"):
            Session(replies).post(url, b"x", timeout=0.0)
    assert replies.failure == "it answered 503 Out of disk"


@pytest.mark.parametrize("reply", [b"Content-Length: 99\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n9\r\nabc"])
def test_message_is_accepted_although_the_rest_of_the_reply_is_lost(reply: bytes) -> None:
    """A delta would be counted twice."""

    def cut_off(request: Handler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n" + reply)
        request.close_connection = True

    with answering(cut_off) as url:
        assert Sender(url, Protocol.HTTP, Temporality.DELTA).send([part()]) is None


def test_reply_is_not_decompressed() -> None:
    """Some bytes can become some GB: three times compressed, for example."""
    bomb, asked = gzip.compress(gzip.compress(bytes(1 << 24))), []

    def answer(request: Handler) -> None:
        asked.append(request.headers["Accept-Encoding"])
        request.send_response(200)
        request.send_header("Content-Type", "application/x-protobuf")
        request.send_header("Content-Encoding", "gzip, gzip")
        request.send_header("Content-Length", str(len(bomb)))
        request.end_headers()
        request.wfile.write(bomb)

    with answering(answer) as url:
        # Decompressed, it would be longer than a reply may be.
        assert Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()]) is None
    assert asked == ["identity"]


def test_failure_names_the_status_or_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK logs "timeout, max retries or shutdown"."""

    def busy(request: Handler) -> None:
        request.send_response(503, "Out of disk")
        request.send_header("Retry-After", "1000000000")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with answering(busy) as url:
        failure = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()])
    assert failure == SendFailure("it answered 503 Out of disk", is_refusal=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with silent() as url:
        failure = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()])
    assert failure == SendFailure("it did not answer within 0.5 s", is_refusal=False)


@pytest.mark.parametrize(("status", "is_refusal"), [(400, True), (413, True), (401, False), (404, False)])
def test_status_of_a_refusal(status: int, is_refusal: bool) -> None:
    def refuse(request: Handler) -> None:
        request.send_response(status, "because \x07 of this")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with answering(refuse) as url:
        failure = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()])
    assert isinstance(failure, SendFailure)
    assert failure.is_refusal == is_refusal
    assert "because  of this" in failure.reason


def test_busy_receiver_with_a_long_pause_is_left_alone() -> None:
    counter = itertools.count()

    def busy(request: Handler) -> None:
        next(counter)
        request.send_response(429)
        request.send_header("Retry-After", "3600")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with answering(busy) as url:
        failure = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()])
    assert failure is not None
    assert not failure.is_refusal
    assert next(counter) == 1


def test_reply_that_is_not_of_otlp_is_accepted() -> None:
    """Some receivers answer with an empty text or JSON, whatever the request was."""

    def answer(request: Handler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/x-protobuf")
        request.end_headers()
        request.wfile.write(b"\xff\xff\xff")

    with answering(answer) as url:
        assert Sender(url, Protocol.HTTP, Temporality.CUMULATIVE).send([part()]) is None


def test_reply_over_grpc_that_is_not_of_otlp_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """The status is success. As a refusal, the message would be divided, and its deltas sent and counted again."""
    export = grpc.unary_unary_rpc_method_handler(lambda *_: b"\xff\xff\xff")
    service = "opentelemetry.proto.collector.metrics.v1.MetricsService"
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Export": export})])
        url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            assert Sender(url, Protocol.GRPC, Temporality.DELTA).send([part()]) is None
        finally:
            server.stop(None).wait()
    assert "Traceback" not in caplog.text


def test_every_failure_over_grpc_has_its_reason() -> None:
    """The SDK does not log a message that it has logged in the last seconds, whatever its details are."""
    with over_grpc() as (url, received):
        received.accepts = lambda: False
        sender = Sender(url, Protocol.GRPC, Temporality.CUMULATIVE)
        reasons = [failure.reason for _ in range(2) if (failure := sender.send([part()])) is not None]
    assert reasons == ["INVALID_ARGUMENT: the receiver was told to refuse it"] * 2
