# SPDX-License-Identifier: Apache-2.0
"""Calls of root are not delayed by callers that leave replies unread on the bus, nor by a busy bus."""

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
from tests.api.conftest import save_long_workloads
from tests.api.private_bus import (
    LIMITS_EXCEEDED,
    MANAGER,
    NAME,
    NOBODY,
    READERS,
    ROOT,
    BusctlError,
    BusHost,
    Client,
    PrivateBus,
    eventually,
    marshal_message,
)

# User ids that exist on every host, because the bus looks them up.
OTHER = 1
THIRD = 2
WORKLOADS = 20

DRIVER = "org.freedesktop.DBus"
LIST = ("call", NAME, ROOT, MANAGER, "List")
MIB = 1 << 20

# Opens connections that send calls, and that read replies only after a line on standard input.
_NON_READER = """
import os, select, socket, struct, sys
path, user, group, connections, rounds, hello, call = sys.argv[1:]
os.setgroups([int(group)])
os.setgid(int(user))
os.setuid(int(user))
held = []
for _ in range(int(connections)):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    connection.sendall(b"\\0AUTH EXTERNAL " + user.encode().hex().encode() + b"\\r\\n")
    connection.recv(100)
    connection.sendall(b"BEGIN\\r\\n" + bytes.fromhex(hello))
    connection.recv(1000)
    held.append(connection)
call = bytes.fromhex(call)
for serial in range(2, 2 + int(rounds)):
    for connection in held:
        connection.sendall(call[:8] + struct.pack("<I", serial) + call[12:])
print(flush=True)
sys.stdin.readline()
while True:
    for connection in select.select(held, [], [])[0]:
        connection.recv(1 << 20)
"""


def _driver_call(member: str, signature: str = "", *body: Any) -> bytes:
    return marshal_message(
        destination=DRIVER,
        path="/org/freedesktop/DBus",
        interface=DRIVER,
        member=member,
        signature=signature,
        body=[*body],
    )


@contextlib.asynccontextmanager
async def _non_reader(host: BusHost, uid: int, connections: int, rounds: int, call: bytes) -> AsyncIterator[Any]:
    """Yield a process with connections of a user that have sent their calls and do not read."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _NON_READER, host.address.removeprefix("unix:path=")),
        *map(str, (uid, READERS, connections, rounds)),
        *(_driver_call("Hello").hex(), call.hex()),
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


async def _unread_bytes(client: Client) -> int:
    """Return the bytes of the daemon's messages that the bus still holds."""
    reply = await client.bus.call(
        dbus_fast.Message(
            destination=DRIVER,
            path="/org/freedesktop/DBus",
            interface="org.freedesktop.DBus.Debug.Stats",
            member="GetConnectionStats",
            signature="s",
            body=[NAME],
        )
    )
    assert reply is not None
    return int(reply.body[0]["IncomingBytes"].value)


def _patch(monkeypatch: pytest.MonkeyPatch, module: str, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setattr(sys.modules[f"resctrlmond.api.dbus.{module}"], name, value)


def test_unread_lists_of_16_connections_delay_no_change(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "unread", PATIENCE_S=0.2)
    save_long_workloads(host.manager, WORKLOADS)
    call = marshal_message(destination=NAME, path=ROOT, interface=MANAGER, member="List")

    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            connection = server._connection
            # In total, their lists are longer than the bus accepts from one sender.
            async with (
                _non_reader(host, NOBODY, connections=8, rounds=8, call=call) as reader,
                _non_reader(host, THIRD, connections=8, rounds=8, call=call),
            ):
                number = 0
                while number < 20 or connection._admission._calls:
                    number += 1
                    async with asyncio.timeout(60):
                        assert (await client.call("Create", "sa{sv}", f"x{number}", {}))["key"] == f"x{number}"
                        await client.call("Release", "sa{sv}", f"x{number}", {})
                    assert await _unread_bytes(client) < 32 * MIB
                assert await _unread_bytes(client) > 16 * MIB
                assert server._connection is connection
                # Another user can still read; this user can after its connections have read.
                assert len((await host.busctl(*LIST, uid=OTHER, groups=(READERS,)))["data"][0]) >= WORKLOADS
                with pytest.raises(BusctlError, match="has not read"):
                    await host.busctl(*LIST, uid=NOBODY, groups=(READERS,))
                reader.stdin.write(b"\n")
                assert len((await host.busctl(*LIST, uid=NOBODY, groups=(READERS,)))["data"][0]) >= WORKLOADS

    asyncio.run(run())


def test_daemon_reconnects_before_unread_signals_stall_the_bus(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(monkeypatch, "unread", MAX_TOTAL_BYTES=2 * MIB, _SIGNALS_BYTES=MIB)
    subscribe = _driver_call("AddMatch", "s", f"type='signal',sender='{NAME}'")

    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            connection = server._connection
            await client.call("Subscribe")
            async with _non_reader(host, NOBODY, connections=1, rounds=1, call=subscribe):
                number = 0
                while server._connection is connection:
                    attributes = dbus_fast.Variant("a{ss}", {f"n{index}": "v" * 4000 for index in range(15)})
                    number += 1
                    assert number < 200
                    with contextlib.suppress(dbus_fast.DBusError):
                        await client.call("Create", "sa{sv}", f"x{number}", {"attributes": attributes})
                assert number > 20
                assert await eventually(lambda: server.connected)
                assert await _unread_bytes(client) < MIB

    asyncio.run(run())


def test_caller_that_reads_its_replies_is_not_limited(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "unread", MAX_BYTES_PER_UID=2 * MIB)
    save_long_workloads(host.manager, WORKLOADS)

    async def run() -> None:
        async with host.serving():
            lists = await asyncio.gather(*(host.busctl(*LIST, uid=NOBODY, groups=(READERS,)) for _ in range(8)))
            assert [len(reply["data"][0]) for reply in lists] == [WORKLOADS] * 8

    asyncio.run(run())


@pytest.fixture
def blind(host: BusHost) -> Iterator[BusHost]:
    """Yield a host whose bus does not report unread bytes."""
    with contextlib.ExitStack() as stack:
        folder = Path(host.bus.folder) / "blind"
        folder.mkdir(exist_ok=True)
        bus = PrivateBus(folder, '<deny send_interface="org.freedesktop.DBus.Debug.Stats"/>')
        stack.callback(bus.stop)
        bus.start()
        yield BusHost(bus, host.manager, host.module)


def test_replies_to_a_connection_are_limited_on_a_bus_without_statistics(
    blind: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(monkeypatch, "unread", PATIENCE_S=0.2, MAX_BYTES_PER_UID=2 * MIB)
    save_long_workloads(blind.manager, WORKLOADS)

    async def run() -> None:
        async with blind.serving():
            async with Client(blind.address) as client:
                for _ in range(2):
                    await client.call("List")
                error, text = await client.refused("List")
                assert error == LIMITS_EXCEEDED
                assert "call over varlink" in text
                # Calls that change a workload are not limited.
                assert (await client.call("Create", "sa{sv}", "x", {}))["key"] == "x"
            async with Client(blind.address) as client:
                await client.call("List")

    asyncio.run(run())


def test_errors_sent_to_a_caller_that_does_not_read_are_limited(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(monkeypatch, "unread", MAX_BYTES_PER_UID=MIB // 8, MAX_EXCESS_PER_UID=0)
    call = marshal_message(destination=NAME, path=ROOT, interface=MANAGER, member="Nonsense")

    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            async with _non_reader(host, NOBODY, connections=2, rounds=6000, call=call) as reader:
                for _ in range(50):
                    await client.call("Status")
                unread = await _unread_bytes(client)
                reader.stdin.write(b"\n")
                while server._connection._unread.is_flooded(NOBODY):
                    await asyncio.sleep(0.01)
                assert "version" in (await host.busctl(*LIST[:4], "Status", uid=NOBODY, groups=(READERS,)))["data"][0]
            assert unread < MIB // 4

    asyncio.run(run())


def test_long_reply_to_a_reader_is_refused_on_a_busy_bus(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, "pace", PATIENCE_S=0.2, _PROBE_S=0.0)
    save_long_workloads(host.manager, WORKLOADS)

    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            with pytest.raises(BusctlError, match="too busy"):
                await host.busctl(*LIST, uid=NOBODY, groups=(READERS,))
            await host.busctl(*LIST[:4], "Status", uid=NOBODY, groups=(READERS,))
            assert len((await client.call("List"))[0]) == WORKLOADS

    asyncio.run(run())


def test_long_replies_are_refused_for_a_minute_after_a_slow_one(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(monkeypatch, "pace", PATIENCE_S=0.2, _PROBE_S=60.0, _SLOW_S=0.0)
    save_long_workloads(host.manager, WORKLOADS)

    async def run() -> None:
        async with host.serving() as server:
            await host.busctl(*LIST, uid=NOBODY, groups=(READERS,))
            with pytest.raises(BusctlError, match="too busy"):
                await host.busctl(*LIST, uid=OTHER, groups=(READERS,))
            server._pace._rests_until = 0.0
            await host.busctl(*LIST, uid=OTHER, groups=(READERS,))
            assert server._pace._rest_s == 240.0

    asyncio.run(run())


@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.data())
def test_message_sizes_do_not_depend_on_the_parts_that_arrive(sizes: list[int], data: st.DataObject) -> None:
    messages = [
        marshal_message(destination=f"a.b{size}", path="/x", member="M", signature="s", body=["x" * size])
        for size in sizes
    ]
    signal = marshal_message(message_type=dbus_fast.MessageType.SIGNAL, path="/x", interface="i.j", member="M")
    stream = b"".join([*messages, signal])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    counted = MessageSizes()
    found = [message for part in parts for message in counted.feed(part)]
    expected = [(f"a.b{size}", len(message)) for size, message in zip(sizes, messages, strict=True)]
    assert found == [*expected, ("", len(signal))]
