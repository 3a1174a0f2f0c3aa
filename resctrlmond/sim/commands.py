# SPDX-License-Identifier: Apache-2.0
"""The small languages of resctrl's files: last_cmd_status, numbers and task lists."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from resctrlmond.sim.tree import error

STATUS_BYTES = 511  # a 512-byte buffer with its NUL (fs/resctrl/rdtgroup.c)

# What kstrtoint() takes with base 0: a leading 0 means octal.
_NUMBER = re.compile(r"([-+]?)(?:0x([0-9a-f]+)|(0[0-7]*)|([1-9][0-9]*))\Z", re.IGNORECASE | re.ASCII)
SPACE = " \t\n\v\f\r\xa0"


class CommandStatus:
    """``info/last_cmd_status``: messages are appended until an operation that begins afresh clears them."""

    def __init__(self, *, is_old: bool = False) -> None:
        """``is_old``: that of Linux 6.12, which tells neither of what was cut nor of what it cannot read at all."""
        self._text = ""
        self._cut = False
        self._is_old = is_old

    def clear(self) -> None:
        """Forgets all messages."""
        self._text = ""
        self._cut = False

    def say(self, message: str, end: str = "\n") -> None:
        """Appends one line, as much of it as there is room for."""
        text = f"{self._text}{message}{end}".encode(errors="surrogateescape")
        self._text = text[:STATUS_BYTES].decode(errors="surrogateescape")
        self._cut = self._cut or len(text) > STATUS_BYTES

    def show(self) -> str:
        """The file's content: ``ok`` where there is nothing to say; where there was too much, a mark at the end."""
        return (self._text or "ok\n") + ("[truncated]\n" if self._cut and not self._is_old else "")

    def line(self, file: str, command: str) -> str:
        """A command without the newline that it must end with (EINVAL), and without what follows a NUL.

        Begins afresh; ``file`` is whose command it is, for the message that newer kernels have where there is none.
        """
        if not command.endswith("\n"):
            raise self.unreadable(file)
        self.clear()
        return command[:-1].split("\0", 1)[0]

    def unreadable(self, file: str, number: int = errno.EINVAL) -> OSError:
        """The refusal of a command that cannot be read at all: newer kernels begin afresh and say so."""
        if not self._is_old:
            self.clear()
            self.say(f"{file}: Invalid input")
        return error(number)


def _parse(text: str) -> int | None:
    match = _NUMBER.match(text.removesuffix("\n"))
    if not match:
        return None
    sign, hexadecimal, octal, decimal = match.groups()
    value = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
    return -value if sign == "-" else value


def parse_int(text: str) -> int | None:
    """An integer as kstrtoint() with base 0 reads it (32 bits, one newline may follow); None where it refuses."""
    value = _parse(text)
    return value if value is not None and -(2**31) <= value < 2**31 else None


def parse_unsigned(text: str) -> int:
    """An integer as kstrtouint() with base 0 reads it. Raises EINVAL for none, ERANGE for more than 32 bits."""
    value = _parse(text)
    if value is None or "-" in text:
        raise error(errno.EINVAL)
    if value >= 2**32:
        raise error(errno.ERANGE)
    return value


def parse_unsigned_long(text: str, base: int) -> int | None:
    """An integer as kstrtoul() reads it with base 10 or 16 (64 bits, ``0x`` may precede the latter); None if not."""
    prefix, digits = ("(0x)?", "[0-9a-f]+") if base == 16 else ("()", "[0-9]+")
    match = re.fullmatch(rf"\+?{prefix}({digits})\n?", text, re.IGNORECASE | re.ASCII)
    value = int(match[2], base) if match else 2**64
    return value if value < 2**64 else None


def task_tokens(command: str) -> Iterator[str]:
    """The tokens of what was written to ``tasks``, one after the other (Linux 6.7 and newer).

    Nothing after a NUL is seen, and the list ends where a token would begin with a newline or nothing.
    """
    rest: str | None = command.split("\0", 1)[0]
    while rest and rest[0] != "\n":
        token, comma, rest = rest.partition(",")
        yield token.strip(SPACE)
        if not comma:
            return
