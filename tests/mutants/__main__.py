# SPDX-License-Identifier: Apache-2.0
"""``make mutants``: plant each bug of the table in a copy of the tree, and run the tests that must notice it.

Prints which test caught each bug, and which bugs survived. Exits with 1 if a bug survived without a reason, if one
that has a reason was caught, or if a row of the table does not apply.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.mutants.mutant import Mutant, NotApplicable
from tests.mutants.table import MUTANTS

TOP = Path(__file__).parents[2]
# The tests of one mutant take a minute or two; a bug that makes one of them wait for ever is detected too.
TIMEOUT_S = 900
CAUGHT, SURVIVED, ERROR = "caught", "survived", "error"
_ENDS = threading.Event()
_RUNNING: set[subprocess.Popen[str]] = set()
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant. ``by`` is the test that detected it, or the error."""

    mutant: Mutant
    what: str
    by: str

    @property
    def is_expected(self) -> bool:
        """Whether the bug was caught, or survived with a reason."""
        return self.what == (SURVIVED if self.mutant.survives else CAUGHT)


def copy_of_the_tree(target: Path) -> None:
    """Copy every file that git knows or would add: the work tree itself is never changed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=TOP,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (TOP / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, target / name)


def run_tests(copy: Path, tests: list[str]) -> tuple[int | None, str]:
    """Run these tests in the copy until the first one fails: pytest's exit code (None: no end) and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        _RUNNING.add(running)
        try:
            output, _ = running.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            running.terminate()  # pytest ends its fixtures, which unmount simulators
            try:
                running.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, 9)
                running.communicate()
            return None, ""
        finally:
            _RUNNING.discard(running)
    return running.returncode, output


def try_one(copy: Path, mutant: Mutant) -> Outcome:
    """Plant the bug, run its tests, and take it out again."""
    path = copy / mutant.file
    if _ENDS.is_set():
        return Outcome(mutant, ERROR, "interrupted")
    try:
        mutated = mutant.applied(copy)
    except NotApplicable as error:
        return Outcome(mutant, ERROR, str(error))
    whole = path.read_text()
    code: int | None = 0
    output = ""
    path.write_text(mutated)
    try:
        # One after the other: pytest would run a file that is named first in the order of its folder.
        for tests in mutant.tests.split():
            code, output = run_tests(copy, [tests])
            if code != 0:
                break
    finally:
        path.write_text(whole)
    if code == 0:
        return Outcome(mutant, SURVIVED, mutant.survives or "NO TEST NOTICED IT")
    if code is None:
        return Outcome(mutant, CAUGHT, f"no end within {TIMEOUT_S} s")
    failed = _FAILED.search(output)
    if code != 1 or failed is None:
        return Outcome(mutant, ERROR, f"pytest ended with {code}:\n{output[-2000:]}")
    # A test that fails without the bug, too, has caught nothing.
    code, output = run_tests(copy, [failed[1]])
    if code != 0:
        return Outcome(mutant, ERROR, f"{failed[1]} fails without the bug, too:\n{output[-2000:]}")
    return Outcome(mutant, CAUGHT, failed[1])


def check_imports(copy: Path) -> None:
    """Make sure that the tests of the copy import the copy, not the tree that the virtual environment points to."""
    code = "import resctrlctl, resctrlmond; print(resctrlctl.__file__); print(resctrlmond.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    if not all(Path(file).is_relative_to(copy) for file in found):
        sys.exit(f"the tests would import {found} instead of the copy in {copy}")


def _end(*_: object) -> NoReturn:
    _ENDS.set()
    for running in list(_RUNNING):
        running.terminate()
    sys.exit(1)


def main() -> int:
    """Run the mutants that are named, or all."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutants to run, by a part of the name (default: all)"
    )
    options = parser.parse_args()
    # End the tests that run, and remove the copies, also when a shell that ignores SIGINT has started this.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    chosen = [one for one in MUTANTS if not options.names or any(name in one.name for name in options.names)]
    if options.list:
        print("\n".join(f"{one.name:50} {one.file}" for one in chosen))
        return 0
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="resctrlmond-mutants.") as top:
        for number in range(options.jobs):
            copy = Path(top).resolve() / str(number)
            copy_of_the_tree(copy)
            check_imports(copy)
            copies.put(copy)

        def job(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return try_one(copy, mutant)
            finally:
                copies.put(copy)

        outcomes = []
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(job, mutant) for mutant in chosen]):
                outcome = done.result()
                outcomes.append(outcome)
                print(f"{outcome.what:8}  {outcome.mutant.name:50}  {outcome.by}", flush=True)
    caught = sum(outcome.what == CAUGHT for outcome in outcomes)
    print(f"\n{caught} of {len(outcomes)} caught ({100 * caught / max(1, len(outcomes)):.0f} %)")
    return 0 if all(outcome.is_expected for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
