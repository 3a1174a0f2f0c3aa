# SPDX-License-Identifier: Apache-2.0
"""What a workload used: from its files and, while its groups stand, from the live counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from resctrlmond.groups import checkpoint
from resctrlmond.groups.accounting import Quality, Total, added, totals, worst
from resctrlmond.groups.record import Earlier, Record, State
from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.resctrl.counters import Reading, Status, Value, added_values, event, parse_value

# The readings of each group of a workload, by its place.
Live = Mapping[str, Sequence[Reading]]


def used(snapshots: Snapshots, record: Record, live: Live, completed_at: str = "") -> list[Total]:
    """The totals over all groups of a workload: up to the ``live`` readings, of the others up to the end values.

    ``completed_at``: when the end values of the first group were read, where its seal is not written yet.
    """
    record = record.as_reported()
    counted = [group for group in record.groups if snapshots.exists(group.place)]
    parts = [
        _late(
            group,
            _so_far(snapshots, group, live[group.place])
            if group.place in live
            else _ended(snapshots, group, "" if group.part else completed_at),
        )
        for group in counted
    ]
    if record.earlier is not None:
        parts.append([_earlier(name, text, record.earlier) for name, text in record.earlier.totals.items()])
    missing = [group for group in record.further if group not in counted] if counted else []
    return [_without(total, missing) for total in added(parts)]


def at_baseline(group: Record, readings: Sequence[Reading]) -> list[Total]:
    """The totals of a workload at the moment when the ``readings`` of its first group are its baseline."""
    group = group.as_reported()
    part = _late(group, totals(readings, readings, group.baseline, caveats=group.caveats))
    if group.earlier is None:
        return part
    return added([part, [_earlier(name, text, group.earlier) for name, text in group.earlier.totals.items()]])


def remembered(snapshots: Snapshots, record: Record) -> dict[str, list[Reading]]:
    """The last readings that are on disk of each group that has no end values yet, by its place.

    A domain that was not there when the group was read last is left out.
    """
    found = {}
    for group in record.groups:
        if not group.state.is_over and not snapshots.is_complete(group.place):
            last_read = snapshots.last_read(group.place)
            newest = max((last.time for last in last_read.values()), default="")
            here = {domain: last for domain, last in last_read.items() if newest and last.time == newest}
            found[group.place] = checkpoint.readings_of(here) or snapshots.begin_values(group.place)
    return found


def summed(live: Live) -> list[Reading]:
    """One reading for each event in each domain, over all groups of a workload."""
    values: dict[tuple[str, str], list[Value]] = {}
    for readings in live.values():
        for reading in readings:
            values.setdefault((reading.domain, reading.event), []).append(reading.value)
    return [Reading(domain, event, added_values(of)) for (domain, event), of in sorted(values.items())]


def _so_far(snapshots: Snapshots, group: Record, live: Sequence[Reading]) -> list[Total]:
    """A domain that is not among the ``live`` readings counts as far as it was last read."""
    now = snapshots.last_read_with(group.place, "", live, group.inodes)
    here = {reading.domain for reading in live}
    missed = {
        domain: f"{domain} went offline, last read at {now[domain].time or group.created_at}"
        for domain in now.keys() - here
    }
    readings = checkpoint.readings_of(now)
    begin = _begin(snapshots, group, readings)
    return totals(begin, readings, group.baseline, missed=missed, past=checkpoint.past_of(now), caveats=group.caveats)


def _ended(snapshots: Snapshots, group: Record, completed_at: str = "") -> list[Total]:
    """By the end values; those that were read before the end are told."""
    end = snapshots.end_values(group.place)
    begin = _begin(snapshots, group, end)
    last_read, completed_at = snapshots.last_read(group.place), completed_at or snapshots.completed_at(group.place)
    missed = {}
    for domain in {reading.domain for reading in begin} | last_read.keys():
        time = last_read[domain].time if domain in last_read else ""
        if group.state is State.LOST and time != completed_at:
            missed[domain] = f"{group.reason}; " + (f"last read at {time}" if time else "never read before")
        elif time and time != completed_at:
            missed[domain] = f"{domain} went offline, last read at {time}"
    past = checkpoint.past_of(last_read)
    return totals(begin, end, group.baseline, missed=missed, past=past, caveats=group.caveats)


def _late(group: Record, totals: list[Total]) -> list[Total]:
    """The totals of a group, each with the reasons for which its baseline is late."""
    return [
        dataclasses.replace(total, reason="; ".join(filter(None, (total.reason, *group.late_reasons))))
        for total in totals
    ]


def _begin(snapshots: Snapshots, group: Record, end: Iterable[Reading]) -> list[Reading]:
    """The begin values; of one that was there at the baseline and is gone, it is known that nobody knows it.

    Taken for a domain that came later, it would count from 0, and with it what others had used before.
    """
    found = snapshots.begin_values(group.place)
    known = {(reading.domain, reading.event) for reading in found}
    gone = [
        Reading(reading.domain, reading.event, Value(Status.ERROR, "no file"))
        for reading in end
        if reading.domain in group.inodes and (reading.domain, reading.event) not in known
    ]
    return found + gone


def _earlier(name: str, text: str, earlier: Earlier) -> Total:
    """What the runs before used, whose group was lost: at least this much."""
    number = parse_value(text).number if text else None
    return Total(event(name), number, Quality.ESTIMATED if text else Quality.UNKNOWN, earlier.reason)


def _without(total: Total, missing: Iterable[Record]) -> Total:
    """The total, which is short of what was used in classes where there was no group."""
    for group in missing:
        reason = f"class {group.class_ or '/'} is not included: {group.reason}"
        reason = f"{total.reason}; {reason}" if total.reason else reason
        total = dataclasses.replace(total, quality=worst(total.quality, Quality.ESTIMATED), reason=reason)
    return total
