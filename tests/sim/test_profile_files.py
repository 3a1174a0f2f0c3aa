# SPDX-License-Identifier: Apache-2.0
"""Files of two machine profiles have the contents that Linux 7.2 showed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.sim.conftest import Mounted, mounted


@pytest.fixture(scope="module")
def rdt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    yield from mounted(tmp_path_factory.mktemp("rdt"), "intel-rdt")


@pytest.fixture(scope="module")
def monitoring_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    yield from mounted(tmp_path_factory.mktemp("mon"), "monitoring-only")


def test_files_of_a_machine_with_allocation(rdt: Mounted) -> None:
    assert rdt.read("info/L3_MON/mon_features") == "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"
    assert rdt.read("info/L3_MON/num_rmids") == "64\n"
    assert rdt.read("info/L3_MON/mbm_assign_mode") == "[default]\n"
    assert rdt.read("info/L3/num_closids") == "4\n"
    assert rdt.read("schemata") == "L3:0=fff\n"
    assert rdt.read("mode") == "shareable\n"
    names = ["cpus", "cpus_list", "info", "mode", "mon_data", "mon_groups", "schemata", "size", "tasks"]
    assert sorted(os.listdir(rdt.path())) == names


def test_files_of_a_machine_without_allocation(monitoring_only: Mounted) -> None:
    assert sorted(os.listdir(monitoring_only.path("info"))) == ["L3_MON", "last_cmd_status"]
    assert monitoring_only.read("info/L3_MON/mon_features") == "mbm_total_bytes\nmbm_local_bytes\n"
    assert monitoring_only.read("info/L3_MON/max_threshold_occupancy") == "0\n"
    assert monitoring_only.read("schemata") == ""
    names = ["cpus", "cpus_list", "info", "mode", "mon_data", "mon_groups", "schemata", "size", "tasks"]
    assert sorted(os.listdir(monitoring_only.path())) == names
