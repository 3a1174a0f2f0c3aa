# SPDX-License-Identifier: Apache-2.0
"""Energy counters lag: cores report their counts some milliseconds later, also after the end of a task."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from resctrlmond.sim.control.client import Control
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.groups.counters import REPORTING_LAG_S
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]
SECOND_NS = 10**9
# The simulated machine is so much slower than the daemon: its lag of a second is what 2 ms are on hardware. The lag
# then passes only while the daemon sleeps, not while it does other work.
LAG_MS, SLOWER = 1000, 500


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Control]]:
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    with Simulation(
        str(tmp_path / "resctrl"), "intel-aet", 8, residue=7, virtual_cpus=4, lag_ms=LAG_MS
    ) as simulation:
        control = Control(simulation.mountpoint)
        sleep = time.sleep

        def slept(seconds: float) -> None:
            sleep(seconds)
            control.advance(seconds * SLOWER)

        monkeypatch.setattr(time, "sleep", slept)
        yield Host(simulation.mountpoint, str(tmp_path / "run")), control


def energy(host: Host, key: str) -> object:
    (total,) = (total for total in read(host.ctx, key)[2] if total.event.name == "core_energy")
    return total.number


@pytest.mark.parametrize("classes", [1, 2], ids=["one class", "two classes"])
def test_last_reading_includes_use_immediately_before_the_release(
    slow: tuple[Host, Control], process: Start, classes: int
) -> None:
    host, control = slow
    host.make_class("gold")
    for class_ in ("", "gold")[:classes]:
        tid = control.spawn(tid=process().pid)
        host.tree.write_task(class_, tid)
        assign(host.ctx, assignment("k", tid))
    for child in host.get("k").members:
        control.run(child.pid, SECOND_NS)
        control.exit(child.pid)
    release(host.ctx, "k", owner="test")
    assert energy(host, "k") == Decimal("2.5") * classes


def test_last_reading_includes_use_immediately_before_the_end_of_the_process(
    slow: tuple[Host, Control], process: Start
) -> None:
    host, control = slow
    child, key = process(), "4d" * 32
    control.spawn(tid=child.pid)
    assign(host.ctx, assignment(key, child.pid, "oci"))
    control.run(child.pid, SECOND_NS)
    control.exit(child.pid)
    child.kill()
    child.wait()
    host.manager.maintenance.tick()
    assert host.get(key).state is State.COMPLETED
    assert energy(host, key) == Decimal("2.5")


@pytest.mark.parametrize(("machine", "waits"), [("intel-rdt", 0), ("intel-aet", 1)])
def test_end_waits_for_late_reports_only_if_the_group_has_events_that_are_reported_late(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch, machine: str, waits: int
) -> None:
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    with Simulation(str(tmp_path / "resctrl"), machine, 8) as simulation:
        host = Host(simulation.mountpoint, str(tmp_path / "run"))
        assign(host.ctx, assignment("k", process().pid))
        pauses: list[float] = []
        sleep = time.sleep

        def counted(seconds: float) -> None:
            pauses.append(seconds)
            sleep(seconds)

        monkeypatch.setattr(time, "sleep", counted)
        release(host.ctx, "k", owner="test")
        host.ctx.interference.close()
        assert pauses.count(REPORTING_LAG_S) == waits
