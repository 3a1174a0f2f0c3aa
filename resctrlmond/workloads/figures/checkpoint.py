# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the last readings of a group, by domain. They are its end values if the group is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal

import msgspec

from resctrlmond.resctrl.counters import Kind, Reading, Status, event, parse_value


class LastRead(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last readings of one domain: the kernel's text of each event in ``values``.

    ``time`` is that of the reading (RFC 3339, UTC), "" if the domain was not read since the baseline.
    ``inode`` is that of the domain's directory. ``carried`` has each event that decreased, or had no counter for a
    time, with its count before it restarted from 0; that is 0 if the decrease is too small for a restart. ``known``
    has each event without a number in the last reading, with its last number. ``gaps`` names the events for which a
    reading since the baseline had no number, except if that means that nothing was used.
    """

    time: str
    values: dict[str, str]
    inode: int = 0
    carried: dict[str, int] = msgspec.field(default_factory=dict)
    known: dict[str, int | str] = msgspec.field(default_factory=dict)
    gaps: tuple[str, ...] = ()


class CounterHistory(msgspec.Struct, frozen=True):
    """The history of one counter between baseline and end.

    ``carried``: its count before it restarted from 0, or 0 if it decreased without a restart; None if neither
    happened. ``known``: its last number, None if the last reading has a number. ``has_gap``: a reading had no number.
    """

    carried: int | None = None
    known: int | Decimal | None = None
    has_gap: bool = False


# By domain (the path below mon_data). A domain that went offline keeps its last readings.
Checkpoint = dict[str, LastRead]

# Created by the import: if two threads use a type for the first time at once, msgspec crashes, because one of them
# sees the incomplete description of the type that the other one creates.
_DECODER = msgspec.json.Decoder(Checkpoint)


def of_baseline(readings: Iterable[Reading], inodes: Mapping[str, int]) -> Checkpoint:
    """Return the readings of the baseline as a checkpoint without times, for comparison with later readings."""
    return {
        domain: LastRead("", {reading.event: reading.value.text for reading in of}, inodes.get(domain, 0))
        for domain, of in _by_domain(readings).items()
    }


def with_readings(
    before: Checkpoint, time: str, readings: Iterable[Reading], baseline: Callable[[], Checkpoint] | None = None
) -> Checkpoint:
    """Return the checkpoint ``before``, updated by ``readings`` that were taken at ``time``.

    ``baseline`` returns the baseline as a checkpoint. It is called only if a domain was not read since then.
    """
    domains = _by_domain(readings)
    earlier = before
    if any(domain not in before or not before[domain].time for domain in domains):
        at_baseline = baseline() if baseline else {}
        earlier = {domain: _with_gaps(last, before.get(domain)) for domain, last in at_baseline.items()}
        earlier |= {domain: last for domain, last in before.items() if last.time or domain not in earlier}
    return before | {
        domain: LastRead(
            time,
            {reading.event: reading.value.text for reading in of},
            of[0].inode,
            *_carried(earlier.get(domain) or LastRead("", {}), of),
        )
        for domain, of in domains.items()
    }


def newest(last_read: Checkpoint, readings: Iterable[Reading]) -> list[Reading]:
    """Return readings that may be older than the checkpoint ``last_read``, with its count in place of each older one.

    Both were taken at about the same time. A lower count is older. If a counter has restarted, a higher one may be
    older too, and would be added to the count before the restart, which is the same.
    """
    return [_newer(reading, last_read.get(reading.domain)) for reading in readings]


def _newer(reading: Reading, last: LastRead | None) -> Reading:
    if last is None or reading.event not in last.values:
        return reading
    inode = last.inode or reading.inode
    same = msgspec.structs.replace(reading, inode=inode)
    if event(reading.event).kind is not Kind.CUMULATIVE:
        return same
    known, number = parse_value(last.values[reading.event]), reading.value.number
    has_restarted = reading.event in last.carried or (reading.inode and inode != reading.inode)
    is_lower = number is not None and known.number is not None and number < known.number
    return msgspec.structs.replace(same, value=known) if has_restarted or is_lower else same


def with_gaps(before: Checkpoint, gaps: Mapping[str, Iterable[str]]) -> Checkpoint:
    """Return the checkpoint with additional ``gaps``: the events to add, by domain."""
    return before | {
        domain: _with_gaps(before.get(domain) or LastRead("", {}), LastRead("", {}, gaps=tuple(more)))
        for domain, more in gaps.items()
    }


def new_gaps(
    before: Checkpoint, after: Checkpoint, readings: Iterable[Reading], baseline: Iterable[Reading]
) -> dict[str, set[str]]:
    """Return, by domain, the events that cannot be exact because of ``readings``.

    ``before`` and ``after`` are the checkpoints without and with these readings. Domains whose events are all in the
    gaps of ``before`` are left out.
    """
    never_active = {
        (reading.domain, reading.event) for reading in baseline if reading.value.is_never_active(event(reading.event))
    }
    found: dict[str, set[str]] = {}
    for reading in readings:
        is_gap = reading.event in after[reading.domain].gaps
        # The event had a number, so it was used, even if it reads "never active" at the end.
        was_active = reading.value.number is not None and (reading.domain, reading.event) in never_active
        if is_gap or was_active:
            found.setdefault(reading.domain, set()).add(reading.event)
    nothing = LastRead("", {})
    return {domain: events for domain, events in found.items() if events - {*before.get(domain, nothing).gaps}}


def _with_gaps(last: LastRead, other: LastRead | None) -> LastRead:
    gaps = {*last.gaps, *(other.gaps if other else ())}
    return msgspec.structs.replace(last, gaps=tuple(sorted(gaps)))


def _by_domain(readings: Iterable[Reading]) -> dict[str, list[Reading]]:
    domains: dict[str, list[Reading]] = {}
    for reading in readings:
        domains.setdefault(reading.domain, []).append(reading)
    return domains


def _carried(
    last: LastRead, readings: Iterable[Reading]
) -> tuple[dict[str, int], dict[str, int | str], tuple[str, ...]]:
    """Return ``LastRead.carried``, ``LastRead.known`` and ``LastRead.gaps`` after these readings."""
    carried, known, gaps = dict(last.carried), dict[str, int | str](), set(last.gaps)
    for reading in readings:
        of = event(reading.event)
        if of.kind is not Kind.CUMULATIVE:
            continue
        number = parse_value(last.values.get(reading.event, "")).number
        if number is None:
            number = parse_value(str(last.known.get(reading.event, ""))).number
        if reading.value.number is None and (number is not None or not reading.value.is_never_active(of)):
            gaps.add(reading.event)
        if number is not None and reading.value.number is not None and reading.value.number < number:
            # A counter that only counts never decreases, so the total is not exact, however small the decrease is.
            carried.setdefault(reading.event, 0)
        if not of.restarts:
            if reading.value.number is None and number is not None:
                known[reading.event] = f"{number:f}" if isinstance(number, Decimal) else number
            continue
        # On AMD, a counter that is given to another group reads "Unavailable", and restarts from 0 when it returns.
        counted = int(number or 0)
        # A change of the counter mode creates no new directory, so only the value shows the reset. A smaller decrease
        # may be noise: handled as a reset, it would count the earlier use twice.
        went_back = reading.value.number is not None and reading.value.number * 2 < counted
        is_another = last.inode and reading.inode and last.inode != reading.inode
        # Without a hardware counter (AMD's ABMC) nothing is counted, and the next counter starts from 0. This is
        # recorded even if the event had no number before.
        is_taken = reading.value.status is Status.UNASSIGNED
        if went_back or is_another or is_taken:
            carried[reading.event] = carried.get(reading.event, 0) + counted
            counted = 0
        if reading.value.number is None and counted:
            known[reading.event] = counted
    return carried, known, tuple(sorted(gaps))


def histories(checkpoint: Checkpoint) -> dict[tuple[str, str], CounterHistory]:
    """Return the history of each counter with a restart, a gap or a missing number, by domain and event."""
    return {
        (domain, name): CounterHistory(
            last.carried.get(name), parse_value(str(last.known.get(name, ""))).number, name in last.gaps
        )
        for domain, last in checkpoint.items()
        for name in {*last.carried, *last.known, *last.gaps}
    }


def readings_of(checkpoint: Checkpoint) -> list[Reading]:
    """Return all readings of the checkpoint, in order of domain and event."""
    return [
        Reading(domain, event, parse_value(text))
        for domain, last in sorted(checkpoint.items())
        for event, text in sorted(last.values.items())
    ]


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the content of the checkpoint's file: one JSON object and a newline."""
    return msgspec.json.encode(checkpoint) + b"\n"


def decode(data: bytes) -> Checkpoint:
    """Return the checkpoint in the content of its file; {} if the content is damaged."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
