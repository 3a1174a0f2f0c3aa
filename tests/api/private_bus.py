# SPDX-License-Identifier: Apache-2.0
"""A private bus, the D-Bus server on it with a real manager on the simulator, and clients as several users."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import dbus_fast
import dbus_fast.aio
import pytest

import resctrlmond.api
from resctrlmond.api.access import Policy
from resctrlmond.api.service import Service
from resctrlmond.api.workers import Workers
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.workload import Workload

NAME = "org.resctrlmon1"
ROOT = "/org/resctrlmon1"
MANAGER = "org.resctrlmon1.Manager"
WORKLOAD = "org.resctrlmon1.Workload"
PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
INVALID_ARGS = "org.freedesktop.DBus.Error.InvalidArgs"
LIMITS_EXCEEDED = "org.freedesktop.DBus.Error.LimitsExceeded"
# Path and interface of the object that controls the log.
LOG_CONTROL = ("/org/freedesktop/LogControl1", "org.freedesktop.LogControl1")
READERS = 5555
READ_ONLY = 5556  # a second group of readers
NOBODY = 65534

_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={path}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    {rule}
  </policy>
</busconfig>
"""


class PrivateBus:
    """A dbus-daemon that accepts every user, and that a test can kill and start again.

    ``rule`` is added to its policy.
    """

    def __init__(self, folder: Path, rule: str = "") -> None:
        folder.chmod(0o755)
        self.folder = str(folder)
        self.address = f"unix:path={folder}/bus"
        self._config = folder / "bus.conf"
        self._config.write_text(_CONFIG.format(path=folder / "bus", rule=rule))
        self._socket = folder / "bus"
        self._daemon: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the bus if it does not run."""
        if self._daemon is not None:
            return
        self._socket.unlink(missing_ok=True)
        self._daemon = subprocess.Popen(
            ["dbus-daemon", f"--config-file={self._config}", "--nofork", "--nopidfile", "--print-address"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._daemon.stdout is not None
        # The bus outlives the test that has started it, and writes nothing else.
        with self._daemon.stdout as output:
            assert output.readline().startswith("unix:")

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
            self._daemon = None


def load_server(library: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module of the D-Bus server again, with the given D-Bus library."""
    monkeypatch.setenv("RESCTRLMOND_DBUS_LIBRARY", library)
    for name in list(sys.modules):
        if name.startswith("resctrlmond.api.dbus"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(resctrlmond.api, "dbus", raising=False)
    module = importlib.import_module("resctrlmond.api.dbus.server")
    assert library == importlib.import_module("resctrlmond.api.dbus.library").LIBRARY
    return module


@dataclass
class BusHost:
    """A bus, a manager, and the module of the D-Bus server with one of the libraries."""

    bus: PrivateBus
    manager: Manager
    module: Any
    levels: list[str] = field(default_factory=lambda: ["info"])

    @property
    def address(self) -> str:
        return self.bus.address

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        """Yield a started D-Bus server that gets the manager's changes, as in the daemon."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(Workers()) as workers:
            server = self.module.DBusServer(
                Service(self.manager, Policy(READERS, READ_ONLY), workers),
                set_log_level=self.levels.append,
                get_log_level=lambda: self.levels[-1],
                folder=self.bus.folder,
                address=self.address,
            )

            def report(key: str, record: Workload | None) -> None:
                loop.call_soon_threadsafe(server.changed, key, record)

            self.manager.context.store.on_change = report
            try:
                await server.start()
                yield server
            finally:
                await server.close()
                self.manager.context.store.on_change = lambda key, record: None

    async def busctl(self, *arguments: str, uid: int = 0, groups: tuple[int, ...] = ()) -> Any:
        """Run busctl as a user, and return its output, decoded if it is JSON. Raises BusctlError."""
        identity: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": list(groups)} if uid else {}
        process = await asyncio.create_subprocess_exec(
            *("busctl", f"--address={self.address}", "--json=short", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **identity,
        )
        stdout, stderr = await process.communicate()
        if process.returncode:
            raise BusctlError(stderr.decode())
        return json.loads(stdout) if stdout.startswith(b"{") else stdout.decode()


class BusctlError(Exception):
    """busctl failed; the text is its standard error."""


class Client:
    """A client on dbus-fast. ``call`` raises dbus_fast.DBusError, with the name in ``type``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.signals: list[tuple[str, str, list[Any]]] = []

    async def __aenter__(self) -> Self:
        self.bus = await dbus_fast.aio.MessageBus(bus_address=self._address).connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.bus.disconnect()
        with contextlib.suppress(EOFError, OSError):
            await self.bus.wait_for_disconnect()  # type: ignore[no-untyped-call]  # dbus-fast declares no result
        # Older versions of the library leave these open until the garbage collector runs.
        for part in (self.bus._stream, self.bus._sock):
            if part is not None:
                part.close()

    async def call(
        self, member: str, signature: str = "", *body: Any, path: str = ROOT, interface: str | None = MANAGER
    ) -> Any:
        """Call a method and return its value, or a list if it does not return exactly one; variants are unpacked."""
        reply = await self.bus.call(
            dbus_fast.Message(
                destination=NAME,
                path=path,
                interface=interface,
                member=member,
                signature=signature,
                body=[*body],
            )
        )
        assert reply is not None
        if reply.message_type is dbus_fast.MessageType.ERROR:
            raise dbus_fast.DBusError(str(reply.error_name), reply.body[0])
        values = dbus_fast.unpack_variants(reply.body)
        return values[0] if len(values) == 1 else values

    async def refused(self, *arguments: Any, **target: Any) -> tuple[str, str]:
        """Call a method that fails, and return the name and the text of its error."""
        with pytest.raises(dbus_fast.DBusError) as caught:
            await self.call(*arguments, **target)
        return caught.value.type, caught.value.text

    async def listen(self) -> None:
        """Subscribe to the server's signals, and start to collect them in ``signals``."""
        self.bus.add_message_handler(self._on_message)
        await self.bus.call(
            dbus_fast.Message(
                destination="org.freedesktop.DBus",
                path="/org/freedesktop/DBus",
                interface="org.freedesktop.DBus",
                member="AddMatch",
                signature="s",
                body=[f"type='signal',sender='{NAME}'"],
            )
        )
        await self.call("Subscribe")

    def _on_message(self, message: dbus_fast.Message) -> None:
        if message.message_type is dbus_fast.MessageType.SIGNAL and message.sender != "org.freedesktop.DBus":
            self.signals.append((str(message.path), str(message.member), dbus_fast.unpack_variants(message.body)))

    async def has_signal(self, path: str, member: str, *body: Any) -> bool:
        """Wait for a signal; return whether it arrived within a minute."""
        return await eventually(lambda: (path, member, [*body]) in self.signals)


def marshal_message(**fields: Any) -> bytes:
    """Return a message in the format of the bus, as dbus-fast writes it."""
    return bytes(dbus_fast.Message(serial=7, **fields)._marshall(False))


async def eventually(condition: Any, timeout_s: float = 60.0) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))
