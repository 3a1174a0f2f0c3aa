# SPDX-License-Identifier: Apache-2.0
"""The values last read of a group, each domain with its time: what remains of it where it goes away unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

import msgspec

from resctrlmond.resctrl.counters import Kind, Reading, Status, event, parse_value


class LastRead(msgspec.Struct, frozen=True, omit_defaults=True):
    """One domain's values, by event, as the kernel gave them; ``time`` is RFC 3339, UTC, "" if they were never read.

    ``inode`` is that of its directory. ``carried`` has the events that began to count from 0 again, or were without a
    counter for a time, with what they had counted when they were last read before that. ``known`` has what events
    that read no number now had counted when they last did. ``gaps`` names the events of which a reading since the
    baseline had no number, and not because nothing was used.
    """

    time: str
    values: dict[str, str]
    inode: int = 0
    carried: dict[str, int] = msgspec.field(default_factory=dict)
    known: dict[str, int | str] = msgspec.field(default_factory=dict)
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a counter from the readings between baseline and end.

    ``carried``: what it had counted when it began from 0 again, None if it did not. ``known``: its last number, None
    if the last reading has one. ``has_gap``: a reading had no number.
    """

    carried: int | None = None
    known: int | Decimal | None = None
    has_gap: bool = False


# By domain, which is the path below mon_data. One that went offline keeps what was read of it last.
Checkpoint = dict[str, LastRead]


def of_baseline(readings: Iterable[Reading], inodes: Mapping[str, int]) -> Checkpoint:
    """The baseline's readings as a checkpoint without a time, for what comes after it to be compared with."""
    return {
        domain: LastRead("", {reading.event: reading.value.text for reading in of}, inodes.get(domain, 0))
        for domain, of in _by_domain(readings).items()
    }


def with_readings(
    before: Checkpoint, time: str, readings: Iterable[Reading], baseline: Callable[[], Checkpoint] | None = None
) -> Checkpoint:
    """The checkpoint after ``readings``, which were taken at ``time``.

    ``baseline`` is asked for the values that domains had at the baseline if they were not read since.
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


def with_gaps(before: Checkpoint, gaps: Mapping[str, Iterable[str]]) -> Checkpoint:
    """The checkpoint with more ``gaps``, by domain."""
    return before | {
        domain: _with_gaps(before.get(domain) or LastRead("", {}), LastRead("", {}, gaps=tuple(more)))
        for domain, more in gaps.items()
    }


def new_gaps(
    before: Checkpoint, after: Checkpoint, readings: Iterable[Reading], baseline: Iterable[Reading]
) -> dict[str, set[str]]:
    """By domain the events that these readings, which led from one checkpoint to the other, keep from being exact."""
    never_active = {
        (reading.domain, reading.event)
        for reading in baseline
        if reading.value.says_never_active(event(reading.event))
    }
    found: dict[str, set[str]] = {}
    for reading in readings:
        is_gap = reading.event in after[reading.domain].gaps
        # It has used something, even if it should say at the end that it never did.
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
    """``LastRead.carried``, ``LastRead.known`` and ``LastRead.gaps`` after these readings."""
    carried, known, gaps = dict(last.carried), dict[str, int | str](), set(last.gaps)
    for reading in readings:
        of = event(reading.event)
        if of.kind is not Kind.CUMULATIVE:
            continue
        number = parse_value(last.values.get(reading.event, "")).number
        if number is None:
            number = parse_value(str(last.known.get(reading.event, ""))).number
        if reading.value.number is None and (number is not None or not reading.value.says_never_active(of)):
            gaps.add(reading.event)
        if not of.restarts:
            if reading.value.number is None and number is not None:
                known[reading.event] = f"{number:f}" if isinstance(number, Decimal) else number
            continue
        # AMD's counters read "Unavailable" as they are handed to another group, and are at 0 when they come back.
        counted = int(number or 0)
        # A mode change makes no new directory; there it is seen by the value alone. What falls by less is noise:
        # taken for a new beginning it would count all that came before twice.
        went_back = reading.value.number is not None and reading.value.number * 2 < counted
        is_another = last.inode and reading.inode and last.inode != reading.inode
        # The event has no hardware counter now (AMD's ABMC), and begins from 0 when it gets one: what is used until
        # then nobody counts. That it was so is to be known also where nothing was read before.
        is_taken = reading.value.status is Status.UNASSIGNED
        if went_back or is_another or is_taken:
            carried[reading.event] = carried.get(reading.event, 0) + counted
            counted = 0
        elif reading.value.number is not None and reading.value.number * 10 < counted * 9:
            # Too much for noise, too little to be sure: nothing is added, and it is not exact.
            carried.setdefault(reading.event, 0)
        if reading.value.number is None and counted:
            known[reading.event] = counted
    return carried, known, tuple(sorted(gaps))


def past_of(checkpoint: Checkpoint) -> dict[tuple[str, str], Past]:
    """What is known of counters from the readings since the baseline, by domain and event."""
    return {
        (domain, name): Past(
            last.carried.get(name), parse_value(str(last.known.get(name, ""))).number, name in last.gaps
        )
        for domain, last in checkpoint.items()
        for name in {*last.carried, *last.known, *last.gaps}
    }


def readings_of(checkpoint: Checkpoint) -> list[Reading]:
    """All values of the checkpoint, in order of domain and event."""
    return [
        Reading(domain, event, parse_value(text))
        for domain, last in sorted(checkpoint.items())
        for event, text in sorted(last.values.items())
    ]


def encode(checkpoint: Checkpoint) -> bytes:
    """The checkpoint as its file holds it: one JSON object and a newline."""
    return msgspec.json.encode(checkpoint) + b"\n"


def decode(data: bytes) -> Checkpoint:
    """Read a checkpoint's file; nothing is known of what is damaged."""
    try:
        return msgspec.json.decode(data, type=Checkpoint)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
