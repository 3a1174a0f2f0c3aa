# SPDX-License-Identifier: Apache-2.0
"""Watch, of the daemon as a process: churn, clients that do not read or go, a stop and a kill."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from resctrlmond.api.varlink import messages as wire
from resctrlmond.client import Client, VarlinkError
from tests.daemon.conftest import MANAGER, Machine, StartProcess, end
from tests.wait import wait_until

WATCH = f"{MANAGER}.Watch"
RUNS = 100


class Watcher:
    """A client that watches in a thread, and keeps the changes."""

    def __init__(self, machine: Machine) -> None:
        self.changes: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._is_listed = threading.Event()
        self._client = Client(machine.socket)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._is_listed.wait(60)

    def _run(self) -> None:
        try:
            for reply in self._client.stream(WATCH):
                self.changes += reply["changes"]
                if reply.get("listed"):
                    self._is_listed.set()
        except Exception as error:
            self.error = error

    def of(self, key: str) -> list[dict[str, Any]]:
        return [change for change in list(self.changes) if change["key"] == key]

    def close(self) -> None:
        self._client.interrupt()
        self.join()
        self._client.close()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def started(machine: Machine) -> Machine:
    machine.start()
    return machine


@contextlib.contextmanager
def watching(machine: Machine, count: int = 1) -> Iterator[list[Watcher]]:
    watchers = [Watcher(machine) for _ in range(count)]
    yield watchers
    for watcher in watchers:
        watcher.close()


def short_life(machine: Machine, key: str) -> list[dict[str, Any]]:
    """Assign a process, release the workload, and return the totals of the run."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        machine.call("Assign", key=key, claim="me", pid=process.pid)
        totals: list[dict[str, Any]] = machine.call("Release", key=key, claim="me")["totals"]
        return totals
    finally:
        end(process)


def test_each_watcher_gets_each_run_from_its_begin_to_its_end(started: Machine) -> None:
    with watching(started, 20) as watchers:
        keys = [f"k{number}" for number in range(RUNS // 2)] * 2
        with ThreadPoolExecutor(4) as pool:
            totals = dict(pool.map(lambda key: (key, short_life(started, key)), keys[: RUNS // 2]))
            again = dict(pool.map(lambda key: (key, short_life(started, key)), keys[RUNS // 2 :]))
        for watcher in watchers:
            wait_until(partial(has_all_ends, watcher, keys))
            for key in keys:
                changes = watcher.of(key)
                # A second run may have to wait for an RMID, because those of the first ones are in limbo.
                first = [(kind.replace("pending", "added"), generation) for kind, generation in kinds_of(changes)]
                kinds = [kind for kind in first if kind[0] != "changed"]
                assert kinds == [("added", 1), ("ended", 1), ("added", 2), ("ended", 2)]
                ends = [change for change in changes if change["change"] == "ended"]
                assert [change["totals"] for change in ends] == [totals[key], again[key]]
                assert {change["workload"]["state"] for change in ends} == {"completed"}


def has_all_ends(watcher: Watcher, keys: list[str]) -> bool:
    return all(("ended", 2) in kinds_of(watcher.of(key)) for key in keys)


def kinds_of(changes: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(change["change"], change["workload"]["generation"]) for change in changes]


def test_client_that_does_not_read_loses_its_stream_and_delays_nobody(
    started: Machine, process: StartProcess
) -> None:
    started.call("Assign", key="k", claim="me", pid=process().pid)
    with watching(started) as [watcher], contextlib.closing(socket.socket(socket.AF_UNIX)) as slow:
        slow.settimeout(60)
        slow.connect(started.socket)
        slow.sendall(wire.encode(wire.Call(WATCH, wire.encode_parameters({}), more=True)))
        # More than waits for one client: each change has 60 kB.
        attributes = {f"n{index}": "v" * 4000 for index in range(15)}
        for number in range(200):
            started.call("Create", key=f"k{number}", claim="me", attributes=attributes)
        started.call("Release", key="k", claim="me")
        wait_until(lambda: kinds_of(watcher.of("k"))[-1:] == [("ended", 1)])
        # First the reply that was under way when it fell behind, then the error.
        data = b""
        while not data.endswith(b"\0") or b"TooSlow" not in data[-2000:]:
            received = slow.recv(1 << 20)
            assert received, "the connection was closed without the error"
            data += received
        assert wire.decode(data.split(b"\0")[-2], wire.Reply).error == f"{MANAGER}.TooSlow"
        assert watcher.error is None


def test_stream_ends_with_the_connection_and_with_the_daemon(started: Machine) -> None:
    with Client(started.socket) as client:
        assert next(client.stream(WATCH)) == {"changes": [], "listed": True}
    descriptors = f"/proc/{started.daemon.pid if started.daemon else 0}/fd"
    before = len(os.listdir(descriptors))
    for _ in range(100):
        with Client(started.socket) as client:
            next(client.stream(WATCH))
    wait_until(lambda: len(os.listdir(descriptors)) <= before)
    with watching(started, 3) as watchers:
        assert started.stop() == 0
        for watcher in watchers:
            watcher.join()
            assert isinstance(watcher.error, ConnectionError)


def test_watch_after_a_kill_begins_with_what_is_present(started: Machine, process: StartProcess) -> None:
    started.call("Assign", key="k", claim="me", pid=process().pid, late=False)
    with watching(started) as [watcher]:
        assert kinds_of(watcher.of("k")) == [("present", 1)]
        started.kill()
        watcher.join()
        assert isinstance(watcher.error, ConnectionError)
    started.start()
    with watching(started) as [watcher]:
        assert kinds_of(watcher.of("k")) == [("present", 1)]
        totals = started.call("Release", key="k", claim="me")["totals"]
        wait_until(lambda: kinds_of(watcher.of("k"))[-1:] == [("ended", 1)])
        assert watcher.of("k")[-1]["totals"] == totals


def test_end_after_a_failed_record_is_reported_once(started: Machine, process: StartProcess) -> None:
    """The end is reported before the record says so: a record that cannot be written is written by a later tick."""
    started.call("Assign", key="k", claim="me", pid=process().pid)
    record = started.run / "records"
    with watching(started) as [watcher]:
        record.rename(record.with_name("away"))
        with pytest.raises(VarlinkError):
            started.call("Release", key="k", claim="me")
        record.with_name("away").rename(record)
        with contextlib.suppress(VarlinkError):
            started.call("Release", key="k", claim="me")
        assert started.reaches("k", "completed")
        started.call("Create", key="other", claim="me")
        wait_until(lambda: bool(watcher.of("other")))
        assert [kind for kind, _ in kinds_of(watcher.of("k"))].count("ended") == 1


def test_call_without_more_is_refused(started: Machine) -> None:
    with pytest.raises(VarlinkError) as caught:
        started.call("Watch")
    assert caught.value.name == "org.varlink.service.ExpectedMore"
