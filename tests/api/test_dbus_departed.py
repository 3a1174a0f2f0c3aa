# SPDX-License-Identifier: Apache-2.0
"""Connections to the bus that send one call and leave do not delay, and do not displace, the calls of root."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.api.dbus_lab import MANAGER, NAME, ROOT, Lab, eventually
from tests.flood.attack import connect_to_bus, marshal

# More than the daemon keeps of one sender while it waits for credentials, and more than one batch of lookups.
CONNECTIONS = 1100


def _call_and_leave(address: str, connections: int) -> None:
    call = marshal("Read", "s", ["no-such-key"])
    for _ in range(connections):
        with connect_to_bus(address) as connection:
            connection.sendall(call)


def test_calls_of_senders_that_have_left_do_not_displace_a_call_of_root(lab: Lab, monkeypatch: Any) -> None:
    async def run() -> None:
        async with lab.door() as door:
            admission, callers = door._connection._admission, door._connection._callers
            find = callers.find
            asked: list[str] = []
            go_on = asyncio.Event()

            async def late(sender: str) -> Any:
                asked.append(sender)
                await go_on.wait()
                return await find(sender)

            monkeypatch.setattr(callers, "find", late)
            await asyncio.to_thread(_call_and_leave, lab.address, CONNECTIONS)
            assert await eventually(lambda: admission._unknown_calls == CONNECTIONS)
            status = asyncio.create_task(lab.busctl("call", NAME, ROOT, MANAGER, "Status"))
            assert await eventually(lambda: admission._unknown_calls == CONNECTIONS + 1)
            go_on.set()
            assert "version" in (await status)["data"][0]
            # The bus was asked for a list of its connections, not for the credentials of each that had left.
            assert len(asked) < 100
            assert await eventually(lambda: not admission._calls)
            assert (admission._unknown, admission._unknown_calls, admission._unknown_bytes) == ({}, 0, 0)

    asyncio.run(run())
