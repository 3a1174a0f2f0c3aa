# SPDX-License-Identifier: Apache-2.0
"""The verb classes: what each class may use, on simulators with cache allocation, and what its workloads used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from resctrlctl.screen.layout import to_text
from resctrlctl.workloads.classes import Allocation, Class, ClassesReply, _pairs, read, table, with_use
from resctrlmond.resctrl.tree import Tree
from resctrlmond.sim.fuse.mount import Simulation
from tests.ctl.conftest import Ctl
from tests.ctl.fake_manager import FakeManager
from tests.ctl.test_screens import usage

TEXT = """\
CLASS   MODE       RESOURCE  DOMAINS  LIMIT                   SIZE  SHARED WITH
/       shareable  L3        0-1      ways 0-11 (12 of 12)  576MiB  gold silver
gold    shareable  L3        0        ways 0-3 (4 of 12)    192MiB  / silver
                   L3        1        ways 0-3 (4 of 12)    192MiB  /
silver  shareable  L3        0        ways 3-7 (5 of 12)    240MiB  / gold
                   L3        1        ways 4-7 (4 of 12)    192MiB  /

CLOSIDs: 3 of 16 used, 13 free.
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A simulated resctrl with two classes, whose ways overlap in one of two domains."""
    top = tmp_path / "resctrl"
    top.mkdir()
    with Simulation(str(top)):
        for name, schemata in (("gold", "L3:0=f;1=f"), ("silver", "L3:0=f8;1=f0")):
            (top / name).mkdir()
            (top / name / "schemata").write_text(f"{schemata}\n")
        yield top


def test_each_class_has_its_ways_and_the_classes_that_share_them(mounted: Path, ctl: Ctl) -> None:
    done = ctl("classes", "--root", str(mounted))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", TEXT)
    assert ctl("classes", "-q", "--root", str(mounted)).stdout == "/\ngold\nsilver\n"


def test_json_has_masks_ways_and_sizes(mounted: Path, ctl: Ctl) -> None:
    reply = json.loads(ctl("classes", "--json", "--root", str(mounted)).stdout)
    assert (reply["closids"], [each["name"] for each in reply["classes"]]) == (16, ["", "gold", "silver"])
    assert reply["classes"][2]["allocations"][0] == {
        "resource": "L3",
        "domains": [0],
        "value": "f8",
        "ways": [3, 4, 5, 6, 7],
        "allWays": 12,
        "size": 5 * 48 << 20,
        "sharedWith": ["", "gold"],
    }


def test_ways_of_other_hardware_and_free_closids_are_in_the_footer(tmp_path: Path) -> None:
    top = tmp_path / "resctrl"
    top.mkdir()
    with Simulation(str(top), closids=4, shareable_bits=0xC00):
        text = table(read(Tree.open(str(top), allow_simulation=True))).footer
    assert text == "CLOSIDs: 1 of 4 used, 3 free. Other hardware may use ways 10-11 of L3 too."


def test_machine_without_allocation_has_the_root_class_only(tmp_path: Path, ctl: Ctl) -> None:
    top = tmp_path / "resctrl"
    top.mkdir()
    with Simulation(str(top), "monitoring-only"):
        done = ctl("classes", "--root", str(top))
    assert done.stdout.splitlines()[1].split() == ["/", "shareable", "-", "-"]
    assert done.stdout.endswith(
        "This machine allocates neither cache nor bandwidth: the root class is the only one.\n"
    )


def test_path_without_resctrl_is_an_error(ctl: Ctl, tmp_path: Path) -> None:
    done = ctl("classes", "--root", str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"resctrlctl: cannot list the classes: {tmp_path}: ")


def test_path_and_workloads_are_those_of_the_daemon(manager: FakeManager, ctl: Ctl) -> None:
    manager.add("k")
    done = ctl("classes")
    # The manager of the tests has no resctrl at its path.
    assert (done.returncode, done.stdout) == (3, "")
    assert "/sys/fs/resctrl" in done.stderr


def test_use_is_the_sum_of_the_workloads_in_one_class() -> None:
    both = replace(usage(3), workload=replace(usage(3).workload, classes=["gold", ""]))
    gold = replace(usage(5), workload=replace(usage(5).workload, class_="gold"))
    ways = [Allocation("L3", (0,), "f", (0, 1, 2, 3), 12)]
    empty = ClassesReply(16, [Class("", "shareable", ways), Class("gold", "shareable", ways)], {}, is_in_mbps=False)
    reply = with_use(empty, [usage(1), usage(2), both, gold])
    assert [(each.workloads, each.traffic, each.llc) for each in reply.classes] == [
        (3, str(1 + 2**7), str(3 * 70_000)),
        (2, str(5**7), str(5 * 70_000)),
    ]
    assert reply.classes[0].energy == "33.000003"
    assert table(reply).footer.endswith("What workloads in several classes used is not included: 1.")


def test_limits_of_bandwidth_have_the_unit_of_the_mount() -> None:
    limits = [Allocation("MB", (0, 1, 3), "50"), Allocation("MB", (2,), "2048")]

    def shown(*, is_in_mbps: bool) -> str:
        return to_text([table(ClassesReply(8, [Class("", "", limits)], {}, is_in_mbps))], None, legend=True)

    assert "0-1,3    50 %" in shown(is_in_mbps=False)
    # AMD counts in eighths of GB/s; no file tells the unit.
    assert "2        2048\n" in shown(is_in_mbps=False)
    assert "2        2048 MB/s" in shown(is_in_mbps=True)


def test_unknown_lines_are_skipped() -> None:
    assert _pairs("    L3CODE:0=ff;1= f0\nlocksetup\nMB:0=\nL2:x=1;=2\n") == {
        ("L3CODE", 0): "ff",
        ("L3CODE", 1): "f0",
        ("MB", 0): "",
    }
