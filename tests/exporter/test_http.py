# SPDX-License-Identifier: Apache-2.0
"""HTTP: formats and compression, sockets of systemd and of options, TLS, and clients that do not behave."""

from __future__ import annotations

import contextlib
import errno
import gzip
import http.client
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from resctrlmond.exporter import collector, listening, server
from resctrlmond.exporter.failures import Failure
from resctrlmond.exporter.server import MAX_CONNECTIONS
from resctrlmond.exporter.source import Observation, Source
from resctrlmond.exporter.tls import server_context
from tests.exporter.conftest import OPENMETRICS, Exporter, Reply, request, reserved_port, start, start_all
from tests.wait import wait_until

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

# The header of Prometheus 3.5.
OF_PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Exporter]:
    """Return an exporter whose daemon is not there."""
    with contextlib.closing(Exporter(tmp_path, str(tmp_path / "none"))) as exporter:
        exporter.start()
        yield exporter


def test_client_chooses_the_format(alone: Exporter) -> None:
    for accept in (OPENMETRICS, OF_PROMETHEUS):
        reply = alone.get(accept=accept)
        # prometheus-client 0.22 and later add how names are escaped.
        kind, *parameters = reply.headers["Content-Type"].split("; ")
        assert (kind, parameters[:2]) == ("application/openmetrics-text", ["version=1.0.0", "charset=utf-8"])
        assert reply.text.endswith("# EOF\n")
    for accept in ("*/*", "text/plain", ""):
        reply = alone.get(accept=accept)
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "resctrlmond_up" in {family.name for family in text_string_to_metric_families(reply.text)}


def test_reply_is_compressed_for_a_client_that_accepts_it(alone: Exporter) -> None:
    plain, packed = alone.get(), alone.get(accept_encoding="gzip")
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert "resctrlmond_up 0.0" in gzip.decompress(packed.body).decode()
    for reply in (plain, packed):
        assert int(reply.headers["Content-Length"]) == len(reply.body)


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("deflate, GZIP", True),
        ("gzip;q=0.5, *;q=0", True),
        ("gzip;q=0", False),
        ("identity, gzip ; Q=0.000", False),
        ("gzipped, x-gzip;q=1", False),
        ("gzip;q=\xe9;;=", True),
    ],
    ids=ascii,
)
def test_reply_is_not_compressed_for_a_client_that_refuses_it(
    alone: Exporter, accepted: str, is_compressed: bool
) -> None:
    """A weight of 0 means "not acceptable" (RFC 9110, 12.4.2)."""
    reply = alone.get(accept_encoding=accepted)
    assert ("Content-Encoding" in reply.headers) == is_compressed
    text = gzip.decompress(reply.body) if is_compressed else reply.body
    assert b"resctrlmond_up 0.0" in text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/metrics", 200),
        ("/metrics/", 404),
        ("/etc/passwd", 404),
        ("http://localhost/metrics", 200),
        ("HTTPS://[::1]:10133/metrics?a=b", 200),
        ("http://localhost", 200),
        ("ftp://localhost/metrics", 404),
    ],
)
def test_paths(alone: Exporter, path: str, status: int) -> None:
    assert alone.get(path).status == status


def test_only_get_is_allowed(alone: Exporter) -> None:
    connection = socket.socket(socket.AF_UNIX)
    with connection:
        connection.connect(alone.path)
        connection.sendall(b"POST /metrics HTTP/1.0\r\n\r\n")
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.0 405")


def test_connections_without_requests_do_not_prevent_scrapes(alone: Exporter) -> None:
    """Each user of the host can open them. The unit limits the threads."""
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(MAX_CONNECTIONS)]
        for connection in waiting:
            connection.connect(alone.path)
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert alone.get("/").status == 200
        # The one that has waited longest is closed, before the end of its time.
        wait_until(lambda: select.select(waiting[:1], [], [], 0)[0])
    wait_until(lambda: _status(alone) == 200)


@contextlib.contextmanager
def served(listener: socket.socket, reply: Callable[[], bytes], room: server.Room) -> Iterator[None]:
    """Serve a reply to each request."""

    def application(_environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        body = reply()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    with server.Server(listener, application, room) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield
        finally:
            serving.shutdown()
            thread.join()


@pytest.mark.parametrize("failure", [Failure.SLOW, Failure.CLOSED])
def test_reply_that_a_client_does_not_read_is_counted_and_logged_in_one_line(
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    failure: Failure,
) -> None:
    if failure is Failure.SLOW:
        monkeypatch.setattr(server._Handler, "timeout", 1)
    room = server.Room(2)
    address = listener.getsockname()
    with served(listener, lambda: b"x" * 16_000_000, room), socket.create_connection(address) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(1)
        if failure is Failure.CLOSED:
            client.close()
        wait_until(lambda: room.failures.counts()[failure] == 1)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("address", [None, "path", "\0abstract-of-a-client"])
def test_client_of_a_unix_socket_is_logged_by_its_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, address: str | None
) -> None:
    """The log had the first character of the path to which the client had bound its socket: "from /"."""
    path, room = str(tmp_path / "socket"), server.Room(2)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        if address is not None:
            client.bind(address if address.startswith("\0") else str(tmp_path / address))
        with served(listener, lambda: b"x" * 16_000_000, room):
            client.connect(path)
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(1)
            client.close()
            wait_until(lambda: room.failures.counts()[Failure.CLOSED] == 1)
    assert f"a connection from process {os.getpid()} of uid {os.getuid()} got no reply: it failed" in caplog.text


def test_clients_that_do_not_read_do_not_prevent_scrapes(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_READING_S", 0.0)
    monkeypatch.setattr(server._Handler, "timeout", 3600)
    replies: list[None] = []
    body, port = b"x" * 16_000_000, listener.getsockname()[1]

    def reply() -> bytes:
        replies.append(None)
        return body

    with contextlib.ExitStack() as stack:
        stack.enter_context(served(listener, reply, server.Room(3)))
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        for connection in silent:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        wait_until(lambda: len(replies) == 3)
        assert request(http.client.HTTPConnection("127.0.0.1", port, timeout=60)).body == body


def test_client_that_reads_at_once_keeps_its_place(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while other clients connect again and again."""
    monkeypatch.setattr(server, "_READING_S", 3600.0)
    is_called, body, port = threading.Event(), b"x" * 16_000_000, listener.getsockname()[1]

    def reply() -> bytes:
        is_called.set()
        return body

    with (
        served(listener, reply, server.Room(1)),
        socket.create_connection(("127.0.0.1", port)) as first,
        first.makefile("rb") as file,
    ):
        first.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        is_called.wait()
        assert file.readline().startswith(b"HTTP/1.0 200")
        with socket.create_connection(("127.0.0.1", port)) as further:
            assert further.recv(1) == b""
        assert file.read().endswith(body)


def test_scrapes_that_wait_for_the_daemon_keep_their_places(listener: socket.socket) -> None:
    is_called, may_reply, port = threading.Event(), threading.Event(), listener.getsockname()[1]

    def reply() -> bytes:
        is_called.set()
        may_reply.wait()
        return b"figures"

    with served(listener, reply, server.Room(1)), socket.create_connection(("127.0.0.1", port)) as first:
        first.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        is_called.wait()
        with socket.create_connection(("127.0.0.1", port)) as further:
            assert further.recv(1) == b""
        may_reply.set()
        assert first.makefile("rb").read().endswith(b"figures")


def test_request_that_ends_early_does_not_read_from_the_daemon(listener: socket.socket) -> None:
    """Python takes the end of the connection for the end of the headers."""
    port, room = listener.getsockname()[1], server.Room(1)
    with served(listener, lambda: b"figures", room), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: y\r\n")
        client.shutdown(socket.SHUT_WR)
        assert b"figures" not in client.makefile("rb").read()


def peak_kib(pid: int) -> int:
    """Return the most memory that a process had at once."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def test_large_requests_take_little_memory(alone: Exporter) -> None:
    """With 100 headers of 64 KiB, the largest that Python accepts, a client could end the exporter by MemoryMax=."""
    assert alone.get("/").status == 200
    before = peak_kib(alone.pid)
    headers = b"".join(b"X-%d: " % number + b"x" * 60_000 + b"\r\n" for number in range(90))

    def send() -> None:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(alone.path)
            connection.sendall(b"GET / HTTP/1.1\r\n" + headers + b"\r\n")
            connection.recv(1)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone.get("/").status == 200
    assert peak_kib(alone.pid) - before < 20_000


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=x",
        "text/plain;version=1.x",
        "text/plain;version=" + "9" * 5000,
        "application/openmetrics-text;version=1.0.0\x01",
        "application/openmetrics-text;version=9.\xe9",
        "application/openmetrics-text;version=1.0.0\x85x",
    ],
    ids=ascii,
)
def test_format_that_cannot_be_parsed_is_that_of_prometheus(alone: Exporter, accept: str) -> None:
    """A failure would also log a traceback for each request, and each user of the host can send requests."""
    reply = alone.get(accept=accept)
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "Traceback" not in alone.log.read_text()


class _Unchanged(Source):
    """A source that returns the same reading again."""

    def __init__(self) -> None:
        super().__init__("/nowhere", 1.0)
        self.found = Observation()

    def observe(self, wait_s: float) -> Observation:
        return self.found


def test_scrapes_that_share_a_reading_share_its_conversion() -> None:
    """One takes 0.2 s for 500 workloads, and each user of the host can send as many requests as there are places."""
    source = _Unchanged()
    exporter = collector.Exporter(source)
    application = server.Application(exporter, 1.0)

    def failures(accept: str) -> bytes:
        """Scrape, and let a connection fail, which the next conversion shows. Return those that the scrape shows."""
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": accept}
        (body,) = application(environ, lambda *_: lambda _: None)
        exporter.failures.add(Failure.TLS, "test")
        return next(line for line in body.splitlines() if b'failed_total{reason="tls"}' in line).split()[1]

    versions = [f"application/openmetrics-text;version=1.0.{number}" for number in range(3)]
    assert [failures(accept) for accept in ("", *versions, "text/plain")] == [b"0.0", b"1.0", b"1.0", b"1.0", b"0.0"]
    # As of a scrape that does not wait for the rest of the reading.
    source.found = replace(source.found, duration_s=1.0)
    assert failures("") == b"0.0"
    source.found = replace(source.found, errors={"Sums": "it is late"})
    assert failures("") == b"6.0"
    # It does not displace the text of the whole reading.
    source.found = replace(source.found, errors={})
    assert failures("") == b"0.0"
    source.found = Observation()
    assert failures("") == b"8.0"


def _status(exporter: Exporter) -> int:
    try:
        return exporter.get("/").status
    except OSError:
        return 0
    except http.client.HTTPException:
        return 0


@pytest.mark.parametrize("is_tls", [False, True])
def test_client_that_sends_its_request_too_slowly_is_disconnected(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, is_tls: bool
) -> None:
    certificate, key = authority(tmp_path, "server")
    tls = server_context(str(certificate), str(key), None) if is_tls else None
    room = server.Room(1)
    with server.Server(listener, lambda _environment, _start: [], room, tls) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        # Longer at the next attempt if the machine was too slow to begin a request within the time.
        is_begun = False
        for limit_s in (0.5, 5, 50):
            monkeypatch.setattr(server, "_CLIENT_S", limit_s)
            with contextlib.ExitStack() as stack:
                client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
                is_begun = False
                with contextlib.suppress(OSError):
                    if tls is not None:
                        context = ssl.create_default_context(cafile=certificate)
                        client = stack.enter_context(context.wrap_socket(client, server_hostname="localhost"))
                    client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
                    is_begun = True
                if is_begun:
                    client.settimeout(0.05)
                    wait_until(partial(_is_closed, client))
            wait_until(room.enter)
            room.leave()
            if is_begun:
                break
        assert is_begun
        serving.shutdown()
        thread.join()


def _is_closed(connection: socket.socket) -> bool:
    """Send one more byte; return whether the server has closed the connection."""
    try:
        connection.sendall(b"a")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_invalid_request_is_refused(alone: Exporter) -> None:
    for line in (b"\xff\x00\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics HTTP/9.9.9\r\n\r\n", b"G" * 70_000):
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
            connection.connect(alone.path)
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1024)
    assert alone.get("/").status == 200
    assert "Traceback" not in alone.log.read_text()


def test_stop_ends_the_process(alone: Exporter) -> None:
    assert alone.get("/").status == 200
    assert alone.stop() == 0


# -- sockets


def test_default_is_a_port_of_this_host_only() -> None:
    address = listening.parse(listening.DEFAULT)
    assert address == listening.Address(host="127.0.0.1", port=10133)
    socket_unit = (Path(__file__).parents[2] / "systemd" / "resctrlmon-exporter.socket").read_text()
    assert f"\nListenStream={listening.DEFAULT}\n" in socket_unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[::1]:9", listening.Address(host="::1", port=9)),
        ("localhost:65535", listening.Address(host="localhost", port=65535)),
        ("/run/x", listening.Address(path="/run/x")),
    ],
)
def test_addresses(text: str, expected: listening.Address) -> None:
    assert listening.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text", ["", "9", ":9", "x", "x:", "x:0", "x:65536", "x:-1", "x:\uff19", "::1:9", "x:9x", "run/x"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither HOST:PORT nor the absolute path"):
        listening.parse(text)


@contextlib.contextmanager
def running(log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the exporter without a socket from systemd, until the end of the block."""
    command = [sys.executable, "-m", "resctrlmond.exporter", "--manager-socket", "/nowhere", *options]
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def test_all_sockets_of_the_unit_are_served(tmp_path: Path) -> None:
    """Several ListenStream= lines of one socket unit: systemd passes all of them under one name."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        process = start_all(listeners, tmp_path / "log", "--manager-socket", "/nowhere")
        stack.callback(process.wait)
        stack.callback(process.kill)
        for listener in listeners:
            port = listener.getsockname()[1]
            assert request(http.client.HTTPConnection("127.0.0.1", port, timeout=60)).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_option_names_the_port(tmp_path: Path, host: str) -> None:
    log = tmp_path / "log"
    with reserved_port(host.strip("[]")) as port, running(log, "--listen", f"{host}:{port}"):
        wait_until(lambda: "serving metrics" in log.read_text())
        reply = request(http.client.HTTPConnection(host.strip("[]"), port, timeout=60))
    assert reply.status == 200


def test_link_local_address_keeps_its_interface() -> None:
    """Without the interface, the kernel takes no link-local address: it is not valid."""
    address = listening.parse("[fe80::1234%lo]:10133")
    assert str(address) == "[fe80::1234%lo]:10133"
    with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
        listening.listen(address)


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        socket.create_server(("127.0.0.1", 0)) as used,
        running(log, "--listen", f"127.0.0.1:{used.getsockname()[1]}") as process,
    ):
        assert process.wait(60) == os.EX_OSERR
        port = used.getsockname()[1]
    text = log.read_text()
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use. Choose another address with --listen" in text
    assert "Traceback" not in text


# -- TLS


def authority(folder: Path, name: str, host: str = "localhost") -> tuple[Path, Path]:
    """Create a certificate for a host that signs itself; return its file and that of its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{host}", "-days", "2"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def over_tls(port: int, context: ssl.SSLContext) -> Reply:
    return request(http.client.HTTPSConnection("localhost", port, timeout=60, context=context))


def test_tls_with_certificates_of_clients(tmp_path: Path, listener: socket.socket) -> None:
    certificate, key = authority(tmp_path, "server")
    of_client, key_of_client = authority(tmp_path, "client")
    options = ["--certfile", str(certificate), "--keyfile", str(key), "--client-cafile", str(of_client)]
    process = start(listener, tmp_path / "log", "--manager-socket", "/nowhere", *options)
    port = listener.getsockname()[1]
    stranger = ssl.create_default_context(cafile=certificate)
    known = ssl.create_default_context(cafile=certificate)
    known.load_cert_chain(of_client, key_of_client)
    try:
        # A client that never completes the handshake must not keep others waiting.
        with socket.create_connection(("127.0.0.1", port)):
            assert "resctrlmond_up 0.0" in over_tls(port, known).text
        with pytest.raises(OSError, match=r"(?i)certificate|alert|reset|eof"):
            over_tls(port, stranger)
        with pytest.raises((OSError, http.client.HTTPException)):
            request(http.client.HTTPConnection("localhost", port, timeout=60))
        assert over_tls(port, known).status == 200
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--certfile", "/nowhere.pem"], os.EX_OSERR, "/nowhere.pem"),
        (["--keyfile", "/nowhere.key"], 2, "need --certfile"),
        (["--listen", "9100"], 2, "neither HOST:PORT"),
        (["--event", "no_such"], 2, "no event matches 'no_such'; they are: llc_occupancy"),
        (["--timeout", "0"], 2, "not a number of seconds"),
        (["--timeout", "nan"], 2, "not a number of seconds"),
        (["--interval", "5"], 2, "--interval needs --textfile"),
        (["--textfile", "/nowhere", "--listen", "/nowhere/socket"], 2, "cannot be used with --textfile"),
        (["--listen", "/nowhere/socket"], os.EX_OSERR, "cannot listen on /nowhere/socket: No such file or directory"),
    ],
)
def test_wrong_options_are_explained(tmp_path: Path, options: list[str], status: int, message: str) -> None:
    log = tmp_path / "log"
    with running(log, *options) as process:
        assert process.wait(60) == status
    assert message in log.read_text()
    assert "Traceback" not in log.read_text()
