# SPDX-License-Identifier: Apache-2.0
"""``show`` of classes and of foreign groups, on the simulator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlctl.screen.layout import to_text
from resctrlctl.workloads.directories import ClassReport, class_of, read_class, read_foreign
from resctrlctl.workloads.render_directory import blocks
from resctrlmond.api.types import Foreign, ListReply, ReadForeignReply, Reading
from resctrlmond.resctrl.kinds import Kind, Status
from resctrlmond.resctrl.tree import Tree
from resctrlmond.sim.fuse.mount import Simulation
from tests.ctl.conftest import Ctl

NOTHING = ListReply(workloads=[], foreign=[])


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """A simulated resctrl with the class gold, which has a foreign group."""
    path = tmp_path / "resctrl"
    path.mkdir()
    with Simulation(str(path)):
        (path / "gold").mkdir()
        (path / "gold" / "schemata").write_text("L3:0=f;1=f\n")
        (path / "gold" / "mon_groups" / "x").mkdir()
        yield path


@pytest.fixture
def tree(top: Path) -> Tree:
    return Tree.open(str(top), allow_simulation=True)


def replace(directory: Path) -> None:
    directory.rmdir()
    directory.mkdir()


def properties(ctl: Ctl, top: Path, text: str, names: str) -> list[str]:
    done = ctl("show", text, "-p", names, "--value", "--root", str(top))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_class_is_shown_with_its_counters_limits_and_groups(top: Path, ctl: Ctl) -> None:
    done = ctl("show", "gold", "--root", str(top))
    assert (done.returncode, done.stderr) == (0, "")
    head, counters, limits = done.stdout.split("\n\n")
    assert head == (
        "gold\n"
        "      Kind: class (control group)\n"
        f"      Path: {top}/gold\n"
        "     Tasks: 0, with those of its groups\n"
        "    Groups: 1 monitoring group, 1 foreign\n"
        "  Counters: the class and its present groups together\n"
        "            falls when a group is removed; rises by what the RMID of a new group counted before"
    )
    assert counters.splitlines()[0].split() == ["DOMAIN", "EVENT", "VALUE", "KIND", "PER", "SECOND", "NOTE"]
    assert ["mon_L3_01", "mbm_total_bytes", "0", "B", "cumulative", "0B/s", "-"] in map(
        str.split, counters.splitlines()
    )
    assert limits.splitlines()[1].split()[:6] == ["gold", "shareable", "L3", "0-1", "ways", "0-3"]
    assert "CLOSIDs" not in limits


def test_json_of_a_class_has_its_limits_counters_and_rates(top: Path, ctl: Ctl) -> None:
    report = json.loads(ctl("show", "--json", "gold", "--root", str(top)).stdout)
    assert (report["class"]["name"], report["groups"], report["foreign"], report["tasks"]) == ("gold", 1, 1, 0)
    assert report["class"]["allocations"][0]["sharedWith"] == [""]
    cumulative = [each for each in report["readings"] if each["kind"] == "cumulative"]
    assert [each["event"] for each in cumulative] == [rate["event"] for rate in report["rates"]]


def test_single_properties_of_a_class_and_of_a_foreign_group(top: Path, ctl: Ctl) -> None:
    assert properties(ctl, top, "gold", "name,tasks,L3/0,groups,energy") == ["gold", "0", "f", "1", ""]
    assert properties(ctl, top, "gold", "mon_L3_00/mbm_total_bytes.rate") == ["0.000000"]
    assert properties(ctl, top, "gold/mon_groups/x", "name,class,tasks") == ["x", "gold", "0"]


def test_script_waits_only_for_rates(top: Path, monkeypatch: pytest.MonkeyPatch, tree: Tree) -> None:
    def sleep(_seconds: float) -> None:
        raise AssertionError

    monkeypatch.setattr(time, "sleep", sleep)
    assert not read_class(tree, "gold", NOTHING, [], with_rates=False).rates
    with pytest.raises(AssertionError):
        read_class(tree, "gold", NOTHING, [], with_rates=True)


def test_name_of_a_class_is_its_path_in_the_tree(top: Path, tree: Tree) -> None:
    for text in ("/", str(top), "."):
        assert class_of(tree, text) == ""
    for text in ("gold", "gold/", f"{top}/gold"):
        assert class_of(tree, text) == "gold"
    for text in ("/gold", "gol", "info", "gold/mon_groups", "../gold", "mon_groups"):
        assert class_of(tree, text) is None


def test_foreign_group_and_class_with_the_same_name_are_both_shown(top: Path, ctl: Ctl) -> None:
    assert properties(ctl, top, "x", "name") == ["x"]
    (top / "x").mkdir()
    assert properties(ctl, top, "x", "path,tasks") == [f"{top}/gold/mon_groups/x", "0", f"{top}/x", "0"]
    assert properties(ctl, top, "x/", "path") == [f"{top}/x"]


def test_unknown_name_lists_what_was_looked_for(top: Path, ctl: Ctl) -> None:
    for text in ("none", "none/mon_groups/x", "/none", "a b"):
        done = ctl("show", text, "--root", str(top))
        assert (done.returncode, done.stdout) == (4, "")
        assert done.stderr == (
            f"resctrlctl: cannot show {text!r}: no workload, no foreign group and no class has this key, name or "
            "path. See: resctrlctl list --all, resctrlctl classes\n"
        )


def test_rate_of_a_class_is_unknown_if_its_groups_changed(
    top: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates() -> set[tuple[str | None, str]]:
        report = read_class(tree, "gold", NOTHING, [], with_rates=True)
        return {(rate.value, rate.reason) for rate in report.rates if rate.event.startswith("mbm")}

    group = top / "gold" / "mon_groups" / "y"
    monkeypatch.setattr(time, "sleep", lambda _seconds: group.mkdir())
    assert rates() == {(None, "groups came or went meanwhile")}
    monkeypatch.setattr(time, "sleep", lambda _seconds: replace(group))
    assert rates() == {(None, "groups came or went meanwhile")}
    # A group of another class is not in the sum.
    monkeypatch.setattr(time, "sleep", lambda _seconds: (top / "mon_groups" / "z").mkdir())
    assert rates() == {("0.000000", "")}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("10", "35", ("12.500000", "")),
        ("10", "9", (None, "the counter was reset")),
        ("10", None, (None, "the kernel has no number")),
        (None, "9", (None, "the kernel has no number")),
    ],
)
def test_rate_is_the_rise_divided_by_the_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str | None,
    second: str | None,
    expected: tuple[str | None, str],
) -> None:
    foreign = Foreign(class_="", name="x", path=str(tmp_path))
    values, times = iter((first, second)), iter((100.0, 102.0))
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))

    def read() -> ReadForeignReply:
        value = next(values)
        reading = Reading(
            domain="mon_L3_00",
            event="mbm_total_bytes",
            kind=Kind.CUMULATIVE,
            unit="bytes",
            status=Status.OK,
            value=value,
            text=value or "Unavailable",
            nested=False,
        )
        return ReadForeignReply(foreign=foreign, readings=[reading])

    report = read_foreign(foreign, read, with_rates=True, is_here=True)
    assert [(rate.value, rate.reason) for rate in report.rates] == [expected]
    assert report.tasks is None


def test_replaced_foreign_group_has_no_rate(top: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    path = top / "gold" / "mon_groups" / "x"
    foreign = Foreign(class_="gold", name="x", path=str(path))
    reading = Reading(
        domain="d", event="e", kind=Kind.CUMULATIVE, unit="", status=Status.OK, value="1", text="1", nested=False
    )
    monkeypatch.setattr(time, "sleep", lambda _seconds: replace(path))
    report = read_foreign(
        foreign, lambda: ReadForeignReply(foreign=foreign, readings=[reading]), with_rates=True, is_here=True
    )
    assert [(rate.value, rate.reason) for rate in report.rates] == [
        (None, "the group was removed or replaced meanwhile")
    ]


def test_root_without_a_list_of_tasks_has_no_number_of_tasks(tmp_path: Path) -> None:
    top = tmp_path / "resctrl"
    top.mkdir()
    with Simulation(str(top), "monitoring-only"):
        tree = Tree.open(str(top), allow_simulation=True)
        report = read_class(tree, "", NOTHING, [], with_rates=False)
    assert isinstance(report, ClassReport) and report.tasks is None
    text = to_text(blocks(report, None), None, legend=True)
    assert text.startswith("/\n      Kind: root class: the tasks that no other class has\n")
    assert "Tasks:" not in text
