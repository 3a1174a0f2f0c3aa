# SPDX-License-Identifier: Apache-2.0
"""Inject a few of the faults of ``make crash``, to test its harness."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from resctrlmond.api.access import Access
from resctrlmond.api.verbs import VERBS as API
from tests.crash import daemon, harness
from tests.crash.fault import Fault
from tests.crash.operations import OPERATIONS
from tests.crash.sweep import every, sweep
from tests.crash.verbs import VERBS


def outcomes_of(top: Path, name: str, fault: Fault, step: int, *, of_daemon: bool = False) -> Counter[str]:
    """Inject a fault at every ``step``-th system call of the verb, and return the outcomes. Each check must pass."""
    result = sweep(daemon.machine_for(name) if of_daemon else harness.machine, top, name, fault, every(step))
    assert result.failures == []
    return result.outcomes


pytestmark = pytest.mark.usefixtures("marked")


@pytest.mark.parametrize(
    "name",
    [
        "Assign",
        "Assign (observed again)",
        "AssignSelf (next command)",
        "Release (two classes)",
        "recovery",
        "tick (loss)",
        "tick (RMID of a unit)",
        "tick (units share a group)",
        "tick (unit leaves a shared group)",
    ],
)
def test_a_kill_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    outcomes = outcomes_of(tmp_path, name, Fault.KILL, 16)
    assert outcomes["killed"] >= 2
    assert set(outcomes) <= {"killed", "done"}


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.EMFILE])
def test_an_error_leaves_nothing_behind(tmp_path: Path, fault: Fault) -> None:
    outcomes = outcomes_of(tmp_path, "Assign", fault, 12)
    assert outcomes.total() >= 2
    assert outcomes["refused"] >= 1


def test_a_system_call_is_repeated_after_eintr(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, "Assign", Fault.EINTR, 12)
    # Python does not repeat opendir(3); the filesystems of the kernel do not return EINTR there.
    assert outcomes["done"] >= 2
    assert set(outcomes) <= {"done", "refused"}


@pytest.mark.parametrize("name", ["Release", "prune"])
def test_a_killed_daemon_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    outcomes = outcomes_of(tmp_path, name, Fault.KILL, 16, of_daemon=True)
    assert outcomes["killed"] >= 2


def test_the_daemon_continues_after_an_error(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, "Assign", Fault.EMFILE, 6, of_daemon=True)
    assert outcomes["refused"] >= 1
    assert set(outcomes) <= {"done", "refused", "cut"}


def test_a_start_recovers_from_a_start_that_was_killed(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, daemon.START, Fault.KILL, 24, of_daemon=True)
    assert outcomes["killed"] >= 1


def test_every_verb_that_writes_is_interrupted() -> None:
    interrupted = {title.partition(" (")[0] for title in (*VERBS, *OPERATIONS)}
    # ReportPods changes nothing on disk and nothing in resctrl.
    writing = {
        verb.full_name.removeprefix("org.resctrlmon.") for verb in API.values() if verb.access is not Access.READ
    }
    assert {re.sub("^(Manager|Unit)[.]", "", name) for name in writing} <= interrupted | {"ReportPods"}


def test_make_crash_reports_each_sweep_and_the_total() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.crash",
        "--verb",
        "AddMember",
        "--fault",
        "EIO",
        "--sample",
        "2",
        "--seed",
        "7",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert "[  1/1," in done.stdout
    *_, heads, verb, total = (line.split() for line in done.stdout.splitlines())
    assert heads == ["KILL", "EIO", "ENOSPC", "EINTR", "EMFILE", "failed"]
    assert verb == ["AddMember", "0", "2", "0", "0", "0", "0"]
    assert total == ["all", "0", "2", "0", "0", "0", "0"]
