# SPDX-License-Identifier: Apache-2.0
"""Rare events on request: counters that wrap unseen, and tasks that an rmdir misses."""

from __future__ import annotations

import pytest

from tests.sim.virtual import Lab

GIB = 1 << 30
WRAP = 1 << 40  # 24 bits of 64 KiB
TRAFFIC = "mon_data/mon_L3_00/mbm_total_bytes"


@pytest.fixture
def lab() -> Lab:
    made = Lab(mbm_bits=24)
    made.mkdir("mon_groups/a")
    return made


@pytest.fixture
def without_limbo() -> Lab:
    made = Lab(events="mbm_total_bytes")
    made.mkdir("mon_groups/a")
    return made


def member(lab: Lab, group: str = "mon_groups/a") -> int:
    tid = lab.tasks.fork()
    lab.write(f"{group}/tasks", str(tid))
    return tid


def count(lab: Lab, group: str = "mon_groups/a") -> int:
    lab.model.accounting.look()
    return int(lab.read(f"{group}/{TRAFFIC}"))


# Wraps


def test_no_wrap_is_seen_while_the_worker_runs(lab: Lab) -> None:
    tid = member(lab)
    lab.run(tid, 3000.0)
    assert count(lab) == 3000 * GIB > 2 * WRAP


def test_whole_wraps_are_lost_while_it_does_not(lab: Lab) -> None:
    tid = member(lab)
    lab.run(tid, 2000.0)
    lab.model.run_overflow_worker(runs=False)
    lab.run(tid, 1000.0)
    assert count(lab) == 3000 * GIB  # less than a wrap since the last look
    lab.run(tid, 2058.0)
    assert count(lab) == 3010 * GIB
    lab.run(tid, 1030.0)
    lab.model.run_overflow_worker(runs=True)
    lab.run(tid, 5000.0)
    assert count(lab) == 8016 * GIB


def test_a_look_in_time_loses_nothing(lab: Lab) -> None:
    tid = member(lab)
    lab.model.run_overflow_worker(runs=False)
    for _ in range(5):
        lab.run(tid, 1000.0)
        seen = count(lab)
    assert seen == 5000 * GIB


def test_a_new_group_has_lost_nothing(lab: Lab) -> None:
    tid = member(lab)
    lab.model.run_overflow_worker(runs=False)
    lab.run(tid, 1100.0)
    assert count(lab) == 76 * GIB
    lab.rmdir("mon_groups/a")
    lab.now += 100
    for number in range(63):  # the pool goes round until the RMID is used again
        lab.mkdir(f"mon_groups/{number}")
    tid = member(lab, "mon_groups/62")
    lab.run(tid, 1000.0)
    assert count(lab, "mon_groups/62") == 1000 * GIB


# Overlooked tasks


def test_an_overlooked_task_keeps_its_rmid_and_is_in_the_group_that_gets_it(without_limbo: Lab) -> None:
    lab = without_limbo
    one, other = member(lab), member(lab)
    lab.model.overlook(one)
    lab.rmdir("mon_groups/a")
    assert lab.model.task_groups(one) == lab.model.task_groups(other) == "res:/\nmon:\n"
    for number in range(63):
        lab.mkdir(f"mon_groups/{number}")
    assert lab.model.task_groups(one) == "res:/\nmon:62\n"
    assert lab.read("mon_groups/62/tasks") == f"{one}\n"
    lab.run(one, 1.0)
    assert count(lab, "mon_groups/62") == GIB


def test_the_cache_that_an_overlooked_task_holds_keeps_its_rmid_in_limbo(lab: Lab) -> None:
    tid = member(lab)
    lab.model.overlook(tid)
    lab.rmdir("mon_groups/a")
    lab.now += 100
    assert lab.model.rmid_counts() == "used=1 limbo=1 free=62\n"
    lab.write("tasks", str(tid))
    lab.now += 100
    assert lab.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_an_overlooked_task_is_free_to_join_another_group(lab: Lab) -> None:
    tid = member(lab)
    lab.model.overlook(tid)
    lab.rmdir("mon_groups/a")
    lab.mkdir("mon_groups/b")
    lab.write("mon_groups/b/tasks", str(tid))
    assert lab.model.task_groups(tid) == "res:/\nmon:b\n"
    lab.rmdir("mon_groups/b")
    assert lab.read("tasks").split().count(str(tid)) == 1


def test_missed_task_of_a_removed_class_is_enoent(lab: Lab) -> None:
    lab.mkdir("x")
    tid = member(lab, "x")
    lab.model.overlook(tid)
    lab.rmdir("x")
    assert lab.model.task_groups(tid) is None
    lab.mkdir("y")  # gets the CLOSID, not the RMID
    assert lab.model.task_groups(tid) == "res:y\nmon:\n"


def test_task_in_no_group_cannot_be_missed(lab: Lab) -> None:
    with pytest.raises(ProcessLookupError):
        lab.model.overlook(lab.tasks.fork())
