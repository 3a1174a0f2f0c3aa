# SPDX-License-Identifier: Apache-2.0
"""Messages to the service manager, received by a real datagram socket in its place."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.service import notify
from resctrlmond.service.notify import Notify, watchdog_interval_s


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.fixture
def notifier(manager: socket.socket) -> Iterator[Notify]:
    notifier = Notify()
    yield notifier
    assert notifier._notifier is not None
    notifier._notifier.socket.close()


def received(manager: socket.socket) -> list[bytes]:
    """Return the messages that have arrived."""
    messages = []
    manager.setblocking(False)
    try:
        while True:
            messages.append(manager.recv(4096))
    except BlockingIOError:
        return messages


def test_ready_and_stopping(manager: socket.socket, notifier: Notify) -> None:
    notifier.ready()
    notifier.ready("12 groups")
    notifier.stopping()
    assert received(manager) == [b"READY=1", b"READY=1\nSTATUS=12 groups", b"STOPPING=1"]


def test_start_timeout_is_extended_on_progress(manager: socket.socket, notifier: Notify) -> None:
    """On a busy machine, the imports took longer than TimeoutStartSec=, and every start failed."""
    notifier.extend_start()
    assert received(manager) == [b"EXTEND_TIMEOUT_USEC=60000000"]


def test_reloading_message_has_a_timestamp(manager: socket.socket, notifier: Notify) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    first, second = manager.recv(4096).decode().split("\n")
    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) <= after


def test_status_is_one_ascii_line(manager: socket.socket, notifier: Notify) -> None:
    notifier.status("Größe\nMAINPID=1\r\0\x1b " + "x" * 9000)
    data = manager.recv(65536)
    assert data.startswith(b"STATUS=Gr??e MAINPID=1 ?? xxx")
    assert len(data) <= 1024 + 7


@given(st.text())
def test_status_with_any_text_is_a_single_assignment(text: str) -> None:
    line = notify._status(text)
    assert line.startswith("STATUS=")
    assert line.isascii()
    assert line.isprintable()


def test_abstract_socket_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"resctrlmond-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notifier = Notify()
        notifier.watchdog()
        assert received(listener) == [b"WATCHDOG=1"]
        assert notifier._notifier is not None
        notifier._notifier.socket.close()


def test_manager_that_does_not_read_blocks_nothing_and_gets_ready_later(
    manager: socket.socket, notifier: Notify
) -> None:
    filler = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    filler.setblocking(False)
    filler.connect(os.environ["NOTIFY_SOCKET"])
    with filler, pytest.raises(BlockingIOError):
        while True:
            filler.send(b"x")

    def notify() -> None:
        notifier.ready("serving")
        notifier.status("later")

    notifying = threading.Thread(target=notify, daemon=True)
    notifying.start()
    # A message that waits for a reader would wait for ever.
    notifying.join(30)
    assert not notifying.is_alive()
    assert set(received(manager)) == {b"x"}
    notifier.watchdog()
    assert received(manager) == [b"READY=1\nSTATUS=serving", b"STATUS=later", b"WATCHDOG=1"]


def test_pending_messages_are_limited(manager: socket.socket, notifier: Notify) -> None:
    manager.close()
    for _ in range(1000):
        notifier.watchdog()
    assert len(notifier._waiting) == 64


@pytest.mark.parametrize("address", [None, ""])
def test_no_message_is_sent_without_a_manager(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notifier = Notify()
    notifier.ready("x")
    notifier.reloading()
    notifier.status("x")
    notifier.watchdog()
    notifier.stopping()
    assert not notifier._waiting


@pytest.mark.parametrize("name", ["none", "x" * 200])
def test_no_message_is_sent_if_the_socket_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / name))
    with warnings.catch_warnings():
        # sdnotify does not close a socket that it could not connect.
        warnings.simplefilter("ignore", ResourceWarning)
        notifier = Notify()
    notifier.ready("x")
    assert not notifier._waiting


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("30000000", None, 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        ("30000000", "x", None),
        ("0", None, None),
        ("-5", None, None),
        ("x", None, None),
        (None, None, None),
    ],
)
def test_watchdog_interval(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, seconds: float | None
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert watchdog_interval_s() == seconds
