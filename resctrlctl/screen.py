# SPDX-License-Identifier: Apache-2.0
"""Where the answers go: JSON, aligned text or a drawn table on standard output, notes on standard error."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TextIO

import msgspec

from resctrlctl.layout import Block, plain
from resctrlmond.resctrl.errors import printable

PROGRAM = "resctrlctl"


class Json(enum.Enum):
    """How answers are encoded: not at all, on one line, or indented."""

    OFF = "off"
    SHORT = "short"
    PRETTY = "pretty"


@dataclass(frozen=True, slots=True)
class Screen:
    """How the user wants to see things: see the options of the same names."""

    json: Json = Json.OFF
    legend: bool = True
    quiet: bool = False
    full: bool = False

    def answer(self, reply: object) -> None:
        """Print a reply as JSON, exactly as it came over the socket."""
        print(encode(reply, self.json), flush=True)

    def show(self, blocks: list[Block]) -> None:
        """Print for people: drawn on a terminal, aligned text elsewhere."""
        width = None if self.full else _width()
        if sys.stdout.isatty():
            # Only here: rich takes longer to import than all the rest, and scripts never see what it draws.
            from resctrlctl.drawing import draw  # noqa: PLC0415

            draw(blocks, width, self.legend)
        else:
            sys.stdout.write(plain(blocks, width, self.legend))

    def line(self, text: str) -> None:
        """Print one line of an answer."""
        print(text, flush=True)

    def confirm(self, text: str) -> None:
        """Print what was done, unless the user wants quiet."""
        if not self.quiet:
            self.line(text)

    def note(self, text: str) -> None:
        """Say on standard error what the user should know, unless he wants quiet."""
        if not self.quiet:
            complain(text)


def encode(reply: object, how: Json) -> str:
    """A reply as JSON text, without a newline at its end.

    What is not plainly visible is escaped, and so means the same to programs and does nothing to terminals.
    """
    data = msgspec.json.encode(reply)
    text = (msgspec.json.format(data, indent=2) if how is Json.PRETTY else data).decode()
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)


def complain(text: str, out: TextIO | None = None) -> None:
    """Print one line on standard error, if that can be written: the program's name, and the text made printable."""
    with contextlib.suppress(OSError):  # closed, or a terminal that hung up
        print(f"{PROGRAM}: {printable(text)}", file=out or sys.stderr, flush=True)


def _width() -> int | None:
    # What goes into a pipe is cut only where somebody asks for it.
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None
