# SPDX-License-Identifier: Apache-2.0
"""Records, readings and totals as the doors show them; also by who reads the tree without a daemon."""

from __future__ import annotations

import os

from resctrlmond.api import types
from resctrlmond.groups import accounting
from resctrlmond.groups.accounting import Quality, worst
from resctrlmond.groups.caveats import together
from resctrlmond.groups.record import Member, Record
from resctrlmond.resctrl import counters
from resctrlmond.resctrl.bandwidth import Bandwidth
from resctrlmond.resctrl.tree import Found


def group(record: Record, path: str | None, snapshot: str | None = None) -> types.Group:
    """A record; ``path`` is its directory in resctrl, ``snapshot`` that of its begin and end files, if there."""
    caveats: dict[str, str] = {}
    baseline = record.as_reported().worst_baseline
    for one in record.groups:
        caveats = together(caveats, one.caveats)
    return types.Group(
        key=record.key,
        class_=record.class_,
        classes=tuple(one.class_ for one in record.groups) if record.further else None,
        state=record.state,
        reason=record.reason or None,
        in_limbo=record.in_limbo,
        priority=record.priority,
        path=path,
        snapshot=snapshot,
        generation=record.generation,
        loss=record.earlier.reason if record.earlier else None,
        baseline=worst(baseline, Quality.ESTIMATED) if caveats else baseline,
        caveats=caveats,
        claims=tuple(types.Claim(of.owner, of.since, of.ends) for of in record.claims),
        members=tuple(map(member, record.members)),
        attributes=record.attributes,
        created_at=record.created_at or None,
        completed_at=record.completed_at or None,
    )


def member(of: Member) -> types.Member:
    """A member, without what only the daemon needs of it."""
    return types.Member(
        id=of.id,
        kind=of.kind,
        owner=of.owner,
        pid=of.pid,
        start_time=of.start_time,
        cgroup=of.cgroup,
        started_at=of.started_at,
        ended_at=of.ended_at,
        late=of.late,
        tasks_outside=of.left,
        reason=of.reason,
        snapshot_folder=of.part,
        take_over=of.take_over,
        allow_class_change=of.allow_class_change,
        joining=of.joining,
        include_descendants=of.tree,
        cpu_time_before_ns=of.ran_before_ns,
        descendants_outside=of.descendants,
        dormant=of.awaited,
    )


def text(name: str) -> str:
    """A name that somebody else gave, in which JSON carries no bytes that are no UTF-8: those are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def foreign(found: Found) -> types.Foreign:
    """A monitoring group that does not bear our mark."""
    return types.Foreign(class_=text(found.ref.class_), name=text(found.ref.name), path=text(found.path))


def reading(of: counters.Reading) -> types.Reading:
    """One event in one domain."""
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
    """How bandwidth is counted, and which assignable counters there are."""
    counters = [
        types.Counters(domain=f"mon_L3_{domain:02d}", counters=number, available=of.available.get(domain))
        for domain, number in sorted(of.counters.items())
    ]
    return types.Bandwidth(mode=of.mode, can_assign=of.can_assign, counters=tuple(counters))


def total(of: accounting.Total) -> types.Total:
    """What was used of one event."""
    return types.Total(
        event=of.event.name,
        unit=of.event.unit,
        value=None if of.number is None else accounting.digits(of.number),
        quality=of.quality,
        reason=of.reason or None,
    )
