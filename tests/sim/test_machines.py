# SPDX-License-Identifier: Apache-2.0
"""Sub-NUMA Clustering, CPUs that come and go, and the rules of an older kernel."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

import pytest

from resctrlmond.sim.profiles import PROFILES, profile_named
from tests.sim.virtual import Lab

GIB = 1 << 30
DATA = "mon_groups/a/mon_data/"


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


def busy(profile: str, cpus: int = 4) -> tuple[Lab, int]:
    """A group with one task that ran a second on each CPU."""
    lab = Lab(profile, cpus=cpus)
    lab.mkdir("mon_groups/a")
    tid = lab.tasks.fork()
    lab.write("mon_groups/a/tasks", str(tid))
    for cpu in range(cpus):
        lab.run(tid, 1.0, cpu)
        lab.model.accounting.look()
    return lab, tid


def domains(lab: Lab, group: str) -> set[str]:
    return set(lab.directory(group + "/mon_data").children)


# Sub-NUMA Clustering


def test_an_l3_has_its_nodes_in_it_and_is_their_sum() -> None:
    lab, _ = busy("intel-snc2")
    assert domains(lab, "mon_groups/a") == {"mon_L3_00", "mon_L3_01"}
    assert {"mon_sub_L3_02", "mon_sub_L3_03"} < set(lab.directory(DATA + "mon_L3_01").children)
    for event in ("mbm_total_bytes", "mbm_local_bytes", "llc_occupancy"):
        for cache, nodes in (("mon_L3_00", (0, 1)), ("mon_L3_01", (2, 3))):
            parts = [int(lab.file(f"{DATA}{cache}/mon_sub_L3_{node:02d}/{event}").show()) for node in nodes]
            assert int(lab.file(f"{DATA}{cache}/{event}").show()) == sum(parts)
    assert lab.read(DATA + "mon_L3_00/mbm_total_bytes") == f"{2 * GIB}\n"


def test_nodes_divide_rmids_and_unit() -> None:
    lab = Lab("intel-snc2")
    assert lab.read("info/L3_MON/num_rmids") == "160\n"  # of 320
    lab.write("info/L3_MON/max_threshold_occupancy", "100000\n")
    assert lab.read("info/L3_MON/max_threshold_occupancy") == f"{3 * 32768}\n"


def test_groups_cannot_be_made_in_a_node() -> None:
    lab = Lab("intel-snc2")
    assert refused(lambda: lab.mkdir("mon_data/mon_L3_00/mon_sub_L3_00/x")) == "EPERM"


# CPUs that come and go


def test_a_cache_that_goes_offline_takes_its_directory_everywhere_and_restarts_traffic_when_it_returns() -> None:
    lab, tid = busy("intel-aet", cpus=2)
    lab.mkdir("c")
    old = lab.file(DATA + "mon_L3_01/mbm_total_bytes")
    lab.model.hotplug.set_domain("mon_L3_01", False)
    for group in ("", "c", "mon_groups/a"):
        assert domains(lab, group) == {"mon_L3_00", "mon_PERF_PKG_00", "mon_PERF_PKG_01"}
    assert old.removed
    assert lab.read("schemata") == "L3:0=fff\n"
    lab.mkdir("mon_groups/b")
    assert "mon_L3_01" not in domains(lab, "mon_groups/b")
    lab.model.hotplug.set_domain("mon_L3_01", True)
    assert "mon_L3_01" in domains(lab, "mon_groups/b")
    assert lab.read(DATA + "mon_L3_01/mbm_total_bytes") == "0\n"
    lab.run(tid, 1.0, cpu=1)
    assert lab.read(DATA + "mon_L3_01/mbm_total_bytes") == f"{GIB}\n"
    assert lab.read(DATA + "mon_L3_00/mbm_total_bytes") == f"{GIB}\n"


def test_a_package_that_returns_goes_on_counting() -> None:
    lab, _ = busy("intel-aet", cpus=2)
    energy = DATA + "mon_PERF_PKG_01/core_energy"
    before = lab.read(energy)
    lab.model.hotplug.set_domain("mon_PERF_PKG_01", False)
    assert "mon_PERF_PKG_01" not in domains(lab, "mon_groups/a")
    lab.model.hotplug.set_domain("mon_PERF_PKG_01", True)
    assert lab.read(energy) == before == "2.500000\n"


def test_an_l3_stays_until_its_last_node_goes_and_sums_up_those_that_are_there() -> None:
    lab, _ = busy("intel-snc2")
    lab.model.hotplug.set_domain("mon_sub_L3_00", False)
    assert lab.read(DATA + "mon_L3_00/mbm_total_bytes") == f"{GIB}\n"
    assert "mon_sub_L3_00" not in lab.directory(DATA + "mon_L3_00").children
    lab.model.hotplug.set_domain("mon_sub_L3_01", False)
    assert domains(lab, "mon_groups/a") == {"mon_L3_01"}
    lab.model.hotplug.set_domain("mon_sub_L3_01", True)
    assert "mon_sub_L3_00" not in lab.directory(DATA + "mon_L3_00").children
    lab.model.hotplug.set_domain("mon_sub_L3_00", True)
    assert {"mon_sub_L3_00", "mon_sub_L3_01"} < set(lab.directory(DATA + "mon_L3_00").children)
    assert refused(lambda: lab.mkdir(DATA + "mon_L3_00/mon_sub_L3_00/x")) == "EPERM"


@pytest.mark.parametrize("name", ["mon_L3_07", "mon_PERF_PKG_00", "", "tasks", "mon_sub_L3_00"])
def test_unknown_domain_cannot_be_switched(name: str) -> None:
    assert refused(lambda: Lab("intel-rdt").model.hotplug.set_domain(name, False)) == "ENOENT"


def test_a_domain_that_is_there_does_not_come_online() -> None:
    assert refused(lambda: Lab("intel-rdt").model.hotplug.set_domain("mon_L3_00", True)) == "ENOENT"


def test_a_domain_that_goes_lets_its_limbo_go() -> None:
    lab = Lab("intel-aet", rmids=2)
    lab.mkdir("mon_groups/a")
    lab.write("mon_groups/a/tasks", str(lab.tasks.fork()))
    lab.rmdir("mon_groups/a")
    assert refused(lambda: lab.mkdir("mon_groups/b")) == "EBUSY"
    for name in ("mon_L3_00", "mon_L3_01"):
        lab.model.hotplug.set_domain(name, False)
    lab.mkdir("mon_groups/b")


# Linux 6.12


@pytest.fixture
def old() -> Lab:
    lab = Lab("intel-rdt", rmids=3, kernel="6.12")
    lab.mkdir("mon_groups/a")
    with pytest.raises(OSError, match="Invalid"):
        lab.write("tasks", "abc")
    return lab


WORDS = "Task list parsing error pid abc\n"


def test_mkdir_and_rmdir_left_the_status_as_it_was(old: Lab) -> None:
    old.mkdir("mon_groups/b")
    assert old.status == WORDS
    assert refused(lambda: old.mkdir("mon_groups/c")) == "ENOSPC"
    assert old.status == WORDS + "Out of RMIDs\n"
    old.rmdir("mon_groups/b")
    assert old.status == WORDS + "Out of RMIDs\n"


@pytest.mark.parametrize("path", ["info/x", "mon_data/x", "mon_groups/a/x", "mon_groups/mon_groups"])
def test_where_no_group_could_be_made_mkdir_said_eperm(old: Lab, path: str) -> None:
    assert refused(lambda: old.mkdir(path)) == "EPERM"
    assert old.status == WORDS


def test_there_were_no_assignable_counters_nor_telemetry(old: Lab) -> None:
    assert "mbm_assign_mode" not in old.directory("info/L3_MON").children
    for profile in ("intel-aet", "amd-abmc"):
        with pytest.raises(ValueError, match=re.escape("newer kernel than 6.12")):
            profile_named(profile, kernel="6.12")


# Every machine


@pytest.mark.parametrize("profile", PROFILES)
def test_every_machine_counts_what_runs_in_it(profile: str) -> None:
    lab, _ = busy(profile, cpus=2)
    for name in domains(lab, "mon_groups/a"):
        directory = lab.directory(DATA + name)
        for event in directory.children:
            if not event.startswith("mon_sub"):
                text = lab.read(f"{DATA}{name}/{event}").strip()
                assert re.fullmatch(r"[0-9]+(\.[0-9]{6})?", text), (name, event, text)


@pytest.mark.parametrize(
    ("profile", "number"),
    [
        ("intel-rdt", {"counters": 5}),
        ("amd-abmc", {"counters": 0}),
        ("monitoring-only", {"closids": 4}),
        ("intel-rdt", {"closids": 1}),
        ("intel-rdt", {"rmids": 1}),
        ("intel-rdt", {"domains": 65}),
        ("intel-aet", {"lag_ms": -1}),
        ("intel-aet", {"telemetry_bits": 64}),
    ],
)
def test_numbers_that_no_machine_has(profile: str, number: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"simulated: give|has no"):
        profile_named(profile, **number)
