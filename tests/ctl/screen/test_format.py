# SPDX-License-Identifier: Apache-2.0
"""Formatted values are short and correct, and no text can control the terminal."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlctl.screen.format import format_count, format_time, format_value
from resctrlmond.resctrl.errors import printable


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        ("0", "bytes", "0 B"),
        ("1023", "bytes", "1023 B"),
        ("1024", "bytes", "1.00 KiB"),
        ("1572864", "bytes", "1.50 MiB"),
        ("1048575", "bytes", "1.00 MiB"),
        ("18446744073709551615", "bytes", "16.00 EiB"),
        ("12.345678", "joules", "12.345678 J"),
        ("999.9999", "joules", "1.000 kJ"),
        ("54446119.644974", "joules", "54.446 MJ"),
        ("0.000122", "joules", "0.000122 J"),
        ("48120000000", "cycles", "48.120 Gcycles"),
        ("999", "", "999"),
        ("1000", "", "1.000 k"),
        ("7", "widgets", "7 widgets"),
        ("NaN", "bytes", "NaN"),
        ("not a number", "bytes", "not a number"),
    ],
)
def test_format_value(value: str, unit: str, shown: str) -> None:
    assert format_value(value, unit) == shown


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_scaled_value_is_within_half_a_digit_of_the_exact_value(number: int) -> None:
    text, unit = format_value(str(number), "bytes").split(" ")
    step = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
    assert abs(Decimal(text) * step - number) <= step * Decimal("0.005")


@given(st.text())
def test_any_text_is_formatted_without_control_characters(text: str) -> None:
    assert format_value(text, text).isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb", "a\\nb"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udcff", "\\udcff"),
        ("müsli", "müsli"),
    ],
)
def test_printable_escapes_control_and_format_characters(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_format_time_converts_to_local_time(environment: dict[str, str]) -> None:
    assert format_time("2026-11-21T11:13:22.500000Z") == "2026-11-21 11:13:22"
    assert format_time("2026-11-21T11:13:22+02:00") == "2026-11-21 09:13:22"
    assert format_time(None) == "-"
    assert format_time("yester\x1bday") == "yester\\x1bday"


def test_format_count() -> None:
    assert [format_count(number, "group") for number in (0, 1, 2)] == ["0 groups", "1 group", "2 groups"]
