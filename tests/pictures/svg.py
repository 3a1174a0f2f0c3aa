# SPDX-License-Identifier: Apache-2.0
"""Draw the screen of a terminal as SVG: small, sharp at each size, and without a font of its own."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple

import pyte

_CELL_WIDTH, _CELL_HEIGHT = 8.4, 18
_MARGIN = 12
_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_PAPER, _INK = "#1e1e24", "#e4e4e8"
_COLOURS = {"red": "#ff8a80", "brown": "#ffd180", "yellow": "#ffd180", "green": "#b9f6ca"}


class _Style(NamedTuple):
    """The looks of a character."""

    colour: str
    is_bold: bool
    is_reverse: bool


def drawn(screen: pyte.Screen, alternative: str) -> str:
    """Return the screen as SVG, without the empty lines at its end."""
    lines = [line.rstrip() for line in screen.display]
    rows = max((index + 1 for index, line in enumerate(lines) if line), default=1)
    width, height = screen.columns * _CELL_WIDTH + 2 * _MARGIN, rows * _CELL_HEIGHT + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(alternative)}">\n',
        f'<rect width="100%" height="100%" rx="6" fill="{_PAPER}"/>\n',
        f'<g font-family="{_FONT}" font-size="14" fill="{_INK}" xml:space="preserve">\n',
        *(part for row in range(rows) for part in _row(screen, row)),
        "</g>\n</svg>\n",
    ]
    return "".join(parts)


def _row(screen: pyte.Screen, row: int) -> Iterator[str]:
    """Yield a text for each piece of a line in the same style, and a rectangle below it if it is reversed."""
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    styles = [_Style(_COLOURS.get(cell.fg, _INK), cell.bold, cell.reverse) for cell in cells]
    y = _MARGIN + row * _CELL_HEIGHT
    for style, columns in groupby(range(screen.columns), key=styles.__getitem__):
        first, *rest = columns
        text = "".join(cells[column].data for column in (first, *rest))
        x = _MARGIN + first * _CELL_WIDTH
        if style.is_reverse:
            width = len(text) * _CELL_WIDTH
            yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_CELL_HEIGHT}" fill="{style.colour}"/>\n'
        # A text of its own for each word: no font is exactly as wide as the cells.
        for place, word in _words(text):
            fill = _PAPER if style.is_reverse else style.colour
            looks = (f' fill="{fill}"' if fill != _INK else "") + (' font-weight="bold"' if style.is_bold else "")
            length = f"{len(word) * _CELL_WIDTH:.1f}"
            yield (
                f'<text x="{x + place * _CELL_WIDTH:.1f}" y="{y + 14}" textLength="{length}" '
                f'lengthAdjust="spacingAndGlyphs"{looks}>{escape(word)}</text>\n'
            )


def _words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words with their places; a single space does not end a word."""
    place = 0
    for piece in text.split("  "):
        word = piece.strip()
        if word:
            yield place + piece.index(word), word
        place += len(piece) + 2
