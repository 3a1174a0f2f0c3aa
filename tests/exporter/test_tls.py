# SPDX-License-Identifier: Apache-2.0
"""The exporter's server over TLS: wrong files, and clients that do not behave."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.exporter import server
from resctrlmond.exporter.failures import Failure
from resctrlmond.exporter.server import MAX_CONNECTIONS
from resctrlmond.exporter.tls import expiries, server_context
from tests.exporter.conftest import OPENMETRICS, Exposition, Reply, request, start
from tests.exporter.test_http import authority, running
from tests.exporter.test_otlp_tls import expired
from tests.wait import wait_until

# A record of the handshake whose length is 512, and its first byte.
_HALF = b"\x16\x03\x01\x02\x00\x01"


def over_tls(port: int, context: ssl.SSLContext) -> Reply:
    connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=context)
    return request(connection, accept=OPENMETRICS)


def answers(port: int, context: ssl.SSLContext) -> bool:
    try:
        return over_tls(port, context).status == 200
    except (OSError, http.client.HTTPException):
        return False


@contextlib.contextmanager
def serving(log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run an exporter with a socket of a port, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        process = start(listener, log, "--manager-socket", "/nowhere", *options)
        try:
            yield process, listener.getsockname()[1]
        finally:
            process.kill()
            process.wait()


def test_silent_clients_in_the_handshake_do_not_prevent_scrapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket of wrap_socket() could not be interrupted, and 32 clients closed the exporter for ten seconds."""
    monkeypatch.setattr(server, "_CLIENT_S", 3600.0)
    certificate, key = authority(tmp_path, "server")
    room = server.Room(3)
    known = ssl.create_default_context(cafile=certificate)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def application(_environ: object, start_response: Callable[..., object]) -> list[bytes]:
            start_response("200 OK", [("Content-Length", "0")])
            return []

        context = server_context(str(certificate), str(key), None)
        of = stack.enter_context(server.Server(listener, application, room, context))
        thread = threading.Thread(target=of.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(of.shutdown)
        port = listener.getsockname()[1]
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        silent[1].sendall(_HALF)
        wait_until(lambda: answers(port, known))
        assert room.failures.counts()[Failure.FULL]
        assert not room.failures.counts()[Failure.TLS]


def test_two_hundred_half_handshakes_keep_threads_and_descriptors_limited(tmp_path: Path) -> None:
    certificate, key = authority(tmp_path, "server")
    log = tmp_path / "log"
    known = ssl.create_default_context(cafile=certificate)
    options = ["--certfile", str(certificate), "--keyfile", str(key)]
    with serving(log, *options) as (process, port), contextlib.ExitStack() as stack:
        assert answers(port, known)
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(_HALF)
        wait_until(lambda: answers(port, known))
        status = Path(f"/proc/{process.pid}/status").read_text()
        threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
        # TasksMax= of the unit.
        assert threads <= 48
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < MAX_CONNECTIONS + 32
        metrics = Exposition(over_tls(port, known).text)
        assert (metrics.value("exporter_connections_failed_total", reason="full") or 0) >= 200 - MAX_CONNECTIONS
    # One line for each kind.
    assert 1 <= log.read_text().count("got no reply") <= len(Failure)


def test_failed_handshakes_are_counted_and_explained(tmp_path: Path) -> None:
    certificate, key = authority(tmp_path, "server")
    of_client, key_of_client = authority(tmp_path, "client")
    stranger, key_of_stranger = authority(tmp_path, "stranger")
    late = expired(tmp_path)
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(of_client.read_bytes() + late.certificate.read_bytes())
    log = tmp_path / "log"
    options = ["--certfile", str(certificate), "--keyfile", str(key), "--client-cafile", str(authorities)]
    options += ["--log-level", "debug"]

    def context(certificate_of_client: Path | None, key: Path | None, trusted: Path = certificate) -> ssl.SSLContext:
        found = ssl.create_default_context(cafile=trusted)
        if certificate_of_client is not None:
            found.load_cert_chain(certificate_of_client, key)
        return found

    with serving(log, *options) as (_, port):
        wrong: list[tuple[Callable[[], object], str]] = [
            (
                lambda: request(http.client.HTTPConnection("localhost", port, timeout=60)),
                "the client does not use TLS (https, or scheme: https in the job of Prometheus)",
            ),
            (
                lambda: over_tls(port, context(None, None)),
                "the client has no certificate (cert_file and key_file in the job of Prometheus)",
            ),
            (
                lambda: over_tls(port, context(stranger, key_of_stranger)),
                "the certificate of the client is not accepted: self",
            ),
            (
                lambda: over_tls(port, context(late.certificate, late.key)),
                "the certificate of the client is not accepted: certificate has expired",
            ),
            (
                lambda: over_tls(port, context(of_client, key_of_client, stranger)),
                "the client refuses the connection: unknown",
            ),
            (lambda: socket.create_connection(("127.0.0.1", port)).close(), "it was closed during the TLS handshake"),
        ]
        for count, (connect, reason) in enumerate(wrong, start=1):
            with contextlib.suppress(OSError, http.client.HTTPException):
                connect()
            text = f"a connection from 127.0.0.1 got no reply: {reason}"
            wait_until(lambda text=text: text in log.read_text(), failure=text)  # type: ignore[misc]
            found = Exposition(over_tls(port, context(of_client, key_of_client)).text)
            assert found.value("exporter_connections_failed_total", reason="tls") == count
    text = log.read_text()
    # The others are those of --log-level debug.
    assert text.count("warning: a connection") == 1
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("certfile", "keyfile", "cafile", "message"),
    [
        ("none.pem", "server.key", "", "none.pem (--certfile): No such file or directory. Check the path"),
        ("server.pem", "none.key", "", "none.key (--keyfile): No such file or directory. Check the path"),
        ("server.pem", "server.key", "none.pem", "none.pem (--client-cafile): No such file or directory."),
        ("server.pem", ".", "", "(--keyfile): Is a directory. Check the path"),
        ("server.pem", "locked.key", "", "locked.key (--keyfile): Permission denied. Let systemd read it with Load"),
        ("server.pem", "other.key", "", "other.key do not belong together. Name the key with which the certificate"),
        (
            "server.pem",
            "",
            "",
            "server.pem has no key in PEM that can be used. Name the file of the key",
        ),
        ("server.pem", "empty", "", "empty has no key in PEM that can be used. Name another file"),
        ("server.pem", "sealed.key", "", "sealed.key is encrypted, and the exporter has no passphrase. Decrypt it"),
        ("server.key", "server.key", "", "server.key (--certfile) has no valid certificate in PEM"),
        ("empty", "server.key", "", "empty (--certfile) has no valid certificate in PEM"),
        ("server.pem", "server.key", "other.key", "other.key (--client-cafile) has no valid certificate in PEM"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, certfile: str, keyfile: str, cafile: str, message: str) -> None:
    _, key = authority(tmp_path, "server")
    authority(tmp_path, "other")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "locked.key").write_bytes(key.read_bytes())
    (tmp_path / "locked.key").chmod(0)
    seal = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", str(key), "-out", str(tmp_path / "sealed.key")]
    subprocess.run(seal, check=True, capture_output=True, timeout=60)
    # Root without capabilities cannot read the file either.
    command = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
    command += [sys.executable, "-m", "resctrlmond.exporter", "--manager-socket", "/nowhere"]
    command += ["--listen", str(tmp_path / "socket")]
    for option, name in (("--certfile", certfile), ("--keyfile", keyfile), ("--client-cafile", cafile)):
        command += [option, str(tmp_path / name)] if name else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == os.EX_OSERR
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "_ssl.c" not in done.stderr


def test_certificate_that_has_expired_is_reported_and_served(tmp_path: Path) -> None:
    """The clock may be wrong, and some clients do not check."""
    late = expired(tmp_path)
    log = tmp_path / "log"
    message = (
        f"warning: clients will not accept the certificate {late.certificate}: certificate has expired. Replace it"
    )
    with serving(log, "--certfile", str(late.certificate), "--keyfile", str(late.key)) as (_, port):
        wait_until(lambda: message in log.read_text())
        careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        careless.check_hostname = False
        careless.verify_mode = ssl.CERT_NONE
        assert over_tls(port, careless).status == 200


def test_certificate_of_a_curve_that_clients_lack_is_reported_and_served(tmp_path: Path) -> None:
    certificate, key, log = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "log"
    create = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:secp256k1 -nodes -subj /CN=localhost -days 2"
    subprocess.run(
        [*create.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=60
    )
    with serving(log, "--certfile", str(certificate), "--keyfile", str(key)) as (process, _):
        wait_until(lambda: f"clients will not accept the certificate {certificate}: " in log.read_text())
        assert process.poll() is None


def test_valid_certificate_has_no_remark(tmp_path: Path) -> None:
    """With the key in its file, and with one that an authority signed, which is in the file too or not."""
    certificate, key = authority(tmp_path, "authority")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    leaf, sign, extension = tmp_path / "leaf", tmp_path / "leaf.pem", tmp_path / "extension"
    extension.write_text("subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n")
    create = (
        f"openssl req -new -newkey rsa:2048 -nodes -keyout {leaf}.key -subj /CN=localhost -out {leaf}.csr && "
        f"openssl x509 -req -in {leaf}.csr -CA {certificate} -CAkey {key} -CAcreateserial -days 2 "
        f"-extfile {extension} -out {sign}"
    )
    subprocess.run(create, shell=True, check=True, capture_output=True, timeout=60)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(sign.read_bytes() + certificate.read_bytes())
    for number, files in enumerate(((both,), (sign, Path(f"{leaf}.key")), (chain, Path(f"{leaf}.key")))):
        options = [text for pair in zip(("--certfile", "--keyfile"), map(str, files), strict=False) for text in pair]
        log = tmp_path / f"log{number}"
        with running(log, "--listen", str(tmp_path / f"socket{number}"), *options):
            wait_until(lambda log=log: "serving metrics" in log.read_text())  # type: ignore[misc]
        assert "warning" not in log.read_text()


def not_after(certificate: Path) -> float:
    """Return when a certificate expires, as openssl reads it."""
    command = ["openssl", "x509", "-noout", "-enddate", "-in", str(certificate)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return ssl.cert_time_to_seconds(done.stdout.strip().removeprefix("notAfter="))


def test_expiry_of_certificates_is_a_metric(tmp_path: Path) -> None:
    certificate, key = authority(tmp_path, "server")
    of_client, _ = authority(tmp_path, "client")
    authorities = tmp_path / "authorities.pem"
    late = expired(tmp_path).certificate
    authorities.write_bytes(of_client.read_bytes() + late.read_bytes())
    known = ssl.create_default_context(cafile=certificate)
    name = "exporter_certificate_expiry_time_seconds"
    with serving(tmp_path / "log", "--certfile", str(certificate), "--keyfile", str(key)) as (_, port):
        metrics = Exposition(over_tls(port, known).text)
    assert metrics.value(name, option="certfile") == not_after(certificate)
    assert metrics.value(name, option="client-cafile") is None


def test_expired_authority_in_a_bundle_counts_only_if_none_is_valid(tmp_path: Path) -> None:
    """A bundle keeps former authorities: an alert would stay although no client needs them. A chain is sent whole."""
    of_client, _ = authority(tmp_path, "client")
    late = expired(tmp_path).certificate
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(late.read_bytes() + of_client.read_bytes() + late.read_bytes())
    assert expiries(str(bundle), str(bundle)) == {
        "certfile": not_after(late),
        "client-cafile": not_after(of_client),
    }
    assert expiries(str(of_client), str(late)) == {
        "certfile": not_after(of_client),
        "client-cafile": not_after(late),
    }


@pytest.mark.parametrize("days", [1, 36500])
@pytest.mark.parametrize("kind", ["rsa:2048", "ed25519", "version 1"])
def test_expiry_of_each_kind_of_certificate(tmp_path: Path, kind: str, days: int) -> None:
    """From 2050 on, the date has another type (RFC 5280). Certificates of version 1 have no field for the version."""
    key, certificate, request = tmp_path / "key", tmp_path / "certificate", tmp_path / "request"
    new = "ed25519" if kind == "version 1" else kind
    subject = ["-newkey", new, "-nodes", "-keyout", str(key), "-subj", "/CN=here"]
    if kind == "version 1":
        subprocess.run(["openssl", "req", "-new", *subject, "-out", str(request)], check=True, capture_output=True)
        command = ["openssl", "x509", "-req", "-in", str(request), "-signkey", str(key)]
    else:
        command = ["openssl", "req", "-x509", *subject]
    command += ["-days", str(days), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    assert expiries(str(certificate), None) == {"certfile": not_after(certificate)}


@pytest.mark.parametrize("text", ["", "AAAA", "!", "MAMCAQA=", "MIIB", "MIQ="])
def test_expiry_of_a_block_that_is_not_a_certificate_is_absent(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
    assert expiries(str(file), None) == {}
