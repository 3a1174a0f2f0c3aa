# SPDX-License-Identifier: Apache-2.0
"""Somebody else who removes our groups: when that is said, and who may be at fault."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlctl.command import main
from resctrlmond.daemon.rivals import AGAIN_WITHIN_S, WITHIN_S, Rivals
from tests.daemon.conftest import Machine
from tests.wait import wait_until

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def rival(tmp_path: Path) -> Iterator[int]:
    """A process of that name; whether it is the one that removes groups, nobody can see."""
    program = shutil.copy("/bin/sleep", tmp_path / "nri-resctrl-mon")
    with subprocess.Popen([program, "600"]) as running:
        yield running.pid
        running.kill()


def problem(machine: Machine) -> str:
    return next((text for text in machine.call("Status")["problems"] if "another program removes" in text), "")


def test_a_rival_that_removes_our_groups_is_noticed_and_named(
    machine: Machine, process: Start, rival: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """nri-resctrl-mon removes every 30 s each group that has a pod's name and is not in its list."""
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
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_one_loss_and_losses_far_apart_are_no_sign_of_a_rival() -> None:
    clock = Clock()
    rivals = Rivals(lambda _: False, clock)
    for number in range(20):
        rivals.add_loss(f"k{number}")
        rivals.add_loss(f"l{number}")
        assert rivals.describe() == ""
        clock.now += WITHIN_S


def test_the_same_workload_twice_is_and_is_over_when_nothing_comes_after_it() -> None:
    clock = Clock()
    rivals = Rivals(lambda _: False, clock)
    rivals.add_loss("k")
    clock.now += AGAIN_WITHIN_S - 1
    rivals.add_loss("k")
    assert "2 since" in rivals.describe()
    assert "No program that is known" in rivals.describe() or "The cause may be" in rivals.describe()
    clock.now += 1
    assert rivals.describe() == ""
