# SPDX-License-Identifier: Apache-2.0
"""Callers that do not read what the bus holds for them, and a busy bus, delay no call of root."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import dbus_fast
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.api.dbus.gate import MessageSizes
from resctrlmond.workloads.model import State
from tests.api.dbus_lab import (
    MANAGER,
    NAME,
    NOBODY,
    READERS,
    ROOT,
    BusctlError,
    Client,
    Lab,
    PrivateBus,
    eventually,
)
from tests.workloads.builders import save, workload

# Users that exist everywhere: the bus looks them up.
OTHER = 1
THIRD = 2
WORKLOADS = 20
LIMITS_EXCEEDED = "org.freedesktop.DBus.Error.LimitsExceeded"
DRIVER = "org.freedesktop.DBus"
LIST = ("call", NAME, ROOT, MANAGER, "List")
MIB = 1 << 20

# Connections that send calls and read no answer until a line comes on standard input.
_SILENT = """
import os, select, socket, struct, sys
path, user, group, connections, rounds, hello, call = sys.argv[1:]
os.setgroups([int(group)])
os.setgid(int(user))
os.setuid(int(user))
held = []
for _ in range(int(connections)):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.connect(path)
    one.sendall(b"\\0AUTH EXTERNAL " + user.encode().hex().encode() + b"\\r\\n")
    one.recv(100)
    one.sendall(b"BEGIN\\r\\n" + bytes.fromhex(hello))
    one.recv(1000)
    held.append(one)
call = bytes.fromhex(call)
for serial in range(2, 2 + int(rounds)):
    for one in held:
        one.sendall(call[:8] + struct.pack("<I", serial) + call[12:])
print(flush=True)
sys.stdin.readline()
while True:
    for one in select.select(held, [], [])[0]:
        one.recv(1 << 20)
"""


def _marshalled(**of: Any) -> bytes:
    return bytes(dbus_fast.Message(serial=7, **of)._marshall(False))


def _of_driver(member: str, signature: str = "", *body: Any) -> bytes:
    return _marshalled(
        destination=DRIVER,
        path="/org/freedesktop/DBus",
        interface=DRIVER,
        member=member,
        signature=signature,
        body=[*body],
    )


@contextlib.asynccontextmanager
async def _silent(lab: Lab, uid: int, connections: int, rounds: int, call: bytes) -> AsyncIterator[Any]:
    """A user's connections, after they have sent their calls."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SILENT, lab.address.removeprefix("unix:path=")),
        *map(str, (uid, READERS, connections, rounds)),
        *(_of_driver("Hello").hex(), call.hex()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        await process.communicate()


async def _held(client: Client) -> int:
    """The bytes that the bus holds of the daemon's messages."""
    found = await client.bus.call(
        dbus_fast.Message(
            destination=DRIVER,
            path="/org/freedesktop/DBus",
            interface="org.freedesktop.DBus.Debug.Stats",
            member="GetConnectionStats",
            signature="s",
            body=[NAME],
        )
    )
    assert found is not None
    return int(found.body[0]["IncomingBytes"].value)


def _fill(lab: Lab) -> None:
    for number in range(WORKLOADS):
        attributes = {f"n{one}": "v" * 4000 for one in range(15)}
        save(lab.manager.context.store, workload(f"long-{number:03}", State.PENDING, attributes=attributes))


def _patch(monkeypatch: pytest.MonkeyPatch, module: str, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setattr(sys.modules[f"resctrlmond.api.dbus.{module}"], name, value)


def test_lists_that_16_connections_do_not_read_delay_no_change(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "unread", PATIENCE_S=0.2)
    _fill(lab)
    call = _marshalled(destination=NAME, path=ROOT, interface=MANAGER, member="List")

    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            connection = door._connection
            # Together, their lists take more than the bus takes of one sender.
            async with (
                _silent(lab, NOBODY, connections=8, rounds=8, call=call) as silent,
                _silent(lab, THIRD, connections=8, rounds=8, call=call),
            ):
                number = 0
                while number < 20 or connection._admission._calls:
                    number += 1
                    async with asyncio.timeout(20):
                        assert (await client.call("Create", "sa{sv}", f"x{number}", {}))["key"] == f"x{number}"
                        await client.call("Release", "sa{sv}", f"x{number}", {})
                    assert await _held(client) < 32 * MIB
                assert await _held(client) > 16 * MIB
                assert door._connection is connection
                # Another user reads as before; the same one does after its connections have read.
                assert len((await lab.busctl(*LIST, uid=OTHER, groups=(READERS,)))["data"][0]) >= WORKLOADS
                with pytest.raises(BusctlError, match="has not read"):
                    await lab.busctl(*LIST, uid=NOBODY, groups=(READERS,))
                silent.stdin.write(b"\n")
                assert len((await lab.busctl(*LIST, uid=NOBODY, groups=(READERS,)))["data"][0]) >= WORKLOADS

    asyncio.run(run())


def test_unread_signals_make_the_daemon_connect_anew_before_the_bus_stalls(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(monkeypatch, "unread", MAX_TOTAL_BYTES=2 * MIB, _SIGNALS_BYTES=MIB)
    subscribe = _of_driver("AddMatch", "s", f"type='signal',sender='{NAME}'")

    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            connection = door._connection
            async with _silent(lab, NOBODY, connections=1, rounds=1, call=subscribe):
                number = 0
                while door._connection is connection:
                    attributes = dbus_fast.Variant("a{ss}", {f"n{one}": "v" * 4000 for one in range(15)})
                    number += 1
                    assert number < 200
                    with contextlib.suppress(dbus_fast.DBusError):
                        await client.call("Create", "sa{sv}", f"x{number}", {"attributes": attributes})
                assert number > 20
                assert await eventually(lambda: door.connected)
                assert await _held(client) < MIB

    asyncio.run(run())


def test_a_reader_that_reads_is_not_limited(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "unread", MAX_BYTES_PER_UID=2 * MIB)
    _fill(lab)

    async def run() -> None:
        async with lab.door():
            lists = await asyncio.gather(*(lab.busctl(*LIST, uid=NOBODY, groups=(READERS,)) for _ in range(8)))
            assert [len(one["data"][0]) for one in lists] == [WORKLOADS] * 8

    asyncio.run(run())


@pytest.fixture
def blind(lab: Lab) -> Iterator[Lab]:
    """The door on a bus that does not tell what is unread."""
    with contextlib.ExitStack() as stack:
        folder = Path(lab.bus.folder) / "blind"
        folder.mkdir(exist_ok=True)
        bus = PrivateBus(folder, '<deny send_interface="org.freedesktop.DBus.Debug.Stats"/>')
        stack.callback(bus.stop)
        bus.start()
        yield Lab(bus, lab.manager, lab.module)


def test_a_bus_without_statistics_limits_what_a_connection_gets(blind: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "unread", PATIENCE_S=0.2, MAX_BYTES_PER_UID=2 * MIB)
    _fill(blind)

    async def run() -> None:
        async with blind.door():
            async with Client(blind.address) as client:
                for _ in range(2):
                    await client.call("List")
                error, text = await client.refused("List")
                assert error == LIMITS_EXCEEDED
                assert "call over varlink" in text
                # What changes something is answered.
                assert (await client.call("Create", "sa{sv}", "x", {}))["key"] == "x"
            async with Client(blind.address) as client:
                await client.call("List")

    asyncio.run(run())


def test_errors_for_a_caller_that_reads_nothing_end(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "unread", MAX_BYTES_PER_UID=MIB // 8, MAX_EXCESS_PER_UID=0)
    call = _marshalled(destination=NAME, path=ROOT, interface=MANAGER, member="Nonsense")

    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            async with _silent(lab, NOBODY, connections=2, rounds=6000, call=call) as silent:
                for _ in range(50):
                    await client.call("Status")
                unread = await _held(client)
                silent.stdin.write(b"\n")
                while door._connection._unread.is_flooded(NOBODY):
                    await asyncio.sleep(0.01)
                assert "version" in (await lab.busctl(*LIST[:4], "Status", uid=NOBODY, groups=(READERS,)))["data"][0]
            assert unread < MIB // 4

    asyncio.run(run())


def test_a_busy_bus_carries_no_long_reply_to_a_reader(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "pace", PATIENCE_S=0.2, _PROBE_S=0.0)
    _fill(lab)

    async def run() -> None:
        async with lab.door(), Client(lab.address) as client:
            with pytest.raises(BusctlError, match="too busy"):
                await lab.busctl(*LIST, uid=NOBODY, groups=(READERS,))
            await lab.busctl(*LIST[:4], "Status", uid=NOBODY, groups=(READERS,))
            assert len((await client.call("List"))[0]) == WORKLOADS

    asyncio.run(run())


def test_after_a_long_reply_that_took_long_there_is_none_for_a_minute(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(monkeypatch, "pace", PATIENCE_S=0.2, _PROBE_S=60.0, _SLOW_S=0.0)
    _fill(lab)

    async def run() -> None:
        async with lab.door() as door:
            await lab.busctl(*LIST, uid=NOBODY, groups=(READERS,))
            with pytest.raises(BusctlError, match="too busy"):
                await lab.busctl(*LIST, uid=OTHER, groups=(READERS,))
            door._pace._rests_until = 0.0
            await lab.busctl(*LIST, uid=OTHER, groups=(READERS,))
            assert door._pace._rest_s == 240.0

    asyncio.run(run())


@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.data())
def test_messages_are_measured_in_whatever_parts_they_come(sizes: list[int], data: st.DataObject) -> None:
    messages = [
        _marshalled(destination=f"a.b{size}", path="/x", member="M", signature="s", body=["x" * size])
        for size in sizes
    ]
    signal = _marshalled(message_type=dbus_fast.MessageType.SIGNAL, path="/x", interface="i.j", member="M")
    stream = b"".join([*messages, signal])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    counted = MessageSizes()
    found = [one for part in parts for one in counted.feed(part)]
    expected = [(f"a.b{size}", len(message)) for size, message in zip(sizes, messages, strict=True)]
    assert found == [*expected, ("", len(signal))]
