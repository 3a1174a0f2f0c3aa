# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the interfaces: a bus, a manager on the simulator, a varlink server, and a process to monitor."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.api import types
from resctrlmond.api.access import Caller
from resctrlmond.api.service import Service
from resctrlmond.api.verbs import COMMON_ERRORS, Verb
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import Tree
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.groups import removal
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store
from tests.api.private_bus import BusHost, PrivateBus, load_server
from tests.api.varlink_server import RunningServer, running
from tests.workloads.builders import save, workload


@pytest.fixture(scope="module")
def manager() -> Iterator[Manager]:
    """Yield a manager on a simulated resctrl, shared by all tests of a module."""
    with tempfile.TemporaryDirectory() as top:
        for name in ("resctrl", "records", "groups", "completed"):
            os.mkdir(os.path.join(top, name))
        with Simulation(os.path.join(top, "resctrl")) as simulation:
            manager = Manager(
                Tree.open(simulation.mountpoint, allow_simulation=True),
                Store(os.path.join(top, "records")),
                Snapshots(os.path.join(top, "groups"), os.path.join(top, "completed")),
                Mark(os.getegid(), "boot"),
                Settings(),
            )
            manager.recover()
            yield manager


def save_long_workloads(manager: Manager, count: int) -> None:
    """Save workloads with the largest attributes that callers can set, in total too long for one reply."""
    attributes = {"pod.uid": "x"} | {f"n{index}": "v" * 4000 for index in range(15)}
    for number in range(count):
        save(manager.context.store, workload(f"long-{number:03}", State.PENDING, attributes=attributes))


@pytest.fixture(autouse=True)
def _errors_are_declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which a verb returns an error that its row does not list."""
    call = Service.call
    undeclared: list[tuple[str, ResctrlError]] = []

    async def checked(self: Service, verb: Verb, request: types.Request, caller: Caller) -> types.Reply:
        try:
            return await call(self, verb, request, caller)
        except ResctrlError as error:
            if not isinstance(error, (*verb.errors, *COMMON_ERRORS)):
                undeclared.append((verb.name, error))
            raise

    monkeypatch.setattr(Service, "call", checked)
    yield
    assert undeclared == []


@pytest.fixture(scope="module")
def private_bus() -> Iterator[PrivateBus]:
    """Yield a bus that tests can start and stop."""
    with tempfile.TemporaryDirectory() as folder:
        bus = PrivateBus(Path(folder))
        yield bus
        bus.stop()


@pytest.fixture(params=["dbus_fast", "dbus_next"])
def host(
    request: pytest.FixtureRequest,
    private_bus: PrivateBus,
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> BusHost:
    """Return a host for each of the two D-Bus libraries, with a running bus and without workloads."""
    private_bus.start()
    for record in manager.context.store.all():
        with manager.context.store.transaction(record.key) as txn:
            if not record.state.is_over:
                removal.finish(manager.context, txn, "the test has ended")
            txn.drop()
    return BusHost(private_bus, manager, load_server(request.param, monkeypatch))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """Yield a varlink server with the interface for tests."""
    with running(str(tmp_path / "socket")) as server:
        yield server


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that sleeps, and end it after the test."""
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()
