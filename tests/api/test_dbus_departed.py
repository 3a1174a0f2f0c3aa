# SPDX-License-Identifier: Apache-2.0
"""Connections to the bus that send a call and disconnect neither delay nor displace the calls of root."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import threading
from typing import Any

import pytest

from tests.api.private_bus import MANAGER, NAME, NOBODY, READERS, ROOT, BusHost, Client, eventually
from tests.flood.attack import connect_to_bus, marshal, own_long_names

# More than the daemon keeps of a sender while it waits for credentials, and more than a batch of lookups.
CONNECTIONS = 1100


def _call_and_disconnect(address: str, connections: int) -> None:
    call = marshal("Read", "s", ["no-such-key"])
    for _ in range(connections):
        with connect_to_bus(address) as connection:
            connection.sendall(call)


def test_calls_of_disconnected_senders_do_not_displace_a_call_of_root(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with host.serving() as server:
            admission, callers = server._connection._admission, server._connection._callers
            find, find_departed = callers.find, callers.find_departed
            requests: list[str] = []
            go_on = asyncio.Event()

            async def late(sender: str) -> Any:
                requests.append(sender)
                await go_on.wait()
                return await find(sender)

            async def late_list(senders: Any) -> Any:
                await go_on.wait()
                return await find_departed(senders)

            monkeypatch.setattr(callers, "find", late)
            monkeypatch.setattr(callers, "find_departed", late_list)
            await asyncio.to_thread(_call_and_disconnect, host.address, CONNECTIONS)
            assert await eventually(lambda: admission._unknown_calls == CONNECTIONS)
            async with Client(host.address) as client:
                calls = [asyncio.create_task(client.call("Status")) for _ in range(3)]
                assert await eventually(lambda: admission._unknown_calls == CONNECTIONS + 3)
                go_on.set()
                assert all("version" in status for status in await asyncio.gather(*calls))
            # The server asked the bus for a list of its connections, not for the credentials of each closed one.
            assert len(requests) < 100
            assert await eventually(lambda: not admission._calls)
            assert (admission._unknown, admission._unknown_calls, admission._unknown_bytes) == ({}, 0, 0)

    asyncio.run(run())


def test_list_of_names_that_is_too_long_delays_no_call_of_root(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After such a list, all calls of new senders failed for as long as the daemon ran."""

    async def run() -> None:
        async with host.serving() as server:
            admission, callers = server._connection._admission, server._connection._callers
            find = callers.find
            go_on = asyncio.Event()

            async def late(sender: str) -> Any:
                await go_on.wait()
                return await find(sender)

            monkeypatch.setattr(callers, "find", late)
            with own_long_names(host.address):
                await asyncio.to_thread(_call_and_disconnect, host.address, 100)
                assert await eventually(lambda: admission._unknown_calls == 100)
                go_on.set()
                assert "version" in (await host.busctl("call", NAME, ROOT, MANAGER, "Status"))["data"][0]
            assert await eventually(lambda: not callers.can_list)
            assert await eventually(lambda: not admission._calls)

    asyncio.run(run())


def test_late_reply_of_the_bus_delays_only_the_call_of_its_sender(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as slow, Client(host.address) as quick:
            requested, go_on = asyncio.Event(), asyncio.Event()
            find = server._connection._callers.find

            async def late(sender: str) -> Any:
                if sender == slow.bus.unique_name:
                    requested.set()
                    await go_on.wait()
                return await find(sender)

            monkeypatch.setattr(server._connection._callers, "find", late)
            waiting = asyncio.create_task(slow.call("Status"))
            await requested.wait()
            async with asyncio.timeout(60):
                assert "version" in await quick.call("Status")
            go_on.set()
            assert "version" in await waiting

    asyncio.run(run())


@pytest.mark.parametrize("lost", [1, 2])
def test_call_whose_credentials_are_lost_gets_a_reply(
    host: BusHost, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The bus drops replies to the daemon while too many messages to it are unread."""

    async def run() -> None:
        monkeypatch.setattr(importlib.import_module("resctrlmond.api.dbus.library"), "REPLY_TIMEOUT_S", 1.0)
        async with host.serving() as server, Client(host.address) as client:
            bus = server._connection._bus
            call = bus.call
            left = lost

            async def lossy(message: Any) -> Any:
                nonlocal left
                if left and message.body == [client.bus.unique_name]:
                    left -= 1
                    await asyncio.Event().wait()
                return await call(message)

            monkeypatch.setattr(bus, "call", lossy)
            async with asyncio.timeout(60):
                if lost == 1:
                    assert "version" in await client.call("Status")
                else:
                    assert (await client.refused("Status"))[0] == "org.freedesktop.DBus.Error.NoReply"
            assert not (left or server._connection._admission._unknown)

    asyncio.run(run())


def test_unexpected_error_in_the_admission_of_a_call_is_its_reply(
    host: BusHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            admission = server._connection._admission
            monkeypatch.setattr(admission, "_admit", lambda _call, _caller: 1 / 0)
            async with asyncio.timeout(60):
                error, _ = await client.refused("Status")
            assert error == "org.resctrlmon1.Error.InternalError"
            assert not admission._calls

    asyncio.run(run())
    assert "division by zero" in caplog.text


def test_queued_calls_of_disconnected_readers_are_dropped_in_a_flood(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists for readers that had left slowed all threads of the daemon for many seconds."""

    async def run() -> None:
        look_now, find_now = threading.Event(), asyncio.Event()
        look = host.manager.watcher.look
        monkeypatch.setattr(host.manager.watcher, "look", lambda: (look_now.wait(60), look())[1])
        command = ["busctl", f"--address={host.address}", "call", NAME, ROOT, MANAGER, "List"]
        async with host.serving() as server:
            admission, callers = server._connection._admission, server._connection._callers
            readers = [
                subprocess.Popen(
                    command, user=NOBODY, group=NOBODY, extra_groups=[READERS], stdout=subprocess.DEVNULL
                )
                for _ in range(8)
            ]
            try:
                assert await eventually(lambda: len(admission._queues.get(NOBODY, ())) == 4)
            finally:
                for reader in readers:
                    reader.kill()
                    reader.wait()
            find = callers.find

            async def late(sender: str) -> Any:
                await find_now.wait()
                return await find(sender)

            monkeypatch.setattr(callers, "find", late)
            try:
                await asyncio.to_thread(_call_and_disconnect, host.address, 100)
                assert await eventually(lambda: not admission._queues.get(NOBODY))
            finally:
                find_now.set()
                look_now.set()
            assert await eventually(lambda: not admission._calls)
            assert not (admission._running or admission._queues)

    asyncio.run(run())
