# SPDX-License-Identifier: Apache-2.0
"""The lines of a recording: the format that ``record`` writes and ``plot`` reads. See RECORDINGS in resctrlctl(1)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

# Increased if an older ``plot`` would misread the lines. A new field does not need it.
FORMAT = 1


class Line(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, tag_field="type"):
    """A line of a recording. ``read_at`` is the time of the reading (RFC 3339, UTC)."""

    read_at: str


class Header(Line, frozen=True, kw_only=True, tag="header"):
    """The first line. ``version`` is that of resctrlmond; ``events`` has the unit of each event of the machine."""

    format: int
    version: str
    host: str
    simulation: str | None = None
    interval_s: float
    events: dict[str, str]


class Amount(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The use of one event since the baseline. ``value`` is the exact number; None if it is unknown."""

    value: str | None = None
    quality: str


class Used(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One run of a workload in a reading, by its key and generation.

    ``totals`` is its use by event, ``levels`` the current value of each gauge. ``read_at`` is the time at which its
    counters were read; ``completed_at`` is set if these are its final totals. ``error``: why it could not be read.
    """

    key: str
    generation: int
    name: str
    state: str
    read_at: str | None = None
    created_at: str | None = None
    completed_at: str | None = None
    totals: dict[str, Amount]
    levels: dict[str, str | None]
    error: str | None = None


class Reading(Line, frozen=True, kw_only=True, tag="reading"):
    """One reading of the workloads."""

    workloads: list[Used]


class Outage(Line, frozen=True, kw_only=True, tag="outage"):
    """A reading that failed; only the first of several in succession has a line."""

    reason: str


AnyLine: TypeAlias = Header | Reading | Outage


def is_selected(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Return whether one of the names matches one of the patterns (fnmatch), or there is no pattern."""
    known = [name for name in names if name]
    tests = [(pattern, name) for pattern in patterns for name in known]
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern, name in tests)
