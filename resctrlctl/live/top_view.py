# SPDX-License-Identifier: Apache-2.0
"""The screen of ``top``: what workloads, or groups of them, use at present. Without side effects."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from resctrlctl.base.structs import Struct, replace
from resctrlctl.connection.host_replies import StatusReply
from resctrlctl.screen.format import format_count, format_duration, shorten
from resctrlctl.screen.layout import ELLIPSIS, Column, Row, Table, Tone, cell_width, column_widths, cut, line_of
from resctrlctl.workloads.unit_path import unit_path
from resctrlctl.workloads.workload_table import CACHE, ENERGY, QUALITIES, TRAFFIC, Line, class_names, tone_of
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import State

_BAR_WIDTH = 6
# The room of a bar, with the space before it.
_GAP_BAR = " " * (_BAR_WIDTH + 1)
# Eighths of a cell, from empty to full (Unicode, "Block Elements").
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class By(enum.StrEnum):
    """The grouping of the workloads: each row is one of these."""

    WORKLOAD = "workload"
    POD = "pod"
    NAMESPACE = "namespace"
    UNIT = "unit"
    CLASS = "class"
    DOMAIN = "domain"


class Entry(Struct):
    """A row: one workload, or several, whose ``keys`` it has. A row of a domain has their use in the domain.

    ``power`` is in W, ``bandwidth`` in B/s, ``llc`` in bytes, ``energy`` in J since the baseline; None if it is known
    of no workload. ``age_s`` is that of the oldest. ``quality`` is that of the worst total. ``depth`` is the number
    of units around a unit, whose rows include it: its name is ``system.slice/web.service``, for example.
    """

    name: str
    keys: frozenset[str]
    power: Decimal | None
    bandwidth: Decimal | None
    llc: Decimal | None
    energy: Decimal | None
    age_s: float | None
    quality: str
    tone: Tone
    depth: int = 0

    @property
    def label(self) -> str:
        """The name as it is shown: that of an inner unit is below the outer one."""
        name = printable(self.name)
        return "  " * self.depth + name.rpartition("/")[2] if self.depth else name

    @property
    def workloads(self) -> int:
        """The number of workloads."""
        return len(self.keys)


class View(Struct):
    """The choices of the user.

    ``has_blocks``: the terminal can show block characters. ``is_rate``: power and bandwidth are of the last interval,
    not averages since the baselines.
    """

    by: By = By.WORKLOAD
    sort: str = "power"
    is_reversed: bool = False
    has_blocks: bool = True
    is_rate: bool = True


class Painted(Struct):
    """A line of the screen."""

    text: str
    tone: Tone = Tone.NORMAL
    is_heading: bool = False


class _Column(Struct):
    """A column: its heading, the value for sorting, and the unit of a number.

    ``rank``: a screen that is too narrow leaves out the column with the highest rank first; 0: never.
    """

    heading: str
    value: Callable[[Entry], Decimal | float | str | None]
    unit: str = ""
    rank: int = 0
    has_bar: bool = False


COLUMNS = {
    "name": _Column("", lambda entry: entry.name),
    "workloads": _Column("WORKLOADS", lambda entry: float(entry.workloads), rank=2),
    "power": _Column("POWER", lambda entry: entry.power, "W", has_bar=True),
    "bandwidth": _Column("BANDWIDTH", lambda entry: entry.bandwidth, "B/s", 3, has_bar=True),
    "llc": _Column("LLC", lambda entry: entry.llc, "B", 4, has_bar=True),
    "energy": _Column("ENERGY", lambda entry: entry.energy, "J", 1),
    "age": _Column("AGE", lambda entry: entry.age_s, rank=5),
    "quality": _Column("QUALITY", lambda entry: entry.quality),
}
# No name is cut to less than this, or a third of the screen.
_NAME_WIDTH = 24
# The row of the workloads in no unit.
NO_UNIT = "(no unit)"
# The columns that are not numbers.
_TEXTS = ("name", "quality")


def entries(found: Iterable[Line], view: View) -> list[Entry]:
    """Return the rows in the order of the view: numbers from the largest, texts from A, unknown values last.

    Each unit is followed by the units in it, in this order too.
    """
    groups: dict[str, list[Line]] = {}
    for line in found:
        for name, part in _parts(line, view.by):
            groups.setdefault(name, []).append(part)
    rows = [_entry(name, of, depth=name.count("/") if view.by is By.UNIT else 0) for name, of in groups.items()]
    if view.by is not By.UNIT:
        return _in_order(rows, view)
    inner: dict[str, list[Entry]] = {}
    for row in rows:
        inner.setdefault(row.name.rpartition("/")[0], []).append(row)
    return list(_tree(inner, "", view))


def _tree(inner: Mapping[str, Sequence[Entry]], outer: str, view: View) -> Iterator[Entry]:
    for row in _in_order(inner.get(outer, ()), view):
        yield row
        yield from _tree(inner, row.name, view)


def _in_order(rows: Sequence[Entry], view: View) -> list[Entry]:
    value = COLUMNS[view.sort].value
    known = [(number, row) for row in rows for number in [value(row)] if number not in (None, "")]
    unknown = [row for row in rows if value(row) in (None, "")]
    known.sort(key=lambda pair: pair[0], reverse=(view.sort in _TEXTS) == view.is_reversed)
    return [*(row for _, row in known), *unknown]


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

    ``machine`` is a further line about the machine.
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
        columns.append(Column(heading, right=name not in _TEXTS, can_be_cut=name == "name"))
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
    label = "Together" if view.is_rate else "Together, on average"
    together = f"{label}: {', '.join(sums)}." if sums else ""
    return [machine, together, *([of_machine] if of_machine else []), ""]


def _problems(status: StatusReply) -> list[str]:
    if not status.mounted:
        return ["resctrl is not mounted: nothing is counted.", ""]
    if not status.problems:
        return []
    more = len(status.problems) - 1
    return [printable(status.problems[0]) + (f" ({more} more: resctrlctl status)" if more else ""), ""]


def _entry(name: str, of: Sequence[Line], *, depth: int) -> Entry:
    qualities = [line.quality for line in of if line.quality]
    ages = [line.age_s for line in of if line.age_s is not None]
    tones = [tone_of(line) for line in of]
    return Entry(
        name=name,
        keys=frozenset(line.workload.key for line in of),
        power=_sum(line.rate(ENERGY) for line in of),
        bandwidth=_sum(line.rate(TRAFFIC) for line in of),
        llc=_sum(line.level(CACHE) for line in of),
        energy=_sum(line.total(ENERGY) for line in of),
        age_s=max(ages, default=None),
        quality=max(qualities, key=QUALITIES.index) if qualities else _state(of),
        tone=max(tones, key=list(Tone).index),
        depth=depth,
    )


def _state(of: Sequence[Line]) -> str:
    """Return why there is no quality: the workload waits for an RMID."""
    return str(State.PENDING) if all(line.workload.state is State.PENDING for line in of) else ""


def _sum(values: Iterable[Decimal | None]) -> Decimal | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], start=known[0]) if known else None


def _parts(line: Line, by: By) -> list[tuple[str, Line]]:
    """Return the rows to which the workload belongs, by name, with its part in each."""
    if by is By.UNIT:
        path = unit_names(line)
        return [("/".join(path[: end + 1]), line) for end in range(len(path))]
    if by is not By.DOMAIN:
        return [(_name(line, by), line)]
    return [(printable(domain), part) for domain, part in line.by_domain.items()] or [("(no domain)", line)]


def unit_names(line: Line) -> list[str]:
    """Return the units around the workload as they are shown, the outermost first; [NO_UNIT] if there is none."""
    return [printable(unit) for unit in unit_path(line.workload)] or [NO_UNIT]


def _name(line: Line, by: By) -> str:
    match by:
        case By.WORKLOAD:
            return line.selector
        case By.POD:
            pod = "/".join(filter(None, (line.attribute("pod.namespace"), line.attribute("pod.name"))))
            return printable(pod) or "(no pod)"
        case By.NAMESPACE:
            return printable(line.attribute("pod.namespace")) or "(no namespace)"
        case By.CLASS:
            return printable(" ".join(class_names(line.workload)))
        case By.UNIT | By.DOMAIN:
            raise ValueError("a workload is in several of these")
