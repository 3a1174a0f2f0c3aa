# SPDX-License-Identifier: Apache-2.0
"""A simulator that does not receive forks and exits reports this, and none of its figures is exact."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl.tree import Tree
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def inexact(tmp_path: Path) -> Iterator[Host]:
    """As in a container: the kernel sends these events only to the host's network namespace."""
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    mountpoint = str(tmp_path / "resctrl")
    command = ["unshare", "--net", sys.executable, "-m", "resctrlmond.sim", mountpoint, "--until-eof"]
    with subprocess.Popen(
        [*command, "--profile", "intel-aet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout
        assert running.stdout.readline()
        try:
            yield Host(mountpoint, str(tmp_path / "run"))
        finally:
            running.terminate()


def test_an_inexact_simulation_makes_every_total_estimated_with_the_reason(inexact: Host, process: Start) -> None:
    """'resctrlctl run -- echo hi' sometimes had '0.000000 J exact': the last CPU time was counted for the root."""
    assert "does not report forks" in inexact.tree.inexact()
    child = process()
    record = assign(inexact.ctx, assignment("k", child.pid, late=False)).workload
    live = read(inexact.ctx, "k")[2]
    child.kill()
    child.wait()
    ended = release(inexact.ctx, "k", owner="test")
    for totals in (live, ended.totals, read(inexact.restart().context, "k")[2]):
        assert {total.event.name for total in totals} >= {"core_energy", "mbm_total_bytes"}
        assert {total.quality for total in totals} == {Quality.ESTIMATED}
        assert all("the simulation is inexact" in total.reason for total in totals)
    assert record.key == ended.workload.key
    assert "to the simulator" in inexact.manager.watcher.look().inexact


def test_a_simulation_of_virtual_tasks_is_exact(tmp_path: Path) -> None:
    with Simulation(str(tmp_path), "intel-aet", 4, virtual_cpus=1):
        assert Tree.open(str(tmp_path), allow_simulation=True).inexact() == ""
