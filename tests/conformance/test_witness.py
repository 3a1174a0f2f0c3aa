# SPDX-License-Identifier: Apache-2.0
"""The files of the witness: CPU time by control group and RMID, and the writes to files tasks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from .actors import Actor, outcome, read, state, wait_until
from .target import Resctrl

pytestmark = pytest.mark.witness

MS = 1_000_000
# Each part of the work, and the tolerance: the time since the last tick.
WORK, TOLERANCE = 100 * MS, 25 * MS
Key = tuple[int, int]
DEFAULT: Key = (0, 0)


class Task(NamedTuple):
    """A line of the file "tasks"."""

    tgid: int
    tid: int
    start: int
    key: Key
    cpu_ns: int
    charged: int
    ended: int
    cgroups: str


class Row(NamedTuple):
    """A line of the file "ended"."""

    cpu_ns: int
    tasks: int
    cgroups: str


class Witness:
    """The files of the witness, and control groups for the processes of a rule."""

    def __init__(self, fs: Resctrl) -> None:
        self.fs = fs
        self._directory = fs.witness
        self._cgroups: list[str] = []

    def lines(self, name: str) -> list[list[str]]:
        return [line.split() for line in read(f"{self._directory}/{name}").splitlines()]

    def tasks(self) -> dict[int, Task]:
        found = {}
        for *numbers, cgroups in self.lines("tasks"):
            tgid, tid, start, closid, rmid, cpu_ns, charged, ended = map(int, numbers)
            found[tid] = Task(tgid, tid, start, (closid, rmid), cpu_ns, charged, ended, cgroups)
        return found

    def rows(self, cgroup: str) -> dict[Key, Row]:
        """Return the rows of a control group, by CLOSID and RMID."""
        return {
            (int(closid), int(rmid)): Row(int(cpu_ns), int(tasks), cgroups)
            for closid, rmid, cpu_ns, tasks, _, cgroups in self.lines("ended")
            if cgroups.split(",")[0] == cgroup
        }

    def used(self, cgroup: str) -> dict[Key, int]:
        """Return the CPU time of a control group, as a reader computes it, if it is more than the tolerance."""
        while True:
            rows, tasks = self.rows(cgroup), self.tasks().values()
            if self.rows(cgroup) == rows:
                break
        found = {key: row.cpu_ns for key, row in rows.items()}
        for task in tasks:
            if task.cgroups.split(",")[0] == cgroup:
                found[task.key] = found.get(task.key, 0) + task.cpu_ns - task.charged
        return {key: ns for key, ns in found.items() if ns >= TOLERANCE}

    def expect(self, path: str, parts: dict[Key, int]) -> None:
        """Wait until all use of a control group is seen: the kernel frees a task some ms after its end.

        ``parts`` is how often work was done with each CLOSID and RMID. Each may have used more, for its commands.
        """
        cgroup = str(os.stat(path).st_ino)

        def missing() -> int:
            usage = int(read(f"{path}/cpu.stat").split()[1]) * 1000
            return abs(usage - sum(self.used(cgroup).values()))

        with contextlib.suppress(TimeoutError):
            wait_until(lambda: missing() <= TOLERANCE, seconds=5)
        used = self.used(cgroup)
        assert missing() <= TOLERANCE
        assert used.keys() == parts.keys()
        assert all(used[key] >= number * WORK - TOLERANCE for key, number in parts.items()), used

    def moves(self, kind: str, after: int) -> list[list[str]]:
        """Return the records of a kind after a number, in their order."""
        found = [words for words in self.lines("moves") if words[1] == kind and int(words[0]) > after]
        return sorted(found, key=lambda words: int(words[0]))

    @property
    def last_move(self) -> int:
        """Return the number of the last move."""
        return next(int(words[1]) for words in self.lines("status") if words[0] == "moves")

    @property
    def dropped(self) -> int:
        """Return the time of the newest removal of a control group that was dropped."""
        return next(int(words[1]) for words in self.lines("status") if words[0] == "dropped")

    def removed(self) -> dict[str, tuple[int, str, str]]:
        """Return the time of the removal, the parent and the name of the removed control groups, by inode number."""
        lines = (line.split(" ", 3) for line in read(f"{self._directory}/removed").splitlines())
        return {inode: (int(at), parent, name) for inode, at, parent, name in lines}

    def cgroup(self, above: str = "", name: str = "") -> tuple[str, str]:
        """Create a control group. Return its directory and its inode number."""
        path = f"{above or _top()}/{name or f'of-rule-{os.getpid()}-{len(self._cgroups)}'}"
        os.mkdir(path)
        self._cgroups.append(path)
        return path, str(os.stat(path).st_ino)

    def close(self) -> None:
        """Remove the control groups when their processes have ended."""
        for path in reversed(self._cgroups):
            wait_until(lambda path=path: outcome(lambda: os.rmdir(path)) in ("OK", "ENOENT"))  # type: ignore[misc]


def _top() -> str:
    """Return the mount point of cgroup v2."""
    for line in read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 ") and before.split()[3] == "/":
            return before.split()[4]
    raise AssertionError("cgroup v2 is not mounted")


def enter(actor: Actor, cgroup: str) -> None:
    """Let an actor join a control group by its own write."""
    assert actor.call("write", path=f"{cgroup}/cgroup.procs", text="0") == "OK"


def see(witness: Witness, actor: Actor, cgroup: str) -> None:
    """Look where an actor is: the simulator sees the control group of a task at a look only."""
    assert witness.tasks()[actor.pid].cgroups.split(",")[0] == cgroup


def work(actor: Actor, thread: int = 0) -> None:
    actor.call("work", thread, ns=WORK)


def end(actor: Actor) -> None:
    """End an actor, which its parent reaps."""
    actor.exit()
    wait_until(lambda: state(actor.pid) == "")


@pytest.fixture
def witness(fs: Resctrl) -> Iterator[Witness]:
    made = Witness(fs)
    yield made
    made.close()


@pytest.fixture
def a(fs: Resctrl) -> str:
    return fs.create("mon_groups/a")


@pytest.fixture
def one(witness: Witness, a: str, actors: Callable[[], Actor]) -> Actor:
    """Start an actor, which ends before the group and the control groups are removed."""
    return actors()


def test_a_task_that_ended_outside_its_group_is_seen(witness: Witness, one: Actor) -> None:
    """A task that joined a control group and ended is a row with RMID 0."""
    path, _ = witness.cgroup()
    enter(one, path)
    work(one)
    end(one)
    witness.expect(path, {DEFAULT: 1})


def test_a_task_that_ended_in_its_group_is_seen(witness: Witness, a: str, one: Actor) -> None:
    """A member of a group that joined a control group and ended is a row with the RMID of the group."""
    path, cgroup = witness.cgroup()
    witness.fs.write(f"{a}/tasks", one.pid)
    key = witness.tasks()[one.pid].key
    assert key != DEFAULT
    enter(one, path)
    see(witness, one, cgroup)
    work(one)
    end(one)
    witness.expect(path, {key: 1})
    assert witness.rows(cgroup)[key].tasks == 1


def test_tasks_that_ended_at_once_are_seen_in_their_group(witness: Witness, a: str, one: Actor) -> None:
    """The children of a member have its RMID from their first to their last nanosecond."""
    path, cgroup = witness.cgroup()
    witness.fs.write(f"{a}/tasks", one.pid)
    enter(one, path)
    see(witness, one, cgroup)
    for _ in range(10):
        child = one.fork()
        child.exit()
        one.call("reap", pid=child.pid)
    key = witness.tasks()[one.pid].key
    wait_until(lambda: key in witness.rows(cgroup) and witness.rows(cgroup)[key].tasks == 10)
    assert witness.rows(cgroup).keys() == {key}


def test_use_of_a_living_task_outside_the_group_is_seen(witness: Witness, one: Actor) -> None:
    """The use of a task that joined a control group by a write to cgroup.procs is seen while it lives."""
    path, cgroup = witness.cgroup()
    work(one)
    enter(one, path)
    work(one)
    task = witness.tasks()[one.pid]
    assert (task.tgid, task.key, task.ended, task.cgroups.split(",")[0]) == (one.pid, DEFAULT, 0, cgroup)
    witness.expect(path, {DEFAULT: 1})


def test_time_before_a_move_is_charged_to_the_old_rmid(witness: Witness, a: str, one: Actor) -> None:
    """The time of a task until it moves is charged to its old RMID, and to the new one after that."""
    path, cgroup = witness.cgroup()
    enter(one, path)
    work(one)
    after = witness.last_move
    witness.fs.write(f"{a}/tasks", one.pid)
    work(one)
    work(one)
    task = witness.tasks()[one.pid]
    witness.expect(path, {DEFAULT: 1, task.key: 2})
    (write_line,), (moved,) = witness.moves("write", after), witness.moves("task", after)
    assert write_line[3:5] == [str(os.stat(witness.fs.path(a)).st_ino), str(len(str(one.pid)))]
    assert write_line[6:9] == ["0", str(os.getpid()), str(os.getpid())]
    assert write_line[10:] == ["tasks", os.path.basename(a), str(one.pid)]
    assert moved[3:7] == [write_line[0], str(one.pid), str(one.pid), str(task.start)]
    assert moved[7:12] == [cgroup, "0", "0", *map(str, task.key)]
    assert int(moved[12]) >= WORK


def test_a_refused_write_is_seen(witness: Witness, a: str) -> None:
    """A write that fails has its errno as result, and moves no task."""
    after = witness.last_move
    assert outcome(lambda: witness.fs.write(f"{a}/tasks", "4000000")) == "ESRCH"
    assert outcome(lambda: witness.fs.write(f"{a}/tasks", "no task")) == "EINVAL"
    assert [words[4:5] + words[6:7] + words[12:] for words in witness.moves("write", after)] == [
        ["-3", "0", "4000000"],
        ["-22", "2", "no?task"],
    ]
    assert witness.moves("task", after) == []


def test_a_write_to_another_file_is_seen(witness: Witness, a: str) -> None:
    """A write to any file has the file's name and that of its directory, and moves no task."""
    name, directory = os.path.basename(a), str(os.stat(witness.fs.path(a)).st_ino)
    after = witness.last_move
    for text in ("1", "0"):
        witness.fs.write(f"{a}/cpus", text)
    for path in (f"{a}/cpus", "cpus_list"):
        assert witness.fs.try_write(path, "none")[0] == "EINVAL"
    assert [words[3:5] + words[6:7] + words[10:] for words in witness.moves("write", after)] == [
        [directory, "1", "0", "cpus", name, "1"],
        [directory, "1", "0", "cpus", name, "0"],
        [directory, "-22", "0", "cpus", name, "none"],
        [str(os.stat(witness.fs.root).st_ino), "-22", "0", "cpus_list", "/", "none"],
    ]
    assert witness.moves("task", after) == []


def test_each_thread_has_its_own_rmid(witness: Witness, a: str, one: Actor) -> None:
    """Two threads of a process, of which one is in a group, are two tasks."""
    path, _ = witness.cgroup()
    enter(one, path)
    thread = one.thread()
    witness.fs.write(f"{a}/tasks", thread)
    work(one)
    work(one, thread)
    work(one, thread)
    tasks = witness.tasks()
    key = tasks[thread].key
    assert (tasks[thread].tgid, tasks[one.pid].key) == (one.pid, DEFAULT)
    witness.expect(path, {DEFAULT: 1, key: 2})
    end(one)
    witness.expect(path, {DEFAULT: 1, key: 2})


def test_exec_does_not_change_the_task(witness: Witness, a: str, one: Actor) -> None:
    """A task is the same after exec."""
    path, _ = witness.cgroup()
    witness.fs.write(f"{a}/tasks", one.pid)
    enter(one, path)
    before = witness.tasks()[one.pid]
    one.exec()
    after = witness.tasks()[one.pid]
    assert after._replace(cpu_ns=0, charged=0) == before._replace(cpu_ns=0, charged=0)


def test_a_removed_control_group_keeps_its_rows(witness: Witness, a: str, actors: Callable[[], Actor]) -> None:
    """The rows of a control group stay after its removal."""
    path, cgroup = witness.cgroup()
    inside, outside = actors(), actors()
    witness.fs.write(f"{a}/tasks", inside.pid)
    key = witness.tasks()[inside.pid].key
    for actor in (inside, outside):
        enter(actor, path)
        see(witness, actor, cgroup)
        work(actor)
        end(actor)
    witness.expect(path, {DEFAULT: 1, key: 1})
    used = witness.used(cgroup)
    os.rmdir(path)
    assert witness.used(cgroup) == used


def test_a_removed_control_group_is_listed(witness: Witness, one: Actor) -> None:
    """A control group that a task has used is listed after its removal with its parent and its name."""
    outer_path, outer = witness.cgroup()
    path, inner = witness.cgroup(outer_path, "a  name")
    enter(one, path)
    work(one)
    witness.expect(path, {DEFAULT: 1})
    end(one)
    assert not witness.removed().keys() & {inner, outer}
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    os.rmdir(path)
    os.mkdir(path)
    found = witness.removed()
    assert found[inner][1:] == (outer, "a  name")
    os.rmdir(path)
    os.rmdir(outer_path)
    found = witness.removed()
    assert found[outer][1:] == (str(os.stat(_top()).st_ino), os.path.basename(outer_path))
    assert before <= found[inner][0] <= found[outer][0] <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@pytest.fixture
def capacity(witness: Witness) -> Iterator[int]:
    """Load a witness with small tables, which keeps removed control groups for four seconds. Return its capacity."""
    capacity = 60 + 2 * len(witness.lines("ended"))
    witness.fs.load_witness(rows=capacity, keep=4)
    yield capacity
    witness.fs.load_witness()


def test_old_control_groups_are_dropped_when_a_table_is_nearly_full(
    witness: Witness, capacity: int, one: Actor
) -> None:
    """The status states the newest removal of a control group whose rows and line were dropped."""
    path, cgroup = witness.cgroup()
    enter(one, path)
    work(one)
    end(one)
    witness.expect(path, {DEFAULT: 1})
    others = [witness.cgroup() for _ in range(capacity * 3 // 4)]
    os.rmdir(path)
    at, _, _ = witness.removed()[cgroup]
    assert witness.dropped < at
    time.sleep(4.1)
    assert cgroup in witness.removed()
    for other, _ in others:
        os.rmdir(other)
    found = witness.removed()
    assert cgroup not in found
    assert found.keys() >= {inode for _, inode in others}
    assert witness.rows(cgroup) == {}
    # Another program may have removed a control group after that.
    assert at <= witness.dropped < min(removed_at for removed_at, _, _ in found.values())


def test_a_row_has_the_control_groups_above_it(witness: Witness, one: Actor) -> None:
    """A row has the inode numbers of its control group and of those above it, up to the root."""
    outer_path, outer = witness.cgroup()
    path, cgroup = witness.cgroup(outer_path)
    enter(one, path)
    work(one)
    end(one)
    witness.expect(path, {DEFAULT: 1})
    assert {row.cgroups for row in witness.rows(cgroup).values()} == {f"{cgroup},{outer},{os.stat(_top()).st_ino}"}
    assert witness.used(outer) == {}
