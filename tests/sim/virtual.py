# SPDX-License-Identifier: Apache-2.0
"""Tasks and a clock that a test drives, so that the model alone is exact and repeatable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from resctrlmond.sim.groups import Group
from resctrlmond.sim.model import Clock, Resctrl
from resctrlmond.sim.profiles import profile_named
from resctrlmond.sim.tasks import Fork, TaskStat
from resctrlmond.sim.tree import Caller, Directory, File, Node, lookup

NS = 10**9
ROOT = Caller(0, 0, 1)


@dataclasses.dataclass
class VirtualTask:
    tid: int
    tgid: int
    forker: int
    start: int
    cpu_ns: int = 0
    cpu: int = 0
    uid: int = 0


class VirtualTasks:
    """A task table: task 1 is there from the start, every other one is forked by one that is there.

    ``tells_forks``: as with the process connector; otherwise forks have to be found by looking.
    """

    def __init__(self, cpus: int = 2, *, tells_forks: bool = False) -> None:
        self.tells_forks = tells_forks
        self.told: list[Fork] = []
        self.cpus = cpus
        self.tasks = {1: VirtualTask(1, 1, 0, 0)}
        self.births = 0
        self.next_tid = 100
        self.host = dict.fromkeys(range(cpus), 0)

    def fork(self, forker: int = 1, *, thread: bool = False, uid: int = 0, tid: int = 0) -> int:
        self.births += 1
        if not tid:
            tid, self.next_tid = self.next_tid, self.next_tid + 1
        tgid = self.tasks[forker].tgid if thread else tid
        self.tasks[tid] = VirtualTask(tid, tgid, forker, self.births, uid=uid)
        # Of a thread the kernel names its process's parent.
        self.told.append(Fork(self.tasks[tgid].forker if thread else forker, tid, tgid))
        return tid

    def exit(self, tid: int) -> None:
        del self.tasks[tid]

    def burn(self, tid: int, seconds: float, cpu: int = 0) -> None:
        self.tasks[tid].cpu_ns += int(seconds * NS)
        self.tasks[tid].cpu = cpu
        self.host[cpu] += int(seconds * NS)

    def forks(self) -> list[Fork] | None:
        told, self.told = self.told, []
        return told if self.tells_forks else None

    def last_born(self) -> int:
        return self.births

    def threads(self) -> Mapping[int, int]:
        return {task.tid: task.tgid for task in self.tasks.values()}

    def stat(self, tid: int) -> TaskStat | None:
        task = self.tasks.get(tid)
        if task is None:
            return None
        forker = self.tasks.get(task.forker)
        return TaskStat(tid, forker.tgid if forker else 1, task.start, task.cpu_ns, task.cpu)

    def credentials(self, tid: int) -> tuple[int, int] | None:
        task = self.tasks.get(tid)
        return (task.uid, task.uid) if task else None

    def forker(self, child: int, candidates: list[int]) -> int | None:
        forker = self.tasks[child].forker
        return forker if forker in candidates else None

    def host_cpu_ns(self) -> Mapping[int, int]:
        return self.host


class Lab:
    """A model on virtual tasks and a virtual clock, spoken to by paths."""

    def __init__(
        self,
        profile: str = "intel-rdt",
        rmids: int | None = None,
        residue: int | None = None,
        *,
        tells_forks: bool = False,
    ) -> None:
        self.tasks = VirtualTasks(tells_forks=tells_forks)
        self.now = 1000.0
        self.wall_ns = 1_700_000_000 * NS
        clock = Clock(lambda: self.now, lambda: self.wall_ns)
        self.model = Resctrl(profile_named(profile, rmids=rmids), self.tasks, clock, residue)

    def node(self, path: str) -> Node:
        return lookup(self.model.root, path, ROOT)

    def directory(self, path: str) -> Directory:
        node = self.node(path)
        assert isinstance(node, Directory)
        return node

    def file(self, path: str) -> File:
        node = self.node(path)
        assert isinstance(node, File)
        return node

    def group(self, path: str) -> Group:
        return self.model._group_of[self.directory(path)]

    def mkdir(self, path: str, caller: Caller = ROOT) -> None:
        above, _, name = path.rpartition("/")
        self.model.mkdir(self.directory(above), name, 0o755, caller)

    def rmdir(self, path: str) -> None:
        self.model.rmdir(self.node(path))

    def rename(self, old: str, new: str) -> None:
        above, _, name = new.rpartition("/")
        self.model.rename(self.node(old), self.directory(above), name)

    def read(self, path: str) -> str:
        # Past the lag that counters may have.
        self.now += 0.01
        return self.file(path).show()

    def write(self, path: str, text: str, caller: Caller = ROOT) -> None:
        store = self.file(path).store
        assert store is not None
        store(caller, text)

    def poll(self) -> None:
        self.now += 0.06
        self.model.poll()

    def tids(self, path: str) -> set[int]:
        return {int(line) for line in self.read(path + "/tasks").split()}

    @property
    def status(self) -> str:
        return self.read("info/last_cmd_status")
