# SPDX-License-Identifier: Apache-2.0
"""The files of the witness in a simulation: exact with virtual tasks, derived from control groups with real ones."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.mounts import mounts
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.sim.host.cgroups import CgroupTree
from resctrlmond.sim.kernel.tasks import ROOT as ROOT_CGROUP
from resctrlmond.sim.messages import Operation
from tests.conformance.actors import outcome
from tests.sim.conftest import Mounted
from tests.sim.virtual import NS, VirtualResctrl
from tests.truth.crew import Crew

A, B = "mon_groups/a", "mon_groups/b"
MS = 10**6
FILES = ["ended", "moves", "removed", "status", "tasks"]


class Machine(VirtualResctrl):
    """Virtual tasks in control groups, and the files of the witness."""

    def words(self, name: str) -> list[list[str]]:
        return [line.split() for line in self.read(f".witness/{name}").splitlines()]

    def rows(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Return control groups, CLOSID and RMID -> CPU time and ended tasks."""
        return {(row[5], row[0], row[1]): (int(row[2]), int(row[3])) for row in self.words("ended")}

    def numbers(self) -> dict[str, list[int]]:
        return {name: [int(value) for value in values] for name, *values in self.words("status")}

    def use(self, tid: int, ns: int) -> None:
        """Use CPU time, as the order does."""
        self.model.accounting.look_at(tid)
        self.tasks.run(tid, ns)
        self.model.accounting.charge_default(tid, 0, ns)
        self.model.accounting.look_at(tid)

    def end(self, tid: int) -> None:
        self.model.accounting.look_at(tid)
        self.model.accounting.end(tid)
        self.tasks.exit(tid)

    def rmid(self, group: str) -> str:
        return str(self.group(group).ids.rmid)


@pytest.fixture
def machine() -> Machine:
    made = Machine(reports_forks=True)
    made.mkdir(A)
    made.mkdir(B)
    return made


def test_time_before_a_move_is_charged_to_the_old_group(machine: Machine) -> None:
    tid = machine.tasks.fork()
    machine.tasks.set_cgroup(tid, [7, 1])
    for group, ns in (("", 3), (A, 5), (B, 11)):
        if group:
            machine.write(f"{group}/tasks", str(tid))
        machine.use(tid, ns)
    machine.end(tid)
    a, b = machine.rmid(A), machine.rmid(B)
    assert machine.rows() == {("7,1", "0", "0"): (3, 0), ("7,1", "0", a): (5, 0), ("7,1", "0", b): (11, 1)}


def test_time_is_charged_to_the_control_group_that_a_task_leaves(machine: Machine) -> None:
    tid = machine.tasks.fork()
    machine.write(f"{A}/tasks", str(tid))
    a = machine.rmid(A)
    machine.tasks.set_cgroup(tid, [7, 1])
    machine.use(tid, 5)
    # The time of a living member is not charged before it leaves its control group.
    assert machine.rows() == {}
    machine.tasks.set_cgroup(tid, [9, 7, 1])
    machine.use(tid, 2)
    child = machine.tasks.fork(tid)
    machine.use(child, 1)
    assert machine.rows() == {("7,1", "0", a): (5, 0)}
    tasks = {words[1]: words for words in machine.words("tasks")}
    assert [tasks[str(each)][3:] for each in (1, tid, child)] == [
        ["0", "0", "0", "0", "0", "1"],
        ["0", a, "7", "5", "0", "9,7,1"],
        ["0", a, "1", "0", "0", "9,7,1"],
    ]
    machine.end(tid)
    machine.end(child)
    assert machine.rows() == {("7,1", "0", a): (5, 0), ("9,7,1", "0", a): (3, 2)}


def test_task_that_was_never_in_a_group_is_a_row(machine: Machine) -> None:
    tid = machine.tasks.fork()
    machine.tasks.set_cgroup(tid, [7, 1])
    machine.use(tid, 4)
    machine.end(tid)
    assert machine.rows() == {("7,1", "0", "0"): (4, 1)}


def test_removal_of_a_group_charges_its_members(machine: Machine) -> None:
    tid, a = machine.tasks.fork(), machine.rmid(A)
    machine.write(f"{A}/tasks", str(tid))
    machine.use(tid, 4)
    machine.rmdir(A)
    machine.use(tid, 1)
    assert machine.rows() == {("1", "0", a): (4, 0), ("1", "0", "0"): (1, 0)}


@pytest.mark.parametrize("above", [16, 17, 40])
def test_use_below_the_sixteenth_level_is_counted_on_that_level(machine: Machine, above: int) -> None:
    tid = machine.tasks.fork()
    chain = list(range(above + 1, 0, -1))
    machine.tasks.set_cgroup(tid, chain)
    machine.use(tid, 1)
    ((cgroups, _, _),) = machine.rows()
    assert cgroups == ",".join(map(str, chain[-17:]))


def test_writes_and_moved_tasks_have_consecutive_numbers(machine: Machine) -> None:
    tids = [machine.tasks.fork() for _ in range(2)]
    machine.write(f"{A}/tasks", f"{tids[0]},{tids[1]}\n")
    machine.write(f"{A}/tasks", f"{tids[0]}")
    for text, code in (("999999", errno.ESRCH), ("some thing,", errno.EINVAL)):
        with pytest.raises(OSError, match=os.strerror(code)):
            machine.write(f"{A}/tasks", text)
    a, where = machine.rmid(A), str(machine.directory(A).inode)
    moves = machine.words("moves")
    assert [words[0] for words in moves] == [str(number) for number in range(1, 7)]
    assert [words[3:5] + words[6:7] + words[-1:] for words in moves if words[1] == "write"] == [
        [where, "8", "0", f"{tids[0]},{tids[1]}"],
        [where, "3", "0", str(tids[0])],
        [where, "-3", "0", "999999"],
        [where, "-22", "2", "some?thing,"],
    ]
    assert [words[3:] for words in moves if words[1] == "task"] == [
        ["1", str(tid), str(tid), str(1 + number), "1", "0", "0", "0", a, "0"] for number, tid in enumerate(tids)
    ]
    assert machine.numbers()["moves"] == [6, 4096]


def test_old_moves_are_overwritten(machine: Machine) -> None:
    for _ in range(5000):
        machine.write("tasks", "\n")
    numbers = [int(words[0]) for words in machine.words("moves")]
    assert numbers == list(range(5000 - 4096 + 1, 5001))


@given(text=st.text(max_size=200))
def test_each_move_is_one_line_with_any_text(text: str) -> None:
    machine = Machine()
    with suppress(OSError):
        machine.write("tasks", text)
    (line,) = machine.read(".witness/moves").splitlines()
    assert len(line.split(" ")) == 13
    assert line.isascii()


def test_full_table_refuses_new_rows_and_counts_gaps(machine: Machine) -> None:
    machine.model.set_witness(available=True, restart=True, rows=1, keep=3600)
    for inode in (7, 8, 7, 9):
        tid = machine.tasks.fork()
        machine.tasks.set_cgroup(tid, [inode, 1])
        machine.use(tid, 1)
    assert machine.rows() == {("7,1", "0", "0"): (2, 0)}
    assert (machine.numbers()["gaps"], machine.numbers()["rows"]) == ([2, 0, 0, 0], [1, 1])


def test_restart_begins_all_sums_again(machine: Machine) -> None:
    tid = machine.tasks.fork()
    machine.use(tid, 4)
    machine.write(f"{A}/tasks", str(tid))
    before = machine.numbers()
    machine.model.set_witness(available=True, restart=True, rows=10, keep=3600)
    after = machine.numbers()
    assert after["begun"] > before["begun"]
    assert (machine.words("ended"), machine.words("moves"), after["rows"], after["moves"]) == (
        [],
        [],
        [0, 10],
        [0, 4096],
    )
    machine.use(tid, 1)
    machine.end(tid)
    assert machine.rows() == {("1", "0", machine.rmid(A)): (1, 1)}


def test_rest_of_a_control_group_is_charged_to_the_default_group(machine: Machine) -> None:
    tid, a = machine.tasks.fork(), machine.rmid(A)
    machine.tasks.set_cgroup(tid, [9, 7, 1])
    machine.write(f"{A}/tasks", str(tid))
    machine.use(tid, 4 * NS)
    machine.model.accounting.look_for_witness()

    def settle(**seconds: int) -> None:
        chains = {"root": (1,), "outer": (7, 1), "inner": (9, 7, 1), "other": (8, 1)}
        machine.model.witness.settle({chains[name]: used * NS for name, used in seconds.items()})

    settle(root=20, outer=14, inner=10, other=0)
    rows = {("9,7,1", "0", "0"): (6 * NS, 0), ("7,1", "0", "0"): (4 * NS, 0), ("1", "0", "0"): (6 * NS, 0)}
    assert machine.rows() == rows
    # The usage of the root control group is less exact, and may be less than that of those below it.
    settle(root=10, outer=14, inner=10)
    assert machine.rows() == rows
    machine.end(tid)
    machine.model.accounting.look_for_witness()
    # The end of a member takes time that its report does not have: here, as much as the end of a large one.
    # The use of the removed control groups is in their rows, and in the usage of the root control group.
    for _ in range(2):
        settle(root=25)
    rows |= {("1", "0", "0"): (11 * NS - 10 * MS, 0), ("9,7,1", "0", a): (4 * NS + 10 * MS, 1)}
    assert machine.rows() == rows


def test_status_has_all_lines(machine: Machine) -> None:
    status = machine.numbers()
    begun = status.pop("begun")
    assert list(status.items()) == [
        ("format", [4]),
        ("gaps", [0, 0, 0, 0]),
        ("rows", [0, 65536]),
        ("moves", [0, 4096]),
        ("keep", [3600]),
        ("dropped", [0]),
        ("cgroup_moves", [1]),
        ("task_moves", [1]),
    ]
    assert 0 <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) - begun[0] < 60 * 10**9


# A mounted simulation


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with Simulation(str(tmp_path_factory.mktemp("witness")), "intel-rdt", virtual_cpus=2) as simulation:
        yield Mounted(simulation.mountpoint)


@pytest.fixture
def control(mount: Mounted) -> Iterator[Control]:
    made = Control(mount.root)
    made.set_witness(restart=True)
    yield made
    made.set_faults()
    made.set_witness()
    mount.clean()


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as made:
        yield made


def test_directory_is_found_by_its_name_only(mount: Mounted) -> None:
    assert ".witness" not in os.listdir(mount.root)
    assert sorted(os.listdir(mount.path(".witness"))) == FILES
    assert os.stat(mount.path(".witness")).st_mode == 0o40750
    assert {os.stat(mount.path(f".witness/{name}")).st_mode for name in FILES} == {0o100440}


def test_nothing_can_be_changed(mount: Mounted) -> None:
    inside = mount.path(".witness/tasks")
    assert outcome(lambda: mount.write(".witness/tasks", "1")) == "EACCES"
    assert outcome(lambda: mount.mkdir(".witness/a")) == "EPERM"
    assert outcome(lambda: mount.rmdir(".witness")) == "EPERM"
    assert outcome(lambda: mount.rename(".witness", "mon_groups/a")) == "EPERM"
    assert outcome(lambda: os.unlink(inside)) == "EPERM"
    assert sorted(os.listdir(mount.path(".witness"))) == FILES


def test_users_of_the_group_can_read(mount: Mounted, control: Control) -> None:
    root = os.open(mount.root, os.O_PATH)  # only root passes the directories above it

    def read_as(groups: list[int]) -> str:
        child = os.fork()
        if child == 0:
            os.setgroups(groups)
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            result = outcome(lambda: os.read(os.open(".witness/status", os.O_RDONLY, dir_fd=root), 1))
            os._exit(0 if result == "OK" else 1 if result == "EACCES" else 2)
        return ["OK", "EACCES", "another error"][os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

    for path in (".witness", ".witness/status"):
        os.chown(mount.path(path), 0, 4711)
    assert (read_as([4711]), read_as([])) == ("OK", "EACCES")
    os.close(root)


def test_unavailable_witness_has_no_directory(mount: Mounted, control: Control) -> None:
    control.set_witness(available=False)
    assert outcome(lambda: mount.read(".witness/status")) == "ENOENT"
    control.set_witness(rows=5)
    assert "rows 0 5\n" in mount.read(".witness/status")


def test_order_moves_a_virtual_task_to_a_control_group(mount: Mounted, control: Control, crew: Crew) -> None:
    path = crew.make_cgroup("a")
    inodes = [os.stat(each).st_ino for each in (path, crew.cgroup, os.path.dirname(crew.cgroup))]
    for cgroup in (path, inodes):
        tid = control.spawn(tid=4_000_000)
        control.set_cgroup(tid, cgroup)
        control.run(tid, 5)
        control.exit(tid)
    (row,) = mount.read(".witness/ended").splitlines()
    assert (row.split()[:4], row.split()[5]) == (["0", "0", "10", "2"], ",".join(map(str, inodes)))
    tid = control.spawn(tid=4_000_000)
    for bad in ("/nowhere", "", f"{path}/b", "/etc", f"{path}/../..", "\0", [0], [-1]):
        assert outcome(lambda bad=bad: control.set_cgroup(tid, bad)) in ("ENOENT", "EINVAL")  # type: ignore[misc]
    assert outcome(lambda: control.set_cgroup(4_000_001, path)) == "ESRCH"
    control.exit(tid)


def removed(mount: Mounted, among: list[str]) -> dict[str, list[str]]:
    """Return the parent and the name of these removed control groups, by inode number."""
    lines = (line.split(" ", 3) for line in mount.read(".witness/removed").splitlines())
    return {inode: words for inode, _, *words in lines if inode in among}


def test_control_groups_of_virtual_tasks_are_listed_after_their_removal(
    mount: Mounted, control: Control, crew: Crew
) -> None:
    path = crew.make_cgroup("a")
    tid = control.spawn(tid=4_000_000)
    control.set_cgroup(tid, path)
    control.run(tid, 5)
    control.exit(tid)
    inodes = [str(os.stat(each).st_ino) for each in (path, crew.cgroup)]
    begun = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert removed(mount, inodes) == {}
    os.rmdir(path)
    # Another control group at the same path is not the first one.
    os.mkdir(path)
    assert removed(mount, inodes) == {inodes[0]: [inodes[1], "a"]}
    (line,) = (line.split() for line in mount.read(".witness/removed").splitlines() if line.startswith(inodes[0]))
    assert 0 <= int(line[1]) - begun < 60 * 10**9
    control.set_witness(restart=True)
    assert removed(mount, inodes) == {}


def test_removal_for_which_there_is_no_room_is_a_gap(mount: Mounted, control: Control, crew: Crew) -> None:
    control.set_witness(restart=True, rows=1)
    tid = control.spawn(tid=4_000_000)
    paths = [crew.make_cgroup(name) for name in "ab"]
    inodes = [str(os.stat(path).st_ino) for path in paths]
    for path in paths:
        control.set_cgroup(tid, path)
    control.exit(tid)
    for path in paths:
        os.rmdir(path)
    assert len(removed(mount, inodes)) == 1
    assert "gaps 0 0 0 1\n" in mount.read(".witness/status")


@pytest.mark.parametrize(("bounds", "left"), [((4, 1), "c"), ((5, 1), "abc"), ((4, 3600), "abc")])
def test_old_control_groups_are_dropped_at_a_removal_if_a_table_is_nearly_full(
    mount: Mounted, control: Control, crew: Crew, bounds: tuple[int, int], left: str
) -> None:
    rows, keep = bounds
    tid = control.spawn(tid=4_000_000)
    inodes, removed_at = dict[str, str](), dict[str, str]()

    def found(file: str, column: int) -> str:
        there = [line.split()[column].split(",")[0] for line in mount.read(f".witness/{file}").splitlines()]
        return "".join(name for name, inode in inodes.items() if inode in there)

    for name in "abc":
        path = crew.make_cgroup(name)
        inodes[name] = str(os.stat(path).st_ino)
        control.set_cgroup(tid, path)
        control.run(tid, 5)
        if name == "c":
            time.sleep(1.01)
            control.set_witness(rows=rows, keep=keep)
            assert found("removed", 0) == "ab", "nothing was removed since"
        os.rmdir(path)
        removed_at |= {line.split()[0]: line.split()[1] for line in mount.read(".witness/removed").splitlines()}
    assert (found("removed", 0), found("ended", 5)) == (left, left)
    dropped = "0" if left == "abc" else removed_at[inodes["b"]]
    assert f"keep {keep}\ndropped {dropped}\n" in mount.read(".witness/status")
    control.set_witness(restart=True)
    assert "dropped 0\n" in mount.read(".witness/status")
    control.exit(tid)


def test_process_represents_its_virtual_task(mount: Mounted, control: Control, crew: Crew) -> None:
    mount.mkdir(A)
    path, other = crew.make_cgroup("a"), crew.make_cgroup("b")
    (pid,) = crew.start(0, path)
    control.spawn(tid=pid)
    mount.write(f"{A}/tasks", str(pid))
    control.run(pid, 3 * MS)
    Path(other, "cgroup.procs").write_text(str(pid))
    control.run(pid, 2 * MS)
    rows = [row.split() for row in mount.read(".witness/ended").splitlines()]
    assert [(row[2], row[5].split(",")[0]) for row in rows] == [(str(3 * MS), str(os.stat(path).st_ino))]
    (task,) = (line.split() for line in mount.read(".witness/tasks").splitlines() if line.split()[1] == str(pid))
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    assert task[2] == str(int(start) * 10**9 // os.sysconf("SC_CLK_TCK"))
    assert (task[5:8], task[8].split(",")[0]) == ([str(5 * MS), str(3 * MS), "0"], str(os.stat(other).st_ino))
    # The last control group is kept when the process has ended before its virtual task.
    crew.end(pid)
    control.exit(pid)
    rows = [row.split() for row in mount.read(".witness/ended").splitlines()]
    assert [(row[2], row[3], row[5].split(",")[0]) for row in rows[1:]] == [
        (str(2 * MS), "1", str(os.stat(other).st_ino))
    ]


def test_write_that_a_fault_refuses_is_recorded(mount: Mounted, control: Control) -> None:
    mount.mkdir(A)
    control.set_faults(Fault(on=Operation.TASKS, answer="EIO", times=1))
    writer = subprocess.Popen(["sh", "-c", f"echo 1 >{mount.path(A)}/tasks"], stderr=subprocess.DEVNULL)
    assert writer.wait() == 1
    (write,) = (line.split() for line in mount.read(".witness/moves").splitlines())
    assert write[3:5] == [str(os.stat(mount.path(A)).st_ino), "-5"]
    assert write[6:] == ["0", str(writer.pid), str(writer.pid), "sh", "tasks", "a", "1"]


@given(path=st.text())
def test_any_text_is_a_directory_or_nothing(path: str) -> None:
    assert CgroupTree().at(path) in ((), ROOT_CGROUP)


def test_use_in_control_groups_nested_deeper_than_calls_of_python_is_seen() -> None:
    """Reads of all simulations on the host failed while a workload had such control groups."""
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    path = Path(tempfile.mkdtemp(prefix="resctrlmond-sim-", dir=top))
    here = os.open(".", os.O_RDONLY)
    os.chdir(path)
    depth = 1100
    try:
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        assert max(map(len, CgroupTree().usage())) >= depth
    finally:
        for _ in range(depth):
            os.chdir("..")
            os.rmdir("d")
        os.fchdir(here)
        os.close(here)
        path.rmdir()
