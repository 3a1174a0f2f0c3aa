# SPDX-License-Identifier: Apache-2.0
"""Generate a seeded list of workloads and of their events in each second. No I/O."""

from __future__ import annotations

import enum
import hashlib
import random
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

# CPU time has pieces that the simulator's counters represent exactly: 31.25 ms (2^4 x 5^9 ns) are 0.078125 J and
# 32 MiB of traffic, which are multiples of 2^-18 J, of 10^-6 J and of the 64 KiB of one unit of traffic. A report is
# then equal to the use in each digit, or wrong: no error is smaller than the rounding.
PIECE_NS = 31_250_000
CPUS = 4
CLASSES = ("gold", "silver")
# How many seconds an exec session lives at least: longer than the control groups go without being looked through.
EXEC_S = 7


class Owner(enum.StrEnum):
    """The owner of the claim, which determines the end of the workload."""

    HOOK = "oci"  # a container: its end is not reported, but detected
    POD = "nri"  # a pod: the removal of its sandbox is reported
    CLIENT = "batch"  # a program that calls Assign and Release


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the workload ``of`` in one second. ``task`` is the index of a task, from 0."""

    what: What
    of: int
    task: int = 0
    by: int = 0
    pieces: int = 0
    cpu: int = 0
    class_: str = ""


class What(enum.Enum):
    """The kinds of events."""

    START = "its first task exists, and has not run yet"
    ADOPT = "the owner of monitoring groups detects it late"
    RUN = "a task uses CPU time"
    FORK = "a task forks a process"
    THREAD = "a task starts a thread"
    EXEC = "another program starts a process in its control group from outside"
    EXIT = "a task ends"
    RESTART = "its container ends, and another one of the same pod starts"
    MOVE = "an operator wants all of it in another class"
    STRAY = "another agent moves its first task, or with ``by`` 1 all of them, to another class"
    RIVAL = "another program removes its group"
    MISREAD = "one of its counters reads Error at its end"
    END = "all its tasks end, and the owner of the claim reports it"


@dataclass(slots=True)
class Workload:
    """A workload. ``late_s``: how long it ran before its Assign. ``again``: its key had an earlier run."""

    number: int
    key: str
    owner: Owner
    late_s: int = 0
    again: bool = False
    has_cgroup: bool = False
    second_claim: bool = False
    threads: int = 0  # its first process has so many more when it is adopted late
    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True, slots=True)
class Script:
    """All workloads, and their events by second. ``domains_off``: the seconds in which an L3 is offline."""

    workloads: list[Workload]
    seconds: list[list[Event]]
    domain_off: tuple[range, ...]


def write(seed: int, count: int, *, starts_per_s: float = 3.0, sessions: bool = True, rivals: bool = True) -> Script:
    """Return the script of ``count`` workloads; the same for the same arguments.

    ``sessions``: with processes that join from outside, or are moved there; ``rivals``: with an agent that removes
    groups.
    """
    chance = random.Random(f"{seed}/{count}")
    workloads: list[Workload] = []
    by_second: dict[int, list[Event]] = defaultdict(list)
    ended: list[tuple[int, str, Owner]] = []
    second = 0
    while len(workloads) < count:
        # Now and then a burst, for which there are not enough RMIDs.
        starting = int(starts_per_s * (8 if chance.random() < 0.02 else 2 * chance.random()) + 0.5)
        for _ in range(min(starting, count - len(workloads))):
            made = _workload(chance, len(workloads), seed, second, ended)
            last = _life(chance, made, second, sessions, rivals)
            workloads.append(made)
            # Its key is free again when it is sure to be over.
            ended.append((last + 3, made.key, made.owner))
            for when, events in made.events.items():
                by_second[when] += events
        second += 1
    seconds = [by_second[when] for when in range(max(by_second) + 1)]
    off = tuple(range(at, at + 4) for at in range(40, len(seconds) - 8, 400))
    return Script(workloads, seconds, off)


def _workload(
    chance: random.Random, number: int, seed: int, second: int, ended: list[tuple[int, str, Owner]]
) -> Workload:
    free = [one for one in ended[-200:] if one[0] < second]
    if free and chance.random() < 0.1:
        back = chance.choice(free)
        ended.remove(back)
        return Workload(number, back[1], back[2], again=True)
    owner = chance.choices([Owner.HOOK, Owner.POD, Owner.CLIENT], [5, 4, 1])[0]
    text = f"{seed}-{number}"
    key = {
        Owner.HOOK: hashlib.sha256(text.encode()).hexdigest(),
        Owner.POD: str(uuid.uuid5(uuid.NAMESPACE_OID, text)),
        Owner.CLIENT: f"batch-{text}",
    }[owner]
    return Workload(number, key, owner)


def _life(chance: random.Random, one: Workload, start: int, sessions: bool, rivals: bool) -> int:
    """Add the events of a workload, and return its last second."""
    length = min(90, 1 + int(chance.expovariate(1 / 7)))
    if chance.random() < 0.08:
        one.late_s = chance.randrange(1, length + 1)
        one.threads = chance.randrange(3)
    one.second_claim = one.owner is not Owner.CLIENT and chance.random() < 0.1
    one.has_cgroup = sessions and chance.random() < 0.3
    return _Story(chance, one, start, start + length, strays=sessions).add_events(rivals)


class _Story:
    """Adds the events of one workload, and keeps the set of its living tasks."""

    def __init__(self, chance: random.Random, one: Workload, start: int, end: int, *, strays: bool) -> None:
        self.chance = chance
        self.one = one
        self.start = start
        self.end = end
        self.strays = strays
        self.tasks = 1 + (one.threads if one.late_s else 0)
        self.living = list(range(self.tasks))
        self.parents: set[int] = set()
        self.restarted = False
        self.sessions: dict[int, int] = {}  # since when

    def at(self, second: int, what: What, **more: int | str) -> None:
        self.one.events[second].append(Event(what, self.one.number, **more))  # type: ignore[arg-type]

    def run(self, second: int, task: int, most: int = 32) -> None:
        self.at(
            second, What.RUN, task=task, pieces=self.chance.randrange(1, most + 1), cpu=self.chance.randrange(CPUS)
        )

    def add_events(self, rivals: bool) -> int:
        chance, one = self.chance, self.one
        self.at(self.start, What.START)
        # Use is counted from the first instruction.
        self.run(self.start, 0, most=8)
        for second in range(self.start, self.end):
            if one.late_s and second == self.start + one.late_s:
                self.at(second, What.ADOPT)
            self.change(second)
            for task in self.living:
                if chance.random() < 0.5:
                    self.run(second, task)
        if self.start + one.late_s == self.end and one.late_s:
            self.at(self.end, What.ADOPT)
        if self.end - self.start > 2:
            if chance.random() < 0.05:
                self.at(chance.randrange(self.start + 1, self.end), What.MOVE, class_=chance.choice(CLASSES))
            # A task that is moved out of its group lives until the next search finds it.
            last = self.end - EXEC_S
            may_stray = self.strays and last > self.start and one.owner is not Owner.POD and not one.late_s
            if may_stray and chance.random() < 0.1:
                second, class_ = chance.randrange(self.start, last), chance.choice(CLASSES)
                self.at(second, What.STRAY, by=chance.randrange(2), class_=class_)
            if rivals and chance.random() < 0.02:
                self.at(chance.randrange(self.start + 1, self.end), What.RIVAL)
        # The last interval, that a reader at an interval misses.
        self.run(self.end, self.living[0])
        if chance.random() < 0.01:
            self.at(self.end, What.MISREAD)
        self.at(self.end, What.END)
        return self.end

    def change(self, second: int) -> None:
        """Start or end one of its tasks at random, or do nothing."""
        dice = self.chance.random()
        if dice < 0.15:
            # A task that is forked before the Assign is found only by its control group.
            by = self.chance.choice(self.living)
            self.parents.add(by)
            self.begin(second, self.chance.choice([What.FORK, What.THREAD]), by=by)
        elif dice < 0.2 and self.one.has_cgroup and second + EXEC_S < self.end:
            self.sessions[self.begin(second, What.EXEC)] = second
        elif second == self.start:
            return
        elif dice < 0.25 and len(self.living) > 1:
            gone = self.chance.choice(self.living[1:])
            # The simulation's own tasks leave no zombie behind, of which a process's further threads could inherit.
            if gone not in self.parents and self.was_looked_at(second, gone):
                self.living.remove(gone)
                self.at(second, What.EXIT, task=gone)
        elif (
            dice < 0.27
            and self.one.owner is Owner.POD
            and not (self.restarted or self.one.late_s)
            and all(self.was_looked_at(second, task) for task in self.living)
        ):
            self.restarted = True
            self.living.clear()
            self.begin(second, What.RESTART)

    def was_looked_at(self, second: int, task: int) -> bool:
        """Return whether the workload may end: a session that exists only between two scans is not detected."""
        return self.sessions.get(task, -EXEC_S) + EXEC_S <= second

    def begin(self, second: int, what: What, **more: int) -> int:
        task = self.tasks
        self.at(second, what, task=task, **more)
        self.living.append(task)
        self.tasks += 1
        return task
