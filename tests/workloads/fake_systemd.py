# SPDX-License-Identifier: Apache-2.0
"""A manager object of systemd on a private bus, with units that a test changes, and transient units."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from dataclasses import dataclass, field, replace
from typing import Any, Self

import dbus_fast
import dbus_fast.aio

NAME = "org.freedesktop.systemd1"
ROOT = "/org/freedesktop/systemd1"
MANAGER = f"{NAME}.Manager"
PROPERTIES = "org.freedesktop.DBus.Properties"


@dataclass(frozen=True)
class Command:
    """A command of a service, with its process; ``started`` and ``ended`` are times of ``time.monotonic``."""

    program: str
    pid: int = 0
    started: float = 0
    ended: float = 0


@dataclass(frozen=True)
class Unit:
    """A loaded unit: its control group relative to the root, and its states; of a service, also its commands."""

    cgroup: str
    active: str = "active"
    sub: str = "running"
    job: str = ""
    result: str = "success"
    code: int = 0
    status: int = 0
    delegate: bool = False
    transient: bool = False
    invocation: str = "aa" * 16
    user: str = ""
    memory: dict[str, int] = field(default_factory=lambda: {"MemoryHigh": 2**64 - 1, "MemorySwapMax": 2**64 - 1})
    commands: dict[str, list[Command]] = field(default_factory=dict)


def path_of(name: str) -> str:
    return f"{ROOT}/unit/" + re.sub("[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):02x}", name)


class FakeSystemd:
    """Owns the name of systemd, answers calls about ``units``, and sends the signals of changes to subscribers.

    It does not reply while ``hangs``. ``calls`` are the names of the methods that were called. ``transient`` are the
    properties of the transient units that were created, in their order, with their names, and ``changes`` those that
    SetUnitProperties has set. Both calls fail with the D-Bus error ``refusal`` if that is set, and StopUnit for units
    that are ``unstoppable``. Units that are ``slow`` are deactivating after StopUnit. ``files`` are the units that
    LoadUnit loads.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.units: dict[str, Unit] = {}
        self.calls: list[str] = []
        self.hangs = False
        self.refusal = ""
        self.unstoppable: set[str] = set()
        self.slow: set[str] = set()
        self.files: dict[str, Unit] = {}
        self.transient: list[tuple[str, dict[str, Any]]] = []
        self.changes: list[tuple[str, dict[str, int]]] = []

    async def __aenter__(self) -> Self:
        self._bus = await dbus_fast.aio.MessageBus(bus_address=self.address).connect()
        self._bus.add_message_handler(self._handle)
        await self._bus.request_name(NAME)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._bus.disconnect()
        with contextlib.suppress(EOFError, OSError):
            await self._bus.wait_for_disconnect()  # type: ignore[no-untyped-call]  # dbus-fast declares no result
        for part in (self._bus._stream, self._bus._sock):
            if part is not None:
                part.close()

    async def reexecute(self) -> None:
        """Connect to the bus again, as after daemon-reexec."""
        await self.__aexit__()
        await self.__aenter__()

    def set(self, name: str, unit: Unit | None = None, **changes: Any) -> None:
        """Change, add or (without a unit or changes) remove a unit, and send the signal of that."""
        if unit is None and not changes:
            del self.units[name]
            self.signal("UnitRemoved", "so", name, path_of(name))
            return
        is_new = name not in self.units
        self.units[name] = unit or replace(self.units[name], **changes)
        if is_new:
            self.signal("UnitNew", "so", name, path_of(name))
        body = [f"{NAME}.Unit", {"ActiveState": dbus_fast.Variant("s", self.units[name].active)}, []]
        self.signal("PropertiesChanged", "sa{sv}as", *body, path=path_of(name), interface=PROPERTIES)

    def signal(self, member: str, signature: str, *body: Any, path: str = ROOT, interface: str = MANAGER) -> None:
        self._bus.send(dbus_fast.Message.new_signal(path, interface, member, signature, [*body]))

    def _handle(self, message: dbus_fast.Message) -> dbus_fast.Message | bool | None:
        if message.message_type is not dbus_fast.MessageType.METHOD_CALL:
            return None
        self.calls.append(message.member or "")
        if self.hangs:
            return True
        match message.member:
            case "Subscribe" | "ListUnitsByPatterns" | "Get" | "GetAll" | "GetUnit" | "LoadUnit":
                return self._state(message)
            case "StartTransientUnit":
                return self._start(message)
            case "SetUnitProperties":
                return self._change(message)
            case "StopUnit" | "ResetFailedUnit":
                return self._stop(message)
        return None

    def _state(self, message: dbus_fast.Message) -> dbus_fast.Message:
        reply = dbus_fast.Message.new_method_return
        is_property = message.member in ("Get", "GetAll")
        if is_property and (message.path or "") not in map(path_of, self.units):
            return dbus_fast.Message.new_error(message, f"{NAME}.NoSuchUnit", "Unit is not loaded.")
        match message.member:
            case "ListUnitsByPatterns":
                return reply(message, "a(ssssssouso)", [self._listed(message.body[1])])
            case "Get":
                return reply(message, "v", [_property(self._at(message.path), message.body[1])])
            case "GetAll":
                of = _general if message.body[0] == f"{NAME}.Unit" else _properties
                return reply(message, "a{sv}", [of(self._at(message.path))])
            case "LoadUnit":
                if message.body[0] not in self.units:
                    missing = Unit("", active="inactive", sub="not-found")
                    self.units[message.body[0]] = self.files.get(message.body[0], missing)
                return reply(message, "o", [path_of(message.body[0])])
            case "GetUnit" if message.body[0] in self.units:
                return reply(message, "o", [path_of(message.body[0])])
            case "GetUnit":
                return dbus_fast.Message.new_error(message, f"{NAME}.NoSuchUnit", "Unit is not loaded.")
        return reply(message)

    def _stop(self, message: dbus_fast.Message) -> dbus_fast.Message:
        name = message.body[0]
        if name not in self.units:
            return dbus_fast.Message.new_error(message, f"{NAME}.NoSuchUnit", f"Unit {name} not loaded.")
        if name in self.unstoppable:
            text = f"Operation refused, unit {name} may be requested by dependency only."
            return dbus_fast.Message.new_error(message, f"{NAME}.OnlyByDependency", text)
        if message.member == "StopUnit" and name in self.slow:
            self.set(name, active="deactivating", sub="stop-sigterm", job="stop")
        else:
            self.set(name)
        reply = dbus_fast.Message.new_method_return
        return reply(message, "o", ["/"]) if message.member == "StopUnit" else reply(message)

    def _at(self, path: str | None) -> Unit:
        return {path_of(name): unit for name, unit in self.units.items()}[path or ""]

    def _change(self, message: dbus_fast.Message) -> dbus_fast.Message:
        name, is_runtime, properties = message.body
        assert is_runtime
        if self.refusal or name not in self.units:
            return dbus_fast.Message.new_error(message, self.refusal or f"{NAME}.NoSuchUnit", f"{name}: refused")
        self.changes.append((name, {key: value.value for key, value in properties}))
        self.units[name] = replace(self.units[name], memory=self.units[name].memory | self.changes[-1][1])
        return dbus_fast.Message.new_method_return(message)

    def _start(self, message: dbus_fast.Message) -> dbus_fast.Message:
        name, _, properties, _ = message.body
        if self.refusal or name in self.units:
            text = f"Unit {name} was already loaded." if name in self.units else "refused"
            return dbus_fast.Message.new_error(message, self.refusal or f"{NAME}.UnitExists", text)
        self.transient.append((name, {key: value.value for key, value in properties}))
        self.set(name, Unit(f"/companions/{name}"))
        return dbus_fast.Message.new_method_return(message, "o", ["/"])

    def _listed(self, patterns: list[str]) -> list[list[Any]]:
        return [
            [name, "", "loaded", unit.active, unit.sub, "", path_of(name), int(bool(unit.job)), unit.job, "/"]
            for name, unit in self.units.items()
            if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]


def _property(unit: Unit, name: str) -> dbus_fast.Variant:
    found = {
        "ControlGroup": ("s", unit.cgroup),
        "Result": ("s", unit.result),
        "ExecMainCode": ("i", unit.code),
        "ExecMainStatus": ("i", unit.status),
    }
    return dbus_fast.Variant(*found[name])


def _general(unit: Unit) -> dict[str, dbus_fast.Variant]:
    """Return the properties that units of all types have."""
    return {
        "LoadState": dbus_fast.Variant("s", "not-found" if unit.sub == "not-found" else "loaded"),
        "ActiveState": dbus_fast.Variant("s", unit.active),
        "Transient": dbus_fast.Variant("b", unit.transient),
        "InvocationID": dbus_fast.Variant("ay", bytes.fromhex(unit.invocation)),
    }


def _properties(unit: Unit) -> dict[str, dbus_fast.Variant]:
    """Return the properties of a service, as systemd does: each command also in a property of another type."""
    settings = (
        "ExecCondition",
        "ExecStartPre",
        "ExecStart",
        "ExecStartPost",
        "ExecReload",
        "ExecStop",
        "ExecStopPost",
    )
    found = {
        "ControlGroup": dbus_fast.Variant("s", unit.cgroup),
        "Delegate": dbus_fast.Variant("b", unit.delegate),
        "MemoryMax": dbus_fast.Variant("t", 2**64 - 1),
        "User": dbus_fast.Variant("s", unit.user),
    }
    found |= {name: dbus_fast.Variant("t", value) for name, value in unit.memory.items()}
    for setting in settings:
        commands = unit.commands.get(setting, [])
        values: list[list[Any]] = [
            [one.program, [one.program], False, 0, round(one.started * 1e6), 0, round(one.ended * 1e6), one.pid, 0, 0]
            for one in commands
        ]
        found[setting] = dbus_fast.Variant("a(sasbttttuii)", values)
        extended = [[*value[:2], [], *value[3:]] for value in values]
        found[f"{setting}Ex"] = dbus_fast.Variant("a(sasasttttuii)", extended)
    return found
