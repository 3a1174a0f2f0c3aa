# SPDX-License-Identifier: Apache-2.0
"""The gate before the D-Bus library: what is too long, not allowed or damaged is never decoded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator
from typing import Any

import dbus_fast
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.api.dbus.gate import BUS_NAME, Gate, Header, parse_fields, parse_frame
from resctrlmond.resctrl.errors import NotRead
from tests.api.dbus_lab import MANAGER, NAME, NOBODY, READERS, ROOT, BusctlError, Client, Lab, eventually

LIMITS_EXCEEDED = "org.freedesktop.DBus.Error.LimitsExceeded"
INVALID_ARGS = "org.freedesktop.DBus.Error.InvalidArgs"


def _decoded(door: Any) -> list[Any]:
    """The messages that the library has decoded from now on."""
    decoded: list[Any] = []
    bus, own = door._connection._bus, door._connection._on_message
    # The first handler that takes a message is the last to see it.
    bus.remove_message_handler(own)
    bus.add_message_handler(decoded.append)
    bus.add_message_handler(own)
    return decoded


def test_a_message_of_30_mib_is_refused_and_never_decoded(lab: Lab) -> None:
    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            decoded = _decoded(door)
            error, text = await client.refused("Create", "ay", bytes(30 << 20))
            assert error == LIMITS_EXCEEDED
            assert "31457284 bytes" in text
            assert not [one for one in decoded if one.member == "Create"]
            assert "version" in await client.call("Status")

    asyncio.run(run())


def test_only_privileged_callers_may_send_more_than_16_kib(lab: Lab) -> None:
    keys = [f"key-{number:06}" for number in range(3000)]
    call = ("call", NAME, ROOT, MANAGER, "Reconcile", "sas", "agent", str(len(keys)), *keys)

    async def run() -> None:
        async with lab.door() as door:
            decoded = _decoded(door)
            with pytest.raises(BusctlError, match="only root may send"):
                await lab.busctl(*call, uid=NOBODY, groups=(READERS,))
            assert not [one for one in decoded if one.member == "Reconcile"]
            (result,) = (await lab.busctl(*call))["data"]
            assert len(result["failures"]["data"]) == len(keys)
            assert await eventually(lambda: not door._connection._admission._calls)

    asyncio.run(run())


def test_large_messages_are_held_within_8_mib_until_their_senders_are_known(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with lab.door() as door, contextlib.AsyncExitStack() as stack:
            admission = door._connection._admission
            named = door._connection._callers.find
            told = asyncio.Event()

            async def late(sender: str) -> Any:
                await told.wait()
                return await named(sender)

            monkeypatch.setattr(door._connection._callers, "find", late)
            # One message of each: the library cuts the connection if several fill the socket's buffer.
            clients = [await stack.enter_async_context(Client(lab.address)) for _ in range(20)]
            calls = [asyncio.ensure_future(client.refused("Create", "ay", bytes(1 << 19))) for client in clients]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert {error for error, _ in (one.result() for one in done)} == {LIMITS_EXCEEDED}
            assert await eventually(lambda: admission._unknown_calls == 15)
            assert admission._unknown_bytes <= 8 << 20
            # A small call is held beside them.
            small = asyncio.ensure_future(clients[0].call("Status"))
            assert await eventually(lambda: admission._unknown_calls == 16)
            told.set()
            answers = await asyncio.gather(*calls)
            assert sorted({error for error, _ in answers}) == [INVALID_ARGS, LIMITS_EXCEEDED]
            assert "version" in await small
            assert (admission._unknown_calls, admission._unknown_bytes) == (0, 0)

    asyncio.run(run())


def test_a_call_that_wants_no_reply_is_decoded_only_if_it_changes_something(lab: Lab) -> None:
    """Eight connections of a reader sent Get without end: root waited for 25 s, until its library gave up."""

    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            decoded = _decoded(door)
            for member, signature, body in (("Get", "s", ["silent"]), ("Create", "sa{sv}", ["silent", {}])):
                await client.bus.send(
                    dbus_fast.Message(
                        destination=NAME,
                        path=ROOT,
                        interface=MANAGER,
                        member=member,
                        signature=signature,
                        body=body,
                        flags=dbus_fast.MessageFlag.NO_REPLY_EXPECTED,
                    )
                )
            assert "version" in await client.call("Status")
            assert [one.member for one in decoded if one.sender == client.bus.unique_name] == ["Create", "Status"]
            assert await eventually(lambda: any(record.key == "silent" for record in lab.manager.workloads()))

    asyncio.run(run())


def test_calls_of_a_reader_wait_in_a_queue_that_root_does_not_share(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        go_on = threading.Event()
        look = lab.manager._watcher.look
        monkeypatch.setattr(lab.manager._watcher, "look", lambda: (go_on.wait(60), look())[1])
        async with lab.door() as door, Client(lab.address) as client:
            admission = door._connection._admission
            decoded = _decoded(door)
            read = ("call", NAME, ROOT, MANAGER, "List")
            reads = [asyncio.ensure_future(lab.busctl(*read, uid=NOBODY, groups=(READERS,))) for _ in range(8)]
            try:
                assert await eventually(lambda: len(admission._queues.get(NOBODY, ())) == 4)
                assert [one.member for one in decoded if one.member == "List"] == ["List"] * 4
                assert (await client.call("Create", "sa{sv}", "beside", {}))["key"] == "beside"
            finally:
                go_on.set()
            assert all("data" in answer for answer in await asyncio.gather(*reads))
            assert await eventually(lambda: not admission._calls)
            assert not admission._running

    asyncio.run(run())


def test_a_call_that_its_sender_may_not_make_is_never_decoded(lab: Lab) -> None:
    async def run() -> None:
        async with lab.door() as door:
            decoded = _decoded(door)
            call = ("call", NAME, ROOT, MANAGER, "Create", "sa{sv}", "key", "0")
            with pytest.raises(BusctlError, match="may not call Create"):
                await lab.busctl(*call, uid=NOBODY, groups=(READERS,))
            with pytest.raises(BusctlError, match="takes"):
                await lab.busctl(*call[:4], "Get", "as", "1", "x", uid=NOBODY, groups=(READERS,))
            assert not [one for one in decoded if one.member in ("Create", "Get")]

    asyncio.run(run())


def test_signals_and_replies_of_others_are_thrown_away(lab: Lab) -> None:
    async def run() -> None:
        async with lab.door() as door, Client(lab.address) as client:
            bus = door._connection._bus
            decoded = _decoded(door)
            for size in (10, 1 << 20):
                await client.bus.send(
                    dbus_fast.Message(
                        message_type=dbus_fast.MessageType.SIGNAL,
                        destination=bus.unique_name,
                        path="/x",
                        interface="x.y",
                        member="Shout",
                        signature="ay",
                        body=[bytes(size)],
                    )
                )
            assert "version" in await client.call("Status")
            assert not [one for one in decoded if one.member == "Shout"]

    asyncio.run(run())


@contextlib.asynccontextmanager
async def _relayed() -> AsyncIterator[tuple[Gate, socket.socket, socket.socket]]:
    """A gate between a bus and a library that are sockets of the test, with the handshake up to BEGIN done."""
    loop = asyncio.get_running_loop()
    relayed, bus = socket.socketpair()
    library = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for one in (relayed, bus, library):
        one.setblocking(False)
    gate = Gate(relayed)
    with bus, library:
        try:
            with tempfile.TemporaryDirectory() as folder, gate.entrance(folder) as address:
                await loop.sock_connect(library, address.removeprefix("unix:path="))
                await loop.sock_sendall(library, b"\0AUTH EXTERNAL\r\n")
                assert await loop.sock_recv(bus, 100) == b"\0AUTH EXTERNAL\r\n"
            await loop.sock_sendall(bus, b"OK\r\n")
            assert await loop.sock_recv(library, 100) == b"OK\r\n"
            await loop.sock_sendall(library, b"BEGIN\r\n")
            assert await loop.sock_recv(bus, 100) == b"BEGIN\r\n"
            yield gate, bus, library
        finally:
            await gate.close()


def _signal(sender: str, body: bytes) -> bytes:
    # The library leaves out the sender, which only the bus sets.
    fields = b"\7\1s\0" + struct.pack("<I", len(sender)) + sender.encode() + b"\0"
    head = struct.pack("<4B3I", ord("l"), dbus_fast.MessageType.SIGNAL.value, 0, 1, len(body), 7, len(fields))
    return head + fields + bytes(-len(fields) % 8) + body


def test_messages_that_arrive_with_the_first_one_are_checked() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        first, last = _signal(BUS_NAME, b"first"), _signal(BUS_NAME, b"last")
        async with _relayed() as (_, bus, library):
            sending = asyncio.create_task(loop.sock_sendall(bus, first + _signal(":1.2", bytes(100_000)) + last))
            received = b""
            while not received.endswith(last) and (data := await loop.sock_recv(library, 1 << 20)):
                received += data
            assert received == first + last
            await sending

    asyncio.run(run())


def test_the_gate_closes_while_the_library_does_not_read() -> None:
    async def run() -> None:
        async with _relayed() as (gate, _, _):
            delivering = asyncio.create_task(gate.deliver(bytes(16 << 20)))
            assert await eventually(gate._delivering.locked)
            await gate.close()
            async with asyncio.timeout(60):
                await delivering

    asyncio.run(run())


def test_a_large_call_of_an_unknown_sender_is_dropped_and_answered(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(error: Exception, name: str) -> None:
        async def unreadable(_: str) -> Any:
            raise error

        async with lab.door() as door, Client(lab.address) as client:
            monkeypatch.setattr(door._connection._callers, "find", unreadable)
            refused, _ = await client.refused("Create", "ay", bytes(1 << 19))
            assert refused == name
            assert not door._connection._admission._calls

    asyncio.run(run(NotRead("/proc/1/status cannot be read"), "org.resctrlmon1.Error.NotRead"))
    asyncio.run(run(RuntimeError("unexpected"), "org.resctrlmon1.Error.InternalError"))


def test_access_is_checked_before_the_arguments(lab: Lab) -> None:
    async def run() -> None:
        async with lab.door():
            wrong = ("call", NAME, ROOT, MANAGER, "Create", "sa{sv}", "key", "1", "no-such-option", "s", "x")
            with pytest.raises(BusctlError, match="may not call Create"):
                await lab.busctl(*wrong, uid=NOBODY, groups=(READERS,))

    asyncio.run(run())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"pid": dbus_fast.Variant("s", "one")}, "pid: the value is not valid. Give an integer"),
        ({"cgroup": dbus_fast.Variant("u", 1)}, "cgroup: the value is not valid. Give a value of the D-Bus type s"),
        ({"attributes": dbus_fast.Variant("s", "")}, "Give a value of the D-Bus type a{ss}"),
        (
            {"sesame": dbus_fast.Variant("s", "")},
            "sesame: there is no such option. Known options are allow",
        ),
    ],
)
def test_type_errors_speak_of_d_bus(lab: Lab, options: dict[str, Any], words: str) -> None:
    async def run() -> None:
        async with lab.door(), Client(lab.address) as client:
            error, text = await client.refused("Assign", "sa{sv}", "key", options)
            assert error == INVALID_ARGS
            assert words in text
            assert "Expected" not in text
            assert "$" not in text

    asyncio.run(run())


def _message(**of: Any) -> bytes:
    return bytes(dbus_fast.Message(serial=7, **of)._marshall(False))


def _parsed(data: bytes) -> Any:
    frame = parse_frame(data)
    fields = data[16 : 16 + frame.padded_fields_bytes]
    return Header(frame, parse_fields(frame.order, fields, frame.fields_bytes))


def test_headers_are_read_as_the_library_writes_them() -> None:
    header = _parsed(
        _message(
            destination="a.b",
            path="/org/x",
            interface="i.j",
            member="Member",
            signature="sa{sv}",
            body=["x", {}],
        )
    )
    assert (header.path, header.interface, header.member, header.sender) == ("/org/x", "i.j", "Member", "")
    assert (header.serial, header.wants_reply) == (7, True)


def test_an_unknown_header_field_is_refused() -> None:
    fields = b"\x63\1s\0" + struct.pack("<I", 1) + b"x\0"
    with pytest.raises(ValueError, match="damaged"):
        parse_fields("<", fields, len(fields))


@given(st.binary(max_size=64), st.data())
def test_no_header_makes_the_gate_stumble(noise: bytes, data: st.DataObject) -> None:
    """Random bytes, and a right header with bytes changed, are read or refused with ValueError, and nothing else."""
    right = bytearray(_message(destination="a.b", path="/org/x", interface="i.j", member="Member"))
    for _ in range(data.draw(st.integers(1, 4))):
        right[data.draw(st.integers(0, len(right) - 1))] = data.draw(st.integers(0, 255))
    for candidate in (noise, bytes(right)):
        if len(candidate) < 16:
            continue
        try:
            header = _parsed(candidate)
        except ValueError:
            continue
        assert all(isinstance(text, str) for text in (header.path, header.member, header.sender))
