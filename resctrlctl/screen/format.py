# SPDX-License-Identifier: Apache-2.0
"""Format values for people: scaled numbers with units, local times, and messages of the daemon."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal, InvalidOperation

from resctrlmond.resctrl.errors import printable

# The symbols of the units in resctrlmond.resctrl.counters. Any other unit is its own symbol.
SYMBOLS = {"bytes": "B", "joules": "J", "farads": "F", "cycles": "cycles"}
# A text, which re compiles and keeps at the first use: most verbs do not need it.
_UTC_TIME = r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z"
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_SMALL = ("n", "u", "m")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def format_class(class_: str) -> str:
    """Return the name of a class as users read and type it: ``/`` for the root, which has no name."""
    return printable(class_) or "/"


def format_value(value: str | None, unit: str) -> str:
    """Return an exact value in ``unit`` as a short text: ``1.50 GiB``, ``12.345678 J``, ``48.120 Gcycles``.

    Bytes are scaled by 1024 to two decimals, all other units by 1000 to three. A value that needs no scaling keeps
    every digit. A text that is not a number is returned unchanged, but printable; None as ``unknown``.
    """
    if value is None:
        return "unknown"
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
    return f"{shown:f} {prefixes[power]}{SYMBOLS.get(unit, printable(unit))}".rstrip()


def shorten(number: Decimal, unit: str) -> str:
    """Return a number with three digits and a prefix: ``1.23MiB``, ``45.6W``, ``789mJ``. Bytes are scaled by 1024."""
    step, prefixes, power = (1024, _BINARY, 0) if unit.startswith("B") else (1000, _SMALL + _DECIMAL, len(_SMALL))
    while number and power > 0 and abs(number) < 1:
        number *= step
        power -= 1
    while power < len(prefixes) - 1 and abs(number) >= Decimal("999.5"):
        number /= step
        power += 1
    digits = 0 if not prefixes[power] and number == int(number) else _digits(abs(number))
    return f"{number:.{digits}f}{prefixes[power]}{unit}"


def _digits(number: Decimal) -> int:
    return 2 if number < Decimal("9.995") else 1 if number < Decimal("99.95") else 0


def format_duration(seconds: float) -> str:
    """Return a duration in at most five characters: ``90s``, ``5m12s``, ``42m``, ``3h12m``, ``5d4h``, ``12d``."""
    total = int(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if total < 100:
        return f"{total}s"
    if minutes < 10:
        return f"{minutes}m{total % 60}s"
    if minutes < 100:
        return f"{minutes}m"
    if hours < 10:
        return f"{hours}h{minutes % 60}m"
    if hours < 48:
        return f"{hours}h"
    return f"{days}d{hours % 24}h" if days < 10 else f"{days}d"


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
    text = printable(text)
    if "Z" not in text:
        return text  # without a time; re.sub() would compile the pattern, which takes as long as a call
    return re.sub(_UTC_TIME, lambda found: format_time(found[0]), text)


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 group``, ``2 groups``."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
