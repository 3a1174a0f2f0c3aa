# SPDX-License-Identifier: Apache-2.0
"""The pages of the two doors, held to the IDL, to the D-Bus description and to the table of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from resctrlmond.api import dbus_interfaces as bus
from resctrlmond.api import dbus_values
from resctrlmond.api.errors import DBUS_PREFIX, VARLINK_PREFIX, exit_code
from resctrlmond.api.verbs import VERBS

from .test_pages import ROOT, section

VARLINK = ROOT / "man" / "org.resctrlmon.Manager.5.scd"
DBUS = ROOT / "man" / "org.resctrlmon1.5.scd"
API = ROOT / "resctrlmond" / "api"
# One declaration, up to the next one.
_DECLARATION = re.compile(
    r"^(method|type|error) (\w+)\s*(.*?)(?=^(?:method|type|error) |\Z)", re.DOTALL | re.MULTILINE
)
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def plain(text: str) -> str:
    """The text on one line, without space where it says nothing."""
    return re.sub(r"(?<=[(]) | (?=[);])", "", " ".join(text.split()))


def declared(interface: str, kind: str) -> dict[str, str]:
    """What follows the name in each declaration of the IDL, on one line, by name."""
    text = (API / f"{interface}.varlink").read_text(encoding="utf-8")
    without_comments = re.sub(r"^(#.*|interface .*)\n", "", text, flags=re.MULTILINE)
    return {name: plain(rest) for found, name, rest in _DECLARATION.findall(without_comments) if found == kind}


def names(declaration: str) -> set[str]:
    """The fields of a declaration; the values, if it is an enumeration."""
    fields = set(re.findall(r"(\w+): ", declaration))
    return fields or set(re.findall(r"\w+", declaration))


def subsections(text: str) -> dict[str, str]:
    """The subsections of a section's text, by heading."""
    headed = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(headed[1::2], headed[2::2], strict=True))


def terms(text: str) -> set[str]:
    """What begins a definition, alone on its line: *one*, or *one*, *two*."""
    lines = re.findall(r"^(\*\w+\*(?:, \*\w+\*)*)(?: \[[0-9]+\])?$", text, re.MULTILINE)
    return {term for line in lines for term in re.findall(r"\*(\w+)\*", line)}


def documented() -> Iterator[tuple[str, str, str, str]]:
    """Interface, kind of declaration, its name and the subsection that is about it."""
    for heading, interface, kind in (
        ("METHODS", "org.resctrlmon.Manager", "method"),
        ("TYPES", "org.resctrlmon.Manager", "type"),
        ("HOOKS", "org.resctrlmon.Hook", "method"),
    ):
        for name, text in subsections(section(VARLINK, heading)).items():
            yield interface, kind, name, text


COMMON = terms(section(VARLINK, "COMMON FIELDS"))


def test_every_method_and_type_has_a_section_and_no_other_has() -> None:
    known = {
        (interface, kind, name)
        for interface in ("org.resctrlmon.Manager", "org.resctrlmon.Hook")
        for kind in ("method", "type")
        for name in declared(interface, kind)
    }
    assert {(interface, kind, name) for interface, kind, name, _ in documented()} == known


@pytest.mark.parametrize(
    ("interface", "kind", "name", "text"), [pytest.param(*one, id=f"{one[0]}.{one[2]}") for one in documented()]
)
def test_a_section_shows_the_declaration_and_explains_its_fields(
    interface: str, kind: str, name: str, text: str
) -> None:
    declaration = declared(interface, kind)[name]
    (block,) = _BLOCK.findall(text)
    between = " " if kind == "type" else ""
    assert plain(block) == f"{kind} {name}{between}{declaration}", f"{VARLINK.name} differs from the IDL"
    fields = names(declaration)
    assert terms(text) <= fields, "the page explains what is no field"
    assert fields - terms(text) <= COMMON, "the page does not explain every field"


def test_every_common_field_is_one() -> None:
    everywhere = [names(declared(interface, kind)[name]) for interface, kind, name, _ in documented()]
    for field in COMMON:
        assert sum(field in fields for fields in everywhere) > 1, field


def test_every_error_with_its_fields_and_exit_status() -> None:
    text = section(VARLINK, "ERRORS")
    known = declared("org.resctrlmon.Manager", "error")
    listed = dict(re.findall(r"^\*([A-Z]\w+)\* \[([0-9]+)\]$", text, re.MULTILINE))
    assert listed == {name: str(exit_code(name)) for name in known}
    assert terms(text) - listed.keys() == {field for error in known.values() for field in names(error)}
    assert f"_{VARLINK_PREFIX}NAME_" in text
    assert f"_{DBUS_PREFIX}NAME_" in section(DBUS, "ERRORS")


def rendered(name: str) -> str:
    """The interface as the page shows it, made from the XML that is answered on introspection."""

    def arguments(element: ElementTree.Element) -> str:
        fields = ("direction", "type", "name")
        return ", ".join(" ".join(one.attrib[field] for field in fields if field in one.attrib) for one in element)

    lines = [f"interface {name} {{"]
    interface = ElementTree.fromstring(bus.INTERFACES[name].xml)
    for heading, kind in (("methods:", "method"), ("signals:", "signal"), ("properties:", "property")):
        found = interface.findall(kind)
        lines += [heading] if found else []
        for one in found:
            if kind == "property":
                lines.append(f"{one.attrib['access']} {one.attrib['type']} {one.attrib['name']};")
            else:
                lines.append(f"{one.attrib['name']}({arguments(one)});")
    return plain(" ".join([*lines, "};"]))


@pytest.mark.parametrize(
    ("name", "heading"),
    [(bus.MANAGER, "THE MANAGER"), (bus.GROUP, "A GROUP"), (bus.LOG_CONTROL, "LOGGING")],
)
def test_the_page_shows_what_the_bus_is_told_on_introspection(name: str, heading: str) -> None:
    text = section(DBUS, heading)
    (block,) = _BLOCK.findall(text)
    assert plain(block) == rendered(name)
    interface = bus.INTERFACES[name]
    explained = terms(subsections(text).get("Signals", text))
    assert explained == interface.signals.keys() | interface.properties.keys()


def test_every_interface_and_object_of_the_bus_is_named() -> None:
    text = section(DBUS, "OBJECTS")
    assert set(re.findall(r"_(org\.[\w.]+)_", text)) == bus.INTERFACES.keys()
    assert set(re.findall(r"^_(/\S+)_$", text, re.MULTILINE)) == {bus.ROOT, f"{bus.GROUPS}/KEY", bus.LOG}


def test_every_option_of_the_bus_with_its_type() -> None:
    text = subsections(section(DBUS, "THE MANAGER"))["Options"]
    listed = {
        method: set(re.findall(r"_(\w+)_ (\S+?)(?=[,.]|$)", options, re.MULTILINE))
        for method, options in re.findall(r"^\*(\w+)\*\n\t(.*?)\n(?=\n|\Z)", text, re.DOTALL | re.MULTILINE)
    }
    known = {}
    for method, is_ in bus.INTERFACES[bus.MANAGER].methods.items():
        arguments = {argument.name for argument in is_.inputs}
        if "options" in arguments:
            fields = dbus_values.fields(VERBS[method].request).items()
            known[method] = {(name, dbus_values.signature(kind)) for name, kind in fields if name not in arguments}
    assert listed == known


def test_what_the_pages_are_read_with() -> None:
    assert plain("method A(\n  b: int\n) -> ()") == "method A(b: int) -> ()"
    assert names("(b: int, kind: (gauge, unknown)) -> (c: []C)") == {"b", "kind", "c"}
    assert names("(one, two)") == {"one", "two"}
    assert terms("*one*\n\tText *no*.\n\n*two*, *three*\n\tText.\n\n*Four* [5]\n") == {"one", "two", "three", "Four"}
