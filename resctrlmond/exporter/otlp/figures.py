# SPDX-License-Identifier: Apache-2.0
"""The figures and names of one run of a workload, from ReadAll or from the end that Watch reports."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from resctrlmond.api.types import Change, Level, Total, Usage, Workload
from resctrlmond.exporter.families import cut
from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.workloads.model.changes import ChangeKind
from resctrlmond.workloads.model.names import names_of
from resctrlmond.workloads.model.states import Quality, State
from resctrlmond.workloads.model.validation import is_own_key, is_pod_uid

# The values of attributes of a resource and of a point.
Attributes = Mapping[str, str | int]

_MACHINE_ID = "/etc/machine-id"
_SERVICE = "resctrlmond"
# The kernel's numbers have 20 digits.
_MAX_DIGITS = 40


@dataclass(frozen=True, slots=True)
class Run:
    """The identity of a run of a workload. Generations begin again once a key is no longer listed."""

    key: str
    created_at: str


@dataclass(frozen=True, slots=True)
class Use:
    """The use of an event, without the reason for its quality, which can be long. ``value``: None if unknown."""

    event: str
    value: str | None
    quality: Quality


@dataclass(frozen=True, slots=True)
class Figures:
    """The use of a run until ``read_at``, over all domains. ``is_final``: the run has ended.

    ``continues``: the totals include earlier runs of the key, whose groups were lost. ``start`` is then when the
    workload was first claimed.
    """

    run: Run
    start: str
    read_at: str
    is_final: bool
    continues: bool
    attributes: Attributes
    totals: Sequence[Use]
    levels: Sequence[Level]


def of_usage(usage: Usage) -> Figures | None:
    """Return the figures of a workload that ReadAll lists. None if it has none, or could not be read."""
    workload = usage.workload
    # An interrupted run, which is lost and claimed, continues as the next generation.
    is_final = workload.state.is_over and not (workload.state is State.LOST and workload.claims)
    at = (workload.completed_at if is_final else None) or usage.read_at
    if usage.error is not None or at is None:
        return None
    return _figures(workload, at, usage.totals, () if is_final else usage.levels, is_final=is_final)


def of_end(change: Change) -> Figures | None:
    """Return the final figures of a run that has ended. None for another change, and for a run without figures."""
    workload = change.workload
    if change.change is not ChangeKind.ENDED or workload is None or change.totals is None:
        return None
    return _figures(workload, workload.completed_at or change.at, change.totals, (), is_final=True)


def _figures(
    workload: Workload, at: str, totals: Sequence[Total], levels: Sequence[Level], *, is_final: bool
) -> Figures | None:
    created_at = workload.created_at
    if created_at is None:
        return None
    continues = workload.loss is not None
    start = min([created_at, *(claim.since for claim in workload.claims)]) if continues else created_at
    run, uses = Run(workload.key, created_at), [Use(of.event, of.value, of.quality) for of in totals]
    return Figures(run, start, at, is_final, continues, _attributes(workload), uses, levels)


def _attributes(workload: Workload) -> Attributes:
    """Return the attributes of the resource that the workload is, by the semantic conventions of OpenTelemetry."""
    key, given = workload.key, workload.attributes
    known = names_of(given, (member.cgroup for member in workload.members))
    is_container = any(is_own_key(key, member.id) and member.kind == "container" for member in workload.members)
    pod_uid = key if is_pod_uid(key) and not is_container else given.get("pod.uid", "")
    names = {
        "k8s.pod.uid": pod_uid,
        "k8s.pod.name": known.pod,
        "k8s.namespace.name": known.namespace,
        "container.id": key if is_container else "",
        "k8s.container.name" if pod_uid else "container.name": known.container,
        "systemd.unit.name": known.unit,
        "user.id": known.user,
        "resctrl.profile": workload.profile,
    }
    return {
        "resctrl.workload.key": key,
        "resctrl.workload.generation": workload.generation,
        **{name: cut(value) for name, value in names.items() if value},
    }


def of_host() -> Attributes:
    """Return the attributes of this host, which each resource has."""
    name = socket.gethostname()
    attributes = {"service.name": _SERVICE, "host.name": name}
    try:
        with open(_MACHINE_ID, encoding="ascii") as file:
            attributes["host.id"] = file.read().strip()
    except (OSError, UnicodeError):
        pass  # a container may not have it
    return attributes


def nanoseconds(time: str) -> int:
    """Return a time (RFC 3339) in nanoseconds since the epoch. Raises ValueError if no point can have this time."""
    found = datetime.datetime.fromisoformat(time)
    if found.tzinfo is None:
        raise ValueError(f"{time!r} has no time zone")
    since = found - datetime.datetime.fromtimestamp(0, datetime.UTC)
    passed_ns = (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
    if not 0 <= passed_ns < 2**63:
        raise ValueError(f"{time!r} is not a time of a run")
    return passed_ns


def decimal(text: str) -> Decimal:
    """Return the value of a counter. Raises ValueError if no counter can have it."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is not the value of a counter") from None
    check_value(value)
    return value


def check(figures: Figures) -> None:
    """Raise ValueError if the figures cannot be converted to points. Events without a metric have no points."""
    for time in (figures.start, figures.read_at):
        nanoseconds(time)
    for use in figures.totals:
        if use.value is not None and use.event in EVENT_METRICS:
            decimal(use.value)


def check_value(value: Decimal) -> None:
    """Raise ValueError if no counter can have the value."""
    if not (value.is_finite() and value >= 0 and value.adjusted() < _MAX_DIGITS):
        raise ValueError(f"{value} is not the value of a counter")
