# SPDX-License-Identifier: Apache-2.0
"""The objects of the D-Bus interface: the interfaces of each path, and the handlers of methods and properties."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from resctrlmond.api import types
from resctrlmond.api.access import Access, Caller
from resctrlmond.api.dbus import interfaces as names
from resctrlmond.api.dbus import values
from resctrlmond.api.dbus.interfaces import INTERFACES, Method
from resctrlmond.api.dbus.library import DBusError, Message, Variant
from resctrlmond.api.lists import MAX_LIST_BYTES, bounded
from resctrlmond.api.service import Service, reported
from resctrlmond.api.verbs import VERBS, Verb
from resctrlmond.api.workers import Lane
from resctrlmond.resctrl.errors import PermissionDenied
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.verbs.read import get

# A reply: its signature, and its body.
Answer: TypeAlias = tuple[str, list[Any]]

_ERROR = "org.freedesktop.DBus.Error."
ACCESS_DENIED = f"{_ERROR}AccessDenied"
UNKNOWN_OBJECT = f"{_ERROR}UnknownObject"
UNKNOWN_INTERFACE = f"{_ERROR}UnknownInterface"
UNKNOWN_METHOD = f"{_ERROR}UnknownMethod"
UNKNOWN_PROPERTY = f"{_ERROR}UnknownProperty"
READ_ONLY = f"{_ERROR}PropertyReadOnly"

_MAX_SHOWN_PATH = 1024

_INTERFACES_AT = {
    "/": (),
    "/org": (),
    "/org/freedesktop": (),
    names.ROOT: (names.MANAGER, names.OBJECT_MANAGER),
    names.WORKLOADS: (),
    names.LOG: (names.LOG_CONTROL,),
}

# LogControl1 uses the levels of syslog(3). Only "error" has another name there.
_TO_SYSLOG = {"error": "err"}
_FROM_SYSLOG = {"debug": "debug", "info": "info", "notice": "notice", "warning": "warning", "err": "error"}


class LogControl(msgspec.Struct, frozen=True):
    """The log level of the daemon, as a name of ``journal.LEVELS``. ``target`` is "journal" or "console"."""

    get_level: Callable[[], str]
    set_level: Callable[[str], None]
    target: str


class Header(Protocol):
    """The header fields of a method call: a message of the library or a header of the gate."""

    @property
    def path(self) -> str | None: ...
    @property
    def interface(self) -> str | None: ...
    @property
    def member(self) -> str | None: ...
    @property
    def signature(self) -> str: ...


class Target(msgspec.Struct, frozen=True):
    """The method that a call names; ``verb`` is None for the standard interfaces, Subscribe and Unsubscribe."""

    interface: str
    method: Method
    access: Access
    verb: Verb | None = None

    @property
    def reply_bytes(self) -> int:
        """Return the bytes to reserve for the reply; 0 for calls that change something, and for subscriptions."""
        return MAX_LIST_BYTES if self.access is Access.READ and not self.is_subscription else 0

    @property
    def is_subscription(self) -> bool:
        """Return whether the method is Subscribe or Unsubscribe, which the connection to the bus handles."""
        return self.interface == names.MANAGER and self.verb is None


class Objects:
    """Handles method calls. The policy of the service also applies to the standard interfaces."""

    def __init__(self, service: Service, log: LogControl) -> None:
        self._service = service
        self._log = log

    def check(self, header: Header, caller: Caller) -> None:
        """Raise the error with which ``resolve`` would refuse the decoded call.

        Only an optimization: the body of a call that would be refused need not be decoded.
        """
        self.resolve(header, caller)

    def resolve(self, call: Header, caller: Caller) -> Target:
        """Return the target of a call if the caller may call it. Raises DBusError, PermissionDenied.

        No other code checks the access of a decoded call.
        """
        target = self._target(call)
        if target.verb is not None:
            self._service.policy.check(caller, target.access, target.verb.name)
            return target
        if target.interface == names.PEER:
            return target
        # The names of the workloads' objects are the keys of workloads, which not all users may read.
        if target.interface == names.INTROSPECTABLE and not str(call.path).startswith(names.WORKLOADS):
            return target
        try:
            self._service.policy.check(caller, target.access, f"{target.interface}.{call.member}")
        except PermissionDenied as error:
            # The standard error for the standard interfaces; PermissionDenied is for the verbs.
            raise DBusError(ACCESS_DENIED, values.text(str(error))) from error
        return target

    async def answer(self, target: Target, call: Message, caller: Caller) -> Answer:
        """Return the reply to a call with the target that ``resolve`` returned. Raises ResctrlError, DBusError."""
        if target.verb is None:
            body = await self._standard(f"{target.interface}.{call.member}", call, caller)
            return target.method.output_signature, body
        given = {argument.name: value for argument, value in zip(target.method.inputs, call.body, strict=True)}
        options = given.pop("options", {})
        if target.interface == names.WORKLOAD:
            given["key"] = _key(call.path)
        request = values.request(target.verb.request, given, options)
        reply = await self._service.call(target.verb, request, caller)
        # In a thread, because some hundred workloads would block the event loop for tens of milliseconds.
        body = await self._service.workers.run(Lane.RECORDS, _body, target.method, reply)
        return target.method.output_signature, body

    def changes(self, call: Header) -> bool:
        """Return whether a call may change something, so that it is useful without a reply."""
        verb = VERBS.get(str(call.member))
        return call.member == "Set" or (verb is not None and verb.access is Access.WRITE)

    # -- the standard interfaces

    async def _standard(self, method: str, call: Message, caller: Caller) -> list[Any]:
        match method:
            case "org.freedesktop.DBus.Properties.Get":
                return [await self._property(call, caller)]
            case "org.freedesktop.DBus.Properties.GetAll":
                return [await self._properties(call, call.body[0], caller)]
            case "org.freedesktop.DBus.Properties.Set":
                self._set(call)
                return []
            case "org.freedesktop.DBus.ObjectManager.GetManagedObjects":
                return [await self._service.run(caller, Lane.RECORDS, _managed, self._service.manager)]
            case "org.freedesktop.DBus.Peer.Ping":
                return []
            case "org.freedesktop.DBus.Peer.GetMachineId":
                return [_machine_id()]
            case _:
                return [self._introspect(str(call.path))]

    async def _property(self, call: Message, caller: Caller) -> Variant:
        interface, name, *_ = call.body
        found = await self._properties(call, interface, caller)
        if name not in found:
            raise DBusError(UNKNOWN_PROPERTY, f"{interface} has no property {name}")
        return found[name]

    async def _properties(self, call: Message, interface: str, caller: Caller) -> dict[str, Variant]:
        """Return the properties of an interface of the object; of all its interfaces if ``interface`` is ""."""
        own = _interfaces_at(str(call.path))
        if interface and interface not in (*own, *names.STANDARD):
            raise DBusError(UNKNOWN_INTERFACE, f"{call.path} has no interface {interface}")
        wanted = [interface] if interface else own
        if names.WORKLOAD in wanted:
            workload = await self._service.run(
                caller, Lane.RECORDS, _workload, self._service.manager, _key(call.path)
            )
            return workload_properties(workload)
        return self._log_properties() if names.LOG_CONTROL in wanted else {}

    def _set(self, call: Message) -> None:
        interface, name, value = call.body
        if interface not in _interfaces_at(str(call.path)) or name not in INTERFACES[interface].properties:
            raise DBusError(UNKNOWN_PROPERTY, f"{call.path} has no property {interface}.{name}")
        if (interface, name) != (names.LOG_CONTROL, "LogLevel"):
            raise DBusError(READ_ONLY, f"{name} cannot be set")
        if value.signature != "s" or value.value not in _FROM_SYSLOG:
            raise DBusError(values.INVALID_ARGS, f"{name} is one of {', '.join(_FROM_SYSLOG)}")
        self._log.set_level(_FROM_SYSLOG[value.value])

    def _log_properties(self) -> dict[str, Variant]:
        level = self._log.get_level()
        return {
            "LogLevel": Variant("s", _TO_SYSLOG.get(level, level)),
            "LogTarget": Variant("s", self._log.target),
            "SyslogIdentifier": Variant("s", "resctrlmond"),
        }

    def _introspect(self, path: str) -> str:
        keys = self._service.manager.context.store.all() if path == names.WORKLOADS else []
        if path.startswith(f"{names.WORKLOADS}/"):
            get(self._service.manager.context, _key(path))
        return names.introspection(
            _interfaces_at(path), (*_children(path), *(names.path_element(one.key) for one in keys))
        )

    # -- steps

    def _target(self, call: Header) -> Target:
        """Return the target of a call. The caller may omit the interface."""
        if call.interface == names.PEER:
            has: tuple[str, ...] = (names.PEER,)  # at any path (D-Bus specification, "org.freedesktop.DBus.Peer")
        else:
            has = (*_interfaces_at(str(call.path)), *names.STANDARD)
        if call.interface and call.interface not in has:
            raise DBusError(UNKNOWN_INTERFACE, f"{call.path} has no interface {call.interface}")
        for interface in [call.interface] if call.interface else has:
            method = INTERFACES[interface].methods.get(str(call.member))
            if method is not None:
                if method.input_signature != call.signature:
                    raise DBusError(
                        values.INVALID_ARGS, f"{call.member} takes ({method.input_signature}), not ({call.signature})"
                    )
                if interface in (names.MANAGER, names.WORKLOAD) and (verb := VERBS.get(str(call.member))):
                    return Target(interface, method, verb.access, verb)
                return Target(interface, method, Access.WRITE if call.member == "Set" else Access.READ)
        raise DBusError(UNKNOWN_METHOD, f"{call.path} has no method {call.member}")


def _body(method: Method, reply: types.Reply) -> list[Any]:
    return [
        values.whole(reply) if output.name == "result" else values.part(reply, output.name)
        for output in method.outputs
    ]


def workload_properties(workload: types.Workload, fields: Iterable[str] | None = None) -> dict[str, Variant]:
    """Return the properties of org.resctrlmon1.Workload for all fields of a workload, or for the given fields."""
    return {
        names.property_name(field): values.variant(workload, field)
        for field in (values.fields(types.Workload) if fields is None else fields)
    }


def workloads_by_key(manager: Manager, workloads: Iterable[Workload]) -> dict[str, types.Workload]:
    """Return workloads by key, as the interfaces report them. Reads files, so do not call it in the event loop."""
    return {workload.key: reported(manager, workload) for workload in workloads}


def _workload(manager: Manager, key: str) -> types.Workload:
    return reported(manager, get(manager.context, key))


def _managed(manager: Manager) -> dict[str, dict[str, dict[str, Variant]]]:
    workloads = bounded(reported(manager, workload) for workload in manager.context.store.all())
    return {names.workload_path(one.key): {names.WORKLOAD: workload_properties(one)} for one in workloads}


def _interfaces_at(path: str) -> tuple[str, ...]:
    """Return the interfaces at a path, even if its workload does not exist. Raises DBusError UnknownObject."""
    if path in _INTERFACES_AT:
        return _INTERFACES_AT[path]
    _key(path)
    return (names.WORKLOAD,)


def _key(path: str | None) -> str:
    folder, _, element = str(path).rpartition("/")
    key = names.key_of(element) if folder == names.WORKLOADS else None
    if key is None:
        # A path that arrives here can take 8 KiB.
        raise DBusError(UNKNOWN_OBJECT, f"there is no object {str(path)[:_MAX_SHOWN_PATH]}")
    return key


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise DBusError(f"{_ERROR}FileNotFound", f"cannot read /etc/machine-id: {error.strerror}") from error


def _children(path: str) -> list[str]:
    """Return the names of the fixed objects directly below a path."""
    below = path.rstrip("/") + "/"
    return sorted(
        {one.removeprefix(below).partition("/")[0] for one in _INTERFACES_AT if one.startswith(below)} - {""}
    )
