# SPDX-License-Identifier: Apache-2.0
"""Random mutants: which changes there are, which tests run for them, and five of them in this suite.

The five are always the same while their module is the same, and were caught. So they fail here only if a change of
the module, or of its tests, is not tested.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import coverage_map
from tests.mutants.changes import changes
from tests.mutants.coverage_map import CoverageMap, folder_of_tests, measure
from tests.mutants.equivalents import EQUIVALENTS, Equivalent
from tests.mutants.sample import PRODUCT, all_mutants
from tests.mutants.trial import TOP

# With a fixed seed, and only the tests of one file.
FIVE = ["--sample", "5", "--seed", "1", "--of", "resctrlmond/workloads/figures/accounting.py", "--tests"]
FIVE += ["tests/workloads/figures/test_accounting.py"]


def texts(source: str) -> list[str]:
    return [change.text for change in changes(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["a < b -> (a <= b)"]),
        ("x = a in b", ["a in b -> (a not in b)"]),
        ("x = a and b", ["a and b -> (a or b)"]),
        ("x = not a", ["not a -> (a)"]),
        ("x = a - b", ["a - b -> (a + b)"]),
        ("x = 7", ["7 -> (7 + 1)", "7 -> (7 - 1)"]),
        ("x = True", ["True -> False"]),
        ("x = max(a)", ["max -> min"]),
        ("x = a if b else c", ["b -> (not (b))"]),
        ("if f(a):\n    g = a", ["f(a) -> (not (f(a)))"]),
        ("if a == b:\n    g = a", ["a == b -> (a != b)"]),
        ("f(a)", ["f(a) -> pass"]),
        ("a.b = c", ["a.b = c -> pass"]),
        ("raise E('x', 1)", ["raise E('x', 1) -> pass"]),
        ("try:\n    a = b\nexcept E:\n    a = c", ["except E -> not caught", "except E -> except Exception"]),
        ("@d\ndef f(): a = b", ["without @d"]),
        ("def f() -> int: return a", ["return a -> return 0"]),
        ("def f() -> int | None: return a", ["return a -> return None"]),
        ("def f() -> bool: return a", ["return a -> return not (a)"]),
        ("def f():\n    for a in b: continue", ["continue -> pass"]),
    ],
)
def test_change(source: str, expected: list[str]) -> None:
    assert texts(source) == expected
    for change in changes(source):
        ast.parse(change.applied(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring."""',
        "x: Literal[3]",
        "def f(a: Meta[1]) -> Meta[1]: a = b",
        "if TYPE_CHECKING:\n    x = 1",
        "__all__ = [f(1)]",
        "log.warning('%d', 3)",
        "assert a < 3",
        "TIMEOUT_S = 30",
        "x = f(timeout=3)",
        "x = a / 1e9",
        "x = f(error.errno or 0)",
        "class A:\n    def __init__(self):\n        self.a = b",
        "x = f'{a + 1}'",
        "@overload\ndef f(): a = b",
    ],
)
def test_no_change(source: str) -> None:
    applied = [text for text in texts(source) if "f(" not in text]
    assert applied == []


def test_change_is_at_its_place_after_other_characters() -> None:
    source = "a = 'ä'; b = 'ö' if c < d else e\n"
    applied = {change.applied(source) for change in changes(source)}
    assert "a = 'ä'; b = 'ö' if (c <= d) else e\n" in applied


def test_every_change_of_the_product_is_valid() -> None:
    mutants = all_mutants(["resctrlmond/client"])
    assert len(mutants) > 200
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.applied(TOP))) != ast.dump(ast.parse((TOP / mutant.file).read_text()))


@pytest.mark.parametrize("one", EQUIVALENTS, ids=lambda one: f"{one.file}: {one.text}")
def test_equivalent_mutant_still_exists(one: Equivalent) -> None:
    assert one.reason
    assert any((one.function, one.text) == (at.function, at.text) for at in changes((TOP / one.file).read_text()))


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("resctrlmond/workloads/figures/verdict.py", "tests/workloads/figures"),
        ("resctrlmond/exporter/otlp/points.py", "tests/exporter"),
        ("resctrlctl/units/verb.py", "tests/ctl/units"),
        ("resctrlmond/client/client.py", "tests/api"),
    ],
)
def test_folder_of_tests(file: str, folder: str) -> None:
    assert folder_of_tests(file) == folder


def test_packages_exist() -> None:
    assert all((TOP / package).is_dir() for package in PRODUCT)


def test_map_names_the_tests_of_lines_that_other_processes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage_map, "KEPT", tmp_path)
    file, line = "resctrlctl/command.py", "status = _call(sys.argv[1:] if argv is None else argv)"
    number = (TOP / file).read_text().partition(line)[0].count("\n") + 1
    measure("tests/ctl/test_imports.py")
    tests, _, part = CoverageMap().tests(file, (number, number), 60)
    assert tests[0] == "tests/ctl"  # Nothing else of it was measured.
    assert tests[1:] == ["tests/ctl/test_imports.py::test_verb_imports_neither_the_daemon_nor_what_other_verbs_need"]
    assert part.startswith("tests/ctl, 1 of 1 tests")


def test_five_mutants_are_caught() -> None:
    # In a process of its own: it starts pytest, whose environment this one is.
    command = [sys.executable, "-m", "tests.mutants.sample", *FIVE]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of    5 caught (100 %)" in done.stdout
