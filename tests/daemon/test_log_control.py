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

import dbus_fast
import dbus_fast.aio
import pytest

from resctrlmond.sim.fuse.mount import Simulation
from tests.api.private_bus import NAME, PROPERTIES, PrivateBus

LOG = "org.freedesktop.LogControl1"


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    """The address of a bus with the daemon on it, which logs from warnings on."""
    (tmp_path / "resctrl").mkdir()
    bus = PrivateBus(tmp_path)
    with contextlib.closing(Closing(bus)), Simulation(str(tmp_path / "resctrl"), "intel-rdt"):
        command = [sys.executable, "-m", "tests.bench.serve", str(tmp_path)]
        daemon = subprocess.Popen(command, env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": bus.address})
        yield bus.address
        daemon.terminate()
        daemon.wait()


class Closing:
    """Starts a bus, and stops it when it is closed."""

    def __init__(self, bus: PrivateBus) -> None:
        bus.start()
        self.close = bus.stop


def test_the_level_is_the_one_that_was_set(bus: str) -> None:
    """It was the configuration's, whatever root had set."""

    async def run() -> None:
        client = await dbus_fast.aio.MessageBus(bus_address=bus).connect()

        async def call(member: str, signature: str, *body: object) -> list[object]:
            call = dbus_fast.Message(
                destination=NAME,
                path="/org/freedesktop/LogControl1",
                interface=PROPERTIES,
                member=member,
                signature=signature,
                body=[LOG, *body],
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
