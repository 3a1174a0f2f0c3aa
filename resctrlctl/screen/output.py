# SPDX-License-Identifier: Apache-2.0
"""Print results on standard output, as JSON, text or a drawn table, and messages on standard error."""

from __future__ import annotations

import enum
import json
import os
import sys

import msgspec

from resctrlctl.base.errors import print_error
from resctrlctl.screen.layout import Block, to_text
from resctrlctl.screen.width import terminal_width

# ECMA-48: the cursor to the upper left corner (CUP), and erase to the end of the screen (ED).
_CLEAR = "\x1b[H\x1b[J"


class Json(enum.Enum):
    """The form of JSON output: none, one line, or indented."""

    OFF = "off"
    SHORT = "short"
    PRETTY = "pretty"


class Output(msgspec.Struct, frozen=True):
    """The output of one run of resctrlctl. The fields are the options of the same names."""

    json: Json = Json.OFF
    legend: bool = True
    quiet: bool = False
    full: bool = False

    def print_json(self, reply: object) -> None:
        """Print a reply as JSON, with the names and values that came over the socket."""
        print(encode(reply, self.json), flush=True)

    @property
    def width(self) -> int | None:
        """The number of columns of the output; None if it has no limit."""
        return None if self.full else _width()

    def print_blocks(self, blocks: list[Block], *, is_screen: bool = False) -> None:
        """Print tables and sheets: drawn on a terminal, as aligned text elsewhere.

        ``is_screen``: in the place of the last ones, if the terminal can do that.
        """
        width = self.width
        if is_screen and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            sys.stdout.write(_CLEAR)
        if sys.stdout.isatty():
            # Imported only here, because importing rich takes longer than all other modules together.
            from resctrlctl.screen.terminal import draw  # noqa: PLC0415

            draw(blocks, width, self.legend)
        else:
            sys.stdout.write(to_text(blocks, width, self.legend))
        sys.stdout.flush()

    def print_line(self, text: str) -> None:
        """Print one line of the result."""
        print(text, flush=True)

    def confirm(self, text: str) -> None:
        """Print what was done, unless --quiet is given."""
        if not self.quiet:
            self.print_line(text)

    def note(self, text: str) -> None:
        """Print a note on standard error, unless --quiet is given."""
        if not self.quiet:
            print_error(text)


def encode(reply: object, form: Json) -> str:
    """Return a reply as JSON text, without a newline at its end.

    Escape all characters that are not printable: the JSON has the same meaning, and cannot control a terminal.
    """
    return escaped(to_json(reply, indent=2 if form is Json.PRETTY else None))


def to_json(value: object, indent: int | None = None) -> str:
    """Return a value of JSON, or with structs, as JSON. A text may have lone surrogates, as the name of a file."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False, indent=indent, separators=separators)


def escaped(text: str) -> str:
    """Return JSON text with escapes for all characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else _escape(character) for character in text
    )


def _escape(character: str) -> str:
    # JSON writes a character above U+FFFF as the two surrogates of UTF-16 (RFC 8259, section 7).
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _width() -> int | None:
    # Output to a pipe or a file is cut only if the user sets COLUMNS.
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return terminal_width()
    return None
