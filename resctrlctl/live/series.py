# SPDX-License-Identifier: Apache-2.0
"""Read a recording, and compute what each run of a workload used over time. Leave out damaged lines."""

from __future__ import annotations

import datetime
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import msgspec

from resctrlctl.base.errors import CommandError
from resctrlctl.live.recording import FORMAT, AnyLine, Header, Outage, Reading, Used, is_selected
from resctrlctl.screen.format import format_count, format_time
from resctrlctl.workloads.workload_table import CACHE, ENERGY, TRAFFIC
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.states import Quality, worst

# As for a reply of the daemon: a reading of all workloads is smaller.
_MAX_LINE = 64 * 1024 * 1024
# RFC 3339 times outside of this range (1970 to 2100) are damage, as are larger numbers. Drawing them would overflow.
_MAX_TIME = 4_102_444_800.0
_MAX_NUMBER = 1e24
_STANDARD_INPUT = "-"


class Measure(NamedTuple):
    """A figure over time: ``unit`` is that of the plot, ``total_unit`` that of its sum over time ("" for none)."""

    name: str
    event: str
    unit: str
    total_unit: str = ""


POWER = Measure("power", ENERGY, "W", "J")
BANDWIDTH = Measure("bandwidth", TRAFFIC, "B/s", "B")
LLC = Measure("LLC", CACHE, "B")
MEASURES = (POWER, BANDWIDTH, LLC)


class Span(NamedTuple):
    """The average of a measure between two times (seconds since 1970)."""

    start: float
    end: float
    value: float


class _Known(NamedTuple):
    """A total or a level, and the time at which it was read."""

    at: float
    value: float


@dataclass
class Run:
    """One run of a workload. ``label`` is its name, with the key and the generation if the name is not unique.

    ``created_at`` is the time of its baseline, if known.
    ``spans`` are in order of time, and do not overlap. ``qualities`` are those of the plotted totals. A run that
    ``is_complete`` has its final totals. ``reading`` is the number of the last reading that has it.
    """

    key: str
    generation: int
    name: str
    label: str = ""
    state: str = ""
    created_at: str | None = None
    is_complete: bool = False
    reading: int = 0
    qualities: set[str] = field(default_factory=set)
    spans: dict[Measure, list[Span]] = field(default_factory=lambda: {measure: [] for measure in MEASURES})
    _last: dict[Measure, _Known] = field(default_factory=dict)

    def mean(self, measure: Measure) -> float | None:
        """Return the average over the time of the spans; None if there is none."""
        seconds = sum(span.end - span.start for span in self.spans[measure])
        return self.total(measure) / seconds if seconds else None

    def greatest(self, measure: Measure) -> float | None:
        """Return the greatest value."""
        return max((span.value for span in self.spans[measure]), default=None)

    def total(self, measure: Measure) -> float:
        """Return the sum over time: joules of power, bytes of bandwidth."""
        return math.fsum(span.value * (span.end - span.start) for span in self.spans[measure])

    @property
    def quality(self) -> str:
        """The quality of the worst total; "" if there is none."""
        known = [quality for quality in Quality if quality in self.qualities]
        return str(worst(*known)) if known else ""

    def is_another(self, used: Used) -> bool:
        """Return whether this is another run of the same key and generation.

        The daemon begins with generation 1 again once it has forgotten the ended runs of a key. A group that has
        counted nothing can be created again during a run, with another time. A run that waits for an RMID has none.
        """
        if self.is_complete and used.completed_at is None:
            return True
        has_used = any(self._last[measure].value for measure in (POWER, BANDWIDTH) if measure in self._last)
        is_other_time = None not in (self.created_at, used.created_at) and self.created_at != used.created_at
        return is_other_time and (self.is_complete or has_used)

    def add(self, used: Used, at: float, begin: float, interval_s: float) -> None:
        """Add a reading: what was used since the last one that is known or, if there is none, since the baseline.

        The sum of the spans is therefore the use in the recording, whatever a reading between lacks.
        """
        now = _time(used.read_at) or at
        created = _time(used.created_at)
        self.state = used.state
        self.created_at = used.created_at or self.created_at
        self.is_complete = used.completed_at is not None
        for measure in (POWER, BANDWIDTH):
            amount = used.totals.get(measure.event)
            value = None if amount is None else _number(amount.value)
            if amount is not None:
                self.qualities.add(amount.quality)
            if value is None:
                continue
            last = self._last.get(measure, _Known(created, 0.0) if created and created >= begin else None)
            if last is None or value < last.value:
                # A total that falls has lost some use.
                self.qualities |= {Quality.UNKNOWN} if last else set()
                self._last[measure] = _Known(now, value)
            elif now > last.at:
                self.spans[measure].append(Span(last.at, now, (value - last.value) / (now - last.at)))
                self._last[measure] = _Known(now, value)
        level = _number(used.levels.get(LLC.event))
        # A level says nothing about an outage before it.
        since = max(self._last.get(LLC, _Known(begin, 0.0)).at, created or begin, now - 2 * interval_s)
        if level is not None and now > since:
            self.spans[LLC].append(Span(since, now, level))
            self._last[LLC] = _Known(now, level)


class Series(NamedTuple):
    """The runs of a recording, those that used most first, and its time. ``notes`` are sentences about the file."""

    header: Header
    runs: list[Run]
    begin: float
    end: float
    readings: int
    notes: list[str]

    @property
    def measures(self) -> list[Measure]:
        """The measures that the recording has."""
        return [measure for measure in MEASURES if any(run.spans[measure] for run in self.runs)]


def load(path: str, patterns: Sequence[str] = ()) -> Series:
    """Read a recording; ``patterns`` select names or keys. Raises CommandError if there is nothing to plot."""
    name = "standard input" if path == _STANDARD_INPUT else printable(path)
    try:
        with open(0 if path == _STANDARD_INPUT else path, "rb", closefd=path != _STANDARD_INPUT) as file:
            found = read(file, name, patterns)
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}") from error
    if patterns and not found.runs:
        raise CommandError(f"no workload of {name} matches {', '.join(map(repr, patterns))}")
    if not found.measures:
        raise CommandError(
            f"there is nothing to plot in {name}: it needs two readings of a workload with a group, and has "
            f"{format_count(found.readings, 'reading')} and {format_count(len(found.runs), 'workload')}"
        )
    return found


def read(file: BinaryIO, name: str, patterns: Sequence[str] = ()) -> Series:
    """Read a recording from a file with that name. Raises CommandError if it is not a recording."""
    header = _header(file, name)
    begin = end = _time(header.read_at) or 0.0
    runs: list[Run] = []
    # By key and generation.
    last: dict[tuple[str, int], Run] = {}
    readings = damaged = outages = 0
    is_cut = False
    while data := file.readline(_MAX_LINE):
        is_cut = not data.endswith(b"\n")
        line = _line(data)
        at = None if line is None else _time(line.read_at)
        if isinstance(line, Outage):
            outages += 1
        elif isinstance(line, Reading) and at is not None:
            readings += 1
            for used in line.workloads:
                if is_selected(patterns, (used.name, used.key)):
                    run = last.get((used.key, used.generation))
                    if run is None or run.is_another(used):
                        run = last[used.key, used.generation] = Run(used.key, used.generation, used.name or used.key)
                        runs.append(run)
                    run.add(used, at, begin, header.interval_s)
                    run.reading = readings
        elif not is_cut:
            damaged += 1
    for run in runs:
        if run.qualities and not run.is_complete and run.reading < readings:
            # Its final totals are missing: the key was used again, or the line is damaged.
            run.qualities.add(Quality.LATE)
    # The clock may have been set back since the header.
    spans = [span for run in runs for of_measure in run.spans.values() for span in of_measure]
    begin = min([begin, *(span.start for span in spans)])
    end = max((span.end for span in spans), default=end)
    ordered = sorted(runs, key=lambda run: (-run.total(POWER), -run.total(BANDWIDTH), run.name, run.key))
    _label(ordered)
    notes = []
    if damaged:
        verb = "is" if damaged == 1 else "are"
        notes.append(f"{format_count(damaged, 'line')} of {name} {verb} damaged and left out.")
    if is_cut:
        notes.append(f"The last line of {name} is incomplete: the recording was cut off.")
    if outages:
        notes.append(
            f"{format_count(outages, 'outage')} of resctrlmond: power and bandwidth are averages over that time."
        )
    return Series(header, ordered, begin, end, readings, notes)


def _header(file: BinaryIO, name: str) -> Header:
    data = file.readline(_MAX_LINE)
    if not data:
        raise CommandError(f"{name} is empty: it is not a recording of 'resctrlctl record'")
    header = _line(data)
    if not isinstance(header, Header):
        raise CommandError(f"{name} is not a recording of 'resctrlctl record': its first line is not a header")
    if header.format > FORMAT:
        raise CommandError(f"{name} was recorded by a newer version of resctrlctl: use that version or a later one")
    if _time(header.read_at) is None or not 0 < header.interval_s < _MAX_TIME:
        raise CommandError(f"{name} is damaged: its first line has no valid time")
    return header


_DECODER: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def _line(data: bytes) -> AnyLine | None:
    """Return a line; None if it is damaged."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _time(text: str | None) -> float | None:
    """Return the seconds since 1970; None if the text is not a plausible time with a time zone."""
    try:
        time = datetime.datetime.fromisoformat(text or "")
        seconds = time.timestamp() if time.tzinfo else 0.0
    except (ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < _MAX_TIME else None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number <= _MAX_NUMBER else None


def _label(runs: Iterable[Run]) -> None:
    """Give each run a label that no other run has."""
    found = list(runs)
    names = Counter(name for name, _ in {(run.name, run.key) for run in found})
    keys = Counter(run.key for run in found)
    generations = Counter((run.key, run.generation) for run in found)
    for run in found:
        run.label = printable(run.name if names[run.name] == 1 else f"{run.name} ({run.key})")
        if keys[run.key] > 1:
            run.label += f", run {run.generation}"
        if generations[run.key, run.generation] > 1:
            run.label += f" of {format_time(run.created_at)}"


def averages(spans: Iterable[Span], begin: float, end: float, count: int) -> list[float | None]:
    """Return the average in each of ``count`` equal parts of the time; None if a part has no span."""
    width = (end - begin) / count
    sums, seconds = [0.0] * count, [0.0] * count
    for span in spans:
        first = min(max(int((span.start - begin) / width), 0), count - 1)
        last = min(max(int((span.end - begin) / width), 0), count - 1)
        for index in range(first, last + 1):
            left, right = begin + index * width, begin + (index + 1) * width
            part = min(span.end, right) - max(span.start, left)
            if part > sys.float_info.epsilon * span.end:
                sums[index] += span.value * part
                seconds[index] += part
    return [total / time if time else None for total, time in zip(sums, seconds, strict=True)]
