# SPDX-License-Identifier: Apache-2.0
"""Connections to the bus that send a call and disconnect neither delay nor displace the calls of root."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.api.private_bus import MANAGER, NAME, ROOT, BusHost, eventually
from tests.flood.attack import connect_to_bus, marshal

# More than the daemon keeps of a sender while it waits for credentials, and more than a batch of lookups.
CONNECTIONS = 1100


def _call_and_disconnect(address: str, connections: int) -> None:
    call = marshal("Read", "s", ["no-such-key"])
    for _ in range(connections):
        with connect_to_bus(address) as connection:
            connection.sendall(call)


def test_calls_of_disconnected_senders_do_not_displace_a_call_of_root(host: BusHost, monkeypatch: Any) -> None:
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
