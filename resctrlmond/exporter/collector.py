# SPDX-License-Identifier: Apache-2.0
"""Convert what the daemon reports to metrics. A figure that has no number is left out; it is never 0.

A figure can also have the name that another exporter gives to it (``Names``). These names have no mark for what is
not exact, so the marks of resctrlmond are exported with the figures under any name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from resctrlmond.api.monotone import Monotone
from resctrlmond.api.types import MachineReply, NameSums, Sum, SumsReply, Usage, Workload
from resctrlmond.exporter import metrics
from resctrlmond.exporter.conversion import domain_digits, domain_number, ended_runs, inexact_ratios, seconds
from resctrlmond.exporter.failures import Failures
from resctrlmond.exporter.families import Families, cut
from resctrlmond.exporter.health import add_health
from resctrlmond.exporter.metrics import EventMetrics, Names, Type
from resctrlmond.exporter.source import VERBS, Observation, Source
from resctrlmond.workloads.model.names import names_of
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import is_pod_uid

log = logging.getLogger(__name__)

# The texts of thousands of workloads take tens of MiB together. Clients can ask for each of ten forms.
_MAX_TEXTS = 12

T = TypeVar("T")

# The start of the process is computed from /proc/stat, which the unit hides.
_PROCESS_LEFT_OUT = "process_start_time_seconds"


class Exporter:
    """Collects the metrics of ``source``. Thread-safe.

    ``events``: patterns of the events to export. ``node``: the name of this host in Kubernetes, which is a label of
    the metrics with the names of nri-resctrl-mon.
    """

    def __init__(
        self,
        source: Source,
        events: Iterable[str] = metrics.DEFAULT_EVENTS,
        names: Iterable[Names] = metrics.DEFAULT_NAMES,
        node: str = "",
    ) -> None:
        self.failures = Failures()
        # By the option of the file: when the first of its certificates expires (seconds since the epoch).
        self.certificates: Mapping[str, float] = {}
        self._source = source
        self._events = metrics.selected(events)
        self._names = frozenset(names)
        self._node = node
        self._process = ProcessCollector(registry=None)
        # Held while one observation is converted: the metrics of thousands of workloads take tens of MiB.
        self._guard = threading.Lock()
        self._of_workloads, self._of_machine, self._of_sums = Monotone[float](), Monotone[float](), Monotone[float]()
        # By key: the start of the run, and the class that it had at first.
        self._first_classes: dict[str, tuple[str, str]] = {}
        self._has_failed = False
        # The series of calls that was converted last, and its texts, by the calls without a reply and the form.
        self._series: object = None
        self._texts: dict[tuple[frozenset[str], str], bytes] = {}

    def render(
        self,
        encode: Callable[[CollectorRegistry], T],
        timeout_s: float,
        *,
        with_start_times: bool,
        with_process: bool = True,
    ) -> T:
        """Read from the daemon, for ``timeout_s`` at most, and return what ``encode`` makes of all metrics.

        ``with_process``: with the memory, CPU time, descriptors, failed connections and certificates of the exporter.
        """
        observation = self._source.observe(timeout_s)
        with self._guard:
            return self._encoded(observation, encode, with_start_times=with_start_times, with_process=with_process)

    def text(
        self, form: str, encode: Callable[[CollectorRegistry], bytes], timeout_s: float, *, with_start_times: bool
    ) -> bytes:
        """Return all metrics as ``render`` does, with one conversion for all scrapes that share a reading.

        ``form``: the name of what ``encode`` returns. Each user of the host can send many requests at once: with a
        conversion for each of them, a scrape of Prometheus would wait for longer than its time-out.
        """
        observation = self._source.observe(timeout_s)
        with self._guard:
            series, missing = observation.replies
            if self._series is not series:
                self._series, self._texts = series, {}
            text = self._texts.get((missing, form))
            if text is None:
                text = self._encoded(observation, encode, with_start_times=with_start_times, with_process=True)
                if len(self._texts) == _MAX_TEXTS:
                    del self._texts[next(iter(self._texts))]
                self._texts[missing, form] = text
            return text

    def _encoded(
        self,
        observation: Observation,
        encode: Callable[[CollectorRegistry], T],
        *,
        with_start_times: bool,
        with_process: bool,
    ) -> T:
        registry = CollectorRegistry(auto_describe=False)
        own = (*self._process.collect(), *self._of_server(with_start_times)) if with_process else ()
        shown = [family for family in own if family.name != _PROCESS_LEFT_OUT]
        registry.register(_Scrape(lambda: [*self._collect(observation, with_start_times=with_start_times), *shown]))
        return encode(registry)

    def _of_server(self, with_start_times: bool) -> Iterable[Family]:
        families = Families(with_start_times=with_start_times)
        for failure, count in self.failures.counts().items():
            families.counter(metrics.CONNECTIONS_FAILED, (failure,), count, self.failures.since)
        for file, expiry in self.certificates.items():
            families.gauge(metrics.CERTIFICATE_EXPIRY, expiry, file)
        return families

    def _collect(self, observation: Observation, *, with_start_times: bool) -> Iterable[Family]:
        try:
            families = self._converted(observation, with_start_times=with_start_times)
        except Exception:  # the figures of a daemon of another version, or a defect: a scrape always succeeds
            if not self._has_failed:
                log.exception("what resctrlmond reports cannot be converted to metrics")
            self._has_failed = True
            nothing = Observation(errors=dict.fromkeys(VERBS, ""), duration_s=observation.duration_s)
            families = self._converted(nothing, with_start_times=with_start_times)
        else:
            self._has_failed = False
        return families

    def _converted(self, observation: Observation, *, with_start_times: bool) -> Families:
        families = Families(with_start_times=with_start_times)
        add_health(families, observation)
        if observation.usages is not None:
            self._add_workloads(families, observation.usages)
        if observation.machine is not None:
            self._add_machine(families, observation.machine)
        if observation.sums is not None and Names.RESCTRLMOND in self._names:
            self._add_sums(families, observation.sums)
        return families

    def _add_workloads(self, families: Families, usages: Sequence[Usage]) -> None:
        for usage in usages:
            if Names.RESCTRLMOND in self._names:
                _add_names(families, usage.workload)
                self._add_cpu_time(families, usage.workload)
            if self._names_of(usage.workload):
                self._add_usage(families, usage)
        keys = {usage.workload.key for usage in usages}
        self._of_workloads.forget_unless(lambda series: series[1][0] in keys)
        self._first_classes = {key: first for key, first in self._first_classes.items() if key in keys}

    def _names_of(self, workload: Workload) -> frozenset[Names]:
        """Return whose names the figures of a workload have: nri-resctrl-mon has only pods, node_exporter none."""
        names = self._names - {Names.NODE_EXPORTER}
        return names if is_pod_uid(workload.key) else names - {Names.NRI_RESCTRL_MON}

    def _add_cpu_time(self, families: Families, workload: Workload) -> None:
        started = workload.created_at or ""
        for place, used_ns in (("inside", workload.cpu_time_ns), ("outside", workload.cpu_time_outside_ns)):
            if used_ns is not None:
                labels = (workload.key, place)
                value, _ = self._of_workloads.next((metrics.WORKLOAD_CPU.name, labels), started, used_ns / 1e9)
                families.counter(metrics.WORKLOAD_CPU, labels, value, seconds(started))

    def _add_usage(self, families: Families, usage: Usage) -> None:
        workload = usage.workload
        key, started = workload.key, workload.created_at or ""
        start = seconds(started) if started else None
        names, held = self._names_of(workload), set()
        for use in usage.domains or ():
            row = self._events.get(use.event)
            if row is None or use.value is None:
                continue
            labels = (key, domain_number(use.domain), *filter(None, (row.label,)))
            value = float(use.value)
            if row.workload.type is Type.COUNTER:
                value, is_held = self._of_workloads.next((row.workload.name, labels), started, value)
                if is_held:
                    held.add(use.event)
            if Names.RESCTRLMOND in names:
                families.figure(row.workload, labels, value, start)
            if Names.NRI_RESCTRL_MON in names:
                families.figure(row.pod, self._pod_labels(workload, use.domain), value)
        for total in usage.totals:
            if total.event not in self._events:
                continue
            if total.quality is not Quality.EXACT:
                families.gauge(metrics.WORKLOAD_INEXACT, 1, key, total.event, total.quality)
            elif total.event in held:
                families.gauge(metrics.WORKLOAD_INEXACT, 1, key, total.event, Quality.ESTIMATED)

    def _pod_labels(self, workload: Workload, domain: str) -> tuple[str, ...]:
        """Return the labels of nri-resctrl-mon, with the class that the run had at first.

        With the present class, a move would split the series of a pod. If the pod moved back, the former series would
        rise by the use that the other series has counted already.
        """
        run = workload.created_at or "", workload.class_
        first = self._first_classes.setdefault(workload.key, run)
        if first[0] != run[0]:
            first = self._first_classes[workload.key] = run
        return (workload.key, domain_digits(domain), domain, first[1], "pod", self._node)

    def _has_machine(self, row: EventMetrics) -> bool:
        return Names.RESCTRLMOND in self._names or (Names.NODE_EXPORTER in self._names and row.node is not None)

    def _add_machine(self, families: Families, machine: MachineReply) -> None:
        start = seconds(machine.since)
        if Names.RESCTRLMOND in self._names:
            families.gauge(metrics.MACHINE_START, start)
        # The values of all pools of an event in a domain.
        whole: dict[tuple[str, str], list[float | None]] = {}
        for use in machine.pools:
            row = self._events.get(use.event)
            if row is None or not self._has_machine(row):
                continue
            domain, value, is_held = domain_number(use.domain), None, False
            if use.value is not None:
                labels = (domain, use.pool, *filter(None, (row.label,)))
                value = float(use.value)
                if row.machine.type is Type.COUNTER:
                    value, is_held = self._of_machine.next((row.machine.name, labels), machine.since, value)
                if Names.RESCTRLMOND in self._names:
                    families.figure(row.machine, labels, value, start)
            whole.setdefault((use.event, domain), []).append(value)
            quality = Quality.ESTIMATED if is_held and use.quality is Quality.EXACT else use.quality
            if quality is not Quality.EXACT:
                families.gauge(metrics.MACHINE_INEXACT, 1, domain, use.event, use.pool, quality)
        if Names.NODE_EXPORTER in self._names:
            self._add_whole(families, whole)

    def _add_whole(self, families: Families, whole: dict[tuple[str, str], list[float | None]]) -> None:
        """Add the sums of all pools, as node_exporter names them. One that lacks the value of a pool is left out."""
        for (event, domain), values in whole.items():
            row = self._events[event]
            known = [value for value in values if value is not None]
            if row.node is not None and len(known) == len(values):
                families.figure(row.node, (domain, *filter(None, (row.label,))), sum(known))

    def _add_sums(self, families: Families, sums: SumsReply) -> None:
        start = seconds(sums.since)
        families.gauge(metrics.ACCOUNTED_START, start)

        def count(metric: metrics.Metric, value: float, *labels: str) -> float:
            """Add the sample of a counter. Return by how much a held former value exceeds it, or 0."""
            shown, _ = self._of_sums.next((metric.sample, labels), sums.since, value)
            families.counter(metric, labels, shown, start)
            return shown - value

        for of in sums.names:
            for use in of.sums:
                row = self._events.get(use.event)
                if row is None or row.accounted is None:
                    continue
                excess = 0.0
                if use.value is not None:
                    labels = (of.by, cut(of.name), *filter(None, (row.label,)))
                    excess = count(row.accounted, float(use.value), *labels)
                _add_inexact(families, of, use, excess)
        for quality, runs in ended_runs(sums).items():
            count(metrics.ENDS, runs, quality)
        count(metrics.ENDS_LOST, sums.lost)


class _Scrape(Collector):
    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families()


def _add_inexact(families: Families, of: NameSums, use: Sum, excess: float) -> None:
    labels = (of.by, cut(of.name), use.event)
    for quality, ratio in inexact_ratios(use, excess):
        families.gauge(metrics.ACCOUNTED_INEXACT, ratio, *labels, quality)
    if use.unknown_runs:
        families.gauge(metrics.ACCOUNTED_UNKNOWN, use.unknown_runs, *labels)


def _add_names(families: Families, workload: Workload) -> None:
    known = names_of(workload.attributes, (member.cgroup for member in workload.members))
    names = {
        "class": workload.class_,
        "kind": workload.members[0].kind if workload.members else "",
        "namespace": known.namespace,
        "pod": known.pod,
        "container": known.container,
        "unit": known.unit,
        "user": known.user,
        "profile": workload.profile,
        "generation": str(workload.generation),
    }
    families.info(metrics.WORKLOAD, workload.key, *(names[name] for name in metrics.WORKLOAD_NAMES))
    if workload.created_at is not None:
        families.gauge(metrics.WORKLOAD_START, seconds(workload.created_at), workload.key)
    if workload.completed_at is not None:
        families.gauge(metrics.WORKLOAD_END, seconds(workload.completed_at), workload.key)
