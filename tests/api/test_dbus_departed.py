# SPDX-License-Identifier: Apache-2.0
"""Connections to the bus that send a call and disconnect neither delay nor displace the calls of root."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from typing import Any

import pytest

from tests.api.private_bus import MANAGER, NAME, NOBODY, READERS, ROOT, BusHost, eventually
from tests.flood.attack import connect_to_bus, marshal

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
            find = callers.find
            asked: list[str] = []
            go_on = asyncio.Event()

            async def late(sender: str) -> Any:
                asked.append(sender)
                await go_on.wait()
                return await find(sender)

            monkeypatch.setattr(callers, "find", late)
            await asyncio.to_thread(_call_and_disconnect, host.address, CONNECTIONS)
            assert await eventually(lambda: admission._unknown_calls == CONNECTIONS)
            status = asyncio.create_task(host.busctl("call", NAME, ROOT, MANAGER, "Status"))
            assert await eventually(lambda: admission._unknown_calls == CONNECTIONS + 1)
            go_on.set()
            assert "version" in (await status)["data"][0]
            # The server asked the bus for a list of its connections, not for the credentials of each closed one.
            assert len(asked) < 100
            assert await eventually(lambda: not admission._calls)
            assert (admission._unknown, admission._unknown_calls, admission._unknown_bytes) == ({}, 0, 0)

    asyncio.run(run())


def test_queued_calls_of_disconnected_readers_are_dropped_in_a_flood(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists for readers that had left slowed all threads of the daemon for many seconds."""

    async def run() -> None:
        look_now, find_now = threading.Event(), asyncio.Event()
        look = host.manager._watcher.look
        monkeypatch.setattr(host.manager._watcher, "look", lambda: (look_now.wait(60), look())[1])
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
                assert await eventually(lambda: admission._unknown_calls == 100)
                find_now.set()
                assert await eventually(lambda: not admission._unknown)
                assert not admission._queues.get(NOBODY)
            finally:
                look_now.set()
            assert await eventually(lambda: not admission._calls)
            assert not (admission._running or admission._queues)

    asyncio.run(run())
