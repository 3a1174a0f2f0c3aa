# SPDX-License-Identifier: Apache-2.0
"""Faults, other agents, virtual tasks and the true use, through the attributes of a mounted simulation's root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.resctrl.counters import Status, read_mon_data
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.sim.messages import ACT, FAULT, TRUTH, VIRTUAL, Operation, Used
from tests.conformance.actors import outcome
from tests.sim.conftest import Mounted, Puppet

A = "mon_groups/a"
ENERGY = A + "/mon_data/mon_PERF_PKG_00/core_energy"
TRAFFIC = A + "/mon_data/mon_L3_00/mbm_total_bytes"
GIB = 1 << 30
NS = 10**9


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with Simulation(str(tmp_path_factory.mktemp("virtual")), "intel-aet", 8, virtual_cpus=4, lag_ms=0) as simulation:
        yield Mounted(simulation.mountpoint)


@pytest.fixture
def fs(mount: Mounted, control: Control) -> Iterator[Mounted]:
    mount.mkdir(A)
    yield mount
    control.set_faults()
    mount.clean()
    control.advance(3600)


@pytest.fixture
def control(mount: Mounted) -> Control:
    return Control(mount.root)


# Faults


@pytest.mark.parametrize("word", ["Unavailable", "Error", "Unassigned"])
def test_counter_has_a_word_for_a_number_of_reads(fs: Mounted, control: Control, word: str) -> None:
    control.set_faults(Fault(group=A, event="mbm_*", domain="mon_L3_00", answer=word, times=2))
    assert [fs.read(TRAFFIC) for _ in range(3)] == [f"{word}\n", f"{word}\n", "0\n"]
    assert fs.read(A + "/mon_data/mon_L3_01/mbm_total_bytes") == "0\n"
    assert control.faults == []


def test_counter_fails_with_an_errno_until_the_fault_is_removed(fs: Mounted, control: Control) -> None:
    control.set_faults(Fault(group="mon_groups/*", event="llc_occupancy", answer="EIO"))
    path = A + "/mon_data/mon_L3_00/llc_occupancy"
    assert [outcome(lambda: fs.read(path)) for _ in range(3)] == ["EIO"] * 3
    group = os.open(fs.path(A), os.O_RDONLY)
    statuses = {
        reading.event: reading.value.status for reading in read_mon_data(group)[0] if reading.domain == "mon_L3_00"
    }
    os.close(group)
    assert (statuses["llc_occupancy"], statuses["mbm_total_bytes"]) == (Status.ERROR, Status.OK)
    control.set_faults()
    assert fs.read(path) == "0\n"


def test_sum_of_a_control_group_skips_groups_without_a_number(fs: Mounted, control: Control) -> None:
    fs.mkdir("c")
    fs.mkdir("c/mon_groups/k")
    tid = control.spawn()
    for path in ("c", "c/mon_groups/k"):
        fs.write(path + "/tasks", str(tid))
        control.run(tid, NS)
    total = "c/mon_data/mon_L3_00/mbm_total_bytes"
    assert fs.read(total) == f"{2 * GIB}\n"
    control.set_faults(Fault(group="c/mon_groups/k", answer="Unavailable"))
    assert fs.read(total) == f"{GIB}\n"
    control.set_faults(Fault(group="c*", answer="Error"))
    assert fs.read(total) == "Error\n"


@pytest.mark.parametrize(
    ("on", "code"), [(Operation.MKDIR, "ENOSPC"), (Operation.RMDIR, "EBUSY"), (Operation.TASKS, "ESRCH")]
)
def test_an_operation_fails_so_many_times(fs: Mounted, control: Control, on: Operation, code: str) -> None:
    actions = {
        Operation.MKDIR: lambda: fs.mkdir("mon_groups/b"),
        Operation.RMDIR: lambda: fs.rmdir(A),
        Operation.TASKS: lambda: fs.write(A + "/tasks", "1"),
    }
    control.set_faults(Fault(on=on, answer=code, times=2))
    assert [outcome(actions[on]) for _ in range(3)] == [code, code, "OK"]


def test_slow_read_lasts_as_long_as_set(fs: Mounted, control: Control) -> None:
    control.set_faults(Fault(event="llc_occupancy", milliseconds=150, times=1))
    begin = time.monotonic()
    assert fs.read(A + "/mon_data/mon_L3_00/llc_occupancy") == "0\n"
    assert time.monotonic() - begin >= 0.15


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b'[{"answer":"Nonsense"}]',
        b'[{"on":"mkdir","answer":"Unavailable"}]',
        b'[{"times":0}]',
        b'[{"milliseconds":-1}]',
        b'[{"groop":"a"}]',
        b"\xff",
    ],
)
def test_invalid_fault_is_refused_and_changes_nothing(fs: Mounted, control: Control, value: bytes) -> None:
    control.set_faults(Fault(group="missing", answer="EIO"))
    assert outcome(lambda: os.setxattr(fs.root, FAULT, value)) == "EINVAL"
    assert [fault.group for fault in control.faults] == ["missing"]


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=60), st.sampled_from([FAULT, ACT, VIRTUAL]))
def test_any_bytes_are_an_order_or_an_error(mount: Mounted, value: bytes, name: str) -> None:
    assert outcome(lambda: os.setxattr(mount.root, name, value)) in ("EINVAL", "OK")


def test_orders_are_for_root_and_for_the_root(fs: Mounted) -> None:
    assert outcome(lambda: os.setxattr(fs.path(A), FAULT, b"[]")) == "ENOTSUP"
    assert outcome(lambda: os.setxattr(fs.root, TRUTH, b"[]")) == "ENOTSUP"
    receiving, sending = os.pipe()
    if (pid := os.fork()) == 0:
        os.chdir(fs.root)
        os.setresuid(65534, 65534, 65534)
        os.write(sending, outcome(lambda: os.setxattr(".", FAULT, b"[]")).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(sending)
    with open(receiving) as answer:
        assert answer.read() == "EPERM"


# Other agents and the machine


def test_another_agent_creates_and_removes_groups_and_moves_tasks(fs: Mounted, control: Control) -> None:
    control.make_group("mon_groups/theirs")
    tid = control.spawn()
    fs.write(A + "/tasks", str(tid))
    control.steal(tid, "mon_groups/theirs")
    assert fs.groups_of(tid) == "res:/\nmon:theirs\n"
    control.set_faults(Fault(on=Operation.RMDIR, answer="EBUSY"))  # which befalls only system calls
    control.remove_group("mon_groups/theirs")
    assert fs.groups_of(tid) == "res:/\nmon:\n"
    assert outcome(lambda: control.remove_group("mon_groups/theirs")) == "ENOENT"
    assert outcome(lambda: control.remove_group("info")) == "EPERM"
    assert outcome(lambda: control.steal(4_000_000)) == "ESRCH"
    assert outcome(lambda: control.steal(tid, "info")) == "ENOENT"


def test_another_agent_takes_all_rmids(fs: Mounted, control: Control) -> None:
    for number in range(6):
        control.make_group(f"mon_groups/theirs{number}")
    assert outcome(lambda: control.make_group("mon_groups/theirs")) == "ENOSPC"
    assert outcome(lambda: fs.mkdir("mon_groups/b")) == "ENOSPC"


def test_open_files_of_a_domain_that_goes_offline_answer_enodev(fs: Mounted, control: Control) -> None:
    fd = os.open(fs.path(TRAFFIC), os.O_RDONLY)
    control.offline("mon_L3_00")
    assert outcome(lambda: os.read(fd, 10)) == "ENODEV"
    assert outcome(lambda: fs.read(TRAFFIC)) == "ENOENT"
    control.online("mon_L3_00")
    assert outcome(lambda: os.pread(fd, 10, 0)) == "ENODEV"
    os.close(fd)
    assert fs.read(TRAFFIC) == "0\n"
    assert outcome(lambda: control.online("mon_L3_00")) == "ENOENT"


# Virtual tasks and the truth


def used(control: Control, tid: int) -> dict[tuple[int, int], Used]:
    (task,) = control.truth(tid=tid).tasks
    return {(row.rmid, row.node): row for row in task.used}


def test_virtual_tasks_are_exact(fs: Mounted, control: Control) -> None:
    before = fs.read(ENERGY)
    assert before in ("Unavailable\n", before)
    start = Decimal(0) if before == "Unavailable\n" else Decimal(before)
    tid = control.spawn()
    control.run(tid, NS, 0)
    fs.write(A + "/tasks", str(tid))
    child, thread = control.fork(tid), control.thread(tid)
    grandchild = control.fork(child)
    for number in (tid, child, thread, grandchild):
        assert fs.groups_of(number) == "res:/\nmon:a\n"
        control.run(number, 2 * NS, 1)  # of four CPUs on two packages, one of the first
        control.run(number, NS, 2)
    for number in (grandchild, child, thread, tid):
        control.exit(number)
    assert fs.tids(A) == set()
    assert Decimal(fs.read(ENERGY)) - start == 20
    assert fs.read(TRAFFIC) == f"{8 * GIB}\n"


def test_the_truth_of_a_task_by_rmid_and_node(fs: Mounted, control: Control) -> None:
    tid = control.spawn()
    control.run(tid, 5, 0)
    fs.write(A + "/tasks", str(tid))
    control.run(tid, 1_000_000_007, 3)
    control.exit(tid)
    (group,) = [row for row in control.truth().rmids if row.group == A]
    (own,) = group.since_mkdir
    assert used(control, tid) == {
        (0, 0): Used(0, 0, 5, 12_500, 5),
        (group.rmid, 1): own,
    }
    assert (own.cpu_ns, own.picojoules) == (1_000_000_007, 2_500_000_017_500)
    assert own.bytes == Fraction(1_000_000_007 * GIB, NS).__floor__()
    assert [task.ended for task in control.truth(tid=tid).tasks] == [True]


def test_a_number_that_is_used_again_is_another_task_in_the_truth(fs: Mounted, control: Control) -> None:
    tid = control.spawn()
    for ns in (10, 20):
        fs.write(A + "/tasks", str(tid))
        control.run(tid, ns)
        control.exit(tid)
        assert control.spawn(tid=tid) == tid
    tasks = control.truth(tid=tid).tasks
    assert [[row.cpu_ns for row in task.used] for task in tasks] == [[10], [20]]
    assert len({task.start for task in tasks}) == 2


def test_the_clock_can_be_put_forward(fs: Mounted, control: Control) -> None:
    fs.rmdir(A)
    for number in range(6):
        fs.mkdir(f"mon_groups/{number}")
    assert outcome(lambda: fs.mkdir(A)) == "EBUSY"
    control.advance(1)
    fs.mkdir(A)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (b'{"do":"run","tid":4000000,"ns":1}', "ESRCH"),
        (b'{"do":"run","tid":1,"ns":1,"cpu":4}', "EINVAL"),
        (b'{"do":"fork","by":4000000}', "ESRCH"),
        (b'{"do":"spawn","tid":1}', "EEXIST"),
        (b'{"do":"exit","tid":1}', "EPERM"),
        (b'{"do":"dance"}', "EINVAL"),
    ],
)
def test_invalid_orders_for_virtual_tasks_are_refused(mount: Mounted, order: bytes, expected: str) -> None:
    assert outcome(lambda: os.setxattr(mount.root, VIRTUAL, order)) == expected


def test_real_thread_is_not_a_task_of_a_virtual_simulation(fs: Mounted) -> None:
    assert outcome(lambda: fs.write(A + "/tasks", "0")) == "ESRCH"


def test_virtual_tasks_need_a_virtual_simulation(sim: Mounted) -> None:
    control = Control(sim.root)
    assert outcome(control.spawn) == "ENOTSUP"
    assert outcome(lambda: os.getxattr(sim.root, VIRTUAL)) == "ENODATA"
    assert outcome(lambda: Control("/").set_faults()) in ("ENOTSUP", "OK")


def test_the_truth_of_real_tasks_is_what_the_counters_show(sim: Mounted, puppet: Puppet) -> None:
    sim.mkdir(A)
    sim.write(A + "/tasks", str(puppet.pid))
    puppet.do("burn 0.05")
    child = int(puppet.do("fork"))
    time.sleep(0.05)
    truth = Control(sim.root).truth()
    (group,) = [row for row in truth.rmids if row.group == A]
    of_tasks = sum(row.cpu_ns for task in truth.tasks for row in task.used if row.rmid == group.rmid)
    assert of_tasks == sum(row.cpu_ns for row in group.since_mkdir) >= 50_000_000
    assert {puppet.pid, child} <= {task.tid for task in truth.tasks}


def test_use_of_many_tasks_fits_and_each_can_be_read(fs: Mounted, control: Control) -> None:
    first = control.spawn()
    fs.write(A + "/tasks", str(first))
    control.run(first, 7)
    tids = [control.fork(first) for _ in range(600)]
    for tid in tids:
        control.run(tid, 11)
    truth = control.truth()
    assert truth.left_off > 0
    assert tids[-1] in {task.tid for task in truth.tasks}
    assert sum(row.cpu_ns for row in used(control, first).values()) == 7


def test_the_truth_has_every_task_although_that_of_all_rmids_does_not_fit(tmp_path: Path) -> None:
    """The history of 576 RMIDs must not exclude the tasks from the text."""
    with Simulation(str(tmp_path), "intel-aet", residue=3, virtual_cpus=2) as simulation:
        fs, control = Mounted(simulation.mountpoint), Control(simulation.mountpoint)
        fs.mkdir(A)
        tid = control.spawn()
        fs.write(A + "/tasks", str(tid))
        control.run(tid, 7)
        truth = control.truth()
        assert ([task.tid for task in truth.tasks], truth.left_off) == ([tid], 0)


def test_use_of_many_rmids_fits_and_each_can_be_read(tmp_path: Path) -> None:
    with Simulation(str(tmp_path), "intel-aet", residue=3, virtual_cpus=2) as simulation:
        fs, control = Mounted(simulation.mountpoint), Control(simulation.mountpoint)
        fs.mkdir(A)
        assert [row.group for row in control.truth().rmids] == ["", A]
        (free,) = control.truth(rmid=500).rmids
        assert (free.group, len(free.total)) == (None, 2)
        (row,) = control.truth(rmid=1).rmids
        assert (row.group, row.since_mkdir) == (A, [])
        assert Decimal(sum(used.picojoules for used in row.total[:1])) / 10**12 == pytest.approx(
            Decimal(fs.read(ENERGY)), abs=Decimal("0.000005")
        )
