# SPDX-License-Identifier: Apache-2.0
"""The declaration of the interfaces, read from types.py, verbs.py and errors.py of ``resctrlmond.api``."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from msgspec import inspect as shapes

from resctrlmond.api import errors, exit_codes, types, verbs
from resctrlmond.api.access import Access


@dataclass(frozen=True)
class Field:
    """A field: its name at the interfaces, its type, whether it may be absent, and its description.

    ``is_common``: the description is that of ``types.Common``.
    """

    name: str
    shape: shapes.Type
    is_optional: bool
    description: str
    is_common: bool


@dataclass(frozen=True)
class Type:
    """A named type with its fields; for an enumeration, with its values and their descriptions."""

    name: str
    description: str
    fields: tuple[Field, ...] = ()
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Method:
    """A verb at an interface. ``errors`` are the names of its own errors.

    ``is_followed``: it replies without end, so it has no D-Bus method.
    """

    name: str
    description: str
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    errors: tuple[str, ...]
    is_for_root: bool
    is_followed: bool


@dataclass(frozen=True)
class Error:
    """An error: its name, its description, resctrlctl's exit code and its fields."""

    name: str
    description: str
    exit_code: int
    fields: tuple[Field, ...]


def methods(interface: str) -> list[Method]:
    """The methods of an interface, in the order of the table of verbs."""
    return [
        Method(
            name=verb.name,
            description=verb.description.strip(),
            inputs=fields(verb.request),
            outputs=fields(verb.reply),
            errors=_names(verb.errors),
            is_for_root=verb.access is Access.WRITE,
            is_followed=verb.follow is not None,
        )
        for verb in verbs.VERBS.values()
        if verb.interface == interface
    ]


def common_errors() -> tuple[str, ...]:
    """The names of the errors that any verb may return."""
    return (*_names(verbs.COMMON_ERRORS), errors.INTERNAL_ERROR)


def all_errors() -> list[Error]:
    """All errors, in the order of their table."""
    rows = [Error(row.name, row.description, row.exit_code, fields(row.parameters)) for row in errors.ERRORS.values()]
    last = errors.INTERNAL_ERROR
    return [*rows, Error(last, errors.INTERNAL_ERROR_DESCRIPTION, exit_codes.exit_code(last), ())]


def common_fields() -> tuple[Field, ...]:
    """The fields that have one description for all requests and replies."""
    return fields(types.Common)


def named_types(interface: str) -> list[Type]:
    """The types that the methods of an interface mention, in the order in which a reader meets them."""
    found: dict[type, Type] = {}

    def visit(shape: shapes.Type) -> None:
        for one in classes(shape):
            if one in found:
                continue
            found[one] = _named(one)
            for field in found[one].fields:
                visit(field.shape)

    for method in methods(interface):
        for field in (*method.inputs, *method.outputs):
            visit(field.shape)
    return list(found.values())


def name_of(kind: type) -> str:
    """The name of a type at the interfaces."""
    return types.PUBLIC_NAMES.get(kind, kind.__name__)


@functools.cache
def fields(kind: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The fields of a struct. Raises LookupError for one without a description."""
    info = shapes.type_info(kind)
    assert isinstance(info, shapes.StructType)
    own = _texts(kind)
    common = {} if kind is types.Common else {field.name: field.description for field in common_fields()}
    found = []
    for field in info.fields:
        is_common = field.name not in own
        if is_common and field.encode_name not in common:
            raise LookupError(f"{kind.__name__}.{field.name} has no description")
        text = common[field.encode_name] if is_common else own[field.name]
        found.append(Field(field.encode_name, field.type, not field.required, text, is_common))
    return tuple(found)


def present(shape: shapes.Type) -> shapes.Type:
    """Return the type of a field that is present: ``X`` of ``X | None``."""
    if isinstance(shape, shapes.UnionType):
        (shape,) = (one for one in shape.types if not isinstance(one, shapes.NoneType))
    return shape


def plain(text: str) -> str:
    r"""The text without the markup of scdoc: \*x\* and \_x\_ become x."""
    text = re.sub(r"(?<![\w\\])([*_])(?=\S)(.*?)(?<=\S)(?<!\\)\1(?!\w)", r"\2", text)
    return re.sub(r"\\(.)", r"\1", text)


def filled(text: str, width: int, indent: str) -> list[str]:
    """The paragraphs of a text as lines of at most ``width`` characters, with an empty one between paragraphs."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        wrapped = textwrap.wrap(
            words,
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += ["", *wrapped] if lines else wrapped
    return lines


def _names(kinds: tuple[type[Exception], ...]) -> tuple[str, ...]:
    listed = [row.name for kind, row in errors.ERRORS.items() if kind in kinds]
    assert len(listed) == len(kinds)
    return tuple(listed)


def classes(shape: shapes.Type) -> Iterator[type]:
    """Yield the structs and enumerations that the type of a field mentions."""
    """The classes of a type that have a name of their own at the interfaces."""
    shape = present(shape)
    match shape:
        case shapes.StructType() | shapes.EnumType():
            yield shape.cls
        case shapes.ListType() | shapes.VarTupleType():
            yield from classes(shape.item_type)
        case shapes.DictType():
            yield from classes(shape.value_type)


def _named(kind: type) -> Type:
    description = inspect.cleandoc(kind.__doc__ or "")
    if issubclass(kind, enum.Enum):
        texts = _texts(kind)
        return Type(name_of(kind), description, values=tuple((str(one.value), texts[one.name]) for one in kind))
    assert issubclass(kind, msgspec.Struct)
    return Type(name_of(kind), description, fields(kind))


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """The texts below the attributes in the source of a class and of its bases, by the attributes' names."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not one.__module__.startswith("resctrlmond."):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(body, ast.ClassDef)
        for attribute, after in pairwise(body.body):
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                continue
            match attribute:
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    found[name] = inspect.cleandoc(str(after.value.value))
    return found
