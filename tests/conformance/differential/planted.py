# SPDX-License-Identifier: Apache-2.0
"""The recorded sequences and the rules detect bugs that are planted in the simulator; a part of ``make mutants``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .compare import difference
from .mutants import MUTANTS, environment
from .targets import PROJECT, on_simulation

SAMPLE = Path(__file__).parents[1] / "cases/sample-cat.json"
# Rules are best for these: no sequence distinguishes EBUSY from a wait, some bugs need a rare order, some end in a
# long wait.
BY_RULES = {
    "enospc_for_ebusy": "test_rmids.py::test_mkdir_is_ebusy_while_rmids_are_in_limbo",
    "anybody_may_move_anybody": "test_permissions.py::test_a_user_may_not_move_another_users",
    "tasks_stay_behind_on_rmdir": "test_rmdir.py::test_rmdir_of_a_control_group_removes_its_monitoring_groups",
    "rename_loses_the_closid": "test_rename.py::test_rename_moves_a_monitoring_group_to_another_control_group",
    "monitoring_groups_take_any_cpu": "test_cpus.py::test_a_monitoring_group_takes_only_its_control_groups",
    "removed_classes_keep_their_cpus": "test_cpus.py::test_a_control_group_takes_cpus_from_root",
    "half_a_command_is_taken": "test_schemata.py::test_a_command_with_an_error_changes_nothing",
    "the_last_freed_is_the_first_used": (
        "test_hardware_ids.py::test_rmids_leave_limbo_in_the_order_of_their_numbers"
    ),
    "numbers_are_the_hosts": "test_namespaces.py::test_numbers_are_of_the_namespace_of_the_writer",
    "masks_outlive_their_class": "test_schemata.py::test_a_class_created_again_has_the_full_mask",
    "monitoring_groups_keep_the_cpus_of_their_class": (
        "test_cpus.py::test_a_write_to_a_control_group_empties_its_monitoring_groups"
    ),
}


def differs(mutant: str, part: slice, place: Path) -> bool:
    case: dict[str, Any] = json.loads(SAMPLE.read_text())
    sequences, seen = case["sequences"][part], case["observations"][part]
    found = on_simulation(f"sim {case['machine']}", environment(mutant, place))(sequences)
    return any(difference(*pair) for pair in zip(sequences, seen, found, strict=True))


@pytest.mark.parametrize("mutant", sorted(MUTANTS.keys() - BY_RULES.keys()))
def test_sequences_find_a_planted_bug(mutant: str, tmp_path: Path) -> None:
    """A simulator with a bug does not repeat the recorded sequences."""
    assert any(differs(mutant, slice(at, at + 3), tmp_path) for at in range(0, 15, 3))


@pytest.mark.parametrize(("mutant", "rule"), BY_RULES.items())
def test_rules_find_a_planted_bug(mutant: str, rule: str, tmp_path: Path) -> None:
    """A simulator with a bug breaks the rule, which holds without it in check-fast."""
    test = f"tests/conformance/{rule}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cat and not 6.12", test]
    chosen = {**environment(mutant, tmp_path), "RESCTRL_CONFORMANCE_RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=PROJECT, env=chosen, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED {test}" in done.stdout, done.stdout


def test_every_bug_can_be_planted(tmp_path: Path) -> None:
    """Every mutant can be planted where a process starts."""
    for mutant in MUTANTS:
        command = [sys.executable, "-c", "import sitecustomize; print(sitecustomize.__file__)"]
        place = tmp_path / mutant
        place.mkdir()
        done = subprocess.run(command, env=environment(mutant, place), capture_output=True, text=True, check=True)
        assert done.stdout.strip() == os.path.join(place, "sitecustomize.py"), done.stderr
        assert "Error" not in done.stderr
