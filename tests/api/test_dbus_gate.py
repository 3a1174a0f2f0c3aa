# SPDX-License-Identifier: Apache-2.0
"""The gate before the D-Bus library: messages that are too long, not allowed or damaged are never decoded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dbus_fast
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.api.dbus.gate import BUS_NAME, Gate, Header, parse_fields, parse_frame
from resctrlmond.resctrl.errors import NotRead
from tests.api.private_bus import (
    INVALID_ARGS,
    LIMITS_EXCEEDED,
    MANAGER,
    NAME,
    NOBODY,
    READERS,
    ROOT,
    BusctlError,
    BusHost,
    Client,
    descriptors,
    eventually,
    marshal_message,
)

PEER = "org.freedesktop.DBus.Peer"


def _decoded(server: Any) -> list[Any]:
    """Return a list to which each message is added that the library decodes from now on."""
    decoded: list[Any] = []
    bus, own = server._connection._bus, server._connection._on_message
    # No handler is called after the one that handles the message.
    bus.remove_message_handler(own)
    bus.add_message_handler(decoded.append)
    bus.add_message_handler(own)
    return decoded


def test_message_of_30_mib_is_refused_and_never_decoded(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            decoded = _decoded(server)
            error, text = await client.refused("Create", "ay", bytes(30 << 20))
            assert error == LIMITS_EXCEEDED
            assert "31457284 bytes" in text
            assert not [message for message in decoded if message.member == "Create"]
            assert "version" in await client.call("Status")

    asyncio.run(run())


def test_only_privileged_callers_can_send_more_than_16_kib(host: BusHost) -> None:
    keys = [f"key-{number:06}" for number in range(3000)]
    call = ("call", NAME, ROOT, MANAGER, "Reconcile", "sas", "agent", str(len(keys)), *keys)

    async def run() -> None:
        async with host.serving() as server:
            decoded = _decoded(server)
            with pytest.raises(BusctlError, match="only root may send"):
                await host.busctl(*call, uid=NOBODY, groups=(READERS,))
            assert not [message for message in decoded if message.member == "Reconcile"]
            (result,) = (await host.busctl(*call))["data"]
            assert len(result["failures"]["data"]) == len(keys)
            assert await eventually(lambda: not server._connection._admission._calls)

    asyncio.run(run())


def test_large_messages_are_held_within_8_mib_until_their_senders_are_known(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with host.serving() as server, contextlib.AsyncExitStack() as stack:
            admission = server._connection._admission
            find = server._connection._callers.find
            go_on = asyncio.Event()

            async def late(sender: str) -> Any:
                await go_on.wait()
                return await find(sender)

            monkeypatch.setattr(server._connection._callers, "find", late)
            # Each client sends one message: the library closes the connection if several fill the socket's buffer.
            clients = [await stack.enter_async_context(Client(host.address)) for _ in range(20)]
            calls = [asyncio.ensure_future(client.refused("Create", "ay", bytes(1 << 19))) for client in clients]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert {error for error, _ in (call.result() for call in done)} == {LIMITS_EXCEEDED}
            assert await eventually(lambda: admission._unknown_calls == 15)
            assert admission._unknown_bytes <= 8 << 20
            # The server also holds a small call.
            small = asyncio.ensure_future(clients[0].call("Status"))
            assert await eventually(lambda: admission._unknown_calls == 16)
            go_on.set()
            replies = await asyncio.gather(*calls)
            assert sorted({error for error, _ in replies}) == [INVALID_ARGS, LIMITS_EXCEEDED]
            assert "version" in await small
            assert (admission._unknown_calls, admission._unknown_bytes) == (0, 0)

    asyncio.run(run())


def test_call_without_reply_is_decoded_only_if_it_changes_a_workload(host: BusHost) -> None:
    """While eight connections of a reader sent Get in a loop, a call of root timed out after 25 s."""

    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            decoded = _decoded(server)
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
            assert [message.member for message in decoded if message.sender == client.bus.unique_name] == [
                "Create",
                "Status",
            ]
            assert await eventually(
                lambda: any(record.key == "silent" for record in host.manager.context.store.all())
            )

    asyncio.run(run())


def test_calls_of_a_reader_wait_in_a_queue_that_root_does_not_share(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        go_on = threading.Event()
        look = host.manager.watcher.look
        monkeypatch.setattr(host.manager.watcher, "look", lambda: (go_on.wait(60), look())[1])
        async with host.serving() as server, Client(host.address) as client:
            admission = server._connection._admission
            decoded = _decoded(server)
            read = ("call", NAME, ROOT, MANAGER, "List")
            reads = [asyncio.ensure_future(host.busctl(*read, uid=NOBODY, groups=(READERS,))) for _ in range(8)]
            try:
                assert await eventually(lambda: len(admission._queues.get(NOBODY, ())) == 4)
                # The library decodes a call some time after it was admitted.
                assert await eventually(lambda: sum(message.member == "List" for message in decoded) == 4)
                assert (await client.call("Create", "sa{sv}", "beside", {}))["key"] == "beside"
            finally:
                go_on.set()
            assert all("data" in answer for answer in await asyncio.gather(*reads))
            assert await eventually(lambda: not admission._calls)
            assert not admission._running

    asyncio.run(run())


def test_queued_calls_get_no_reply_when_the_server_stops(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library replied to them that the interface has no such method."""

    async def run() -> None:
        go_on = threading.Event()
        look = host.manager.watcher.look
        monkeypatch.setattr(host.manager.watcher, "look", lambda: (go_on.wait(60), look())[1])
        read = ("call", NAME, ROOT, MANAGER, "List")
        async with host.serving() as server:
            admission = server._connection._admission
            reads = [asyncio.ensure_future(host.busctl(*read, uid=NOBODY, groups=(READERS,))) for _ in range(8)]
            try:
                assert await eventually(lambda: len(admission._queues.get(NOBODY, ())) == 4)
                closing = asyncio.create_task(server.close())
                assert await eventually(lambda: admission._gate.wants_call != admission._wants)
            finally:
                go_on.set()
            await closing
            answers = await asyncio.gather(*reads, return_exceptions=True)
            assert sum("data" in str(answer) for answer in answers) == 4, answers
            assert sum("without replying" in str(answer) for answer in answers) == 4, answers

    asyncio.run(run())


def test_call_that_its_sender_is_not_allowed_is_never_decoded(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server:
            decoded = _decoded(server)
            call = ("call", NAME, ROOT, MANAGER, "Create", "sa{sv}", "key", "0")
            with pytest.raises(BusctlError, match="may not call Create"):
                await host.busctl(*call, uid=NOBODY, groups=(READERS,))
            with pytest.raises(BusctlError, match="takes"):
                await host.busctl(*call[:4], "Get", "as", "1", "x", uid=NOBODY, groups=(READERS,))
            assert not [message for message in decoded if message.member in ("Create", "Get")]

    asyncio.run(run())


def test_signals_of_other_senders_are_dropped(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client:
            bus = server._connection._bus
            decoded = _decoded(server)
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
            assert not [message for message in decoded if message.member == "Shout"]

    asyncio.run(run())


@contextlib.asynccontextmanager
async def _relayed() -> AsyncIterator[tuple[Gate, socket.socket, socket.socket]]:
    """Yield a gate, and the sockets of the test that stand for the bus and the library, after the handshake."""
    loop = asyncio.get_running_loop()
    relayed, bus = socket.socketpair()
    library = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (relayed, bus, library):
        end.setblocking(False)
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
    # dbus-fast does not write the sender, because only the bus sets it.
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


def test_large_call_of_an_unknown_sender_is_refused(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(error: Exception, name: str) -> None:
        async def unreadable(_: str) -> Any:
            raise error

        async with host.serving() as server, Client(host.address) as client:
            monkeypatch.setattr(server._connection._callers, "find", unreadable)
            refused, _ = await client.refused("Create", "ay", bytes(1 << 19))
            assert refused == name
            assert not server._connection._admission._calls

    asyncio.run(run(NotRead("/proc/1/status cannot be read"), "org.resctrlmon1.Error.NotRead"))
    asyncio.run(run(RuntimeError("unexpected"), "org.resctrlmon1.Error.InternalError"))


def test_access_is_checked_before_the_arguments(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving():
            wrong = ("call", NAME, ROOT, MANAGER, "Create", "sa{sv}", "key", "1", "no-such-option", "s", "x")
            with pytest.raises(BusctlError, match="may not call Create"):
                await host.busctl(*wrong, uid=NOBODY, groups=(READERS,))

    asyncio.run(run())


@pytest.mark.parametrize(
    "options, expected",
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
def test_type_errors_name_dbus_types(host: BusHost, options: dict[str, Any], expected: str) -> None:
    async def run() -> None:
        async with host.serving(), Client(host.address) as client:
            error, text = await client.refused("Assign", "sa{sv}", "key", options)
            assert error == INVALID_ARGS
            assert expected in text
            assert "Expected" not in text
            assert "$" not in text

    asyncio.run(run())


def _parsed(data: bytes) -> Any:
    frame = parse_frame(data)
    fields = data[16 : 16 + frame.padded_fields_bytes]
    return Header(frame, parse_fields(frame.order, fields, frame.fields_bytes))


def test_header_that_the_library_writes_is_parsed() -> None:
    header = _parsed(
        marshal_message(
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


def test_unknown_header_field_is_refused() -> None:
    fields = b"\x63\1s\0" + struct.pack("<I", 1) + b"x\0"
    with pytest.raises(ValueError, match="damaged"):
        parse_fields("<", fields, len(fields))


@given(st.binary(max_size=64), st.data())
def test_damaged_header_is_parsed_or_refused(noise: bytes, data: st.DataObject) -> None:
    """Random bytes, and a valid header with changed bytes, are parsed or raise ValueError, and no other error."""
    valid = bytearray(marshal_message(destination="a.b", path="/org/x", interface="i.j", member="Member"))
    for _ in range(data.draw(st.integers(1, 4))):
        valid[data.draw(st.integers(0, len(valid) - 1))] = data.draw(st.integers(0, 255))
    for candidate in (noise, bytes(valid)):
        if len(candidate) < 16:
            continue
        try:
            header = _parsed(candidate)
        except ValueError:
            continue
        assert all(isinstance(text, str) for text in (header.path, header.member, header.sender))


# The calls of one reader: a JSON list of messages for each write, and the number of replies after it. "fds" is the
# number of descriptors of a message.
_READER = """
import array, json, os, socket, sys
import dbus_fast
from tests.flood.attack import connect_to_bus
os.setgroups([int(sys.argv[2])]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
connection = connect_to_bus(sys.argv[1], descriptors=True)
null = os.open("/dev/null", os.O_RDONLY)
for line in sys.stdin:
    messages, replies = json.loads(line)
    for serial, fields in enumerate(messages, 2):
        passed = [null] * fields.pop("fds", 0)
        if fields.pop("silent", False):
            fields["flags"] = dbus_fast.MessageFlag.NO_REPLY_EXPECTED
        message = dbus_fast.Message(serial=serial, unix_fds=passed, **fields)._marshall(True)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        assert connection.sendmsg([message], ancillary) == len(message)
    received = b""
    while received.count(b"\\x05\\x01u\\0") < replies:
        received += connection.recv(65536)
    print(flush=True)
"""


class _Reader:
    """A process of a user in the group of readers that sends calls as they are given."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    async def send(self, messages: list[dict[str, Any]], replies: int = 0) -> None:
        """Send calls and wait for a number of replies."""
        target = {"destination": NAME, "path": ROOT, "interface": MANAGER}
        self._input.write(json.dumps([[target | message for message in messages], replies]).encode() + b"\n")
        assert await self._output.readline() == b"\n"


@contextlib.asynccontextmanager
async def _reader(host: BusHost) -> AsyncIterator[_Reader]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _READER, host.address, str(READERS), str(NOBODY)),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield _Reader(process)
    finally:
        process.kill()
        await process.wait()


def test_calls_of_peer_wait_in_the_queue_of_the_user(host: BusHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library answered them without a limit, however many replies the bus had not taken."""
    pings = [{"interface": PEER, "member": "Ping"}, {"interface": PEER, "member": "GetMachineId", "path": "/any"}] * 8

    async def run() -> None:
        async with host.serving() as server, _reader(host) as reader:
            connection = server._connection
            flush = connection._flush
            go_on = asyncio.Event()

            async def late() -> None:
                await go_on.wait()
                await flush()

            monkeypatch.setattr(connection, "_flush", late)
            decoded = _decoded(server)
            await reader.send(pings)
            assert await eventually(lambda: len(connection._admission._queues.get(NOBODY, ())) == 12)
            assert await eventually(lambda: len([one for one in decoded if one.interface == PEER]) == 4)
            go_on.set()
            await reader.send([], replies=len(pings))

    asyncio.run(run())


def test_machine_id_is_that_of_the_bus(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving():
            bus = ("org.freedesktop.DBus", "/org/freedesktop/DBus", PEER)
            expected = (await host.busctl("call", *bus, "GetMachineId"))["data"]
            assert (await host.busctl("call", NAME, ROOT, PEER, "GetMachineId"))["data"] == expected

    asyncio.run(run())


def test_changes_of_a_reader_that_wants_no_reply_are_not_even_checked(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = {"member": "Create", "signature": "sa{sv}", "body": ["silent", {}], "silent": True}

    async def run() -> None:
        async with host.serving() as server, _reader(host) as reader:
            objects = server._connection._objects
            check = objects.check
            checked: list[str] = []

            def record(header: Any, caller: Any) -> None:
                checked.append(header.member)
                check(header, caller)

            monkeypatch.setattr(objects, "check", record)
            # The first call waits for the credentials of the sender.
            await reader.send([silent, {"member": "Status"}], replies=1)
            await reader.send([silent, {"member": "Status"}], replies=1)
            assert "Status" in checked
            assert "Create" not in checked
            assert not server._connection._admission._calls

    asyncio.run(run())


def test_descriptors_of_a_reader_are_closed_before_its_call_waits(
    host: BusHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        go_on = threading.Event()
        look = host.manager.watcher.look
        monkeypatch.setattr(host.manager.watcher, "look", lambda: (go_on.wait(60), look())[1])
        async with host.serving() as server, _reader(host) as reader:
            await reader.send([{"member": "Status"}], replies=1)
            before = descriptors()
            try:
                await reader.send([{"member": "List", "fds": 4}] * 8)
                assert await eventually(lambda: len(server._connection._admission._queues.get(NOBODY, ())) == 4)
                assert descriptors() == before
            finally:
                go_on.set()
            await reader.send([], replies=8)

    asyncio.run(run())


def test_call_with_more_than_four_descriptors_is_refused(host: BusHost) -> None:
    async def run() -> None:
        async with host.serving() as server, Client(host.address) as client, _reader(host) as reader:
            await client.call("Status")
            before = descriptors()
            decoded = _decoded(server)
            await reader.send([{"member": "Status", "fds": 5}], replies=1)
            assert not [message for message in decoded if message.member == "Status"]
            assert descriptors() == before

    asyncio.run(run())
