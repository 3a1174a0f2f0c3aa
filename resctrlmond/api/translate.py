# SPDX-License-Identifier: Apache-2.0
"""Convert workloads, readings and totals to the types of the interfaces. resctrlctl also uses it without a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING

import msgspec

from resctrlmond.api import types
from resctrlmond.api.levels import levels
from resctrlmond.api.text import text
from resctrlmond.resctrl import counters
from resctrlmond.resctrl.bandwidth import Bandwidth
from resctrlmond.resctrl.tree import Found
from resctrlmond.workloads.figures import accounting
from resctrlmond.workloads.figures.caveats import by_event
from resctrlmond.workloads.figures.statements import Statement
from resctrlmond.workloads.figures.verdict import baseline_of, cpu_time
from resctrlmond.workloads.machine import pools
from resctrlmond.workloads.model.latency import BOUNDS_US, Latencies
from resctrlmond.workloads.model.states import NameKind, Quality, worst
from resctrlmond.workloads.model.workload import Member, Workload
from resctrlmond.workloads.profiles.unwatched import UnwatchedContainer
from resctrlmond.workloads.records.sums import NameUse
from resctrlmond.workloads.records.usage import Usage

if TYPE_CHECKING:
    from resctrlmond.workloads.profiles.companions import CompanionStatus


def workload_of(
    workload: Workload,
    path: str | None,
    snapshot: str | None = None,
    companion: CompanionStatus | None = None,
    memory: str = "",
) -> types.Workload:
    """Convert a workload. ``path`` is its directory in resctrl, ``snapshot`` that of its begin and end files, and
    ``companion`` the state of its companion. ``memory`` states what became of its memory settings.
    """
    caveats: dict[str, str] = {}
    for one in workload.groups:
        caveats = {name: why for name, why in by_event(one.doubts).items() if workload.shows(name)} | caveats
    first = workload.first
    baseline, used = baseline_of(workload), cpu_time(workload)
    return types.Workload(
        key=workload.key,
        class_=first.class_,
        classes=tuple(one.class_ for one in workload.groups) if len(workload.groups) > 1 else None,
        state=workload.state,
        reason=workload.reason or None,
        in_limbo=first.in_limbo,
        priority=workload.priority,
        profile=workload.profile,
        profile_source=workload.profile_source,
        events=workload.events or None,
        companion=None if companion is None else types.Companion(**msgspec.structs.asdict(companion)),
        memory=memory,
        path=path,
        observed=workload.is_observed,
        snapshot=snapshot,
        generation=workload.generation,
        part_of=workload.part_of or None,
        nested=workload.nested.count,
        loss=workload.prior_runs.reason if workload.prior_runs else None,
        baseline=worst(baseline, Quality.ESTIMATED) if caveats else baseline,
        caveats=caveats,
        cpu_time_ns=None if used is None else used.inside_ns,
        cpu_time_outside_ns=None if used is None else used.outside_ns,
        claims=tuple(types.Claim(of.owner, of.since, of.ends) for of in workload.claims),
        members=tuple(map(member, workload.members)),
        attributes=workload.attributes,
        created_at=first.created_at or None,
        completed_at=first.completed_at or None,
        created_ns=first.created_ns or None,
        completed_ns=first.completed_ns or None,
    )


# The fields of a member that have the same name in the model.
_MEMBER_FIELDS = tuple(name for name in types.Member.__struct_fields__ if name != "snapshot_folder")


def member(of: Member) -> types.Member:
    """Convert a member of a workload."""
    return types.Member(snapshot_folder=of.folder, **{name: getattr(of, name) for name in _MEMBER_FIELDS})


def proof(of: Statement) -> types.Proof:
    """Convert what is known of a proof."""
    return types.Proof(kind=of.kind, shown=of.shown, text=text(of.text))


def foreign(found: Found) -> types.Foreign:
    """Convert a monitoring group without the daemon's mark."""
    return types.Foreign(class_=text(found.ref.class_), name=text(found.ref.name), path=text(found.path))


def unwatched(of: UnwatchedContainer) -> types.Unwatched:
    """Convert a container, or a unit, that is in no group because of its profile."""
    return types.Unwatched(
        id=of.id,
        name=of.name,
        is_unit=of.is_unit,
        pod=of.pod,
        profile=of.profile,
        profile_source=of.source,
        reason=of.reason,
        since=of.since,
    )


def reading(of: counters.Reading) -> types.Reading:
    """Convert the reading of one event in one domain."""
    event, value = counters.event(of.event), of.value
    return types.Reading(
        domain=of.domain,
        event=of.event,
        kind=event.kind,
        unit=event.unit,
        status=value.status,
        value=value.text if value.status is counters.Status.OK else None,
        text=value.text,
        nested=of.is_part,
    )


def bandwidth(of: Bandwidth) -> types.Bandwidth:
    """Convert the bandwidth mode and the assignable counters."""
    counters = [
        types.Counters(domain=domain, counters=number, available=of.available.get(domain))
        for domain, number in sorted(of.counters.items())
    ]
    return types.Bandwidth(mode=of.mode, can_assign=of.can_assign, counters=tuple(counters))


def total(of: accounting.Total) -> types.Total:
    """Convert the total of one event."""
    return types.Total(
        event=of.event.name,
        unit=of.event.unit,
        value=None if of.number is None else accounting.digits(of.number),
        quality=of.quality,
        reason=of.reason or None,
    )


def latencies(of: Latencies) -> Iterable[types.Latency]:
    """Convert the durations of calls, by kind."""
    for kind, histogram in of.histograms.items():
        counts = tuple(histogram.counts)
        yield types.Latency(calls=kind, since=of.since, bounds_us=BOUNDS_US, counts=counts, sum_us=histogram.sum_us)


def pool_use(of: pools.PoolUse) -> types.PoolUse:
    """Convert what a pool used of one event in one domain."""
    return types.PoolUse(
        pool=of.pool,
        domain=of.domain,
        event=of.event.name,
        kind=of.event.kind,
        unit=of.event.unit,
        value=None if of.number is None else accounting.digits(of.number),
        skew=accounting.digits(of.skew),
        quality=of.quality,
        # It can have the name of a directory, which need not be UTF-8.
        reason=text(of.reason) or None,
    )


def name_sums(grouping: NameKind, of: NameUse) -> types.NameSums:
    """Convert what the workloads of one name used."""
    return types.NameSums(
        by=grouping,
        name=of.name,
        ends=[types.RunCount(quality=quality, runs=of.ends[quality]) for quality in Quality if of.ends.get(quality)],
        running=of.running,
        sums=[_sum(event, amounts) for event, amounts in sorted(of.amounts.items())],
    )


def _sum(event: str, amounts: Mapping[Quality, int | Decimal]) -> types.Sum:
    known = {quality: number for quality, number in amounts.items() if quality is not Quality.UNKNOWN}
    late, estimated = known.get(Quality.LATE), known.get(Quality.ESTIMATED)
    with localcontext(counters.EXACTLY):
        value = accounting.digits(sum(known.values())) if known else None
    return types.Sum(
        event=event,
        unit=counters.event(event).unit,
        value=value,
        # Also 0: what such a run has used may be missing.
        late=None if late is None else accounting.digits(late),
        estimated=None if estimated is None else accounting.digits(estimated),
        unknown_runs=int(amounts.get(Quality.UNKNOWN, 0)),
    )


def domain_uses(totals: Iterable[accounting.Total], readings: Iterable[counters.Reading]) -> list[types.DomainUse]:
    """Convert the parts of the totals in each domain, and the gauges among the readings."""
    found = []
    for whole in totals:
        for domain, part in whole.domains.items():
            value, reason = None if part.number is None else accounting.digits(part.number), part.reason or None
            found.append(
                types.DomainUse(
                    domain=domain,
                    event=part.event.name,
                    kind=part.event.kind,
                    unit=part.event.unit,
                    value=value,
                    quality=part.quality,
                    reason=reason,
                )
            )
    readings = list(readings)
    repeated = counters.repeated((one.domain, one.event) for one in readings)
    # The gauge of a domain includes those of its sub-domains.
    found += [
        types.DomainUse(domain=one.domain, event=one.event, kind=one.kind, unit=one.unit, value=one.value)
        for one in map(reading, readings)
        if one.kind is counters.Kind.GAUGE and not one.nested and (one.domain, one.event) not in repeated
    ]
    return sorted(found, key=lambda use: (use.domain, use.event))


def usage(of: Usage, workload: types.Workload, *, with_domains: bool = False) -> types.Usage:
    """Convert the use of a workload, which is given as ``workload``."""
    return types.Usage(
        workload=workload,
        read_at=of.read_at or None,
        read_ns=of.read_ns or None,
        totals=[total(one) for one in of.totals],
        levels=levels(map(reading, of.readings)),
        domains=domain_uses(of.totals, of.readings) if with_domains else None,
        error=of.error or None,
    )
