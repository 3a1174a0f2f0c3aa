# SPDX-License-Identifier: Apache-2.0
"""Exact values as people read them: scaled figures and local times."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal, InvalidOperation

from resctrlmond.resctrl.errors import printable

# What the units of resctrlmond.resctrl.counters are written as; other units stand as they are.
_SYMBOLS = {"bytes": "B", "joules": "J", "farads": "F", "cycles": "cycles"}
_UTC_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def figure(value: str, unit: str) -> str:
    """An exact value in ``unit`` as a short figure: ``1.50 GiB``, ``12.345678 J``, ``48.120 Gcycles``.

    Bytes are scaled by 1024 to two decimals, all else by 1000 to three. A value that needs no scaling keeps every
    digit. Text that is no number is returned as it is.
    """
    step, prefixes, digits = (1024, _BINARY, 2) if unit == "bytes" else (1000, _DECIMAL, 3)
    quantum = Decimal(1).scaleb(-digits)
    try:
        number = scaled = Decimal(value)
        power = 0
        # What would be rounded up to a full step belongs to the next prefix: 1.00 MiB, never 1024.00 KiB.
        while power < len(prefixes) - 1 and abs(scaled).quantize(quantum) >= step:
            scaled /= step
            power += 1
        shown = scaled.quantize(quantum) if power else number
    except InvalidOperation:
        return printable(value)
    return f"{shown:f} {prefixes[power]}{_SYMBOLS.get(unit, printable(unit))}".rstrip()


def local_time(text: str | None) -> str:
    """An RFC 3339 time as local date and time, to the second; "-" where there is none."""
    if not text:
        return "-"
    try:
        return datetime.datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return printable(text)


def prose(text: str) -> str:
    """A sentence of the daemon for people: printable, and with its times (RFC 3339, UTC) as local ones."""
    return _UTC_TIME.sub(lambda found: local_time(found[0]), printable(text))


def count(number: int, noun: str) -> str:
    """``1 group``, ``2 groups``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
