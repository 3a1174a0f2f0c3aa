# SPDX-License-Identifier: Apache-2.0
"""Tables and sheets as data, and their layout as aligned plain text."""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_GAP = "  "
# No column is cut to less than this, for any width: a key must stay recognizable.
_MIN_WIDTH = 8
# A note below its row is indented by this.
_INDENT = "    "
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
    """A column: its heading, and whether its cells are aligned right, like numbers.

    ``can_be_cut``: its cells are cut if the table is too wide; otherwise, all of them can be copied. ``name_width``:
    of the first column, which has names. If the table is too wide, this column becomes as narrow as this, and a
    longer name has a line of its own, above its row; 0: never. ``is_note``: of the last column, which has sentences.
    If the table is too wide, these are below their rows.
    """

    heading: str
    right: bool = False
    can_be_cut: bool = False
    name_width: int = 0
    is_note: bool = False


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

    Tables are fitted into ``width`` (None: no limit) as their columns allow, and lines of sheets are broken there,
    between words.
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
    if excess > 0 and table.columns[0].name_width:
        # As wide as the longest name that fits beside the other columns.
        room = max(result[0] - excess, table.columns[0].name_width)
        names = [cell_width(row.cells[0]) for row in table.rows]
        narrow = max([len(table.columns[0].heading), *(name for name in names if name <= room)])
        excess -= result[0] - narrow
        result[0] = narrow
    may_cut = [index for index, column in enumerate(table.columns) if column.can_be_cut]
    while excess > 0 and may_cut:
        widest = max(may_cut, key=result.__getitem__)
        if result[widest] <= _MIN_WIDTH:
            break
        result[widest] -= 1
        excess -= 1
    return result


def full_width(table: Table) -> int:
    """Return the width of the table if nothing is cut and each row has one line."""
    widths = column_widths(table, None, legend=True)
    return sum(widths) + len(_GAP) * (len(widths) - 1)


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
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _table_text(table: Table, width: int | None, legend: bool) -> str:
    lines = [text for text, _ in table_lines(table, width, legend)]
    if legend and table.footer:
        lines.extend(footer_lines(table, width))
    return "".join(f"{line}\n" for line in lines)


def footer_lines(table: Table, width: int | None) -> list[str]:
    """Return the footer in lines, below an empty one if there are rows."""
    return [*([""] if table.rows else []), *broken(table.footer, width)]


def table_lines(table: Table, width: int | None, legend: bool) -> list[tuple[str, Row | None]]:
    """Return the lines of the table without its footer, each with its row; None: the headings."""
    has_notes_below = table.columns[-1].is_note and width is not None and full_width(table) > width
    all_rows = table.rows
    if has_notes_below:
        rows = tuple(Row(row.cells[:-1], row.tone) for row in table.rows)
        table = Table(table.columns[:-1], rows, table.footer)
    widths = column_widths(table, width, legend)
    lines: list[tuple[str, Row | None]] = []
    if legend and table.rows:
        lines.append((line_of(table, tuple(column.heading for column in table.columns), widths), None))
    for row, whole in zip(table.rows, all_rows, strict=True):
        cells = row.cells
        if table.columns[0].name_width and cell_width(cells[0]) > widths[0]:
            lines.append((cells[0], row))
            cells = ("", *cells[1:])
        if any(cells):
            lines.append((line_of(table, cells, widths), row))
        if has_notes_below and width is not None and (note := whole.cells[-1]) not in ("", "-"):
            lines += [(_INDENT + line, row) for line in broken(note, max(width - len(_INDENT), _MIN_ROOM))]
    return lines


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
