# SPDX-License-Identifier: Apache-2.0
"""Decode replies: the functions that check the types of parsed JSON, and the base of the generated classes."""

from __future__ import annotations

from resctrlctl.base.structs import Struct

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    import enum
    from collections.abc import Callable, Mapping
    from typing import ClassVar, Self, TypeVar

    _T = TypeVar("_T")
    _E = TypeVar("_E", bound=enum.StrEnum)

_NAMES = {dict: "object", list: "array", str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}


class InvalidReply(ValueError):
    """A value does not have the type of its field. ``place`` is its path in the reply, such as ``.pods[2].key``."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message, place)
        self.message = message
        self.place = place

    def __str__(self) -> str:
        return f"{self.message} - at `${self.place}`" if self.place else self.message

    def inside(self, place: str) -> InvalidReply:
        """Return the error with the place of the value that contains this one."""
        return InvalidReply(self.message, place + self.place)


class Reply(Struct, omit_defaults=True):
    """The base of replies. ``decoders`` has the name and the decoder of each field, by its name in JSON."""

    decoders: ClassVar[Mapping[str, tuple[str, Callable[[object], object]]]] = {}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Decode parsed JSON, without unknown fields. Raises InvalidReply if a field is missing or is not valid."""
        found = {}
        name = ""
        try:
            for name, each in decode_object(value).items():
                if (known := cls.decoders.get(name)) is not None:
                    field, decode = known
                    found[field] = decode(each)
        except InvalidReply as error:
            raise error.inside(f".{name}" if name else "") from None
        if not cls.required <= found.keys():
            missing = next(name for name, (field, _) in cls.decoders.items() if field in cls.required - found.keys())
            raise InvalidReply(f"Object missing required field `{missing}`")
        # As __init__ does, without its checks: a reply has thousands of structs.
        reply = cls.__new__(cls)
        reply.__dict__.update(found)
        return reply


def decode_text(value: object) -> str:
    """Return the value, which must be a text."""
    if type(value) is not str:
        raise _unexpected("str", value)
    return value


def decode_integer(value: object) -> int:
    """Return the value, which must be an integer. Neither 1.0 nor true is one."""
    if type(value) is not int:
        raise _unexpected("int", value)
    return value


def decode_boolean(value: object) -> bool:
    """Return the value, which must be true or false."""
    if type(value) is not bool:
        raise _unexpected("bool", value)
    return value


def decode_object(value: object) -> dict[str, object]:
    """Return the value, which must be an object."""
    if type(value) is not dict:
        raise _unexpected("object", value)
    return value


def decode_texts(value: object) -> dict[str, str]:
    """Return the value, which must be an object with texts."""
    fields = decode_object(value)
    try:
        return {name: decode_text(each) for name, each in fields.items()}
    except InvalidReply as error:
        raise error.inside("[...]") from None


def optional(decode: Callable[[object], _T]) -> Callable[[object], _T | None]:
    """Return the function that decodes such a value or null."""
    return lambda value: None if value is None else decode(value)


def list_of(decode: Callable[[object], _T]) -> Callable[[object], list[_T]]:
    """Return the function that decodes an array of such values."""

    def decode_list(value: object) -> list[_T]:
        if type(value) is not list:
            raise _unexpected("array", value)
        found: list[_T] = []
        try:
            for each in value:
                found.append(decode(each))  # noqa: PERF401 - their number is the place of an error
        except InvalidReply as error:
            raise error.inside(f"[{len(found)}]") from None
        return found

    return decode_list


def tuple_of(decode: Callable[[object], _T]) -> Callable[[object], tuple[_T, ...]]:
    """Return the function that decodes an array of such values as a tuple."""
    decode_list = list_of(decode)
    return lambda value: tuple(decode_list(value))


def word(kind: type[_E]) -> Callable[[object], _E]:
    """Return the function that decodes a word of the enumeration."""
    members = {str(member): member for member in kind}

    def decode_word(value: object) -> _E:
        if (member := members.get(decode_text(value))) is None:
            raise InvalidReply(f"Invalid enum value {value!r}")
        return member

    return decode_word


def _unexpected(expected: str, value: object) -> InvalidReply:
    return InvalidReply(f"Expected `{expected}`, got `{_NAMES[type(value)]}`")
