# SPDX-License-Identifier: Apache-2.0
"""The table of list: which text selects a workload, the order, filters, rates and columns."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from resctrlctl.arguments import verbs
from resctrlctl.screen.format import format_duration, shorten
from resctrlctl.workloads.selectors import matching, selectors_of
from resctrlctl.workloads.workload_table import FIELDS, FILTERS, in_order, lines, selected, table
from resctrlmond.api.types import Claim, Level, Total, Usage, Workload
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, State
from tests.ctl.samples import since_boot

BEGIN = "2026-11-21T11:00:00.000000Z"
POD = "6ca11e00-5ad0-4c0b-9f0e-0123456789ab"


def workload(key: str, state: State = State.ACTIVE, **attributes: str) -> Workload:
    return Workload(
        key=key,
        class_="",
        state=state,
        generation=1,
        baseline=Quality.EXACT,
        claims=(Claim("cli", BEGIN, EndRule.RELEASE),),
        members=(),
        attributes={name.replace("_", "."): text for name, text in attributes.items()},
        created_at=BEGIN,
        created_ns=since_boot(BEGIN),
    )


def usage(
    key: str, second: int = 10, joules: str | None = "0", quality: Quality = Quality.EXACT, **more: Any
) -> Usage:
    read_at = f"2026-11-21T11:00:{second:02}.000000Z"
    return Usage(
        workload=workload(key, **more),
        read_at=read_at,
        read_ns=since_boot(read_at),
        totals=[Total(event="core_energy", unit="joules", value=joules, quality=quality)],
        levels=[Level(event="llc_occupancy", unit="bytes", value="1024")],
    )


def cells(usages: list[Usage], *columns: str) -> list[tuple[str, ...]]:
    return [row.cells for row in table(lines(usages), columns).rows]


def test_age_and_averages_do_not_change_with_the_system_clock() -> None:
    """A machine whose clock was set after its start had workloads that were years old."""
    at, before = replace(usage("k", 10, joules="90"), read_at="2027-11-21T11:00:10Z"), usage("k", 5, joules="60")
    assert cells([at], "age", "power") == [("10s", "9W")]
    assert table(lines([at], [before]), ("age", "power")).rows[0].cells == ("10s", "6W")


def test_average_after_a_loss_is_over_all_runs() -> None:
    used = usage("k", joules="90", quality=Quality.ESTIMATED)
    claim = Claim("cli", "2026-11-21T10:58:40.000000Z", EndRule.RELEASE)
    lost = replace(used.workload, loss="its group was lost", claims=(claim,))
    assert cells([replace(used, workload=lost)], "age", "power") == [("10s", "1W")]
    assert cells([replace(used, workload=replace(lost, claims=()))], "power") == [("-",)]
    assert cells([used], "power") == [("9W",)]


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        ("0", "B", "0B"),
        ("999", "B", "999B"),
        ("1000", "B", "0.98KiB"),
        ("1024", "B", "1.00KiB"),
        ("1048575", "B", "1.00MiB"),
        ("123456789", "B/s", "118MiB/s"),
        ("0", "J", "0J"),
        ("7", "J", "7J"),
        ("12.345678", "J", "12.3J"),
        ("999.6", "J", "1.00kJ"),
        ("0.0311", "W", "31.1mW"),
        ("0.000000001", "W", "1.00nW"),
        ("99999999999999999999", "B", "86.7EiB"),
    ],
)
def test_numbers_are_shortened_to_three_digits(number: str, unit: str, text: str) -> None:
    assert shorten(Decimal(number), unit) == text


@given(st.decimals(min_value=0, max_value=10**18, places=6), st.sampled_from(["B", "J", "W", "B/s"]))
def test_shortened_numbers_have_at_most_seven_characters_and_the_unit(number: Decimal, unit: str) -> None:
    assert len(shorten(number, unit)) <= 6 + len(unit)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0s"), (99, "99s"), (100, "1m40s"), (3599, "59m"), (6000, "1h40m"), (86400, "24h"), (180000, "2d2h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=3e8))
def test_no_duration_is_wider_than_its_column(seconds: float) -> None:
    assert len(format_duration(seconds)) <= 5


def test_name_selects_a_workload_only_if_it_is_unique() -> None:
    found = [
        workload(POD, pod_name="cart", pod_namespace="shop"),
        workload("4d" * 32, container_name="web"),
        workload("4d" * 6 + "00" * 26, container_name="web"),
        workload("batch.service", unit="batch.service"),
        workload("cmd", container_name="batch.service"),
    ]
    assert list(selectors_of(found).values()) == [
        "shop/cart",
        "4d4d4d4d4d4d4",
        "4d4d4d4d4d4d0",
        "batch.service",
        "cmd",
    ]


KEYS = st.text("0123456789abcdef-", min_size=1, max_size=16).filter(lambda key: key[0] != "-")
NAMES = st.sampled_from(["", "web", "a", "0", "abcdefabcdef", "abcdefabcdefa"])


@given(st.dictionaries(KEYS, st.tuples(NAMES, NAMES), max_size=8))
def test_each_selector_that_is_shown_selects_its_workload(names: dict[str, tuple[str, str]]) -> None:
    found = [workload(key, pod_name=pod, container_name=container) for key, (pod, container) in names.items()]
    for key, text in selectors_of(found).items():
        assert [each.key for each in matching(text, found)] == [key]


def test_rates_are_averages_since_the_baseline_or_the_last_reading() -> None:
    before, now = usage("a", 10, "100"), usage("a", 12, "110")
    (alone,) = lines([now])
    (compared,) = lines([now], [before])
    assert alone.rate("core_energy") == Decimal(110) / 12
    assert compared.rate("core_energy") == 5
    # A workload that began since then has its average since its baseline.
    (new,) = lines([usage("b", 12, "24")], [before])
    assert new.rate("core_energy") == 2
    # So has another run, of the same generation because the daemon had forgotten the first one.
    begin = "2026-11-21T11:00:11.000000Z"
    other = replace(now, workload=replace(now.workload, created_at=begin, created_ns=since_boot(begin)))
    assert lines([other], [before])[0].rate("core_energy") == 110
    assert lines([usage("a", 12, None)], [before])[0].rate("core_energy") is None
    assert lines([usage("a", 0, "1")])[0].rate("core_energy") is None


def test_order_is_from_the_largest_number_and_unknown_values_are_last() -> None:
    usages = [usage("a", joules="9"), usage("b", joules=None), usage("c", joules="10"), usage("d", joules="9")]
    assert [line.workload.key for line in in_order(lines(usages), "energy")] == ["c", "a", "d", "b"]
    assert [line.workload.key for line in in_order(lines(usages[::-1]), "key")] == ["a", "b", "c", "d"]


def test_all_filters_must_match() -> None:
    usages = [
        usage("a", pod_namespace="shop", pod_name="cart-0"),
        usage("b", pod_namespace="shop", pod_name="web-1"),
        usage("c", unit="web-1.service", quality=Quality.LATE),
    ]
    found = lines(usages)

    def keys(*filters: tuple[str, str]) -> list[str]:
        return [line.workload.key for line in selected(found, filters)]

    assert keys(("namespace", "shop")) == ["a", "b"]
    assert keys(("namespace", "shop"), ("pod", "web-*")) == ["b"]
    assert keys(("quality", "late")) == ["c"]
    assert keys(("unit", "*.service"), ("owner", "cli")) == ["c"]
    assert keys(("state", "pending")) == []


def test_quality_is_that_of_the_worst_total() -> None:
    worse = usage("a", quality=Quality.EXACT)
    worse.totals.append(Total(event="mbm_total_bytes", unit="bytes", quality=Quality.ESTIMATED, reason="why"))
    assert cells([worse], "quality", "reason") == [("estimated", "why")]


def test_reason_has_that_of_the_state_and_those_of_the_totals() -> None:
    ended = Usage(
        workload=replace(workload("a", State.COMPLETED), reason="its last member ended"),
        read_at=None,
        totals=[
            Total(event=event, unit="bytes", quality=Quality.LATE, reason="it ran before")
            for event in ("mbm_total_bytes", "mbm_local_bytes")
        ],
        levels=[],
    )
    assert cells([ended], "reason") == [("its last member ended; it ran before",)]


def test_state_is_shown_only_if_a_workload_does_not_run() -> None:
    assert "STATE" not in {column.heading for column in table(lines([usage("a")])).columns}
    both = [usage("a"), usage("b", state=State.PENDING)]
    assert "STATE" in {column.heading for column in table(lines(both)).columns}


def test_events_that_the_machine_does_not_count_have_no_column() -> None:
    headings = {column.heading for column in table(lines([usage("a")])).columns}
    assert {"ENERGY", "POWER", "LLC"} <= headings
    assert not {"TRAFFIC", "BANDWIDTH"} & headings


def test_cpu_time_has_a_column_where_it_is_known() -> None:
    """Only show, JSON and the exporter had it."""
    used = [
        replace(usage(key), workload=replace(workload(key), cpu_time_ns=ns))
        for key, ns in (("a", 0), ("b", 13_998_300_000), ("c", 11_520 * 10**9), ("d", None))
    ]
    assert cells(used, "cpu") == [("0s",), ("14.0s",), ("3h12m",), ("-",)]
    assert [line.workload.key for line in in_order(lines(used), "cpu")] == ["c", "b", "a", "d"]
    headings = [column.heading for column in table(lines(used)).columns]
    assert headings[:4] == ["WORKLOAD", "AGE", "CPU", "LLC"]
    assert "CPU" not in {column.heading for column in table(lines(used[3:])).columns}
    # The first that a narrow terminal leaves out.
    assert "CPU" in {column.heading for column in table(lines(used), width=80).columns}
    narrow = table(lines(used), width=len("WORKLOAD  AGE  LLC  ENERGY  POWER  QUALITY"))
    assert "CPU" not in {column.heading for column in narrow.columns}
    assert "Too wide for this terminal: cpu" in narrow.footer


def test_names_that_control_a_terminal_are_escaped() -> None:
    (row,) = cells([usage("k", container_name="\x1b[31mred\u202e")], "workload", "container")
    assert all(text.isprintable() for text in row)


def test_every_column_is_in_the_manual_page_and_in_the_completion() -> None:
    root = Path(__file__).parents[3]
    section = (root / "man/resctrlctl.1.scd").read_text().partition("\n# LIST\n")[2].partition("\n# ")[0]
    described = [
        name for line in section.splitlines() if line.startswith("*") for name in re.findall(r"\*([a-z]+)\*", line)
    ]
    assert [name for name in described if name in FIELDS] == list(FIELDS)
    completion = (root / "resctrlctl/completions/resctrlctl.bash").read_text()
    assert f"names='{' '.join(FIELDS)}'" in completion
    assert " ".join(FILTERS) in completion
    assert tuple(FILTERS) == verbs._FILTERS
