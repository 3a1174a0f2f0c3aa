# SPDX-License-Identifier: Apache-2.0
"""Plant mutants in copies of the tree, one at a time in each, and run the tests that must detect them."""

from __future__ import annotations

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from tests.mutants.mutant import NotApplicable

TOP = Path(__file__).parents[2]
CAUGHT, SURVIVED, ERROR = "caught", "survived", "error"
_ENDS = threading.Event()
_RUNNING: set[subprocess.Popen[str]] = set()
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", re.MULTILINE)


class Plantable(Protocol):
    """A change of one file.

    Its tests run in one pytest for each list of ``runs``, until one fails. A run that does not end within
    ``timeout_s`` has failed, too. ``survives`` is the reason why none fails.
    """

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def survives(self) -> str: ...
    @property
    def runs(self) -> list[list[str]]: ...
    @property
    def timeout_s(self) -> float: ...
    def applied(self, top: Path) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant. ``by`` is the test that detected it, or the error."""

    mutant: Plantable
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


def run_tests(
    copy: Path, tests: list[str], variables: Mapping[str, str] | None = None, timeout_s: float = 900
) -> tuple[int | None, str]:
    """Run these tests in the copy until the first one fails: pytest's exit code (None: no end) and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})}
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
            output, _ = running.communicate(timeout=timeout_s)
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


def try_one(copy: Path, mutant: Plantable) -> Outcome:
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
    output, tests = "", list[str]()
    path.write_text(mutated)
    try:
        for tests in mutant.runs:
            code, output = run_tests(copy, tests, timeout_s=mutant.timeout_s)
            if code != 0:
                break
    finally:
        path.write_text(whole)
    if _ENDS.is_set():
        return Outcome(mutant, ERROR, "interrupted")
    if code == 0:
        return Outcome(mutant, SURVIVED, mutant.survives or "NO TEST NOTICED IT")
    failed = _FAILED.search(output) if code == 1 else None
    # A test that fails without the bug, too, has caught nothing. With some bugs, pytest cannot import the tests.
    if code is None:
        again, by = tests, f"no end within {mutant.timeout_s:.0f} s"
    elif failed:
        again, by = [failed[1]], failed[1]
    else:
        again, by = ["--collect-only", *tests], f"pytest, which ended with {code}"
    output_with_bug = output
    code, output = run_tests(copy, again, timeout_s=mutant.timeout_s)
    if code != 0:
        return Outcome(
            mutant, ERROR, f"{by}: that is so without the bug, too:\n{output_with_bug[-1000:]}{output[-1000:]}"
        )
    return Outcome(mutant, CAUGHT, by)


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


def outcomes(mutants: Iterable[Plantable], jobs: int) -> Iterator[Outcome]:
    """Try each mutant, ``jobs`` at a time, and yield its outcome when it ends."""
    # End the tests that run, and remove the copies, also when a shell that ignores SIGINT has started this.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="resctrlmond-mutants.") as top:
        for number in range(jobs):
            copy = Path(top).resolve() / str(number)
            copy_of_the_tree(copy)
            check_imports(copy)
            copies.put(copy)

        def job(mutant: Plantable) -> Outcome:
            copy = copies.get()
            try:
                return try_one(copy, mutant)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(job, mutant) for mutant in mutants]):
                yield done.result()
