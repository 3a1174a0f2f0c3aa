# SPDX-License-Identifier: Apache-2.0
"""Reloads of the profiles: the next connection has the events that the profiles need, and no start is delayed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.nri import connector, nri_pb2, reloads
from resctrlmond.nri import plugin as adapter
from resctrlmond.nri.connector import Connector
from resctrlmond.nri.launched import Launched
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.memory import Memory
from resctrlmond.nri.messages import CREATE_MASK, MASK, Event, EventReport
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.reloads import Reloads
from resctrlmond.nri.session import Session
from resctrlmond.nri.updater import Updater
from resctrlmond.service.notify import Notify
from resctrlmond.sim.fuse.mount import Simulation
from tests.nri.conftest import UID, Node
from tests.nri.runtime import GO_READER, Plugin, Runtime

EVENT = nri_pb2.StateChangeEvent(
    event=int(Event.START_CONTAINER),
    pod=nri_pb2.PodSandbox(id="s", uid=UID),
    container=nri_pb2.Container(id="c", pod_sandbox_id="s", pid=1),
).SerializeToString()


class Switch(Memory):
    """Profiles that need creations if ``is_wanted`` is set. ``error`` is raised by each load, after ``waits``."""

    is_wanted = False

    def __init__(self, directory: str = "") -> None:
        super().__init__([directory] if directory else ())
        self.loads = 0
        self.error: Exception | None = None
        self.waits: threading.Event | None = None

    def load(self, otherwise: str) -> bool:
        self.loads += 1
        if self.waits is not None:
            assert self.waits.wait(60)
        if self.error is not None:
            raise self.error
        return super().load(otherwise)


class Recorder(adapter.Plugin):
    """A plugin whose events are answered by the test. ``switch`` are its profiles."""

    def __init__(self) -> None:
        self.switch = Switch()
        super().__init__(Updater(Manager("/none"), Pods()), self.switch)
        self.waiting: list[asyncio.Future[None]] = []

    def handle_event(self, report: EventReport) -> asyncio.Future[None]:
        self.waiting.append(super().handle_event(report))
        return self.waiting[-1]

    async def received(self, number: int) -> None:
        """Wait until so many events have arrived."""
        async with asyncio.timeout(60):
            while len(self.waiting) < number:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def connection(plugin: adapter.Plugin, **options: Any) -> AsyncIterator[tuple[Plugin, asyncio.Task[None]]]:
    """Yield the runtime's end of a configured connection, and the session at the other end."""
    own_end, other_end = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=own_end)
    session = asyncio.create_task(Session(reader, writer, plugin, lambda _: None, **options).run("n", "00"))
    with Plugin(other_end) as peer:
        other_end.settimeout(60)
        await asyncio.to_thread(peer.greet)
        yield peer, session
    await asyncio.gather(session, return_exceptions=True)


async def ended(session: asyncio.Task[None]) -> None:
    """Wait until the session has returned."""
    async with asyncio.timeout(60):
        await session


async def continues(session: asyncio.Task[None]) -> bool:
    """Whether the session has not ended after several attempts to end it."""
    done, _ = await asyncio.wait({session}, timeout=0.3)
    return not done


# -- the end of a connection


def test_event_that_has_arrived_gets_its_response_before_the_connection_ends() -> None:
    """The event was in the socket, or read and not processed yet, when the profiles needed other events."""

    async def run() -> None:
        plugin = Recorder()
        async with connection(plugin) as (peer, session):
            plugin.switch.is_wanted = True
            stream = peer.send("StateChange", EVENT)
            plugin.resubscribe()
            await plugin.received(1)
            plugin.resubscribe()
            assert await continues(session)
            # A second one while the first has no response.
            second = peer.send("StateChange", EVENT)
            await plugin.received(2)
            for done in plugin.waiting:
                done.set_result(None)
            await ended(session)
            assert {peer.answer()[0], peer.answer()[0]} == {stream, second}
            assert peer.is_closed()

    asyncio.run(run())


# In the header of a frame, in the header of a message, in its first frame, and between its two frames.
@pytest.mark.parametrize("length", [4, 12, 100, 8 + GO_READER])
def test_part_of_a_message_is_awaited_before_the_connection_ends(length: int) -> None:
    async def run() -> None:
        plugin = Recorder()
        async with connection(plugin) as (peer, session):
            sent: list[bytes] = []
            peer.raw = sent.append  # type: ignore[method-assign,assignment]
            event = nri_pb2.StateChangeEvent.FromString(EVENT)
            event.pod.labels["long"] = "x" * GO_READER
            peer.send("StateChange", event.SerializeToString())
            peer.socket.sendall(sent[0][:length])
            plugin.switch.is_wanted = True
            plugin.resubscribe()
            assert await continues(session)
            peer.socket.sendall(sent[0][length:])
            await plugin.received(1)
            plugin.waiting[0].set_result(None)
            await ended(session)
            assert peer.answer()[1].status.code == 0

    asyncio.run(run())


def test_response_at_the_time_limit_is_sent_before_the_connection_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        plugin = Recorder()
        async with connection(plugin) as (peer, session):
            stream = peer.send("StateChange", EVENT)
            await plugin.received(1)
            plugin.switch.is_wanted = True
            # The cancellation is reported, and then the connection may end, before the response is sent.
            plugin.waiting[0].add_done_callback(lambda _: plugin.resubscribe())
            plugin.waiting[0].cancel()
            await ended(session)
            assert peer.answer()[0] == stream

    asyncio.run(run())
    assert "before resctrlmond was updated" in caplog.text


def test_connection_remains_if_the_profiles_need_its_events_again() -> None:
    """The need was compared with that before the reload, not with the events of the connection."""

    async def run() -> None:
        plugin = Recorder()
        async with connection(plugin) as (peer, session):
            peer.send("StateChange", EVENT)
            await plugin.received(1)
            for is_wanted in (True, False):
                plugin.switch.is_wanted = is_wanted
                plugin.resubscribe()
            plugin.waiting[0].set_result(None)
            assert (await asyncio.to_thread(peer.answer))[1].status.code == 0
            assert await continues(session)
            # Without an event that has no response.
            for is_wanted in (True, False):
                plugin.switch.is_wanted = is_wanted
                plugin.resubscribe()
            assert await continues(session)
            assert (await asyncio.to_thread(peer.call, "Shutdown", b"")).status.code == 0

    asyncio.run(run())


def test_connection_that_was_configured_with_the_new_profiles_remains() -> None:
    """The runtime configured the plugin after the profiles were read, and before the reload had ended."""

    async def run() -> None:
        plugin = Recorder()
        plugin.switch.is_wanted = True
        async with connection(plugin) as (peer, session):
            plugin.resubscribe()
            assert await continues(session)
            assert (await asyncio.to_thread(peer.call, "Shutdown", b"")).status.code == 0

    asyncio.run(run())


def test_next_connection_is_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that starts before the next connection is late."""
    monkeypatch.setattr(connector, "RECONNECT_S", (3600.0, 3600.0))
    plugin, states = Recorder(), list[str]()
    path = str(tmp_path / "nri.sock")

    async def run() -> None:
        runtime = Runtime(path)
        connecting = asyncio.create_task(Connector(path, "n", "00", plugin, states.append).run())
        for is_wanted in (False, True, False):
            peer = await asyncio.to_thread(runtime.accept)
            assert await asyncio.to_thread(peer.greet) == (MASK | CREATE_MASK if is_wanted else MASK)
            plugin.switch.is_wanted = not is_wanted
            plugin.resubscribe()
            assert await asyncio.to_thread(peer.is_closed)
            peer.socket.close()
        connecting.cancel()
        await asyncio.wait({connecting})
        runtime.close()

    asyncio.run(run())
    assert set(states) == {"registered with containerd v1.7.24"}


def test_plugin_that_the_runtime_launched_keeps_its_only_connection(caplog: pytest.LogCaptureFixture) -> None:
    """It ended, and no container was monitored until the runtime was restarted."""
    own_end, other_end = socket.socketpair()

    async def run() -> None:
        plugin = Recorder()
        session = asyncio.create_task(Launched("n", "00", own_end.detach()).run(plugin, lambda _: None))
        with Plugin(other_end) as peer:
            other_end.settimeout(60)
            assert await asyncio.to_thread(peer.greet) == MASK
            plugin.switch.is_wanted = True
            plugin.resubscribe()
            assert await continues(session)
            for number in (1, 2):
                peer.send("StateChange", EVENT)
                await plugin.received(number)
                plugin.waiting[-1].set_result(None)
                assert (await asyncio.to_thread(peer.answer))[1].status.code == 0
        await ended(session)

    asyncio.run(run())
    assert caplog.text.count("restart the runtime") == 1


# -- reloads


@pytest.fixture
def notifications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield the socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield manager


async def reloaded(plugin: Recorder, manager: socket.socket) -> None:
    """Reload the profiles, and check the notifications."""
    notify = Notify()
    assert notify._notifier is not None
    with notify._notifier.socket:
        Reloads(plugin, notify).begin()
        assert (await asyncio.to_thread(manager.recv, 4096)).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert await asyncio.to_thread(manager.recv, 4096) == b"READY=1"


@pytest.mark.parametrize("case", ["nothing", "wrong file", "defect", "no memory"])
def test_reload_always_ends_for_the_service_manager(
    case: str, notifications: socket.socket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        plugin = Recorder()
        match case:
            case "wrong file":
                (tmp_path / "10.yaml").write_text("profiles: [\n")
                plugin.switch = plugin.memory = Switch(str(tmp_path))
            case "defect":
                plugin.switch.error = ZeroDivisionError()
            case "no memory":
                plugin.switch.error = MemoryError()
        await reloaded(plugin, notifications)
        assert plugin.switch.loads == 1

    with caplog.at_level("INFO"):
        asyncio.run(run())
    assert ("profiles reloaded" in caplog.text) == (case == "nothing")
    assert ("the old ones stay in use" in caplog.text) == (case != "nothing")


def test_reload_ends_and_applies_the_profiles_later_if_a_disk_does_not_respond(
    notifications: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reloads, "RELOAD_S", 0.05)

    async def run() -> None:
        plugin = Recorder()
        applied = asyncio.Event()
        plugin.resubscribe = applied.set
        plugin.switch.waits = threading.Event()
        await reloaded(plugin, notifications)
        assert not applied.is_set()
        plugin.switch.waits.set()
        async with asyncio.timeout(60):
            await applied.wait()

    asyncio.run(run())
    assert "the old ones stay in use until they are read" in caplog.text


def test_disk_that_does_not_respond_does_not_keep_the_plugin_from_registering(node: Node, tmp_path: Path) -> None:
    """One of the files is on a filesystem whose server is stopped."""
    node.stop_adapter()
    directory, slow = tmp_path / "profiles.d", tmp_path / "slow"
    directory.mkdir()
    slow.mkdir()
    (directory / "10.yaml").write_text("profiles: {tight: {swap: deny}}\ndefault_profile: tight\n")
    with Simulation(str(slow), "intel-rdt") as simulation:
        (slow / "mon_groups" / "empty").mkdir()
        (directory / "20.yaml").symlink_to(slow / "mon_groups" / "empty" / "tasks")
        os.kill(simulation.pid, signal.SIGSTOP)
        try:
            node.start_adapter("--profiles-dir", str(directory))
            with node.connected():
                assert node.stop_adapter() == 0, "the thread that reads the file does not delay the end"
            node.start_adapter("--profiles-dir", str(directory))
            with node.connected() as plugin:
                assert plugin.greet() == MASK
                container = node.start_container(plugin, node.pod())
                assert node.machine.tasks(UID) == {container.pid}
                assert "sets no limits of memory and mounts nothing until they are read" in node.log_text()
                os.kill(simulation.pid, signal.SIGCONT)
                assert plugin.is_closed()
            with node.connected() as plugin:
                assert plugin.greet() == MASK | CREATE_MASK
        finally:
            os.kill(simulation.pid, signal.SIGCONT)
