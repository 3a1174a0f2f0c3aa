# SPDX-License-Identifier: Apache-2.0
"""The tree of ``list --units``: the systemd units with what they use, and the workloads in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal

import msgspec
from msgspec.structs import replace

from resctrlctl.base.errors import CommandError
from resctrlctl.screen.format import format_count, format_duration, shorten
from resctrlctl.screen.layout import Column, Row, Table
from resctrlctl.workloads.entries import COLUMNS, NO_UNIT, By, Entry, View, entries, unit_names
from resctrlctl.workloads.workload_table import NOTHING_LISTED, Line
from resctrlmond.api.exit_codes import USAGE
from resctrlmond.resctrl.errors import printable

# Before the name of one that others follow, of the last one, and, for those in them, below each of these two.
_LINES = ("├─", "└─", "│ ", "  ")
_ASCII = ("|-", "`-", "| ", "  ")
# A longer name, with the lines before it, has a line of its own if the table is too wide.
_NAME_WIDTH = 24


class UnitUse(msgspec.Struct, frozen=True, rename="camel"):
    """A unit with the sums over the workloads in it and in the units in it.

    ``path`` are its outer units and itself; [] for the workloads in no unit. Figures are decimal texts: ``energy`` in
    J since the baselines, ``power`` in W, ``bandwidth`` in B/s, ``llc`` in bytes now; None if known of no workload.
    ``age_s`` is that of the oldest. ``quality`` is that of the worst total; "" if there is none.
    """

    path: list[str]
    workloads: list[str]
    energy: str | None
    power: str | None
    bandwidth: str | None
    llc: str | None
    age_s: float | None
    quality: str


class UnitList(msgspec.Struct, frozen=True, rename="camel"):
    """The JSON output of ``list --units``: each unit, after the units around it."""

    units: list[UnitUse]


_COLUMNS: dict[str, Callable[[Entry], str]] = {
    "AGE": lambda row: "-" if row.age_s is None else format_duration(row.age_s),
    "LLC": lambda row: _number(row.llc, "B"),
    "BANDWIDTH": lambda row: _number(row.bandwidth, "B/s"),
    "ENERGY": lambda row: _number(row.energy, "J"),
    "POWER": lambda row: _number(row.power, "W"),
    "QUALITY": lambda row: row.quality or "-",
}


def view(sort: str | None) -> View:
    """Return the order of the tree: by name, or by a column of ``list`` or ``top``. Raises CommandError."""
    name = {None: "name", "workload": "name", "unit": "name"}.get(sort, sort)
    if name not in COLUMNS:
        raise CommandError(f"--units cannot sort by {sort!r}. It sorts by one of these: {', '.join(COLUMNS)}", USAGE)
    return View(By.UNIT, sort=name)


def uses(found: Iterable[Line], order: View) -> UnitList:
    """Return the units with their sums, as data."""
    return UnitList(
        [
            UnitUse(
                path=[] if row.name == NO_UNIT else row.name.split("/"),
                workloads=sorted(row.keys),
                energy=_text(row.energy),
                power=_text(row.power),
                bandwidth=_text(row.bandwidth),
                llc=_text(row.llc),
                age_s=row.age_s,
                quality=row.quality,
            )
            for row in entries(found, order)
        ]
    )


def table(found: Sequence[Line], order: View, *, has_blocks: bool, nothing: str = NOTHING_LISTED) -> Table:
    """Return the tree as a table: in each unit, the units in it and then its other workloads.

    ``nothing`` is the footer if there is no workload.
    """
    units = entries(found, order)
    rows = list(_drawn(found, units, order, _LINES if has_blocks else _ASCII))
    has_energy = any(row.energy is not None for _, row in rows)
    names = [name for name in _COLUMNS if has_energy or name not in ("ENERGY", "POWER")]
    headings = [Column(name, right=name != "QUALITY") for name in names]
    return Table(
        (Column("UNIT", name_width=_NAME_WIDTH), *headings),
        tuple(Row((label, *(_COLUMNS[name](row) for name in names)), row.tone) for label, row in rows),
        _footer(found, units) if found else nothing,
    )


def _drawn(
    found: Iterable[Line], units: Iterable[Entry], order: View, glyphs: tuple[str, str, str, str]
) -> Iterator[tuple[str, Entry]]:
    """Return the rows from the top to the bottom, each with its name behind the lines of the tree."""
    inner_of: dict[str, list[Entry]] = {}
    for row in units:
        inner_of.setdefault(row.name.rpartition("/")[0], []).append(row)
    inside: dict[str, list[Line]] = {}
    for line in found:
        inside.setdefault("/".join(unit_names(line)), []).append(line)
    by_workload = replace(order, by=By.WORKLOAD)
    more, last, below, below_last = glyphs

    def rows_in(path: str, margin: str) -> Iterator[tuple[str, Entry]]:
        inner = inner_of.get(path, [])
        leaves = inside.get(path, []) if path else []
        if not inner and len(leaves) == 1 and leaves[0].selector == path.rpartition("/")[2]:
            leaves = []  # the row of the unit is that of its workload
        workloads = entries(leaves, by_workload)
        for number, row in enumerate([*inner, *workloads], start=1):
            is_last = number == len(inner) + len(workloads)
            is_unit = number <= len(inner)
            name = row.name.rpartition("/")[2] if is_unit else printable(row.name)
            yield f"{margin}{(last if is_last else more) if path else ''}{name}", row
            if is_unit:
                yield from rows_in(row.name, margin + ((below_last if is_last else below) if path else ""))

    yield from rows_in("", "")


def _text(value: Decimal | None) -> str | None:
    return None if value is None else str(value)


def _number(value: Decimal | None, unit: str) -> str:
    return "-" if value is None else shorten(value, unit)


def _footer(found: Sequence[Line], units: Iterable[Entry]) -> str:
    count = sum(row.name != NO_UNIT for row in units)
    return f"{format_count(count, 'unit')}, {format_count(len(found), 'workload')}."
