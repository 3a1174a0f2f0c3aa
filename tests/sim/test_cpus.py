# SPDX-License-Identifier: Apache-2.0
"""CPUs of groups: the group that counts their use, and the domains as CPUs go offline and online."""

from __future__ import annotations

import errno
import random
import re

import pytest

from resctrlmond.sim.kernel.cpusets import cpu_list, cpu_mask, parse_cpu_list, parse_cpu_mask
from tests.sim.virtual import VirtualResctrl

GIB = 1 << 30


def refusal(resctrl: VirtualResctrl, path: str, text: str) -> tuple[str, str]:
    with pytest.raises(OSError) as caught:
        resctrl.write(path, text)
    return errno.errorcode[caught.value.errno or 0], resctrl.status


def traffic(resctrl: VirtualResctrl, group: str, domain: int = 0) -> int:
    return int(resctrl.read(f"{group}/mon_data/mon_L3_{domain:02d}/mbm_total_bytes"))


@pytest.fixture
def resctrl() -> VirtualResctrl:
    made = VirtualResctrl("intel-rdt", cpus=4, domains=2)
    for path in ("mon_groups/a", "mon_groups/b", "c", "c/mon_groups/k"):
        made.mkdir(path)
    return made


# -- counting (__resctrl_sched_in() in arch/x86/include/asm/resctrl.h)


def test_the_default_groups_tasks_count_for_their_cpus_group(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/cpus_list", "0")
    for cpu in (0, 0, 1):
        resctrl.run(tid, 1.0, cpu)
    assert (traffic(resctrl, "mon_groups/a"), traffic(resctrl, "")) == (2 * GIB, 3 * GIB)


def test_tasks_of_a_group_count_for_it_on_every_cpu(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/b/tasks", str(tid))
    resctrl.write("mon_groups/a/cpus_list", "0")
    resctrl.run(tid, 1.0, 0)
    assert (traffic(resctrl, "mon_groups/a"), traffic(resctrl, "mon_groups/b")) == (0, GIB)


def test_cpu_of_a_monitoring_group_counts_for_it_and_its_control_group(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("c/cpus_list", "0,2")
    resctrl.write("c/mon_groups/k/cpus_list", "2")
    resctrl.run(tid, 1.0, 0)
    resctrl.run(tid, 1.0, 2)
    assert [traffic(resctrl, "c/mon_groups/k", domain) for domain in (0, 1)] == [0, GIB]
    assert [traffic(resctrl, "c", domain) for domain in (0, 1)] == [GIB, GIB]


def test_a_cpu_counts_for_each_group_while_it_has_it(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.run(tid, 1.0, 0)
    for group in ("mon_groups/a", "mon_groups/b", "c"):
        resctrl.write(f"{group}/cpus_list", "0")
        resctrl.run(tid, 1.0, 0)
    resctrl.rmdir("c")
    resctrl.run(tid, 1.0, 0)
    assert [traffic(resctrl, group) for group in ("mon_groups/a", "mon_groups/b")] == [GIB, GIB]
    assert sum(row.bytes for row in resctrl.model.truth(rmid=0).rmids[0].total) == 2 * GIB


def test_a_groups_cpus_hold_cache(resctrl: VirtualResctrl) -> None:
    resctrl.write("mon_groups/a/cpus_list", "0-1")
    resctrl.now += 60
    assert int(resctrl.read("mon_groups/a/mon_data/mon_L3_00/llc_occupancy")) == 2 << 20
    assert int(resctrl.read("mon_groups/a/mon_data/mon_L3_01/llc_occupancy")) == 0


def test_the_truth_names_the_rmid_that_counted(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/cpus_list", "0")
    resctrl.run(tid, 1.0, 0)
    resctrl.model.accounting.charge_default(tid, 0, 10**9)
    (task,) = resctrl.model.truth(tid=tid).tasks
    assert [(row.rmid, row.cpu_ns) for row in task.used] == [(resctrl.group("mon_groups/a").ids.rmid, 10**9)]


# -- hotplug, beyond tests/conformance/test_domains.py


def test_nodes_and_packages_go_with_their_last_cpu() -> None:
    resctrl = VirtualResctrl("intel-snc2", cpus=4)
    resctrl.model.hotplug.set_cpu(1, False)
    assert "mon_sub_L3_01" not in resctrl.directory("mon_data/mon_L3_00").children
    resctrl.model.hotplug.set_cpu(0, False)
    assert set(resctrl.directory("mon_data").children) == {"mon_L3_01"}
    resctrl.model.hotplug.set_cpu(1, True)
    assert "mon_sub_L3_00" not in resctrl.directory("mon_data/mon_L3_00").children
    aet = VirtualResctrl("intel-aet", cpus=2)
    aet.model.hotplug.set_cpu(1, False)
    assert set(aet.directory("mon_data").children) == {"mon_L3_00", "mon_PERF_PKG_00"}
    aet.model.hotplug.set_cpu(1, True)
    assert len(aet.directory("mon_data").children) == 4


def test_domain_is_offline_without_its_cpus_and_online_with_all(resctrl: VirtualResctrl) -> None:
    resctrl.write("mon_groups/a/cpus_list", "1-2")
    resctrl.model.hotplug.set_domain("mon_L3_01", False)
    assert (resctrl.read("cpus_list"), resctrl.read("mon_groups/a/cpus_list")) == ("0-1\n", "1\n")
    assert refusal(resctrl, "mon_groups/a/cpus_list", "2")[0] == "EINVAL"
    resctrl.model.hotplug.set_cpu(2, True)
    assert (resctrl.read("cpus_list"), set(resctrl.directory("mon_data").children)) == (
        "0-2\n",
        {"mon_L3_00", "mon_L3_01"},
    )


@pytest.mark.parametrize(
    ("cpu", "online", "wanted"),
    [(4, False, "ENOENT"), (-1, True, "ENOENT"), (0, True, "ENOENT"), (1, False, "EBUSY")],
)
def test_cpus_that_cannot_go(resctrl: VirtualResctrl, cpu: int, online: bool, wanted: str) -> None:
    for other in {0, 2, 3} if wanted == "EBUSY" else ():
        resctrl.model.hotplug.set_cpu(other, False)
    with pytest.raises(OSError) as caught:
        resctrl.model.hotplug.set_cpu(cpu, online)
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
