# SPDX-License-Identifier: Apache-2.0
"""The report of ``run``: what a command used in one run or in several, as text, lines of fields, or JSON."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Sequence
from decimal import Decimal

import msgspec

from resctrlctl.run.samples import Interval, LevelSummary
from resctrlctl.screen.format import SYMBOLS, format_class, format_count, format_message, format_value, shorten
from resctrlctl.screen.layout import Column, Row, Table, broken, to_text
from resctrlctl.workloads.reasons import reasons
from resctrlmond.api import types
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import worst

_COLUMNS = (
    Column("EVENT"),
    Column("TOTAL", right=True),
    Column("DEVIATION", right=True),
    Column("PER SECOND", right=True),
    Column("QUALITY"),
)
_TIMES = ("elapsed", "user", "system")
_MICROSECOND = Decimal("0.000001")


class Report(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """The JSON report of ``run``: the exit status and times of the command, and the daemon's reply to Release.

    ``elapsed``, ``user`` and ``system`` are seconds. ``tasks_left`` is the number of tasks that were still running
    when the command had ended; null if it is unknown. ``totals`` include ``nested``, which is what the nested
    workloads used; it is [] if there were none, and always if ``is_difference``. ``nested_left`` are the keys of the
    nested workloads that still ran. ``problem`` is the reason if there are no totals. ``workload``
    is then null if the command was not monitored, or else as it was when the command began. ``target`` is the process
    or control group that was measured instead of the command, "" if the command was. ``is_difference``: the target is
    all of ``workload``, which continues, and the totals are what it used while the command ran. ``ended_early``: the
    workload ended before the command, so the totals are not those of the elapsed time. ``levels`` are the samples of
    gauges; none if the command ended before the first sample.
    """

    command: list[str]
    target: str = ""
    is_difference: bool = False
    ended_early: bool = False
    exit_status: int
    elapsed: float
    user: float
    system: float
    tasks_left: int | None
    completed: bool
    workload: types.Workload | None
    totals: list[types.Total]
    nested: Sequence[types.Total] = []
    nested_left: Sequence[str] = []
    levels: Sequence[LevelSummary] = []
    problem: str = ""


class Figure(msgspec.Struct, frozen=True, rename="camel"):
    """An event, or a time, over all runs. The numbers are decimal; null if they are unknown.

    ``mean`` is the mean of the runs in which it is known. ``deviation`` is the standard deviation of these (with
    n - 1); null with fewer than two. ``per_second`` is the sum by the elapsed time of the same runs, without those
    whose workload ended early; null for times, and if no run is left.
    ``quality`` is the worst of all runs, "" for times.
    """

    event: str
    unit: str
    mean: str | None
    deviation: str | None
    per_second: str | None
    quality: str
    reason: str = ""


class RepeatedReport(msgspec.Struct, frozen=True, rename="camel"):
    """The JSON report of ``run --repeat``: each run, and the figures of all of them."""

    command: list[str]
    runs: Sequence[Report]
    figures: list[Figure]


def is_selected(event: str, patterns: Sequence[str]) -> bool:
    """Return whether the event matches one of the patterns (fnmatch), or there is no pattern."""
    return not patterns or any(fnmatch.fnmatchcase(event, pattern) for pattern in patterns)


def figures(runs: Sequence[Report]) -> list[Figure]:
    """Return the figures of all runs: the events in the order of the first run that has them, gauges, then times."""
    by_event: dict[tuple[str, str], list[tuple[types.Total, float | None]]] = {}
    for run in runs:
        counted_s = None if run.ended_early else run.elapsed
        for total in run.totals:
            by_event.setdefault((total.event, total.unit), []).append((total, counted_s))
    found = [_figure(event, unit, of) for (event, unit), of in by_event.items()]
    samples: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for level in run.levels:
            samples.setdefault((f"{level.event}_average", level.unit), []).append(level.average)
            samples.setdefault((f"{level.event}_peak", level.unit), []).append(level.peak)
    for (event, unit), texts in samples.items():
        values = list(map(Decimal, texts))
        mean = texts[0] if len(runs) == 1 else _text(_mean(values))
        found.append(Figure(event, unit, mean, _text(_deviation(values)), None, ""))
    # The processor time of the command is not that of the target.
    for name in ("elapsed",) if runs[0].target else _TIMES:
        seconds = [Decimal(str(getattr(run, name))) for run in runs]
        found.append(Figure(name, "s", _text(_mean(seconds)), _text(_deviation(seconds)), None, ""))
    return found


def as_text(runs: Sequence[Report], width: int | None, *, is_ascii: bool = False) -> str:
    """Return the report for people: reasons are broken at ``width`` (None: no limit)."""
    first = runs[0]
    name = _subject(first) if len(runs) == 1 else format_count(len(runs), "run")
    command = printable(shlex.join(first.command))
    lines = [f"{first.target} during {command}: {name}" if first.target else f"{command}: {name}", ""]
    found = figures(runs)
    table = Table(_COLUMNS, tuple(_row(figure, is_ascii=is_ascii) for figure in found))
    lines.extend(f"  {line}" for line in to_text([table], None, legend=False).splitlines())
    events = [(_label(figure.event), figure.reason) for figure in found if figure.quality]
    for sheet in reasons(events):
        lines += ["", *to_text([sheet], width, legend=False).splitlines(), ""]
    notes = [
        (f"Run {number}: " if len(runs) > 1 else "") + note
        for number, run in enumerate(runs, 1)
        for note in _notes(run)
    ]
    lines += [line for note in notes for line in broken(note, width)]
    return "\n".join(["", *lines]).rstrip("\n") + "\n"


def as_fields(runs: Sequence[Report], separator: str) -> str:
    """Return a line for each figure: event, unit, mean, deviation, per second and quality. Unknown ones are empty."""
    return "".join(
        separator.join(
            (
                printable(figure.event),
                printable(figure.unit),
                figure.mean or "",
                figure.deviation or "",
                figure.per_second or "",
                figure.quality,
            )
        )
        + "\n"
        for figure in figures(runs)
    )


def _figure(event: str, unit: str, of: Sequence[tuple[types.Total, float | None]]) -> Figure:
    """Return the figure of an event: its totals, each with the time that it covers (None if that is unknown)."""
    known = [(Decimal(total.value), counted_s) for total, counted_s in of if total.value is not None]
    values = [value for value, _ in known]
    timed = [(value, counted_s) for value, counted_s in known if counted_s is not None]
    seconds = Decimal(str(sum(counted_s for _, counted_s in timed)))
    reasons = dict.fromkeys(total.reason for total, _ in of if total.reason)
    return Figure(
        event,
        unit,
        # A single total keeps every digit.
        _text(_mean(values)) if len(of) > 1 else of[0][0].value,
        _text(_deviation(values)),
        _text(sum((value for value, _ in timed), Decimal(0)) / seconds) if seconds else None,
        str(worst(*(total.quality for total, _ in of))),
        "; ".join(reasons),
    )


def _mean(values: Sequence[Decimal]) -> Decimal | None:
    return sum(values, Decimal(0)) / len(values) if values else None


def _deviation(values: Sequence[Decimal]) -> Decimal | None:
    mean = _mean(values)
    if mean is None or len(values) < 2:
        return None
    return (sum(((value - mean) ** 2 for value in values), Decimal(0)) / (len(values) - 1)).sqrt()


def _text(value: Decimal | None) -> str | None:
    return None if value is None else f"{value.quantize(_MICROSECOND):f}"


def _row(figure: Figure, *, is_ascii: bool) -> Row:
    shown = f"{figure.mean} s" if figure.event in _TIMES else format_value(figure.mean, figure.unit)
    per_second = "" if figure.per_second is None else _rate(Decimal(figure.per_second), figure.unit)
    deviation = _relative(figure, "+-" if is_ascii else "±")
    return Row((_label(figure.event), shown, deviation, per_second, figure.quality))


def _relative(figure: Figure, sign: str) -> str:
    if figure.deviation is None or figure.mean is None:
        return ""
    mean = Decimal(figure.mean)
    return f"{sign} {100 * Decimal(figure.deviation) / mean:.1f} %" if mean else f"{sign} 0.0 %"


def _rate(value: Decimal, unit: str) -> str:
    return shorten(value, "W" if unit == "joules" else f"{SYMBOLS.get(unit, printable(unit))}/s")


def interval_lines(interval: Interval, separator: str | None) -> str:
    """Return a line for each event: the time, the event, its value, and the quality of a total.

    With a separator, the value has all digits and is followed by its unit; else it is scaled. The number of the run,
    if there are several, is the last field, or comes first.
    """
    rows = [(total.event, total.value, total.unit, str(total.quality)) for total in interval.totals]
    rows += [(level.event, level.value, level.unit, "") for level in interval.levels]
    time = f"{interval.time:.6f}"
    if separator is not None:
        fields = (
            (
                time,
                printable(event),
                value or "",
                printable(unit),
                quality,
                *([str(interval.run)] if interval.run else []),
            )
            for event, value, unit, quality in rows
        )
        return "".join(separator.join(row) + "\n" for row in fields)
    run = f"run {interval.run:<3}" if interval.run else ""
    return "".join(
        f"{run}{time:>14}  {_label(event):<14}  {format_value(value, unit):>18}  {quality}".rstrip() + "\n"
        for event, value, unit, quality in rows
    )


def _label(event: str) -> str:
    return printable(event).removesuffix("_bytes").replace("_", " ")


def _subject(run: Report) -> str:
    if run.workload is None:
        return "not monitored"
    return f"{printable(run.workload.key)} in class {format_class(run.workload.class_)}"


def _notes(run: Report) -> list[str]:
    """Return what people must know about a run besides its figures."""
    notes = []
    if run.tasks_left:
        here = " here" if run.workload and run.workload.part_of else ""
        tasks, (verb, subject) = format_count(run.tasks_left, "task"), _verb_and_subject(run.tasks_left)
        notes.append(f"{tasks} of the command {verb} still running; what {subject} from now on is not counted{here}.")
    if run.workload and run.problem:
        notes.append(f"No totals: {format_message(run.problem)}.")
        if not run.is_difference:
            key = shlex.quote(printable(run.workload.key))
            notes.append(f"When resctrlmond runs, it ends the workload. For the totals, use: resctrlctl show {key}")
    elif run.is_difference and run.target:
        notes.append("The workload was monitored already: the totals are what it used while the command ran.")
    if run.workload and run.workload.nested and not (run.problem or run.is_difference):
        inside = format_count(run.workload.nested, "nested workload")
        notes.append(f"The totals include {inside}.")
    if run.nested_left:
        inside, (verb, subject) = (
            format_count(len(run.nested_left), "nested workload"),
            _verb_and_subject(len(run.nested_left)),
        )
        keys = ", ".join(map(printable, run.nested_left))
        notes.append(f"{inside} {verb} still running ({keys}): what {subject} from now on is not included.")
    if run.workload and not run.problem and not run.is_difference and not run.completed:
        notes.append("The workload continues, because it has other claims.")
    return notes


def _verb_and_subject(count: int) -> tuple[str, str]:
    return ("is", "it uses") if count == 1 else ("are", "they use")
