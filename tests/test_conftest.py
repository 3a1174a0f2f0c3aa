# SPDX-License-Identifier: Apache-2.0
"""The test run itself: the same result under nohup(1) and in a shell's background."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resctrlmond.sim.fuse.mount import Simulation

from .conftest import FOR_TESTS, KEPT, PREFIX

ROOT = Path(__file__).parents[1]


def directories(parent: Path) -> list[Path]:
    """List the directories of test runs, oldest first."""
    return sorted(parent.glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime)


def test_signals_that_nohup_and_a_background_job_ignore_have_their_defaults_again() -> None:
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    reset = "import signal, tests.conftest; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3)))"
    ignore = f"import os, signal, sys; [signal.signal(n, signal.SIG_IGN) for n in {tuple(map(int, numbers))}]; "
    run = "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", ignore + run, reset], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"] * 3


def test_a_make_that_a_test_runs_does_not_have_the_options_of_the_make_that_runs_the_tests() -> None:
    """``make check-fast`` runs with --keep-going and a job server."""
    program = "import os, tests.conftest; print({'MAKEFLAGS', 'MFLAGS', 'MAKELEVEL'} & os.environ.keys())"
    environment = os.environ | {"MAKEFLAGS": "k -j2", "MFLAGS": "-k -j2", "MAKELEVEL": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("passes", [True, False])
def test_each_run_has_its_own_directory_despite_files_of_earlier_runs(tmp_path: Path, passes: bool) -> None:
    """pytest 9.2 fails at the end of a run where a run that was killed left a mount."""
    left = tmp_path / "pytest-of-root"
    for number in range(8):
        (left / f"pytest-{number}" / "resctrl").mkdir(parents=True)
    left.chmod(0o700)
    test = tmp_path / "test_one.py"
    report = f"(tmp_path / {str(tmp_path / 'own')!r}).write_text(str(tmp_path))"
    test.write_text(f"def test_one(tmp_path):\n    {report}\n    assert {passes}\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", "-W", "error", str(test)]
    with Simulation(str(left / "pytest-1" / "resctrl"), "intel-rdt"):
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
        )
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (0 if passes else 1, False), done.stdout
    own = Path((tmp_path / "own").read_text())
    assert (own.is_relative_to(tmp_path), own.exists()) == (True, not passes)
    assert len(directories(tmp_path)) == (0 if passes else 1)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["--markers"], 0),
        (["tests/missing.py"], 4),
        (["tests/test_conftest.py", "-k", "no-such-test"], 5),
    ],
)
def test_run_without_tests_leaves_no_directory(tmp_path: Path, arguments: list[str], status: int) -> None:
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout
    assert os.listdir(tmp_path) == []


def test_last_failed_runs_are_kept_and_those_in_use(tmp_path: Path) -> None:
    place = tmp_path / "a place"
    *earlier, starting = (place / f"{PREFIX}{name}" for name in "ehbcfgad")
    for time, path in enumerate(earlier):
        (path / FOR_TESTS / "resctrl").mkdir(parents=True)
        os.utime(path, (time, time))
    starting.mkdir()
    test = tmp_path / "test_one.py"
    test.write_text("def test_one(tmp_path):\n    assert False\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", str(test)]
    running = os.open(earlier[1], os.O_RDONLY)
    try:
        fcntl.flock(running, fcntl.LOCK_EX)
        with Simulation(str(earlier[0] / FOR_TESTS / "resctrl"), "intel-rdt"):
            subprocess.run(
                command, cwd=ROOT, env=os.environ | {"TMPDIR": str(place)}, stdout=subprocess.DEVNULL, check=False
            )
    finally:
        os.close(running)
    *others, own = directories(place)
    assert others == [*earlier[:2], *earlier[-(KEPT - 1) :], starting]
    assert (own / FOR_TESTS).exists()
    assert len(own.name) <= 14, "the path of a socket below it has at most 107 bytes"
