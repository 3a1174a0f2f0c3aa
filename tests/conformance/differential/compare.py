# SPDX-License-Identifier: Apache-2.0
"""Describe the difference of two targets, and find the shortest sequence that still shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .executor import Observation
from .generator import Operation, Sequence


class Difference(NamedTuple):
    """The first operation of a sequence after which the targets do not look the same."""

    at: int
    operation: Operation
    aspects: dict[str, tuple[object, object]]  # what is seen there -> on the first target, on the second

    def __str__(self) -> str:
        aspects = (f"{name}: {first!r} there, {second!r} here" for name, (first, second) in self.aspects.items())
        return f"operation {self.at}, {self.operation}: " + "; ".join(aspects)


def difference(sequence: Sequence, first: list[Observation], second: list[Observation]) -> Difference | None:
    """Return the first difference of two lists of observations; None if there is none."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one != other:
            aspects = {name: (one[name], other[name]) for name in one if one[name] != other[name]}
            return Difference(index, sequence[index], aspects)
    return None


def shrink(sequence: Sequence, differ: Callable[[list[Sequence]], list[bool]]) -> Sequence:
    """Return a sequence that still differs, and does not without any one of its operations.

    ``differ`` returns for each of many sequences whether it differs.
    """
    chunk = max(1, len(sequence) // 2)
    while True:
        shorter = [sequence[:at] + sequence[at + chunk :] for at in range(0, len(sequence), chunk)]
        shorter = [candidate for candidate in shorter if candidate]
        found = next((one for one, differs in zip(shorter, differ(shorter), strict=True) if differs), None)
        if found is not None:
            sequence = found
            chunk = min(chunk, max(1, len(sequence) // 2))
        elif chunk == 1:
            return sequence
        else:
            chunk //= 2
