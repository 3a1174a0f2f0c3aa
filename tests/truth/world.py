# SPDX-License-Identifier: Apache-2.0
"""The machine that plays the script: its tasks, and the actual use of each workload."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Protocol

from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation
from tests.truth.crew import Crew, remove_cgroup
from tests.truth.record import used_by
from tests.truth.script import CLASSES, CPUS, PIECE_NS, Event, Script, What, Workload
from tests.workloads.conftest import MARK

# Numbers of tasks that have no real process: above those that the kernel gives out here, below PID_MAX_LIMIT.
_FIRST_VIRTUAL = 3_000_000
_PICO = 10**12
# For how many of its seconds an agent may go on after the last task's end.
MOST_PATIENCE = 300
# The L3 that is offline at times; it has the CPUs 2 and 3.
OFF = "mon_L3_01"


@contextlib.contextmanager
def mounted(profile: str, rmids: int, residue: int, lag_ms: float | None = None) -> Iterator[tuple[Simulation, str]]:
    """Mount a simulation with virtual tasks for an agent that marks its groups, with a folder in memory as /run."""
    before = os.getegid()
    os.setegid(MARK)
    try:
        with tempfile.TemporaryDirectory(prefix="resctrlmond-truth.", dir="/dev/shm") as top:
            for folder in ("resctrl", "run"):
                os.mkdir(os.path.join(top, folder))
            with Simulation(
                os.path.join(top, "resctrl"), profile, rmids, virtual_cpus=CPUS, residue=residue, lag_ms=lag_ms
            ) as simulation:
                yield simulation, top
    finally:
        os.setegid(before)


@dataclass
class Use:
    """Exact energy and memory traffic."""

    joules: Decimal = Decimal(0)
    bytes: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.joules + other.joules, self.bytes + other.bytes)

    def __sub__(self, other: Use) -> Use:
        return Use(self.joules - other.joules, self.bytes - other.bytes)


@dataclass
class Reported:
    """The figures of a workload at its end; None for a figure that is not reported. ``marks`` by event."""

    joules: Decimal | None
    bytes: int | None
    marks: dict[str, str] = field(default_factory=dict)
    state: str = ""
    reason: str = ""


@dataclass
class Task:
    """A task. ``pid`` is its real process, or 0."""

    tid: int
    pid: int = 0
    lives: bool = True


@dataclass
class Life:
    """A workload and its use: ``used`` in total, ``counted`` while its tasks were in its own group.

    ``pieces`` of CPU time it has used until now, ``pieces_checked`` when its counters were last read while it ran,
    ``pieces_at_removal`` when a program removed its group; -1 for never. ``pieces_risked`` had not been read then.
    ``container`` is the task that its present
    container began with.
    """

    of: Workload
    tasks: dict[int, Task] = field(default_factory=dict)
    cgroup: str = ""
    container: int = 0
    is_adopted: bool = False
    is_over: bool = False
    pieces_at_removal: int = -1
    pieces_risked: int = 0
    pieces: int = 0
    pieces_checked: int = -1
    used: Use = field(default_factory=Use)
    counted: Use = field(default_factory=Use)
    reported: Reported | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def first(self) -> Task:
        """Return the first task of the current container."""
        return self.tasks[self.container]


class Agent(Protocol):
    """An owner of monitoring groups, with the calls of runtimes and operators."""

    def adopt(self, life: Life, late: bool) -> None:
        """Handle a container before its first instruction, or (``late``) one that runs already."""

    def move(self, life: Life, class_: str) -> bool:
        """Move the workload to another class. Return False if the agent cannot: then its tasks are moved."""

    def group(self, life: Life) -> str:
        """Return the path of the workload's group below the root of resctrl; "" if it has none."""

    def end(self, life: Life) -> None:
        """Handle the end of the workload, which its owner has detected."""

    def second(self, number: int) -> None:
        """Handle the end of a second: set ``Life.reported`` of ended workloads."""

    def forget(self, life: Life) -> None:
        """Forget a workload whose figures have been compared."""


class World:
    """Plays the script. ``crew`` starts real processes if the agent reads them in /proc."""

    def __init__(self, control: Control, crew: Crew | None, make_class: Callable[[str], None]) -> None:
        self.control = control
        self.crew = crew
        self.is_living: dict[int, Life] = {}
        self._numbers = itertools.count(_FIRST_VIRTUAL)
        self._is_off = False
        self._faults: dict[int, Fault] = {}
        for class_ in CLASSES:
            make_class(class_)
        # The use in a class, or in no group, is not the use of a workload.
        self._not_groups = {row.rmid for row in control.truth().rmids if row.group in ("", *CLASSES)} | {0}

    def play(self, script: Script, agent: Agent, over: Callable[[Life], None]) -> None:
        """Play the whole script. Call ``over`` with each workload that has ended and was reported."""
        for second, events in enumerate(script.seconds):
            for event in events:
                if event.what is What.START:
                    self._wait_for_end(script.workloads[event.of].key, second, agent, over)
                    self.is_living[event.of] = Life(script.workloads[event.of])
                self._happen(event, self.is_living[event.of], agent)
            self._domains(script, second)
            self._go_by(second, agent, over)
        for second in itertools.count(len(script.seconds)):
            if not self.is_living:
                return
            if second > len(script.seconds) + MOST_PATIENCE:
                raise AssertionError(f"these never end: {[life.of for life in self.is_living.values()]}")
            self._go_by(second, agent, over)

    def _wait_for_end(self, key: str, second: int, agent: Agent, over: Callable[[Life], None]) -> None:
        """Wait until the agent has ended the earlier run of the key, which the next one would join."""
        for _ in range(MOST_PATIENCE):
            if all(life.of.key != key for life in self.is_living.values()):
                return
            self._go_by(second, agent, over)
        raise AssertionError(f"{key} never ends")

    def _go_by(self, second: int, agent: Agent, over: Callable[[Life], None]) -> None:
        self.control.advance(1.0)
        agent.second(second)
        for number, life in list(self.is_living.items()):
            if life.is_over and life.reported is not None:
                del self.is_living[number]
                self._set_fault(life, None)
                agent.forget(life)
                over(life)

    def _domains(self, script: Script, second: int) -> None:
        for off in script.domain_off:
            if second == off.start:
                self.control.offline(OFF)
                self._is_off = True
            elif second == off.stop:
                self.control.online(OFF)
                self._is_off = False

    def _happen(self, event: Event, life: Life, agent: Agent) -> None:
        match event.what:
            case What.START:
                self._begin(life)
                if not life.of.late_s:
                    agent.adopt(life, late=False)
                    life.is_adopted = True
            case What.ADOPT:
                agent.adopt(life, late=True)
                life.is_adopted = True
            case What.RESTART:
                self._end_tasks(life)
                life.container = event.task
                life.tasks[event.task] = self._start(life)
                agent.adopt(life, late=False)
            case What.END:
                self._end_tasks(life)
                if life.cgroup:
                    remove_cgroup(life.cgroup)
                life.is_over = True
                agent.end(life)
            case What.MOVE if life.is_adopted and agent.move(life, event.class_):
                pass
            case What.MOVE | What.STRAY:
                for index, task in life.tasks.items():
                    if task.lives and (event.what is What.MOVE or event.by or not index):
                        self.control.steal(task.tid, event.class_)
            case What.RIVAL | What.MISREAD if group := agent.group(life):
                self._disturb(event, life, group)
            case _:
                self._work(event, life)

    def _disturb(self, event: Event, life: Life, group: str) -> None:
        """Apply an event that another program or the machine causes in the workload's group."""
        if event.what is What.RIVAL:
            self.control.remove_group(group)
            life.pieces_at_removal = life.pieces
            life.pieces_risked = life.pieces - max(0, life.pieces_checked)
        else:
            self._set_fault(life, Fault(group=group, event="core_energy", domain="mon_PERF_PKG_01", answer="Error"))

    def _work(self, event: Event, life: Life) -> None:
        """Apply an event of the workload's tasks."""
        match event.what:
            case What.RUN:
                # No CPU of an offline L3 runs.
                cpu = event.cpu % 2 if self._is_off else event.cpu
                self.control.run(life.tasks[event.task].tid, event.pieces * PIECE_NS, cpu)
                life.pieces += event.pieces
            case What.FORK | What.THREAD | What.EXEC:
                life.tasks[event.task] = self._create_task(event, life)
            case What.EXIT:
                self._exit(life, life.tasks[event.task])

    def _set_fault(self, life: Life, fault: Fault | None) -> None:
        """Inject a fault into the counters of the workload, or remove it."""
        before = len(self._faults)
        if fault:
            self._faults[life.of.number] = fault
        else:
            self._faults.pop(life.of.number, None)
        if len(self._faults) != before:
            self.control.set_faults(*self._faults.values())

    # -- tasks

    def _begin(self, life: Life) -> None:
        if self.crew and life.of.has_cgroup:
            life.cgroup = self.crew.make_cgroup(str(life.of.number))
        threads = life.of.threads if life.of.late_s else 0
        numbers = (
            self.crew.start(threads, life.cgroup) if self.crew else [next(self._numbers) for _ in range(threads + 1)]
        )
        first = self.control.spawn(tid=numbers[0])
        life.tasks[0] = Task(first, first if self.crew else 0)
        for index, number in enumerate(numbers[1:], 1):
            life.tasks[index] = Task(self.control.thread(first, tid=number))

    def _start(self, life: Life) -> Task:
        """Start a process outside all groups."""
        pid = self.crew.start(0, life.cgroup)[0] if self.crew else 0
        return Task(self.control.spawn(tid=pid or next(self._numbers)), pid)

    def _create_task(self, event: Event, life: Life) -> Task:
        if event.what is What.EXEC:
            return self._start(life)
        by = life.tasks[event.by].tid
        if event.what is What.THREAD and life.is_adopted:
            return Task(self.control.thread(by, tid=next(self._numbers)))
        # A process that runs before the Assign is found by its real pid, in its control group.
        is_to_be_found = self.crew and life.cgroup and not life.is_adopted
        pid = self.crew.start(0, life.cgroup)[0] if self.crew and is_to_be_found else 0
        return Task(self.control.fork(by, tid=pid or next(self._numbers)), pid)

    def _end_tasks(self, life: Life) -> None:
        for task in life.tasks.values():
            if task.lives:
                self._exit(life, task)

    def _exit(self, life: Life, task: Task) -> None:
        self.control.exit(task.tid)
        task.lives = False
        # Before the kernel gives the number to another process.
        for row in used_by(self.control, task.tid):
            use = Use(Decimal(row.picojoules) / _PICO, row.bytes)
            life.used += use
            if row.rmid not in self._not_groups:
                life.counted += use
        if self.crew and task.pid:
            self.crew.end(task.pid)
