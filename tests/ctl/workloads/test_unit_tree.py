# SPDX-License-Identifier: Apache-2.0
"""The tree of list --units: the screens in ``screens``, its sums, its order and its JSON.

``python -m tests.ctl.workloads.test_unit_tree`` writes the screens again. Look at each before you commit it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from resctrlctl.screen.layout import to_text
from resctrlctl.screen.output import to_json
from resctrlctl.workloads.unit_tree import table, uses, view
from resctrlctl.workloads.workload_table import lines
from resctrlmond.api.types import Member, Total, Usage
from resctrlmond.workloads.model.states import Quality
from tests.ctl.conftest import Ctl
from tests.ctl.fake_manager import FakeManager
from tests.ctl.live.test_top_view import in_unit, rated
from tests.ctl.test_screens import COUNTS, SCREENS, WIDTHS

SERVICE = "/sys/fs/cgroup/system.slice/web.service"


def screens() -> Iterator[tuple[str, str]]:
    """Return the name and the text of each screen."""
    for count in COUNTS:
        found = lines([in_unit(number) for number in range(count)])
        for width in WIDTHS:
            yield f"list-units-{count}-{width}", to_text([table(found, view(None), has_blocks=True)], width, True)
    found = lines([in_unit(number) for number in range(30)])
    yield "list-units-ascii", to_text([table(found, view("energy"), has_blocks=False)], 80, True)


def test_screens_are_as_they_were_looked_at() -> None:
    for name, text in screens():
        assert text == (SCREENS / f"{name}.txt").read_text(encoding="utf-8"), name
        assert text.isascii() or name != "list-units-ascii"


def at(key: str, joules: int, cgroup: str, **attributes: str) -> Usage:
    """Return the use of a workload with a member in this control group; "" for none."""
    (_, read) = rated(1, 0, joules)
    member = Member(id="m", kind="unit", owner="cli", cgroup=cgroup, started_at="", late=False)
    members = (member,) if cgroup else ()
    return replace(read, workload=replace(read.workload, key=key, members=members, attributes=attributes))


def drawn(usages: list[Usage], sort: str | None = None) -> list[str]:
    """Return the first and the ENERGY column of each row."""
    block = table(lines(usages), view(sort), has_blocks=False)
    headings = [column.heading for column in block.columns]
    assert block.footer
    return [f"{row.cells[0]} {row.cells[headings.index('ENERGY')]}" for row in block.rows]


USAGES = [
    at("web.service", 1, SERVICE, unit="web.service"),
    at("db", 20, "/sys/fs/cgroup/system.slice/db.service/worker"),
    at("system.slice", 300, "/sys/fs/cgroup/system.slice", unit="system.slice"),
    at("loose", 4000, ""),
]


def test_units_have_sums_and_a_workload_with_the_name_of_its_unit_has_no_row_of_its_own() -> None:
    assert drawn(USAGES) == [
        "(no unit) 4.00kJ",
        "`-loose 4.00kJ",
        "system.slice 321J",
        "|-db.service 20J",
        "| `-db 20J",
        "|-web.service 1J",
        "`-system.slice 300J",  # of the slice itself: the tasks that are in no inner workload
    ]


def test_figures_in_json_are_decimal_texts() -> None:
    units = json.loads(to_json(uses(lines(USAGES), view(None))))["units"]
    assert {"/".join(unit["path"]): (unit["energy"], unit["llc"]) for unit in units} == {
        "": ("4000", "70000"),
        "system.slice": ("321", "210000"),
        "system.slice/db.service": ("20", "70000"),
        "system.slice/web.service": ("1", "70000"),
    }


def test_units_are_sorted_within_their_unit() -> None:
    cheap_db = [USAGES[0], at("db", 0, "/sys/fs/cgroup/system.slice/db.service")]
    assert drawn(cheap_db, "energy")[1:] == ["|-web.service 1J", "`-db.service 0J", "  `-db 0J"]


def test_attribute_with_a_slash_is_not_a_unit() -> None:
    assert drawn([at("odd", 5, "", unit="a/b")]) == ["(no unit) 5J", "`-a/b 5J"]


def test_sum_leaves_out_what_is_unknown_and_has_the_worst_quality() -> None:
    unknown = Total(event="core_energy", unit="joules", value=None, quality=Quality.UNKNOWN, reason="lost")
    lost = replace(at("lost", 0, "/sys/fs/cgroup/system.slice/db.service"), totals=[unknown])
    block = table(lines([USAGES[0], lost]), view(None), has_blocks=False)
    assert [(row.cells[0], row.cells[4], row.cells[6]) for row in block.rows] == [
        ("system.slice", "1J", "unknown"),
        ("|-db.service", "-", "unknown"),
        ("| `-lost", "-", "unknown"),
        ("`-web.service", "1J", "exact"),
    ]


@pytest.mark.parametrize("words", [("--pods",), ("--columns", "key")])
def test_units_exclude_pods_and_columns(ctl: Ctl, words: tuple[str, ...]) -> None:
    done = ctl("list", "--units", *words)
    assert (done.returncode, done.stderr) == (
        2,
        f"resctrlctl list: argument --units: not allowed with {words[0]}. See 'resctrlctl list --help'\n",
    )


def test_list_units_as_a_table_names_and_json(manager: FakeManager, ctl: Ctl) -> None:
    for each in USAGES:
        manager.workloads[each.workload.key] = each.workload
    done = ctl("list", "--units", "--full")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("UNIT "), done.stdout
    assert done.stdout.endswith("\n3 units, 4 workloads.\n"), done.stdout
    units = json.loads(ctl("list", "--units", "-j", "--sort", "workload").stdout)["units"]
    found = {"/".join(unit["path"]): unit["workloads"] for unit in units}
    assert found == {
        "": ["loose"],
        "system.slice": ["db", "system.slice", "web.service"],
        "system.slice/db.service": ["db"],
        "system.slice/web.service": ["web.service"],
    }
    assert ctl("list", "--units", "-q").stdout.splitlines() == ["system.slice", "db.service", "web.service"]
    only = ctl("list", "--units", "-q", "--filter", "key=db").stdout
    assert only.splitlines() == ["system.slice", "db.service"]
    wrong = ctl("list", "--units", "--watch", "--sort", "owner")
    assert (wrong.returncode, "cannot sort by 'owner'" in wrong.stderr) == (2, True)


def main() -> None:
    """Write the screens again."""
    for name, text in screens():
        (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
