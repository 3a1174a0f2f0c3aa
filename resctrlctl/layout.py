# SPDX-License-Identifier: Apache-2.0
"""What is to be shown, as data, and its plain form: aligned text, cut to a width."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

_GAP = "  "
# No column is cut below this, whatever the width: a key must stay recognisable.
_NARROWEST = 8
ELLIPSIS = "…"


class Tone(enum.Enum):
    """What a row means to somebody who looks for trouble; colours where there are some."""

    NORMAL = "normal"
    FAINT = "faint"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, and whether its cells are figures (aligned right)."""

    heading: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """As many cells as the table has columns."""

    cells: tuple[str, ...]
    tone: Tone = Tone.NORMAL


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows; ``footer`` counts them in words ("" for none)."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footer: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A title and labelled lines below it; a label with several values continues on the next lines."""

    title: str
    fields: tuple[tuple[str, tuple[str, ...]], ...]
    tone: Tone = Tone.NORMAL


Block: TypeAlias = Table | Sheet


def plain(blocks: Sequence[Block], width: int | None, legend: bool) -> str:
    """The blocks as text, an empty line between two; no line is longer than ``width`` (None: no limit).

    Without ``legend``, tables have neither headings nor footer.
    """
    texts = [
        _plain_table(block, width, legend) if isinstance(block, Table) else _plain_sheet(block, width)
        for block in blocks
    ]
    return "\n".join(texts)


def widths(table: Table, width: int | None, legend: bool) -> list[int]:
    """How wide each column is: as its widest cell, the widest columns being cut until the whole fits ``width``."""
    result = []
    for index, column in enumerate(table.columns):
        cells = [len(row.cells[index]) for row in table.rows]
        result.append(max([len(column.heading) if legend else 0, *cells], default=0))
    if width is None:
        return result
    excess = sum(result) + len(_GAP) * (len(result) - 1) - width
    while excess > 0 and max(result) > _NARROWEST:
        result[result.index(max(result))] -= 1
        excess -= 1
    return result


def cut(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis, in at most ``width`` characters."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + ELLIPSIS


def _plain_table(table: Table, width: int | None, legend: bool) -> str:
    columns = widths(table, width, legend)
    lines = []
    if legend and table.rows:
        lines.append(_line(table, tuple(column.heading for column in table.columns), columns))
    lines.extend(_line(table, row.cells, columns) for row in table.rows)
    if legend and table.footer:
        lines.extend(["", table.footer] if table.rows else [table.footer])
    return "".join(f"{line}\n" for line in lines)


def _line(table: Table, cells: tuple[str, ...], columns: list[int]) -> str:
    parts = []
    for column, cell, width in zip(table.columns, cells, columns, strict=True):
        shown = cut(cell, width)
        parts.append(shown.rjust(width) if column.right else shown.ljust(width))
    return _GAP.join(parts).rstrip()


def sheet_lines(sheet: Sheet, width: int | None) -> list[str]:
    """The labelled lines of a sheet, labels aligned at their colon."""
    label_width = max((len(label) for label, _ in sheet.fields), default=0)
    lines = []
    for label, values in sheet.fields:
        for index, value in enumerate(values):
            head = f"{label}:" if index == 0 else ""
            line = f"  {head.rjust(label_width + 1)} {value}".rstrip()
            lines.append(line if width is None else cut(line, width))
    return lines


def _plain_sheet(sheet: Sheet, width: int | None) -> str:
    title = sheet.title if width is None else cut(sheet.title, width)
    return "".join(f"{line}\n" for line in [title, *sheet_lines(sheet, width)])
