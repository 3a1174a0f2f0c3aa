# SPDX-License-Identifier: Apache-2.0
"""The simulator's model on virtual tasks and a virtual clock, so that tests are exact and repeatable."""

from __future__ import annotations

from typing import Any

from resctrlmond.sim.host.virtual import VirtualTasks
from resctrlmond.sim.kernel.clock import Clock
from resctrlmond.sim.kernel.groups import Group
from resctrlmond.sim.kernel.model import Resctrl
from resctrlmond.sim.kernel.tree import Caller, Directory, File, Node, lookup
from resctrlmond.sim.profiles import profile_named

NS = 10**9
ROOT = Caller(0, 0, 1)


class VirtualResctrl:
    """The model of a resctrl filesystem on virtual tasks and a virtual clock. Methods take paths."""

    def __init__(
        self,
        profile: str = "intel-rdt",
        rmids: int | None = None,
        residue: int | None = None,
        *,
        reports_forks: bool = False,
        cpus: int = 2,
        **numbers: Any,
    ) -> None:
        self.tasks = VirtualTasks(cpus, reports_forks=reports_forks)
        self.now = 1000.0
        self.wall_ns = 1_700_000_000 * NS
        clock = Clock(lambda: self.now, lambda: self.wall_ns)
        self.model = Resctrl(profile_named(profile, rmids=rmids, **numbers), self.tasks, clock, residue)

    def run(self, tid: int, seconds: float, cpu: int = 0) -> None:
        """Use CPU time in a task."""
        self.tasks.run(tid, int(seconds * NS), cpu)

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

    def rmdir(self, path: str, caller: Caller = ROOT) -> None:
        self.model.rmdir(self.node(path), caller)

    def rename(self, old: str, new: str) -> None:
        above, _, name = new.rpartition("/")
        self.model.rename(self.node(old), self.directory(above), name)

    def read(self, path: str) -> str:
        # More than the time by which counters may lag.
        self.now += 0.01
        return self.file(path).show()

    def write(self, path: str, text: str, caller: Caller = ROOT) -> None:
        store = self.file(path).store
        assert store is not None
        store(caller, text)

    def poll(self) -> None:
        self.now += 0.06
        self.model.accounting.poll()

    def tids(self, path: str) -> set[int]:
        return {int(line) for line in self.read(path + "/tasks").split()}

    @property
    def status(self) -> str:
        return self.read("info/last_cmd_status")
