# SPDX-License-Identifier: Apache-2.0
"""The descriptions of the interfaces are up to date, and the page of D-Bus keeps to its description."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import msgspec
import pytest

from resctrlmond.api.dbus import interfaces as bus
from resctrlmond.api.dbus import values as dbus_values
from resctrlmond.api.exit_codes import DBUS_PREFIX, VARLINK_PREFIX
from resctrlmond.api.verbs import VERBS
from tests.interfaces import declaration, pages
from tests.interfaces.__main__ import outdated
from tests.man.test_pages import ROOT, section

VARLINK = ROOT / "man" / "org.resctrlmon.Manager.5.scd"
DBUS = ROOT / "man" / "org.resctrlmon1.5.scd"
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def plain(text: str) -> str:
    """Return the text on one line, without meaningless space."""
    return re.sub(r"(?<=[(]) | (?=[);])", "", " ".join(text.split()))


def subsections(text: str) -> dict[str, str]:
    """The subsections of a section's text, by heading."""
    headed = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(headed[1::2], headed[2::2], strict=True))


def terms(text: str) -> set[str]:
    """Return the terms of definitions, each alone on its line: *one*, or *one*, *two*."""
    lines = re.findall(r"^(\*\w+\*(?:, \*\w+\*)*)(?: \[[0-9]+\])?$", text, re.MULTILINE)
    return {term for line in lines for term in re.findall(r"\*(\w+)\*", line)}


def test_the_generated_files_are_up_to_date() -> None:
    assert outdated() == [], "run 'make interfaces'"


def test_a_changed_description_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = msgspec.structs.replace(VERBS["Get"], description="Return something else.")
    monkeypatch.setitem(VERBS, "Get", changed)
    assert outdated() == [
        "resctrlmond/api/org.resctrlmon.Manager.varlink",
        "resctrlmond/api/org.resctrlmon1.xml",
        "man/org.resctrlmon.Manager.5.scd",
    ]


def test_a_page_without_the_place_of_a_generated_part_is_refused() -> None:
    with pytest.raises(LookupError, match="methods"):
        pages.with_blocks("# METHODS\n", {"methods": ["text"]})


def test_every_common_field_is_in_several_types() -> None:
    kinds = [kind for verb in VERBS.values() for kind in (verb.request, verb.reply)]
    common = [field.name for kind in set(kinds) for field in declaration.fields(kind) if field.is_common]
    for field in declaration.common_fields():
        assert common.count(field.name) > 1, field.name


def test_markup_is_left_out_of_comments() -> None:
    assert declaration.plain(r'*a*, _b_c_, (*d*(2)), x_y, "\_-\\"') == r'a, b_c, (d(2)), x_y, "_-\"'


def test_the_prefixes_of_errors_are_named() -> None:
    assert f"_{VARLINK_PREFIX}NAME_" in section(VARLINK, "ERRORS")
    assert f"_{DBUS_PREFIX}NAME_" in section(DBUS, "ERRORS")


def rendered(name: str) -> str:
    """The interface as the page shows it, made from the XML that is answered on introspection."""

    def arguments(element: ElementTree.Element) -> str:
        fields = ("direction", "type", "name")
        return ", ".join(
            " ".join(one.attrib[field] for field in fields if field in one.attrib) for one in element.findall("arg")
        )

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
    [(bus.MANAGER, "THE MANAGER"), (bus.WORKLOAD, "A WORKLOAD"), (bus.LOG_CONTROL, "LOGGING")],
)
def test_page_shows_the_introspection_data(name: str, heading: str) -> None:
    text = section(DBUS, heading)
    (block,) = _BLOCK.findall(text)
    assert plain(block) == rendered(name)
    interface = bus.INTERFACES[name]
    explained = terms(subsections(text).get("Signals", text))
    assert explained == interface.signals.keys() | interface.properties.keys()


def test_every_interface_and_object_of_the_bus_is_named() -> None:
    text = section(DBUS, "OBJECTS")
    assert set(re.findall(r"_(org\.[\w.]+)_", text)) == bus.INTERFACES.keys()
    assert set(re.findall(r"^_(/\S+)_$", text, re.MULTILINE)) == {bus.ROOT, f"{bus.WORKLOADS}/KEY", bus.LOG}


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


def test_parser_of_pages() -> None:
    assert plain("method A(\n  b: int\n) -> ()") == "method A(b: int) -> ()"
    assert terms("*one*\n\tText *no*.\n\n*two*, *three*\n\tText.\n\n*Four* [5]\n") == {"one", "two", "three", "Four"}
