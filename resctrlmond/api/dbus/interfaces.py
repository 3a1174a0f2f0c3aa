# SPDX-License-Identifier: Apache-2.0
"""The D-Bus interfaces of org.resctrlmon1.xml, and the paths of objects."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree

import msgspec

from resctrlmond.api import definitions
from resctrlmond.workloads.model.validation import MAX_KEY_LENGTH

NAME = "org.resctrlmon1"
ROOT = "/org/resctrlmon1"
WORKLOADS = f"{ROOT}/workload"
LOG = "/org/freedesktop/LogControl1"

MANAGER = "org.resctrlmon1.Manager"
WORKLOAD = "org.resctrlmon1.Workload"
LOG_CONTROL = "org.freedesktop.LogControl1"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"
PROPERTIES = "org.freedesktop.DBus.Properties"
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
PEER = "org.freedesktop.DBus.Peer"

# Each character of a key is ASCII, and takes at most three.
_MAX_ELEMENT_LENGTH = 3 * MAX_KEY_LENGTH

# The interfaces of every object.
STANDARD = (PROPERTIES, INTROSPECTABLE, PEER)

# Each byte in an element of an object path.
_ENCODED = [chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"_{byte:02x}" for byte in range(256)]

_EMITS = "org.freedesktop.DBus.Property.EmitsChangedSignal"
_HEAD = """<!DOCTYPE node PUBLIC "-//freedesktop//DTD D-BUS Object Introspection 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd">
"""


class Argument(msgspec.Struct, frozen=True):
    """One argument: its name, and its D-Bus type."""

    name: str
    type: str


class Method(msgspec.Struct, frozen=True):
    """The arguments of a method and of its reply."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]

    @property
    def input_signature(self) -> str:
        """Return the signature of a call."""
        return "".join(argument.type for argument in self.inputs)

    @property
    def output_signature(self) -> str:
        """Return the signature of the reply."""
        return "".join(argument.type for argument in self.outputs)


class Interface(msgspec.Struct, frozen=True):
    """An interface. ``properties`` are types by name; ``xml`` is its element without comments.

    ``invalidated`` are the properties whose change signals do not contain the new value.
    """

    name: str
    methods: dict[str, Method]
    signals: dict[str, str]
    properties: dict[str, str]
    invalidated: frozenset[str]
    xml: str


def _read() -> dict[str, Interface]:
    xml = definitions.read("org.resctrlmon1.xml")
    # A file of the package, not input from outside.
    return {element.attrib["name"]: _interface(element) for element in ElementTree.fromstring(xml)}  # noqa: S314


def _interface(element: ElementTree.Element) -> Interface:
    return Interface(
        name=element.attrib["name"],
        methods={
            method.attrib["name"]: Method(_arguments(method, "in"), _arguments(method, "out"))
            for method in element.iter("method")
        },
        signals={
            signal.attrib["name"]: "".join(argument.attrib["type"] for argument in signal.iter("arg"))
            for signal in element.iter("signal")
        },
        properties={one.attrib["name"]: one.attrib["type"] for one in element.iter("property")},
        invalidated=frozenset(
            one.attrib["name"]
            for one in element.iter("property")
            for annotation in one
            if (annotation.attrib["name"], annotation.attrib["value"]) == (_EMITS, "invalidates")
        ),
        xml=ElementTree.tostring(element, encoding="unicode").rstrip(),
    )


def _arguments(method: ElementTree.Element, direction: str) -> tuple[Argument, ...]:
    found = (one.attrib for one in method.iter("arg") if one.attrib["direction"] == direction)
    return tuple(Argument(one["name"], one["type"]) for one in found)


INTERFACES = _read()


def introspection(interfaces: Iterable[str], children: Iterable[str]) -> str:
    """Return the introspection of an object with the interfaces, the standard interfaces, and the children."""
    described = [f"  {INTERFACES[name].xml}" for name in (*interfaces, *STANDARD)]
    # Children are elements of object paths, which have no special characters of XML.
    return "\n".join(
        [_HEAD + "<node>", *described, *(f'  <node name="{child}"/>' for child in children), "</node>\n"]
    )


def property_name(field: str) -> str:
    """Return the name of the property for a field: ``createdAt`` is ``CreatedAt``."""
    return field[0].upper() + field[1:]


def path_element(key: str) -> str:
    """Encode a key as one element of an object path, as sd_bus_path_encode(3) does.

    Bytes other than ASCII letters and digits, and a digit at the beginning, become ``_xx`` in hexadecimal; "" becomes
    ``_``.
    """
    if not key:
        return "_"
    first, *rest = key.encode()
    return (f"_{first:02x}" if chr(first).isdecimal() else _ENCODED[first]) + "".join([_ENCODED[one] for one in rest])


def key_of(element: str) -> str | None:
    """Decode the key of a path element; None if ``path_element`` encodes no key so: an object has one path."""
    if len(element) > _MAX_ELEMENT_LENGTH:
        return None
    try:
        key = "" if element == "_" else unquote_to_bytes(element.replace("_", "%")).decode()
        return key if path_element(key) == element else None
    except UnicodeError:
        return None


def workload_path(key: str) -> str:
    """Return the object path of a workload."""
    return f"{WORKLOADS}/{path_element(key)}"
