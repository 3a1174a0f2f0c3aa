# SPDX-License-Identifier: Apache-2.0
"""Reasons that keep the totals of an event from being exact, whatever its counters read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resctrlmond.resctrl.bandwidth import Mode
from resctrlmond.resctrl.counters import Kind, Reading, Status, event

_REALLOCATED = (
    "this processor takes bandwidth counters from one RMID for another and resets them, so some use may be missing "
    "(the mode mbm_event prevents this, if info/L3_MON/mbm_assign_mode offers it)"
)

_UNASSIGNED = (
    "when its group was created, and its use until it gets one is not counted: end other workloads, or unassign "
    "counters of groups that do not need them (mbm_L3_assignments); the workload with the highest priority gets the "
    "next free one"
)
_CHANGED = "which memory transactions it counts was changed during the run (info/{})"
_UNSEEN_END = (
    "it ended while resctrlmond was not running, and the use of processes that {} had started is counted until the "
    "end values were read"
)
_MOST_NAMED = 5


def of_mode(readings: Iterable[Reading], mode: Mode) -> dict[str, str]:
    """The caveats, by event, of what is read while bandwidth is counted in that mode."""
    if mode is not Mode.REALLOCATED:
        return {}
    return {name: _REALLOCATED for name in sorted({reading.event for reading in readings}) if event(name).restarts}


def is_reallocated(caveat: str) -> bool:
    """Whether an event with that caveat counts from 0 each time that it gets a counter from another RMID."""
    return _REALLOCATED in caveat


def with_change(known: Mapping[str, str], before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """All caveats, by event, of a group whose caveats so far are ``known``: of an event that counted other memory
    transactions at the baseline, this is added.

    ``before`` and ``now`` are what ``Tree.transactions`` returned. Of an L3 that is in one of the texts only, nothing
    is known.
    """
    found = dict(known)
    for file in sorted(before.keys() & now.keys()):
        then, here = _by_l3(before[file]), _by_l3(now[file])
        name, why = _event_of(file), _CHANGED.format(file)
        if any(then[l3] != here[l3] for l3 in then.keys() & here.keys()):
            found = _with_reason(found, name, why)
    return found


def with_unseen_end(known: Mapping[str, str], readings: Iterable[Reading], member: str) -> dict[str, str]:
    """All caveats of a group that ended at a time that nobody knows, and in which processes of ``member`` may have
    run since; ``known`` are those so far.
    """
    found = dict(known)
    for name in sorted({reading.event for reading in readings if event(reading.event).kind is Kind.CUMULATIVE}):
        found = _with_reason(found, name, _UNSEEN_END.format(member))
    return found


def _with_reason(known: dict[str, str], name: str, why: str) -> dict[str, str]:
    before = known.get(name, "")
    return known if why in before else {**known, name: f"{before}; {why}" if before else why}


def _by_l3(text: str) -> dict[str, str]:
    """Read ``0=0x7f;1=0x15``, or a list for all L3 caches, which is under ""."""
    parts = (part.rpartition("=") for part in text.split(";"))
    return {l3: value for l3, _, value in parts}


def _event_of(file: str) -> str:
    """The event that ``L3_MON/EVENT_config`` or ``L3_MON/event_configs/EVENT/event_filter`` is about."""
    parts = file.split("/")
    return parts[-1].removesuffix("_config") if len(parts) == 2 else parts[-2]


def of_simulation(readings: Iterable[Reading], why: str) -> dict[str, str]:
    """The caveats, by event, of what is read from a simulation whose figures are inexact for that reason."""
    if not why:
        return {}
    counted = sorted({reading.event for reading in readings if event(reading.event).kind is Kind.CUMULATIVE})
    return dict.fromkeys(counted, f"the simulation is inexact: {why}")


def unassigned(readings: Iterable[Reading]) -> tuple[tuple[str, str], ...]:
    """The domains and events that have no counter, in the order in which they are to get one."""
    return tuple(
        (reading.domain, reading.event)
        # mbm_total_bytes first: where one counter is left, it is for that.
        for reading in sorted(readings, key=lambda reading: (reading.event, reading.domain), reverse=True)
        if reading.value.status is Status.UNASSIGNED and event(reading.event).restarts
    )


def of_unassigned(lacking: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The caveats, by event, of a group that has no counters for these domains and events at its baseline."""
    domains: dict[str, list[str]] = {}
    for domain, name in lacking:
        domains.setdefault(name, []).append(domain)
    return {name: f"no counter was free in {', '.join(sorted(of))} {_UNASSIGNED}" for name, of in domains.items()}


def lacking_sentence(keys: Iterable[str]) -> str:
    """What an operator is told of workloads that lack bandwidth counters; "" if there are none."""
    named = sorted(set(keys))
    if not named:
        return ""
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (
        f"no bandwidth counter is free for {', '.join(named[:_MOST_NAMED])}{more}: end other workloads, or unassign "
        "counters of groups that do not need them (mbm_L3_assignments)"
    )


def together(first: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """All caveats; of an event that has one in both, the first."""
    return {**more, **first}
