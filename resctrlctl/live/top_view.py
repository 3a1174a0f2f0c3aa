# SPDX-License-Identifier: Apache-2.0
"""The screen of ``top``: what workloads, or groups of them, use at present. Without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import msgspec
from msgspec.structs import replace

from resctrlctl.screen.format import format_count, format_duration, shorten
from resctrlctl.screen.layout import ELLIPSIS, Column, Row, Table, Tone, cell_width, column_widths, cut, line_of
from resctrlctl.workloads.entries import COLUMNS, TEXTS, By, Entry, View
from resctrlmond.api.types import StatusReply
from resctrlmond.resctrl.errors import printable

_BAR_WIDTH = 6
# The room of a bar, with the space before it.
_GAP_BAR = " " * (_BAR_WIDTH + 1)
# Eighths of a cell, from empty to full (Unicode, "Block Elements").
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Painted(msgspec.Struct, frozen=True):
    """A line of the screen."""

    text: str
    tone: Tone = Tone.NORMAL
    is_heading: bool = False


# No name is cut to less than this, or a third of the screen.
_NAME_WIDTH = 24


def screen(
    rows: Sequence[Entry],
    status: StatusReply,
    view: View,
    width: int | None,
    shown: slice = slice(None),
    *,
    machine: str = "",
) -> list[Painted]:
    """Return the lines of the screen: the machine, the sums over all rows, the headings, and the rows ``shown``.

    ``machine`` is what the whole machine uses, in words; "" if this is not known.
    """
    has_power = any(row.power is not None or row.energy is not None for row in rows)
    names = [
        name
        for name in COLUMNS
        if (name != "workloads" or view.by is not By.WORKLOAD) and (has_power or name not in ("power", "energy"))
    ]
    lines = [Painted(text) for text in _headlines(rows, status, view, machine)]
    lines += [Painted(problem, Tone.WARNING) for problem in _problems(status)]
    table = _table(rows, shown, names, view, width)
    widths = column_widths(table, width, legend=True)
    lines.append(Painted(line_of(table, tuple(column.heading for column in table.columns), widths), is_heading=True))
    lines += [Painted(line_of(table, row.cells, widths), row.tone) for row in table.rows]
    return [replace(line, text=_fitting(line.text, view, width)) for line in lines]


def _fitting(text: str, view: View, width: int | None) -> str:
    text = text.rstrip() if width is None else cut(text.rstrip(), width)
    return text if view.has_blocks else text.replace(ELLIPSIS, "~")


def _table(rows: Sequence[Entry], shown: slice, names: list[str], view: View, width: int | None) -> Table:
    # The widths of all rows, so that columns stay where they are while the user scrolls.
    widths = {
        name: max([len(_heading(name, view)), *(cell_width(_cell(row, name)) for row in rows)]) for name in names
    }
    longest = widths["name"]
    if width is not None:
        # A long name is cut before figures are left out.
        widths["name"] = min(longest, max(_NAME_WIDTH, width // 3))
    greatest = {name: _greatest(rows, name) for name in names if COLUMNS[name].has_bar}
    while width is not None and sum(widths.values()) + 2 * (len(widths) - 1) + len(_GAP_BAR) * len(greatest) > width:
        if greatest:
            greatest.popitem()
            continue
        last = max(widths, key=lambda name: COLUMNS[name].rank)
        if not COLUMNS[last].rank:
            break
        del widths[last]
    if width is not None:
        used = sum(widths.values()) + 2 * (len(widths) - 1) + len(_GAP_BAR) * len(greatest)
        widths["name"] = min(longest, widths["name"] + max(width - used, 0))
    columns = []
    for name, wide in widths.items():
        heading = _heading(name, view)
        if name in greatest:
            heading = heading.rjust(wide) + _GAP_BAR
        columns.append(Column(heading, right=name not in TEXTS, can_be_cut=name == "name"))
    found = []
    for row in rows[shown]:
        texts = [
            _cell(row, name).rjust(wide) + f" {_bar(COLUMNS[name].value(row), greatest[name], view)}"
            if name in greatest
            else _cut_middle(_cell(row, name), wide)
            if name == "name" and view.by is By.UNIT
            else _cell(row, name)
            for name, wide in widths.items()
        ]
        found.append(Row(tuple(texts), row.tone))
    return Table(tuple(columns), tuple(found))


def _cut_middle(unit: str, width: int) -> str:
    """Return the name of a unit, which is ASCII, without its middle if it is too long: slices differ at the end."""
    excess = len(unit) - width
    if excess <= 0:
        return unit
    begin = (width - 1) // 2
    return unit[:begin] + ELLIPSIS + unit[begin + 1 + excess :]


def _greatest(rows: Sequence[Entry], name: str) -> Decimal:
    values = (COLUMNS[name].value(row) for row in rows)
    return max((value for value in values if isinstance(value, Decimal)), default=Decimal(0))


def _heading(name: str, view: View) -> str:
    return view.by.upper() if name == "name" else COLUMNS[name].heading


def _cell(row: Entry, name: str) -> str:
    match value := COLUMNS[name].value(row):
        case None | "":
            return "-"
        case Decimal():
            return shorten(value, COLUMNS[name].unit)
        case float() if name == "age":
            return format_duration(value)
        case float():
            return f"{value:.0f}"
        case _:
            return row.label if name == "name" else value


def _bar(value: object, greatest: Decimal, view: View) -> str:
    """Return the share of the greatest value as a bar."""
    share = float(value / greatest) if isinstance(value, Decimal) and greatest else 0.0
    if not view.has_blocks:
        return ("#" * round(share * _BAR_WIDTH)).ljust(_BAR_WIDTH)
    eighths = round(share * _BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + _EIGHTHS[rest].strip()).ljust(_BAR_WIDTH)


def _headlines(rows: Sequence[Entry], status: StatusReply, view: View, of_machine: str) -> list[str]:
    count = format_count(len(frozenset().union(*(row.keys for row in rows))), "workload")
    if status.pending:
        count += f", {status.pending} pending" + (" (RMIDs in limbo)" if status.in_limbo else "")
    free = max(status.rmids - status.rmids_used, 0)
    machine = f"{count}. RMIDs: {status.rmids_used} of {status.rmids} used, {free} free."
    outer = [row for row in rows if not row.depth]
    sums = [
        f"{label} {shorten(total, unit)}"
        for label, unit, values in (
            ("power", "W", [row.power for row in outer]),
            ("bandwidth", "B/s", [row.bandwidth for row in outer]),
            ("LLC", "B", [row.llc for row in outer]),
        )
        if (known := [value for value in values if value is not None])
        for total in [sum(known, Decimal(0))]
    ]
    average = "" if view.is_rate else ", on average"
    together = f"Together{average}: {', '.join(sums)}." if sums else ""
    return [machine, together, *([f"Machine{average}: {of_machine}."] if of_machine else []), ""]


def _problems(status: StatusReply) -> list[str]:
    if not status.mounted:
        return ["resctrl is not mounted: nothing is counted.", ""]
    if not status.problems:
        return []
    more = len(status.problems) - 1
    return [printable(status.problems[0]) + (f" ({more} more: resctrlctl status)" if more else ""), ""]
