# SPDX-License-Identifier: Apache-2.0
"""Counters do not go back while their start stays, a figure that is held is marked, and names have their sources."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.api.monotone import Monotone
from resctrlmond.api.types import MachineReply, Member, StatusReply, SumsReply, Unwatched, Usage
from resctrlmond.exporter import metrics
from resctrlmond.exporter.collector import Exporter
from resctrlmond.exporter.health import health
from resctrlmond.exporter.source import Observation, Source

START, LATER = "2026-11-24T08:00:00Z", "2026-11-24T09:00:00Z"


@given(st.lists(st.tuples(st.sampled_from([START, LATER]), st.integers(0, 5)), max_size=20))
def test_values_of_one_start_never_fall(readings: list[tuple[str, int]]) -> None:
    monotone, last = Monotone[float](), ("", 0.0)
    for start, number in readings:
        value, is_held = monotone.next(("m", ("k", "0")), start, number)
        assert value >= number
        assert is_held == (value != number)
        if start == last[0]:
            assert value >= last[1]
        else:
            assert value == number
        last = (start, value)


def test_series_that_ended_are_forgotten() -> None:
    monotone = Monotone[float]()
    for key in ("a", "b"):
        monotone.next(("m", (key, "0")), START, 5)
    monotone.forget_unless(lambda series: series[1][0] == "a")
    assert monotone.next(("m", ("a", "0")), START, 1) == (5, True)
    assert monotone.next(("m", ("b", "0")), START, 1) == (1, False)


class Told(Source):
    """A source of given observations."""

    def __init__(self, *observations: Observation) -> None:
        super().__init__("/nowhere", 1.0)
        self._observations = list(observations)

    def observe(self, wait_s: float) -> Observation:
        return self._observations.pop(0)


def samples(exporter: Exporter) -> dict[tuple[str, str], float]:
    """Return the values of one scrape by the name and the quality of each sample."""
    families = exporter.render(lambda registry: list(registry.collect()), 1.0, with_start_times=False)
    return {(one.name, one.labels.get("quality", "")): one.value for of in families for one in of.samples}


def usage(value: str, *, key: str = "k", created_at: str = START) -> Usage:
    use = {"domain": "mon_PERF_PKG_00", "event": "core_energy", "kind": "cumulative", "unit": "joules"}
    workload: dict[str, Any] = {
        "key": key,
        "class": "",
        "state": "active",
        "generation": 1,
        "baseline": "exact",
        "claims": [],
        "members": [],
        "attributes": {},
        "createdAt": created_at,
    }
    total = {"event": "core_energy", "unit": "joules", "value": value, "quality": "exact"}
    domains = [{**use, "value": value, "quality": "exact"}]
    found = {"workload": workload, "totals": [total], "levels": [], "domains": domains}
    return msgspec.convert(found, Usage)


def test_unit_and_user_are_those_of_the_control_groups_and_the_profile_is_a_name() -> None:
    path = "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope"
    of = usage("1")
    members = (msgspec.convert({"id": "m", "kind": "cgroup", "owner": "cli", "cgroup": path}, Member),)
    of = msgspec.structs.replace(of, workload=msgspec.structs.replace(of.workload, members=members, profile="batch"))
    families = Exporter(Told(Observation(usages=[of]))).render(
        lambda registry: list(registry.collect()), 1.0, with_start_times=False
    )
    (info,) = (one for family in families for one in family.samples if one.name == "resctrlmond_workload_info")
    names = {"kind": "cgroup", "unit": "session-2.scope", "user": "1000", "profile": "batch"}
    assert info.labels == {"key": "k", "generation": "1", **names}


def test_use_of_a_workload_that_falls_is_held_and_marked() -> None:
    values = [usage("7.5"), usage("7.25"), usage("7.75"), usage("0.5", created_at=LATER)]
    exporter = Exporter(Told(*(Observation(usages=[one]) for one in values)))
    found = [samples(exporter) for _ in values]
    name, mark = ("resctrlmond_core_energy_joules_total", ""), ("resctrlmond_workload_inexact", "estimated")
    assert [of[name] for of in found] == [7.5, 7.5, 7.75, 0.5]
    assert [mark in of for of in found] == [False, True, False, False]


def test_cpu_time_has_a_series_for_each_place_and_never_falls() -> None:
    first = usage("7.5")
    times = ((2_500_000_000, 40_000_000), (2_000_000_000, 50_000_000), (None, None))
    of = [
        msgspec.structs.replace(
            first,
            workload=msgspec.structs.replace(first.workload, cpu_time_ns=inside, cpu_time_outside_ns=outside),
        )
        for inside, outside in times
    ]
    exporter = Exporter(Told(*(Observation(usages=[one]) for one in of)))
    found = []
    for _ in of:
        families = exporter.render(lambda registry: list(registry.collect()), 1.0, with_start_times=False)
        all_samples = (one for family in families for one in family.samples)
        cpu = [one for one in all_samples if one.name == "resctrlmond_workload_cpu_seconds_total"]
        found.append({one.labels["place"]: one.value for one in cpu})
    assert found == [{"inside": 2.5, "outside": 0.04}, {"inside": 2.5, "outside": 0.05}, {}]


def test_workload_that_is_gone_leaves_nothing_behind() -> None:
    observations = [Observation(usages=of) for of in ([usage("7.5")], [usage("1", key="other")], [usage("0.5")])]
    exporter = Exporter(Told(*observations))
    found = [samples(exporter) for _ in observations]
    assert found[2]["resctrlmond_core_energy_joules_total", ""] == 0.5


def machine(value: str, since: str = START) -> Observation:
    pool = {
        "pool": "uncore",
        "domain": "mon_PERF_PKG_00",
        "event": "core_energy",
        "kind": "cumulative",
        "unit": "joules",
        "value": value,
        "skew": "0.5",
        "quality": "exact",
    }
    reply = {"since": since, "readAt": since, "pools": [pool]}
    return Observation(machine=msgspec.convert(reply, MachineReply))


def test_pool_that_falls_is_held_and_marked() -> None:
    observations = [machine("7.5"), machine("7.25"), Observation(), machine("7"), machine("8"), machine("1", LATER)]
    exporter = Exporter(Told(*observations))
    found = [samples(exporter) for _ in observations]
    name, mark = ("resctrlmond_machine_core_energy_joules_total", ""), ("resctrlmond_machine_inexact", "estimated")
    assert [of.get(name) for of in found] == [7.5, 7.5, None, 7.5, 8.0, 1.0]
    assert [mark in of for of in found] == [False, True, False, True, False, False]


def sums(value: str, ended: int, since: str = START, **parts: Any) -> Observation:
    use = {"event": "core_energy", "unit": "joules", "value": value, **parts}
    name = {"name": "shop", "ends": [{"quality": "exact", "runs": ended}], "running": 0, "sums": [use]}
    reply = {
        "since": since,
        "readAt": since,
        "lost": 0,
        "names": [{**name, "by": by} for by in ("namespace", "user")],
    }
    return Observation(sums=msgspec.convert(reply, SumsReply))


def test_sum_that_falls_is_held_unless_it_begins_again() -> None:
    observations = [sums("7.5", 3), sums("7.25", 2), Observation(), sums("8", 4), sums("1", 1, LATER)]
    exporter = Exporter(Told(*observations))
    found = [samples(exporter) for _ in observations]
    name, ends = ("resctrlmond_accounted_core_energy_joules_total", ""), ("resctrlmond_ends_total", "exact")
    assert [of.get(name) for of in found] == [7.5, 7.5, None, 8.0, 1.0]
    assert [of.get(ends) for of in found] == [3, 3, None, 4, 1]
    mark = ("resctrlmond_accounted_inexact_ratio", "estimated")
    assert [of.get(mark) for of in found] == [None, 0.25 / 7.5, None, None, None]


def test_part_of_a_sum_that_is_not_exact_is_a_ratio() -> None:
    found = samples(Exporter(Told(sums("8", 1, late="2", estimated="4", unknownRuns=3))))
    assert found["resctrlmond_accounted_inexact_ratio", "late"] == 0.25
    assert found["resctrlmond_accounted_inexact_ratio", "estimated"] == 0.5
    assert found["resctrlmond_accounted_unknown_runs", ""] == 3


@pytest.mark.parametrize(("value", "ratio"), [("8", 0.0), ("0", 1.0)])
def test_sum_of_runs_that_are_not_exact_and_counted_nothing_is_marked(value: str, ratio: float) -> None:
    found = samples(Exporter(Told(sums(value, 1, estimated="0"))))
    assert found["resctrlmond_accounted_inexact_ratio", "estimated"] == ratio
    assert ("resctrlmond_accounted_inexact_ratio", "late") not in found


def test_units_in_no_group_are_not_counted_as_containers() -> None:
    one = {"profile": "quiet", "profileSource": "rule 1 of p.yaml", "reason": "it is in no group", "since": START}
    found = [{**one, "id": "4d" * 32}, *({**one, "id": f"{name}.service", "isUnit": True} for name in "ab")]
    observation = Observation(unwatched=msgspec.convert(found, list[Unwatched]))
    scraped = samples(Exporter(Told(observation)))
    assert scraped["resctrlmond_unwatched_containers", ""] == 1
    assert scraped["resctrlmond_unwatched_units", ""] == 2


@pytest.mark.parametrize(
    ("domains", "labels"),
    [
        (("mon_L3_00", "mon_L3_01"), ["0", "1"]),
        (("mon_MB_00", "mon_MB_01"), ["0", "1"]),
        (("mon_L3_00", "mon_MB_00", "mon_MB_01"), ["mon_L3_00", "mon_MB_00", "1"]),
    ],
)
def test_domains_of_two_resources_have_different_labels(domains: tuple[str, ...], labels: list[str]) -> None:
    """Prometheus refuses a scrape with the same series twice."""
    status: dict[str, Any] = {
        "version": "1",
        "mount": "/",
        "mounted": True,
        "rmids": 9,
        "rmidsUsed": 1,
        "pending": 0,
        "groups": 0,
        "foreign": [],
        "classes": [],
        "capacity": [],
        "problems": [],
        "bandwidth": {
            "mode": "assigned",
            "canAssign": True,
            "counters": [{"domain": domain, "counters": 9, "available": 1} for domain in domains],
        },
    }
    found = [
        (metric, *of.values()) for metric, of, _ in health(Observation(status=msgspec.convert(status, StatusReply)))
    ]
    for metric in (metrics.ASSIGNABLE, metrics.ASSIGNABLE_FREE):
        assert [one[1] for one in found if one[0] is metric] == labels
    assert len(found) == len(set(found))
