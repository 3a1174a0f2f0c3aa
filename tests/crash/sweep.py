# SPDX-License-Identifier: Apache-2.0
"""Inject one fault after another into a verb, and count the outcomes."""

from __future__ import annotations

import itertools
import random
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.crash.fault import Fault

# The name of a system call, and its number among the calls of that name in a thread, from 1.
Point = tuple[str, int]
Choose = Callable[[list[Point]], list[Point]]
# The faults on one machine: the ended workloads that they leave make each check slower.
_MOST_FAULTS = 60


class Injector(Protocol):
    """Injects faults into the verbs of one machine."""

    def points(self, name: str, fault: Fault) -> list[Point]:
        """Return the system calls of the verb at which the fault can be injected."""

    def inject(self, name: str, fault: Fault, call: str, number: int) -> str:
        """Inject a fault, and return how the verb ended. Raises if a check fails afterwards."""


@dataclass
class Result:
    """The number of each outcome, and a description of each fault after which a check failed."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def every(step: int) -> Choose:
    """Choose every ``step``-th point, so that calls of all kinds are among them."""
    return lambda points: points[step // 2 :: step]


def sample(number: int, seed: int) -> Choose:
    """Choose ``number`` points at random, or all if there are no more."""
    return lambda points: sorted(random.Random(seed).sample(points, min(number, len(points))))


def sweep(
    machine: Callable[[Path], AbstractContextManager[Injector]],
    top: Path,
    name: str,
    fault: Fault,
    choose: Choose = list,
) -> Result:
    """Inject the fault at each chosen point of the verb, on machines in folders below ``top``.

    The next fault gets a new machine after a failure, and after ``_MOST_FAULTS``.
    """
    result = Result()
    left: list[Point] | None = None
    for number in itertools.count():
        with machine(top / f"{number}") as injector:
            left = choose(injector.points(name, fault)) if left is None else left
            now, left = left[:_MOST_FAULTS], left[_MOST_FAULTS:]
            while now:
                call, count = now.pop(0)
                try:
                    result.outcomes[injector.inject(name, fault, call, count)] += 1
                except Exception as error:
                    result.outcomes["failed"] += 1
                    result.failures.append(f"{name}, {fault.name} at {call} {count}: {_description(error)}")
                    left = now + left
                    break
        if not left:
            break
    return result


def _description(error: Exception) -> str:
    """Return the message of an assertion, or the traceback of any other error."""
    return str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
