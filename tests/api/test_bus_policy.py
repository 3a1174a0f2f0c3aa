# SPDX-License-Identifier: Apache-2.0
"""The policy that is installed for the system bus, with a real dbus-daemon."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dbus_fast
import dbus_fast.aio
import pytest

from tests.api.private_bus import NAME, NOBODY, PrivateBus

# The user "daemon" of every system: the bus refuses the connections of unknown users.
OTHER = 1
ROOT = Path(__file__).parents[2]
# Sends a signal and a call to the name. The bus delivers them in this order.
READER = """
import asyncio, os, sys
import dbus_fast, dbus_fast.aio
from dbus_fast import Message, MessageType

async def main(address, name):
    bus = await dbus_fast.aio.MessageBus(bus_address=address).connect()
    target = {"destination": name, "path": "/a", "interface": "a.b"}
    await bus.send(Message(**target, member="Flood", message_type=MessageType.SIGNAL))
    print((await bus.call(Message(**target, member="Call"))).message_type.name)

os.setuid(int(sys.argv[1]))
asyncio.run(main(*sys.argv[2:]))
"""


def policy_for(uid: int) -> str:
    """Return the installed policy, with the rules of the group of readers for that user."""
    text = (ROOT / "systemd" / "org.resctrlmon1.dbus.conf").read_text(encoding="ascii")
    rules = text.split("<busconfig>")[1].split("</busconfig>")[0]
    return rules.replace('group="resctrlmon"', f'user="{uid}"')


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that other users can enter. The path of a socket has at most 107 bytes (unix(7))."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize(("uid", "reply"), [(NOBODY, "METHOD_RETURN"), (OTHER, "ERROR")])
def test_readers_send_only_calls_and_other_users_nothing(folder: Path, uid: int, reply: str) -> None:
    bus = PrivateBus(folder, f'</policy>{policy_for(NOBODY)}<policy context="default">')
    bus.start()
    received = []

    def answer(message: dbus_fast.Message) -> dbus_fast.Message | None:
        if message.sender != "org.freedesktop.DBus":
            received.append(message.member)
        is_call = message.message_type is dbus_fast.MessageType.METHOD_CALL
        return dbus_fast.Message.new_method_return(message) if is_call else None

    async def run() -> None:
        owner = await dbus_fast.aio.MessageBus(bus_address=bus.address).connect()
        await owner.request_name(NAME)
        owner.add_message_handler(answer)
        command = [sys.executable, "-c", READER, str(uid), bus.address, NAME]
        reader = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        output, _ = await reader.communicate()
        assert output.decode().strip() == reply
        owner.disconnect()

    try:
        asyncio.run(run())
    finally:
        bus.stop()
    assert received == (["Call"] if reply == "METHOD_RETURN" else [])
