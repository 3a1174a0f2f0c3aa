# SPDX-License-Identifier: Apache-2.0
"""Injected rare events: counters that overflow between readings, and tasks that an rmdir misses."""

from __future__ import annotations

import pytest

from tests.sim.virtual import VirtualResctrl

GIB = 1 << 30
WRAP = 1 << 40  # 24 bits of 64 KiB
TRAFFIC = "mon_data/mon_L3_00/mbm_total_bytes"


@pytest.fixture
def resctrl() -> VirtualResctrl:
    made = VirtualResctrl(mbm_bits=24)
    made.mkdir("mon_groups/a")
    return made


@pytest.fixture
def without_limbo() -> VirtualResctrl:
    made = VirtualResctrl(events="mbm_total_bytes")
    made.mkdir("mon_groups/a")
    return made


def member(resctrl: VirtualResctrl, group: str = "mon_groups/a") -> int:
    tid = resctrl.tasks.fork()
    resctrl.write(f"{group}/tasks", str(tid))
    return tid


def count(resctrl: VirtualResctrl, group: str = "mon_groups/a") -> int:
    resctrl.model.accounting.look()
    return int(resctrl.read(f"{group}/{TRAFFIC}"))


# Wraps


def test_no_wrap_is_seen_while_the_worker_runs(resctrl: VirtualResctrl) -> None:
    tid = member(resctrl)
    resctrl.run(tid, 3000.0)
    assert count(resctrl) == 3000 * GIB > 2 * WRAP


def test_whole_wraps_are_lost_without_the_overflow_worker(resctrl: VirtualResctrl) -> None:
    tid = member(resctrl)
    resctrl.run(tid, 2000.0)
    resctrl.model.run_overflow_worker(runs=False)
    resctrl.run(tid, 1000.0)
    assert count(resctrl) == 3000 * GIB  # less than a wrap since the last look
    resctrl.run(tid, 2058.0)
    assert count(resctrl) == 3010 * GIB
    resctrl.run(tid, 1030.0)
    resctrl.model.run_overflow_worker(runs=True)
    resctrl.run(tid, 5000.0)
    assert count(resctrl) == 8016 * GIB


def test_a_look_in_time_loses_nothing(resctrl: VirtualResctrl) -> None:
    tid = member(resctrl)
    resctrl.model.run_overflow_worker(runs=False)
    for _ in range(5):
        resctrl.run(tid, 1000.0)
        count(resctrl)
    assert count(resctrl) == 5000 * GIB


def test_a_new_group_has_lost_nothing(resctrl: VirtualResctrl) -> None:
    tid = member(resctrl)
    resctrl.model.run_overflow_worker(runs=False)
    resctrl.run(tid, 1100.0)
    assert count(resctrl) == 76 * GIB
    resctrl.rmdir("mon_groups/a")
    resctrl.now += 100
    for number in range(63):  # the pool goes round until the RMID is used again
        resctrl.mkdir(f"mon_groups/{number}")
    tid = member(resctrl, "mon_groups/62")
    resctrl.run(tid, 1000.0)
    assert count(resctrl, "mon_groups/62") == 1000 * GIB


# Overlooked tasks


def test_an_overlooked_task_keeps_its_rmid_and_is_in_the_group_that_gets_it(without_limbo: VirtualResctrl) -> None:
    resctrl = without_limbo
    one, other = member(resctrl), member(resctrl)
    resctrl.model.overlook(one)
    resctrl.rmdir("mon_groups/a")
    assert resctrl.model.task_groups(one) == resctrl.model.task_groups(other) == "res:/\nmon:\n"
    for number in range(63):
        resctrl.mkdir(f"mon_groups/{number}")
    assert resctrl.model.task_groups(one) == "res:/\nmon:62\n"
    assert resctrl.read("mon_groups/62/tasks") == f"{one}\n"
    resctrl.run(one, 1.0)
    assert count(resctrl, "mon_groups/62") == GIB


def test_the_cache_that_an_overlooked_task_holds_keeps_its_rmid_in_limbo(resctrl: VirtualResctrl) -> None:
    tid = member(resctrl)
    resctrl.model.overlook(tid)
    resctrl.rmdir("mon_groups/a")
    resctrl.now += 100
    assert resctrl.model.rmid_counts() == "used=1 limbo=1 free=62\n"
    resctrl.write("tasks", str(tid))
    resctrl.now += 100
    assert resctrl.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_an_overlooked_task_is_free_to_join_another_group(resctrl: VirtualResctrl) -> None:
    tid = member(resctrl)
    resctrl.model.overlook(tid)
    resctrl.rmdir("mon_groups/a")
    resctrl.mkdir("mon_groups/b")
    resctrl.write("mon_groups/b/tasks", str(tid))
    assert resctrl.model.task_groups(tid) == "res:/\nmon:b\n"
    resctrl.rmdir("mon_groups/b")
    assert resctrl.read("tasks").split().count(str(tid)) == 1


def test_missed_task_of_a_removed_class_is_enoent(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("x")
    tid = member(resctrl, "x")
    resctrl.model.overlook(tid)
    resctrl.rmdir("x")
    assert resctrl.model.task_groups(tid) is None
    resctrl.mkdir("y")  # gets the CLOSID, not the RMID
    assert resctrl.model.task_groups(tid) == "res:y\nmon:\n"


def test_task_in_no_group_cannot_be_missed(resctrl: VirtualResctrl) -> None:
    with pytest.raises(ProcessLookupError):
        resctrl.model.overlook(resctrl.tasks.fork())
