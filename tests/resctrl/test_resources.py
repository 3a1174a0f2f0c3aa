# SPDX-License-Identifier: Apache-2.0
"""Resources other than the L3 cache that count bandwidth, as on kernels of NVIDIA: mon_MB_NN, info/MB_MON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resctrlmond.resctrl import tree as tree_module
from resctrlmond.resctrl.bandwidth import Mode, assignments_file, by_domain, kernel_mode_of
from resctrlmond.resctrl.class_counters import read_class
from resctrlmond.resctrl.counters import repeated
from resctrlmond.resctrl.tree import GroupRef, Tree

TRAFFIC = "mbm_total_bytes"
KEY = GroupRef("", "k")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with the files of such a kernel: the L3 counts occupancy only."""
    write(
        tmp_path,
        {
            "info/L3_MON/num_rmids": "94\n",
            "info/L3_MON/mon_features": "llc_occupancy\n",
            "info/MB_MON/num_rmids": "94\n",
            "info/MB_MON/mon_features": f"{TRAFFIC}\n",
            "info/MB_MON/mbm_assign_mode": "[mbm_event]\ndefault\n",
            "info/MB_MON/num_mbm_cntrs": "0=9;1=9\n",
            "info/MB_MON/available_mbm_cntrs": "0=8;1=0\n",
            f"info/MB_MON/event_configs/{TRAFFIC}/event_filter": "local_reads\n",
            "mon_data/mon_L3_00/llc_occupancy": "1\n",
            f"mon_data/mon_MB_00/{TRAFFIC}": "5\n",
            "tasks": "1\niommu_group:4\n22\n",
            "cpus": "\n",
            "mon_groups/k/tasks": "\n",
            "mon_groups/k/mbm_MB_assignments": "\n",
        },
    )
    # An Arm processor has another modalias.
    monkeypatch.setattr(tree_module, "MODALIAS", os.fspath(tmp_path / "modalias"))
    (tmp_path / "modalias").write_text("cpu:type:aarch64:feature:,0000\n")
    return tmp_path


class _Tree(Tree):
    def check_mounted(self) -> None:
        pass


def opened(root: Path) -> Tree:
    return _Tree(os.fspath(root), None)


def test_mode_and_counters_are_those_of_the_resource_that_counts_bandwidth(root: Path) -> None:
    """The counters passed for dedicated ones."""
    tree = opened(root)
    found = tree.bandwidth_configuration()
    assert found.mode is Mode.ASSIGNED
    assert found.transactions == {f"MB_MON/event_configs/{TRAFFIC}/event_filter": "local_reads"}
    seen = tree.bandwidth()
    assert (seen.mode, seen.can_assign) == (Mode.ASSIGNED, True)
    assert (seen.counters, seen.available) == ({"mon_MB_00": 9, "mon_MB_01": 9}, {"mon_MB_00": 8, "mon_MB_01": 0})
    write(root, {"info/MB_MON/mbm_assign_mode": "[default]\nmbm_event\n"})
    assert tree.bandwidth_configuration().mode is tree.bandwidth().mode is Mode.REALLOCATED


def test_mode_is_the_worst_of_those_of_all_resources(root: Path) -> None:
    write(root, {"info/L3_MON/mon_features": f"llc_occupancy\n{TRAFFIC}\n"})
    assert opened(root).bandwidth_configuration().mode is Mode.ASSIGNED
    write(root, {"info/L3_MON/mbm_assign_mode": "[default]\nmbm_event\n"})
    assert opened(root).bandwidth_configuration().mode is Mode.REALLOCATED


def test_counter_is_assigned_in_the_file_of_its_resource(root: Path) -> None:
    tree, file = opened(root), root / "mon_groups/k/mbm_MB_assignments"
    assert tree.assign_counter(KEY, TRAFFIC, "mon_MB_01")
    assert file.read_text() == f"{TRAFFIC}:1=e\n"
    # No file is known that assigns counters of these.
    assert not tree.assign_counter(KEY, TRAFFIC, "mon_NODE_00")
    assert not tree.assign_counter(KEY, TRAFFIC, "other")


def test_file_and_number_of_a_domain() -> None:
    assert assignments_file("mon_L3_01") == ("mbm_L3_assignments", 1)
    assert assignments_file("mon_PERF_PKG_10") == ("mbm_PERF_PKG_assignments", 10)
    assert assignments_file("mon_L3_00/mon_sub_L3_01") == assignments_file("tasks") == ("", -1)
    assert by_domain("L3", "0=32;12=30;x") == {"mon_L3_00": 32, "mon_L3_12": 30}


def test_groups_of_devices_are_not_tasks(root: Path) -> None:
    """The line raised ValueError."""
    assert opened(root).tasks("") == [1, 22]


def test_event_of_two_resources_counts_once(root: Path) -> None:
    both = {("mon_L3_00", TRAFFIC), ("mon_MB_00", TRAFFIC), ("mon_L3_00/mon_sub_L3_00", TRAFFIC), ("mon_L3_00", "x")}
    assert repeated(both) == {("mon_MB_00", TRAFFIC)}
    assert set(read_class(os.fspath(root), "").own) == {("mon_L3_00", "llc_occupancy"), ("mon_MB_00", TRAFFIC)}
    write(root, {f"mon_data/mon_L3_00/{TRAFFIC}": "3\n"})
    assert set(read_class(os.fspath(root), "").own) == {("mon_L3_00", "llc_occupancy"), ("mon_L3_00", TRAFFIC)}


INHERITED = "inherit_ctrl_and_mon", "global_assign_ctrl_inherit_mon", "global_assign_ctrl_inherit_mon_per_cpu"


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("", ""),
        *((f"[{name}]\nother\n", "") for name in INHERITED),
        ("[inherit_ctrl_and_mon:group=//]\nglobal_assign_ctrl_assign_mon_per_cpu:group=none\n", ""),
        ("inherit_ctrl_and_mon\n[global_assign_ctrl_assign_mon]\n", "global_assign_ctrl_assign_mon"),
        (
            "inherit_ctrl_and_mon\n[global_assign_ctrl_assign_mon_per_cpu:group=a/b/]\n",
            "global_assign_ctrl_assign_mon_per_cpu",
        ),
        ("[inherit_ctrl_and_mon]\n[new_mode]\n", "unknown"),
        ("[new_mode]\n", "new_mode"),
        ("inherit_ctrl_and_mon\n", "unknown"),
        ("\n", "unknown"),
    ],
)
def test_mode_in_which_the_kernel_counts_its_work(root: Path, text: str, mode: str) -> None:
    assert kernel_mode_of(text) == mode
    if text:
        write(root, {"info/kernel_mode": text})
    tree = opened(root)
    assert tree.bandwidth_configuration().kernel_mode == tree.bandwidth().kernel_mode == mode
