# SPDX-License-Identifier: Apache-2.0
"""The requests and replies as classes, which resctrlctl imports in the place of ``resctrlmond.api.types``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import inspect as shapes

from resctrlmond.api.verbs import VERBS
from tests.interfaces import declaration
from tests.interfaces.declaration import plain

# The verbs about one workload, or about all: list and run need no others. resctrlctl does not call Reconcile.
_ABOUT_WORKLOADS = (*("Create", "Assign", "AddMember", "RemoveMember", "Release", "Move", "Get", "Read", "ReadAll"),)
_ABOUT_THE_HOST = ("List", "ListPods", "ListUnwatched", "Watch", "Machine", "Sums", "ReadForeign", "Status")
_PLAIN = {shapes.StrType: "str", shapes.BoolType: "bool", shapes.IntType: "int"}
_DECODERS = {shapes.StrType: "decode_text", shapes.BoolType: "decode_boolean", shapes.IntType: "decode_integer"}
_HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""{title} Do not edit: "make interfaces" writes this from resctrlmond/api/types.py.

These classes do not need msgspec, which takes longer to import than a verb. ``decoders`` has the name of each field,
and the function that checks its value, by the name of the field in JSON.
"""

from __future__ import annotations

from resctrlctl.base.structs import Struct
from resctrlctl.connection.decoding import (
{decoders})
{imports}
'''


def workloads() -> str:
    """Return the text of ``resctrlctl/connection/replies.py``."""
    return _module("Requests and replies about workloads.", _of_verbs(_ABOUT_WORKLOADS), {})


def host() -> str:
    """Return the text of ``resctrlctl/connection/host_replies.py``."""
    known = _of_verbs(_ABOUT_WORKLOADS)
    every = _of_verbs(_ABOUT_THE_HOST)
    return _module("Replies about the host.", {kind: every[kind] for kind in every if kind not in known}, known)


def _of_verbs(names: Iterable[str]) -> dict[type[msgspec.Struct], bool]:
    """Return the structs of requests and replies, each after those in its fields, and whether replies have it."""
    found: dict[type[msgspec.Struct], bool] = {}
    for name in names:
        verb = VERBS[name]
        for kind, is_reply in ((verb.request, False), (verb.reply, True)):
            found |= {one: is_reply for one in _structs(kind) if one not in found or is_reply}
    return found


def _module(title: str, structs: dict[type[msgspec.Struct], bool], known: dict[type[msgspec.Struct], bool]) -> str:
    enums = _enums(structs)
    classes = [_class(kind, is_reply=is_reply) for kind, is_reply in structs.items()]
    body = "\n\n\n".join(classes)
    decoded = {kind for kind in enums if f"_{_constant(kind)})" in body}
    words = "".join(f"_{_constant(kind)} = word({kind.__name__})\n" for kind in enums if kind in decoded)
    places = {kind: kind.__module__ for kind in enums}
    used = [kind for kind in known if re.search(rf"\b{kind.__name__}\b", body)]
    places |= dict.fromkeys(used, "resctrlctl.connection.replies")
    by_place: dict[str, list[str]] = {}
    for kind, place in places.items():
        by_place.setdefault(place, []).append(kind.__name__)
    imports = [f"from {place} import {', '.join(sorted(names))}" for place, names in sorted(by_place.items())]
    decoders = sorted({"word", *re.findall(r"\b(?:decode_\w+|list_of|optional|tuple_of)\b", body)})
    head = _HEAD.format(
        title=title, decoders="".join(f"    {name},\n" for name in ["Reply", *decoders]), imports="\n".join(imports)
    )
    return f"{head}\n{words}\n\n{body}\n"


def _structs(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Yield the struct and those in its fields; those that a struct contains are before it."""
    for field in _fields(kind):
        for one in declaration.classes(field.type):
            if issubclass(one, msgspec.Struct):
                yield from _structs(one)
    yield kind


def _enums(kinds: Iterable[type[msgspec.Struct]]) -> list[type]:
    """Return the enumerations in the fields of the structs."""
    shown = [one for kind in kinds for field in _fields(kind) for one in declaration.classes(field.type)]
    return sorted({one for one in shown if not issubclass(one, msgspec.Struct)}, key=lambda one: one.__name__)


def _fields(kind: type) -> tuple[shapes.Field, ...]:
    info = shapes.type_info(kind)
    assert isinstance(info, shapes.StructType)
    return info.fields


def _class(kind: type[msgspec.Struct], *, is_reply: bool) -> str:
    fields = _fields(kind)
    required = [field.required for field in fields]
    # As with dataclasses, a field without a default cannot follow one with a default otherwise.
    base = "Reply" if is_reply else "Struct, omit_defaults=True"
    keywords = "" if required == sorted(required, reverse=True) else ", kw_only=True"
    lines = [f"class {kind.__name__}({base}{keywords}):", f'    """{_summary(kind)}"""']
    if fields:
        lines += ["", *(f"    {field.name}: {_annotation(field.type)}{_default(field)}" for field in fields)]
    if is_reply:
        lines += ["", "    decoders = {", *(f"        {_entry(field)}," for field in fields), "    }"]
    return "\n".join(lines)


def _summary(kind: type) -> str:
    first = plain(str(kind.__doc__)).split("\n\n")[0]
    return " ".join(first.split()).split(". ")[0].rstrip(".") + "."


def _annotation(shape: shapes.Type) -> str:
    match shape:
        case shapes.Metadata():
            return _annotation(shape.type)
        case shapes.UnionType():
            return f"{_annotation(declaration.present(shape))} | None"
        case shapes.ListType():
            return f"list[{_annotation(shape.item_type)}]"
        case shapes.VarTupleType():
            return f"tuple[{_annotation(shape.item_type)}, ...]"
        case shapes.DictType():
            return f"dict[{_annotation(shape.key_type)}, {_annotation(shape.value_type)}]"
        case shapes.StructType() | shapes.EnumType():
            return shape.cls.__name__
    return _PLAIN[type(shape)]


def _default(field: shapes.Field) -> str:
    if field.required:
        return ""
    if field.default_factory is not msgspec.NODEFAULT:
        assert field.default_factory is dict
        return " = {}"
    assert isinstance(field.default, str | int | None)
    return f" = {field.default!r}" if field.default != "" else ' = ""'


def _entry(field: shapes.Field) -> str:
    """Return the line of a field: its name in JSON, its name, and the function that decodes it."""
    decoder = _decoder(field.type)
    if isinstance(field.type, shapes.UnionType):
        decoder = f"optional({decoder})"
    return f'"{field.encode_name}": ("{field.name}", {decoder})'


def _decoder(shape: shapes.Type) -> str:
    shape = declaration.present(shape)
    match shape:
        case shapes.ListType():
            return f"list_of({_decoder(shape.item_type)})"
        case shapes.VarTupleType():
            return f"tuple_of({_decoder(shape.item_type)})"
        case shapes.DictType(key_type=shapes.StrType(), value_type=shapes.StrType()):
            return "decode_texts"
        case shapes.StructType():
            return f"{shape.cls.__name__}.from_json"
        case shapes.EnumType():
            return f"_{_constant(shape.cls)}"
    return _DECODERS[type(shape)]


def _constant(kind: type) -> str:
    """Return the name of the function that decodes an enumeration, such as ``end_rule``."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip("_")
