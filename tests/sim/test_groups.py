# SPDX-License-Identifier: Apache-2.0
"""mkdir, rmdir and rename of groups on the model, with the message in last_cmd_status."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from resctrlmond.sim.kernel.commands import CommandStatus
from resctrlmond.sim.kernel.tree import Caller
from tests.sim.virtual import VirtualResctrl


def refused(action: Callable[[], None]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


@pytest.fixture
def resctrl() -> VirtualResctrl:
    return VirtualResctrl("intel-rdt", rmids=8)


def set_status(resctrl: VirtualResctrl) -> None:
    """Write a message to last_cmd_status, so that a test can check whether it is cleared."""
    refused(lambda: resctrl.write("tasks", "abc"))
    assert resctrl.status == "Task list parsing error pid abc\n"


def test_mkdir_in_a_control_group_clears_the_status(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("c1")
    set_status(resctrl)
    assert refused(lambda: resctrl.mkdir("c1/x")) == "EPERM"
    assert resctrl.status == "ok\n"


def test_mkdir_without_rmids_is_enospc_then_ebusy_then_works(resctrl: VirtualResctrl) -> None:
    for number in range(7):
        resctrl.mkdir(f"mon_groups/{number}")
    assert refused(lambda: resctrl.mkdir("mon_groups/more")) == "ENOSPC"
    assert resctrl.status == "Out of RMIDs\n"
    resctrl.rmdir("mon_groups/0")
    assert refused(lambda: resctrl.mkdir("mon_groups/more")) == "EBUSY"
    assert resctrl.status == "Out of RMIDs\n"
    resctrl.now += 1.1
    resctrl.mkdir("mon_groups/more")
    assert resctrl.status == "ok\n"


def test_an_rmid_stays_in_limbo_as_long_as_its_lines_are_in_the_cache() -> None:
    resctrl = VirtualResctrl("intel-rdt", rmids=2)
    resctrl.write("info/L3_MON/max_threshold_occupancy", "131072")  # two units
    resctrl.mkdir("mon_groups/a")
    resctrl.write("mon_groups/a/tasks", str(resctrl.tasks.fork()))
    resctrl.rmdir("mon_groups/a")
    resctrl.now += 1.1  # 1 MiB halves every 0.5 s: 256 KiB at the first tick
    assert refused(lambda: resctrl.mkdir("mon_groups/a")) == "EBUSY"
    resctrl.now += 1.0  # 64 KiB
    resctrl.mkdir("mon_groups/a")


def test_missing_closid_is_reported_before_a_missing_rmid(resctrl: VirtualResctrl) -> None:
    for number in (1, 2, 3):
        resctrl.mkdir(f"c{number}")
    assert refused(lambda: resctrl.mkdir("c4")) == "ENOSPC"
    assert resctrl.status == "Out of CLOSIDs\n"
    resctrl.rmdir("c2")
    for number in range(4):  # of 7, two are held by classes and one is in limbo
        resctrl.mkdir(f"mon_groups/{number}")
    assert refused(lambda: resctrl.mkdir("c4")) == "EBUSY"
    assert resctrl.status == "Out of RMIDs\n"


def test_everything_in_a_new_group_belongs_to_its_maker(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("mon_groups/a", Caller(0, 4242, 1))
    nodes = ["", "/tasks", "/cpus", "/mon_data", "/mon_data/mon_L3_00", "/mon_data/mon_L3_00/mbm_total_bytes"]
    assert {(resctrl.node("mon_groups/a" + n).uid, resctrl.node("mon_groups/a" + n).gid) for n in nodes} == {
        (0, 4242)
    }


def test_rmdir_of_a_control_group_moves_all_its_tasks_to_root_and_frees_every_rmid(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("c1")
    resctrl.mkdir("c1/mon_groups/a")
    outer, inner = resctrl.tasks.fork(), resctrl.tasks.fork()
    resctrl.write("c1/tasks", f"{outer},{inner}")
    resctrl.write("c1/mon_groups/a/tasks", str(inner))
    resctrl.rmdir("c1")
    assert resctrl.model.task_groups(outer) == resctrl.model.task_groups(inner) == "res:/\nmon:\n"
    assert resctrl.model.rmids.counts(resctrl.now) == (1, 2, 5)
    resctrl.mkdir("c1")


def test_nodes_of_a_removed_group_are_removed_and_its_name_revives_none(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("mon_groups/a")
    old = resctrl.node("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes")
    resctrl.rmdir("mon_groups/a")
    resctrl.mkdir("mon_groups/a")
    assert old.removed
    assert not resctrl.node("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes").removed


def test_rename_into_another_class_keeps_rmid_tasks_owner_and_mtime(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("c1")
    resctrl.mkdir("mon_groups/m", Caller(0, 4242, 1))
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/m/tasks", str(tid))
    resctrl.run(tid, 1.0)
    resctrl.node("mon_groups/m").mtime_ns = 777
    traffic = resctrl.read("mon_groups/m/mon_data/mon_L3_00/mbm_total_bytes")
    rmid = resctrl.group("mon_groups/m").ids.rmid
    resctrl.wall_ns += 10
    resctrl.rename("mon_groups/m", "c1/mon_groups/n")
    moved = resctrl.node("c1/mon_groups/n")
    assert (moved.gid, moved.mtime_ns) == (4242, 777)
    assert resctrl.group("c1/mon_groups/n").ids.rmid == rmid
    assert resctrl.read("c1/mon_groups/n/mon_data/mon_L3_00/mbm_total_bytes") == traffic
    assert resctrl.model.task_groups(tid) == "res:c1\nmon:n\n"
    assert "m" not in resctrl.directory("mon_groups").children
    resctrl.run(tid, 1.0)
    assert int(resctrl.read("c1/mon_groups/n/mon_data/mon_L3_00/mbm_total_bytes")) == 2 * int(traffic)


@pytest.mark.parametrize(
    ("old", "new", "expected", "status"),
    [
        ("mon_groups/m", "c1/mon_groups/k", "EEXIST", "ok\n"),
        ("info/L3_MON", "mon_groups/x", "ENOENT", "Task list parsing error pid abc\n"),
        ("info/last_cmd_status", "mon_groups/x", "ENOENT", "Task list parsing error pid abc\n"),
        ("mon_groups/m", "info/x", "ENOENT", "Task list parsing error pid abc\n"),
    ],
)
def test_rename_refuses(resctrl: VirtualResctrl, old: str, new: str, expected: str, status: str) -> None:
    for path in ("c1", "mon_groups/m", "c1/mon_groups/k"):
        resctrl.mkdir(path)
    set_status(resctrl)
    assert refused(lambda: resctrl.rename(old, new)) == expected
    assert resctrl.status == status


def test_last_cmd_status_holds_511_bytes() -> None:
    status = CommandStatus()
    for _ in range(50):
        status.add("Out of CLOSIDs")
    text, mark = status.show()[:511], status.show()[511:]
    assert (text + mark).startswith("Out of CLOSIDs\n" * 34)
    assert mark == "[truncated]\n"
    status.clear()
    assert status.show() == "ok\n"


@pytest.mark.parametrize(
    ("written", "read"),
    [("1048576", "1048576"), ("0x20000\n", "131072"), ("65537", "65536"), ("0", "0"), ("33554432", "33554432")],
)
def test_threshold_is_rounded_down_to_the_scale_factor(resctrl: VirtualResctrl, written: str, read: str) -> None:
    resctrl.write("info/L3_MON/max_threshold_occupancy", written)
    assert resctrl.read("info/L3_MON/max_threshold_occupancy") == read + "\n"


@pytest.mark.parametrize("written", ["33554433", "-1", "-0", "abc", "", "1 2", "99999999999"])
def test_threshold_refuses_all_but_numbers_up_to_the_cache_size(resctrl: VirtualResctrl, written: str) -> None:
    before = resctrl.read("info/L3_MON/max_threshold_occupancy")
    expected = "ERANGE" if len(written) > 10 else "EINVAL"  # more than 32 bits
    assert refused(lambda: resctrl.write("info/L3_MON/max_threshold_occupancy", written)) == expected
    assert resctrl.read("info/L3_MON/max_threshold_occupancy") == before
