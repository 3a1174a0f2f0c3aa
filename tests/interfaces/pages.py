# SPDX-License-Identifier: Apache-2.0
"""The parts of the manual pages that describe methods, fields, types and errors. They are between two comments."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

from resctrlmond.api.dbus import interfaces as bus
from resctrlmond.api.dbus.values import signature
from resctrlmond.api.signatures import HOOK, MANAGER, UNIT
from resctrlmond.api.types import ErrorParameters, Workload
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.states import Quality
from tests.interfaces import dbus, declaration, varlink
from tests.interfaces.declaration import Error, Field, Method, Type, filled

_WIDTH = 120
# A page of 80 columns, less the indentation of a literal block.
_LITERAL_WIDTH = 68


def blocks() -> dict[str, list[str]]:
    """The lines of each generated part of org.resctrlmon.Manager(5), by its name."""
    return {
        "methods": [line for one in declaration.methods(MANAGER) for line in _method(one)],
        "common fields": _terms(declaration.common_fields()),
        "types": [line for one in declaration.named_types(MANAGER) for line in _type(one)],
        "errors": _errors(declaration.all_errors()),
        "hook": [line for one in declaration.methods(HOOK) for line in _method(one)],
        "unit": [line for one in declaration.methods(UNIT) for line in _method(one)],
    }


def bus_blocks() -> dict[str, list[str]]:
    """The lines of each generated part of org.resctrlmon1(5), by its name."""
    properties = [(bus.property_name(field.name), field.description) for field in declaration.fields(Workload)]
    return {
        "manager": _bus_interface(bus.MANAGER),
        "options": [line for method in declaration.methods(MANAGER) for line in _bus_options(method)],
        "signals": terms((signal.name, signal.description) for signal in dbus.SIGNALS),
        "workload": _bus_interface(bus.WORKLOAD),
        "properties": terms(properties),
    }


def reason_blocks() -> dict[str, list[str]]:
    """The reasons for which a figure is not exact, for resctrlmond(7)."""
    lines: list[str] = []
    for quality in (Quality.LATE, Quality.ESTIMATED, Quality.UNKNOWN):
        lines += [f"A figure is _{quality}_ because:", ""]
        for reason in Reason:
            if quality in reason.qualities:
                # Some reasons have values that may be absent.
                words = re.sub(r"\{(used|descendants|since)\}", "", reason.template)
                words = re.sub(r"\{(\w+?)_?\}", r"_\1_", words)
                first, *more = filled(words, _WIDTH - 2, "")
                lines += [f"- {first}", *(f"  {line}" for line in more)]
        lines.append("")
    return {"reasons": lines}


def with_blocks(page: str, parts: dict[str, list[str]]) -> str:
    """The page with its generated parts as they should be. Raises LookupError if a part has no place in it."""
    for name, lines in parts.items():
        begin, end = f'; written by "make interfaces": {name}\n', f"; end of {name}\n"
        place = re.compile(rf"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
        if not place.search(page):
            raise LookupError(f"the page has no lines '{begin.strip()}' and '{end.strip()}'")
        text = "\n".join(lines).strip("\n")
        page = place.sub(lambda _, text=text: f"\n{text}\n\n", page)  # type: ignore[misc]
    return page


def terms(entries: Iterable[tuple[str, str]]) -> list[str]:
    """A list of definitions; neighbours with the same text share one."""
    merged: list[tuple[list[str], str]] = []
    for name, text in entries:
        if merged and merged[-1][1] == text:
            merged[-1][0].append(name)
        else:
            merged.append(([name], text))
    lines = []
    for names, text in merged:
        lines += [", ".join(f"*{name}*" for name in names), *_indented(text), ""]
    return lines


def _bus_interface(name: str) -> list[str]:
    """The interface as "gdbus introspect" shows it."""
    (element,) = (one for one in dbus.node() if one.attrib["name"] == name)
    lines = ["```", f"interface {name} {{"]
    for kind in ("method", "signal", "property"):
        found = element.findall(kind)
        if found:
            lines.append(f"  {kind.replace('property', 'propertie')}s:")
        for one in found:
            if kind == "property":
                lines.append(f"    {one.attrib['access']} {one.attrib['type']} {one.attrib['name']};")
            else:
                lines += _bus_call(one)
    return [*lines, "};", "```"]


def _bus_call(element: ElementTree.Element) -> list[str]:
    arguments = [
        " ".join(one.attrib[field] for field in ("direction", "type", "name") if field in one.attrib)
        for one in element.findall("arg")
    ]
    begin = f"    {element.attrib['name']}("
    line = f"{begin}{', '.join(arguments)});"
    if len(line) <= _LITERAL_WIDTH:
        return [line]
    listed = [*(f"{argument}," for argument in arguments[:-1]), f"{arguments[-1]});"]
    return [f"{begin}{listed[0]}", *(f"{' ' * len(begin)}{one}" for one in listed[1:])]


def _bus_options(method: Method) -> list[str]:
    # A line ends between two options, not between the name and the type of one.
    listed = [f"_{field.name}_\0{signature(field.shape)}" for field in dbus.options(method)]
    lines = terms([(method.name, f"{', '.join(listed)}.")]) if listed else []
    return [line.replace("\0", " ") for line in lines]


def _method(method: Method) -> list[str]:
    lines = [f"## {method.name}", "", *filled(method.description, _WIDTH, ""), ""]
    lines += ["```", *varlink.signature(method, _LITERAL_WIDTH), "```", ""]
    lines += _terms(field for field in method.inputs if not field.is_common)
    if outputs := _terms(field for field in method.outputs if not field.is_common):
        lines += ["The reply has:", "", *outputs]
    if method.errors:
        listed = ", ".join(f"*{name}*" for name in method.errors)
        lines += [*filled(f"Errors: {listed}.", _WIDTH, ""), ""]
    return lines


def _type(one: Type) -> list[str]:
    lines = [f"## {one.name}", "", *filled(one.description, _WIDTH, ""), ""]
    lines += ["```", *varlink.declared_type(one, _LITERAL_WIDTH), "```", ""]
    return [*lines, *terms(one.values), *_terms(field for field in one.fields if not field.is_common)]


def _errors(errors: list[Error]) -> list[str]:
    common = declaration.fields(ErrorParameters)
    listed = ", ".join(f"*{name}*" for name in declaration.common_errors())
    lines = ["The fields of an error:", "", *_terms(common)]
    lines += ["All but *message* are absent if they are not known.", ""]
    lines += [*filled(f"Any method may return {listed}. The others are listed with each method.", _WIDTH, ""), ""]
    for error in errors:
        lines += [f"*{error.name}* [{error.exit_code}]", *_indented(error.description), ""]
        for field in error.fields:
            if field not in common:
                lines += [*_indented(f"It also has *{field.name}*: {field.description}"), ""]
    return lines


def _terms(fields: Iterable[Field]) -> list[str]:
    return terms((field.name, field.description) for field in fields)


def _indented(text: str) -> list[str]:
    return filled(text, _WIDTH, "\t")
