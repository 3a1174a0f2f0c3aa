# SPDX-License-Identifier: Apache-2.0
"""mkdir, rmdir and rename of groups, and what they leave in last_cmd_status, on the model alone."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from resctrlmond.sim.kernel.commands import CommandStatus
from resctrlmond.sim.kernel.tree import Caller
from tests.sim.virtual import Lab


def refused(action: Callable[[], None]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


@pytest.fixture
def lab() -> Lab:
    return Lab("intel-rdt", rmids=8)


def set_status(lab: Lab) -> None:
    """Write a message to last_cmd_status, so that a test can check whether it is cleared."""
    refused(lambda: lab.write("tasks", "abc"))
    assert lab.status == "Task list parsing error pid abc\n"


def test_mkdir_in_a_control_group_clears_the_status(lab: Lab) -> None:
    lab.mkdir("c1")
    set_status(lab)
    assert refused(lambda: lab.mkdir("c1/x")) == "EPERM"
    assert lab.status == "ok\n"


def test_mkdir_without_rmids_is_enospc_then_ebusy_then_works(lab: Lab) -> None:
    for number in range(7):
        lab.mkdir(f"mon_groups/{number}")
    assert refused(lambda: lab.mkdir("mon_groups/more")) == "ENOSPC"
    assert lab.status == "Out of RMIDs\n"
    lab.rmdir("mon_groups/0")
    assert refused(lambda: lab.mkdir("mon_groups/more")) == "EBUSY"
    assert lab.status == "Out of RMIDs\n"
    lab.now += 1.1
    lab.mkdir("mon_groups/more")
    assert lab.status == "ok\n"


def test_an_rmid_stays_in_limbo_as_long_as_its_lines_are_in_the_cache() -> None:
    lab = Lab("intel-rdt", rmids=2)
    lab.write("info/L3_MON/max_threshold_occupancy", "131072")  # two units
    lab.mkdir("mon_groups/a")
    lab.write("mon_groups/a/tasks", str(lab.tasks.fork()))
    lab.rmdir("mon_groups/a")
    lab.now += 1.1  # 1 MiB halves every 0.5 s: 256 KiB at the first tick
    assert refused(lambda: lab.mkdir("mon_groups/a")) == "EBUSY"
    lab.now += 1.0  # 64 KiB
    lab.mkdir("mon_groups/a")


def test_closids_run_out_before_rmids_are_asked_for(lab: Lab) -> None:
    for number in (1, 2, 3):
        lab.mkdir(f"c{number}")
    assert refused(lambda: lab.mkdir("c4")) == "ENOSPC"
    assert lab.status == "Out of CLOSIDs\n"
    lab.rmdir("c2")
    for number in range(4):  # of 7, two are held by classes and one is in limbo
        lab.mkdir(f"mon_groups/{number}")
    assert refused(lambda: lab.mkdir("c4")) == "EBUSY"
    assert lab.status == "Out of RMIDs\n"


def test_everything_in_a_new_group_belongs_to_its_maker(lab: Lab) -> None:
    lab.mkdir("mon_groups/a", Caller(0, 4242, 1))
    nodes = ["", "/tasks", "/cpus", "/mon_data", "/mon_data/mon_L3_00", "/mon_data/mon_L3_00/mbm_total_bytes"]
    assert {(lab.node("mon_groups/a" + n).uid, lab.node("mon_groups/a" + n).gid) for n in nodes} == {(0, 4242)}


def test_rmdir_of_a_control_group_moves_all_its_tasks_to_root_and_frees_every_rmid(lab: Lab) -> None:
    lab.mkdir("c1")
    lab.mkdir("c1/mon_groups/a")
    outer, inner = lab.tasks.fork(), lab.tasks.fork()
    lab.write("c1/tasks", f"{outer},{inner}")
    lab.write("c1/mon_groups/a/tasks", str(inner))
    lab.rmdir("c1")
    assert lab.model.task_groups(outer) == lab.model.task_groups(inner) == "res:/\nmon:\n"
    assert lab.model.rmids.counts(lab.now) == (1, 2, 5)
    lab.mkdir("c1")


def test_nodes_of_a_removed_group_are_removed_and_its_name_revives_none(lab: Lab) -> None:
    lab.mkdir("mon_groups/a")
    old = lab.node("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes")
    lab.rmdir("mon_groups/a")
    lab.mkdir("mon_groups/a")
    assert old.removed
    assert not lab.node("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes").removed


def test_rename_into_another_class_keeps_rmid_tasks_owner_and_mtime(lab: Lab) -> None:
    lab.mkdir("c1")
    lab.mkdir("mon_groups/m", Caller(0, 4242, 1))
    tid = lab.tasks.fork()
    lab.write("mon_groups/m/tasks", str(tid))
    lab.run(tid, 1.0)
    lab.node("mon_groups/m").mtime_ns = 777
    traffic = lab.read("mon_groups/m/mon_data/mon_L3_00/mbm_total_bytes")
    rmid = lab.group("mon_groups/m").ids.rmid
    lab.wall_ns += 10
    lab.rename("mon_groups/m", "c1/mon_groups/n")
    moved = lab.node("c1/mon_groups/n")
    assert (moved.gid, moved.mtime_ns) == (4242, 777)
    assert lab.group("c1/mon_groups/n").ids.rmid == rmid
    assert lab.read("c1/mon_groups/n/mon_data/mon_L3_00/mbm_total_bytes") == traffic
    assert lab.model.task_groups(tid) == "res:c1\nmon:n\n"
    assert "m" not in lab.directory("mon_groups").children
    lab.run(tid, 1.0)
    assert int(lab.read("c1/mon_groups/n/mon_data/mon_L3_00/mbm_total_bytes")) == 2 * int(traffic)


@pytest.mark.parametrize(
    ("old", "new", "expected", "status"),
    [
        ("mon_groups/m", "c1/mon_groups/k", "EEXIST", "ok\n"),
        ("info/L3_MON", "mon_groups/x", "ENOENT", "Task list parsing error pid abc\n"),
        ("info/last_cmd_status", "mon_groups/x", "ENOENT", "Task list parsing error pid abc\n"),
        ("mon_groups/m", "info/x", "ENOENT", "Task list parsing error pid abc\n"),
    ],
)
def test_rename_refuses(lab: Lab, old: str, new: str, expected: str, status: str) -> None:
    for path in ("c1", "mon_groups/m", "c1/mon_groups/k"):
        lab.mkdir(path)
    set_status(lab)
    assert refused(lambda: lab.rename(old, new)) == expected
    assert lab.status == status


def test_last_cmd_status_holds_511_bytes() -> None:
    status = CommandStatus()
    for _ in range(50):
        status.say("Out of CLOSIDs")
    text, mark = status.show()[:511], status.show()[511:]
    assert (text + mark).startswith("Out of CLOSIDs\n" * 34)
    assert mark == "[truncated]\n"
    status.clear()
    assert status.show() == "ok\n"


@pytest.mark.parametrize(
    ("written", "read"),
    [("1048576", "1048576"), ("0x20000\n", "131072"), ("65537", "65536"), ("0", "0"), ("33554432", "33554432")],
)
def test_threshold_is_rounded_down_to_the_scale_factor(lab: Lab, written: str, read: str) -> None:
    lab.write("info/L3_MON/max_threshold_occupancy", written)
    assert lab.read("info/L3_MON/max_threshold_occupancy") == read + "\n"


@pytest.mark.parametrize("written", ["33554433", "-1", "-0", "abc", "", "1 2", "99999999999"])
def test_threshold_refuses_all_but_numbers_up_to_the_cache_size(lab: Lab, written: str) -> None:
    before = lab.read("info/L3_MON/max_threshold_occupancy")
    expected = "ERANGE" if len(written) > 10 else "EINVAL"  # more than 32 bits
    assert refused(lambda: lab.write("info/L3_MON/max_threshold_occupancy", written)) == expected
    assert lab.read("info/L3_MON/max_threshold_occupancy") == before
