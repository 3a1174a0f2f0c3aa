# SPDX-License-Identifier: Apache-2.0
"""Tables and sheets as data, and their layout as aligned plain text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_GAP = "  "
# No column is cut to less than this, for any width: a key must stay recognizable.
_MIN_WIDTH = 8
# The values of a sheet have at least so many columns.
_MIN_ROOM = 20
ELLIPSIS = "…"


class Tone(enum.Enum):
    """The urgency of a row. A terminal shows it as a colour."""

    NORMAL = "normal"
    FAINT = "faint"
    WARNING = "warning"
    BAD = "bad"


class Column(msgspec.Struct, frozen=True):
    """A column: its heading, whether its cells are aligned right, like numbers, and whether they are never cut."""

    heading: str
    right: bool = False
    is_whole: bool = False


class Row(msgspec.Struct, frozen=True):
    """One cell for each column of the table."""

    cells: tuple[str, ...]
    tone: Tone = Tone.NORMAL


class Table(msgspec.Struct, frozen=True):
    """Columns and rows; ``footer`` is a summary in words, "" for none."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footer: str = ""


class Sheet(msgspec.Struct, frozen=True):
    """A title, and labelled lines below it. Each further value of a label has a line without a label.

    Nothing is cut, so that all of it can be copied: values are broken between words, except those of the label
    ``whole``, such as commands.
    """

    title: str
    fields: tuple[tuple[str, tuple[str, ...]], ...]
    tone: Tone = Tone.NORMAL
    whole: str = ""


Block: TypeAlias = Table | Sheet


def to_text(blocks: Sequence[Block], width: int | None, legend: bool) -> str:
    """Return the blocks as text, separated by empty lines.

    Lines of tables are cut at ``width`` (None: no limit); those of sheets are broken there, between words.
    Without ``legend``, tables have neither headings nor footer.
    """
    texts = [
        _table_text(block, width, legend) if isinstance(block, Table) else _sheet_text(block, width)
        for block in blocks
    ]
    return "\n".join(texts)


def column_widths(table: Table, width: int | None, legend: bool) -> list[int]:
    """Return the width of each column: that of its widest cell. Cut the widest that may be cut, until all fit."""
    result = []
    for index, column in enumerate(table.columns):
        cells = [cell_width(row.cells[index]) for row in table.rows]
        result.append(max([len(column.heading) if legend else 0, *cells], default=0))
    if width is None:
        return result
    excess = sum(result) + len(_GAP) * (len(result) - 1) - width
    may_cut = [index for index, column in enumerate(table.columns) if not column.is_whole]
    while excess > 0 and may_cut:
        widest = max(may_cut, key=result.__getitem__)
        if result[widest] <= _MIN_WIDTH:
            break
        result[widest] -= 1
        excess -= 1
    return result


def cut(text: str, width: int) -> str:
    """Return the text or, if it is wider than ``width`` columns, its beginning and an ellipsis."""
    if cell_width(text) <= width:
        return text
    short = text[: max(width - 1, 0)]
    while cell_width(short) > width - 1 and short:
        short = short[:-1]
    return short + ELLIPSIS


def cell_width(text: str) -> int:
    """Return how many columns of a terminal the text takes: two for a wide character, such as CJK."""
    if text.isascii():
        return len(text)
    import unicodedata  # noqa: PLC0415 - the table of characters takes a millisecond to load

    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _table_text(table: Table, width: int | None, legend: bool) -> str:
    widths = column_widths(table, width, legend)
    lines = []
    if legend and table.rows:
        lines.append(line_of(table, tuple(column.heading for column in table.columns), widths))
    lines.extend(line_of(table, row.cells, widths) for row in table.rows)
    if legend and table.footer:
        lines.extend(["", table.footer] if table.rows else [table.footer])
    return "".join(f"{line}\n" for line in lines)


def line_of(table: Table, cells: tuple[str, ...], widths: list[int]) -> str:
    """Return the cells of a row, or the headings, as a line of columns with these widths."""
    parts = []
    for column, cell, width in zip(table.columns, cells, widths, strict=True):
        shown = cut(cell, width)
        padding = " " * (width - cell_width(shown))
        parts.append(padding + shown if column.right else shown + padding)
    return _GAP.join(parts).rstrip()


def sheet_lines(sheet: Sheet, width: int | None) -> list[str]:
    """Return the labelled lines of a sheet, aligned at the colon of the label."""
    label_width = max((len(label) for label, _ in sheet.fields), default=0)
    lines = []
    for label, values in sheet.fields:
        for index, value in enumerate(values):
            head = f"{label}:" if index == 0 else ""
            start = f"  {head.rjust(label_width + 1)} "
            is_whole = width is None or label == sheet.whole
            room = None if is_whole else max((width or 0) - len(start) - len(_GAP), _MIN_ROOM)
            first, *rest = broken(value, room)
            lines += [(start + first).rstrip(), *(" " * len(start) + _GAP + line for line in rest)]
    return lines


def broken(text: str, width: int | None) -> list[str]:
    """Return the text in lines of at most ``width`` columns, broken between words. A longer word has its own line."""
    if width is None:
        return [text]
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and cell_width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _sheet_text(sheet: Sheet, width: int | None) -> str:
    return "".join(f"{line}\n" for line in [sheet.title, *sheet_lines(sheet, width)])
