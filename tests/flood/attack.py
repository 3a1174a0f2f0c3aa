# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.flood.attack KIND VARLINK-SOCKET BUS-ADDRESS``: one flood, until it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import dbus_fast
import dbus_fast.aio

from tests.bench.serve import MARK

NOBODY = 65534
MANAGER = "org.resctrlmon.Manager"
LIST = json.dumps({"method": f"{MANAGER}.List", "more": True}).encode() + b"\0"
STATUS = json.dumps({"method": f"{MANAGER}.Status"}).encode() + b"\0"
WATCH = json.dumps({"method": f"{MANAGER}.Watch", "more": True}).encode() + b"\0"
READ = json.dumps({"method": f"{MANAGER}.Read", "parameters": {"key": "long-0"}}).encode() + b"\0"
METRICS = json.dumps({"method": "io.systemd.Metrics.List", "more": True}).encode() + b"\0"
GARBAGE = json.dumps({"method": f"{MANAGER}.Create", "parameters": {"key": "x" * (2 << 20)}}).encode() + b"\0"


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection


def unread_lists(path: str, _bus: str) -> None:
    """Open 60 connections, do not read the replies, and open closed connections again."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            held.append(_connected(path))
            held[-1].sendall(LIST * 3)
        if len(held) >= 60:
            held.pop(0).close()


def calls(path: str, _bus: str) -> None:
    """Calls in a row, 50 at a time, with their replies read."""
    while True:
        with contextlib.suppress(OSError), _connected(path) as connection:
            while True:
                connection.sendall(STATUS * 50)
                missing = 50
                while missing:
                    missing -= connection.recv(1 << 20).count(b"\0") or missing


def metrics(path: str, _bus: str) -> None:
    """List the metrics on 20 connections at once, and read the replies."""
    held = [_connected(path) for _ in range(20)]
    for connection in held:
        connection.sendall(METRICS)
    while True:
        readable, _, _ = select.select(held, [], [])
        for connection in readable:
            with contextlib.suppress(OSError):
                # The last reply has no "continues".
                if connection.recv(1 << 20).rpartition(b"{")[2].find(b'"continues":true') < 0:
                    connection.sendall(METRICS)


def long_messages(path: str, _bus: str) -> None:
    """2 MiB for a method that the caller may not call."""
    while True:
        with contextlib.suppress(OSError), _connected(path) as connection:
            connection.sendall(GARBAGE)


def connections(path: str, _bus: str) -> None:
    """Connections, opened and closed."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            held.append(_connected(path))
        if len(held) > 100:
            held.pop(0).close()


def reads_left(path: str, _bus: str) -> None:
    """Connections that send one Read and close."""
    while True:
        with contextlib.suppress(OSError), _connected(path) as connection:
            connection.sendall(READ)


def watches(path: str, _bus: str) -> None:
    """Connections that send Watch and close, one after another."""
    while True:
        with contextlib.suppress(OSError), _connected(path) as connection:
            connection.sendall(WATCH)
            connection.recv(1)


def unread_watches(path: str, _bus: str) -> None:
    """60 connections that watch, as many as may, and do not read. Connections that were closed are opened again."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            held.append(_connected(path))
            held[-1].sendall(WATCH)
        if len(held) >= 60:
            held.pop(0).close()
            time.sleep(0.01)


def bus_large(_path: str, bus: str) -> None:
    """Messages of 30 MiB."""
    _on_bus(bus, "ay", [bytes(30 << 20)], "Create", at_once=1)


def bus_arrays(_path: str, bus: str) -> None:
    """The most values that a message of a reader's may hold."""
    _on_bus(bus, "aas", [[[]] * 4000], "List", at_once=16)


def bus_lists(_path: str, bus: str) -> None:
    """Lists, 64 at a time."""
    _on_bus(bus, "", [], "List", at_once=64)


def bus_unheard(_path: str, bus: str) -> None:
    """Calls that want no reply, from 8 connections."""
    call = marshal("Get", "s", ["long-0"], dbus_fast.MessageFlag.NO_REPLY_EXPECTED) * 100
    _pour(bus, call)


def bus_silent_sets(_path: str, bus: str) -> None:
    """Calls of Set that want no reply, with paths that take long to decode, from 8 connections."""
    path = f"/org/resctrlmon1/workload/{'_2e' * 40}"
    _pour(bus, marshal("Set", "", [], dbus_fast.MessageFlag.NO_REPLY_EXPECTED, path=path) * 20)


def bus_peer(_path: str, bus: str) -> None:
    """Calls of org.freedesktop.DBus.Peer whose replies are not read, from 8 connections."""
    _pour(bus, marshal("GetMachineId", "", [], interface="org.freedesktop.DBus.Peer") * 100)


def bus_unread(_path: str, bus: str) -> None:
    """Calls whose replies are not read, from 8 connections."""
    _pour(bus, marshal("Status", "", []) * 100)


def bus_unread_lists(_path: str, bus: str) -> None:
    """Lists of more than a MiB whose replies are not read, from 8 connections."""
    _pour(bus, b"".join(marshal("List", "", [], serial=serial) for serial in range(2, 102)))


def bus_left(_path: str, bus: str) -> None:
    """Connections that send one call and close."""
    call = marshal("Read", "s", ["long-0"])
    while True:
        with contextlib.suppress(OSError), connect_to_bus(bus) as connection:
            connection.sendall(call)


def bus_names(_path: str, bus: str) -> None:
    """Names of which a list takes more than a MiB, and connections that send one call and close."""
    with own_long_names(bus):
        bus_left("", bus)


def _pour(bus: str, data: bytes) -> None:
    connections = [connect_to_bus(bus) for _ in range(8)]
    left = dict.fromkeys(connections, b"")
    while True:
        _, writable, _ = select.select([], connections, [])
        for connection in writable:
            left[connection] = left[connection] or data
            left[connection] = left[connection][connection.send(left[connection], socket.MSG_DONTWAIT) :]


def connect_to_bus(address: str, *, descriptors: bool = False) -> socket.socket:
    """Return a connection to the bus, with a unique name, that reads nothing further."""
    connection = _connected(address.removeprefix("unix:path="))
    connection.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
    connection.recv(100)
    if descriptors:
        connection.sendall(b"NEGOTIATE_UNIX_FD\r\n")
        connection.recv(100)
    path = "/org/freedesktop/DBus"
    name = path[1:].replace("/", ".")
    hello = dbus_fast.Message(destination=name, path=path, interface=name, member="Hello", serial=1)
    connection.sendall(b"BEGIN\r\n" + hello._marshall(False))
    connection.recv(1000)
    return connection


@contextlib.contextmanager
def own_long_names(address: str) -> Iterator[None]:
    """Own 5,000 names of more than 210 bytes in the context."""
    path = "/org/freedesktop/DBus"
    name = path[1:].replace("/", ".")
    with contextlib.ExitStack() as stack:
        for number in range(10):
            connection = stack.enter_context(connect_to_bus(address))
            for serial in range(2, 502):
                body = [f"a.{'b' * 200}.x{os.getpid()}x{number}x{serial}", 4]
                request = dbus_fast.Message(
                    destination=name,
                    path=path,
                    interface=name,
                    member="RequestName",
                    signature="su",
                    body=body,
                    serial=serial,
                )
                connection.sendall(request._marshall(False))
            # The answer to the last one.
            last = b"\x05\x01u\0" + serial.to_bytes(4, "little")
            received = b""
            while last not in received:
                received = received[-100:] + connection.recv(1 << 16)
        yield


def marshal(
    member: str,
    signature: str,
    body: list[object],
    flags: dbus_fast.MessageFlag | None = None,
    serial: int = 2,
    *,
    path: str = "/org/resctrlmon1",
    interface: str = "org.resctrlmon1.Manager",
) -> bytes:
    message = dbus_fast.Message(
        destination="org.resctrlmon1",
        path=path,
        interface=interface,
        member=member,
        signature=signature,
        body=body,
        flags=flags or dbus_fast.MessageFlag.NONE,
        serial=serial,
    )
    return bytes(message._marshall(False))


def _on_bus(address: str, signature: str, body: list[object], member: str, at_once: int) -> None:
    async def call(bus: dbus_fast.aio.MessageBus) -> object:
        return await bus.call(
            dbus_fast.Message(
                destination="org.resctrlmon1",
                path="/org/resctrlmon1",
                interface="org.resctrlmon1.Manager",
                member=member,
                signature=signature,
                body=body,
            )
        )

    async def run() -> None:
        while True:
            bus = await dbus_fast.aio.MessageBus(bus_address=address).connect()
            # The library ends a connection whose buffer is full.
            with contextlib.suppress(Exception):
                while bus.connected:
                    async with asyncio.timeout(30):
                        await asyncio.gather(*(call(bus) for _ in range(at_once)))
            bus.disconnect()

    asyncio.run(run())


FLOODS: dict[str, Callable[[str, str], Awaitable[None] | None]] = {
    "unread lists": unread_lists,
    "calls": calls,
    "metrics": metrics,
    "long messages": long_messages,
    "connections": connections,
    "left reads": reads_left,
    "watches": watches,
    "unread watches": unread_watches,
    "D-Bus 30 MiB": bus_large,
    "D-Bus arrays": bus_arrays,
    "D-Bus lists": bus_lists,
    "D-Bus unheard": bus_unheard,
    "D-Bus silent sets": bus_silent_sets,
    "D-Bus Peer": bus_peer,
    "D-Bus unread": bus_unread,
    "D-Bus unread lists": bus_unread_lists,
    "D-Bus left": bus_left,
    "D-Bus names": bus_names,
}

if __name__ == "__main__":
    # Not before: another user may be unable to read Python's own files.
    os.setgroups([])
    os.setgid(MARK)
    os.setuid(NOBODY)
    FLOODS[sys.argv[1]](*sys.argv[2:])
