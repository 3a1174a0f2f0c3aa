# SPDX-License-Identifier: Apache-2.0
"""The D-Bus server and its bus: signals, the bus name, a lost bus, and leaked descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import Variant

from resctrlmond.api.access import Caller
from resctrlmond.workloads.upkeep.tree_status import TreeStatus
from resctrlmond.workloads.verbs.create import create
from tests.api.private_bus import (
    LIMITS_EXCEEDED,
    MANAGER,
    NAME,
    NOBODY,
    READERS,
    ROOT,
    WORKLOAD,
    BusctlError,
    BusHost,
    Client,
    descriptors,
    eventually,
)
from tests.workloads.builders import drop


def test_signals_report_changes(host: BusHost, process: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client, Client(host.address) as writer:
            await client.listen()
            path = f"{ROOT}/workload/sig_2d1"
            await writer.call("Create", "sa{sv}", "sig-1", {})
            assert await client.has_signal(ROOT, "WorkloadAdded", "sig-1", path)
            ((_, _, (added, interfaces)),) = [signal for signal in client.signals if signal[1] == "InterfacesAdded"]
            assert added == path
            assert interfaces[WORKLOAD]["Key"] == "sig-1"
            await writer.call("Assign", "sa{sv}", "sig-1", {"pid": Variant("u", process.pid)})
            assert await client.has_signal(ROOT, "WorkloadStateChanged", "sig-1", "active")
            changed: dict[str, Any] = {}
            invalidated: set[str] = set()
            for signal_path, member, body in client.signals:
                if member == "PropertiesChanged":
                    assert (signal_path, body[0]) == (path, WORKLOAD)
                    changed |= body[1]
                    invalidated |= set(body[2])
            # A part of the properties can already have been sent with WorkloadAdded, which depends on the timing.
            assert (changed["State"], invalidated) == ("active", {"Members"})
            unsignalled = {"Key", "Class", "Generation", "Claims", "Members", "Attributes", "CompletedAt"}
            assert not changed.keys() & unsignalled
            await writer.call("Release", "sa{sv}", "sig-1", {})
            assert await client.has_signal(ROOT, "WorkloadStateChanged", "sig-1", "completed")
            await asyncio.to_thread(drop, host.manager.context.store, "sig-1")
            assert await client.has_signal(ROOT, "WorkloadRemoved", "sig-1", path)
            assert (ROOT, "InterfacesRemoved", [path, [WORKLOAD]]) in client.signals

    asyncio.run(run())


def test_unchanged_properties_are_not_signalled(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            await client.listen()
            record = await asyncio.to_thread(create, host.manager.context, "still", owner="cli")
            # The signals of its creation are sent after a delay, before those of a later workload.
            await client.call("Create", "sa{sv}", "first", {})
            assert await client.has_signal(ROOT, "WorkloadAdded", "first", f"{ROOT}/workload/first")
            client.signals.clear()
            await client.call("Read", "s", "still")
            server.changed("still", record)
            server.changed("never-was", None)
            await client.call("Create", "sa{sv}", "next", {})
            assert await client.has_signal(ROOT, "WorkloadAdded", "next", f"{ROOT}/workload/next")
            assert not [signal for signal in client.signals if "still" in str(signal) or "never" in str(signal)]

    asyncio.run(run())


def test_signals_are_sent_only_while_a_client_has_subscribed(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client, Client(host.address) as other:
            subscribers = server._connection._subscribers
            await client.listen()
            await client.call("Subscribe")
            await client.call("Unsubscribe")
            assert not subscribers._callers
            await client.call("Create", "sa{sv}", "unseen", {})
            async with Client(host.address) as third:
                await asyncio.gather(other.call("Subscribe"), third.call("Subscribe"))
                await client.call("Unsubscribe")
                await client.call("Create", "sa{sv}", "seen", {})
                assert await client.has_signal(ROOT, "WorkloadAdded", "seen", f"{ROOT}/workload/seen")
                assert "unseen" not in str(client.signals)
                await other.call("Unsubscribe")
                await client.call("Release", "sa{sv}", "unseen", {})
                assert await client.has_signal(ROOT, "WorkloadStateChanged", "unseen", "completed")
            assert await eventually(lambda: not subscribers._callers), "the last one has left the bus"
            client.signals.clear()
            await client.call("Release", "sa{sv}", "seen", {})
            await other.call("Subscribe")
            await client.call("Create", "sa{sv}", "next", {})
            assert await client.has_signal(ROOT, "WorkloadAdded", "next", f"{ROOT}/workload/next")
            assert {body[0] for _, member, body in client.signals if member.startswith("Workload")} == {"next"}

    asyncio.run(run())


def test_client_that_leaves_while_it_subscribes_is_forgotten(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            connection = server._connection
            async with Client(host.address) as other:
                name, caller = str(other.bus.unique_name), await connection._callers.find(str(other.bus.unique_name))
            await connection._subscribers.add(name, caller)
            assert not connection._subscribers._callers
            await client.call("Create", "sa{sv}", "unseen", {})
            assert not connection.announcer._changed

    asyncio.run(run())


def test_readers_subscribe_but_leave_room_for_root(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["resctrlmond.api.dbus.subscribers"]
    monkeypatch.setattr(module, "MOST", 2)
    monkeypatch.setattr(module, "MOST_OF_READERS", 1)
    subscribe = ("call", NAME, ROOT, MANAGER, "Subscribe")

    async def run() -> None:
        async with host.serving() as server, Client(host.address) as first, Client(host.address) as second:
            with pytest.raises(BusctlError, match="Access denied"):
                await host.busctl(*subscribe, uid=NOBODY)
            await host.busctl(*subscribe, uid=NOBODY, groups=(READERS,))
            subscribers = server._connection._subscribers
            reader = Caller(NOBODY, frozenset({READERS}), 0)
            subscribers._callers["reader"] = reader
            with pytest.raises(BusctlError):
                await host.busctl(*subscribe, uid=NOBODY, groups=(READERS,))
            await first.call("Subscribe")
            assert (await second.refused("Subscribe"))[0] == LIMITS_EXCEEDED
            await first.call("Subscribe")

    asyncio.run(run())


def test_server_reconnects_after_a_restart_of_the_bus(host: BusHost, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with host.serving() as server:
            async with Client(host.address) as client:
                await client.call("Create", "sa{sv}", "stays", {})
                host.bus.stop()
                assert await eventually(lambda: not server.connected)
            server.changed("stays", None)
            assert await eventually(lambda: any("cannot connect" in one.getMessage() for one in caplog.records))
            host.bus.start()
            assert await eventually(lambda: server.connected)
            async with Client(host.address) as client:
                assert (await client.call("Get", "s", "stays"))[0]["key"] == "stays"

    asyncio.run(run())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2, warnings
    assert "lost its connection" in warnings[0]
    assert "cannot connect to the bus" in warnings[1]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_server_that_started_without_a_bus_connects_later(host: BusHost) -> None:
    async def run() -> None:
        host.bus.stop()
        try:
            async with host.serving() as server:
                assert not server.connected
                host.bus.start()
                assert await eventually(lambda: server.connected)
        finally:
            host.bus.start()

    asyncio.run(run())


def test_start_fails_if_another_process_owns_the_name(host: BusHost) -> None:
    async def run() -> None:
        async with Client(host.address) as other:
            await other.bus.request_name(NAME)
            with pytest.raises(host.module.NameTaken, match=r"belongs to process [0-9]+ of user 0"):
                async with host.serving():
                    pass

    asyncio.run(run())


def test_server_gets_a_lost_name_again(host: BusHost, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            with contextlib.suppress(host.module.BusUnavailable):
                await server._connection._bus.ask("ReleaseName", "s", NAME)
            assert await eventually(lambda: not server.connected)
            assert await eventually(lambda: server.connected)
            assert "version" in await client.call("Status")

    asyncio.run(run())
    assert "on the bus was lost" in caplog.text


def test_running_call_gets_its_reply_before_the_server_closes(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with Client(host.address) as client:
            go_on = threading.Event()
            monkeypatch.setattr(host.manager.watcher, "look", lambda: (go_on.wait(60), TreeStatus(""))[1])
            async with host.serving() as server:
                call = asyncio.ensure_future(client.call("List"))
                assert await eventually(lambda: server._connection._calls)
                asyncio.get_running_loop().call_later(0.2, go_on.set)
            assert (await call)[1] == []
            error, _ = await client.refused("List")
            assert error in ("org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner")

    asyncio.run(run())


def test_full_socket_buffer_does_not_close_the_connection(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            await client.listen()
            for number in range(2000):
                server._connection._bus.post(
                    host.module.Message(
                        message_type=host.module.MessageType.SIGNAL,
                        path=ROOT,
                        interface=MANAGER,
                        member="WorkloadRemoved",
                        signature="so",
                        body=["x" * (1000 + number), ROOT],
                    )
                )
            assert await eventually(lambda: len(client.signals) == 2000)
            assert [len(body[0]) for _, _, body in client.signals] == [*range(1000, 3000)]
            assert server.connected

    asyncio.run(run())


def test_connections_leak_no_descriptors(host: BusHost) -> None:
    async def run() -> None:
        # The first connection opens descriptors that stay open, as those of the default executor.
        async with host.serving(), Client(host.address) as client:
            await client.call("Status")
        before = descriptors()
        for _ in range(5):
            async with host.serving(), Client(host.address) as client:
                await client.call("Status")
        assert descriptors() == before

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_invalid_address_is_refused(host: BusHost) -> None:
    async def run() -> None:
        for address in ("nonsense", "unix:path=/nowhere/bus", "carrier-pigeon:x=y", "unix:path=/" + "x" * 200):
            with pytest.raises(host.module.BusUnavailable, match="cannot connect to the bus"):
                await host.module.Bus.open(address, host.bus.folder)

    asyncio.run(run())


def test_caller_counts_as_gone_if_the_bus_does_not_reply(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.module, "PATIENCE_S", 90.0)

    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            bus = server._connection._bus
            started = asyncio.get_running_loop().time()
            call = host.module.Message(destination=NAME, path=ROOT, interface=MANAGER, member="Status")
            is_waiting = server._connection._presence(call, client.bus.unique_name, started)
            assert await asyncio.to_thread(is_waiting)
            ended = asyncio.Event()

            async def stalled(*_: object) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            with monkeypatch.context() as patch:
                patch.setattr(bus, "ask", stalled)
                async with asyncio.timeout(60):
                    assert not await asyncio.to_thread(is_waiting)
                    await ended.wait()

    asyncio.run(run())


def test_connection_that_the_bus_does_not_complete_leaves_no_reader(
    host: BusHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop would call it for another socket with that number."""
    monkeypatch.setattr(sys.modules["resctrlmond.api.dbus.library"], "_CONNECT_TIMEOUT_S", 1.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        while (line := await reader.readline()) != b"BEGIN\r\n":
            writer.write(b"AGREE_UNIX_FD\r\n" if b"NEGOTIATE" in line else b"OK 0123456789abcdef\r\n")
        await reader.read()
        writer.close()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        added: set[int] = set()
        add, remove = loop.add_reader, loop.remove_reader

        def add_reader(descriptor: Any, *args: Any) -> None:
            added.add(descriptor if isinstance(descriptor, int) else descriptor.fileno())
            add(descriptor, *args)

        def remove_reader(descriptor: Any) -> bool:
            added.discard(descriptor if isinstance(descriptor, int) else descriptor.fileno())
            return remove(descriptor)

        monkeypatch.setattr(loop, "add_reader", add_reader)
        monkeypatch.setattr(loop, "remove_reader", remove_reader)
        path = tmp_path / "bus"
        async with await asyncio.start_unix_server(serve, path):
            with pytest.raises(host.module.BusUnavailable, match="cannot connect to the bus"):
                await host.module.Bus.open(f"unix:path={path}", host.bus.folder)
        assert added == set()

    asyncio.run(run())
