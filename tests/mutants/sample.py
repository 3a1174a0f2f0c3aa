# SPDX-License-Identifier: Apache-2.0
"""``make mutate``: plant random mutants in copies of the tree, and run the tests that run the changed line.

Prints the mutants that survived, and which share was caught in each package. Mutants without an effect are listed in
``equivalents.py`` and never drawn. Exits with 1 if a mutant survived, or if a test fails without the mutant, too.

The tests of each line are known from a map, which --map measures. Without it, a folder of tests with the name of the
package runs. If a file has changed since, all tests that ran it do.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants.changes import Change, changes
from tests.mutants.coverage_map import CoverageMap, measure
from tests.mutants.equivalents import EQUIVALENTS
from tests.mutants.trial import CAUGHT, SURVIVED, TOP, outcomes

PRODUCT = [f"resctrlmond/{name}" for name in ("workloads", "api", "daemon", "nri", "exporter", "client", "resctrl")]
MAPPED = ["workloads", "daemon", "nri", "api", "exporter", "ctl", "resctrl", "truth", "hook", "doctor", "views"]


@dataclass(frozen=True, slots=True)
class RandomMutant:
    """A change of a file of the product. ``part`` is the part of the tests of its line that runs."""

    file: str
    change: Change
    tests: tuple[str, ...] = ()
    part: str = ""
    timeout_s: float = 0
    survives: str = ""

    @property
    def name(self) -> str:
        """Return the place and the change."""
        return f"{self.file}:{self.change.lines[0]}: {self.change.function}: {self.change.text}"

    @property
    def runs(self) -> list[list[str]]:
        """Return all tests, for one run of pytest."""
        return [list(self.tests)]

    def applied(self, top: Path) -> str:
        """Return the text of the file with the change."""
        return self.change.applied((top / self.file).read_text())

    @property
    def package(self) -> str:
        """Return the folder in ``resctrlmond``, the room in ``workloads``, or ``resctrlctl``."""
        folder = Path(self.file).parent.parts
        return "/".join(folder[: 1 if folder[0] == "resctrlctl" else 3 if "workloads" in folder else 2])


def all_mutants(paths: Iterable[str]) -> list[RandomMutant]:
    """Return all mutants of these files and folders, without those that have no effect."""
    equivalent = {(one.file, one.function, one.text) for one in EQUIVALENTS}
    modules = [module for path in paths for module in sorted((TOP / path).rglob("*.py")) or [TOP / path]]
    return [
        RandomMutant(file, change)
        for file in (str(module.relative_to(TOP)) for module in modules)
        if not file.endswith("_pb2.py")
        for change in changes((TOP / file).read_text())
        if (file, change.function, change.text) not in equivalent
    ]


def draw(
    paths: Iterable[str], number: int, seed: int, budget_s: float, given: list[str], *, only: str
) -> list[RandomMutant]:
    """Draw mutants, with the tests that are given, or those of the line that run within ``budget_s``."""
    every = [one for one in all_mutants(paths) if only in one.name]
    drawn = random.Random(seed).sample(every, min(number, len(every)))
    if given:
        return [replace(one, tests=tuple(given), part=" ".join(given), timeout_s=600) for one in drawn]
    lines, with_tests = CoverageMap(), []
    for one in drawn:
        tests, took_s, part = lines.tests(one.file, one.change.lines, budget_s)
        with_tests.append(replace(one, tests=tuple(tests), part=part, timeout_s=120 + 5 * took_s))
    return with_tests


def main() -> int:
    """Measure the map, or draw mutants and try them."""
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--sample", type=int, default=100, help="how many mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the draw (default: a new one)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests for a mutant (default: 120)")
    parser.add_argument("--tests", nargs="+", default=[], help="the tests of all mutants, in place of the map")
    parser.add_argument("--only", default="", metavar="TEXT", help="draw mutants whose line below contains the text")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    parser.add_argument("--map", nargs="*", metavar="TESTS", help="measure the map of these (default: all), and end")
    parser.add_argument(
        "--of", nargs="+", metavar="PATH", default=[*PRODUCT, "resctrlctl"], help="what is changed (default: all)"
    )
    options = parser.parse_args()
    if options.map is not None:
        for tests in options.map or [f"tests/{name}" for name in MAPPED]:
            print(measure(tests), flush=True)
        return 0
    print(f"seed {options.seed}", flush=True)
    drawn = draw(options.of, options.sample, options.seed, options.budget, options.tests, only=options.only)
    if options.list:
        print("\n".join(f"{one.name}  ({one.part})" for one in drawn))
        return 0
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    survived = []
    by_name = {one.name: one for one in drawn}
    for outcome in outcomes(drawn, options.jobs):
        mutant = by_name[outcome.mutant.name]
        counts[mutant.package][outcome.what] += 1
        if outcome.what == SURVIVED:
            survived.append(f"{mutant.name}  ({mutant.part})")
        print(f"{outcome.what:8}  {outcome.mutant.name}  {outcome.by}", flush=True)
    print()
    for package in sorted(counts):
        print(_share(package, counts[package]))
    total = sum(counts.values(), Counter[str]())
    print(_share("all", total), *survived, sep="\n")
    return 0 if total[CAUGHT] == len(drawn) else 1


def _share(name: str, count: Counter[str]) -> str:
    judged = count[CAUGHT] + count[SURVIVED]
    return f"{name:35} {count[CAUGHT]:4} of {judged:4} caught ({100 * count[CAUGHT] / max(1, judged):.0f} %)"


if __name__ == "__main__":
    sys.exit(main())
