# SPDX-License-Identifier: Apache-2.0
"""The objects at the D-Bus door: which path has which interface, and what each method and property answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from resctrlmond.api import types
from resctrlmond.api.access import Access, Caller
from resctrlmond.api.dbus import interfaces as names
from resctrlmond.api.dbus import values
from resctrlmond.api.dbus.interfaces import INTERFACES, Method
from resctrlmond.api.dbus.library import DBusError, Message, Variant
from resctrlmond.api.lists import MAX_LIST_BYTES, bounded
from resctrlmond.api.verbs import VERBS, Service, group_of
from resctrlmond.api.workers import Lane
from resctrlmond.resctrl.errors import PermissionDenied
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model import Workload

# A reply: its signature, and its body.
Answer: TypeAlias = tuple[str, list[Any]]

_ERROR = "org.freedesktop.DBus.Error."
ACCESS_DENIED = f"{_ERROR}AccessDenied"
UNKNOWN_OBJECT = f"{_ERROR}UnknownObject"
UNKNOWN_INTERFACE = f"{_ERROR}UnknownInterface"
UNKNOWN_METHOD = f"{_ERROR}UnknownMethod"
UNKNOWN_PROPERTY = f"{_ERROR}UnknownProperty"
READ_ONLY = f"{_ERROR}PropertyReadOnly"

_INTERFACES_AT = {
    "/": (),
    "/org": (),
    "/org/freedesktop": (),
    names.ROOT: (names.MANAGER, names.OBJECT_MANAGER),
    names.GROUPS: (),
    names.LOG: (names.LOG_CONTROL,),
}

# LogControl1 speaks of syslog's levels, of which ours are some; one has another name there.
_TO_SYSLOG = {"error": "err"}
_FROM_SYSLOG = {"debug": "debug", "info": "info", "notice": "notice", "warning": "warning", "err": "error"}


@dataclass(frozen=True, slots=True)
class LogControl:
    """The daemon's logging, in the names of ``journal.LEVELS``. ``target`` is "journal" or "console"."""

    get_level: Callable[[], str]
    set_level: Callable[[str], None]
    target: str


class Header(Protocol):
    """What the header of a method call names; both a message of the library and a header of the gate do."""

    @property
    def path(self) -> str | None: ...
    @property
    def interface(self) -> str | None: ...
    @property
    def member(self) -> str | None: ...
    @property
    def signature(self) -> str: ...


class Objects:
    """Answers method calls. Decides nothing: also calls of standard interfaces pass the service's policy."""

    def __init__(self, service: Service, log: LogControl) -> None:
        self._service = service
        self._log = log

    async def answer(self, call: Message, caller: Caller) -> Answer:
        """What to answer to a call of any interface but Peer. Raises ResctrlError, DBusError."""
        self.check(call, caller)
        interface, method = self._method(call)
        given = {argument.name: value for argument, value in zip(method.inputs, call.body, strict=True)}
        match interface:
            case names.MANAGER:
                return await self._verb(str(call.member), method, given, caller)
            case names.GROUP:
                return await self._verb(str(call.member), method, {"key": _key(call.path), **given}, caller)
        return method.answers, await self._standard(f"{interface}.{call.member}", call, caller)

    def check(self, call: Header, caller: Caller) -> None:
        """Raise unless there is such a method and the caller may call it: both depend on the header alone.

        Raises DBusError, PermissionDenied.
        """
        if call.interface == names.PEER:
            return
        interface, _ = self._method(call)
        if interface in (names.MANAGER, names.GROUP):
            self._service.policy.check(caller, VERBS[str(call.member)].access, str(call.member))
            return
        # Which objects there are tells which workloads there are.
        if interface == names.INTROSPECTABLE and not str(call.path).startswith(names.GROUPS):
            return
        try:
            access = Access.WRITE if call.member == "Set" else Access.READ
            self._service.policy.check(caller, access, f"{interface}.{call.member}")
        except PermissionDenied as error:
            # Clients know this name for what every object has; our own is for our verbs.
            raise DBusError(ACCESS_DENIED, values.text(str(error))) from error

    def changes(self, call: Header) -> bool:
        """Whether a call is of use to a caller that wants no answer."""
        verb = VERBS.get(str(call.member))
        return call.member == "Set" or (verb is not None and verb.access is Access.WRITE)

    def reply_bytes(self, call: Message) -> int:
        """What the reply to a call may take; 0 for one that is short, and for calls that change something."""
        if call.interface in (None, names.MANAGER, names.GROUP) and str(call.member) in VERBS:
            return VERBS[str(call.member)].reply_bytes and MAX_LIST_BYTES
        return 0 if call.member == "Set" else MAX_LIST_BYTES

    # -- our interfaces

    async def _verb(self, name: str, method: Method, given: dict[str, Any], caller: Caller) -> Answer:
        options = given.pop("options", {})
        request = values.request(VERBS[name].request, given, options)
        reply = await self._service.call(name, request, caller)
        # Some hundred workloads take tens of milliseconds, which the event loop has not.
        return method.answers, await self._service.workers.run(Lane.RECORDS, _body, method, reply)

    # -- what every object has

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
                async with self._service.turn(caller):
                    return [await self._service.workers.run(Lane.RECORDS, _managed, self._service.manager)]
            case _:
                return [self._introspect(str(call.path))]

    async def _property(self, call: Message, caller: Caller) -> Variant:
        interface, name, *_ = call.body
        found = await self._properties(call, interface, caller)
        if name not in found:
            raise DBusError(UNKNOWN_PROPERTY, f"{interface} has no property {name}")
        return found[name]

    async def _properties(self, call: Message, interface: str, caller: Caller) -> dict[str, Variant]:
        """The properties of an interface of the object; of all of them if the interface is not named."""
        own = _interfaces_at(str(call.path))
        if interface and interface not in (*own, *names.STANDARD):
            raise DBusError(UNKNOWN_INTERFACE, f"{call.path} has no interface {interface}")
        wanted = [interface] if interface else own
        if names.GROUP in wanted:
            reply = await self._service.call("Get", types.KeyRequest(key=_key(call.path)), caller)
            assert isinstance(reply, types.GroupReply)
            return group_properties(reply.group)
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
        keys = self._service.manager.workloads() if path == names.GROUPS else []
        if path.startswith(f"{names.GROUPS}/"):
            self._service.manager.get(_key(path))
        return names.introspection(
            _interfaces_at(path), (*_children(path), *(names.escaped(one.key) for one in keys))
        )

    # -- steps

    def _method(self, call: Header) -> tuple[str, Method]:
        """The interface and method that are called; the caller may leave the interface out."""
        has = (*_interfaces_at(str(call.path)), *names.STANDARD)
        if call.interface and call.interface not in has:
            raise DBusError(UNKNOWN_INTERFACE, f"{call.path} has no interface {call.interface}")
        for interface in [call.interface] if call.interface else has:
            method = INTERFACES[interface].methods.get(str(call.member))
            if method is not None and interface != names.PEER:
                if method.takes != call.signature:
                    raise DBusError(
                        values.INVALID_ARGS, f"{call.member} takes ({method.takes}), not ({call.signature})"
                    )
                return interface, method
        raise DBusError(UNKNOWN_METHOD, f"{call.path} has no method {call.member}")


def _body(method: Method, reply: types.Reply) -> list[Any]:
    return [
        values.whole(reply) if output.name == "result" else values.part(reply, output.name)
        for output in method.outputs
    ]


def group_properties(group: types.Group, fields: Iterable[str] | None = None) -> dict[str, Variant]:
    """The properties of org.resctrlmon1.Group, or those of some fields of the group."""
    return {
        names.property_name(field): values.variant(group, field)
        for field in (values.fields(types.Group) if fields is None else fields)
    }


def described(manager: Manager, workloads: Iterable[Workload]) -> dict[str, types.Group]:
    """The groups of workloads, by key. Looks at files: not for the event loop."""
    return {workload.key: group_of(manager, workload) for workload in workloads}


def _managed(manager: Manager) -> dict[str, dict[str, dict[str, Variant]]]:
    groups = bounded(group_of(manager, workload) for workload in manager.workloads())
    return {names.group_path(group.key): {names.GROUP: group_properties(group)} for group in groups}


def _interfaces_at(path: str) -> tuple[str, ...]:
    """Our interfaces of an object. Raises DBusError UnknownObject; a group's object may yet turn out not to be."""
    if path in _INTERFACES_AT:
        return _INTERFACES_AT[path]
    _key(path)
    return (names.GROUP,)


def _key(path: str | None) -> str:
    folder, _, element = str(path).rpartition("/")
    key = names.unescaped(element) if folder == names.GROUPS else None
    if key is None:
        raise DBusError(UNKNOWN_OBJECT, f"there is no object {path}")
    return key


def _children(path: str) -> list[str]:
    """The next elements of the fixed paths below this one."""
    below = path.rstrip("/") + "/"
    return sorted(
        {one.removeprefix(below).partition("/")[0] for one in _INTERFACES_AT if one.startswith(below)} - {""}
    )
