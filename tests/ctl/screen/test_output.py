# SPDX-License-Identifier: Apache-2.0
"""Text from other users cannot control the terminal, neither in tables nor in JSON."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlctl.screen.output import Json, encode
from resctrlmond.resctrl.errors import printable

HOSTILE = "a\u202egnp.exe\u2066\u200b\x9b2J\U000e0041\u00ad"


@pytest.mark.parametrize("form", [Json.SHORT, Json.PRETTY])
def test_format_characters_are_escaped_in_json(form: Json) -> None:
    text = encode({"name": HOSTILE, "plain": "grün ✓"}, form)
    assert text.replace("\n", "").isprintable()
    assert "\\u202e" in text
    assert "grün ✓" in text
    assert json.loads(text) == msgspec.json.decode(text) == {"name": HOSTILE, "plain": "grün ✓"}


@given(st.dictionaries(st.text(), st.text()))
def test_escaped_json_has_the_same_value(values: dict[str, str]) -> None:
    for form in (Json.SHORT, Json.PRETTY):
        text = encode(values, form)
        assert text.replace("\n", "").isprintable()
        assert json.loads(text) == values


def test_format_characters_are_escaped_in_text() -> None:
    assert printable(HOSTILE).isprintable()
    assert "\\u202e" in printable(HOSTILE)
