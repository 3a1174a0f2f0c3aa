# SPDX-License-Identifier: Apache-2.0
"""The values last read of a group, each domain with its time: what remains of it where it goes away unasked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from resctrlmond.resctrl.counters import Reading, Status, event, parse_value


class LastRead(msgspec.Struct, frozen=True, omit_defaults=True):
    """One domain's values, by event, as the kernel gave them; ``time`` is RFC 3339, UTC.

    ``inode`` is that of its directory. ``carried`` has the events that began to count from 0 again, or were without a
    counter for a time, with what they had counted when they were last read before that. ``known`` has what events
    that read no number now had counted when they last did.
    """

    time: str
    values: dict[str, str]
    inode: int = 0
    carried: dict[str, int] = msgspec.field(default_factory=dict)
    known: dict[str, int] = msgspec.field(default_factory=dict)


# By domain, which is the path below mon_data. One that went offline keeps what was read of it last.
Checkpoint = dict[str, LastRead]


def with_readings(
    before: Checkpoint, time: str, readings: Iterable[Reading], inodes: Mapping[str, int] | None = None
) -> Checkpoint:
    """The checkpoint after ``readings``, which were taken at ``time``; ``inodes`` are those at the baseline."""
    domains: dict[str, list[Reading]] = {}
    for reading in readings:
        domains.setdefault(reading.domain, []).append(reading)
    return before | {
        domain: LastRead(
            time,
            {reading.event: reading.value.text for reading in of},
            of[0].inode,
            *_carried(before.get(domain) or LastRead("", {}, (inodes or {}).get(domain, 0)), of),
        )
        for domain, of in domains.items()
    }


def _carried(last: LastRead, readings: Iterable[Reading]) -> tuple[dict[str, int], dict[str, int]]:
    """``LastRead.carried`` and ``LastRead.known`` after these readings."""
    carried, known = dict(last.carried), {}
    for reading in readings:
        if not event(reading.event).restarts:
            continue
        number = parse_value(last.values.get(reading.event, "")).number
        # AMD's counters read "Unavailable" as they are handed to another group, and are at 0 when they come back.
        counted = int(number) if number is not None else last.known.get(reading.event, 0)
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
    return carried, known


def carried_of(checkpoint: Checkpoint) -> dict[tuple[str, str], int]:
    """What counters had counted before they began from 0 again, by domain and event."""
    return {(domain, name): counted for domain, last in checkpoint.items() for name, counted in last.carried.items()}


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
