# SPDX-License-Identifier: Apache-2.0
"""A client of systemd's manager on the bus: the state of units, which of them have changed, and transient units."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from resctrlmond.api.dbus.library import BUS_NAME, Bus, DBusError, Message, MessageType, Variant
from resctrlmond.daemon.unit_commands import Command, Service

NAME = "org.freedesktop.systemd1"
ROOT = "/org/freedesktop/systemd1"
MANAGER = f"{NAME}.Manager"
UNIT = f"{NAME}.Unit"
PROPERTIES = "org.freedesktop.DBus.Properties"
NO_SUCH_UNIT = f"{NAME}.NoSuchUnit"
UNIT_EXISTS = f"{NAME}.UnitExists"
# The socket of this connection in the daemon's folder, beside that of the D-Bus interface.
ENTRANCE = ".systemd"
_UNIT_PATH = f"{ROOT}/unit/"
_SIGNALS = (
    f"interface='{MANAGER}',member='UnitNew'",
    f"interface='{MANAGER}',member='UnitRemoved'",
    f"interface='{MANAGER}',member='Reloading'",
    # Each change of ActiveState and Job.
    f"interface='{PROPERTIES}',member='PropertiesChanged',arg0='{UNIT}'",
)
_INTERFACES = {".service": f"{NAME}.Service", ".scope": f"{NAME}.Scope", ".slice": f"{NAME}.Slice"}
_ENDED = ("inactive", "failed")
# The type of the properties with commands: path, arguments, whether a failure is ignored, the times of start and end
# (CLOCK_REALTIME and CLOCK_MONOTONIC, in microseconds), process, code and status.
_COMMANDS = "a(sasbttttuii)"


@dataclass(frozen=True, slots=True)
class Unit:
    """A loaded unit, as ListUnitsByPatterns describes it (org.freedesktop.systemd1(5))."""

    name: str
    active_state: str
    sub_state: str
    path: str
    job_type: str

    @property
    def has_ended(self) -> bool:
        """Whether no process of the unit runs, and no job is about to start it again.

        A service with RemainAfterExit= is active after its processes have exited.
        """
        is_over = self.active_state in _ENDED or (self.active_state, self.sub_state) == ("active", "exited")
        return is_over and self.job_type in ("", "stop")


class Systemd:
    """A connection to the manager. ``open`` creates it. ``on_change`` is called with the name of a unit that may have
    changed, and with "" if any unit may have. Belongs to the event loop.
    """

    def __init__(self, bus: Bus, owner: str, on_change: Callable[[str], None]) -> None:
        self._bus = bus
        self._owner = owner
        self._on_change = on_change

    @classmethod
    async def open(
        cls,
        address: str | None,
        folder: str,
        on_change: Callable[[str], None],
        entrance: str = ENTRANCE,
    ) -> Self:
        """Connect to the bus (None: the system bus), and subscribe to the signals of systemd.

        While it connects, there is a socket of the name ``entrance`` in ``folder``. Raises BusUnavailable, DBusError.
        """
        bus = await Bus.open(address, folder, entrance)
        try:
            changes = f"type='signal',sender='{BUS_NAME}',member='NameOwnerChanged',arg0='{NAME}'"
            await bus.ask("AddMatch", "s", changes)
            owner = await bus.ask("GetNameOwner", "s", NAME)
            systemd = cls(bus, owner, on_change)
            bus.gate.senders.add(owner)
            bus.add_message_handler(systemd._on_message)
            for signal in _SIGNALS:
                await bus.ask("AddMatch", "s", f"type='signal',sender='{NAME}',{signal}")
            await systemd._ask(ROOT, MANAGER, "Subscribe")
        except BaseException:
            await bus.close()
            raise
        return systemd

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def until_disconnected(self) -> str:
        """Wait until the connection has ended, also because systemd has another one now; return the cause."""
        await self._bus.until_disconnected()
        return self._bus.cause

    async def close(self) -> None:
        """Disconnect."""
        await self._bus.close()

    async def units(self, patterns: Sequence[str]) -> list[Unit]:
        """Return the loaded units whose names match one of the patterns. Raises BusUnavailable, DBusError."""
        # An empty list would match all units. The other call for names, ListUnitsByNames, loads those that are not.
        found = await self._ask(ROOT, MANAGER, "ListUnitsByPatterns", "asas", [], [*patterns]) if patterns else []
        return [Unit(name, active, sub, path, job_type) for name, _, _, active, sub, _, path, _, job_type, _ in found]

    async def control_group(self, unit: Unit) -> str:
        """Return the control group of a service, scope or slice, relative to the root; "" if it has none.

        Raises BusUnavailable, DBusError.
        """
        return str(await self.property_of(unit, "ControlGroup"))

    async def property_of(self, unit: Unit, name: str) -> Any:
        """Return a property of a service, scope or slice. Raises BusUnavailable, DBusError."""
        interface = _INTERFACES["." + unit.name.rpartition(".")[2]]
        value = await self._ask(unit.path, PROPERTIES, "Get", "ss", interface, name)
        return value.value

    async def start_transient(self, name: str, properties: Sequence[tuple[str, str, Any]]) -> None:
        """Create a transient unit, and begin to start it. A property is its name, its D-Bus signature and its value.

        Raises BusUnavailable, DBusError, which is UNIT_EXISTS if the unit is loaded already.
        """
        body = [[key, Variant(signature, value)] for key, signature, value in properties]
        await self._ask(ROOT, MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", body, [])

    async def stop(self, name: str) -> None:
        """Begin to stop a unit. A unit that is not loaded is not an error. Raises BusUnavailable, DBusError."""
        await self._ask_about(name, "StopUnit", "ss", name, "replace")

    async def reset_failed(self, name: str) -> None:
        """Have systemd forget a failed unit. A unit that is not loaded is not an error.

        Raises BusUnavailable, DBusError.
        """
        await self._ask_about(name, "ResetFailedUnit", "s", name)

    async def loaded(self, name: str) -> dict[str, Any] | None:
        """Load a unit, and return its properties; None if there is no such unit, and none of that name runs.

        A unit that has ended is loaded again from its file. Raises BusUnavailable, DBusError.
        """
        path = str(await self._ask(ROOT, MANAGER, "LoadUnit", "s", name))
        interfaces = (UNIT, _INTERFACES["." + name.rpartition(".")[2]])
        found = [await self._ask(path, PROPERTIES, "GetAll", "s", interface) for interface in interfaces]
        properties = {key: value.value for part in found for key, value in part.items()}
        is_gone = properties["LoadState"] == "not-found" and properties["ActiveState"] in _ENDED
        return None if is_gone else properties

    async def set_properties(self, name: str, properties: Sequence[tuple[str, str, Any]]) -> None:
        """Set properties of a unit until the next boot. A property is as in ``start_transient``.

        Raises BusUnavailable, DBusError.
        """
        body = [[key, Variant(signature, value)] for key, signature, value in properties]
        await self._ask(ROOT, MANAGER, "SetUnitProperties", "sba(sv)", name, True, body)

    async def _ask_about(self, name: str, member: str, signature: str, *body: Any) -> None:
        try:
            await self._ask(ROOT, MANAGER, member, signature, *body)
        except DBusError as error:
            if error.type != NO_SUCH_UNIT:
                raise DBusError(error.type, f"{name}: {error.text}") from error

    async def service(self, name: str) -> Service:
        """Return a loaded service with its commands. Raises BusUnavailable, DBusError."""
        path = await self._ask(ROOT, MANAGER, "GetUnit", "s", name)
        found = await self._ask(path, PROPERTIES, "GetAll", "s", _INTERFACES[".service"])
        commands = [
            Command(setting, program, pid, started / 1e6, bool(ended))
            for setting, value in found.items()
            if value.signature == _COMMANDS
            for program, _, _, _, started, _, ended, pid, _, _ in value.value
        ]
        return Service(str(found["ControlGroup"].value), tuple(commands))

    async def _ask(self, path: str, interface: str, member: str, signature: str = "", *body: Any) -> Any:
        try:
            return await self._bus.ask_peer(self._owner, path, interface, member, signature, *body)
        except DBusError as error:
            # The number of a connection means nothing to an administrator.
            raise DBusError(error.type, error.text.replace(self._owner, "systemd")) from error

    def _on_message(self, message: Message) -> bool:
        if message.message_type is not MessageType.SIGNAL:
            return False
        if (message.sender, message.member) == (BUS_NAME, "NameOwnerChanged"):
            # After daemon-reexec systemd has another connection, and has forgotten the subscription.
            self._bus.disconnect()
        elif message.sender == self._owner:
            match message.member, message.body:
                case "UnitNew" | "UnitRemoved", [str(name), *_]:
                    self._on_change(name)
                case "Reloading", [False]:
                    self._on_change("")
                case "PropertiesChanged", _ if (message.path or "").startswith(_UNIT_PATH):
                    self._on_change(unit_of_path(message.path or ""))
        return False


def unit_of_path(path: str) -> str:
    """Return the unit of an object path, in which "_" and two hexadecimal digits stand for other characters."""
    escaped = path.removeprefix(_UNIT_PATH)
    return re.sub("_([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), escaped)
