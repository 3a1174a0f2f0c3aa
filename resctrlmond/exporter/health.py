# SPDX-License-Identifier: Apache-2.0
"""Convert the state of the service to metrics: whether it answers, its RMIDs, its problems and its calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

from resctrlmond import __version__
from resctrlmond.api.types import Latency, StatusReply
from resctrlmond.exporter import metrics
from resctrlmond.exporter.conversion import domain_number, seconds
from resctrlmond.exporter.families import Families, cut
from resctrlmond.exporter.source import VERBS, Observation
from resctrlmond.workloads.model.states import State


def health(observation: Observation) -> Iterable[tuple[metrics.Metric, Mapping[str, str], float]]:
    """Return the gauges of the service: each sample with its metric and its labels."""
    families = Families(with_start_times=False)
    add_health(families, observation)
    return families.gauges()


def add_health(families: Families, observation: Observation) -> None:
    """Add the gauges and the other metrics of the service."""
    families.gauge(metrics.UP, observation.status is not None)
    families.info(metrics.EXPORTER_BUILD, __version__)
    for verb in VERBS:
        families.gauge(metrics.READ_SUCCESS, verb not in observation.errors, verb)
    families.gauge(metrics.READ_DURATION, observation.duration_s)
    if observation.status is not None:
        _add_status(families, observation.status)
    if observation.usages is not None:
        states = Counter(usage.workload.state for usage in observation.usages)
        for state in State:
            families.gauge(metrics.WORKLOADS, states[state], state)
        families.gauge(metrics.UNREADABLE, sum(usage.error is not None for usage in observation.usages))
    if observation.unwatched is not None:
        found = Counter((one.is_unit, one.profile) for one in observation.unwatched)
        for (is_unit, profile), count in sorted(found.items()):
            families.gauge(metrics.UNWATCHED_UNITS if is_unit else metrics.UNWATCHED, count, cut(profile))


def _add_status(families: Families, status: StatusReply) -> None:
    families.info(metrics.BUILD, status.version)
    families.gauge(metrics.MOUNTED, status.mounted)
    families.gauge(metrics.SIMULATION, status.simulation is not None)
    families.gauge(metrics.PROBLEMS, len(status.problems))
    for of in status.latencies or ():
        _add_latency(families, of)
    families.gauge(metrics.PENDING_OLDEST, (status.oldest_pending_ms or 0) / 1000)
    if status.in_limbo is not None:
        families.gauge(metrics.RMIDS_IN_LIMBO, status.in_limbo)
    if status.mounted:
        for one in status.capacity:
            families.gauge(metrics.RMIDS, one.rmids, one.resource)
        foreign, classes = len(status.foreign), len(status.classes)
        families.gauge(metrics.FOREIGN, foreign)
        owners = {"workload": status.rmids_used - foreign - classes, "foreign": foreign, "class": classes}
        for owner, used in owners.items():
            families.gauge(metrics.RMIDS_USED, used, owner)
        families.gauge(metrics.RMIDS_FREE, status.rmids - status.rmids_used)
    if status.bandwidth is not None:
        families.gauge(metrics.BANDWIDTH_MODE, 1, status.bandwidth.mode)
        numbers = [domain_number(of.domain) for of in status.bandwidth.counters]
        for of_domain, number in zip(status.bandwidth.counters, numbers, strict=True):
            # Domains of two resources can have the same number.
            label = number if numbers.count(number) == 1 else of_domain.domain
            families.gauge(metrics.ASSIGNABLE, of_domain.counters, label)
            if of_domain.available is not None:
                families.gauge(metrics.ASSIGNABLE_FREE, of_domain.available, label)


def _add_latency(families: Families, of: Latency) -> None:
    bounds = [repr(bound / 1e6) for bound in of.bounds_us] + ["+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(of.counts), strict=True))
    start = seconds(of.since)
    families.histogram(metrics.CALL_DURATION, (of.calls,), buckets, of.sum_us / 1e6, start)
