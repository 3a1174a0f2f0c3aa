# SPDX-License-Identifier: Apache-2.0
"""Convert what the daemon reports to points of OTLP. A figure that has no number is left out; it is never 0."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from resctrlmond.api.types import MachineReply, Sum, SumsReply
from resctrlmond.exporter import metrics
from resctrlmond.exporter.conversion import domain_number, ended_runs, inexact_ratios
from resctrlmond.exporter.families import cut
from resctrlmond.exporter.health import health
from resctrlmond.exporter.metrics import EventMetrics, Metric, Type
from resctrlmond.exporter.otlp.figures import Attributes, Figures, Run, check, decimal, nanoseconds
from resctrlmond.exporter.otlp.ledger import Counted, Known, Ledger, step
from resctrlmond.exporter.source import Observation
from resctrlmond.workloads.model.states import Quality

log = logging.getLogger(__name__)

PREFIX = "resctrl."
_INSTANCE = "service.instance.id"
# The codes of UCUM, which the semantic conventions use, by the unit of the metric.
_UNITS = {"bytes": "By", "joules": "J", "farads": "F", "cycles": "{cycle}", "seconds": "s"}
# The units of other metrics, by the name of the metric; a flag has none. "1" is for a ratio only: receivers with the
# names of Prometheus append "_ratio" to a gauge with this unit.
_OTHER_UNITS = {
    "accounted_inexact_ratio": "1",
    "accounted_unknown_runs": "{run}",
    "accounted_uops_retired": "{uop}",
    "bandwidth_assignable": "{counter}",
    "bandwidth_assignable_free": "{counter}",
    "ends": "{run}",
    "ends_lost": "{run}",
    "exporter_ends_missing": "{run}",
    "foreign_groups": "{group}",
    "machine_uops_retired": "{uop}",
    "problems": "{problem}",
    "rmids": "{rmid}",
    "rmids_free": "{rmid}",
    "rmids_used": "{rmid}",
    "unwatched_containers": "{container}",
    "unwatched_units": "{unit}",
    "uops_retired": "{uop}",
    "workloads": "{workload}",
    "workloads_unreadable": "{workload}",
}
# The names of metrics do not end in these, because a metric has a unit.
_IN_NAME = ("bytes", "joules", "farads", "seconds")
_GROUPS = ("workload", "machine", "accounted")
# Numbers of these units (UCUM) have decimals, also one that happens to be whole: a series has values of one type.
_FRACTIONAL = ("J", "F", "s")
_MAX_INT = 2**63 - 1
# Prometheus reads the end values of the daemon, and has no such metric.
MISSING_ENDS = Metric(
    "exporter_ends_missing",
    Type.COUNTER,
    "The runs whose final figures the receiver did not get, since the start of the exporter.",
    ("reason",),
)


@dataclass(frozen=True, slots=True)
class Name:
    """The name, the unit and the text of a metric in OTLP."""

    name: str
    unit: str
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a metric. ``start_ns``: None for a gauge."""

    metric: Name
    attributes: Attributes
    start_ns: int | None
    time_ns: int
    value: int | float


@dataclass(slots=True)
class Part:
    """The points of one resource, and what the ledger keeps of them."""

    attributes: Attributes
    points: list[Point] = field(default_factory=list)
    # The counters of the ledger, and the entry of each once the receiver has its point.
    delivered: list[tuple[dict[str, Counted], str, Counted]] = field(default_factory=list)
    # The run whose final figures these are; None for figures that are not final.
    ended_run: Run | None = None
    # The entry of the run in the ledger; None for the host.
    known: Known | None = None

    def record_counters(self) -> None:
        """Record in the ledger that the receiver has the counters."""
        for counters, name, counted in self.delivered:
            counters[name] = counted

    def record_end(self) -> None:
        """Record in the ledger that the receiver has the final figures, if these are final."""
        if self.ended_run is not None and self.known is not None:
            self.known.is_final = True
            self.known.counters.clear()


@functools.cache
def name_of(metric: Metric, text: str = "", group: str = "") -> Name:
    """Return the name in OTLP of a metric of Prometheus: "resctrl.machine.core_energy", with the unit "J".

    Without the cache, a name takes four times the CPU time, and a push asks for each name of each workload.
    """
    name = metric.name.removesuffix(f"_{metric.unit}") if metric.unit in _IN_NAME else metric.name
    for one in _GROUPS:
        if name.startswith(f"{one}_"):
            name = f"{one}.{name.removeprefix(f'{one}_')}"
    return Name(f"{PREFIX}{group}{name}", _unit(metric), text or metric.help)


def _unit(metric: Metric) -> str:
    return _UNITS[metric.unit] if metric.unit else _OTHER_UNITS.get(metric.name, "")


def of_workload(row: EventMetrics) -> Name:
    """Return the name of the metric of an event of a workload."""
    metric = row.workload
    text = f"Of a workload{'' if metric.type is Type.GAUGE else ', since its baseline'}: {row.text}."
    return name_of(metric, text, "workload.")


class Builder:
    """Builds the parts of one push. ``ledger`` has what was pushed before."""

    def __init__(self, ledger: Ledger, events: Mapping[str, EventMetrics], host: Attributes) -> None:
        self._ledger = ledger
        self._events = events
        self._host = host
        # The figures that could not be converted for this push and for the one before, as the log names them.
        self._left_out, self._left_out_before = set[str](), set[str]()
        self._since = datetime.datetime.now(datetime.UTC).isoformat()
        # Prometheus has no other label for the resource.
        self._instance = str(host.get(_INSTANCE, host["host.name"]))

    def parts(self, observation: Observation, runs: Iterable[Figures], now_ns: int) -> list[Part]:
        """Return the points of the host, and of each run that the receiver does not have to the end."""
        self._left_out, self._left_out_before = set(), self._left_out
        host = Part({**self._host, _INSTANCE: self._instance})
        self._add_health(host, observation, now_ns)
        if observation.machine is not None:
            with self._leaving_out("of the machine"):
                self._add_machine(host, observation.machine)
        if observation.sums is not None:
            with self._leaving_out("of the sums"):
                self._add_sums(host, observation.sums)
        found, parts = list(runs), [host]
        ended = {figures.run for figures in found if figures.is_final}
        for figures in found:
            with self._leaving_out(f"of {figures.run.key}"):
                parts += filter(None, [self._run(figures, ended)])
        return parts

    @contextlib.contextmanager
    def _leaving_out(self, which: str) -> Iterator[None]:
        """Leave out figures that cannot be converted, and log that once: the others are pushed nevertheless."""
        try:
            yield
        except Exception:  # the figures of a daemon of another version, or a defect
            if which not in self._left_out_before:
                log.exception("the figures %s cannot be converted to points of OTLP", which)
            self._left_out.add(which)

    def _run(self, figures: Figures, ended: Collection[Run]) -> Part | None:
        # The next start could not use a state that has figures without points.
        check(figures)
        known = self._ledger.enter(figures, ended)
        if known.is_final:
            return None
        ended_run = figures.run if figures.is_final else None
        instance = {_INSTANCE: f"{self._instance}/{figures.run.key}"}
        part = Part({**self._host, **instance, **known.attributes}, ended_run=ended_run, known=known)
        start_ns, time_ns = nanoseconds(known.start), nanoseconds(figures.read_at)
        for total in figures.totals:
            row = self._events.get(total.event)
            if row is None:
                continue
            quality = total.quality
            if total.value is not None:
                now = Counted(known.start, decimal(total.value), time_ns)
                series = of_workload(row), _scoped(row, row.workload)
                excess = self._count(part, known.counters, series, now, start_ns)
                quality = Quality.ESTIMATED if excess and quality is Quality.EXACT else quality
            if quality is not Quality.EXACT:
                _mark(part, metrics.WORKLOAD_INEXACT, time_ns, total.event, quality)
        for level in figures.levels:
            row = self._events.get(level.event)
            if row is not None and level.value is not None:
                name = of_workload(row)
                value = _number(decimal(level.value), name.unit)
                part.points.append(Point(name, _scoped(row, row.workload), None, time_ns, value))
        return part

    def _count(
        self,
        part: Part,
        counters: dict[str, Counted],
        series: tuple[Name, Attributes],
        now: Counted,
        start_ns: int,
    ) -> Decimal:
        """Add the point of a counter. Return by how much a held former value exceeds it, or 0."""
        metric, attributes = series
        name = "\0".join([metric.name, *map(str, attributes.values())])
        next_ = step(counters.get(name), now, start_ns, self._ledger.temporality)
        value = _number(next_.value, metric.unit)
        part.points.append(Point(metric, attributes, next_.start_ns, next_.time_ns, value))
        part.delivered.append((counters, name, next_.kept))
        return next_.excess

    def _add_machine(self, part: Part, machine: MachineReply) -> None:
        start_ns, time_ns = nanoseconds(machine.since), nanoseconds(machine.read_at)
        for use in machine.pools:
            row = self._events.get(use.event)
            if row is None:
                continue
            domain, quality = domain_number(use.domain), use.quality
            if use.value is not None:
                attributes = {
                    f"{PREFIX}domain": domain,
                    f"{PREFIX}pool": str(use.pool),
                    **_scoped(row, row.machine),
                }
                if row.machine.type is Type.GAUGE:
                    value = _number(decimal(use.value), name_of(row.machine).unit)
                    part.points.append(Point(name_of(row.machine), attributes, None, time_ns, value))
                else:
                    now = Counted(machine.since, decimal(use.value), time_ns)
                    series = name_of(row.machine), attributes
                    excess = self._count(part, self._ledger.host, series, now, start_ns)
                    quality = Quality.ESTIMATED if excess and quality is Quality.EXACT else quality
            if quality is not Quality.EXACT:
                _mark(part, metrics.MACHINE_INEXACT, time_ns, domain, use.event, use.pool, quality)

    def _add_sums(self, part: Part, sums: SumsReply) -> None:
        start_ns, time_ns = nanoseconds(sums.since), nanoseconds(sums.read_at)

        def count(metric: Metric, value: Decimal, attributes: Attributes) -> Decimal:
            now = Counted(sums.since, value, time_ns)
            return self._count(part, self._ledger.host, (name_of(metric), attributes), now, start_ns)

        for of in sums.names:
            by: Attributes = {f"{PREFIX}by": str(of.by), f"{PREFIX}name": cut(of.name)}
            for use in of.sums:
                row = self._events.get(use.event)
                if row is None or row.accounted is None:
                    continue
                excess = Decimal(0)
                if use.value is not None:
                    excess = count(row.accounted, decimal(use.value), {**by, **_scoped(row, row.accounted)})
                _add_inexact(part, by, use, float(excess), time_ns)
        for quality, runs in ended_runs(sums).items():
            count(metrics.ENDS, Decimal(runs), {f"{PREFIX}quality": str(quality)})
        count(metrics.ENDS_LOST, Decimal(sums.lost), {})

    def _add_health(self, part: Part, observation: Observation, now_ns: int) -> None:
        for metric, labels, value in health(observation):
            attributes = {f"{PREFIX}{name}": text for name, text in labels.items()}
            part.points.append(Point(name_of(metric), attributes, None, now_ns, float(value)))
        start_ns = nanoseconds(self._since)
        for reason, runs in self._ledger.missing.items():
            series = name_of(MISSING_ENDS), {f"{PREFIX}reason": str(reason)}
            self._count(part, self._ledger.host, series, Counted(self._since, Decimal(runs), now_ns), start_ns)


def _scoped(row: EventMetrics, metric: Metric) -> Attributes:
    return {f"{PREFIX}{metric.labels[-1]}": row.label} if row.label else {}


def _mark(part: Part, metric: Metric, time_ns: int, *values: str) -> None:
    # The first label of the metric of a workload is its key, which the resource has.
    names = metric.labels[-len(values) :]
    attributes = {f"{PREFIX}{name}": str(value) for name, value in zip(names, values, strict=True)}
    part.points.append(Point(name_of(metric), attributes, None, time_ns, 1))


def _add_inexact(part: Part, by: Attributes, use: Sum, excess: float, time_ns: int) -> None:
    attributes = {**by, f"{PREFIX}event": use.event}
    for quality, ratio in inexact_ratios(use, excess):
        of = {**attributes, f"{PREFIX}quality": str(quality)}
        part.points.append(Point(name_of(metrics.ACCOUNTED_INEXACT), of, None, time_ns, ratio))
    if use.unknown_runs:
        point = Point(name_of(metrics.ACCOUNTED_UNKNOWN), attributes, None, time_ns, use.unknown_runs)
        part.points.append(point)


def _number(value: Decimal, unit: str) -> int | float:
    """Return the value of a point: for bytes, cycles and counts an int, which OTLP keeps exactly, up to 64 bits."""
    return float(value) if unit in _FRACTIONAL or value > _MAX_INT else int(value)
