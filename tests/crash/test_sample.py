# SPDX-License-Identifier: Apache-2.0
"""A few of the blows that ``make crash`` deals, so that the harness itself is known to work."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.crash import daemon, harness
from tests.crash.blow import Blow
from tests.crash.sweep import every, sweep


def unharmed(top: Path, name: str, blow: Blow, step: int, *, of_daemon: bool = False) -> Counter[str]:
    """How the verb ended, struck at every so many of its system calls, when none did harm."""
    struck = sweep(daemon.machine_for(name) if of_daemon else harness.machine, top, name, blow, every(step))
    assert struck.harm == []
    return struck.outcomes


pytestmark = pytest.mark.usefixtures("marked")


@pytest.mark.parametrize("name", ["Assign", "Release (two classes)", "tick (loss)"])
def test_a_kill_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    outcomes = unharmed(tmp_path, name, Blow.KILL, 16)
    assert outcomes["killed"] >= 2
    assert set(outcomes) <= {"killed", "done"}


@pytest.mark.parametrize("blow", [Blow.EIO, Blow.ENOSPC, Blow.EMFILE])
def test_an_error_leaves_nothing_behind(tmp_path: Path, blow: Blow) -> None:
    outcomes = unharmed(tmp_path, "Assign", blow, 12)
    assert outcomes.total() >= 2
    assert outcomes["refused"] >= 1


def test_an_interrupted_call_is_made_again(tmp_path: Path) -> None:
    outcomes = unharmed(tmp_path, "Assign", Blow.EINTR, 12)
    # All but opendir(3), of which the kernel's filesystems never say it.
    assert outcomes["done"] >= 2
    assert set(outcomes) <= {"done", "refused"}


def test_the_daemon_itself_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    outcomes = unharmed(tmp_path, "Release", Blow.KILL, 16, of_daemon=True)
    assert outcomes["killed"] >= 2


def test_the_daemon_itself_goes_on_after_an_error(tmp_path: Path) -> None:
    outcomes = unharmed(tmp_path, "Assign", Blow.EMFILE, 6, of_daemon=True)
    assert outcomes["refused"] >= 1
    assert set(outcomes) <= {"done", "refused", "cut"}


def test_a_start_that_is_killed_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    outcomes = unharmed(tmp_path, daemon.START, Blow.KILL, 24, of_daemon=True)
    assert outcomes["killed"] >= 1


def test_make_crash_reports_each_sweep_and_the_total() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.crash",
        "--verb",
        "AddMember",
        "--blow",
        "EIO",
        "--sample",
        "2",
        "--seed",
        "7",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert "[  1/1," in done.stdout
    *_, heads, verb, total = (line.split() for line in done.stdout.splitlines())
    assert heads == ["KILL", "EIO", "ENOSPC", "EINTR", "EMFILE", "harm"]
    assert verb == ["AddMember", "0", "2", "0", "0", "0", "0"]
    assert total == ["all", "0", "2", "0", "0", "0", "0"]
