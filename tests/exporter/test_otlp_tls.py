# SPDX-License-Identifier: Apache-2.0
"""Pushes over TLS: each wrong certificate has its reason in words, and nothing is lost until it is right."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import add_MetricsServiceServicer_to_server

from resctrlmond.exporter.otlp import tls
from resctrlmond.exporter.otlp.ledger import Temporality
from resctrlmond.exporter.otlp.sender import Protocol, Sender, SendFailure
from tests.exporter.conftest import Machine
from tests.exporter.otlp_receiver import Received, Servicer, over_http
from tests.exporter.test_http import authority
from tests.exporter.test_otlp import pushing
from tests.exporter.test_otlp_replies import part
from tests.wait import wait_until

_AUTHORITY = "OTEL_EXPORTER_OTLP_CERTIFICATE"
_CERTIFICATE, _KEY = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_KEY"


@dataclass(frozen=True, slots=True)
class Files:
    """A certificate and its key."""

    certificate: Path
    key: Path


@pytest.fixture(params=list(Protocol))
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return Protocol(request.param)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    # requests prefers these to the authority of a session.
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.setenv(name, ssl.get_default_verify_paths().openssl_cafile)


@contextlib.contextmanager
def receiver(protocol: Protocol, own: Files, client: Files | None = None) -> Iterator[tuple[str, Received]]:
    """Run a receiver with a certificate of its own, which may require one of clients."""
    if protocol is Protocol.HTTP:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own.certificate, own.key)
        if client is not None:
            context.load_verify_locations(client.certificate)
            context.verify_mode = ssl.CERT_REQUIRED
        with over_http(context) as found:
            yield found
        return
    received = Received()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_MetricsServiceServicer_to_server(Servicer(received), server)  # type: ignore[no-untyped-call]
        credentials = grpc.ssl_server_credentials(
            [(own.key.read_bytes(), own.certificate.read_bytes())],
            client.certificate.read_bytes() if client is not None else None,
            client is not None,
        )
        port = server.add_secure_port("localhost:0", credentials)
        server.start()
        try:
            yield f"https://localhost:{port}", received
        finally:
            server.stop(None).wait()


def files(folder: Path, name: str, host: str = "localhost") -> Files:
    return Files(*authority(folder, name, host))


def expired(folder: Path) -> Files:
    """Create a certificate for localhost that has expired."""
    own = files(folder, "expired")
    request, extension = folder / "request", folder / "extension"
    extension.write_text("subjectAltName=DNS:localhost\n")
    signed = f"openssl req -new -key {own.key} -subj /CN=expired -out {request} && openssl x509 -req -in {request} "
    signed += f"-signkey {own.key} -days -1 -extfile {extension} -out {own.certificate}"
    subprocess.run(signed, shell=True, check=True, capture_output=True)
    return own


def failure(url: str, protocol: Protocol, monkeypatch: pytest.MonkeyPatch, **environment: Path) -> str:
    """Return why a push with these settings fails; "" if it does not."""
    with monkeypatch.context() as of:
        for name, path in environment.items():
            of.setenv(name, str(path))
        found = Sender(url, protocol, Temporality.CUMULATIVE).send([part()])
    assert found is None or found == SendFailure(found.reason, is_refusal=False)
    return found.reason.removeprefix("UNAVAILABLE: ") if found is not None else ""


def test_certificate_of_the_receiver(tmp_path: Path, protocol: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    right, other = files(tmp_path, "right"), files(tmp_path, "other")
    refused = "its certificate is not accepted: "
    unknown = refused + f"self.signed certificate. {_AUTHORITY} names the file of its authority"
    with receiver(protocol, right) as (url, received):
        assert failure(url, protocol, monkeypatch, **{_AUTHORITY: right.certificate}) == ""
        assert len(received.points) == 1
        assert re.fullmatch(unknown, failure(url, protocol, monkeypatch))
        assert re.fullmatch(unknown, failure(url, protocol, monkeypatch, **{_AUTHORITY: other.certificate}))
        plain = failure(url.replace("https", "http"), protocol, monkeypatch)
        assert "it closed the connection without an answer: it may expect TLS (https://)" in plain
    elsewhere = files(tmp_path, "elsewhere", "example.org")
    for own, why in (
        (elsewhere, "Hostname mismatch|not for the name"),
        (expired(tmp_path), "certificate has expired"),
    ):
        with receiver(protocol, own) as (url, received):
            found = failure(url, protocol, monkeypatch, **{_AUTHORITY: own.certificate})
            assert re.match(f"{refused}.*({why})", found)
            assert received.points == []


def test_name_of_a_host_is_not_taken_for_an_unknown_authority() -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_message = "Hostname mismatch, certificate is not valid for 'issuer-itself'."
    assert _AUTHORITY not in tls.reason(error, "https://issuer-itself")


def test_certificate_of_the_client(tmp_path: Path, protocol: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    own, client, other = (files(tmp_path, name) for name in ("own", "client", "other"))
    trusted = {_AUTHORITY: own.certificate}
    required = f"It may require a certificate of the client ({_CERTIFICATE}, {_KEY})"
    with receiver(protocol, own, client) as (url, received):
        assert required in failure(url, protocol, monkeypatch, **trusted)
        wrong = {_CERTIFICATE: other.certificate, _KEY: other.key}
        assert required in failure(url, protocol, monkeypatch, **trusted, **wrong)
        mixed = {_CERTIFICATE: client.certificate, _KEY: other.key}
        found = failure(url, protocol, monkeypatch, **trusted, **mixed)
        assert f"do not belong together ({_CERTIFICATE}, {_KEY})" in found
        assert received.points == []
        known = {_CERTIFICATE: client.certificate, _KEY: client.key}
        assert failure(url, protocol, monkeypatch, **trusted, **known) == ""
        assert len(received.points) == 1


@pytest.mark.parametrize("name", [_AUTHORITY, _CERTIFICATE, "OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY"])
def test_file_that_cannot_be_read_is_named(
    tmp_path: Path, protocol: Protocol, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """gRPC went on without an authority, and aborted the process without a key."""
    of = files(tmp_path, "of")
    settings = {_AUTHORITY: of.certificate, _CERTIFICATE: of.certificate, _KEY: of.key, name: tmp_path / "none"}
    missing = re.escape(f"cannot read {tmp_path}/none ({name}): No such file or directory")
    with pytest.raises(ValueError, match=missing):
        failure("https://localhost:1", protocol, monkeypatch, **settings)
    (tmp_path / "none").touch()
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/none ({name}) is empty")):
        failure("https://localhost:1", protocol, monkeypatch, **settings)


def test_grpc_needs_the_key_of_the_client_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = files(tmp_path, "of").certificate
    with pytest.raises(ValueError, match=f"{_CERTIFICATE} needs {_KEY} with gRPC"):
        failure("https://localhost:1", Protocol.GRPC, monkeypatch, **{_CERTIFICATE: certificate})


def test_ends_wait_until_the_certificate_is_right(machine: Machine, tmp_path: Path, protocol: Protocol) -> None:
    """One line in the log, however often it is tried."""
    trusted, own, other = tmp_path / "trusted.pem", files(tmp_path, "own"), files(tmp_path, "other")
    shutil.copy(other.certificate, trusted)
    machine.start()
    with receiver(protocol, own) as (url, received):
        settings = {_AUTHORITY: str(trusted), "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        state = str(tmp_path / "state")
        options = ("--otlp-protocol", protocol, "--otlp-state", state)
        with pushing(machine, url, *options, **settings) as process:
            wait_until(lambda: "cannot push to" in process.log.read_text())
            machine.call("Create", key="ended", claim="me")
            machine.call("Release", key="ended", claim="me")
            process.stop()
            lines = process.log.read_text().splitlines()
        assert [line for line in lines if "certificate" in line] == [line for line in lines if "cannot push" in line]
        assert not [line for line in lines if "ssl_" in line or "Traceback" in line]
        assert received.points == []
        shutil.copy(own.certificate, trusted)
        with pushing(machine, url, *options, **settings):
            wait_until(lambda: any(point.of("resctrl.workload.key") == "ended" for point in received.points))


def test_wrong_file_is_an_error_of_the_command() -> None:
    command = [sys.executable, "-m", "resctrlmond.exporter", "--otlp", "https://localhost:1"]
    done = subprocess.run(
        command, env={**os.environ, _AUTHORITY: "/nowhere.pem"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"cannot read /nowhere.pem ({_AUTHORITY}): No such file or directory" in done.stderr
