# SPDX-License-Identifier: Apache-2.0
"""Classes with typed fields, and their JSON."""

from __future__ import annotations

import enum

import pytest

from resctrlctl.base.structs import Struct, from_json, replace, to_json


class Colour(enum.StrEnum):
    RED = "red"


class Inner(Struct, omit_defaults=True):
    class_: str
    read_at: str | None = None
    colour: Colour = Colour.RED
    count: int = 0


class Outer(Struct, kw_only=True):
    note: str = ""
    inner_items: list[Inner]


class More(Inner):
    is_new: bool = True


def test_fields_are_set_by_position_and_by_name() -> None:
    found = Inner("gold", count=2)
    assert (found.class_, found.read_at, found.colour, found.count) == ("gold", None, Colour.RED, 2)
    assert found == Inner(class_="gold", count=2)
    assert found != Inner("gold", count=3)
    assert found != More("gold", count=2)
    assert hash(found) == hash(Inner("gold", count=2))
    assert repr(found) == "Inner(class_='gold', read_at=None, colour=<Colour.RED: 'red'>, count=2)"


def test_missing_unknown_and_superfluous_fields_are_an_error() -> None:
    known = "Inner has the fields class_, read_at, colour, count"
    with pytest.raises(TypeError, match=f"{known}, not count"):
        Inner(count=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=f"{known}, not class_, size"):
        Inner("gold", size=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="5 values"):
        Inner("gold", None, Colour.RED, 0, 1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=f"{known}, not class_, size"):
        replace(Inner("gold"), size=2)


def test_copy_has_other_values_and_keeps_the_rest() -> None:
    first = Inner("gold", count=2)
    assert replace(first, count=3) == Inner("gold", count=3)
    assert first.count == 2


def test_json_has_names_in_camel_case_and_leaves_out_defaults_if_asked() -> None:
    assert to_json(Inner("gold")) == '{"class":"gold"}'
    assert to_json(Inner("", "now", count=1)) == '{"class":"","readAt":"now","count":1}'
    assert to_json(Outer(inner_items=[Inner("ä")])) == '{"note":"","innerItems":[{"class":"ä"}]}'
    assert to_json(More("gold", is_new=False)) == '{"class":"gold","isNew":false}'
    assert to_json([Inner("gold")], indent=2) == '[\n  {\n    "class": "gold"\n  }\n]'


def test_object_without_json_is_an_error() -> None:
    with pytest.raises(TypeError, match="set has no JSON"):
        to_json(Outer(inner_items={1}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b'{"a":1} x', "Extra data"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":-Infinity}', "-Infinity is not JSON"),
        (b'"\xff"', "can't decode byte 0xff"),
        (b'["\\uD83d"]', "surrogates not allowed"),
        (b'{"\\udc00":1}', "surrogates not allowed"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5_000, "4300 digits"),
    ],
    ids=["empty", "rest", "NaN", "infinity", "UTF-8", "surrogate", "surrogate name", "nesting", "digits"],
)
def test_data_that_are_not_json_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(data)


def test_escaped_characters_are_decoded() -> None:
    assert from_json(b'{"a":"\\u00e4\\ud83d\\ude00\\u0000"}') == {"a": "ä😀\0"}
