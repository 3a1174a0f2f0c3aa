# SPDX-License-Identifier: Apache-2.0
"""A few of the blows that ``make crash`` deals, so that the harness itself is known to work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.sim.mount import Simulation
from tests.crash.harness import Blow, Harness
from tests.groups.conftest import MARK, Host


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    before = os.getegid()
    os.setegid(MARK)
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 200):
        yield Harness(Host(str(tmp_path / "resctrl"), str(tmp_path / "run")), str(tmp_path / "log"))
    os.setegid(before)


@pytest.mark.parametrize("name", ["Assign", "Release (two classes)", "tick (loss)"])
def test_a_kill_leaves_nothing_behind(harness: Harness, name: str) -> None:
    outcomes = harness.sweep(name, Blow.KILL, every=16)
    assert outcomes["killed"] >= 2
    assert set(outcomes) <= {"killed", "done"}


@pytest.mark.parametrize("blow", [Blow.EIO, Blow.ENOSPC, Blow.EMFILE])
def test_an_error_leaves_nothing_behind(harness: Harness, blow: Blow) -> None:
    outcomes = harness.sweep("Assign", blow, every=12)
    assert outcomes.total() >= 2
    assert outcomes["refused"] >= 1


def test_an_interrupted_call_is_made_again(harness: Harness) -> None:
    outcomes = harness.sweep("Assign", Blow.EINTR, every=12)
    # All but opendir(3), of which the kernel's filesystems never say it.
    assert outcomes["done"] >= 2
    assert set(outcomes) <= {"done", "raw"}
