# SPDX-License-Identifier: Apache-2.0
"""Syntax of resctrl's files: last_cmd_status, numbers and task lists."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from resctrlmond.sim.kernel.tree import error

STATUS_BYTES = 511  # a 512-byte buffer with its NUL (fs/resctrl/rdtgroup.c)

# The input of kstrtoint() with base 0: a leading 0 means octal.
_NUMBER = re.compile(r"([-+]?)(?:0x([0-9a-f]+)|(0[0-7]*)|([1-9][0-9]*))\Z", re.IGNORECASE | re.ASCII)
SPACE = " \t\n\v\f\r\xa0"


class CommandStatus:
    """``info/last_cmd_status``: messages are appended until an operation clears them."""

    def __init__(self, *, is_old: bool = False) -> None:
        """``is_old``: as in Linux 6.12, without a mark for truncated text or a message for unreadable commands."""
        self._text = ""
        self._cut = False
        self._is_old = is_old

    def clear(self) -> None:
        """Clear all messages."""
        self._text = ""
        self._cut = False

    def add(self, message: str, end: str = "\n") -> None:
        """Append one line, as far as there is room."""
        text = f"{self._text}{message}{end}".encode(errors="surrogateescape")
        self._text = text[:STATUS_BYTES].decode(errors="surrogateescape")
        self._cut = self._cut or len(text) > STATUS_BYTES

    def show(self) -> str:
        """Return the content of the file: ``ok`` if there is no message; a mark at the end if there were too many."""
        return (self._text or "ok\n") + ("[truncated]\n" if self._cut and not self._is_old else "")

    def line(self, file: str, command: str) -> str:
        """Return a command without its newline, which is required (EINVAL), and without the text after a NUL.

        Clears the messages. ``file`` is the name of the file, for the message of newer kernels if there is no
        newline.
        """
        if not command.endswith("\n"):
            raise self.unreadable(file)
        self.clear()
        return command[:-1].split("\0", 1)[0]

    def unreadable(self, file: str, number: int = errno.EINVAL) -> OSError:
        """Return the error for a command that cannot be read: newer kernels clear the messages and report it."""
        if not self._is_old:
            self.clear()
            self.add(f"{file}: Invalid input")
        return error(number)


def _parse(text: str) -> int | None:
    match = _NUMBER.match(text.removesuffix("\n"))
    if not match:
        return None
    sign, hexadecimal, octal, decimal = match.groups()
    value = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
    return -value if sign == "-" else value


def parse_int(text: str) -> int | None:
    """Parse an integer as kstrtoint() with base 0 does (32 bits, one newline may follow). Return None if invalid."""
    value = _parse(text)
    return value if value is not None and -(2**31) <= value < 2**31 else None


def parse_unsigned(text: str) -> int:
    """Parse an integer as kstrtouint() with base 0 does. Raises EINVAL if it is invalid, ERANGE above 32 bits."""
    value = _parse(text)
    if value is None or "-" in text:
        raise error(errno.EINVAL)
    if value >= 2**32:
        raise error(errno.ERANGE)
    return value


def parse_unsigned_long(text: str, base: int) -> int | None:
    """Parse an integer as kstrtoul() with base 10 or 16 does (64 bits; base 16 allows ``0x``); None if invalid."""
    prefix, digits = ("(0x)?", "[0-9a-f]+") if base == 16 else ("()", "[0-9]+")
    match = re.fullmatch(rf"\+?{prefix}({digits})\n?", text, re.IGNORECASE | re.ASCII)
    value = int(match[2], base) if match else 2**64
    return value if value < 2**64 else None


def task_tokens(command: str) -> Iterator[str]:
    """Yield the tokens of a write to ``tasks``, in their order (Linux 6.7 and newer).

    Text after a NUL is ignored, and the list ends if a token would begin with a newline or be empty.
    """
    rest: str | None = command.split("\0", 1)[0]
    while rest and rest[0] != "\n":
        token, comma, rest = rest.partition(",")
        yield token.strip(SPACE)
        if not comma:
            return
