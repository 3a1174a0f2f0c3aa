# SPDX-License-Identifier: Apache-2.0
"""Print tables and sheets on a terminal with rich: bold headings, faint and coloured rows."""

from __future__ import annotations

import rich.console
import rich.text

from resctrlctl.screen.layout import Block, Sheet, Table, Tone, footer_lines, sheet_lines, table_lines

_STYLES = {Tone.NORMAL: "", Tone.FAINT: "dim", Tone.WARNING: "yellow", Tone.BAD: "red"}


# The text is already cut to the width of the terminal: rich must not fold it again.
_UNBOUNDED = 10_000


def draw(blocks: list[Block], width: int | None, legend: bool) -> None:
    """Print the blocks on standard output, laid out like ``layout.to_text``; ``width`` None cuts nothing.

    rich itself respects NO_COLOR and TERM=dumb.
    """
    console = rich.console.Console(width=_UNBOUNDED, highlight=False)
    for index, block in enumerate(blocks):
        if index:
            console.print()
        if isinstance(block, Sheet):
            _draw_sheet(console, block, width)
        else:
            _draw_table(console, block, width, legend)


def _draw_table(console: rich.console.Console, table: Table, width: int | None, legend: bool) -> None:
    # Text, because rich reads a str as markup, and a pod's name may contain brackets.
    for line, row in table_lines(table, width, legend):
        console.print(rich.text.Text(line, style="bold" if row is None else _STYLES[row.tone]))
    if legend and table.footer:
        for line in footer_lines(table, width):
            console.print(rich.text.Text(line))


def _draw_sheet(console: rich.console.Console, sheet: Sheet, width: int | None) -> None:
    style = " ".join(filter(None, ("bold", _STYLES[sheet.tone])))
    console.print(rich.text.Text(sheet.title, style=style))
    for line in sheet_lines(sheet, width):
        console.print(rich.text.Text(line))
