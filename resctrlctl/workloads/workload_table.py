# SPDX-License-Identifier: Apache-2.0
"""The table of workloads with what they use: its columns, their order, filters and rates. Without side effects."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

import msgspec
from msgspec.structs import replace

from resctrlctl.base.errors import CommandError
from resctrlctl.screen.format import format_duration, format_time, shorten
from resctrlctl.screen.layout import Column, Row, Table, Tone, cell_width
from resctrlctl.workloads.selectors import selectors_of
from resctrlctl.workloads.unit_path import unit_of
from resctrlmond.api.exit_codes import USAGE
from resctrlmond.api.types import Level, Total, Usage, Workload
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import State, worst

ENERGY, TRAFFIC, CACHE = "core_energy", "mbm_total_bytes", "llc_occupancy"
# All other states have the normal tone.
TONES = {
    State.PENDING: Tone.WARNING,
    State.COMPLETED: Tone.FAINT,
    State.LOST: Tone.BAD,
    State.FAILED: Tone.BAD,
}


class Line(msgspec.Struct, frozen=True):
    """One workload of the table.

    ``selector`` is a text that commands accept for this workload. ``before`` is an earlier reading of the same run:
    power and bandwidth are averages since then, otherwise since the baseline.
    """

    usage: Usage
    selector: str
    before: Usage | None = None

    @property
    def workload(self) -> Workload:
        """The workload itself."""
        return self.usage.workload

    def total(self, event: str) -> Decimal | None:
        """Return the use of an event since the baseline; None if it is unknown."""
        return _total(self.usage, event)

    def level(self, event: str) -> Decimal | None:
        """Return the current value of a gauge; None if it is unknown."""
        found = (level.value for level in self.usage.levels if level.event == event)
        value = next(found, None)
        return None if value is None else Decimal(value)

    def rate(self, event: str) -> Decimal | None:
        """Return the use of an event per second; None if it is unknown."""
        used, seconds = self.total(event), self._seconds()
        if self.before is not None and used is not None:
            earlier = _total(self.before, event)
            used = None if earlier is None else used - earlier
        return None if used is None or not seconds else used / Decimal(seconds)

    @property
    def age_s(self) -> float | None:
        """The seconds between the baseline and the reading; None if there is no group."""
        return seconds_counted(self.workload, self.workload.created_at, self.usage.read_ns)

    @property
    def cpu_time_s(self) -> Decimal | None:
        """The CPU time that its tasks used in its groups; None if it is unknown."""
        ns = self.workload.cpu_time_ns
        return None if ns is None else Decimal(ns) / 10**9

    @property
    def quality(self) -> str:
        """The quality of the worst total; "" if there is none."""
        qualities = {total.quality for total in self.usage.totals}
        return worst(*qualities) if qualities else ""

    @property
    def reason(self) -> str:
        """Why the workload could not be read, or why it is in its state and is not exact; "" for none of these."""
        if self.usage.error:
            return self.usage.error
        reasons = [self.workload.reason, *(total.reason for total in self.usage.totals)]
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    @property
    def by_domain(self) -> dict[str, Line]:
        """The workload as it is in each domain; {} if the domains are not known."""
        found = {}
        for domain, usage in _by_domain(self.usage).items():
            before = self.before
            if before is not None:
                # Without a reading of the domain, such as of one that came online, its rates are unknown.
                before = _by_domain(before).get(domain, replace(before, totals=[], levels=[]))
            found[domain] = replace(self, usage=usage, before=before)
        return found

    def attribute(self, name: str) -> str:
        """Return an attribute of the workload; "" if it has none."""
        return self.workload.attributes.get(name, "")

    def _seconds(self) -> float | None:
        if self.before is None:
            return seconds_counted(self.workload, counted_since(self.workload), self.usage.read_ns)
        return seconds_until(self.usage.read_ns, self.before.read_ns)


class _Field(msgspec.Struct, frozen=True):
    """A column: its heading, its value for sorting, and its text.

    ``rank``: a table that is too wide leaves out the column with the highest rank first; 0: never.
    """

    heading: str
    key: Callable[[Line], Decimal | float | str | None]
    text: Callable[[Line], str]
    is_number: bool = False
    rank: int = 0
    event: str = ""


def _number(heading: str, value: Callable[[Line], Decimal | None], unit: str, rank: int, event: str) -> _Field:
    def text(line: Line) -> str:
        number = value(line)
        return "-" if number is None else shorten(number, unit)

    return _Field(heading, value, text, is_number=True, rank=rank, event=event)


def _states(line: Line) -> list[str]:
    """Return the state, and "observed" if another program owns the group. The last one is the word for a table."""
    of = line.workload
    return [str(of.state), *(["observed"] if of.observed and of.state in (State.ACTIVE, State.IDLE) else [])]


def _word(heading: str, value: Callable[[Line], str], rank: int = 0) -> _Field:
    return _Field(heading, value, lambda line: printable(value(line)) or "-", rank=rank)


def _companion_of(workload: Workload) -> str:
    return str(workload.companion.state) if workload.companion else ""


FIELDS: dict[str, _Field] = {
    "workload": _word("WORKLOAD", lambda line: line.selector),
    "key": _word("KEY", lambda line: line.workload.key),
    "state": _word("STATE", lambda line: _states(line)[-1]),
    "class": _word("CLASS", lambda line: " ".join(class_names(line.workload))),
    "age": _Field("AGE", lambda line: line.age_s, lambda line: _age_text(line.age_s), is_number=True, rank=2),
    "since": _Field(
        "SINCE", lambda line: line.workload.created_at, lambda line: format_time(line.workload.created_at)
    ),
    "cpu": _Field(
        "CPU", lambda line: line.cpu_time_s, lambda line: _cpu_text(line.cpu_time_s), is_number=True, rank=6
    ),
    "llc": _number("LLC", lambda line: line.level(CACHE), "B", 3, CACHE),
    "traffic": _number("TRAFFIC", lambda line: line.total(TRAFFIC), "B", 4, TRAFFIC),
    "bandwidth": _number("BANDWIDTH", lambda line: line.rate(TRAFFIC), "B/s", 5, TRAFFIC),
    "energy": _number("ENERGY", lambda line: line.total(ENERGY), "J", 0, ENERGY),
    "power": _number("POWER", lambda line: line.rate(ENERGY), "W", 1, ENERGY),
    "quality": _word("QUALITY", lambda line: line.quality),
    "members": _Field(
        "MEMBERS",
        lambda line: sum(not member.ended_at for member in line.workload.members),
        lambda line: str(sum(not member.ended_at for member in line.workload.members)),
        is_number=True,
    ),
    "namespace": _word("NAMESPACE", lambda line: line.attribute("pod.namespace")),
    "pod": _word("POD", lambda line: line.attribute("pod.name")),
    "container": _word("CONTAINER", lambda line: line.attribute("container.name")),
    "command": _word("COMMAND", lambda line: line.attribute("command")),
    "unit": _word("UNIT", lambda line: unit_of(line.workload)),
    "owner": _word("OWNER", lambda line: " ".join(claim.owner for claim in line.workload.claims)),
    "companion": _word("COMPANION", lambda line: _companion_of(line.workload)),
    "reason": _word("REASON", lambda line: line.reason),
}
# A table that is too wide for its names leaves out only columns of this rank or a higher one. If that is not enough,
# names that are too long have lines of their own: their column is not narrower than _NAME_WIDTH.
_RANK_FOR_NAMES = 4
_NAME_WIDTH = 24
# The footer of an empty list.
NOTHING_LISTED = "No workload. 'resctrlctl list --all' also lists those that have ended."
_DEFAULT = ("workload", "age", "cpu", "llc", "traffic", "bandwidth", "energy", "power", "quality")
# Each filter: its value for a workload.
FILTERS: dict[str, Callable[[Line], Iterable[str]]] = {
    "state": _states,
    "class": lambda line: class_names(line.workload),
    "owner": lambda line: [claim.owner for claim in line.workload.claims],
    "quality": lambda line: [line.quality],
    "namespace": lambda line: [line.attribute("pod.namespace")],
    "pod": lambda line: [line.attribute("pod.name")],
    "container": lambda line: [line.attribute("container.name")],
    "unit": lambda line: [unit_of(line.workload)],
    "key": lambda line: [line.workload.key],
}


def lines(usages: Sequence[Usage], before: Iterable[Usage] = ()) -> list[Line]:
    """Return a line for each workload. ``before``: an earlier reading, from which power and bandwidth count."""
    earlier = {_identity(usage.workload): usage for usage in before}
    selectors = selectors_of([usage.workload for usage in usages])
    return [
        Line(
            usage,
            selectors[usage.workload.key],
            earlier.get(_identity(usage.workload)),
        )
        for usage in usages
    ]


def _identity(workload: Workload) -> tuple[str, int, str | None]:
    """Return what identifies a run. Generations begin again once the daemon has forgotten the ended runs of a key."""
    return workload.key, workload.generation, workload.created_at


def selected(found: Iterable[Line], filters: Iterable[tuple[str, str]]) -> list[Line]:
    """Return the lines that match each of the filters, which are names of FILTERS with a pattern (fnmatch)."""
    return [
        line
        for line in found
        if all(any(fnmatch.fnmatchcase(text, pattern) for text in FILTERS[name](line)) for name, pattern in filters)
    ]


def in_order(found: Iterable[Line], name: str) -> list[Line]:
    """Return the lines in the order of a column: numbers from the largest, texts from A. Unknown values are last."""
    field = FIELDS[name]
    known = [(value, line) for line in found for value in [field.key(line)] if value not in (None, "")]
    unknown = [line for line in found if field.key(line) in (None, "")]
    known.sort(key=lambda pair: pair[0], reverse=field.is_number)
    return [*(line for _, line in known), *unknown]


def table(
    found: Sequence[Line],
    columns: Sequence[str] = (),
    width: int | None = None,
    *,
    nothing: str = NOTHING_LISTED,
) -> Table:
    """Return the table with these columns.

    Without ``columns``, it has those that suit the workloads and fit into ``width``; the footer names what was left
    out. No text that a user may copy is cut. ``nothing`` is the footer if there is no workload.
    """
    names = list(columns) or _suitable(found)
    dropped = [] if columns or width is None else _drop(names, found, width)
    rows = [Row(tuple(FIELDS[name].text(line) for name in names), tone_of(line)) for line in found]
    headings = tuple(
        Column(
            FIELDS[name].heading,
            right=FIELDS[name].is_number,
            name_width=0 if columns or name != "workload" else _NAME_WIDTH,
        )
        for name in names
    )
    return Table(headings, tuple(rows), _footer(found, dropped) if found else nothing)


def check_columns(names: Iterable[str]) -> None:
    """Raise CommandError for a name that is not a column."""
    for name in names:
        if name not in FIELDS:
            raise CommandError(f"there is no column {name!r}. The columns are: {', '.join(FIELDS)}", USAGE)


def _suitable(found: Sequence[Line]) -> list[str]:
    """Return the default columns that have a figure for a workload, and the state if it differs."""
    events = {total.event for line in found for total in line.usage.totals}
    events |= {level.event for line in found for level in line.usage.levels}
    names = [name for name in _DEFAULT if not FIELDS[name].event or FIELDS[name].event in events]
    if all(line.cpu_time_s is None for line in found):
        names.remove("cpu")
    if any(line.workload.observed or line.workload.state not in (State.ACTIVE, State.IDLE) for line in found):
        names.insert(1, "state")
    return names


def _drop(names: list[str], found: Sequence[Line], width: int) -> list[str]:
    """Remove columns until the table fits, the least important first; return them.

    Long names do not remove important columns: they have lines of their own.
    """
    widths = {
        name: max([len(FIELDS[name].heading), *(cell_width(FIELDS[name].text(line)) for line in found)])
        for name in names
    }
    kept = _fitting(widths, width, _RANK_FOR_NAMES)
    if kept is None:
        narrow = widths | {"workload": min(widths["workload"], _NAME_WIDTH)}
        kept = _fitting(narrow, width, 1) or [name for name in names if not FIELDS[name].rank]
    dropped = [name for name in names if name not in kept]
    names[:] = kept
    return dropped


def _fitting(widths: Mapping[str, int], width: int, rank: int) -> list[str] | None:
    """Return the columns that fit without those of the highest ranks, down to ``rank``; None if they never fit."""
    names = list(widths)
    while sum(widths[name] + 2 for name in names) - 2 > width:
        last = max(names, key=lambda name: FIELDS[name].rank)
        if FIELDS[last].rank < rank:
            return None
        names.remove(last)
    return names


def _footer(found: Sequence[Line], dropped: Sequence[str]) -> str:
    texts = ["1 workload." if len(found) == 1 else f"{len(found)} workloads."]
    if dropped:
        texts.append(f"Too wide for this terminal: {', '.join(sorted(dropped))} (--full shows them).")
    return " ".join(texts)


def tone_of(line: Line) -> Tone:
    """Return the tone of the workload's row."""
    return Tone.WARNING if line.usage.error else TONES.get(line.workload.state, Tone.NORMAL)


def class_names(workload: Workload) -> list[str]:
    """Return the classes of the workload, as users read and type them."""
    return [name or "/" for name in workload.classes or (workload.class_,)]


def _by_domain(usage: Usage) -> dict[str, Usage]:
    """Return the part of the use in each domain."""
    parts: dict[str, tuple[list[Total], list[Level]]] = {}
    for use in usage.domains or ():
        totals, levels = parts.setdefault(use.domain, ([], []))
        if use.quality is None:
            levels.append(Level(event=use.event, unit=use.unit, value=use.value))
        else:
            totals.append(
                Total(event=use.event, unit=use.unit, value=use.value, quality=use.quality, reason=use.reason)
            )
    return {
        domain: replace(usage, totals=totals, levels=levels, domains=None)
        for domain, (totals, levels) in parts.items()
    }


def _total(usage: Usage, event: str) -> Decimal | None:
    value = next((total.value for total in usage.totals if total.event == event), None)
    return None if value is None else Decimal(value)


def counted_since(workload: Workload) -> str | None:
    """Return since when the totals count; None if this is not known.

    After a loss they cover all runs, and the baseline is that of the last one. The first claim is about as old as the
    first baseline. A workload that has ended has no claims.
    """
    if workload.loss is None:
        return workload.created_at
    return min((claim.since for claim in workload.claims), default=None)


def seconds_counted(workload: Workload, since: str | None, read_ns: int | None) -> float | None:
    """Return the seconds from ``since``, at or before the baseline, to a reading; None if one is not known.

    Those since the baseline are of the time since boot: the system clock may have been set.
    """
    lost, own = seconds_between(since, workload.created_at), seconds_until(read_ns, workload.created_ns)
    return None if lost is None or own is None else lost + own


def seconds_until(last_ns: int | None, first_ns: int | None) -> float | None:
    """Return the seconds from one time since boot (ns) to another, 0 if that is earlier; None if one is not known."""
    return None if last_ns is None or first_ns is None else max(last_ns - first_ns, 0) / 1e9


def seconds_between(first: str | None, last: str | None) -> float | None:
    """Return the seconds from one RFC 3339 time to another, 0 if that is earlier; None if one is not known."""
    if not first or not last:
        return None
    try:
        times = [datetime.datetime.fromisoformat(text) for text in (first, last)]
        return max((times[1] - times[0]).total_seconds(), 0.0)
    except (ValueError, TypeError):  # not a time, or only one of them has a time zone
        return None


def _cpu_text(seconds: Decimal | None) -> str:
    if seconds is None:
        return "-"
    return shorten(seconds, "s") if seconds < 100 else format_duration(float(seconds))


def _age_text(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
