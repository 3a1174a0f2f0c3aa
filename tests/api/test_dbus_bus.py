# SPDX-License-Identifier: Apache-2.0
"""The D-Bus door and its bus: signals, the name, a bus that goes away, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import threading
from typing import Any

import pytest
from dbus_fast import Variant

from resctrlmond.workloads.tree_status import TreeStatus
from tests.api.dbus_lab import GROUP, MANAGER, NAME, ROOT, Client, Lab, descriptors, eventually
from tests.workloads.builders import drop


def test_signals_tell_what_changed(lab: Lab, process: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        async with lab.door(), Client(lab.address) as client, Client(lab.address) as writer:
            await client.listen()
            path = f"{ROOT}/group/sig_2d1"
            await writer.call("Create", "sa{sv}", "sig-1", {})
            assert await client.seen(ROOT, "GroupAdded", "sig-1", path)
            ((_, _, (added, interfaces)),) = [one for one in client.signals if one[1] == "InterfacesAdded"]
            assert added == path
            assert interfaces[GROUP]["Key"] == "sig-1"
            await writer.call("Assign", "sa{sv}", "sig-1", {"pid": Variant("u", process.pid)})
            assert await client.seen(ROOT, "GroupStateChanged", "sig-1", "active")
            told: dict[str, Any] = {}
            invalidated: set[str] = set()
            for where, member, body in client.signals:
                if member == "PropertiesChanged":
                    assert (where, body[0]) == (path, GROUP)
                    told |= body[1]
                    invalidated |= set(body[2])
            # How much of the creation was told with GroupAdded already is a matter of time.
            assert (told["State"], invalidated) == ("active", {"Members"})
            silent = {"Key", "Class", "Generation", "Claims", "Members", "Attributes", "CompletedAt"}
            assert not told.keys() & silent
            await writer.call("Release", "sa{sv}", "sig-1", {})
            assert await client.seen(ROOT, "GroupStateChanged", "sig-1", "completed")
            await asyncio.to_thread(drop, lab.manager.context.store, "sig-1")
            assert await client.seen(ROOT, "GroupRemoved", "sig-1", path)
            assert (ROOT, "InterfacesRemoved", [path, [GROUP]]) in client.signals

    asyncio.run(run())


def test_unchanged_properties_are_not_signalled(lab: Lab) -> None:
    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            record = await asyncio.to_thread(lab.manager.create, "still", owner="cli")
            await client.call("Status")
            await client.listen()
            await client.call("Read", "s", "still")
            door.changed("still", record)
            door.changed("never-was", None)
            await client.call("Create", "sa{sv}", "next", {})
            assert await client.seen(ROOT, "GroupAdded", "next", f"{ROOT}/group/next")
            assert not [one for one in client.signals if "still" in str(one) or "never" in str(one)]

    asyncio.run(run())


def test_a_bus_that_comes_back(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with lab.door() as door:
            async with Client(lab.address) as client:
                await client.call("Create", "sa{sv}", "stays", {})
                lab.bus.stop()
                assert await eventually(lambda: not door.connected)
            door.changed("stays", None)
            await asyncio.sleep(1.2)
            lab.bus.start()
            assert await eventually(lambda: door.connected)
            async with Client(lab.address) as client:
                assert (await client.call("Get", "s", "stays"))["key"] == "stays"

    asyncio.run(run())
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 2, warnings
    assert "lost its connection" in warnings[0]
    assert "cannot connect to the bus" in warnings[1]
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def test_a_start_without_a_bus(lab: Lab) -> None:
    async def run() -> None:
        lab.bus.stop()
        try:
            async with lab.door() as door:
                assert not door.connected
                lab.bus.start()
                assert await eventually(lambda: door.connected)
        finally:
            lab.bus.start()

    asyncio.run(run())


def test_the_name_belongs_to_somebody_else(lab: Lab) -> None:
    async def run() -> None:
        async with Client(lab.address) as other:
            await other.bus.request_name(NAME)
            with pytest.raises(lab.module.NameTaken, match=r"belongs to process [0-9]+ of user 0"):
                async with lab.door():
                    pass

    asyncio.run(run())


def test_a_lost_name_is_taken_back(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            with contextlib.suppress(lab.module.BusUnavailable):
                await door._connection._bus.ask("ReleaseName", "s", NAME)
            assert await eventually(lambda: not door.connected)
            assert await eventually(lambda: door.connected)
            assert "version" in await client.call("Status")

    asyncio.run(run())
    assert "on the bus was lost" in caplog.text


def test_closing_answers_what_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with Client(lab.address) as client:
            go_on = threading.Event()
            monkeypatch.setattr(lab.manager._watcher, "look", lambda: (go_on.wait(60), TreeStatus(""))[1])
            async with lab.door() as door:
                call = asyncio.ensure_future(client.call("List"))
                assert await eventually(lambda: door._connection._calls)
                asyncio.get_running_loop().call_later(0.2, go_on.set)
            assert (await call)[1] == []
            error, _ = await client.refused("List")
            assert error in ("org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner")

    asyncio.run(run())


def test_a_full_socket_buffer_ends_no_connection(lab: Lab) -> None:
    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            await client.listen()
            for number in range(2000):
                door._connection._bus.post(
                    lab.module.Message(
                        message_type=lab.module.MessageType.SIGNAL,
                        path=ROOT,
                        interface=MANAGER,
                        member="GroupRemoved",
                        signature="so",
                        body=["x" * (1000 + number), ROOT],
                    )
                )
            assert await eventually(lambda: len(client.signals) == 2000)
            assert [len(body[0]) for _, _, body in client.signals] == [*range(1000, 3000)]
            assert door.connected

    asyncio.run(run())


def test_connections_leave_no_descriptors(lab: Lab) -> None:
    async def run() -> None:
        # The first one makes what stays: the default executor, for one.
        async with lab.door(), Client(lab.address) as client:
            await client.call("Status")
        before = descriptors()
        for _ in range(5):
            async with lab.door(), Client(lab.address) as client:
                await client.call("Status")
        assert descriptors() == before

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_an_address_that_makes_no_sense(lab: Lab) -> None:
    async def run() -> None:
        for address in ("nonsense", "unix:path=/nowhere/bus", "carrier-pigeon:x=y", "unix:path=/" + "x" * 200):
            with pytest.raises(lab.module.BusUnavailable, match="cannot connect to the bus"):
                await lab.module.Bus.open(address, lab.bus.folder)

    asyncio.run(run())


def test_a_caller_is_taken_to_have_left_if_the_bus_does_not_answer(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.module, "PATIENCE_S", 90.0)

    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            bus = door._connection._bus
            begun = asyncio.get_running_loop().time()
            call = lab.module.Message(destination=NAME, path=ROOT, interface=MANAGER, member="Status")
            waits = door._connection._presence(call, client.bus.unique_name, begun)
            assert await asyncio.to_thread(waits)
            ended = asyncio.Event()

            async def stalled(*_: object) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            with monkeypatch.context() as patch:
                patch.setattr(bus, "ask", stalled)
                async with asyncio.timeout(60):
                    assert not await asyncio.to_thread(waits)
                    await ended.wait()

    asyncio.run(run())
