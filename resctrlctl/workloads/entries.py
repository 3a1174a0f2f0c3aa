# SPDX-License-Identifier: Apache-2.0
"""Rows of workloads, or of groups of them, with what they use at present, in an order. Without side effects."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

import msgspec

from resctrlctl.screen.layout import Tone
from resctrlctl.workloads.unit_path import unit_path
from resctrlctl.workloads.workload_table import CACHE, ENERGY, TRAFFIC, Line, class_names, tone_of
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import Quality, State, worst


class By(enum.StrEnum):
    """The grouping of the workloads: each row is one of these."""

    WORKLOAD = "workload"
    POD = "pod"
    NAMESPACE = "namespace"
    UNIT = "unit"
    CLASS = "class"
    DOMAIN = "domain"


class Entry(msgspec.Struct, frozen=True):
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


class View(msgspec.Struct, frozen=True):
    """The choices of the user.

    ``has_blocks``: the terminal can show block characters. ``is_rate``: power and bandwidth are of the last interval,
    not averages since the baselines.
    """

    by: By = By.WORKLOAD
    sort: str = "power"
    is_reversed: bool = False
    has_blocks: bool = True
    is_rate: bool = True


class _Column(msgspec.Struct, frozen=True):
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
# The row of the workloads in no unit.
NO_UNIT = "(no unit)"
# The columns that are not numbers.
TEXTS = ("name", "quality")


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
    known.sort(key=lambda pair: pair[0], reverse=(view.sort in TEXTS) == view.is_reversed)
    return [*(row for _, row in known), *unknown]


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
        quality=worst(*map(Quality, qualities)) if qualities else _state(of),
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
