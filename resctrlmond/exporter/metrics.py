# SPDX-License-Identifier: Apache-2.0
"""The names of all exported metrics, with their labels and texts. resctrlmon-exporter(8) lists them.

A new metric is declared here, and gets its value in ``collector``, or in ``health`` if it is about the service.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.resctrl.kinds import Kind

PREFIX = "resctrlmond_"


class Names(enum.StrEnum):
    """The program whose names the figures have, as ``--names`` selects it."""

    RESCTRLMOND = "resctrlmond"
    # The NRI plugin of containers/nri-plugins.
    NRI_RESCTRL_MON = "nri-resctrl-mon"
    # The collector "resctrl" that is proposed for node_exporter.
    NODE_EXPORTER = "node-exporter"


DEFAULT_NAMES = (Names.RESCTRLMOND,)


class Type(enum.Enum):
    """The type of a metric. The names of samples end in "_total" for a counter, and in "_info" for INFO."""

    COUNTER = "counter"
    GAUGE = "gauge"
    INFO = "info"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. ``name`` lacks the prefix and the suffix of its type, and ends in ``unit``, if there is one."""

    name: str
    type: Type
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    prefix: str = PREFIX

    @property
    def family(self) -> str:
        """Return its name, without the suffix of its type."""
        return self.prefix + self.name

    @property
    def sample(self) -> str:
        """Return the name of its samples."""
        suffix = {Type.COUNTER: "_total", Type.INFO: "_info", Type.GAUGE: "", Type.HISTOGRAM: ""}[self.type]
        return self.family + suffix


@dataclass(frozen=True, slots=True)
class EventMetrics:
    """The metrics of one event of the kernel. ``label`` is the value of their last label, "" if they have none.

    ``accounted`` is that of the sums; None for a gauge, which has none. ``text`` describes the event. ``pod`` is that
    of a pod by the name of nri-resctrl-mon, and ``node`` that of the whole machine by the name of node_exporter; None
    if it has none.
    """

    workload: Metric
    machine: Metric
    accounted: Metric | None
    label: str
    text: str
    pod: Metric
    node: Metric | None


# The events that are exported unless others are chosen: what each costs a workload is one series for each domain.
DEFAULT_EVENTS = ("llc_occupancy", "mbm_*", "core_energy", "activity")

_SCOPE = "scope=total includes scope=local, so do not add them up"
# An event, its metric without the unit, the last label with its value, and the text. Each event is one row.
_EVENTS = (
    ("llc_occupancy", "llc_occupancy", "", "", "last-level cache that is held now"),
    ("mbm_total_bytes", "memory_bandwidth", "scope", "total", f"memory traffic; {_SCOPE}"),
    ("mbm_local_bytes", "memory_bandwidth", "scope", "local", f"memory traffic; {_SCOPE}"),
    ("core_energy", "core_energy", "", "", "energy of the core logic with its L1 and L2"),
    ("activity", "core_activity", "", "", "dynamic capacitance that the core logic switched"),
    ("unhalted_core_cycles", "core", "clock", "core", "cycles while not halted, by core or reference clock"),
    ("unhalted_ref_cycles", "core", "clock", "reference", "cycles while not halted, by core or reference clock"),
    ("uops_retired", "uops_retired", "", "", "micro-operations retired"),
    ("stalls_llc_hit", "llc_stall", "served", "hit", "stalls on a hit or a miss of the last-level cache"),
    ("stalls_llc_miss", "llc_stall", "served", "miss", "stalls on a hit or a miss of the last-level cache"),
    ("c1_res", "core_idle", "state", "c1", "residency in C1 or C6"),
    ("c6_res", "core_idle", "state", "c6", "residency in C1 or C6"),
)
# The metrics of nri-resctrl-mon with their units. That of another event has the name of the event after "perf_".
_OF_NRI_RESCTRL_MON = {
    "llc_occupancy": "l3_llc_occupancy_bytes",
    "mbm_total_bytes": "l3_mbm_bytes",
    "mbm_local_bytes": "l3_mbm_local_bytes",
    "core_energy": "perf_core_energy_joules",
    "activity": "perf_activity_farads",
}
# The events of the proposed collector of node_exporter. Apart from the prefix, its names are those of resctrlmond.
OF_NODE_EXPORTER = ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")
_POD_LABELS = (
    *("k8s_pod_uid", "domain_id", "domain_name"),
    *("resctrl_control_group", "resctrl_group_source", "k8s_node_name"),
)


def _of_event(event: str, name: str, label: str, value: str, text: str) -> EventMetrics:
    of = EVENTS[event]
    named = f"{name}_{of.unit}" if of.unit else name
    labels = (label,) if label else ()
    is_gauge = of.kind is Kind.GAUGE
    type_ = Type.GAUGE if is_gauge else Type.COUNTER
    by_workload = f"Of a workload in a domain{'' if is_gauge else ', since its baseline'}: {text}."
    by_pool = f"Of a pool of the machine in a domain{'' if is_gauge else ', since the pools began'}: {text}."
    by_name = f"Of all workloads of a name since the boot, ended ones included: {text}."
    by_pod = f"Event {event} of a pod in a domain{'' if is_gauge else ', since its baseline'}."
    of_node = f"Of the whole machine in a domain{'' if is_gauge else ', since the pools began'}: {text}."
    accounted = Metric(f"accounted_{named}", Type.COUNTER, by_name, ("by", "name", *labels), of.unit)
    pod = _OF_NRI_RESCTRL_MON.get(event, f"perf_{event}")
    pod_unit = of.unit if pod.endswith(f"_{of.unit}") else ""
    node = Metric(named, type_, of_node, ("domain", *labels), of.unit, "node_resctrl_")
    return EventMetrics(
        Metric(named, type_, by_workload, ("key", "domain", *labels), of.unit),
        Metric(f"machine_{named}", type_, by_pool, ("domain", "pool", *labels), of.unit),
        None if is_gauge else accounted,
        value,
        text,
        Metric(pod, type_, by_pod, _POD_LABELS, pod_unit, prefix=""),
        node if event in OF_NODE_EXPORTER else None,
    )


EVENT_METRICS = {row[0]: _of_event(*row) for row in _EVENTS}


def selected(patterns: Iterable[str]) -> dict[str, EventMetrics]:
    """Return the events whose names match one of the patterns (fnmatch)."""
    known = list(patterns)
    return {
        event: row
        for event, row in EVENT_METRICS.items()
        if any(fnmatch.fnmatchcase(event, pattern) for pattern in known)
    }


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name, Type.GAUGE, text, labels, unit)


WORKLOAD_NAMES = ("class", "kind", "namespace", "pod", "container", "unit", "user", "profile", "generation")
WORKLOAD = Metric("workload", Type.INFO, "The names of a workload.", ("key", *WORKLOAD_NAMES))
WORKLOAD_START = _gauge(
    "workload_start_time_seconds", "When the baseline of the workload was read.", "key", unit="seconds"
)
WORKLOAD_END = _gauge(
    "workload_end_time_seconds",
    "When the end values of an ended workload were read.",
    "key",
    unit="seconds",
)
WORKLOAD_INEXACT = _gauge(
    "workload_inexact", "1 for each event of a workload that is not exact.", "key", "event", "quality"
)
WORKLOAD_CPU = Metric(
    "workload_cpu_seconds",
    Type.COUNTER,
    "CPU time in the control groups of a workload, in its groups (place=inside) and outside of them (place=outside).",
    ("key", "place"),
    "seconds",
)

MACHINE_START = _gauge("machine_start_time_seconds", "When the pools of the machine began.", unit="seconds")
MACHINE_INEXACT = _gauge(
    "machine_inexact",
    "1 for each event of a pool and domain that is not exact.",
    "domain",
    "event",
    "pool",
    "quality",
)

ACCOUNTED_START = _gauge("accounted_start_time_seconds", "When the sums of all workloads began.", unit="seconds")
ACCOUNTED_INEXACT = _gauge(
    "accounted_inexact_ratio",
    "The part of a sum that is late or estimated, from 0 to 1.",
    *("by", "name", "event", "quality"),
)
ACCOUNTED_UNKNOWN = _gauge(
    "accounted_unknown_runs", "The runs whose use is missing in a sum.", *("by", "name", "event")
)
ENDS = Metric(
    "ends", Type.COUNTER, "The runs that ended since the boot, by the worst quality of their totals.", ("quality",)
)
ENDS_LOST = Metric("ends_lost", Type.COUNTER, "The runs that ended since the boot and had lost a group.")

UP = _gauge("up", "Whether resctrlmond answered.")
BUILD = Metric("build", Type.INFO, "The version of resctrlmond.", ("version",))
MOUNTED = _gauge("mounted", "Whether resctrl is mounted.")
SIMULATION = _gauge("simulation", "Whether the figures are those of a simulation.")
RMIDS = _gauge("rmids", "The RMIDs of a monitoring resource, for all programs.", "resource")
RMIDS_USED = _gauge("rmids_used", "The RMIDs in use, by owner: workload, foreign or class.", "owner")
RMIDS_FREE = _gauge("rmids_free", "The RMIDs not in use. Some of them may be in limbo.")
RMIDS_IN_LIMBO = _gauge(
    "rmids_in_limbo", "Whether pending workloads wait for RMIDs in limbo. Absent if no workload waits."
)
WORKLOADS = _gauge("workloads", "The workloads in a state; ended ones for snapshot_ttl.", "state")
PENDING_OLDEST = _gauge(
    "pending_oldest_seconds", "How long the oldest pending workload has waited; 0 if none waits.", unit="seconds"
)
UNWATCHED = _gauge("unwatched_containers", "The containers in no group because of their profile.", "profile")
UNWATCHED_UNITS = _gauge("unwatched_units", "The systemd units in no group because of their profile.", "profile")
FOREIGN = _gauge("foreign_groups", "The monitoring groups of other programs.")
UNREADABLE = _gauge("workloads_unreadable", "The workloads that could not be read.")
BANDWIDTH_MODE = _gauge("bandwidth_mode", "1 for the way in which RMIDs get bandwidth counters.", "mode")
ASSIGNABLE = _gauge("bandwidth_assignable", "The assignable bandwidth counters of an L3 cache.", "domain")
ASSIGNABLE_FREE = _gauge(
    "bandwidth_assignable_free", "The assignable bandwidth counters of an L3 cache that are free.", "domain"
)
PROBLEMS = _gauge("problems", "The problems that resctrlctl status lists.")

CALL_DURATION = Metric(
    "call_duration_seconds",
    Type.HISTOGRAM,
    "How long resctrlmond took for calls since its start; those of hooks with the time in the queue.",
    ("calls",),
    "seconds",
)

EXPORTER_BUILD = Metric("exporter_build", Type.INFO, "The version of resctrlmon-exporter.", ("version",))
READ_SUCCESS = _gauge("exporter_read_success", "Whether the call of resctrlmond succeeded.", "verb")
READ_DURATION = _gauge(
    "exporter_read_duration_seconds", "How long the calls of resctrlmond took for this scrape.", unit="seconds"
)
CONNECTIONS_FAILED = Metric(
    "exporter_connections_failed",
    Type.COUNTER,
    "The connections to the exporter that got no reply.",
    ("reason",),
)
CERTIFICATE_EXPIRY = _gauge(
    "exporter_certificate_expiry_time_seconds",
    "When the first of the certificates that the exporter read from a file expires.",
    "option",
    unit="seconds",
)
