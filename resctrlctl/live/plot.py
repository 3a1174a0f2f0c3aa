# SPDX-License-Identifier: Apache-2.0
"""The verb ``plot``: show a recording as small plots in the terminal, or as a page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal

from resctrlctl.base.errors import OK, CommandError
from resctrlctl.live.series import Measure, Run, Series, averages, load
from resctrlctl.screen.format import format_count, shorten
from resctrlctl.screen.layout import ELLIPSIS, cut
from resctrlctl.screen.output import Output
from resctrlctl.screen.width import has_blocks
from resctrlmond.resctrl.errors import printable

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-:=+*#"
_WIDTH = 80
_MIN_PLOT = 10


def plot(args: argparse.Namespace, output: Output) -> int:
    """Show a recording; return the exit status."""
    series = load(args.file, args.key)
    for note in series.notes:
        output.note(note)
    if args.html is None:
        levels = _BLOCKS if has_blocks() else _ASCII
        for line in screen(series, levels, output.width or _WIDTH):
            output.print_line(line)
        return OK
    if os.path.exists(args.html) and os.path.exists(args.file) and os.path.samefile(args.html, args.file):
        raise CommandError(f"--html {printable(args.html)} would replace the recording: give another file")
    # matplotlib takes a second to import.
    from resctrlctl.live.plot_page import page  # noqa: PLC0415

    text = page(series)
    if args.html == "-":
        output.print_line(text)
        return OK
    try:
        with open(args.html, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {printable(args.html)}: {error.strerror}") from error
    output.confirm(f"{format_count(len(series.runs), 'workload')} plotted in {printable(args.html)}")
    return OK


def screen(series: Series, levels: str, width: int) -> list[str]:
    """Return the lines: for each workload its name, and a plot of each measure. ``levels``: from 0 to the maximum."""
    measures = series.measures
    figures = {(id(run), measure): _figures(run, measure) for run in series.runs for measure in measures}
    label_width = max(len(measure.name) for measure in measures)
    columns = [max(map(len, column)) for column in zip(*figures.values(), strict=True)]

    def room() -> int:
        return width - sum(len("  ") + column for column in [label_width, 0, *columns])

    while columns and room() < _MIN_PLOT:
        columns.pop()
    count = min(max(room(), 1), max(series.readings - 1, 1))
    lines = summary(series)
    for run in series.runs:
        quality = f" [{run.quality or printable(run.state)}]"
        lines += ["", cut(run.label, max(width - len(quality), _MIN_PLOT)) + quality]
        known = [measure for measure in measures if run.spans[measure]]
        for measure in known:
            values = averages(run.spans[measure], series.begin, series.end, count)
            drawn = "".join(_level(value, run.greatest(measure) or 0.0, levels) for value in values)
            parts = [text.rjust(column) for text, column in zip(figures[id(run), measure], columns, strict=False)]
            lines.append("  ".join(["", measure.name.ljust(label_width), drawn, *parts]).rstrip())
        if not known:
            lines.append("  no figures")
    lines = [cut(line, width) for line in lines]
    return [line.replace(ELLIPSIS, "~") for line in lines] if levels.isascii() else lines


def summary(series: Series) -> list[str]:
    """Return lines about the recording: its host and extent, and its time."""
    begin, end = (datetime.fromtimestamp(at).astimezone() for at in (series.begin, series.end))
    host = printable(series.header.host)
    if series.header.simulation:
        host += f" (simulated {printable(series.header.simulation)})"
    until = f"{end:%H:%M:%S}" if begin.date() == end.date() else f"{end:%Y-%m-%d %H:%M:%S}"
    counts = f"{format_count(series.readings, 'reading')} of {format_count(len(series.runs), 'workload')}"
    return [f"{host}: {counts}", f"{begin:%Y-%m-%d %H:%M:%S} to {until} {begin:%Z}"]


def shown(value: float | None, unit: str) -> str:
    """Return a number with three digits and its unit; "-" if it is unknown."""
    return "-" if value is None else shorten(Decimal(value), unit)


def _figures(run: Run, measure: Measure) -> tuple[str, str, str]:
    """Return the mean, the maximum, and the sum over time."""
    total = shown(run.total(measure), measure.total_unit) if measure.total_unit else ""
    return (
        f"mean {shown(run.mean(measure), measure.unit)}",
        f"max {shown(run.greatest(measure), measure.unit)}",
        total,
    )


def _level(value: float | None, greatest: float, levels: Sequence[str]) -> str:
    if value is None:
        return " "
    share = value / greatest if greatest else 0.0
    return levels[min(int(share * len(levels)), len(levels) - 1)]
