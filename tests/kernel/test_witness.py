# SPDX-License-Identifier: Apache-2.0
"""The kernel as witness: the CPU time of each task, by control group and RMID, with real groups of resctrl."""

from __future__ import annotations

import itertools
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.wait import wait_until

from .host import TREE, Host
from .machine import Guest

ROOT = Path(__file__).parents[2]
PROGRAM = "/usr/bin/resctrlmond-witness"
FILES = "/sys/fs/bpf/resctrlmond"
STATE = "/run/resctrlmond/witness/state"
CGROUPS = "/sys/fs/cgroup"
# cpu.stat is in microseconds. The time since the last tick of a task that runs is charged a tick later.
MICROSECOND, TICK = 1_000, 4_000_000
WORK = "i=0; while [ $i -lt 5000 ]; do i=$((i+1)); done"


@dataclass(frozen=True)
class Row:
    """A line of the file "ended"."""

    closid: int
    rmid: int
    cpu_ns: int
    tasks: int
    changed: int
    cgroups: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A line of the file "tasks"."""

    tgid: int
    tid: int
    start: int
    closid: int
    rmid: int
    cpu_ns: int
    charged: int
    has_ended: bool
    cgroups: tuple[str, ...]


def make(name: str, *variables: str) -> Path:
    """Compile the loader, and return its path."""
    command = ["make", "-s", "-C", str(ROOT), f"WITNESS=build/{name}", *variables, "witness"]
    subprocess.run(command, check=True, timeout=300)
    return ROOT / "build" / name


class Witness:
    """The files of the witness in a guest, and what the tests do there."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self._names = itertools.count(1)

    def out(self, command: str, timeout: float = 60.0) -> str:
        """Return the output of a command, without the newline at its end."""
        return self.guest.run(command, timeout=timeout).stdout.rstrip("\n")

    def load(self, options: str = "") -> None:
        """Load the program, which must succeed."""
        self.out(f"{PROGRAM} load {options}")

    def lines(self, name: str) -> list[list[str]]:
        """Return the words of each line of a file."""
        return [line.split() for line in self.out(f"cat {FILES}/{name}").splitlines()]

    def removed(self) -> list[list[str]]:
        """Return the inode number, the time, the parent and the name of each removed control group."""
        return [line.split(" ", 3) for line in self.out(f"cat {FILES}/removed").splitlines()]

    def status(self) -> dict[str, list[int]]:
        """Return the values of the file "status"."""
        return {name: [int(value) for value in values] for name, *values in self.lines("status")}

    def tasks(self) -> dict[int, Task]:
        """Return the tasks by their IDs."""
        found = {}
        for *numbers, cgroups in self.lines("tasks"):
            tgid, tid, start, closid, rmid, cpu_ns, charged, ended = map(int, numbers)
            path = tuple(cgroups.split(","))
            found[tid] = Task(tgid, tid, start, closid, rmid, cpu_ns, charged, bool(ended), path)
        return found

    def rows(self, cgroup: str) -> dict[tuple[int, int], Row]:
        """Return the rows of a control group, by CLOSID and RMID."""
        found = {}
        for *numbers, cgroups in self.lines("ended"):
            closid, rmid, cpu_ns, tasks, changed = map(int, numbers)
            row = Row(closid, rmid, cpu_ns, tasks, changed, tuple(cgroups.split(",")))
            if row.cgroups[0] == cgroup:
                found[row.closid, row.rmid] = row
        return found

    def total(self, cgroup: str) -> int:
        """Return the charged CPU time of a control group."""
        return sum(row.cpu_ns for row in self.rows(cgroup).values())

    def moves(self, kind: str, after: int) -> list[list[str]]:
        """Return the records of a kind after a number, in their order."""
        found = [words for words in self.lines("moves") if words[1] == kind and int(words[0]) > after]
        return sorted(found, key=lambda words: int(words[0]))

    def last_move(self) -> int:
        """Return the number of the last move."""
        return self.status()["moves"][0]

    def cgroup(self) -> tuple[str, str]:
        """Create a control group. Return its path and its inode number."""
        path = f"{CGROUPS}/of-test-{next(self._names)}"
        return path, self.out(f"mkdir {path} && stat -c %i {path}")

    def group(self) -> str:
        """Create a monitoring group, and return its directory."""
        path = f"{TREE}/mon_groups/of-test-{next(self._names)}"
        self.out(f"mkdir {path}")
        return path

    def usage(self, path: str) -> int:
        """Return the CPU time of a control group in ns, by the kernel's own account."""
        return int(self.out(f"sed -n 's/^usage_usec //p' {path}/cpu.stat")) * 1000

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition."""
        wait_until(condition, interval_s=0.1, timeout_s=30.0, failure=f"still waiting for {what}")

    def expect_usage(self, path: str, cgroup: str, tolerance: int = MICROSECOND) -> None:
        """Wait until the sums are the usage of the control group. The kernel frees a task some ms after its end."""
        usage = self.usage(path)
        self.until(lambda: abs(self.total(cgroup) - usage) <= tolerance, f"{usage} ns, not {self.rows(cgroup)}")

    def rmid(self, group: str) -> tuple[int, int]:
        """Return CLOSID and RMID of a monitoring group, from a task that enters it."""
        after = self.last_move()
        self.out(f"sh -c 'echo 0 >{group}/tasks; :'")
        ((*_, closid, rmid, _),) = self.moves("task", after)
        return int(closid), int(rmid)

    def process(self, command: str) -> int:
        """Start a process in the background, and return its ID."""
        return int(self.out(f"nohup setsid sh -c {shlex.quote(command)} >/dev/null 2>&1 & echo $!"))


@pytest.fixture(scope="module")
def machine(guest: Guest) -> Witness:
    """Return a guest with the loader."""
    guest.put(make("resctrlmond-witness"), PROGRAM)
    guest.run("groupadd --system resctrlmon")
    return Witness(guest)


@pytest.fixture
def witness(machine: Witness) -> Iterator[Witness]:
    """Yield a guest whose kernel is a witness, without a gap."""
    machine.load()
    yield machine
    assert machine.status()["gaps"] == [0, 0, 0, 0]


@pytest.fixture
def unloaded(machine: Witness) -> Iterator[Witness]:
    """Yield a guest without the program."""
    machine.out(f"{PROGRAM} unload")
    yield machine
    machine.out(f"{PROGRAM} unload")


def test_process_that_joined_and_ended_between_two_looks_is_one_row(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    witness.out(f"sh -c 'echo $$ >{path}/cgroup.procs; {WORK}'")
    witness.expect_usage(path, cgroup)
    ((key, row),) = witness.rows(cgroup).items()
    assert (key, row.tasks, row.cgroups) == ((0, 0), 1, (cgroup, witness.out(f"stat -c %i {CGROUPS}")))


CLONE = """\
import ctypes, os, sys
arguments = (ctypes.c_uint64 * 11)()
arguments[0], arguments[4] = 0x200000000, 17  # CLONE_INTO_CGROUP, SIGCHLD
arguments[10] = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
open(sys.argv[2] + '/tasks', 'w').write('0')
child = ctypes.CDLL(None, use_errno=True).syscall(435, arguments, ctypes.sizeof(arguments))
if child == 0:
    for _ in range(300000): pass
    os._exit(0)
assert child > 0, ctypes.get_errno()
os.waitpid(child, 0)
"""


def test_child_created_in_a_control_group_has_the_rmid_of_its_parent(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    group = witness.group()
    rmid = witness.rmid(group)
    witness.out(f"python3 -c {shlex.quote(CLONE)} {path} {group}")
    witness.expect_usage(path, cgroup)
    ((key, row),) = witness.rows(cgroup).items()
    assert (key, row.tasks) == (rmid, 1)


def test_time_until_a_move_is_charged_to_the_old_rmid(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    groups = [witness.group(), witness.group()]
    first, second = map(witness.rmid, groups)
    after = witness.last_move()
    enter = [f"echo $$ >{group}/tasks; {WORK}" for group in groups]
    witness.out(f"sh -c 'echo $$ >{path}/cgroup.procs; {WORK}; {enter[0]}; {enter[1]}'")
    witness.expect_usage(path, cgroup)
    rows = witness.rows(cgroup)
    assert {key: row.tasks for key, row in rows.items()} == {(0, 0): 0, first: 0, second: 1}
    moved = witness.moves("task", after)
    used = [int(words[-1]) for words in moved]
    # The shell's own time before it entered the control group is not in the rows.
    assert used[1] - used[0] == rows[first].cpu_ns
    assert [tuple(map(int, words[-5:-1])) for words in moved] == [(0, 0, *first), (*first, *second)]
    assert {words[7] for words in moved} == {cgroup}
    # Each part did the same work.
    assert all(row.cpu_ns > max(used) / 10 for row in rows.values())
    directories = [witness.out(f"stat -c %i {group}") for group in groups]
    writes = witness.moves("write", after)
    assert [words[3:5] for words in writes] == [
        [directory, str(len(words[-1]) + 1)] for directory, words in zip(directories, writes, strict=True)
    ]
    assert [words[3] for words in moved] == [words[0] for words in writes]


def test_list_of_tasks_in_one_write(witness: Witness) -> None:
    group = witness.group()
    tasks = [witness.process("exec sleep 100") for _ in range(2)]
    after = witness.last_move()
    witness.out(f"echo {tasks[0]},{tasks[1]} >{group}/tasks")
    (write,) = witness.moves("write", after)
    assert write[3:5] == [witness.out(f"stat -c %i {group}"), str(len(f"{tasks[0]},{tasks[1]}\n"))]
    name = group.rpartition("/")[2]
    assert (write[6], write[9:]) == ("0", ["bash", "tasks", name, f"{tasks[0]},{tasks[1]}"])
    moved = witness.moves("task", after)
    listed = witness.tasks()
    assert [(int(words[4]), int(words[5]), int(words[6])) for words in moved] == [
        (task, task, listed[task].start) for task in tasks
    ]
    # A write that changes nothing moves no task.
    after = witness.last_move()
    witness.out(f"echo {tasks[0]} >{group}/tasks")
    assert (len(witness.moves("write", after)), witness.moves("task", after)) == (1, [])
    witness.out(f"kill {tasks[0]} {tasks[1]}")


def test_refused_write_has_its_errno_and_moves_nothing(witness: Witness) -> None:
    group = witness.group()
    for text, errno, unresolved in (("4000000", -3, 0), ("nonsense", -22, 1), ("0x1", 4, 1)):
        after = witness.last_move()
        witness.guest.run(f"echo {text} >{group}/tasks", check=False)
        (write,) = witness.moves("write", after)
        assert (int(write[4]), int(write[6]), write[12]) == (errno, unresolved, text)
        assert witness.moves("task", after) == []
    # The time before the last move was not charged to the old RMID.
    assert witness.status()["gaps"] == [0, 0, 1, 0]
    witness.out(f"{PROGRAM} unload")
    witness.load()


def test_write_to_another_file_has_its_name_and_moves_nothing(witness: Witness) -> None:
    group = witness.group()
    name, directory = group.rpartition("/")[2], witness.out(f"stat -c %i {group}")
    after = witness.last_move()
    witness.out(f"echo 1 >{group}/cpus")
    witness.guest.run(f"echo none >{group}/cpus", check=False)
    witness.out(f"echo >{group}/cpus_list; echo shareable >{TREE}/mode; cat {TREE}/schemata >{TREE}/schemata")
    assert [words[3:5] + words[6:7] + words[9:] for words in witness.moves("write", after)] == [
        [directory, "2", "0", "bash", "cpus", name, "1"],
        [directory, "-22", "0", "bash", "cpus", name, "none"],
        [directory, "1", "0", "bash", "cpus_list", name],
        [witness.out(f"stat -c %i {TREE}"), "10", "0", "bash", "mode", "/", "shareable"],
    ]
    assert witness.moves("task", after) == []


def test_writer_in_another_pid_namespace_is_understood(witness: Witness) -> None:
    group = witness.group()
    after = witness.last_move()
    witness.out(f"unshare --pid --fork sh -c 'echo $$ >{group}/tasks; :'")
    (write,), (moved,) = witness.moves("write", after), witness.moves("task", after)
    assert (write[6], write[12]) == ("0", "1")
    assert moved[4] == write[7] != "1"


THREADS = """\
import os, sys, threading, time
path, group = sys.argv[1:]
open(path + '/cgroup.procs', 'w').write('0')
def work():
    with open(group + '/tasks', 'w') as file: file.write('0')
    for _ in range(300000): pass
    done.set(); end.wait()
done, end = threading.Event(), threading.Event()
thread = threading.Thread(target=work)
thread.start()
done.wait()
print(os.getpid(), thread.native_id, flush=True)
while not os.path.exists('/run/end'): time.sleep(0.1)
end.set(); thread.join()
"""


def test_each_thread_is_a_task(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    group = witness.group()
    rmid = witness.rmid(group)
    witness.out("touch /run/ids")
    witness.process(f"exec python3 -c {shlex.quote(THREADS)} {path} {group} >/run/ids")
    witness.until(lambda: bool(witness.out("cat /run/ids")), "both threads")
    tgid, tid = map(int, witness.out("cat /run/ids").split())
    tasks = witness.tasks()
    assert [(tasks[each].tgid, (tasks[each].closid, tasks[each].rmid)) for each in (tgid, tid)] == [
        (tgid, (0, 0)),
        (tgid, rmid),
    ]
    assert {tasks[each].cgroups[0] for each in (tgid, tid)} == {cgroup}
    witness.out("touch /run/end")
    witness.until(lambda: tgid not in witness.tasks(), "the end of the process")
    witness.expect_usage(path, cgroup)
    assert {key: row.tasks for key, row in witness.rows(cgroup).items()} == {(0, 0): 1, rmid: 1}


def test_task_is_the_same_after_exec(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    task = witness.process(f"echo $$ >{path}/cgroup.procs; {WORK}; exec sleep 100")
    witness.until(lambda: witness.out(f"cat /proc/{task}/comm") == "sleep", "the exec")
    listed = witness.tasks()[task]
    assert listed.cgroups[0] == cgroup
    assert witness.rows(cgroup) == {}
    # The time until the move into the control group is charged to the old one.
    assert abs(listed.cpu_ns - listed.charged - witness.usage(path)) <= TICK
    witness.out(f"kill {task}")
    witness.expect_usage(path, cgroup)
    assert [row.tasks for row in witness.rows(cgroup).values()] == [1]


def test_zombie_is_charged_once(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    child = f"echo $$ >{path}/cgroup.procs; {WORK}"
    # The shell executes sleep, which does not wait for the child.
    parent = witness.process(f"sh -c {shlex.quote(child)} & exec sleep 100")
    witness.until(lambda: bool(witness.rows(cgroup)), "the end of the child")
    (zombie,) = (task for task in witness.tasks().values() if task.cgroups[0] == cgroup)
    assert zombie.has_ended
    usage = witness.usage(path)
    before_cgroup = zombie.charged - witness.total(cgroup)
    assert abs(zombie.cpu_ns - before_cgroup - usage) <= MICROSECOND
    witness.out(f"kill {parent}")
    witness.expect_usage(path, cgroup)
    assert [row.tasks for row in witness.rows(cgroup).values()] == [1]


def test_time_is_charged_to_the_control_group_that_a_task_leaves(witness: Witness) -> None:
    (path, cgroup), (other, other_cgroup) = witness.cgroup(), witness.cgroup()
    witness.out(f"sh -c 'echo $$ >{path}/cgroup.procs; {WORK}; echo $$ >{other}/cgroup.procs; {WORK}'")
    # The kernel charges the system call itself to the control group that it is in at the next tick.
    witness.expect_usage(path, cgroup, TICK)
    witness.expect_usage(other, other_cgroup, TICK)
    (first,), (second,) = (witness.rows(each).values() for each in (cgroup, other_cgroup))
    assert (first.tasks, second.tasks) == (0, 1)


def test_control_group_that_was_removed_keeps_its_row_and_its_ancestors(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    # The use in a control group on level 140 is counted on level 16.
    names = [f"level-{level}" for level in range(2, 141)]
    whole, counted = "/".join([path, *names]), "/".join([path, *names[:15]])
    witness.out(f"mkdir -p {whole}")
    ids = witness.out(
        f"p={counted}; while :; do stat -c %i $p; [ $p = /sys/fs/cgroup ] && break; p=${{p%/*}}; done"
    ).split()
    witness.out(f"sh -c 'echo $$ >{whole}/cgroup.procs; {WORK}'")
    witness.until(lambda: bool(witness.rows(ids[0])), "the row")
    witness.out(f"find {path} -depth -type d -exec rmdir {{}} +")
    (row,) = witness.rows(ids[0]).values()
    assert len(ids) == 17
    assert ids[15] == cgroup
    assert row.cgroups == tuple(ids)


def test_removed_control_group_is_listed_with_its_parent_and_its_name(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    longest, spaced = "n" * 255, " a  name "
    inodes = [witness.out(f"mkdir '{path}/{name}' && stat -c %i '{path}/{name}'") for name in (longest, spaced)]
    before = int(witness.out("date +%s"))
    witness.out(f"rmdir '{path}/{longest}' '{path}/{spaced}' {path}")
    # Nobody has used them, and no other program looked at them.
    found = {inode: words for inode, *words in witness.removed()}
    assert [found[inode][1:] for inode in inodes] == [[cgroup, longest], [cgroup, spaced]]
    assert found[cgroup][1:] == [witness.out(f"stat -c %i {CGROUPS}"), path.rpartition("/")[2]]
    boot = int(witness.out("sed -n 's/^btime //p' /proc/stat"))
    times = [int(found[inode][0]) for inode in (*inodes, cgroup)]
    assert times == sorted(times)
    assert abs(times[0] / 1e9 + boot - before) < 30


def test_name_of_256_bytes_is_refused_or_cut(witness: Witness) -> None:
    name = "n" * 256
    inode = witness.out(f"mkdir {CGROUPS}/{name} 2>&1 && stat -c %i {CGROUPS}/{name} && rmdir {CGROUPS}/{name} || :")
    if "File name too long" not in inode:
        assert [words[3] for words in witness.removed() if words[0] == inode] == [name[:255]]


def test_second_load_keeps_the_sums(witness: Witness) -> None:
    path, cgroup = witness.cgroup()
    witness.out(f"sh -c 'echo $$ >{path}/cgroup.procs; {WORK}'")
    witness.until(lambda: bool(witness.rows(cgroup)), "the row")
    begun, rows = witness.status()["begun"], witness.rows(cgroup).keys()
    witness.load()
    assert witness.status()["begun"] == begun
    assert witness.rows(cgroup).keys() == rows


def test_version_with_another_format_replaces_the_files_at_once(witness: Witness) -> None:
    witness.guest.put(make("resctrlmond-witness-of-format-5", "FORMAT=5"), "/run/format-5")
    begun = witness.status()["begun"]
    # The shell's read is much faster than cat.
    reader = f"until [ -e /run/stop ]; do read line <{FILES}/status || echo missing; done"
    running = witness.guest.start(f"{{ {reader}; }} 2>&1", timeout=100)
    witness.out("/run/format-5 load; touch /run/stop")
    assert "missing" not in running.wait().stdout
    assert witness.status()["format"] == [5]
    assert witness.status()["begun"] > begun
    assert witness.out("ls /sys/fs/bpf") == "resctrlmond"
    witness.load()
    assert witness.status()["format"] == [4]


def test_user_with_the_group_reads_the_files_without_a_capability(witness: Witness) -> None:
    assert witness.out(f"stat -c '%a %U:%G' {FILES} {FILES}/*").splitlines() == [
        "750 root:resctrlmon",
        *["440 root:resctrlmon"] * 2,
        "700 root:resctrlmon",
        *["440 root:resctrlmon"] * 3,
    ] or witness.out(f"ls -l {FILES}")
    # Only root passes /sys/fs/bpf. BindReadOnlyPaths= gives a service of another user a mount of the files.
    witness.out(f"mkdir -p /run/files && mount --bind {FILES} /run/files")
    user = "setpriv --reuid nobody --bounding-set -all --inh-caps -all"
    read = "cat /run/files/tasks /run/files/ended /run/files/removed /run/files/moves /run/files/status"
    assert "format 4" in witness.out(f"{user} --regid nogroup --groups resctrlmon {read}")
    assert witness.guest.run(f"{user} --regid nogroup --clear-groups {read}", check=False).returncode
    root = f"setpriv --bounding-set -all --inh-caps -all cat {FILES}/status"
    assert "format 4" in witness.out(root)
    witness.out("umount /run/files")


def test_unload_removes_all(machine: Witness) -> None:
    machine.load()
    machine.out(f"{PROGRAM} unload")
    assert machine.out("ls /sys/fs/bpf") == ""
    assert machine.out(f"ls {STATE} 2>/dev/null || echo none") == "none"
    machine.out(f"{PROGRAM} unload")


def test_full_table_is_counted_as_a_gap(unloaded: Witness) -> None:
    unloaded.load("--rows 4 --moves 4")
    created = [unloaded.cgroup() for _ in range(8)]
    for path, _ in created:
        unloaded.out(f"sh -c 'echo $$ >{path}/cgroup.procs; :'")
    unloaded.until(lambda: unloaded.status()["gaps"][0] >= 4, "the gaps")
    assert unloaded.status()["rows"] == [4, 4]
    # The ring has the last moves. Their numbers show that others are missing.
    for _ in range(6):
        unloaded.guest.run(f"echo nonsense >{TREE}/tasks", check=False)
    assert [int(words[0]) for words in unloaded.moves("write", 0)] == [3, 4, 5, 6]


def test_removal_for_which_there_is_no_room_is_a_gap(unloaded: Witness) -> None:
    unloaded.load("--rows 4")
    created = [unloaded.cgroup() for _ in range(6)]
    unloaded.out(f"rmdir {' '.join(path for path, _ in created)}")
    assert {words[0] for words in unloaded.removed()} == {cgroup for _, cgroup in created[:4]}
    assert unloaded.status()["gaps"][3] == 2


def test_rows_of_removed_control_groups_make_room(unloaded: Witness) -> None:
    unloaded.load("--rows 8 --keep 10")
    created = [unloaded.cgroup() for _ in range(6)]
    for path, cgroup in created:
        unloaded.out(f"sh -c 'echo $$ >{path}/cgroup.procs; :'")
        unloaded.until(lambda cgroup=cgroup: bool(unloaded.rows(cgroup)), "the row")  # type: ignore[misc]
    unloaded.out(f"rmdir {' '.join(path for path, _ in created[:-1])}")
    assert all(unloaded.rows(cgroup) for _, cgroup in created)
    newest = max(int(words[1]) for words in unloaded.removed())
    assert unloaded.status()["dropped"] == [0]
    unloaded.out(f"sleep 10.1; mkdir {CGROUPS}/last && rmdir {CGROUPS}/last")
    assert [bool(unloaded.rows(cgroup)) for _, cgroup in created] == [False] * 5 + [True]
    left = {inode: int(at) for inode, at, _, _ in unloaded.removed()}
    assert not left.keys() & {cgroup for _, cgroup in created}
    # Services of the guest may have ended meanwhile.
    assert newest <= unloaded.status()["dropped"][0] < min(left.values())
    unloaded.until(lambda: unloaded.status()["rows"][0] == len(unloaded.lines("ended")), "the number of rows")


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("no-bpffs", f"umount /sys/fs/bpf; {PROGRAM} load"),
        ("no-cgroup2", f"mount -t tmpfs none {CGROUPS}; {PROGRAM} load"),
        ("no-btf", f"mount -t tmpfs none /sys/kernel/btf; {PROGRAM} load"),
        ("no-permission", f"setpriv --bounding-set -all --inh-caps -all {PROGRAM} load"),
    ],
)
def test_reason_of_a_failure_is_in_the_state(unloaded: Witness, reason: str, command: str) -> None:
    done = unloaded.guest.run(f"unshare --mount sh -c {shlex.quote(command)}", check=False)
    assert done.returncode == 69, done.output
    state = dict(line.split(" ", 1) for line in unloaded.out(f"cat {STATE}").splitlines())
    assert (state["state"], state["reason"]) == ("unavailable", reason)
    assert state["detail"] in done.stderr
    assert unloaded.out("ls /sys/fs/bpf") == ""


@pytest.fixture(scope="module")
def installed(installed_guest: Guest) -> Host:
    """Return a host with the project installed, on which nothing has been started."""
    return Host(installed_guest)


def test_start_of_the_daemon_loads_the_witness(installed: Host) -> None:
    installed.start()
    assert installed.out(f"cat {STATE}") == "state loaded"
    assert installed.out("systemctl show -P Result,ExecMainStatus resctrlmond-witness") == "success\n0"
    assert installed.out(f"stat -c %U:%G {FILES}/tasks") == "root:resctrlmon"
    begun = installed.out(f"grep begun {FILES}/status")
    installed.run("systemctl restart resctrlmond")
    assert installed.out(f"grep begun {FILES}/status") == begun
    # In the sandbox of the daemon, with its user and without a capability.
    inside = f"nsenter --mount --target {installed.pid()} setpriv --bounding-set -all --inh-caps -all"
    assert "format 4" in installed.out(f"{inside} cat {FILES}/status")


def test_kernel_that_refuses_the_witness_does_not_fail_the_daemon(installed: Host) -> None:
    """The last test of this guest: a lockdown cannot be undone."""
    installed.run(f"systemctl stop resctrlmond && {PROGRAM} unload")
    installed.run("echo confidentiality >/sys/kernel/security/lockdown")
    installed.start()
    assert "state unavailable\nreason lockdown\n" in installed.out(f"cat {STATE}")
    assert installed.out("systemctl show -P Result,ExecMainStatus resctrlmond-witness") == "exit-code\n69"
    assert "(lockdown)" in installed.out("journalctl -b -p err -o cat -u resctrlmond-witness")
    assert installed.run("systemctl start resctrlmond-witness", check=False).returncode
    assert installed.out("systemctl is-active resctrlmond") == "active"
    assert installed.out("ls /sys/fs/bpf") == ""
