# SPDX-License-Identifier: Apache-2.0
"""Units without an RMID of their own share a group: each task is counted once, and no figure is divided."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from resctrlmond.resctrl.membership import Membership
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.model import workload as model
from resctrlmond.workloads.model.owners import OVERFLOW, SYSTEMD
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.rmids import overflow, rmid_queue
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import UID, Host, assignment, join, own_host

Start = Callable[[], "subprocess.Popen[bytes]"]
SHARED = "overflow@-.slice"
LONG = ("a.service", "b.service", "c.service", "d.service")


class Units:
    """Units with a process each, on a host with few RMIDs."""

    def __init__(self, host: Host, top: str, process: Start) -> None:
        self.host = host
        self.top = top
        self.process = process
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def path(self, key: str) -> str:
        return os.path.join(self.top, key)

    def run(self, key: str, class_: str = "") -> None:
        """Start a process in the control group of a unit."""
        os.makedirs(self.path(key), exist_ok=True)
        self.children[key] = self.process()
        if class_:
            self.host.tree.write_task(class_, self.children[key].pid)
        join(self.path(key), self.children[key].pid)

    def start(self, key: str, priority: int = -1, **attributes: str) -> Workload:
        if key not in self.children:
            self.run(key)
        request = Assignment(
            key=key,
            owner=SYSTEMD,
            cgroup=self.path(key),
            kind="unit",
            member=key,
            priority=priority,
            attributes={"unit": key, **attributes},
        )
        return assign(self.host.ctx, request).workload

    def stop(self, key: str) -> None:
        child = self.children.pop(key)
        child.kill()
        child.wait()
        release(self.host.ctx, key, owner=SYSTEMD)
        os.rmdir(self.path(key))

    def group(self, key: str) -> str:
        return self.host.tree.membership(self.children[key].pid).group

    def shared(self) -> list[str]:
        """Return the living members of the shared group."""
        return sorted(member.id for member in self.host.get(SHARED).living)

    def tick(self) -> None:
        self.host.manager.maintenance.tick()


@contextmanager
def few(
    top: Path, cgroup: str, process: Start, *, rmids: int = 5, shared: int = 1, profile: str = "monitoring-only"
) -> Iterator[Units]:
    """Yield units on a machine with these RMIDs, root's among them, and without limbo."""
    with own_host(top, profile, rmids) as host:
        host.settings = host.ctx.config.settings = Settings(reserve=1, overflow=shared)
        made = Units(host, cgroup, process)
        yield made
        host.check()
        for key, child in made.children.items():
            join(cgroup, child.pid)
            os.rmdir(made.path(key))


@pytest.fixture
def units(tmp_path: Path, cgroup: str, process: Start) -> Iterator[Units]:
    """Return units on a machine with two RMIDs for them, one for a shared group, and one for a container."""
    with few(tmp_path, cgroup, process) as made:
        yield made


def test_units_without_an_rmid_share_a_group_and_each_task_is_counted_once(units: Units) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    assert [units.group(key) for key in LONG] == ["a.service", "b.service", SHARED, SHARED]
    manager = units.host.manager
    around = manager.context.store.known(SHARED)
    assert [claim.owner for claim in around.claims] == [OVERFLOW]
    assert around.attributes == {"kind": "overflow", "unit": "-.slice"}
    assert {member.kind for member in around.living} == {"overflow"}
    assert baseline_of(around) is Quality.LATE
    _, readings, totals = read(manager.context, SHARED)
    assert readings
    assert {total.quality for total in totals} == {Quality.LATE}
    for key in ("c.service", "d.service"):
        record, readings, totals = read(manager.context, key)
        assert (record.state, readings) == (State.PENDING, [])
        assert {total.quality for total in totals} == {Quality.UNKNOWN}
        why = f"shared with 1 other in {SHARED}, because no RMID is free for it"
        assert {total.reason for total in totals} == {why}
    usages = {usage.workload.key: usage for usage in manager.usages.read_all()}
    assert {total.quality for total in usages["c.service"].totals} == {Quality.UNKNOWN}
    # One RMID is left for a container.
    assert create(manager.context, "box", owner="oci").state is State.IDLE
    for _ in range(3):
        for key in (*LONG, SHARED):
            if manager.context.store.known(key).state.has_group:
                manager.maintenance.sweep(key)
    assert [units.group(key) for key in LONG] == ["a.service", "b.service", SHARED, SHARED]
    assert baseline_of(manager.context.store.known(SHARED)) is Quality.LATE


def test_unit_that_gets_an_rmid_takes_its_tasks_and_is_late_with_a_bound(units: Units) -> None:
    os.mkdir(units.path("c.service"))
    burner = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    units.children["c.service"] = burner
    join(units.path("c.service"), burner.pid)
    for key in LONG:
        units.start(key)
    units.tick()
    units.stop("a.service")
    # A sweep of the shared group may come before the unit leaves it.
    rmid_queue.serve(units.host.ctx, lambda key: nullcontext())
    assert units.group("c.service") == "c.service"
    assert units.shared() == ["c.service", "d.service"]
    units.host.manager.maintenance.sweep(SHARED)
    assert units.group("c.service") == "c.service"
    units.tick()
    assert units.shared() == ["d.service"]
    record = units.host.get("c.service")
    assert baseline_of(record) is Quality.LATE
    assert any("had used up to" in reason for reason in verdict(record).reasons), record.first
    # The shared group takes nothing back, and a task that starts outside goes to the unit.
    units.run("c.service")
    for _ in range(2):
        for key in (SHARED, "c.service"):
            units.host.manager.maintenance.sweep(key)
        assert units.group("c.service") == "c.service"
        assert units.host.tree.membership(burner.pid).group == "c.service"
    burner.kill()
    burner.wait()
    reasons = verdict(units.host.get(SHARED)).reasons
    assert not any("of other control groups" in reason for reason in reasons)


def test_shared_group_ends_some_time_after_its_last_member(units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    units.stop("c.service")
    units.stop("d.service")
    units.tick()
    assert units.shared() == []
    assert units.host.get(SHARED).state is State.IDLE
    # A unit that waits again finds the same group.
    units.start("e.service")
    units.tick()
    assert (units.group("e.service"), units.host.get(SHARED).generation) == (SHARED, 1)
    units.stop("e.service")
    monkeypatch.setattr(overflow, "LINGER_S", 0.0)
    units.tick()
    assert units.host.get(SHARED).state is State.COMPLETED
    assert units.host.tree.free_rmids() == 2


def test_without_a_budget_no_group_is_shared_and_a_reload_ends_it(units: Units) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    assert units.shared() == ["c.service", "d.service"]
    units.host.ctx.config.settings = Settings(reserve=1, overflow=0)
    units.tick()
    assert units.host.get(SHARED).state is State.COMPLETED
    # Its RMID is one for a unit now.
    units.tick()
    assert [units.group(key) for key in LONG] == ["a.service", "b.service", "c.service", ""]
    assert read(units.host.ctx, "d.service")[2] == []


def test_no_more_groups_are_shared_than_the_budget(tmp_path: Path, cgroup: str, process: Start) -> None:
    with few(tmp_path, cgroup, process, rmids=6, profile="intel-rdt") as units:
        units.host.make_class("gold")
        for key in LONG:
            units.start(key)
        units.run("user-1000:e.service")
        units.start("user-1000:e.service", user="1000")
        units.run("f.service", "gold")
        units.start("f.service")
        for _ in range(2):
            units.tick()
        assert units.host.ctx.store.get("overflow@user-1000.slice") is None
        assert (units.group("user-1000:e.service"), units.group("f.service")) == ("", "")
        assert units.host.tree.membership(units.children["f.service"].pid) == Membership("gold", "")
        assert units.host.tree.free_rmids() == 1
        assert units.shared() == ["c.service", "d.service"]


def test_each_class_and_user_has_a_shared_group_of_its_own(tmp_path: Path, cgroup: str, process: Start) -> None:
    with few(tmp_path, cgroup, process, rmids=9, shared=3, profile="intel-rdt") as units:
        units.host.make_class("gold")
        for key in ("a.service", "b.service", "c.service"):
            units.start(key)
        units.run("user-1000:e.service")
        units.start("user-1000:e.service", user="1000")
        units.run("f.service", "gold")
        units.start("f.service")
        units.start("g.service")
        for _ in range(2):
            units.tick()
        where = {key: units.host.tree.membership(child.pid) for key, child in units.children.items()}
        assert where["user-1000:e.service"] == Membership("", "overflow@user-1000.slice")
        assert where["f.service"] == Membership("gold", SHARED)
        assert where["g.service"] == Membership("", SHARED)
        assert sorted(group.class_ for group in units.host.get(SHARED).existing_groups) == [
            "",
            "gold",
        ]


def test_slice_that_is_counted_has_the_units_in_it(units: Units) -> None:
    """The group of the slice counts them already."""
    os.makedirs(units.path("web.slice"))
    units.children["web.slice"] = units.process()
    join(units.path("web.slice"), units.children["web.slice"].pid)
    units.start("web.slice")
    units.start("a.service")
    inner = "web.slice/b.service"
    units.run(inner)
    request = Assignment(
        key="b.service", owner=SYSTEMD, cgroup=units.path(inner), kind="unit", member="b.service", priority=-1
    )
    assign(units.host.ctx, request)
    units.tick()
    units.host.manager.maintenance.sweep("web.slice")
    assert units.host.ctx.store.get(SHARED) is None
    assert units.group(inner) == "web.slice"
    join(units.top, units.children.pop(inner).pid)
    os.rmdir(units.path(inner))


def test_container_that_starts_in_the_shared_group_is_exact(units: Units) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    init = units.process()
    join(units.path("c.service"), init.pid)
    units.host.manager.maintenance.sweep(SHARED)
    assert units.host.tree.membership(init.pid).group == SHARED
    record = assign(units.host.ctx, assignment(UID, init.pid, "oci", member="c1")).workload
    assert (record.state, baseline_of(record)) == (State.ACTIVE, Quality.EXACT)
    for _ in range(2):
        units.host.manager.maintenance.sweep(SHARED)
        assert units.host.tree.membership(init.pid).group == UID
    join(units.top, init.pid)


def test_restarted_unit_returns_to_the_shared_group(units: Units) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    child = units.children["c.service"]
    child.kill()
    child.wait()
    units.tick()
    assert units.shared() == ["d.service"]
    units.run("c.service")
    units.tick()
    assert (units.group("c.service"), units.shared()) == (SHARED, ["c.service", "d.service"])


def test_units_that_a_reload_deselects_leave_the_shared_group(units: Units) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    release(units.host.ctx, "c.service", owner=SYSTEMD)
    units.tick()
    assert units.group("c.service") == ""
    assert units.shared() == ["d.service"]


def test_start_after_a_kill_keeps_the_shared_group(units: Units) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    units.host.restart()
    units.tick()
    assert [units.group(key) for key in LONG] == ["a.service", "b.service", SHARED, SHARED]
    assert units.host.get(SHARED).generation == 1


def test_shared_group_that_another_program_removed_is_created_before_waiting_units_get_one(units: Units) -> None:
    for key in LONG:
        units.start(key)
    units.tick()
    manager = units.host.manager
    os.rmdir(units.host.tree.full_path(manager.context.store.known(SHARED).first.ref))
    manager.context.config.settings = Settings(reserve=4, overflow=1)
    deadline = time.monotonic() + 60
    while manager.context.store.known(SHARED).state is not State.PENDING:
        assert time.monotonic() < deadline
        units.tick()
    assert units.group("c.service") == ""
    manager.context.config.settings = Settings(reserve=1, overflow=1)
    units.tick()
    assert [units.group(key) for key in LONG] == ["a.service", "b.service", SHARED, SHARED]
    assert manager.context.store.known(SHARED).generation == 2


def test_client_that_has_the_key_keeps_it(units: Units) -> None:
    create(units.host.ctx, SHARED, owner="me")
    for key in LONG:
        units.start(key)
    units.tick()
    assert [claim.owner for claim in units.host.get(SHARED).claims] == ["me"]
    assert "a client has claimed the key" in units.host.manager.problems[0]
    release(units.host.ctx, SHARED, owner="me")


def test_storm_of_restarts_leaves_rmids_to_containers_and_no_groups(
    units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"{number:02}.service" for number in range(12)]
    for key in keys:
        units.start(key)
    units.tick()
    for number in range(10):
        for key in keys[2:]:
            units.stop(key)
        for key in keys[2:]:
            units.start(key)
        if number % 3 == 0:
            units.tick()
        box = create(units.host.ctx, f"box{number}", owner="oci")
        assert box.state is State.IDLE
        release(units.host.ctx, box.key, owner="oci")
        assert len(units.host.marked_groups()) <= 3
    units.tick()
    assert len(units.shared()) == 10
    for key in keys:
        units.stop(key)
    monkeypatch.setattr(overflow, "LINGER_S", 0.0)
    units.tick()
    assert units.host.marked_groups() == []


def test_units_between_two_starts_do_not_keep_others_out_of_the_shared_group(
    units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no task, so they cannot join it."""
    monkeypatch.setattr(overflow, "_MOST_JOINS", 1)
    for key in ("a.service", "b.service"):
        units.start(key)
    for key in ("c.service", "d.service"):
        units.start(key)
        child = units.children[key]
        child.kill()
        child.wait()
    units.tick()
    assert [member.id for member in units.host.get("c.service").dormant] == ["c.service"]
    units.start("e.service")
    units.tick()
    assert units.shared() == ["e.service"]
    for key in ("c.service", "d.service"):
        units.run(key)
    for _ in range(2):
        units.tick()
    assert units.shared() == ["c.service", "d.service", "e.service"]


def test_units_that_have_left_the_shared_group_are_forgotten(units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_ENDED_MEMBERS", 2)
    for key in LONG:
        units.start(key)
    units.tick()
    for number in range(5):
        key = f"run-{number}.service"
        units.start(key)
        units.tick()
        child = units.children[key]
        child.kill()
        child.wait()
        units.tick()
        units.stop(key)
        units.tick()
    record = units.host.get(SHARED)
    known = {"c.service", "d.service", "run-3.service", "run-4.service"}
    assert {member.id for member in record.members} == known
