# SPDX-License-Identifier: Apache-2.0
"""org.freedesktop.LogControl1 of the daemon itself, on a private bus."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dbus_fast
import dbus_fast.aio
import pytest

from resctrlmond.sim.fuse.mount import Simulation
from tests.api.private_bus import LOG_CONTROL, NAME, PROPERTIES, PrivateBus


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    """Return the address of a bus with a daemon whose configured log level is warning."""
    (tmp_path / "resctrl").mkdir()
    bus = PrivateBus(tmp_path)
    bus.start()
    with contextlib.ExitStack() as stack:
        stack.callback(bus.stop)
        stack.enter_context(Simulation(str(tmp_path / "resctrl"), "intel-rdt"))
        command = [sys.executable, "-m", "tests.bench.serve", str(tmp_path)]
        daemon = subprocess.Popen(command, env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": bus.address})
        yield bus.address
        daemon.terminate()
        daemon.wait()


def test_log_level_that_root_sets_is_returned(bus: str) -> None:
    """LogLevel was always that of the configuration, also after root had set another one."""

    async def run() -> None:
        client = await dbus_fast.aio.MessageBus(bus_address=bus).connect()

        async def call(member: str, signature: str, *body: object) -> list[Any]:
            call = dbus_fast.Message(
                destination=NAME,
                path=LOG_CONTROL[0],
                interface=PROPERTIES,
                member=member,
                signature=signature,
                body=[LOG_CONTROL[1], *body],
            )
            async with asyncio.timeout(60):
                while True:
                    reply = await client.call(call)
                    if reply.error_name != "org.freedesktop.DBus.Error.ServiceUnknown":
                        break
                    await asyncio.sleep(0.05)
            assert not reply.error_name, reply.body
            return list(reply.body)

        assert (await call("Get", "ss", "LogLevel"))[0].value == "warning"
        await call("Set", "ssv", "LogLevel", dbus_fast.Variant("s", "debug"))
        assert (await call("Get", "ss", "LogLevel"))[0].value == "debug"
        client.disconnect()

    asyncio.run(run())
