# SPDX-License-Identifier: Apache-2.0
"""A workload of a higher priority gets the RMID of a unit, after the end values of the unit were written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.rmids import rmid_transfer
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment, join, own_host, when_all_stand

Start = Callable[[], "subprocess.Popen[bytes]"]


class Units:
    """Units with a process each, on a host with few RMIDs."""

    def __init__(self, host: Host, top: str, process: Start) -> None:
        self.host = host
        self.top = top
        self.process = process
        self.pids: dict[str, int] = {}

    def start(self, key: str, priority: int = -1) -> Workload:
        path = os.path.join(self.top, key)
        if key not in self.pids:
            os.mkdir(path)
            self.pids[key] = self.process().pid
            join(path, self.pids[key])
        request = Assignment(key=key, owner=SYSTEMD, cgroup=path, kind="unit", member=key, priority=priority)
        return assign(self.host.ctx, request).workload

    def states(self, *keys: str) -> list[State]:
        return [self.host.get(key).state for key in keys]

    def group(self, key: str) -> str:
        return self.host.tree.membership(self.pids[key]).group

    def tick(self) -> None:
        self.host.manager.maintenance.tick()


@pytest.fixture(params=[4])
def units(request: pytest.FixtureRequest, tmp_path: Path, cgroup: str, process: Start) -> Iterator[Units]:
    """Return units on a machine with three RMIDs and root's, and without limbo."""
    with own_host(tmp_path, "monitoring-only", request.param) as host:
        made = Units(host, cgroup, process)
        yield made
        host.check()
        for key, pid in made.pids.items():
            join(cgroup, pid)
            os.rmdir(os.path.join(cgroup, key))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a unit give up its RMID from its start on."""
    monkeypatch.setattr(rmid_transfer, "MIN_RUN_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_container_gets_the_rmid_of_the_unit_with_the_lowest_priority(units: Units, process: Start) -> None:
    for number, key in enumerate(("a.service", "b.service", "c.service")):
        units.start(key, -1 - number)
    init = process()
    manager = units.host.manager
    before = manager.context.store.known("c.service")
    assert assign(manager.context, assignment("box", init.pid, "oci", member="box")).workload.state is State.PENDING
    units.tick()
    assert units.states("a.service", "b.service", "c.service") == [State.ACTIVE, State.ACTIVE, State.PENDING]
    now = manager.context.store.known("c.service")
    assert (now.generation, now.priority, now.is_claimed_by(SYSTEMD)) == (2, -3, True)
    assert "needed for box, which has a higher priority" in now.reason
    assert read(manager.context, "c.service") == (now, [], [])
    # The run that ended is kept, with the values of its end and its own quality.
    ended = Path(units.host.run, "completed", "c.service", str(before.generation))
    assert (ended / "completed_at").exists()
    assert list(ended.glob("mon_data/*/*.end"))
    assert {line.split()[1] for line in (ended / "quality").read_text().splitlines()} == {"late"}
    units.tick()
    assert units.host.tree.membership(init.pid).group == "box"
    assert units.group("c.service") == ""
    # It gets the next free one, as a run of its own.
    release(manager.context, "box", owner="oci")
    units.tick()
    assert units.group("c.service") == "c.service"
    later = manager.context.store.known("c.service")
    assert (later.generation, later.prior_runs, baseline_of(later)) == (2, None, Quality.LATE)


@pytest.mark.usefixtures("at_once")
def test_tasks_have_left_the_group_when_it_is_removed(
    units: Units, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, no pool of the machine has what a task uses between the end values and the removal."""
    remove = Tree.remove
    found: dict[str, list[int]] = {}

    def noted(tree: Tree, ref: GroupRef) -> bool:
        found[ref.name] = tree.tasks(ref)
        return remove(tree, ref)

    for key in ("a.service", "b.service", "c.service"):
        units.start(key)
    assign(units.host.ctx, assignment("box", process().pid, "oci", member="box"))
    monkeypatch.setattr(Tree, "remove", noted)
    units.tick()
    assert list(found.values()) == [[]]


@pytest.mark.usefixtures("at_once")
def test_equal_priority_takes_nothing(units: Units) -> None:
    for key in ("a.service", "b.service", "c.service", "d.service"):
        units.start(key)
    for _ in range(3):
        units.tick()
    assert units.states("a.service", "b.service", "c.service", "d.service") == [State.ACTIVE] * 3 + [State.PENDING]


@pytest.mark.usefixtures("at_once")
def test_unit_keeps_its_rmid_while_another_one_in_limbo_becomes_free(
    tmp_path: Path, cgroup: str, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rmid_transfer, "LIMBO_S", 3600.0)
    with own_host(tmp_path, "intel-rdt", 3) as host:
        units = Units(host, cgroup, process)
        units.start("a.service")
        create(host.ctx, "first", owner="me")
        release(host.ctx, "first", owner="me")
        second = create(host.ctx, "second", owner="me")
        assert (second.state, second.first.in_limbo) == (State.PENDING, True)
        units.tick()
        assert when_all_stand(host, "second").state is State.IDLE
        assert (host.get("a.service").generation, units.states("a.service")) == (1, [State.ACTIVE])
        join(cgroup, units.pids["a.service"])
        os.rmdir(os.path.join(cgroup, "a.service"))


@pytest.mark.usefixtures("at_once")
def test_unit_of_a_higher_priority_takes_from_a_lower_one_beyond_the_reserve(units: Units) -> None:
    units.host.ctx.config.settings = Settings(reserve=1, overflow=0)
    units.start("a.service", -2)
    units.start("b.service", -2)
    assert units.start("c.service", -1).state is State.PENDING
    units.tick()
    units.tick()
    assert sorted(units.states("a.service", "b.service", "c.service")) == [State.ACTIVE, State.ACTIVE, State.PENDING]
    assert units.group("c.service") == "c.service"
    assert units.host.tree.free_rmids() == 1


@pytest.mark.usefixtures("at_once")
def test_containers_and_workloads_of_clients_keep_their_rmids(units: Units, process: Start) -> None:
    manager = units.host.manager
    assign(manager.context, assignment("box", process().pid, "oci", member="box", priority=-900))
    assign(manager.context, assignment("job", process().pid, "me", priority=-900))
    units.start("a.service", -900)
    # A client claims it as well.
    create(manager.context, "a.service", owner="me")
    for _ in range(2):
        create(manager.context, "urgent", owner="me", priority=1000)
        units.tick()
    assert units.states("box", "job", "a.service", "urgent") == [State.ACTIVE] * 3 + [State.PENDING]


def test_unit_keeps_a_new_rmid_for_a_time(units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("a.service", "b.service", "c.service"):
        units.start(key)
    create(units.host.ctx, "box", owner="oci")
    units.tick()
    assert units.states("a.service", "b.service", "c.service", "box") == [State.ACTIVE] * 3 + [State.PENDING]
    monkeypatch.setattr(rmid_transfer, "MIN_RUN_S", 0.0)
    units.tick()
    units.tick()
    assert units.states("box") == [State.IDLE]


@pytest.mark.usefixtures("at_once")
def test_no_more_rmids_are_taken_than_groups_wait(
    tmp_path: Path, cgroup: str, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A freed RMID is in limbo for a second at least, and each tick took another one."""
    monkeypatch.setattr(rmid_transfer, "LIMBO_S", 0.0)
    with own_host(tmp_path, "intel-rdt", 5) as host:
        units = Units(host, cgroup, process)
        for key in ("a.service", "b.service", "c.service", "d.service"):
            units.start(key)
        create(host.ctx, "box", owner="oci")
        for _ in range(4):
            units.tick()
        assert when_all_stand(host, "box").state is State.IDLE
        keys = ["a.service", "b.service", "c.service", "d.service"]
        assert sorted(units.states(*keys)) == [State.ACTIVE] * 3 + [State.PENDING]
        assert sorted(host.get(key).generation for key in keys) == [1, 1, 1, 2]
        create(host.ctx, "box2", owner="oci")
        create(host.ctx, "box3", owner="oci")
        when_all_stand(host, "box3")
        assert sorted(units.states(*keys)) == [State.ACTIVE] + [State.PENDING] * 3
        host.check()
        for key, pid in units.pids.items():
            join(cgroup, pid)
            os.rmdir(os.path.join(cgroup, key))


@pytest.mark.usefixtures("at_once")
def test_unit_without_a_task_and_the_least_used_one_go_first(units: Units) -> None:
    busy, quiet, idle = "a.service", "b.service", "c.service"
    for key in (quiet, idle):
        units.start(key)
    burner = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        os.mkdir(os.path.join(units.top, busy))
        units.pids[busy] = burner.pid
        join(os.path.join(units.top, busy), burner.pid)
        units.start(busy)
        os.kill(units.pids[idle], 9)
        os.waitpid(units.pids[idle], 0)
        units.host.manager.maintenance.record_ends(idle)
        assert units.states(idle) == [State.IDLE]
        units.pids[idle] = units.process().pid
        order = []
        for number in range(2):
            create(units.host.ctx, f"box{number}", owner="oci")
            units.tick()
            order.append([key for key in (busy, quiet, idle) if units.states(key) == [State.PENDING]])
            units.tick()
        assert order == [[idle], [quiet, idle]]
    finally:
        burner.kill()
        burner.wait()
        units.pids[busy] = units.process().pid


@pytest.mark.usefixtures("at_once")
def test_unit_whose_end_cannot_be_written_keeps_its_group_until_it_is(
    units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a.service", "b.service", "c.service"):
        units.start(key)
    create(units.host.ctx, "box", owner="oci")
    end = type(units.host.ctx.snapshots).end

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(units.host.ctx.snapshots), "end", refuse)
    units.tick()
    assert units.host.get("a.service").state is State.ENDING
    assert "a.service" in {found.ref.name for found in units.host.marked_groups()}
    monkeypatch.setattr(type(units.host.ctx.snapshots), "end", end)
    units.tick()
    units.tick()
    assert units.states("box", "a.service") == [State.IDLE, State.COMPLETED]


@pytest.mark.usefixtures("at_once")
def test_no_unit_gives_up_an_rmid_that_the_reserve_keeps_from_the_next_one(
    units: Units, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have taken RMIDs of the reserve, so a unit that waits gets none of those that become free."""
    monkeypatch.setattr(rmid_transfer, "UNUSED_S", 0.0)
    manager = units.host.manager
    manager.context.config.settings = Settings(reserve=0, overflow=0)
    units.start("a.service", -2)
    assign(manager.context, assignment("box", process().pid, "oci", member="box"))
    assign(manager.context, assignment("box2", process().pid, "oci", member="box2"))
    manager.context.config.settings = Settings(reserve=2, overflow=0)
    units.start("c.service", -1)
    for _ in range(3):
        units.tick()
    assert units.states("a.service", "c.service") == [State.ACTIVE, State.PENDING]
    release(manager.context, "box", owner="oci")
    release(manager.context, "box2", owner="oci")
    units.tick()
    units.tick()
    assert units.states("a.service", "c.service") == [State.PENDING, State.ACTIVE]
