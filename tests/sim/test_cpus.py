# SPDX-License-Identifier: Apache-2.0
"""CPUs of groups: the group that counts their use, and the domains as CPUs go offline and online."""

from __future__ import annotations

import errno
import random
import re

import pytest

from resctrlmond.sim.kernel.cpusets import cpu_list, cpu_mask, parse_cpu_list, parse_cpu_mask
from tests.sim.virtual import Lab

GIB = 1 << 30


def refusal(lab: Lab, path: str, text: str) -> tuple[str, str]:
    with pytest.raises(OSError) as caught:
        lab.write(path, text)
    return errno.errorcode[caught.value.errno or 0], lab.status


def traffic(lab: Lab, group: str, domain: int = 0) -> int:
    return int(lab.read(f"{group}/mon_data/mon_L3_{domain:02d}/mbm_total_bytes"))


@pytest.fixture
def lab() -> Lab:
    made = Lab("intel-rdt", cpus=4, domains=2)
    for path in ("mon_groups/a", "mon_groups/b", "c", "c/mon_groups/k"):
        made.mkdir(path)
    return made


# -- counting (__resctrl_sched_in() in arch/x86/include/asm/resctrl.h)


def test_the_default_groups_tasks_count_for_their_cpus_group(lab: Lab) -> None:
    tid = lab.tasks.fork()
    lab.write("mon_groups/a/cpus_list", "0")
    for cpu in (0, 0, 1):
        lab.run(tid, 1.0, cpu)
    assert (traffic(lab, "mon_groups/a"), traffic(lab, "")) == (2 * GIB, 3 * GIB)


def test_a_groups_tasks_count_for_it_wherever_they_run(lab: Lab) -> None:
    tid = lab.tasks.fork()
    lab.write("mon_groups/b/tasks", str(tid))
    lab.write("mon_groups/a/cpus_list", "0")
    lab.run(tid, 1.0, 0)
    assert (traffic(lab, "mon_groups/a"), traffic(lab, "mon_groups/b")) == (0, GIB)


def test_a_monitoring_group_goes_before_its_control_group(lab: Lab) -> None:
    tid = lab.tasks.fork()
    lab.write("c/cpus_list", "0,2")
    lab.write("c/mon_groups/k/cpus_list", "2")
    lab.run(tid, 1.0, 0)
    lab.run(tid, 1.0, 2)
    assert [traffic(lab, "c/mon_groups/k", domain) for domain in (0, 1)] == [0, GIB]
    assert [traffic(lab, "c", domain) for domain in (0, 1)] == [GIB, GIB]


def test_a_cpu_counts_for_each_group_while_it_has_it(lab: Lab) -> None:
    tid = lab.tasks.fork()
    lab.run(tid, 1.0, 0)
    for group in ("mon_groups/a", "mon_groups/b", "c"):
        lab.write(f"{group}/cpus_list", "0")
        lab.run(tid, 1.0, 0)
    lab.rmdir("c")
    lab.run(tid, 1.0, 0)
    assert [traffic(lab, group) for group in ("mon_groups/a", "mon_groups/b")] == [GIB, GIB]
    assert sum(row.bytes for row in lab.model.truth(rmid=0).rmids[0].total) == 2 * GIB


def test_a_groups_cpus_hold_cache(lab: Lab) -> None:
    lab.write("mon_groups/a/cpus_list", "0-1")
    lab.now += 60
    assert int(lab.read("mon_groups/a/mon_data/mon_L3_00/llc_occupancy")) == 2 << 20
    assert int(lab.read("mon_groups/a/mon_data/mon_L3_01/llc_occupancy")) == 0


def test_the_truth_names_the_rmid_that_counted(lab: Lab) -> None:
    tid = lab.tasks.fork()
    lab.write("mon_groups/a/cpus_list", "0")
    lab.run(tid, 1.0, 0)
    lab.model.accounting.charge_default(tid, 0, 10**9)
    (task,) = lab.model.truth(tid=tid).tasks
    assert [(row.rmid, row.cpu_ns) for row in task.used] == [(lab.group("mon_groups/a").ids.rmid, 10**9)]


# -- hotplug, beyond tests/conformance/test_domains.py


def test_nodes_and_packages_go_with_their_last_cpu() -> None:
    lab = Lab("intel-snc2", cpus=4)
    lab.model.hotplug.set_cpu(1, False)
    assert "mon_sub_L3_01" not in lab.directory("mon_data/mon_L3_00").children
    lab.model.hotplug.set_cpu(0, False)
    assert set(lab.directory("mon_data").children) == {"mon_L3_01"}
    lab.model.hotplug.set_cpu(1, True)
    assert "mon_sub_L3_00" not in lab.directory("mon_data/mon_L3_00").children
    aet = Lab("intel-aet", cpus=2)
    aet.model.hotplug.set_cpu(1, False)
    assert set(aet.directory("mon_data").children) == {"mon_L3_00", "mon_PERF_PKG_00"}
    aet.model.hotplug.set_cpu(1, True)
    assert len(aet.directory("mon_data").children) == 4


def test_a_domain_goes_with_its_cpus_and_comes_with_all(lab: Lab) -> None:
    lab.write("mon_groups/a/cpus_list", "1-2")
    lab.model.hotplug.set_domain("mon_L3_01", False)
    assert (lab.read("cpus_list"), lab.read("mon_groups/a/cpus_list")) == ("0-1\n", "1\n")
    assert refusal(lab, "mon_groups/a/cpus_list", "2")[0] == "EINVAL"
    lab.model.hotplug.set_cpu(2, True)
    assert (lab.read("cpus_list"), set(lab.directory("mon_data").children)) == ("0-2\n", {"mon_L3_00", "mon_L3_01"})


@pytest.mark.parametrize(
    ("cpu", "online", "wanted"),
    [(4, False, "ENOENT"), (-1, True, "ENOENT"), (0, True, "ENOENT"), (1, False, "EBUSY")],
)
def test_cpus_that_cannot_go(lab: Lab, cpu: int, online: bool, wanted: str) -> None:
    for other in {0, 2, 3} if wanted == "EBUSY" else ():
        lab.model.hotplug.set_cpu(other, False)
    with pytest.raises(OSError) as caught:
        lab.model.hotplug.set_cpu(cpu, online)
    assert errno.errorcode[caught.value.errno or 0] == wanted


# -- machines larger than any guest


def test_shown_masks_and_lists_can_be_written() -> None:
    chance = random.Random(5)
    for total in (1, 31, 32, 33, 64, 100, 1024):
        for _ in range(20):
            cpus = {cpu for cpu in range(total) if chance.random() < 0.5}
            assert parse_cpu_mask(cpu_mask(cpus, total), total) == cpus
            assert parse_cpu_list(cpu_list(cpus), total) == cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("1,0", {32}), ("1 00000000", {32}), ("1,,0", {32}), ("z00000001", {0}), ("1z00000001", {0, 32})],
)
def test_masks_of_two_words(text: str, cpus: set[int]) -> None:
    assert parse_cpu_mask(text, 40) == cpus


@pytest.mark.parametrize("text", ["100,0", "1,0,0", "100000000", "1zz00000001"])
def test_masks_that_are_too_long(text: str) -> None:
    with pytest.raises(OSError, match=re.escape("too large") if text != "1zz00000001" else "Invalid"):
        parse_cpu_mask(text, 40)
