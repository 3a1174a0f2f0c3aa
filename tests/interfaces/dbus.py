# SPDX-License-Identifier: Apache-2.0
"""The D-Bus introspection data, with documentation as annotations that gdbus-codegen(1) reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

from resctrlmond.api import types
from resctrlmond.api.dbus.interfaces import MANAGER, WORKLOAD, property_name
from resctrlmond.api.dbus.values import signature
from resctrlmond.api.signatures import MANAGER as VARLINK_MANAGER
from tests.interfaces import declaration
from tests.interfaces.declaration import Field, Method, plain

_DOC = "org.gtk.GDBus.DocString"
_EMITS = "org.freedesktop.DBus.Property.EmitsChangedSignal"
# A reply of more fields is one a{sv}: it can get further fields without another signature.
_MAX_OUTPUTS = 2

_HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by "make interfaces" from resctrlmond/api: change the declaration there. -->
"""

_DESCRIPTION = """
The verbs, fields and errors of org.resctrlmon.Manager(5). Required fields of a request are arguments; "options" holds
those that may be absent, and refuses unknown ones. A reply of one or two fields is answered as those fields, a longer
one as "result". An a{sv} holds fields by their names: strings as s, numbers as x, truth as b, lists as as or aa{sv},
attributes as a{ss}. Absent fields are left out. For a number any integer type is accepted.
"""
_WORKLOAD_DESCRIPTION = """
One workload, at /org/resctrlmon1/workload/ and the key, escaped as by sd_bus_path_encode(3). A property that has
nothing to say is "", 0, false or empty.
"""


# Methods without arguments that only the bus has.
_SUBSCRIPTION = {
    "Subscribe": "Have the signals of org.resctrlmon1 and of its objects sent, until Unsubscribe is called or the "
    "caller leaves the bus. They are sent only while a client has subscribed. A repeated call does nothing.",
    "Unsubscribe": "End the subscription of the caller, if it has one.",
}


@dataclass(frozen=True)
class Signal:
    """A signal: its arguments (name and type) and its description."""

    name: str
    arguments: tuple[tuple[str, str], ...]
    description: str


SIGNALS = (
    Signal("WorkloadAdded", (("key", "s"), ("path", "o")), "A workload was added."),
    Signal(
        "WorkloadRemoved",
        (("key", "s"), ("path", "o")),
        "A workload is no longer listed, because _snapshot_ttl_ has passed since its end. *WorkloadStateChanged* "
        "reports the end.",
    ),
    Signal("WorkloadStateChanged", (("key", "s"), ("state", "s")), "A workload is in another state."),
)
# Verbs that each object of a workload has too, with the key known.
_WORKLOAD_VERBS = ("Read", "Release")
# How a changed property is signalled, if not with its value. A workload may have a thousand members.
EMITS = {"Key": "const", "Members": "invalidates"}

# Interfaces of others, as their specifications declare them: org.freedesktop.LogControl1(5), D-Bus.
_STANDARD = """
<interface name="org.freedesktop.LogControl1">
  <property name="LogLevel" type="s" access="readwrite">
    <annotation name="org.freedesktop.DBus.Property.EmitsChangedSignal" value="false"/>
  </property>
  <property name="LogTarget" type="s" access="read">
    <annotation name="org.freedesktop.DBus.Property.EmitsChangedSignal" value="const"/>
  </property>
  <property name="SyslogIdentifier" type="s" access="read">
    <annotation name="org.freedesktop.DBus.Property.EmitsChangedSignal" value="const"/>
  </property>
</interface>
<interface name="org.freedesktop.DBus.ObjectManager">
  <method name="GetManagedObjects">
    <arg name="objects" type="a{oa{sa{sv}}}" direction="out"/>
  </method>
  <signal name="InterfacesAdded">
    <arg name="object" type="o"/>
    <arg name="interfaces" type="a{sa{sv}}"/>
  </signal>
  <signal name="InterfacesRemoved">
    <arg name="object" type="o"/>
    <arg name="interfaces" type="as"/>
  </signal>
</interface>
<interface name="org.freedesktop.DBus.Properties">
  <method name="Get">
    <arg name="interface" type="s" direction="in"/>
    <arg name="property" type="s" direction="in"/>
    <arg name="value" type="v" direction="out"/>
  </method>
  <method name="GetAll">
    <arg name="interface" type="s" direction="in"/>
    <arg name="properties" type="a{sv}" direction="out"/>
  </method>
  <method name="Set">
    <arg name="interface" type="s" direction="in"/>
    <arg name="property" type="s" direction="in"/>
    <arg name="value" type="v" direction="in"/>
  </method>
  <signal name="PropertiesChanged">
    <arg name="interface" type="s"/>
    <arg name="changed" type="a{sv}"/>
    <arg name="invalidated" type="as"/>
  </signal>
</interface>
<interface name="org.freedesktop.DBus.Introspectable">
  <method name="Introspect">
    <arg name="xml" type="s" direction="out"/>
  </method>
</interface>
<interface name="org.freedesktop.DBus.Peer">
  <method name="Ping"/>
  <method name="GetMachineId">
    <arg name="uuid" type="s" direction="out"/>
  </method>
</interface>
"""


def introspection() -> str:
    """The introspection data of all interfaces, as text."""
    return f"{_HEAD}{ElementTree.tostring(node(), encoding='unicode')}\n"


def node() -> ElementTree.Element:
    """The introspection data of all interfaces."""
    node = ElementTree.Element("node")
    node.append(_manager())
    node.append(_workload())
    node.extend(ElementTree.fromstring(f"<node>{_STANDARD}</node>"))
    ElementTree.indent(node)
    return node


def options(method: Method) -> list[Field]:
    """The fields of a request that ``options`` holds."""
    return [field for field in method.inputs if field.is_optional]


def _manager() -> ElementTree.Element:
    interface = ElementTree.Element("interface", name=MANAGER)
    _document(interface, _DESCRIPTION)
    methods = declaration.methods(VARLINK_MANAGER)
    interface.extend(_method(one, one.inputs) for one in methods if not one.is_followed)
    for name, description in _SUBSCRIPTION.items():
        _document(ElementTree.SubElement(interface, "method", name=name), description)
    for signal in SIGNALS:
        element = ElementTree.SubElement(interface, "signal", name=signal.name)
        _document(element, signal.description)
        for name, kind in signal.arguments:
            ElementTree.SubElement(element, "arg", name=name, type=kind)
    return interface


def _workload() -> ElementTree.Element:
    interface = ElementTree.Element("interface", name=WORKLOAD)
    _document(interface, _WORKLOAD_DESCRIPTION)
    for one in declaration.methods(VARLINK_MANAGER):
        if one.name in _WORKLOAD_VERBS:
            interface.append(_method(one, [field for field in one.inputs if field.name != "key"]))
    for field in declaration.fields(types.Workload):
        name = property_name(field.name)
        element = ElementTree.SubElement(interface, "property", name=name, type=signature(field.shape), access="read")
        _document(element, field.description)
        if name in EMITS:
            ElementTree.SubElement(element, "annotation", name=_EMITS, value=EMITS[name])
    return interface


def _method(method: Method, inputs: Iterable[Field]) -> ElementTree.Element:
    element = ElementTree.Element("method", name=method.name)
    description = method.description
    if method.is_for_root:
        description += " Only root may call it."
    if method.errors:
        description += f"\n\nErrors: {', '.join(method.errors)}."
    _document(element, description)
    for field in inputs:
        if not field.is_optional:
            _argument(element, field, "in")
    if options(method):
        _dictionary(element, "options", options(method), "in")
    if len(method.outputs) > _MAX_OUTPUTS:
        _dictionary(element, "result", method.outputs, "out")
    else:
        for field in method.outputs:
            _argument(element, field, "out")
    return element


def _argument(parent: ElementTree.Element, field: Field, direction: str) -> None:
    element = ElementTree.SubElement(parent, "arg", name=field.name, type=signature(field.shape), direction=direction)
    _document(element, field.description)


def _dictionary(parent: ElementTree.Element, name: str, fields: Iterable[Field], direction: str) -> None:
    element = ElementTree.SubElement(parent, "arg", name=name, type="a{sv}", direction=direction)
    _document(element, "\n\n".join(f"{one.name} ({signature(one.shape)}): {one.description}" for one in fields))


def _document(element: ElementTree.Element, description: str) -> None:
    paragraphs = [" ".join(plain(one).split()) for one in description.strip().split("\n\n")]
    ElementTree.SubElement(element, "annotation", name=_DOC, value="\n\n".join(paragraphs))
