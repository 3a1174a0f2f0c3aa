# SPDX-License-Identifier: Apache-2.0
"""Sub-NUMA Clustering, CPU hotplug, and the rules of an older kernel."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

import pytest

from resctrlmond.sim.profiles import PROFILES, profile_named
from tests.sim.virtual import VirtualResctrl

GIB = 1 << 30
DATA = "mon_groups/a/mon_data/"


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


def busy(profile: str, cpus: int = 4) -> tuple[VirtualResctrl, int]:
    """Return a model with a group whose task ran one second on each CPU."""
    resctrl = VirtualResctrl(profile, cpus=cpus)
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    for cpu in range(cpus):
        resctrl.run(tid, 1.0, cpu)
        resctrl.model.accounting.look()
    return resctrl, tid


def domains(resctrl: VirtualResctrl, group: str) -> set[str]:
    return set(resctrl.directory(group + "/mon_data").children)


# Sub-NUMA Clustering


def test_an_l3_has_its_nodes_in_it_and_is_their_sum() -> None:
    resctrl, _ = busy("intel-snc2")
    assert domains(resctrl, "mon_groups/a") == {"mon_L3_00", "mon_L3_01"}
    assert {"mon_sub_L3_02", "mon_sub_L3_03"} < set(resctrl.directory(DATA + "mon_L3_01").children)
    for event in ("mbm_total_bytes", "mbm_local_bytes", "llc_occupancy"):
        for cache, nodes in (("mon_L3_00", (0, 1)), ("mon_L3_01", (2, 3))):
            parts = [int(resctrl.file(f"{DATA}{cache}/mon_sub_L3_{node:02d}/{event}").show()) for node in nodes]
            assert int(resctrl.file(f"{DATA}{cache}/{event}").show()) == sum(parts)
    assert resctrl.read(DATA + "mon_L3_00/mbm_total_bytes") == f"{2 * GIB}\n"


def test_nodes_divide_rmids_and_unit() -> None:
    resctrl = VirtualResctrl("intel-snc2")
    assert resctrl.read("info/L3_MON/num_rmids") == "160\n"  # of 320
    resctrl.write("info/L3_MON/max_threshold_occupancy", "100000\n")
    assert resctrl.read("info/L3_MON/max_threshold_occupancy") == f"{3 * 32768}\n"


def test_groups_cannot_be_created_in_a_node() -> None:
    resctrl = VirtualResctrl("intel-snc2")
    assert refused(lambda: resctrl.mkdir("mon_data/mon_L3_00/mon_sub_L3_00/x")) == "EPERM"


# CPUs that come and go


def test_offline_cache_loses_its_directories_and_restarts_its_traffic() -> None:
    resctrl, tid = busy("intel-aet", cpus=2)
    resctrl.mkdir("c")
    old = resctrl.file(DATA + "mon_L3_01/mbm_total_bytes")
    resctrl.model.hotplug.set_domain("mon_L3_01", False)
    for group in ("", "c", "mon_groups/a"):
        assert domains(resctrl, group) == {"mon_L3_00", "mon_PERF_PKG_00", "mon_PERF_PKG_01"}
    assert old.removed
    assert resctrl.read("schemata") == "L3:0=fff\n"
    resctrl.mkdir("mon_groups/b")
    assert "mon_L3_01" not in domains(resctrl, "mon_groups/b")
    resctrl.model.hotplug.set_domain("mon_L3_01", True)
    assert "mon_L3_01" in domains(resctrl, "mon_groups/b")
    assert resctrl.read(DATA + "mon_L3_01/mbm_total_bytes") == "0\n"
    resctrl.run(tid, 1.0, cpu=1)
    assert resctrl.read(DATA + "mon_L3_01/mbm_total_bytes") == f"{GIB}\n"
    assert resctrl.read(DATA + "mon_L3_00/mbm_total_bytes") == f"{GIB}\n"


def test_package_that_returns_continues_to_count() -> None:
    resctrl, _ = busy("intel-aet", cpus=2)
    energy = DATA + "mon_PERF_PKG_01/core_energy"
    before = resctrl.read(energy)
    resctrl.model.hotplug.set_domain("mon_PERF_PKG_01", False)
    assert "mon_PERF_PKG_01" not in domains(resctrl, "mon_groups/a")
    resctrl.model.hotplug.set_domain("mon_PERF_PKG_01", True)
    assert resctrl.read(energy) == before == "2.500000\n"


def test_l3_stays_until_its_last_node_is_offline_and_sums_online_nodes() -> None:
    resctrl, _ = busy("intel-snc2")
    resctrl.model.hotplug.set_domain("mon_sub_L3_00", False)
    assert resctrl.read(DATA + "mon_L3_00/mbm_total_bytes") == f"{GIB}\n"
    assert "mon_sub_L3_00" not in resctrl.directory(DATA + "mon_L3_00").children
    resctrl.model.hotplug.set_domain("mon_sub_L3_01", False)
    assert domains(resctrl, "mon_groups/a") == {"mon_L3_01"}
    resctrl.model.hotplug.set_domain("mon_sub_L3_01", True)
    assert "mon_sub_L3_00" not in resctrl.directory(DATA + "mon_L3_00").children
    resctrl.model.hotplug.set_domain("mon_sub_L3_00", True)
    assert {"mon_sub_L3_00", "mon_sub_L3_01"} < set(resctrl.directory(DATA + "mon_L3_00").children)
    assert refused(lambda: resctrl.mkdir(DATA + "mon_L3_00/mon_sub_L3_00/x")) == "EPERM"


@pytest.mark.parametrize("name", ["mon_L3_07", "mon_PERF_PKG_00", "", "tasks", "mon_sub_L3_00"])
def test_unknown_domain_cannot_be_switched(name: str) -> None:
    assert refused(lambda: VirtualResctrl("intel-rdt").model.hotplug.set_domain(name, False)) == "ENOENT"


def test_online_domain_cannot_come_online() -> None:
    assert refused(lambda: VirtualResctrl("intel-rdt").model.hotplug.set_domain("mon_L3_00", True)) == "ENOENT"


def test_offline_domain_frees_its_rmids_in_limbo() -> None:
    resctrl = VirtualResctrl("intel-aet", rmids=2)
    resctrl.mkdir("mon_groups/a")
    resctrl.write("mon_groups/a/tasks", str(resctrl.tasks.fork()))
    resctrl.rmdir("mon_groups/a")
    assert refused(lambda: resctrl.mkdir("mon_groups/b")) == "EBUSY"
    for name in ("mon_L3_00", "mon_L3_01"):
        resctrl.model.hotplug.set_domain(name, False)
    resctrl.mkdir("mon_groups/b")


# Linux 6.12


@pytest.fixture
def old() -> VirtualResctrl:
    resctrl = VirtualResctrl("intel-rdt", rmids=3, kernel="6.12")
    resctrl.mkdir("mon_groups/a")
    with pytest.raises(OSError, match="Invalid"):
        resctrl.write("tasks", "abc")
    return resctrl


WORDS = "Task list parsing error pid abc\n"


def test_mkdir_and_rmdir_left_the_status_as_it_was(old: VirtualResctrl) -> None:
    old.mkdir("mon_groups/b")
    assert old.status == WORDS
    assert refused(lambda: old.mkdir("mon_groups/c")) == "ENOSPC"
    assert old.status == WORDS + "Out of RMIDs\n"
    old.rmdir("mon_groups/b")
    assert old.status == WORDS + "Out of RMIDs\n"


@pytest.mark.parametrize("path", ["info/x", "mon_data/x", "mon_groups/a/x", "mon_groups/mon_groups"])
def test_mkdir_in_a_place_for_no_group_was_eperm(old: VirtualResctrl, path: str) -> None:
    assert refused(lambda: old.mkdir(path)) == "EPERM"
    assert old.status == WORDS


def test_there_were_no_assignable_counters_nor_telemetry(old: VirtualResctrl) -> None:
    assert "mbm_assign_mode" not in old.directory("info/L3_MON").children
    for profile in ("intel-aet", "amd-abmc"):
        with pytest.raises(ValueError, match=re.escape("newer kernel than 6.12")):
            profile_named(profile, kernel="6.12")


# Every machine


@pytest.mark.parametrize("profile", PROFILES)
def test_every_machine_counts_its_tasks(profile: str) -> None:
    resctrl, _ = busy(profile, cpus=2)
    for name in domains(resctrl, "mon_groups/a"):
        directory = resctrl.directory(DATA + name)
        for event in directory.children:
            if not event.startswith("mon_sub"):
                text = resctrl.read(f"{DATA}{name}/{event}").strip()
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
