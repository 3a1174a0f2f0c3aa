# SPDX-License-Identifier: Apache-2.0
"""Caveats: doubts about the total of an event, even if all its readings are numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping

from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.counters import Kind, Reading, Status, event, resource_of
from resctrlmond.workloads.figures.reasons import Reason, doubt, text_of
from resctrlmond.workloads.model.workload import Doubt

_MOST_NAMED = 5


def by_event(doubts: Iterable[Doubt]) -> dict[str, str]:
    """Return the reasons for which totals of some events only are not exact, by event."""
    found: dict[str, str] = {}
    for one in doubts:
        for name in one.events:
            found[name] = "; ".join(filter(None, (found.get(name, ""), text_of(one))))
    return found


def of_readings(
    readings: Iterable[Reading], mode: Mode | None, inexact: str, kernel_mode: str = ""
) -> Iterator[Doubt]:
    """Yield the caveats of readings in that mode of the bandwidth counters; None without such counters.

    ``inexact`` is the reason for which the readings of a simulation are inexact (``Tree.inexact``), "" if they are
    exact. ``kernel_mode``: as in ``Configuration``.
    """
    resources: dict[str, set[str]] = {}
    for reading in readings:
        resources.setdefault(reading.event, set()).add(resource_of(reading.domain))
    for name, (first, *others) in ((name, sorted(of)) for name, of in sorted(resources.items())):
        of = event(name)
        if of.kind is not Kind.CUMULATIVE:
            continue
        if mode is Mode.REALLOCATED and of.restarts:
            yield doubt(Reason.REALLOCATED, events=[name])
        elif inexact:
            yield doubt(Reason.SIMULATION_INEXACT, events=[name], cause=inexact)
        if kernel_mode:
            yield doubt(Reason.KERNEL_WORK, events=[name], cause=f"info/kernel_mode is {kernel_mode}")
        if others:
            yield doubt(Reason.REPEATED, events=[name], resource=first, others=", ".join(others))


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Doubt]:
    """Yield a caveat for each event whose configuration changed.

    ``before`` and ``now`` are ``Configuration.transactions`` at the baseline and now: the memory transactions
    that each event counts. An L3 cache that is in one of the two only is ignored.
    """
    for file in sorted(before.keys() & now.keys()):
        then, here = _by_l3(before[file]), _by_l3(now[file])
        if any(then[l3] != here[l3] for l3 in then.keys() & here.keys()):
            yield doubt(Reason.CHANGED, events=[event_of(file)], file=file)


def _by_l3(text: str) -> dict[str, str]:
    """Parse ``0=0x7f;1=0x15`` by L3 cache; a text for all L3 caches has the key ""."""
    parts = (part.rpartition("=") for part in text.split(";"))
    return {l3: value for l3, _, value in parts}


def event_of(file: str) -> str:
    """Return EVENT of the path ``L3_MON/EVENT_config`` or ``L3_MON/event_configs/EVENT/event_filter``.

    The directory of another resource can be in the place of L3_MON.
    """
    parts = file.split("/")
    return parts[-1].removesuffix("_config") if len(parts) == 2 else parts[-2]


def unassigned(readings: Iterable[Reading]) -> tuple[tuple[str, str], ...]:
    """Return the domains and events without a hardware counter, in the order in which they get the next free one."""
    return tuple(
        (reading.domain, reading.event)
        # mbm_total_bytes comes first, so it gets the last free counter.
        for reading in sorted(readings, key=operator.attrgetter("event", "domain"), reverse=True)
        if reading.value.status is Status.UNASSIGNED and event(reading.event).restarts
    )


def of_unassigned(lacking: Iterable[tuple[str, str]]) -> Iterator[Doubt]:
    """Yield the caveats of a group whose baseline lacks a counter for these domains and events."""
    domains: dict[str, list[str]] = {}
    for domain, name in lacking:
        domains.setdefault(name, []).append(domain)
    for name, of in domains.items():
        yield doubt(Reason.UNASSIGNED, events=[name], domains=", ".join(sorted(of)))


def lacking_sentence(keys: Iterable[str]) -> str:
    """Return a warning that names the workloads without bandwidth counters and a remedy; "" if there are none."""
    named = sorted(set(keys))
    if not named:
        return ""
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (
        f"no bandwidth counter is free for {', '.join(named[:_MOST_NAMED])}{more}: end other workloads, or unassign "
        "counters of groups that do not need them (such as mbm_L3_assignments)"
    )
