# SPDX-License-Identifier: Apache-2.0
"""What a real datagram socket in the service manager's place receives."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond import notify
from resctrlmond.notify import Notify, watchdog_interval_s


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.fixture
def told(manager: socket.socket) -> Iterator[Notify]:
    told = Notify()
    yield told
    assert told._notifier is not None
    told._notifier.socket.close()


def waiting(manager: socket.socket) -> list[bytes]:
    found = []
    manager.setblocking(False)
    try:
        while True:
            found.append(manager.recv(4096))
    except BlockingIOError:
        return found


def test_ready_and_stopping(manager: socket.socket, told: Notify) -> None:
    told.ready()
    told.ready("12 groups")
    told.stopping()
    assert waiting(manager) == [b"READY=1", b"READY=1\nSTATUS=12 groups", b"STOPPING=1"]


def test_a_start_that_makes_progress_gets_more_time(manager: socket.socket, told: Notify) -> None:
    """On a starved machine the imports took longer than TimeoutStartSec=, and no start ever succeeded."""
    told.extend_start()
    assert waiting(manager) == [b"EXTEND_TIMEOUT_USEC=60000000"]


def test_reloading_carries_its_time(manager: socket.socket, told: Notify) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    told.reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    first, second = manager.recv(4096).decode().split("\n")
    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) <= after


def test_status_is_one_ascii_line(manager: socket.socket, told: Notify) -> None:
    told.status("Größe\nMAINPID=1\r\0\x1b " + "x" * 9000)
    data = manager.recv(65536)
    assert data.startswith(b"STATUS=Gr??e MAINPID=1 ?? xxx")
    assert len(data) <= 1024 + 7


@given(st.text())
def test_any_status_is_one_assignment(text: str) -> None:
    line = notify._status(text)
    assert line.startswith("STATUS=")
    assert line.isascii()
    assert line.isprintable()


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"resctrlmond-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        told = Notify()
        told.watchdog()
        assert waiting(listener) == [b"WATCHDOG=1"]
        assert told._notifier is not None
        told._notifier.socket.close()


def test_a_manager_that_does_not_read_stalls_nothing_and_still_hears_of_ready(
    manager: socket.socket, told: Notify
) -> None:
    filler = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    filler.setblocking(False)
    filler.connect(os.environ["NOTIFY_SOCKET"])
    with filler, pytest.raises(BlockingIOError):
        while True:
            filler.send(b"x")
    started = time.monotonic()
    told.ready("serving")
    told.status("later")
    assert time.monotonic() - started < 1
    assert set(waiting(manager)) == {b"x"}
    told.watchdog()
    assert waiting(manager) == [b"READY=1\nSTATUS=serving", b"STATUS=later", b"WATCHDOG=1"]


def test_pending_messages_are_limited(manager: socket.socket, told: Notify) -> None:
    manager.close()
    for _ in range(1000):
        told.watchdog()
    assert len(told._waiting) == 64


@pytest.mark.parametrize("address", [None, ""])
def test_silent_without_a_manager(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    silent = Notify()
    silent.ready("x")
    silent.reloading()
    silent.status("x")
    silent.watchdog()
    silent.stopping()
    assert not silent._waiting


@pytest.mark.parametrize("name", ["none", "x" * 200])
def test_silent_where_the_socket_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / name))
    with warnings.catch_warnings():
        # sdnotify leaves a socket that it could not connect to the collector.
        warnings.simplefilter("ignore", ResourceWarning)
        silent = Notify()
    silent.ready("x")
    assert not silent._waiting


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
