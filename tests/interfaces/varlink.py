# SPDX-License-Identifier: Apache-2.0
"""The varlink interface definitions, with comments before each member and each field, as sd-varlink writes them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import inspect as shapes

from resctrlmond.api.signatures import MANAGER
from resctrlmond.api.verbs import INTERFACES
from tests.interfaces import declaration
from tests.interfaces.declaration import Field, Method, Type, filled, plain

_WIDTH = 120
_INDENT = "  "
_PLAIN = {shapes.StrType: "string", shapes.BoolType: "bool", shapes.IntType: "int", shapes.FloatType: "float"}
# types.DescriptorIndex, the only one.
_PLAIN[shapes.Metadata] = "int"


def interface(name: str) -> str:
    """The definition of an interface, with comments."""
    parts = [
        [*_comment(INTERFACES[name]), f"interface {name}"],
        *(_type(one) for one in declaration.named_types(name)),
        *(_method(one) for one in declaration.methods(name)),
    ]
    if name == MANAGER:
        parts += [
            [*_comment(one.description), f"error {one.name} {_one_line(one.fields)}"]
            for one in declaration.all_errors()
        ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def type_of(shape: shapes.Type) -> str:
    """Return the type of a field that is present."""
    shape = declaration.present(shape)
    match shape:
        case shapes.ListType() | shapes.VarTupleType():
            return f"[]{type_of(shape.item_type)}"
        case shapes.DictType():
            return f"[string]{type_of(shape.value_type)}"
        case shapes.StructType() | shapes.EnumType():
            return declaration.name_of(shape.cls)
    return _PLAIN[type(shape)]


def signature(method: Method, width: int = _WIDTH) -> list[str]:
    """The method without comments."""
    return _declared([f"method {method.name}", " -> "], [method.inputs, method.outputs], width)


def declared_type(one: Type, width: int = _WIDTH) -> list[str]:
    """The type without comments."""
    if one.values:
        names = [value for value, _ in one.values]
        line = f"type {one.name} ({', '.join(names)})"
        listed = [f"{_INDENT}{name}" for name in names]
        return [line] if len(line) <= width else [f"type {one.name} (", *_separated(listed), ")"]
    return _declared([f"type {one.name} "], [one.fields], width)


def _declared(before: list[str], groups: list[tuple[Field, ...]], width: int) -> list[str]:
    lines = [""]
    for index, (text, group) in enumerate(zip(before, groups, strict=True)):
        rest = len(before) - index - 1
        short = text + _one_line(group)
        if len(lines[-1]) + len(short) + 6 * rest <= width or not group:
            lines[-1] += short
        else:
            listed = [f"{_INDENT}{_field(field)}" for field in group]
            lines[-1] += f"{text}("
            lines += [*_separated(listed), ")"]
    return lines


def _method(method: Method) -> list[str]:
    description = method.description
    if method.is_for_root:
        description += " Only root may call it."
    if method.errors:
        description += f"\n\nErrors: {', '.join(method.errors)}."
    inputs, outputs = _commented(method.inputs), _commented(method.outputs)
    lines = [*_comment(description), f"method {method.name}("]
    lines = [*lines, *inputs, ") -> ("] if inputs else [*lines[:-1], f"{lines[-1]}) -> ("]
    return [*lines, *outputs, ")"] if outputs else [*lines[:-1], f"{lines[-1]})"]


def _type(one: Type) -> list[str]:
    listed = _commented(one.fields)
    if one.values:
        listed = _with_comments([(value, text) for value, text in one.values])
    return [*_comment(one.description), f"type {one.name} (", *listed, ")"]


def _commented(fields: Iterable[Field]) -> list[str]:
    return _with_comments([(_field(field), field.description) for field in fields])


def _with_comments(entries: list[tuple[str, str]]) -> list[str]:
    lines = []
    for index, (text, description) in enumerate(entries):
        comma = "," if index < len(entries) - 1 else ""
        lines += [*_comment(description, _INDENT), f"{_INDENT}{text}{comma}"]
    return lines


def _comment(text: str, indent: str = "") -> list[str]:
    return [line or f"{indent}#" for line in filled(plain(text), _WIDTH, f"{indent}# ")]


def _field(field: Field) -> str:
    return f"{field.name}: {'?' if field.is_optional else ''}{type_of(field.shape)}"


def _one_line(fields: Iterable[Field]) -> str:
    return f"({', '.join(map(_field, fields))})"


def _separated(lines: list[str]) -> list[str]:
    return [*(f"{line}," for line in lines[:-1]), lines[-1]]
