# SPDX-License-Identifier: Apache-2.0
"""Format values for people: scaled numbers with units, local times, and messages of the daemon."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal, InvalidOperation

from resctrlmond.resctrl.errors import printable

# The symbols of the units in resctrlmond.resctrl.counters. Any other unit is its own symbol.
_SYMBOLS = {"bytes": "B", "joules": "J", "farads": "F", "cycles": "cycles"}
_UTC_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def format_value(value: str, unit: str) -> str:
    """Return an exact value in ``unit`` as a short text: ``1.50 GiB``, ``12.345678 J``, ``48.120 Gcycles``.

    Bytes are scaled by 1024 to two decimals, all other units by 1000 to three. A value that needs no scaling keeps
    every digit. A text that is not a number is returned unchanged, but printable.
    """
    step, prefixes, digits = (1024, _BINARY, 2) if unit == "bytes" else (1000, _DECIMAL, 3)
    quantum = Decimal(1).scaleb(-digits)
    try:
        number = scaled = Decimal(value)
        power = 0
        # A value that would be rounded up to a full step gets the next prefix: 1.00 MiB, never 1024.00 KiB.
        while power < len(prefixes) - 1 and abs(scaled).quantize(quantum) >= step:
            scaled /= step
            power += 1
        shown = scaled.quantize(quantum) if power else number
    except InvalidOperation:
        return printable(value)
    return f"{shown:f} {prefixes[power]}{_SYMBOLS.get(unit, printable(unit))}".rstrip()


def format_time(text: str | None) -> str:
    """Return an RFC 3339 time as local date and time, to the second; "-" if there is none."""
    if not text:
        return "-"
    try:
        return datetime.datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return printable(text)


def format_message(text: str) -> str:
    """Return a message of the daemon with printable characters only, and with its times (RFC 3339, UTC) as local."""
    return _UTC_TIME.sub(lambda found: format_time(found[0]), printable(text))


def format_count(number: int, noun: str) -> str:
    """Return ``1 group``, ``2 groups``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
