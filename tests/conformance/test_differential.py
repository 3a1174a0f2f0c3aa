# SPDX-License-Identifier: Apache-2.0
"""The simulator repeats what the real kernel was seen to do, sequence by sequence, and planted bugs are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .differential.compare import Difference, difference, shrink
from .differential.executor import Observation
from .differential.generator import Generator, Sequence
from .differential.mutants import MUTANTS, environment
from .differential.targets import PROJECT, on_simulation

CASES = Path(__file__).parent / "cases"
ALL = slice(None)
# What rules show best: no sequence tells EBUSY from a wait, some bugs need a rare order, some end in a long wait.
BY_RULES = {
    "enospc_for_ebusy": "test_rmids.py::test_limbo",
    "anybody_may_move_anybody": "test_permissions.py::test_a_user_may_not_move_another_users",
    "tasks_stay_behind_on_rmdir": "test_rmdir.py::test_a_control_group_takes_its_monitoring_groups_along",
    "rename_loses_the_closid": "test_rename.py::test_to_another_control_group",
    "monitoring_groups_take_any_cpu": "test_cpus.py::test_a_monitoring_group_takes_only_its_control_groups",
    "removed_classes_keep_their_cpus": "test_cpus.py::test_a_control_group_takes_cpus_from_root",
    "half_a_command_is_taken": "test_schemata.py::test_a_bad_command",
    "the_last_freed_is_the_first_used": (
        "test_hardware_ids.py::test_rmids_leave_limbo_in_the_order_of_their_numbers"
    ),
    "numbers_are_the_hosts": "test_namespaces.py::test_numbers_are_the_writers",
    "masks_outlive_their_class": "test_schemata.py::test_a_class_made_again_begins_anew",
    "monitoring_groups_keep_the_cpus_of_their_class": (
        "test_cpus.py::test_a_write_to_a_control_group_empties_its_monitoring_groups"
    ),
}


def cases() -> list[Path]:
    return sorted(CASES.glob("*.json"))


def replay(path: Path, part: slice = ALL, environment: dict[str, str] | None = None) -> list[Difference]:
    case: dict[str, Any] = json.loads(path.read_text())
    sequences, seen = case["sequences"][part], case["observations"][part]
    found = on_simulation(f"sim {case['machine']}", environment)(sequences)
    return [told for pair in zip(sequences, seen, found, strict=True) if (told := difference(*pair))]


@pytest.mark.parametrize("path", cases(), ids=lambda path: path.stem)
def test_a_recorded_case(path: Path) -> None:
    """What the kernel showed after each operation, the simulator shows too."""
    assert [str(told) for told in replay(path)] == []


@pytest.mark.parametrize("mutant", sorted(MUTANTS.keys() - BY_RULES.keys()))
def test_sequences_find_a_planted_bug(mutant: str, tmp_path: Path) -> None:
    """A simulator with a bug does not repeat the recorded sequences."""
    chosen = environment(mutant, tmp_path)
    assert any(replay(CASES / "sample-cat.json", slice(at, at + 3), chosen) for at in range(0, 15, 3))


@pytest.mark.parametrize(("mutant", "rule"), BY_RULES.items())
def test_rules_find_a_planted_bug(mutant: str, rule: str, tmp_path: Path) -> None:
    """A simulator with a bug breaks the rule; the same rule holds without it in the run that this test is part of."""
    test = f"tests/conformance/{rule}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cat and not 6.12", test]
    chosen = {**environment(mutant, tmp_path), "RESCTRL_CONFORMANCE_RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=PROJECT, env=chosen, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED {test}" in done.stdout, done.stdout


def test_a_seed_gives_the_same_sequences() -> None:
    """Two generators of one seed agree, of two seeds they do not."""
    one, same, other = (Generator(seed, allocation=True) for seed in (1, 1, 2))
    first = [one.sequence() for _ in range(5)]
    assert first == [same.sequence() for _ in range(5)]
    assert first != [other.sequence() for _ in range(5)]


def observation(result: str) -> Observation:
    return {"result": result, "status": "ok\n"}


def test_no_operation_writes_nothing() -> None:
    """Seed 20261122 wrote nothing to an open file of a removed group: FUSE never asks the simulator about that."""
    made = [generator.sequence() for generator in [Generator(20261122, allocation=True)] for _ in range(400)]
    written = [one[-1] for sequence in made for one in sequence if {"write", "pwrite"} & {one[0], *one[2:3]}]
    assert len(written) > 3000
    assert "" not in written


def test_the_first_difference_is_told() -> None:
    """The operation and what differs are named."""
    sequence = [["mkdir", "a"], ["rmdir", "a"]]
    told = difference(sequence, [observation("OK"), observation("OK")], [observation("OK"), observation("EPERM")])
    assert told == Difference(1, ["rmdir", "a"], {"result": ("OK", "EPERM")})
    assert str(told) == "operation 1, ['rmdir', 'a']: result: 'OK' there, 'EPERM' here"
    assert difference(sequence, [observation("OK")] * 2, [observation("OK")] * 2) is None


def test_a_difference_is_shrunk() -> None:
    """Only the operations that it takes are left."""

    def differ(candidates: list[Sequence]) -> list[bool]:
        return [["b"] in one and ["d"] in one and one.index(["b"]) < one.index(["d"]) for one in candidates]

    assert shrink([[name] for name in "xaxbxcxxdxe"], differ) == [["b"], ["d"]]


def test_a_planted_bug_is_planted(tmp_path: Path) -> None:
    """Every mutant can be planted where a process starts."""
    for mutant in MUTANTS:
        command = [sys.executable, "-c", "import sitecustomize; print(sitecustomize.__file__)"]
        place = tmp_path / mutant
        place.mkdir()
        done = subprocess.run(command, env=environment(mutant, place), capture_output=True, text=True, check=True)
        assert done.stdout.strip() == os.path.join(place, "sitecustomize.py"), done.stderr
        assert "Error" not in done.stderr
