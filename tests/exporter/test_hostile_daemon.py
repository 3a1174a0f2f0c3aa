# SPDX-License-Identifier: Apache-2.0
"""A daemon that does not answer, or answers anything, never fails a scrape and never makes it wait for long."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.api.sockets import listen
from resctrlmond.exporter.source import VERBS, Source
from tests.exporter.conftest import OPENMETRICS, Exporter, UnixConnection, request
from tests.exporter.test_figures import scrape_until

Behavior = Callable[[socket.socket, threading.Event], None]


def hang(connection: socket.socket, stop: threading.Event) -> None:
    """Read, and never answer."""
    stop.wait()


def trickle(connection: socket.socket, stop: threading.Event) -> None:
    """Send a byte from time to time, and never a whole reply."""
    while not stop.wait(0.05):
        connection.sendall(b" ")


def answer_status(connection: socket.socket) -> None:
    """Answer the first call, Status."""
    connection.recv(65536)
    status = {
        "version": "1",
        "mount": "/",
        "mounted": True,
        "rmids": 1,
        "rmidsUsed": 1,
        "pending": 0,
        "groups": 0,
        "foreign": [],
        "classes": [""],
        "capacity": [],
        "problems": [],
    }
    connection.sendall(json.dumps({"parameters": status}).encode() + b"\0")


def stream(connection: socket.socket, stop: threading.Event) -> None:
    """Answer the first call, and the second with pages without end."""
    answer_status(connection)
    connection.recv(65536)
    page = json.dumps({"parameters": {"usages": []}, "continues": True}).encode() + b"\0"
    while not stop.wait(0.01):
        connection.sendall(page)


def garbage(connection: socket.socket, stop: threading.Event) -> None:
    """Answer with what is not JSON."""
    connection.recv(65536)
    connection.sendall(b"\xff{{{\0")
    stop.wait()


def wrong(connection: socket.socket, stop: threading.Event) -> None:
    """Answer with fields of the wrong types."""
    connection.recv(65536)
    connection.sendall(b'{"parameters":{"version":7}}\0')
    stop.wait()


def next_version(connection: socket.socket, stop: threading.Event) -> None:
    """Answer Status and Sums; the other replies have values that this version does not know."""
    answer_status(connection)
    replies: dict[str, object] = {
        "ReadAll": {"usages": 7},
        "Machine": {"since": "2026-11-24T08:00:00Z", "pools": "further"},
        "Sums": {"since": "2026-11-24T08:00:00Z", "readAt": "2026-11-24T08:00:01Z", "lost": 3, "names": []},
    }
    while data := connection.recv(65536):
        verb = json.loads(data.rstrip(b"\0"))["method"].rpartition(".")[2]
        connection.sendall(json.dumps({"parameters": replies.get(verb, {"containers": []})}).encode() + b"\0")


def leave(connection: socket.socket, stop: threading.Event) -> None:
    """Close the connection."""


def refuse(connection: socket.socket, stop: threading.Event) -> None:
    """Answer each call with an error."""
    while connection.recv(65536):
        error = "org.resctrlmon.Manager.PermissionDenied"
        reply = {"error": error, "parameters": {"message": "user 1 may not call it", "remedy": "Call as root"}}
        connection.sendall(json.dumps(reply).encode() + b"\0")


@contextlib.contextmanager
def served(path: str, behavior: Behavior) -> Iterator[None]:
    """Serve each connection to a unix socket with the behavior."""
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            behavior(connection, stop)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with listen(path) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield
        finally:
            stop.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


@pytest.mark.parametrize(
    "behavior", [hang, trickle, stream, garbage, wrong, leave, refuse], ids=lambda one: one.__name__
)
def test_scrape_succeeds_whatever_the_daemon_does(tmp_path: Path, behavior: Behavior) -> None:
    path = str(tmp_path / "manager")
    with served(path, behavior), contextlib.closing(Exporter(tmp_path, path, "--timeout", "0.5")) as exporter:
        exporter.start()
        scraped = exporter.scrape()
        if behavior is stream:
            # The exporter or the thread of ``stream`` may be stopped for longer than the time-out.
            scraped = scrape_until(exporter, lambda scraped: scraped.value("up") == 1)
    is_up = behavior is stream
    assert scraped.value("up") == is_up
    assert scraped.value("exporter_read_success", verb="Status") == is_up
    assert [scraped.value("exporter_read_success", verb=verb) for verb in ("ReadAll", "Machine")] == [0, 0]
    assert [name for name in scraped.families if name.startswith("resctrlmond_workload")] == []
    assert scraped.having("exporter_build_info")
    assert "Traceback" not in exporter.log.read_text()


def test_reading_of_pages_without_end_ends(tmp_path: Path) -> None:
    """Each later scrape would get what it has read, and the exporter would keep all of the pages."""
    path = str(tmp_path / "manager")
    with served(path, stream):
        found = Source(path, 0.3).observe(wait_s=30)
    assert found.errors["ReadAll"] == f"{path}: resctrlmond did not answer within 0.3 s"


def test_reply_of_another_version_costs_only_its_own_figures(tmp_path: Path) -> None:
    path = str(tmp_path / "manager")
    with served(path, next_version), contextlib.closing(Exporter(tmp_path, path)) as exporter:
        exporter.start()
        scraped = exporter.scrape()
    assert {verb: scraped.value("exporter_read_success", verb=verb) for verb in VERBS} == {
        "Status": 1,
        "ReadAll": 0,
        "Machine": 0,
        "Sums": 1,
        "ListUnwatched": 1,
    }
    assert scraped.value("ends_lost_total") == 3
    assert "the reply to org.resctrlmon.Manager.Machine is not valid" in exporter.log.read_text()


def test_time_that_cannot_be_converted_does_not_fail_the_scrape(tmp_path: Path) -> None:
    def answer(connection: socket.socket, stop: threading.Event) -> None:
        answer_status(connection)
        while data := connection.recv(65536):
            verb = json.loads(data.rstrip(b"\0"))["method"].rpartition(".")[2]
            reply: dict[str, object]
            if verb == "Sums":
                reply = {"parameters": {"since": "at the boot", "readAt": "now", "lost": 3, "names": []}}
            else:
                reply = {"error": "org.resctrlmon.Manager.NotRead", "parameters": {}}
            connection.sendall(json.dumps(reply).encode() + b"\0")

    path = str(tmp_path / "manager")
    with served(path, answer), contextlib.closing(Exporter(tmp_path, path)) as exporter:
        exporter.start()
        for _ in range(2):
            scraped = exporter.scrape()
            assert scraped.value("up") == 0
            assert {scraped.value("exporter_read_success", verb=verb) for verb in VERBS} == {0}
    assert exporter.log.read_text().count("cannot be converted") == 1


def test_scrape_waits_no_longer_than_prometheus(tmp_path: Path) -> None:
    path = str(tmp_path / "manager")
    with served(path, hang), contextlib.closing(Exporter(tmp_path, path, "--timeout", "3000")) as exporter:
        exporter.start()
        reply = exporter.get(accept=OPENMETRICS, X_Prometheus_Scrape_Timeout_Seconds="0.2")
    assert reply.status == 200
    assert "resctrlmond_up 0.0" in reply.text


def test_client_that_does_not_wait_does_not_end_the_reading_of_others(tmp_path: Path) -> None:
    """Any user of the host can send requests, and a failure would be logged for each of them."""
    path, is_called, may_reply = str(tmp_path / "manager"), threading.Event(), threading.Event()

    def reply_late(connection: socket.socket, stop: threading.Event) -> None:
        is_called.set()
        may_reply.wait()
        answer_status(connection)

    replies: list[str] = []

    def scrape(exporter: Exporter, timeout: str) -> None:
        replies.append(exporter.get(X_Prometheus_Scrape_Timeout_Seconds=timeout).text)

    with served(path, reply_late), contextlib.closing(Exporter(tmp_path, path)) as exporter:
        exporter.start()
        hasty = threading.Thread(target=scrape, args=(exporter, "1"))
        hasty.start()
        is_called.wait()
        patient = threading.Thread(target=scrape, args=(exporter, "60"))
        patient.start()
        hasty.join()
        may_reply.set()
        patient.join()
        assert "did not answer within 0.8 s" not in exporter.log.read_text()
    assert ["resctrlmond_up 1.0" in reply for reply in replies] == [False, True]


def test_source_that_cannot_start_a_thread_reads_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = Source(str(tmp_path / "none"), 5)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_to_start)
        assert source.observe(5).errors == dict.fromkeys(VERBS, "can't start new thread")
    assert "is not running" in source.observe(5).errors["Status"]


@pytest.mark.parametrize("header", ["nan", "-1", "inf", "0", "x"])
def test_timeout_that_is_not_a_time_is_ignored(tmp_path: Path, header: str) -> None:
    with contextlib.closing(Exporter(tmp_path, str(tmp_path / "none"))) as exporter:
        exporter.start()
        reply = exporter.get(X_Prometheus_Scrape_Timeout_Seconds=header)
    assert reply.status == 200


def test_scrapes_at_the_same_time_share_one_connection(tmp_path: Path) -> None:
    """Each connection of a user counts towards a limit of the daemon."""
    counter = itertools.count()
    path = str(tmp_path / "manager")

    def count(connection: socket.socket, stop: threading.Event) -> None:
        next(counter)
        stop.wait()

    with served(path, count), contextlib.closing(Exporter(tmp_path, path, "--timeout", "2")) as exporter:
        exporter.start()
        assert exporter.get("/").status == 200
        replies: list[int] = []
        threads = [
            threading.Thread(target=lambda: replies.append(request(UnixConnection(exporter.path)).status))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connections = next(counter)
    assert replies == [200] * 5
    assert connections < 5


def test_each_failure_is_logged_once_and_its_end_too(tmp_path: Path) -> None:
    path = str(tmp_path / "manager")
    with contextlib.closing(Exporter(tmp_path, path)) as exporter:
        exporter.start()
        for _ in range(3):
            exporter.scrape()
        log = exporter.log.read_text()
        assert log.count("cannot read from resctrlmond") == 1
        assert "systemctl start resctrlmond.socket" in log
        with served(path, refuse):
            exporter.scrape()
        assert "Status: user 1 may not call it" in exporter.log.read_text()
