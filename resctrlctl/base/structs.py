# SPDX-License-Identifier: Apache-2.0
"""Classes with typed fields, and their JSON. Without msgspec and typing, which take longer to import than a verb."""

from __future__ import annotations

import json

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from typing import ClassVar, TypeVar, dataclass_transform

    _S = TypeVar("_S", bound="Struct")
else:

    def dataclass_transform(**_):
        """Return a decorator that returns the class: only type checkers read the settings."""
        return lambda kind: kind


@dataclass_transform(frozen_default=True)
class Struct:
    """The base of classes whose fields are their annotations. A value in the class is the default of its field.

    Fields are set by position or by name. Instances with equal fields are equal, and are not to be changed. In JSON,
    a field has its name in camel case, without the "_" at its end; with ``omit_defaults``, a field that has its
    default is left out. Only type checkers regard ``kw_only``.
    """

    # The name of each field in JSON, the defaults, and the fields without one.
    json_names: ClassVar[dict[str, str]] = {}
    defaults: ClassVar[dict[str, object]] = {}
    required: ClassVar[frozenset[str]] = frozenset()
    omits_defaults: ClassVar[bool] = False

    def __init_subclass__(cls, *, omit_defaults: bool = False, kw_only: bool = False) -> None:
        names = [name for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")]
        cls.json_names = cls.json_names | {name: _camel_case(name) for name in names}
        cls.defaults = cls.defaults | {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        cls.required = frozenset(cls.json_names) - cls.defaults.keys()
        cls.omits_defaults = cls.omits_defaults or omit_defaults

    def __init__(self, *values: object, **named: object) -> None:
        if len(values) > len(self.json_names):
            raise TypeError(f"{type(self).__name__} has {len(self.json_names)} fields, and got {len(values)} values")
        fields = self.__dict__
        # A field that is not set is read from the class, which has the default.
        fields.update(zip(self.json_names, values, strict=False), **named)
        if not self.required <= fields.keys() <= self.json_names.keys():
            raise TypeError(
                f"{type(self).__name__} has the fields {', '.join(self.json_names)}, not {', '.join(fields)}"
            )

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(tuple(_values(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in _values(self).items())})"


def replace(struct: _S, **changes: object) -> _S:
    """Return a copy of the struct with other values of these fields. Raises TypeError if it lacks one of them."""
    return type(struct)(**(struct.__dict__ | changes))


def fields_of(struct: Struct) -> dict[str, object]:
    """Return the fields that JSON has, by their names there."""
    values, omitted = _values(struct), struct.defaults if struct.omits_defaults else {}
    return {
        name: values[field]
        for field, name in struct.json_names.items()
        if field not in omitted or values[field] != omitted[field]
    }


def to_json(value: object, indent: int | None = None) -> str:
    """Return the value as JSON. Raises TypeError for an object that is neither a struct nor of JSON."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, default=_default, ensure_ascii=False, indent=indent, separators=separators)


def from_json(data: bytes) -> object:
    """Parse JSON. Raises ValueError if the data is not JSON in UTF-8, or has a text that is not Unicode."""
    text = data.decode()
    try:
        value: object = json.loads(text, parse_constant=_refuse)
        # Python accepts a half of a surrogate pair, which no output can have.
        if "\\u" in text:
            to_json(value).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _default(value: object) -> dict[str, object]:
    if isinstance(value, Struct):
        return fields_of(value)
    raise TypeError(f"{type(value).__name__} has no JSON")


def _values(struct: Struct) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.json_names}


def _camel_case(name: str) -> str:
    first, *others = name.rstrip("_").split("_")
    return first + "".join(map(str.title, others))
