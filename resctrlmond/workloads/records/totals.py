# SPDX-License-Identifier: Apache-2.0
"""Totals of a workload, from its files and, for groups that still exist, from the live counters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from resctrlmond.resctrl.counters import Reading, Status, Value, added_values, event, parse_value
from resctrlmond.workloads.figures import caveats, checkpoint
from resctrlmond.workloads.figures.accounting import Total, added, totals
from resctrlmond.workloads.figures.checkpoint import Checkpoint
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.figures.verdict import verdict
from resctrlmond.workloads.model.states import Quality, worst
from resctrlmond.workloads.model.workload import Group, GroupState, PriorRuns, Workload
from resctrlmond.workloads.records.snapshot import Snapshots


class LiveReadings(NamedTuple):
    """Readings of a group that exists, and its checkpoint with them; None if they could not be kept.

    A later checkpoint may have newer readings: compared with those, these look like counters that went back.
    """

    readings: Sequence[Reading]
    checkpoint: Checkpoint | None = None


# The readings of each group of a workload, by its subfolder.
Live = Mapping[str, LiveReadings]
# The time at which the end values of a group were read, and these.
End = tuple[str, Sequence[Reading]]


def used(
    snapshots: Snapshots, workload: Workload, live: Live, end: End | None = None, *, up_to_last: bool = False
) -> list[Total]:
    """Return the totals over all groups: up to the ``live`` readings, or up to the end values for groups without any.

    ``end`` are the end values of the first group, if they are not read from its files. ``up_to_last``: count groups
    that have neither up to their last readings on disk.
    """
    quality, reasons = verdict(workload)

    def with_verdict(total: Total) -> Total:
        # Groups may have the same reason: state it once.
        whys = dict.fromkeys(why for part in (total.reason, *reasons) for why in part.split("; ") if why)
        return dataclasses.replace(total, quality=worst(total.quality, quality), reason="; ".join(whys))

    found = _counted(snapshots, workload, live, end, up_to_last=up_to_last)
    return [total.changed(with_verdict) for total in found] if reasons else found


def _counted(
    snapshots: Snapshots, workload: Workload, live: Live, end: End | None = None, *, up_to_last: bool = False
) -> list[Total]:
    """Return the totals as ``used``, with the quality that they have by their counters alone."""
    counted = [group for group in workload.groups if snapshots.exists(workload.subfolder(group))]
    parts = []
    for group in counted:
        subfolder = workload.subfolder(group)
        if subfolder in live:
            part = _so_far(snapshots, subfolder, group, live[subfolder])
        elif up_to_last and not group.state.is_over and not snapshots.is_complete(subfolder):
            part = _up_to_last(snapshots, subfolder, group)
        else:
            part = _ended(snapshots, subfolder, group, None if group.folder else end)
        parts.append(part)
    if workload.prior_runs is not None:
        parts.append(_of_prior_runs(workload.prior_runs, parts))
    missing = [group for group in workload.groups[1:] if group not in counted] if counted else []
    found = added(parts)
    return [total.changed(lambda one: _without(one, missing)) for total in found] if missing else found


def shown(workload: Workload, found: Iterable[Total]) -> list[Total]:
    """Return the totals without those of events that the workload's profile leaves out."""
    return [total for total in found if workload.shows(total.event.name)]


def by_counters(snapshots: Snapshots, workload: Workload) -> list[Total]:
    """Return the totals up to the last readings on disk, with the quality that they have by their counters alone."""
    return shown(workload, _counted(snapshots, workload, {}, up_to_last=True))


def summed(of_groups: Iterable[Iterable[Reading]]) -> list[Reading]:
    """Return one reading for each event in each domain: the sum over all groups of a workload."""
    values: dict[tuple[str, str], list[Value]] = {}
    for readings in of_groups:
        for reading in readings:
            values.setdefault((reading.domain, reading.event), []).append(reading.value)
    return [Reading(domain, event, added_values(of)) for (domain, event), of in sorted(values.items())]


def _up_to_last(snapshots: Snapshots, subfolder: str, group: Group) -> list[Total]:
    """Return the totals of a group up to its last readings on disk, those of the baseline if there are no later ones.

    A domain that was offline at the group's last reading counts up to its own last reading.
    """
    last_read = snapshots.last_read(subfolder)
    newest = max((last.time for last in last_read.values()), default="")
    if not last_read:
        # A run that begins has no checkpoint: nothing has happened to its counters.
        return _at_baseline(group, snapshots.begin_values(subfolder))
    if not newest:
        return _so_far(snapshots, subfolder, group, LiveReadings(snapshots.begin_values(subfolder)))
    # Compared with itself, a checkpoint shows nothing new.
    here = {domain for domain, last in last_read.items() if last.time == newest}
    return _until(snapshots.begin_values(subfolder), group, last_read, here)


# The totals of groups at their baseline, by all that these depend on. They are 0 or unknown, so groups of which each
# counter has a number, or the same word, have the same totals. Without it, a createRuntime takes 1.04 times the CPU
# time.
_AT_BASELINE: dict[object, list[Total]] = {}
_MOST_AT_BASELINE = 64


def _at_baseline(group: Group, begin: Sequence[Reading]) -> list[Total]:
    key = (
        tuple((one.domain, one.event, one.value if one.value.number is None else None) for one in begin),
        (group.has_begin, group.is_reallocated, tuple(sorted(caveats.by_event(group.doubts).items()))),
    )
    known = _AT_BASELINE.get(key)
    if known is None:
        if len(_AT_BASELINE) >= _MOST_AT_BASELINE:
            _AT_BASELINE.clear()
        known = _AT_BASELINE[key] = _totals(group, begin, begin)
    return known


def _so_far(
    snapshots: Snapshots,
    subfolder: str,
    group: Group,
    live: LiveReadings,
) -> list[Total]:
    """Return the current totals of a group. A domain without a ``live`` reading counts up to its last reading."""
    begin, now = snapshots.begin_values(subfolder), live.checkpoint
    if now is None:
        baseline = functools.partial(checkpoint.of_baseline, begin, group.inodes)
        now = checkpoint.with_readings(snapshots.last_read(subfolder), "", live.readings, baseline)
    return _until(begin, group, now, {reading.domain for reading in live.readings})


def _until(begin: list[Reading], group: Group, now: Checkpoint, here: set[str]) -> list[Total]:
    """Return the totals up to the checkpoint ``now``, in which only the domains that are ``here`` are up to date."""
    missed = {
        domain: Reason.OFFLINE.text(domain=domain, since=f", last read at {now[domain].time or group.created_at}")
        for domain in now.keys() - here
    }
    readings = checkpoint.readings_of(now)
    return _totals(group, _with_lost(begin, group, readings), readings, missed, now)


def _ended(snapshots: Snapshots, subfolder: str, group: Group, end_values: End | None) -> list[Total]:
    """Return the totals of a group up to its end values. Values that are older than the end have a reason."""
    completed_at, end = end_values or (snapshots.completed_at(subfolder), snapshots.end_values(subfolder))
    begin = _with_lost(snapshots.begin_values(subfolder), group, end)
    last_read = snapshots.last_read(subfolder)
    missed = {}
    for domain in {reading.domain for reading in begin} | last_read.keys():
        time = last_read[domain].time if domain in last_read else ""
        if group.state is GroupState.LOST and time != completed_at:
            missed[domain] = Reason.LOST.text(loss=group.reason, time=time or "never")
        elif time and time != completed_at:
            missed[domain] = Reason.OFFLINE.text(domain=domain, since=f", last read at {time}")
    return _totals(group, begin, end, missed, last_read)


def _totals(
    group: Group,
    begin: Iterable[Reading],
    end: Iterable[Reading],
    missed: Mapping[str, str] | None = None,
    last_read: Checkpoint | None = None,
) -> list[Total]:
    """Return the totals of a group between two readings."""
    return totals(
        begin,
        end,
        Quality.EXACT if group.has_begin else Quality.UNKNOWN,
        missed=missed,
        past=checkpoint.histories(last_read) if last_read else None,
        caveats=caveats.by_event(group.doubts),
        is_reallocated=group.is_reallocated,
    )


def _with_lost(begin: list[Reading], group: Group, end: Iterable[Reading]) -> list[Reading]:
    """Return the begin values, with an error in place of each value whose file has disappeared since the baseline.

    Without the error the domain would look like a domain that came online later: it would count from 0, and so
    include the use of other workloads before the baseline.
    """
    known = {(reading.domain, reading.event) for reading in begin}
    gone = [
        Reading(reading.domain, reading.event, Value(Status.ERROR, "no file"))
        for reading in end
        if reading.domain in group.inodes and (reading.domain, reading.event) not in known
    ]
    return begin + gone


def _of_prior_runs(prior_runs: PriorRuns, parts: Iterable[list[Total]]) -> list[Total]:
    """Return the totals of the runs that were lost, as lower bounds.

    An event that only the ``parts`` of this run have is unknown: for example, the files of a lost run were removed.
    """
    names = {total.event.name: "" for part in parts for total in part} | prior_runs.totals
    return [
        Total(
            event(name),
            parse_value(text).number if text else None,
            Quality.ESTIMATED if text else Quality.UNKNOWN,
            prior_runs.reason,
        )
        for name, text in names.items()
    ]


def _without(total: Total, missing: Iterable[Group]) -> Total:
    """Return the total, late, with a reason for each class in which the workload had tasks but no group."""
    for group in missing:
        reason = Reason.NOT_INCLUDED.text(member=f"class {group.class_ or '/'}", cause=group.reason)
        reason = f"{total.reason}; {reason}" if total.reason else reason
        total = dataclasses.replace(total, quality=worst(total.quality, Quality.LATE), reason=reason)
    return total
