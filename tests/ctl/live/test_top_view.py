# SPDX-License-Identifier: Apache-2.0
"""Screens of top with 0, 1, 30 and 500 workloads, at 80 and 200 columns, as files in ``screens``.

``python -m tests.ctl.live.test_top_view`` writes the files again. Look at each before you commit it.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from resctrlctl.arguments import verbs
from resctrlctl.live.top_view import screen
from resctrlctl.screen.format import shorten
from resctrlctl.screen.layout import cell_width
from resctrlctl.workloads.entries import COLUMNS, By, View, entries
from resctrlctl.workloads.unit_path import unit_of
from resctrlctl.workloads.workload_table import lines, selected
from resctrlmond.api.types import DomainUse, Foreign, Member, StatusReply, Usage
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from tests.ctl.samples import since_boot
from tests.ctl.test_screens import COUNTS, SCREENS, WIDTHS, usage

VIEWS = {
    "top": View(),
    "top-namespace": View(By.NAMESPACE),
    "top-unit": View(By.UNIT),
    "top-ascii": View(sort="name", has_blocks=False, is_rate=False),
}


def status(count: int = 0, pending: int = 0, problems: tuple[str, ...] = ()) -> StatusReply:
    """Return the state of a machine with 256 RMIDs."""
    return StatusReply(
        version="1",
        mount="/sys/fs/resctrl",
        mounted=True,
        rmids=256,
        rmids_used=min(count + 1, 256),
        pending=pending,
        in_limbo=True if pending else None,
        groups=count,
        foreign=list[Foreign](),
        classes=[""],
        capacity=[],
        problems=list(problems),
    )


def in_unit(number: int) -> Usage:
    """Return the use of a service, of a container of a pod or of an application of a user, by its control group."""
    path = (
        f"system.slice/worker-{number % 11}.service",
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{number:08x}.slice/crio-{number:064x}.scope",
        f"user.slice/user-{number % 3}.slice/user@{number % 3}.service/app.slice/editor-{number}.scope",
    )[number % 3]
    member = Member(id="m", kind="unit", owner="cli", cgroup=f"/sys/fs/cgroup/{path}", started_at="", late=False)
    return replace(usage(number), workload=replace(usage(number).workload, members=(member,)))


def drawn(name: str, count: int, width: int) -> str:
    """Return the text of a screen."""
    usages = [in_unit(number) if name == "top-unit" else usage(number) for number in range(count)]
    pending = sum(each.workload.state is State.PENDING for each in usages)
    view = VIEWS[name]
    shown = screen(entries(lines(usages), view), status(count, pending), view, width)
    return "".join(f"{line.text.rstrip()}\n" for line in shown)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", VIEWS)
def test_screen_is_as_it_was_looked_at(name: str, count: int, width: int) -> None:
    text = drawn(name, count, width)
    assert max(map(cell_width, text.splitlines())) <= width
    assert text == (SCREENS / f"{name}-{count}-{width}.txt").read_text(encoding="utf-8")
    assert text.isascii() or name != "top-ascii"


def rated(number: int, earlier: int, later: int, **attributes: str) -> tuple[Usage, Usage]:
    """Return two readings of a workload, ten seconds apart, with these joules."""
    base = usage(1)
    known = replace(base.workload, key=f"k{number}", attributes=attributes)
    found = []
    for second, joules in ((0, earlier), (10, later)):
        totals = [replace(total, value=str(joules)) for total in base.totals if total.event == "core_energy"]
        read_at = f"2026-11-22T12:00:{second:02}.000000Z"
        read_ns = since_boot(read_at)
        found.append(Usage(workload=known, read_at=read_at, read_ns=read_ns, totals=totals, levels=base.levels))
    return found[0], found[1]


def test_power_is_that_of_the_interval_and_groups_have_the_sum() -> None:
    pairs = [
        rated(1, 100, 150, unit="web.service"),
        rated(2, 1000, 1010, unit="web.service"),
        rated(3, 0, 500, unit="db.service"),
    ]
    before, after = zip(*pairs, strict=True)
    rows = entries(lines(after, before), View(By.UNIT))
    assert [(row.name, row.workloads, row.power, row.energy) for row in rows] == [
        ("db.service", 1, Decimal(50), Decimal(500)),
        ("web.service", 2, Decimal(6), Decimal(1160)),
    ]


def test_units_are_a_tree_and_count_once_in_the_sums() -> None:
    def at(path: str, joules: int, second: str = "") -> Usage:
        (_, read) = rated(joules, 0, joules)
        paths = (f"/sys/fs/cgroup/{path}", f"/sys/fs/cgroup/{second}") if second else (f"/sys/fs/cgroup/{path}",)
        members = tuple(
            Member(id=str(n), kind="unit", owner="cli", cgroup=cgroup, started_at="", late=False)
            for n, cgroup in enumerate(paths)
        )
        return replace(read, workload=replace(read.workload, members=members))

    user = "user.slice/user-1000.slice/user@1000.service/app.slice"
    usages = [
        at("system.slice/web.service", 1),
        at("system.slice/db.service/worker/1", 30),
        at(f"{user}/editor.service", 5, f"{user}/shell.scope"),
        rated(7, 0, 7)[1],
        rated(8, 0, 8, unit="own.service")[1],
    ]
    rows = entries(lines(usages), View(By.UNIT, sort="energy"))
    assert [(row.label, row.energy) for row in rows] == [
        ("system.slice", Decimal(31)),
        ("  db.service", Decimal(30)),
        ("  web.service", Decimal(1)),
        ("own.service", Decimal(8)),
        ("(no unit)", Decimal(7)),
        ("user.slice", Decimal(5)),
        ("  user-1000.slice", Decimal(5)),
        ("    user@1000.service", Decimal(5)),
        ("      app.slice", Decimal(5)),
    ]
    assert rows[1].name == "system.slice/db.service"
    text = [line.text for line in screen(rows, status(), View(By.UNIT), None)]
    power = sum((row.power for row in entries(lines(usages), View()) if row.power), Decimal(0))
    assert text[1].startswith(f"Together: power {shorten(power, 'W')}, ")
    assert [unit_of(usage.workload) for usage in usages] == [
        "web.service",
        "db.service",
        "user@1000.service",
        "",
        "own.service",
    ]
    assert [line.workload.key for line in selected(lines(usages), [("unit", "web.*")])] == ["k1"]


def test_group_has_the_worst_quality_and_is_unknown_only_if_all_its_workloads_are() -> None:
    late = replace(usage(3), workload=replace(usage(3).workload, attributes={"unit": "a"}))
    pending = replace(usage(16), workload=replace(usage(16).workload, attributes={"unit": "a"}))
    (row,) = entries(lines([late, pending]), View(By.UNIT))
    assert (row.quality, row.workloads) == (Quality.LATE, 2)
    assert row.energy == Decimal("243.000003")
    (row,) = entries(lines([pending]), View(By.UNIT))
    assert (row.quality, row.energy, row.power) == ("pending", None, None)


def test_row_of_a_domain_has_what_all_workloads_use_in_it() -> None:
    def read(number: int, second: int, joules: tuple[int, int], llc: int) -> Usage:
        base, _ = rated(number, 0, 0)
        uses = [
            DomainUse(
                domain=f"mon_PERF_PKG_{package:02}",
                event="core_energy",
                kind=Kind.CUMULATIVE,
                unit="joules",
                value=str(value),
                quality=Quality.LATE if package else Quality.EXACT,
            )
            for package, value in enumerate(joules)
        ]
        gauge = DomainUse(domain="mon_L3_00", event="llc_occupancy", kind=Kind.GAUGE, unit="bytes", value=str(llc))
        read_at = f"2026-11-22T12:00:{second:02}.000000Z"
        return replace(base, read_at=read_at, read_ns=since_boot(read_at), domains=[gauge, *uses])

    before = [read(1, 0, (10, 20), 1), read(2, 0, (0, 0), 1)]
    after = [read(1, 10, (30, 20), 7), read(2, 10, (10, 50), 8), replace(usage(16), domains=None)]
    view = View(By.DOMAIN, sort="name")
    rows = entries(lines(after, before), view)
    assert [(row.name, row.workloads, row.power, row.energy, row.llc, row.quality) for row in rows] == [
        ("(no domain)", 1, None, None, None, "pending"),
        ("mon_L3_00", 2, None, None, Decimal(15), ""),
        ("mon_PERF_PKG_00", 2, Decimal(3), Decimal(40), None, Quality.EXACT),
        ("mon_PERF_PKG_01", 2, Decimal(5), Decimal(70), None, Quality.LATE),
    ]
    # A workload is counted once in the headline, in however many domains it is.
    assert screen(rows, status(), view, 80)[0].text.startswith("3 workloads")


def test_rate_of_a_domain_without_an_earlier_reading_is_unknown() -> None:
    earlier, later = rated(1, 0, 0)
    came = DomainUse(
        domain="mon_PERF_PKG_01",
        event="core_energy",
        kind=Kind.CUMULATIVE,
        unit="joules",
        value="5",
        quality=Quality.ESTIMATED,
    )
    (row,) = entries(lines([replace(later, domains=[came])], [replace(earlier, domains=[])]), View(By.DOMAIN))
    assert (row.power, row.energy) == (None, Decimal(5))


@pytest.mark.parametrize("by", By)
def test_every_workload_is_in_one_row_of_each_grouping(by: By) -> None:
    rows = entries(lines([usage(number) for number in range(30)]), View(by))
    assert sum(row.workloads for row in rows if not row.depth) == 30
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize("sort", COLUMNS)
def test_unknown_values_are_last_in_both_orders(sort: str) -> None:
    usages = [usage(number) for number in range(30)]
    for is_reversed in (False, True):
        rows = entries(lines(usages), View(sort=sort, is_reversed=is_reversed))
        is_unknown = [COLUMNS[sort].value(row) in (None, "") for row in rows]
        assert is_unknown == sorted(is_unknown)
        values = [COLUMNS[sort].value(row) for row in rows if COLUMNS[sort].value(row) not in (None, "")]
        assert values == sorted(values, reverse=(sort in ("name", "quality")) == is_reversed)  # type: ignore[type-var]


def test_machine_without_energy_has_no_columns_for_it() -> None:
    without = replace(usage(1), totals=[total for total in usage(1).totals if total.event != "core_energy"])
    view = View()
    text = "\n".join(line.text for line in screen(entries(lines([without]), view), status(), view, 80))
    assert "BANDWIDTH" in text
    assert not {"POWER", "ENERGY", "power"} & set(text.split())


def test_screen_has_the_first_problem_and_the_number_of_others() -> None:
    lines_of = screen([], status(problems=("the tick hangs\x1b[31m", "another")), View(), 80)
    assert "the tick hangs\\x1b[31m (1 more: resctrlctl status)" in [line.text for line in lines_of]
    unmounted = screen([], replace(status(), mounted=False), View(), 80)
    assert "resctrl is not mounted: nothing is counted." in [line.text for line in unmounted]


def test_wide_characters_keep_the_columns_in_line() -> None:
    wide = replace(usage(1), workload=replace(usage(1).workload, attributes={"container.name": "容器"}))
    rows = entries(lines([wide, usage(2)]), View())
    heading, *shown = (line.text for line in screen(rows, status(), View(), 200)[-3:])
    columns = {
        cell_width(text[: text.index(word)])
        for text, word in ((heading, "QUALITY"), (shown[0], "exact"), (shown[1], "exact"))
    }
    assert len(columns) == 1


def test_long_name_is_cut_before_figures_are_left_out() -> None:
    long = replace(usage(1), workload=replace(usage(1).workload, attributes={"unit": "a" * 300 + ".service"}))
    shown = [line.text for line in screen(entries(lines([long, usage(2)]), View()), status(), View(), 80)]
    assert max(map(cell_width, shown)) <= 80
    assert {"POWER", "BANDWIDTH", "ENERGY", "QUALITY"} <= set(shown[-3].split())
    assert "…" in shown[-1] + shown[-2]


def test_choices_on_the_command_line_are_those_of_the_view() -> None:
    assert tuple(By) == verbs._GROUPINGS
    assert tuple(COLUMNS) == verbs._TOP_SORTS
    root = Path(__file__).parents[3]
    for file in ("man/resctrlctl.1.scd", "resctrlctl/completions/resctrlctl.bash"):
        text = (root / file).read_text()
        assert all(name in text for name in (*By, *COLUMNS))


def main() -> None:
    """Write the files again."""
    for name in VIEWS:
        for count in COUNTS:
            for width in WIDTHS:
                (SCREENS / f"{name}-{count}-{width}.txt").write_text(drawn(name, count, width), encoding="utf-8")


if __name__ == "__main__":
    main()
