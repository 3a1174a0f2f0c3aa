# SPDX-License-Identifier: Apache-2.0
"""The simulator shows the recorded results of a real kernel for each sequence of operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .differential.compare import Difference, difference, shrink
from .differential.executor import Observation
from .differential.generator import Generator, Sequence
from .differential.targets import on_simulation

CASES = Path(__file__).parent / "cases"


def cases() -> list[Path]:
    return sorted(CASES.glob("*.json"))


def replay(path: Path) -> list[Difference]:
    case: dict[str, Any] = json.loads(path.read_text())
    observed = on_simulation(f"sim {case['machine']}")(case["sequences"])
    return [
        found
        for pair in zip(case["sequences"], case["observations"], observed, strict=True)
        if (found := difference(*pair))
    ]


@pytest.mark.parametrize("path", cases(), ids=lambda path: path.stem)
def test_a_recorded_case(path: Path) -> None:
    """After each operation, the simulator shows the same as the kernel did."""
    assert [str(found) for found in replay(path)] == []


def test_a_seed_gives_the_same_sequences() -> None:
    """Two generators with the same seed agree, and with different seeds they do not."""
    one, same, other = (Generator(seed, allocation=True) for seed in (1, 1, 2))
    first = [one.sequence() for _ in range(5)]
    assert first == [same.sequence() for _ in range(5)]
    assert first != [other.sequence() for _ in range(5)]


def observation(result: str) -> Observation:
    return {"result": result, "status": "ok\n"}


def test_no_operation_writes_nothing() -> None:
    """Seed 20261122 wrote nothing to an open file of a removed group: FUSE does not send that to the simulator."""
    made = [generator.sequence() for generator in [Generator(20261122, allocation=True)] for _ in range(400)]
    written = [one[-1] for sequence in made for one in sequence if {"write", "pwrite"} & {one[0], *one[2:3]}]
    assert len(written) > 3000
    assert "" not in written


def test_first_difference_is_reported() -> None:
    """The operation and what differs are named."""
    sequence = [["mkdir", "a"], ["rmdir", "a"]]
    found = difference(sequence, [observation("OK"), observation("OK")], [observation("OK"), observation("EPERM")])
    assert found == Difference(1, ["rmdir", "a"], {"result": ("OK", "EPERM")})
    assert str(found) == "operation 1, ['rmdir', 'a']: result: 'OK' there, 'EPERM' here"
    assert difference(sequence, [observation("OK")] * 2, [observation("OK")] * 2) is None


def test_a_difference_is_shrunk() -> None:
    """Only the necessary operations are left."""

    def differ(candidates: list[Sequence]) -> list[bool]:
        return [["b"] in one and ["d"] in one and one.index(["b"]) < one.index(["d"]) for one in candidates]

    assert shrink([[name] for name in "xaxbxcxxdxe"], differ) == [["b"], ["d"]]
