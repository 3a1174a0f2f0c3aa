# SPDX-License-Identifier: Apache-2.0
"""Run single workloads with one difficulty each on each simulated machine: no wrong figure may be exact.

A counter has no number at the beginning, at the end, at both, or in between; the hardware takes counters away; a task
is taken over; a process is assigned late, with a child or without; one run is inside another; tasks stay outside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from resctrlmond.api import types
from resctrlmond.api.access import Caller
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl.membership import Membership
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.filesystem import RMIDS_ATTRIBUTE
from resctrlmond.sim.profiles import PROFILES
from resctrlmond.workloads.figures.accounting import Total, added
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.truth.compare import ENERGY, EXACT, TRAFFIC
from tests.truth.record import used_by
from tests.truth.script import PIECE_NS
from tests.truth.world import Use, mounted
from tests.workloads.conftest import Host

WORDS = ("Unavailable", "Error", "Unassigned")
TIMES = ("begin", "end", "both", "between")
_PICO = 10**12
OWNER = "truth"
# A process with a child; both sleep.
_WITH_CHILD = ("sh", "-c", "sleep 600 </dev/null >/dev/null 2>&1 & echo $!; exec sleep 600 >/dev/null 2>&1")
_WITH_THREAD = """
import threading, time
thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
thread.start()
print(thread.native_id, flush=True)
time.sleep(600)
"""


@dataclass
class Report:
    """The results of the cases on one machine. ``wrong`` names each wrong figure that is reported as exact."""

    profile: str
    cases: int = 0
    exact: int = 0
    marked: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, case: str, totals: Iterable[Total], used: Use) -> None:
        """Compare the report of a workload with the use of its tasks."""
        self.cases += 1
        truth = {ENERGY: used.joules, TRAFFIC: Decimal(used.bytes)}
        for total in totals:
            if total.event.name not in truth:
                continue
            if total.quality != EXACT:
                self.marked += 1
                continue
            self.exact += 1
            if total.number is None or Decimal(total.number) != truth[total.event.name]:
                self.wrong.append(f"{case}: {total.number} {total.event.name} exact, used: {truth[total.event.name]}")


class Machine:
    """A simulated machine with a manager, and the cases that run on it."""

    def __init__(self, mountpoint: str, run: str, profile: str) -> None:
        self.host = Host(mountpoint, run)
        self.host.settings = self.host.ctx.config.settings = Settings(checkpoint_interval_s=1e-9)
        self.control = Control(mountpoint)
        self.profile = PROFILES[profile]
        self.report = Report(profile)
        self._keys = map("case-{}".format, itertools.count())
        self._processes: list[subprocess.Popen[str]] = []
        self._crowd: list[int] = []
        self._children: list[int] = []

    def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()

    # -- tasks

    def start(self, by: int = 0) -> int:
        """Start a process outside all groups, or fork one from task ``by``."""
        self._processes.append(subprocess.Popen(["sleep", "600"], text=True))
        pid = self._processes[-1].pid
        return self.control.fork(by, tid=pid) if by else self.control.spawn(tid=pid)

    def start_with_child(self) -> tuple[int, int]:
        """Start a process and its child outside all groups."""
        process = subprocess.Popen(_WITH_CHILD, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout
        child = int(process.stdout.readline())
        self._children.append(child)
        first = self.control.spawn(tid=process.pid)
        return first, self.control.fork(first, tid=child)

    def start_with_thread(self) -> tuple[int, int]:
        """Start a process with a second thread outside all groups."""
        process = subprocess.Popen([sys.executable, "-c", _WITH_THREAD], stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout
        thread = int(process.stdout.readline())
        first = self.control.spawn(tid=process.pid)
        return first, self.control.thread(first, tid=thread)

    def run(self, *tids: int) -> None:
        for tid in tids:
            self.control.run(tid, 8 * PIECE_NS)

    def used(self, *tids: int) -> Use:
        """Return the use of these tasks in all groups."""
        rows = [row for tid in tids for row in used_by(self.control, tid)]
        return sum((Use(Decimal(row.picojoules) / _PICO, row.bytes) for row in rows), start=Use())

    def crowd(self) -> None:
        """Let other workloads become active, so that hardware that tracks few RMIDs reassigns its counters."""
        if self.profile.mbm_tracked is None:
            return
        while len(self._crowd) <= self.profile.mbm_tracked:
            self._crowd.append(self.start())
            self.assign(f"crowd-{len(self._crowd)}", self._crowd[-1])
        for tid in self._crowd:
            self.run(tid)
            read(self.host.ctx, f"crowd-{self._crowd.index(tid) + 1}")

    # -- verbs

    def assign(
        self, key: str, pid: int, *, late: bool | None = False, take_over: bool = False, nested: bool = False
    ) -> None:
        request = Assignment(key=key, owner=OWNER, pid=pid, late=late, take_over=take_over, nested=nested)
        assign(self.host.ctx, request)

    def end(self, case: str, key: str, *tids: int, before: Use | None = None) -> None:
        """Release the workload of these tasks, which includes the workloads inside it.

        ``before`` is what the tasks used before they were in it.
        """
        # The cores have pushed their counts by then.
        self.control.advance(1.0)
        done = release(self.host.ctx, key, owner=OWNER)
        self.report.add(case, added([done.totals, done.nested]), self.used(*tids) - (before or Use()))

    # -- cases

    def play(self) -> Report:
        for case in (
            *self._words(),
            self.crowded,
            self.take_over,
            self.nested,
            self.nested_taken_over,
            self.nested_killed,
            self.late,
            self.late_with_child,
            self.left_outside,
        ):
            case()
            self.control.set_faults()
            # RMIDs come out of limbo.
            self.control.advance(3.0)
        return self.report

    def _words(self) -> Iterator[Callable[[], None]]:
        events = (TRAFFIC, ENERGY) if self.profile.package_events else (TRAFFIC,)
        for word, time, event, is_read in itertools.product(WORDS, TIMES, events, (True, False)):
            yield lambda word=word, time=time, event=event, is_read=is_read: self.word(word, time, event, is_read)  # type: ignore[misc]

    def word(self, word: str, time: str, event: str, is_read: bool) -> None:
        """A counter has a word for its value. ``is_read``: a checkpoint has read a number before."""
        key, pid = next(self._keys), self.start()
        fault = Fault(group=f"mon_groups/{key}", event=event, answer=word)
        self.control.set_faults(*[fault] if time in ("begin", "both") else [])
        self.assign(key, pid)
        self.control.set_faults()
        self.run(pid)
        if is_read:
            self.host.manager.maintenance.tick()
        if time == "between":
            self.control.set_faults(fault)
            read(self.host.ctx, key)
            self.control.set_faults()
        self.crowd()
        self.run(pid, pid)
        self.control.set_faults(*[fault] if time in ("end", "both") else [])
        self.end(f"{event} reads {word} ({time}, {'' if is_read else 'never '}read before)", key, pid)

    def crowded(self) -> None:
        """All readings are numbers, and the hardware may have reset the counter between them."""
        key, pid = next(self._keys), self.start()
        self.assign(key, pid)
        self.run(pid)
        read(self.host.ctx, key)
        self.crowd()
        self.run(pid, pid)
        # In the other L3 too: there the counter would read Unavailable.
        self.control.run(pid, 8 * PIECE_NS, 3)
        self.end("crowded", key, pid)

    def take_over(self) -> None:
        """Another workload takes over the task, and both end immediately."""
        first, second, pid = next(self._keys), next(self._keys), self.start()
        self.assign(first, pid)
        self.run(pid)
        self.assign(second, pid, take_over=True, late=None)
        self.run(pid)
        self.end("taken over", first, pid)
        self.end("taken over by", second, pid)

    def nested(self) -> None:
        """A run in a run in a run: each ends before its last task, in any order, and each task runs at any time."""
        for order in itertools.permutations(range(3)):
            keys, tasks, before = [next(self._keys) for _ in order], [self.start()], [Use()]
            self.assign(keys[0], tasks[0])
            for key in keys[1:]:
                tasks.append(self.start(by=tasks[-1]))
                self.run(*tasks)
                # This use is counted outside.
                before.append(self.used(tasks[-1]))
                self.assign(key, tasks[-1], nested=True)
                self.run(*tasks)
            for number in order:
                case = f"nested run {number + 1} of 3, ended in the order {order}"
                self.end(case, keys[number], *tasks[number:], before=before[number])
                self.run(*tasks)

    def nested_killed(self) -> None:
        """The daemon is killed while a nested run goes on, and before the outer one ends."""
        outer, inner, pid = next(self._keys), next(self._keys), self.start()
        self.assign(outer, pid)
        child = self.start(by=pid)
        self.assign(inner, child, nested=True)
        self.run(pid, child)
        self.host.restart()
        self.run(pid, child)
        self.end("inner run, and the daemon was killed", inner, child)
        self.run(pid, child)
        self.host.restart()
        self.end("outer run, and the daemon was killed", outer, pid, child)

    def nested_taken_over(self) -> None:
        """A nested run takes its first task over from the outer one, which ends immediately."""
        outer, inner, pid = next(self._keys), next(self._keys), self.start()
        self.assign(outer, pid)
        self.run(pid)
        child = self.start(by=pid)
        self.assign(inner, child, take_over=True)
        self.run(child)
        self.end("inner run", inner, child)
        self.run(pid)
        self.end("outer run", outer, pid, child)

    def late(self) -> None:
        """A process has used the CPU before its Assign, which does not set "late"."""
        key, pid = next(self._keys), self.start()
        self.run(pid)
        self.assign(key, pid, late=None)
        self.run(pid)
        self.end("late", key, pid)

    def late_with_child(self) -> None:
        """The process also has a child that stays outside."""
        key, (pid, child) = next(self._keys), self.start_with_child()
        self.run(pid, child)
        self.assign(key, pid, late=None)
        self.run(pid, child)
        self.end("late with a child", key, pid, child)

    def left_outside(self) -> None:
        """A thread is in a class without a free RMID: the reply reports that it is outside."""
        if not self.profile.can_allocate:
            return
        mountpoint = self.host.mountpoint
        os.mkdir(os.path.join(mountpoint, "gold"))
        others = [self._fill(number) for number in itertools.takewhile(lambda _: self._has_rmid(), itertools.count())]
        release(self.host.ctx, others.pop(), owner=OWNER)
        while not self._has_rmid():
            self.control.advance(1.0)
        key, (pid, thread) = next(self._keys), self.start_with_thread()
        self.control.steal(thread, "gold")
        self.assign(key, self.start())
        caller = Caller(0, frozenset({0}), os.getpid(), pid_namespaces=1)
        request = types.AssignRequest(key=key, pid=pid, claim=OWNER, late=True)
        reply = VERBS["Assign"].run(self.host.manager, request, caller)
        assert isinstance(reply, types.AssignReply)
        outside = self.host.tree.membership(thread) == Membership("gold", "")
        assert outside
        self.report.cases += 1
        if reply.tasks_outside != outside:
            self.report.wrong.append(f"left outside: the reply says {reply.tasks_outside}, and {int(outside)} is")
        for other in (key, *others):
            release(self.host.ctx, other, owner=OWNER)
        os.rmdir(os.path.join(mountpoint, "gold"))

    def _fill(self, number: int) -> str:
        key = f"fill-{number}"
        create(self.host.ctx, key, owner=OWNER)
        return key

    def _has_rmid(self) -> bool:
        return int(os.getxattr(self.host.mountpoint, RMIDS_ATTRIBUTE).decode().split("free=")[1]) > 0


def play(profile: str) -> Report:
    """Run all cases on a machine of a profile."""
    with (
        mounted(profile, 16, residue=7) as (simulation, top),
        contextlib.closing(Machine(simulation.mountpoint, os.path.join(top, "run"), profile)) as played,
    ):
        return played.play()


def table(reports: Iterable[Report]) -> str:
    """Return a table with a line for each machine."""
    rows = [("machine", "workloads", "exact", "marked", "exact and wrong")]
    rows += [(one.profile, str(one.cases), str(one.exact), str(one.marked), str(len(one.wrong))) for one in reports]
    return "\n".join(f"{name:<16}" + "".join(f"{cell:>17}" for cell in cells) for name, *cells in rows)
