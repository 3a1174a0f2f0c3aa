# SPDX-License-Identifier: Apache-2.0
"""A service that gives up its RMID has an exact run only if its tasks were in the group until they ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.workloads.figures.verdict import verdict
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.profiles.requests import Assignment, UnitCommand
from resctrlmond.workloads.records import store
from resctrlmond.workloads.rmids import rmid_transfer
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, join, own_host
from tests.workloads.groups.test_cut import Fuse, cut

Start = Callable[[], "subprocess.Popen[bytes]"]
KEY = "a.service"


class Service:
    """An exact service with the only RMID of a machine, and a container that waits for one."""

    def __init__(self, host: Host, cgroup: str, process: Start) -> None:
        self.host, self.process = host, process
        self.path = os.path.join(cgroup, KEY)

    def start(self) -> None:
        """Start the service in a new control group, as systemd does, and then the container."""
        if os.path.exists(self.path):
            os.rmdir(self.path)
        os.mkdir(self.path)
        child = self.child = self.process()
        join(self.path, child.pid)
        assign(
            self.host.ctx,
            Assignment(
                key=KEY,
                owner=SYSTEMD,
                pid=child.pid,
                own_cgroup=self.path,
                kind="unit",
                member=KEY,
                late=False,
                priority=-1,
                unit_command=UnitCommand(commands=(f"ExecStart={child.pid}",), most_before_ns=10**9),
            ),
        )
        assert verdict(self.host.get(KEY)) == (Quality.EXACT, ())
        assert create(self.host.ctx, "box", owner="oci").state is State.PENDING

    def tick(self) -> None:
        self.host.manager.maintenance.tick()

    def is_in_group(self) -> bool:
        return self.host.tree.membership(self.child.pid).group == KEY

    def end(self) -> None:
        self.child.kill()
        self.child.wait()

    def release(self) -> None:
        if not self.host.get(KEY).state.is_over:
            release(self.host.ctx, KEY, owner=SYSTEMD)

    def files(self, generation: int) -> Path:
        """Return the folder of the files of a run."""
        aside = Path(self.host.run, "completed", KEY, str(generation))
        return aside if aside.exists() else Path(self.host.run, "groups", KEY)

    def qualities(self, generation: int) -> set[str]:
        """Return the qualities of the totals of an ended run."""
        return {line.split()[1] for line in (self.files(generation) / "quality").read_text().splitlines()}


@pytest.fixture
def service(tmp_path: Path, cgroup: str, process: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(rmid_transfer, "MIN_RUN_S", 0.0)
    monkeypatch.setattr(rmid_transfer, "UNUSED_S", 0.0)
    with own_host(tmp_path, "monitoring-only", 2) as host:
        made = Service(host, cgroup, process)
        yield made
        made.end()
        os.rmdir(made.path)


def refuse(*_: object, **_more: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("runs_on", "quality"), [(False, "exact"), (True, "estimated")])
def test_run_of_a_service_whose_rmid_is_taken_is_exact_if_no_process_runs_on(
    service: Service, runs_on: bool, quality: str
) -> None:
    """No run counts what a process uses until the service has an RMID again."""
    service.start()
    if not runs_on:
        service.end()
        service.host.manager.maintenance.record_ends(KEY)
    service.tick()
    service.tick()
    manager = service.host.manager
    assert (manager.context.store.known("box").state, manager.context.store.known(KEY).state) == (
        State.IDLE,
        State.PENDING,
    )
    assert service.qualities(1) == {quality}
    assert manager.context.store.known(KEY).generation == 2


def test_tasks_stay_in_the_group_if_the_end_cannot_be_recorded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.start()
    with monkeypatch.context() as full:
        full.setattr(store, "write_file", refuse)
        service.tick()
    assert (service.host.get(KEY).state, service.is_in_group()) == (State.ACTIVE, True)
    service.end()
    service.release()
    assert service.qualities(1) == {"exact"}


@pytest.mark.parametrize("how", ["tick", "release"])
def test_service_whose_tasks_ran_outside_before_the_end_values_were_read_is_estimated(
    service: Service, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    service.start()
    with monkeypatch.context() as full:
        full.setattr(type(service.host.ctx.snapshots), "end", refuse)
        service.tick()
    assert (service.host.get(KEY).state, service.is_in_group()) == (State.ENDING, False)
    service.end()
    getattr(service, how)()
    assert service.host.get(KEY).state is State.COMPLETED
    assert service.qualities(1) == {"estimated"}


@pytest.fixture(scope="module")
def fuse() -> Fuse:
    return Fuse()


def test_kill_while_an_rmid_is_taken_leaves_no_exact_run_whose_tasks_were_outside(
    service: Service, fuse: Fuse
) -> None:
    step, killed, found = 0, True, set()
    while killed:
        service.start()
        generation = service.host.get(KEY).generation
        killed = cut(fuse, step, service.tick)
        has_end = (service.files(generation) / "completed_at").exists()
        was_outside = not has_end and not service.is_in_group()
        service.end()
        service.host.restart()
        release(service.host.ctx, "box", owner="oci")
        service.release()
        if killed:
            found.add((was_outside, *service.qualities(generation)))
        step += 1
    assert (False, "exact") in found
    assert (True, "estimated") in found
    assert (True, "exact") not in found
