# SPDX-License-Identifier: Apache-2.0
"""Totals are exact differences, never negative, never counted twice, and have a quality."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.counters import EVENTS, Kind, Reading, parse_value
from resctrlmond.workloads.figures.accounting import Total, added, totals
from resctrlmond.workloads.figures.checkpoint import CounterHistory
from resctrlmond.workloads.model.states import Quality, worst

D0, D1 = "mon_PERF_PKG_00", "mon_PERF_PKG_01"


def readings(*rows: tuple[str, str, str]) -> list[Reading]:
    return [Reading(domain, event, parse_value(text)) for domain, event, text in rows]


def energy(begin: str | None, end: str | None, baseline: Quality = Quality.EXACT) -> Total:
    before = readings((D0, "core_energy", begin)) if begin is not None else []
    after = readings((D0, "core_energy", end)) if end is not None else []
    [total] = totals(before, after, baseline)
    return total


@pytest.mark.parametrize(
    ("begin", "end", "number", "quality"),
    [
        ("1.500000", "4.250000", Decimal("2.75"), Quality.EXACT),
        ("7", "7", 0, Quality.EXACT),
        ("Unavailable", "Unavailable", 0, Quality.EXACT),
        ("Unavailable", "3.000000", Decimal(3), Quality.ESTIMATED),
        (None, "3.000000", None, Quality.UNKNOWN),
        ("1000", "12", 12, Quality.ESTIMATED),
        ("1000.000000", "999.000000", 0, Quality.ESTIMATED),
        ("1000", "990", 0, Quality.ESTIMATED),
        ("1000", "989", 989, Quality.ESTIMATED),
        ("5", None, None, Quality.UNKNOWN),
        ("5", "Error", None, Quality.UNKNOWN),
        ("5", "Unavailable", None, Quality.UNKNOWN),
        ("Error", "5", None, Quality.UNKNOWN),
        ("Unassigned", "5", None, Quality.UNKNOWN),
        ("-3", "5", None, Quality.UNKNOWN),
    ],
)
def test_quality_of_two_readings(
    begin: str | None, end: str | None, number: int | Decimal | None, quality: Quality
) -> None:
    total = energy(begin, end)
    assert (total.number, total.quality) == (number, quality)
    assert bool(total.reason) == (quality is not Quality.EXACT)


@pytest.mark.parametrize(
    ("baseline", "quality"),
    [(Quality.EXACT, Quality.EXACT), (Quality.LATE, Quality.LATE), (Quality.ESTIMATED, Quality.ESTIMATED)],
)
def test_no_total_is_better_than_its_baseline(baseline: Quality, quality: Quality) -> None:
    assert energy("1", "3", baseline).quality is quality


def test_an_unknown_baseline_gives_no_figure() -> None:
    total = energy("1", "3", Quality.UNKNOWN)
    assert (total.number, total.quality) == (None, Quality.UNKNOWN)
    assert total.reason


def test_gauges_and_unknown_events_have_no_total() -> None:
    rows = (
        ("mon_L3_00", "llc_occupancy", "1"),
        ("mon_L3_00", "brand_new_event", "1"),
        ("mon_L3_00", "mbm_total_bytes", "100"),
    )
    [total] = totals(readings(*rows), readings(*rows))
    assert (total.event.name, total.number) == ("mbm_total_bytes", 0)


def test_domain_with_sub_domains_is_counted_once_by_its_sub_domains() -> None:
    outer, parts = "mon_L3_00", ("mon_L3_00/mon_sub_L3_00", "mon_L3_00/mon_sub_L3_01")
    begin = readings(*((domain, "mbm_total_bytes", "0") for domain in (outer, *parts)))
    values = {outer: "30", parts[0]: "10", parts[1]: "20"}
    end = readings(*((domain, "mbm_total_bytes", text) for domain, text in values.items()))
    [total] = totals(begin, end)
    assert (total.number, total.quality) == (30, Quality.EXACT)
    assert total.domains == {outer: total}


def test_domain_that_came_online_later_counts_if_it_began_from_0() -> None:
    """Telemetry continues meanwhile, so its value includes earlier use by others."""
    [traffic] = totals([], readings(("mon_L3_00", "mbm_total_bytes", "30")))
    assert (traffic.number, traffic.quality) == (30, Quality.ESTIMATED)


@pytest.mark.parametrize(
    ("name", "begin"),
    [("mbm_total_bytes", None), ("mbm_total_bytes", "Unassigned"), ("core_energy", "Unavailable")],
)
def test_counter_that_started_during_the_run_and_was_reset_counts_both_parts(name: str, begin: str | None) -> None:
    before = readings((D0, name, begin)) if begin else []
    past = {(D0, name): CounterHistory(carried=70)}
    [total] = totals(before, readings((D0, name, "30")), past=past)
    assert (total.number, total.quality) == (100, Quality.ESTIMATED)


def test_missing_domain_is_reported_and_the_others_are_counted() -> None:
    begin = readings((D0, "core_energy", "1"), (D1, "core_energy", "1"))
    [total] = totals(begin, readings((D0, "core_energy", "5")))
    assert (total.number, total.quality) == (4, Quality.ESTIMATED)
    assert D1 in total.reason
    parts = {domain: (part.number, part.quality) for domain, part in total.domains.items()}
    assert parts == {D0: (4, Quality.EXACT), D1: (None, Quality.UNKNOWN)}


def test_part_of_each_domain_has_the_caveats_of_the_total() -> None:
    begin, end = (readings((D0, "core_energy", text), (D1, "core_energy", text)) for text in ("1", "3"))
    [late] = totals(begin, end, Quality.LATE)
    [limited] = totals(begin, end, caveats={"core_energy": "the reason"})
    for total in (late, limited):
        assert [(part.number, part.quality, part.reason) for part in total.domains.values()] == [
            (2, total.quality, total.reason)
        ] * 2
    assert limited.reason == "the reason"
    unknown = Total(EVENTS["core_energy"], None, Quality.UNKNOWN, "lost")
    for lost in (unknown, Total(EVENTS["core_energy"], Decimal(5), Quality.ESTIMATED, "lost")):
        [after_loss] = added([totals(begin, end), [lost]])
        assert [(part.number, part.quality, part.reason) for part in after_loss.domains.values()] == [
            (2, Quality.ESTIMATED, "lost")
        ] * 2
    [of_two_classes] = added([totals(begin, end), [late]])
    assert [(part.number, part.quality) for part in of_two_classes.domains.values()] == [(4, Quality.LATE)] * 2


def test_reason_of_several_groups_is_stated_once() -> None:
    def late(*reasons: str) -> Total:
        return replace(energy("1", "3", Quality.LATE), reason="; ".join(reasons))

    groups = [late("a ran outside", "b ended"), late("a ran outside"), late("c stayed outside", "b ended")]
    [total] = added([[group] for group in groups])
    assert total.reason == "a ran outside; b ended; c stayed outside"


def test_domains_are_computed_only_for_callers_that_need_them() -> None:
    computed = []

    def compute_domains() -> dict[str, Total]:
        computed.append("domains")
        return {D0: Total(EVENTS["core_energy"], 1, Quality.EXACT)}

    group = Total(EVENTS["core_energy"], 1, Quality.EXACT, compute_domains=compute_domains)
    [total] = [of.changed(lambda one: replace(one, quality=Quality.LATE)) for of in added([[group], [group]])]
    assert (total.number, total.quality, computed) == (2, Quality.LATE, [])
    assert [(part.number, part.quality) for part in total.domains.values()] == [(2, Quality.LATE)]
    assert computed


def test_large_values_are_not_rounded() -> None:
    """Twenty digits and nine decimals are one more than a Decimal usually keeps."""
    assert energy("0.000000001", "99999999999999999999.999999999").number == Decimal("99999999999999999999.999999998")


cumulative = st.sampled_from([name for name, event in EVENTS.items() if event.kind is Kind.CUMULATIVE])
numbers = st.one_of(
    st.integers(0, 10**20 - 1).map(str),
    st.decimals(0, 10**12, places=6).map(lambda number: f"{number:f}"),
    st.sampled_from(["Unavailable", "Error", "Unassigned", "", "-1", "nan", "1e9", "0x10"]),
)
rows = st.dictionaries(st.tuples(st.sampled_from([D0, D1, D0 + "/mon_sub_00"]), cumulative), numbers)


def listed(table: dict[tuple[str, str], str]) -> list[Reading]:
    return readings(*((domain, event, text) for (domain, event), text in table.items()))


@given(rows, rows, st.sampled_from(Quality))
def test_totals_are_never_negative_nor_above_the_last_values(
    begin: dict[tuple[str, str], str], end: dict[tuple[str, str], str], baseline: Quality
) -> None:
    last = listed(end)
    for total in totals(listed(begin), last, baseline):
        parts = total.domains.values()
        known = [Decimal(part.number) for part in parts if part.number is not None]
        assert sum(known) == (total.number or 0)
        assert worst(total.quality, *(part.quality for part in parts if part.number is not None)) is total.quality
        if total.number is None:
            assert total.quality is Quality.UNKNOWN
            continue
        of_it = [one for one in last if one.event == total.event.name]
        divided = (D0 + "/mon_sub_00", total.event.name) in begin.keys() | end.keys()
        shown = [
            Decimal(one.value.number)
            for one in of_it
            if one.value.number is not None and not (divided and one.domain == D0)
        ]
        assert 0 <= total.number <= sum(shown)
        assert worst(total.quality, baseline) is total.quality


@given(st.lists(st.tuples(st.integers(0, 10**20 - 1), st.integers(0, 10**19)), min_size=1, max_size=64))
def test_sums_over_domains_are_exact(counters: list[tuple[int, int]]) -> None:
    begin = readings(*((f"mon_L3_{i:02}", "mbm_total_bytes", str(first)) for i, (first, _) in enumerate(counters)))
    end = [
        Reading(f"mon_L3_{i:02}", "mbm_total_bytes", parse_value(str(min(first + used, 10**20 - 1))))
        for i, (first, used) in enumerate(counters)
    ]
    [total] = totals(begin, end)
    assert total.number == sum(min(used, 10**20 - 1 - first) for first, used in counters)
    assert total.quality is Quality.EXACT
