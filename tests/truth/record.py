# SPDX-License-Identifier: Apache-2.0
"""The simulator's record of what a task used in groups, and the sums of readings that are possible with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from resctrlmond.sim.control.client import Control
from resctrlmond.sim.kernel.counters import NS, decimals
from resctrlmond.sim.messages import Used
from resctrlmond.sim.profiles import Event, Kind, Profile


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the greatest amount that readings of an event may sum up to, in its unit."""

    low: Fraction = Fraction(0)
    high: Fraction = Fraction(0)

    def __contains__(self, amount: float | Fraction) -> bool:
        return self.low <= amount <= self.high

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)


def used_by(control: Control, tid: int) -> Sequence[Used]:
    """Return the use of the last task with this number, in each RMID and node.

    What a real process used in the root group, whose RMID is 0, is not recorded.
    """
    found = max(control.truth(tid=tid).tasks, key=lambda task: task.start, default=None)
    return found.used if found else ()


def used_in_groups_by(control: Control, tid: int) -> Sequence[Used]:
    """Return the use of the last task with this number in other groups than the root group."""
    return [row for row in used_by(control, tid) if row.rmid]


def counted_events(profile: Profile) -> dict[str, Event]:
    """Return the events whose counters rise, by name."""
    events = (*profile.cache_events, *profile.package_events)
    return {event.name: event for event in events if event.kind is not Kind.OCCUPANCY}


def bounds(profile: Profile, event: Event, used: Sequence[Used]) -> Bounds:
    """Return the possible difference between the last and the first readings of a run that used this."""
    amount = Fraction(sum(row.cpu_ns for row in used)) * event.rate / NS
    error = resolution(profile, event) * len(used)
    return Bounds(amount - error, amount + error)


def resolution(profile: Profile, event: Event) -> Fraction:
    """Return the greatest error of the difference between two readings of one RMID and node.

    A counter lacks a part of its unit at either reading. The kernel rounds a fraction to decimals, at each reading by
    half of the last one at most (fs/resctrl/ctrlmondata.c).
    """
    if event.kind is Kind.TRAFFIC:
        return Fraction(profile.scale_bytes)
    if event.fraction_bits is None:
        return Fraction(1)
    return Fraction(1, 1 << event.fraction_bits) + Fraction(Decimal(10) ** -decimals(event.fraction_bits))
