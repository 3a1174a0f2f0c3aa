# SPDX-License-Identifier: Apache-2.0
"""Totals: the exact differences between the baseline of a workload and a later reading.

Their qualities are those by the counters alone (``figures.verdict`` has the others).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, localcontext

import msgspec

from resctrlmond.resctrl.counters import EXACTLY, Event, Kind, Reading, Status, Value, event, repeated
from resctrlmond.workloads.figures.checkpoint import CounterHistory
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.model.states import Quality, worst


# Declared in a module that clients can import without this one.
@dataclass(frozen=True, slots=True)
class Total:
    """The sum of one event over all domains since the baseline, in its unit. An unknown ``number`` is None.

    ``compute_domains`` returns ``domains``. They are computed only for callers that need them: most need the sums.
    """

    event: Event
    number: int | Decimal | None
    quality: Quality
    reason: str = ""
    compute_domains: Callable[[], Mapping[str, Total]] = field(default=dict, compare=False, repr=False)

    @property
    def domains(self) -> Mapping[str, Total]:
        """The part of each domain, by the domain's name; a domain includes its sub-domains.

        It is empty for a lost run, of which only the sums are known.
        """
        with localcontext(EXACTLY):
            return self.compute_domains()

    def changed(self, change: Callable[[Total], Total]) -> Total:
        """Return the total with ``change`` applied to it and to each of its parts."""

        def compute_domains() -> Mapping[str, Total]:
            return {domain: change(part) for domain, part in self.domains.items()}

        return replace(change(self), compute_domains=compute_domains)


class _Delta(msgspec.Struct, frozen=True):
    number: int | Decimal | None
    quality: Quality
    reason: str = ""


class _Run(msgspec.Struct, frozen=True):
    """One event in one domain during a run; ``begin`` or ``end`` is None if the domain was offline at that time.

    ``missed``: the reason for which the end value is missing or older than the others. ``past``: the history of the
    counter between the two. ``was_active``: an event of the domain has a number, so "never active" is not valid for
    any event of the domain; ``was_active_at_begin``: an event had a number at the baseline already.
    ``is_reallocated``: the hardware gives the counter to other RMIDs too.
    """

    of: Event
    domain: str
    begin: Value | None
    end: Value | None
    missed: str
    past: CounterHistory
    was_active: bool
    was_active_at_begin: bool
    is_reallocated: bool


# The begin value of a counter whose domain was offline at the baseline.
_NOT_ONLINE = Value(Status.ERROR, "not online")
_NOTHING = CounterHistory()
# A reset counter restarts from 0. A decrease by at most this fraction is noise, not a reset.
_NOISE = Decimal("0.01")
_AT_BEGIN = "at the beginning"
_GAP = "use at that time may be missing"
_TOO_SMALL = "the use was too small to be counted"
_RESTARTED = "it was reset or had no counter for a time, so some use is missing"


def digits(number: int | Decimal) -> str:
    """Return the number with every digit and without an exponent (str() writes some decimals with an exponent)."""
    # The format "f" converts an int to a float.
    return str(number) if isinstance(number, int) else f"{number:f}"


def totals(
    begin: Iterable[Reading],
    end: Iterable[Reading],
    baseline: Quality = Quality.EXACT,
    *,
    missed: Mapping[str, str] | None = None,
    past: Mapping[tuple[str, str], CounterHistory] | None = None,
    caveats: Mapping[str, str] | None = None,
    is_reallocated: bool = False,
) -> list[Total]:
    """Return the total of each cumulative event between two readings of one group, in order of the event's name.

    Gauges have no total and are left out. Sub-domains are counted instead of their domain, which is their sum,
    because each of them goes offline and restarts from 0 separately. Those of ``repeated`` are not counted.
    ``baseline`` is the quality of the begin readings; no total is better. ``missed`` has, by domain, the reason for
    which its end values are missing or older than those of other domains. ``past`` is the history of counters between
    the two readings, by domain and event. ``caveats`` has, by event, the reason for which its total cannot be exact.
    ``is_reallocated``: the hardware gives the group's bandwidth counters to other RMIDs too.
    """
    missed, past, caveats = missed or {}, past or {}, caveats or {}
    before = {(reading.domain, reading.event): reading.value for reading in begin}
    after = {(reading.domain, reading.event): reading.value for reading in end}
    counters = before.keys() | after.keys()
    counters -= repeated(counters)
    sums = {(domain.partition("/")[0], name) for domain, name in counters if "/" in domain}
    active_at_begin, active_at_end = (
        {domain for (domain, name), value in at.items() if value.is_active(event(name))} for at in (before, after)
    )
    # By event, then by domain; a sub-domain is a part of its domain.
    deltas: dict[str, dict[str, list[_Delta]]] = {}
    with localcontext(EXACTLY):
        for domain, name in sorted(counters - sums):
            of = event(name)
            if of.kind is Kind.CUMULATIVE:
                values = before.get((domain, name)), after.get((domain, name))
                if values[0] is None and not of.restarts:
                    # The counter ran on while its domain was offline, so its value includes earlier use of the RMID.
                    values = _NOT_ONLINE, values[1]
                known = past.get((domain, name), _NOTHING)
                run = _Run(
                    of,
                    domain,
                    *values,
                    missed.get(domain, ""),
                    known,
                    was_active=domain in active_at_begin | active_at_end,
                    was_active_at_begin=domain in active_at_begin,
                    is_reallocated=is_reallocated,
                )
                of_domain = deltas.setdefault(name, {}).setdefault(domain.partition("/")[0], [])
                of_domain.append(_delta(run))
        return [_with_domains(event(name), deltas[name], baseline, caveats.get(name, "")) for name in sorted(deltas)]


def added(parts: Iterable[list[Total]]) -> list[Total]:
    """Return the totals of a workload from those of its groups, in order of the event's name."""
    by_name: dict[str, list[Total]] = {}
    for part in parts:
        for total in part:
            by_name.setdefault(total.event.name, []).append(total)
    with localcontext(EXACTLY):
        return [_added(of) for _, of in sorted(by_name.items())]


def _added(totals_of_event: Sequence[Total]) -> Total:
    if len(totals_of_event) == 1:
        return totals_of_event[0]
    of = totals_of_event[0].event

    def compute_domains() -> Mapping[str, Total]:
        domains: dict[str, list[_Delta | Total]] = {}
        # The part of each domain in these is not known, so all domains lack it.
        whole = []
        for total in totals_of_event:
            parts = total.domains
            for domain, part in parts.items():
                domains.setdefault(domain, []).append(part)
            if not parts:
                whole.append(_Delta(None, total.quality, total.reason))
        return {domain: _sum(of, [*found, *whole], Quality.EXACT) for domain, found in sorted(domains.items())}

    return replace(_sum(of, totals_of_event, Quality.EXACT), compute_domains=compute_domains)


def _with_domains(of: Event, deltas: Mapping[str, list[_Delta]], baseline: Quality, caveat: str) -> Total:
    def compute_domains() -> Mapping[str, Total]:
        return {domain: _sum(of, found, baseline, caveat) for domain, found in deltas.items()}

    total = _sum(of, [delta for found in deltas.values() for delta in found], baseline, caveat)
    return replace(total, compute_domains=compute_domains)


def _delta(run: _Run) -> _Delta:
    delta = _counted(run)
    if not run.missed or run.end is None:
        return delta
    # The total lacks the use after the last reading.
    reason = f"{run.missed}; {delta.reason}" if delta.reason else run.missed
    return _Delta(delta.number, worst(delta.quality, Quality.ESTIMATED), reason)


def _counted(run: _Run) -> _Delta:
    domain, begin, end, past = run.domain, run.begin, run.end, run.past
    if end is None:
        return _Delta(None, Quality.UNKNOWN, run.missed or Reason.OFFLINE.text(domain=domain, since=""))
    if end.number is None:
        return _without_end(run, end)
    base = _base(run)
    if base is None:
        assert begin is not None
        return _Delta(
            None, Quality.UNKNOWN, Reason.NO_NUMBER.text(domain=domain, when=_AT_BEGIN, cause=repr(begin.text))
        )
    if past.carried is not None:
        number = max(0, past.carried + end.number - base)
        return _Delta(number, Quality.ESTIMATED, Reason.WENT_BACK.text(domain=domain, cause=_RESTARTED))
    if begin is None:
        return _Delta(
            end.number,
            Quality.ESTIMATED,
            Reason.NO_NUMBER.text(domain=domain, when=_AT_BEGIN, cause="it came online later"),
        )
    if begin.number is None:
        reason = Reason.NO_NUMBER.text(domain=domain, when=_AT_BEGIN, cause=repr(begin.text))
        return _Delta(end.number, Quality.ESTIMATED, reason)
    if end.number < base:
        if base - end.number <= base * _NOISE:
            return _Delta(0, Quality.ESTIMATED, Reason.WENT_BACK.text(domain=domain, cause=_TOO_SMALL))
        # A reset (the domain was offline, or the mode changed): the value was counted since then.
        return _Delta(end.number, Quality.ESTIMATED, Reason.WENT_BACK.text(domain=domain, cause=_RESTARTED))
    if past.has_gap:
        # The hardware may have reset the counter meanwhile (see ``Unavailable``).
        return _Delta(
            end.number - base,
            Quality.ESTIMATED,
            Reason.NO_NUMBER.text(domain=domain, when="at a reading during the run", cause=_GAP),
        )
    return _Delta(end.number - base, Quality.EXACT)


def _base(run: _Run) -> int | Decimal | None:
    """Return the number from which the counter counts; 0 if it starts during the run, None if unknown."""
    begin = run.begin
    if begin is None:
        return 0  # the domain came online later, and the counter started from 0 (see ``totals``)
    if begin.is_never_active(run.of):
        # All registers of a package become valid together: if another event had a number, this event has a past too.
        return None if run.was_active_at_begin else 0
    if not run.of.restarts:
        return begin.number
    # A counter starts from 0 if it is assigned later, or if the hardware gives it back to the RMID.
    starts_anew = begin.status is Status.UNASSIGNED or (begin.status is Status.UNAVAILABLE and run.is_reallocated)
    return 0 if starts_anew else begin.number


def _without_end(run: _Run, end: Value) -> _Delta:
    """Return the use by a counter without a number at the end: its earlier count or unknown, never an assumed 0."""
    was_never_active = run.begin is not None and run.begin.is_never_active(run.of) and not run.was_active
    if was_never_active and end.is_never_active(run.of) and run.past == _NOTHING:
        return _Delta(0, Quality.EXACT)
    base, at_end = _base(run), f"at the end ({end.text!r})"
    number = 0 if base is None else (run.past.carried or 0) + (run.past.known or 0) - base
    if number > 0:
        cause = "the total is what was counted before"
        reason = Reason.NO_NUMBER.text(domain=run.domain, when=at_end, cause=cause)
        return _Delta(number, Quality.ESTIMATED, reason)
    reason = Reason.NO_NUMBER.text(domain=run.domain, when=at_end, cause="no use was counted before")
    return _Delta(None, Quality.UNKNOWN, reason)


def _sum(of: Event, deltas: Sequence[_Delta | Total], baseline: Quality, caveat: str = "") -> Total:
    """Return the total of an event; with a ``caveat`` it is estimated at best, because of that."""
    quality = worst(baseline, *(delta.quality for delta in deltas))
    known = [delta.number for delta in deltas if delta.number is not None]
    # The domains of a lost group have the same reason, and so have the groups of a member: state it once.
    reasons = list(dict.fromkeys(reason for delta in deltas if delta.reason for reason in delta.reason.split("; ")))
    number = None
    if baseline is Quality.UNKNOWN:
        reasons = [Reason.NO_BASELINE.text()]
    elif not known:
        quality = Quality.UNKNOWN
    else:
        number = sum(known[1:], start=known[0])
        if len(known) < len(deltas):
            # A domain is missing, so the sum is a lower bound.
            quality = Quality.ESTIMATED
    if caveat:
        quality = worst(quality, Quality.ESTIMATED)
        reasons.append(caveat)
    return Total(of, number, quality, "; ".join(reasons))
