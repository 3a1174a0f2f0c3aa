# SPDX-License-Identifier: Apache-2.0
"""Repeated losses of groups are reported, with the known programs that may be the cause."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlctl.command import main
from resctrlmond.daemon.group_losses import AGAIN_WITHIN_S, WITHIN_S, GroupLosses
from tests.daemon.conftest import Machine, StartProcess
from tests.wait import wait_until


@pytest.fixture
def rival(tmp_path: Path) -> Iterator[int]:
    """Start a process with the name of a known program, and return its pid."""
    program = shutil.copy("/bin/sleep", tmp_path / "nri-resctrl-mon")
    with subprocess.Popen([program, "600"]) as running:
        yield running.pid
        running.kill()


def problem(machine: Machine) -> str:
    """Return the problem in Status about lost groups, "" if there is none."""
    return next((text for text in machine.call("Status")["problems"] if "another program removes" in text), "")


def test_known_program_that_removes_groups_is_named(
    machine: Machine, process: StartProcess, rival: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every 30 s, nri-resctrl-mon removes each group that has the name of a pod and is not in its list."""
    machine.start()
    for number in range(3):
        key = f"{number}f8fad5b-d9cb-469f-a165-70867728950e"
        machine.call("Assign", key=key, pid=process().pid)
        assert problem(machine) == ""
        os.rmdir(machine.group(key)["path"])
        wait_until(lambda: machine.group(key)["generation"] > 1 or machine.group(key)["state"] == "lost")  # noqa: B023
    wait_until(lambda: problem(machine))
    assert f"The cause may be nri-resctrl-mon (process {rival}), which removes" in problem(machine)
    assert main(["--socket", machine.socket, "status"]) == 0
    assert f"nri-resctrl-mon (process {rival})" in " ".join(capsys.readouterr().out.split())
    assert machine.log.read_text().count("another program removes") == 1


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_single_or_rare_losses_are_not_reported() -> None:
    clock = Clock()
    losses = GroupLosses(lambda _: False, clock)
    for number in range(20):
        losses.add(f"k{number}")
        losses.add(f"l{number}")
        assert losses.describe() == ""
        clock.now += WITHIN_S


def test_second_loss_of_a_workload_is_reported_until_no_further_one_follows() -> None:
    clock = Clock()
    losses = GroupLosses(lambda _: False, clock)
    losses.add("k")
    clock.now += AGAIN_WITHIN_S - 1
    losses.add("k")
    assert "2 since" in losses.describe()
    assert "No program that is known" in losses.describe() or "The cause may be" in losses.describe()
    clock.now += 1
    assert losses.describe() == ""
