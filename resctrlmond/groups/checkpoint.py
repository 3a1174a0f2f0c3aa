# SPDX-License-Identifier: Apache-2.0
"""The values last read of a group, each domain with its time: what remains of it where it goes away unasked."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resctrlmond.resctrl.counters import Reading, parse_value


class LastRead(msgspec.Struct, frozen=True):
    """One domain's values, by event, as the kernel gave them; ``time`` is RFC 3339, UTC."""

    time: str
    values: dict[str, str]


# By domain, which is the path below mon_data. One that went offline keeps what was read of it last.
Checkpoint = dict[str, LastRead]


def with_readings(before: Checkpoint, time: str, readings: Iterable[Reading]) -> Checkpoint:
    """The checkpoint after ``readings``, which were taken at ``time``."""
    values: dict[str, dict[str, str]] = {}
    for reading in readings:
        values.setdefault(reading.domain, {})[reading.event] = reading.value.text
    return before | {domain: LastRead(time, events) for domain, events in values.items()}


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
