# SPDX-License-Identifier: Apache-2.0
"""What a workload used: exact differences between its baseline and a later reading."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

from resctrlmond.resctrl.counters import Event, Kind, Reading, Status, Value, event


class Quality(enum.StrEnum):
    """How far a total can be trusted.

    ``exact``: baseline before the first task, last reading after the last. ``late``: the workload, or a task that was
    taken in from outside, ran already, and what it used before is missing, or one stayed outside. ``estimated``: one
    of the two readings had to be replaced by a rule. ``unknown``: no total can be given.
    """

    EXACT = "exact"
    LATE = "late"
    ESTIMATED = "estimated"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Total:
    """The use of one event over all its domains since the baseline, in the event's unit; None where unknown."""

    event: Event
    number: int | Decimal | None
    quality: Quality
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Delta:
    number: int | Decimal | None
    quality: Quality
    reason: str = ""


# From trustworthy to not: a sum is as good as its worst part.
_ORDER = (Quality.EXACT, Quality.LATE, Quality.ESTIMATED, Quality.UNKNOWN)
# A value has up to 20 digits and 9 decimals; the usual 28 digits would round it, and the sum of many domains more so.
_EXACTLY = Context(prec=64)
# Of a counter whose domain was offline at the baseline.
_NOT_ONLINE = Value(Status.ERROR, "not online")
# A reset counter comes back from 0. One that stands within this part of where it was has not restarted.
_NOISE = Decimal("0.01")


def worst(*qualities: Quality) -> Quality:
    """The quality of what rests on all of these."""
    return max(qualities, key=_ORDER.index)


def digits(number: int | Decimal) -> str:
    """The number as the kernel would write it: every digit, and never an exponent, as str() writes some decimals."""
    # An int formatted with "f" would go through a float.
    return str(number) if isinstance(number, int) else f"{number:f}"


def totals(
    begin: Iterable[Reading],
    end: Iterable[Reading],
    baseline: Quality = Quality.EXACT,
    missed: Mapping[str, str] | None = None,
    carried: Mapping[tuple[str, str], int] | None = None,
) -> list[Total]:
    """Sum what each cumulative event counted between two readings of one group, in order of the event's name.

    Gauges have no total and are left out. A domain with sub-domains is their sum: they are counted instead of it, for
    each of them goes offline, and begins from 0, by itself. ``baseline`` is the quality of the begin readings as a
    whole; no total is better than it. ``missed`` says of domains why their end values are older than the others', or
    are not there. ``carried`` says of counters, by domain and event, that they began from 0 again during the run, and
    what they had counted by then as far as it is known.
    """
    missed, carried = missed or {}, carried or {}
    before = {(reading.domain, reading.event): reading.value for reading in begin}
    after = {(reading.domain, reading.event): reading.value for reading in end}
    counters = before.keys() | after.keys()
    sums = {(domain.partition("/")[0], name) for domain, name in counters if "/" in domain}
    deltas: dict[str, list[_Delta]] = {}
    with localcontext(_EXACTLY):
        for domain, name in sorted(counters - sums):
            if event(name).kind is Kind.CUMULATIVE:
                values = before.get((domain, name)), after.get((domain, name))
                if values[0] is None and not event(name).restarts:
                    # It ran on while its domain was offline: what it shows is also what others used before.
                    values = _NOT_ONLINE, values[1]
                delta = _delta(domain, *values, missed.get(domain, ""), carried.get((domain, name)))
                deltas.setdefault(name, []).append(delta)
        return [_sum(event(name), deltas[name], baseline) for name in sorted(deltas)]


def added(parts: Iterable[list[Total]]) -> list[Total]:
    """The totals of several groups as one workload's, in order of the event's name."""
    by_name: dict[str, list[Total]] = {}
    for part in parts:
        for total in part:
            by_name.setdefault(total.event.name, []).append(total)
    with localcontext(_EXACTLY):
        return [_sum_known(of[0].event, of, Quality.EXACT) for _, of in sorted(by_name.items())]


def _delta(domain: str, begin: Value | None, end: Value | None, missed: str, carried: int | None) -> _Delta:
    delta = _counted(domain, begin, end, missed, carried)
    if not missed or end is None:
        return delta
    # What was used after the last reading is in no figure.
    reason = f"{missed}; {delta.reason}" if delta.reason else missed
    return _Delta(delta.number, worst(delta.quality, Quality.ESTIMATED), reason)


def _counted(domain: str, begin: Value | None, end: Value | None, missed: str, carried: int | None) -> _Delta:
    if end is None:
        return _Delta(None, Quality.UNKNOWN, missed or f"{domain} went offline")
    if end.number is None:
        if end.status is Status.UNAVAILABLE and begin is not None and begin.status is Status.UNAVAILABLE:
            # AET: the RMID was never active on this package, neither before nor during the run
            # (Documentation/filesystems/resctrl.rst). Nothing was used there.
            return _Delta(0, Quality.EXACT)
        if end.status is Status.UNASSIGNED and carried and begin is not None and begin.number is not None:
            number = max(0, carried - begin.number)
            return _Delta(number, Quality.ESTIMATED, f"{domain} had no counter in the end: as far as it counted")
        return _Delta(None, Quality.UNKNOWN, f"{domain} read {end.text!r} at the end")
    if begin is not None and begin.status is Status.UNASSIGNED:
        return _Delta(None, Quality.UNKNOWN, f"{domain} read {begin.text!r} at the beginning")
    if carried is not None:
        number = max(0, carried + end.number - (begin.number or 0 if begin else 0))
        return _Delta(
            number,
            Quality.ESTIMATED,
            f"{domain} began from 0 during the run, or was without a counter: some of it is missing",
        )
    if begin is None:
        return _Delta(end.number, Quality.ESTIMATED, f"{domain} came online during the run")
    if begin.number is None:
        if begin.status is Status.UNAVAILABLE:
            # The RMID had no data on this package before: the first number counts from 0.
            return _Delta(end.number, Quality.ESTIMATED, f"{domain} read {begin.text!r} at the beginning")
        return _Delta(None, Quality.UNKNOWN, f"{domain} read {begin.text!r} at the beginning")
    if end.number < begin.number:
        if begin.number - end.number <= begin.number * _NOISE:
            return _Delta(0, Quality.ESTIMATED, f"{domain} went back a little: nothing that it could tell was used")
        # It was reset (its domain was offline, or the mode changed): what it shows now was counted since.
        return _Delta(end.number, Quality.ESTIMATED, f"{domain} went back, so it was reset during the run")
    return _Delta(end.number - begin.number, Quality.EXACT)


def _sum(of: Event, deltas: list[_Delta], baseline: Quality) -> Total:
    if baseline is Quality.UNKNOWN:
        return Total(of, None, Quality.UNKNOWN, "nobody knows when its baseline was read")
    return _sum_known(of, deltas, baseline)


def _sum_known(of: Event, deltas: Sequence[_Delta | Total], baseline: Quality) -> Total:
    quality = worst(baseline, *(delta.quality for delta in deltas))
    known = [delta.number for delta in deltas if delta.number is not None]
    # The loss of a group is the same reason for all its domains.
    reason = "; ".join(dict.fromkeys(delta.reason for delta in deltas if delta.reason))
    if not known:
        return Total(of, None, Quality.UNKNOWN, reason)
    number = sum(known[1:], start=known[0])
    if len(known) < len(deltas):
        # A domain is missing: the sum is at least this much, and says so.
        quality = Quality.ESTIMATED
    return Total(of, number, quality, reason)
