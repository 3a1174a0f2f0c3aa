# SPDX-License-Identifier: Apache-2.0
"""The true use agrees with the counters and the CPUs after any sequence of events."""

from __future__ import annotations

import collections
import errno

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resctrlmond.sim.host.virtual import VirtualTasks
from resctrlmond.sim.kernel import truth as ledger
from tests.sim.virtual import VirtualResctrl

PLACES = st.sampled_from(["", "mon_groups/a", "mon_groups/b", "c", "c/mon_groups/k"])


class Conserved(RuleBasedStateMachine):
    """Each nanosecond of CPU time belongs to exactly one RMID, on two packages with two CPUs each."""

    def __init__(self) -> None:
        super().__init__()
        self.resctrl = VirtualResctrl("intel-aet", rmids=6, reports_forks=True, cpus=4)
        self.used: collections.Counter[int] = collections.Counter()  # by thread number, none used twice

    @property
    def tasks(self) -> VirtualTasks:
        return self.resctrl.tasks

    def attempt(self, what: str, *arguments: str) -> None:
        try:
            getattr(self.resctrl, what)(*arguments)
        except OSError as failure:
            assert failure.errno in (errno.EBUSY, errno.EEXIST, errno.EINVAL, errno.ENOENT, errno.ENOSPC, errno.EPERM)

    @rule(path=PLACES)
    def mkdir(self, path: str) -> None:
        self.attempt("mkdir", path)

    @rule(path=PLACES)
    def rmdir(self, path: str) -> None:
        self.attempt("rmdir", path)

    @rule(path=PLACES, data=st.data())
    def join(self, path: str, data: st.DataObject) -> None:
        self.attempt("write", path + "/tasks", str(data.draw(st.sampled_from(sorted(self.tasks.tasks)))))

    @rule(data=st.data(), thread=st.booleans())
    def fork(self, data: st.DataObject, thread: bool) -> None:
        self.tasks.fork(data.draw(st.sampled_from(sorted(self.tasks.tasks))), thread=thread)

    @rule(data=st.data(), ns=st.integers(1, 10**10), cpu=st.integers(0, 3), looked=st.booleans())
    def run(self, data: st.DataObject, ns: int, cpu: int, looked: bool) -> None:
        tid = data.draw(st.sampled_from(sorted(self.tasks.tasks)))
        self.resctrl.model.accounting.look()
        self.tasks.run(tid, ns, cpu)
        self.used[tid] += ns
        self.resctrl.model.accounting.charge_default(tid, cpu, ns)
        if looked:
            self.resctrl.model.accounting.look()

    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        tid = data.draw(st.sampled_from(sorted(self.tasks.tasks)))
        if tid != 1 and not any(task.tgid == tid != task.tid for task in self.tasks.tasks.values()):
            self.tasks.exit(tid)

    @rule(path=PLACES, cpus=st.sets(st.integers(0, 3)))
    def give_cpus(self, path: str, cpus: set[int]) -> None:
        self.attempt("write", path + "/cpus_list", ",".join(map(str, cpus)) or "\n")

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.resctrl.now += seconds

    @invariant()
    def all_rmids_together_used_what_the_cpus_did(self) -> None:
        by_node = collections.Counter[int]()
        for rmid in self.resctrl.model.truth().rmids:
            for row in rmid.total:
                by_node[row.node] += row.cpu_ns
        host = self.tasks.host_cpu_ns()
        assert by_node == collections.Counter({0: host[0] + host[1], 1: host[2] + host[3]})

    @invariant()
    def tasks_were_charged_as_their_rmids_were(self) -> None:
        truth = self.resctrl.model.truth()
        charged = collections.Counter[tuple[int, int]]()
        for task in truth.tasks:
            charged.update({(row.rmid, row.node): row.cpu_ns for row in task.used if row.rmid})
            assert sum(row.cpu_ns for row in task.used) <= self.used[task.tid]
        totals = {(row.rmid, row.node): row.cpu_ns for rmid in truth.rmids if rmid.rmid for row in rmid.total}
        assert charged == collections.Counter(totals)

    @invariant()
    def a_groups_traffic_is_the_truth_rounded_down(self) -> None:
        for use in self.resctrl.model.truth().rmids:
            if use.group and use.group.startswith("mon_groups/"):
                of_node = {row.node: row.bytes for row in use.since_mkdir}
                for node in (0, 1):
                    text = self.resctrl.file(f"{use.group}/mon_data/mon_L3_{node:02d}/mbm_total_bytes").show()
                    assert 0 <= of_node.get(node, 0) - int(text) < 65536


TestConserved = Conserved.TestCase
TestConserved.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)


def test_ended_tasks_are_dropped_first_and_their_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_TASKS", 3)
    resctrl = VirtualResctrl("intel-aet", reports_forks=True)
    resctrl.mkdir("mon_groups/a")
    tids = [resctrl.tasks.fork() for _ in range(4)]
    for number, tid in enumerate(tids):
        resctrl.write("mon_groups/a/tasks", str(tid))
        resctrl.run(tid, 1.0)
        resctrl.model.accounting.look()
        if number == 1:
            resctrl.tasks.exit(tid)
            resctrl.model.accounting.look()
            resctrl.model.accounting.look()
    truth = resctrl.model.truth()
    assert [task.tid for task in truth.tasks] == [tids[0], tids[2], tids[3]]
    assert truth.left_off == 1
