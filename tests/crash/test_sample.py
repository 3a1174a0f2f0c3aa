# SPDX-License-Identifier: Apache-2.0
"""A few of the blows that ``make crash`` deals, so that the harness itself is known to work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.sim.mount import Simulation
from tests.crash import daemon
from tests.crash.harness import Blow, Harness, Struck
from tests.groups.conftest import Host


@pytest.fixture
def harness(tmp_path: Path, marked: None) -> Iterator[Harness]:
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 200):
        yield Harness(Host(str(tmp_path / "resctrl"), str(tmp_path / "run")), str(tmp_path / "log"))


def unharmed(struck: Struck) -> Counter[str]:
    """How the struck ended, none of them harmed."""
    assert struck.harm == []
    return struck.outcomes


@pytest.mark.parametrize("name", ["Assign", "Release (two classes)", "tick (loss)"])
def test_a_kill_leaves_nothing_behind(harness: Harness, name: str) -> None:
    outcomes = unharmed(harness.sweep(name, Blow.KILL, every=16))
    assert outcomes["killed"] >= 2
    assert set(outcomes) <= {"killed", "done"}


@pytest.mark.parametrize("blow", [Blow.EIO, Blow.ENOSPC, Blow.EMFILE])
def test_an_error_leaves_nothing_behind(harness: Harness, blow: Blow) -> None:
    outcomes = unharmed(harness.sweep("Assign", blow, every=12))
    assert outcomes.total() >= 2
    assert outcomes["refused"] >= 1


def test_an_interrupted_call_is_made_again(harness: Harness) -> None:
    outcomes = unharmed(harness.sweep("Assign", Blow.EINTR, every=12))
    # All but opendir(3), of which the kernel's filesystems never say it.
    assert outcomes["done"] >= 2
    assert set(outcomes) <= {"done", "refused"}


def test_the_daemon_itself_killed_leaves_nothing_behind(tmp_path: Path, marked: None) -> None:
    with daemon.machine(tmp_path / "m", "Release") as struck:
        outcomes = unharmed(struck.sweep("Release", Blow.KILL, every=16))
    assert outcomes["killed"] >= 2


def test_the_daemon_itself_goes_on_after_an_error(tmp_path: Path, marked: None) -> None:
    with daemon.machine(tmp_path / "m", "Assign") as struck:
        outcomes = unharmed(struck.sweep("Assign", Blow.EMFILE, every=6))
    assert outcomes["refused"] >= 1
    assert set(outcomes) <= {"done", "refused", "cut"}


def test_a_start_that_is_killed_is_made_up_for_by_the_next(tmp_path: Path, marked: None) -> None:
    with daemon.machine(tmp_path / "m", daemon.START) as struck:
        outcomes = unharmed(struck.sweep(daemon.START, Blow.KILL, every=24))
    assert outcomes["killed"] >= 1
