# SPDX-License-Identifier: Apache-2.0
"""The table of planted bugs still fits the code; ``make mutants`` tries whether the bugs are noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant, NotApplicable
from tests.mutants.table import MUTANTS
from tests.mutants.trial import ERROR, copy_of_the_tree, try_one

TOP = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_bug_can_be_planted_and_has_tests_that_exist(mutant: Mutant) -> None:
    assert mutant.applied(TOP) != (TOP / mutant.file).read_text()
    assert mutant.tests
    assert all((TOP / tests.partition("::")[0]).exists() for tests in mutant.tests.split())


def test_the_names_are_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("resctrlmond/gone.py", "a", "b", "does not exist"),
        ("resctrlmond/__init__.py", "no such text", "b", "occurs 0 times"),
        ("resctrlmond/workloads/model/clock.py", "import", "b", "not once"),
        ("resctrlmond/workloads/model/clock.py", "def boot_ns()", "def boot ns()", "is not valid Python"),
    ],
)
def test_row_that_does_not_fit_is_refused_with_the_reason(file: str, old: str, new: str, message: str) -> None:
    with pytest.raises(NotApplicable, match=message):
        Mutant("x", file, old, new, "tests/workloads").applied(TOP)


def test_detected_and_undetected_bugs_are_distinguished() -> None:
    """Run the tool on the tests of one small module."""
    # In a process of its own: it starts pytest, whose environment this one is.
    code = (
        "import sys; from tests.mutants import __main__ as tool; from tests.mutants.mutant import Mutant\n"
        "file, old = 'resctrlmond/workloads/model/validation.py', 'MAX_ATTRIBUTES = 64'\n"
        "test = 'tests/workloads/model/test_validation.py::test_attributes_at_the_limits_are_accepted'\n"
        "tool.MUTANTS = (\n"
        "    Mutant('caught', file, old, 'MAX_ATTRIBUTES = 63', test),\n"
        "    Mutant('equal', file, old, 'MAX_ATTRIBUTES = 65 - 1', test, survives='equal'),\n"
        ")\n"
        "sys.argv = ['mutants']; sys.exit(tool.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = sorted(done.stdout.splitlines()[:2])
    assert first.split()[:2] == ["caught", "caught"]
    assert "tests/workloads/model/test_validation.py::" in first
    assert second.split() == ["survived", "equal", "equal"]


def test_bug_is_not_caught_by_tests_that_are_too_slow_without_it_too(tmp_path: Path) -> None:
    copy_of_the_tree(tmp_path)
    file, old = "resctrlmond/workloads/model/validation.py", "MAX_ATTRIBUTES = 64"
    mutant = Mutant("slow", file, old, "MAX_ATTRIBUTES = 63", "tests/workloads/model", timeout_s=0.1)
    outcome = try_one(tmp_path, mutant)
    assert (outcome.what, outcome.by.partition(":")[0]) == (ERROR, "no end within 0 s")
