# SPDX-License-Identifier: Apache-2.0
"""The tests that run each line of the product, by folder of tests, measured once and kept in ``build/mutants``."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import coverage

from tests.mutants.trial import TOP, copy_of_the_tree, run_tests

KEPT = TOP / "build/mutants"
_TEST = re.compile(r"tests/[^\[| ]+")
# coverage.py starts in each Python process that has COVERAGE_PROCESS_START. The name of the test is the context.
_SETTINGS = """\
[run]
core = ctrace
source = {copy}/resctrlmond, {copy}/resctrlctl
omit = */sim/*
data_file = {data}/of
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
sigterm = false
patch = _exit, fork
"""


def measure(tests: str) -> str:
    """Run a folder or a file of tests with coverage.py, and write the map. Return a line about it."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="resctrlmond-mutants.") as place:
        top = Path(place).resolve()
        copy, data, seconds = top / "tree", top / "data", top / "seconds"
        copy_of_the_tree(copy)
        data.mkdir()
        settings = top / "settings"
        settings.write_text(_SETTINGS.format(copy=copy, data=data))
        environment = {"COVERAGE_PROCESS_START": str(settings), "MUTANTS_SECONDS": str(seconds)}
        code, output = run_tests(copy, ["-p", "tests.mutants.contexts", "--maxfail=1000", tests], environment, 7200)
        if code not in (0, 1):
            raise SystemExit(f"{tests}: pytest ended with {code}:\n{output[-2000:]}")
        measured = coverage.Coverage(config_file=str(settings), data_file=str(data / "of"), messages=False)
        measured.combine([str(data)])
        took: dict[str, float] = json.loads(seconds.read_text())
        found = {"seconds": took, "files": _of_files(measured.get_data(), copy, list(took))}
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{tests.strip('/').replace('/', '+')}.json").write_text(json.dumps(found))
    failed = "" if code == 0 else f"; some tests failed:\n{output[-1500:]}"
    return f"{tests}: {len(took)} tests in {time.monotonic() - begin:.0f} s{failed}"


def _of_files(data: coverage.CoverageData, copy: Path, names: list[str]) -> dict[str, Any]:
    """Return the tests of the lines of each file, as numbers, because the same names occur thousands of times."""
    files, numbers = {}, {name: number for number, name in enumerate(names)}
    for name in data.measured_files():
        lines = {}
        for line, contexts in data.contexts_by_lineno(name).items():
            named = {match[0] for one in contexts if (match := _TEST.match(one))}
            if tests := sorted(numbers[test] for test in named if test in numbers):
                lines[line] = tests
        file = str(Path(name).relative_to(copy))
        files[file] = {"hash": _hash(copy / file), "lines": lines}
    return files


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class CoverageMap:
    """All maps that were measured."""

    def __init__(self) -> None:
        self._measured: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._by_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._by_file: dict[str, set[str]] = defaultdict(set)
        for path in sorted(KEPT.glob("*.json")):
            self._measured.add(path.stem.replace("+", "/"))
            measured = json.loads(path.read_text())
            names = list(measured["seconds"])
            self._seconds |= {test: took for test, took in measured["seconds"].items() if _exists(test)}
            for file, found in measured["files"].items():
                is_current = (TOP / file).is_file() and found["hash"] == _hash(TOP / file)
                for line, numbers in found["lines"].items():
                    tests = {names[number] for number in numbers}
                    self._by_file[file].update(tests)
                    if is_current:
                        self._by_line[file][int(line)].update(tests)

    def tests(self, file: str, lines: tuple[int, ...], budget_s: float) -> tuple[list[str], float, str]:
        """Return the tests of a line, the quickest first, their time in s, and which part of all tests they are.

        If the line was not measured, because it runs at the import or has changed, these are the tests of the file.
        The folder of the same name runs first if it was not measured.
        """
        found = next((tests for line in lines if (tests := self._by_line[file].get(line))), self._by_file[file])
        known = [(self._seconds[test], test) for test in found if test in self._seconds]
        folder = folder_of_tests(file)
        chosen: list[str] = []
        total = 0.0
        for took, test in sorted(known):
            if not chosen or total + took <= budget_s:
                chosen.append(test)
                total += took
        part = f"{len(chosen)} of {len(known)} tests, {total:.0f} s"
        if not any(f"{folder}/".startswith(f"{measured}/") for measured in self._measured):
            # Its time is not known.
            return [folder, *chosen], total + 2 * budget_s, f"{folder}, {part}"
        return chosen, total, part


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return (TOP / file).is_file() and f"def {name.rpartition('::')[2]}(" in (TOP / file).read_text()


def folder_of_tests(file: str) -> str:
    """Return the folder of tests with the name of the folder of the file, or of one above it."""
    product, *rooms = Path(file).parent.parts
    folder = Path("tests", *(["ctl"] if product == "resctrlctl" else []), *rooms)
    while not (TOP / folder).is_dir():
        folder = folder.parent
    return str(folder) if folder != Path("tests") else "tests/api"
