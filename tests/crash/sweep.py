# SPDX-License-Identifier: Apache-2.0
"""Blow after blow on one verb: which of its system calls are struck, on which machine, and what became of each."""

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

from tests.crash.blow import Blow

# A system call by its name, and its number among those of that name that a thread makes, from 1 on.
Point = tuple[str, int]
Choose = Callable[[list[Point]], list[Point]]
# So many blows on one machine.
_LASTS = 60


class Striker(Protocol):
    """A machine on which verbs can be struck."""

    def points(self, name: str, blow: Blow) -> list[Point]:
        """The system calls of the verb that the blow may fall on."""

    def strike(self, name: str, blow: Blow, call: str, number: int) -> str:
        """One blow; how the verb ended. Raises where it did harm."""


@dataclass
class Struck:
    """How often a verb ended which way, and which blows did harm."""

    outcomes: Counter[str] = field(default_factory=Counter)
    harm: list[str] = field(default_factory=list)


def every(step: int) -> Choose:
    """Every so many points, so that calls of all kinds are among them."""
    return lambda points: points[step // 2 :: step]


def sample(number: int, seed: int) -> Choose:
    """So many points, drawn by that seed; all of them where there are no more."""
    return lambda points: sorted(random.Random(seed).sample(points, min(number, len(points))))


def sweep(
    machine: Callable[[Path], AbstractContextManager[Striker]],
    top: Path,
    name: str,
    blow: Blow,
    choose: Choose = list,
) -> Struck:
    """Blows on each of the verb's points that are chosen, on machines in folders below ``top``.

    After a blow that did harm the next falls on a new machine, and so it does after many: what they leave of ended
    workloads makes each look at a machine longer.
    """
    struck = Struck()
    left: list[Point] | None = None
    for number in itertools.count():
        with machine(top / f"{number}") as striker:
            left = choose(striker.points(name, blow)) if left is None else left
            now, left = left[:_LASTS], left[_LASTS:]
            while now:
                call, count = now.pop(0)
                try:
                    struck.outcomes[striker.strike(name, blow, call, count)] += 1
                except Exception as error:  # whatever it is, it was not to be
                    struck.outcomes["harmed"] += 1
                    struck.harm.append(f"{name}, {blow.name} at {call} {count}: {_told(error)}")
                    left = now + left
                    break
        if not left:
            break
    return struck


def _told(error: Exception) -> str:
    """An assertion says what was expected, any other error where it came from."""
    return str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
