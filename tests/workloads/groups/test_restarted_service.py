# SPDX-License-Identifier: Apache-2.0
"""A control group that was assigned, as of a service, loses its tasks or goes away, and comes back."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.witness import SIMULATED_FOLDER
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import claims
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, State
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, join, own_host, when_all_stand

Start = Callable[[], "subprocess.Popen[bytes]"]
KEY = "unit.service"


def service(host: Host, cgroup: str, child: subprocess.Popen[bytes] | None = None) -> None:
    if child is not None:
        join(cgroup, child.pid)
    assign(host.ctx, Assignment(key=KEY, owner="admin", cgroup=cgroup, kind="unit"))


def stop(cgroup: str, child: subprocess.Popen[bytes], *, removed: bool = True) -> None:
    child.kill()
    child.wait()
    if removed:
        os.rmdir(cgroup)


def start(cgroup: str, child: subprocess.Popen[bytes]) -> None:
    os.makedirs(cgroup, exist_ok=True)
    join(cgroup, child.pid)


@pytest.mark.parametrize(
    ("removed", "meanwhile"), list(itertools.product([True, False], ["tick", "restart of the daemon", "nothing"]))
)
def test_restarted_service_continues_late_and_is_logged(
    host: Host,
    process: Start,
    cgroup: str,
    caplog: pytest.LogCaptureFixture,
    *,
    removed: bool,
    meanwhile: str,
) -> None:
    """Its workload was idle for ever, and nothing was logged."""
    caplog.set_level(logging.INFO, "resctrlmond")
    first, second = process(), process()
    service(host, cgroup, first)
    host.manager.maintenance.tick()
    stop(cgroup, first, removed=removed)
    if meanwhile == "tick":
        host.manager.maintenance.tick()
        assert host.get(KEY).state is State.IDLE
        assert "are moved into the group, late" in caplog.text
    elif meanwhile == "restart of the daemon":
        host.restart()
    start(cgroup, second)
    host.manager.maintenance.sweep(KEY)
    host.manager.maintenance.tick()
    record = host.get(KEY)
    assert (record.state, baseline_of(record), record.generation) == (State.ACTIVE, Quality.LATE, 1)
    assert [(member.late, member.is_living, member.dormant, member.reason) for member in record.members] == [
        (True, True, False, "")
    ]
    assert host.tree.membership(second.pid) == Membership("", KEY)
    assert "has tasks again" in caplog.text or "moved 1 task" in caplog.text
    stop(cgroup, second)
    host.manager.maintenance.tick()
    assert host.get(KEY).state is State.IDLE
    host.check()


def test_an_empty_control_group_whose_tasks_come_later_is_not_exact(host: Host, process: Start, cgroup: str) -> None:
    child = process()
    service(host, cgroup)
    host.manager.maintenance.tick()
    start(cgroup, child)
    host.manager.maintenance.tick()
    record = host.get(KEY)
    assert (record.state, baseline_of(record)) == (State.ACTIVE, Quality.LATE)
    assert host.tree.membership(child.pid).group == KEY


@pytest.mark.parametrize("how", ["removed as a member", "released by its owner"])
def test_control_group_without_a_claim_is_not_assigned_again(
    host: Host, process: Start, cgroup: str, how: str
) -> None:
    first, second = process(), process()
    create(host.ctx, KEY, owner="another")
    service(host, cgroup, first)
    stop(cgroup, first)
    host.manager.maintenance.tick()
    if how == "removed as a member":
        remove_member(host.ctx, KEY, os.path.basename(cgroup))
    else:
        release(host.ctx, KEY, owner="admin")
    start(cgroup, second)
    for _ in range(2):
        host.manager.maintenance.tick()
    assert host.get(KEY).state is State.IDLE
    assert host.tree.membership(second.pid).group == ""


def test_stopped_service_whose_group_is_lost_is_still_watched(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resctrlmond.workloads.groups.resumption.RESUME_S", 0.0)
    first, second = process(), process()
    service(host, cgroup, first)
    stop(cgroup, first)
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(host.get(KEY).first.ref))
    for _ in range(2):
        host.manager.maintenance.tick()
    assert (host.get(KEY).state, host.get(KEY).generation) == (State.IDLE, 2)
    start(cgroup, second)
    host.manager.maintenance.tick()
    record = host.get(KEY)
    assert (record.state, baseline_of(record)) == (State.ACTIVE, Quality.ESTIMATED)
    assert host.tree.membership(second.pid).group == KEY


@pytest.mark.parametrize("when", ["before the first tick", "after a tick"])
def test_a_release_marks_tasks_that_came_to_an_empty_control_group(
    host: Host, process: Start, cgroup: str, when: str
) -> None:
    """The totals were 0 and exact."""
    child = process()
    service(host, cgroup)
    if when == "after a tick":
        host.manager.maintenance.tick()
        assert host.get(KEY).state is State.IDLE
        assert baseline_of(host.get(KEY)) is Quality.EXACT
    start(cgroup, child)
    run_in(cgroup)
    released = release(host.ctx, KEY, owner="admin")
    assert released.completed
    assert {total.quality for total in released.totals} == {Quality.LATE}


@pytest.mark.parametrize("end", ["tick", "restart of the daemon", "end of another member"])
def test_tasks_that_return_are_moved_in_before_the_workload_ends(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The workload ended with an exact total while its tasks ran outside."""
    child = process()
    assign(host.ctx, Assignment(key=KEY, owner="admin", cgroup=cgroup, kind="unit", ends=EndRule.MEMBERS, member="m"))
    host.manager.maintenance.tick()
    assert baseline_of(host.get(KEY)) is Quality.EXACT
    start(cgroup, child)
    monkeypatch.setattr(claims, "MEMBERS_LINGER_S", 0.0)  # its time is over
    if end == "tick":
        host.manager.maintenance.tick()
    elif end == "restart of the daemon":
        host.restart()
    else:
        remove_member(host.ctx, KEY, "another")
    record = host.get(KEY)
    assert (record.state, baseline_of(record)) == (State.ACTIVE, Quality.LATE)
    assert host.tree.membership(child.pid).group == KEY


def run_in(cgroup: str) -> None:
    """Run a process in the control group that ends at once."""
    code = "import sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0')"
    subprocess.run([sys.executable, "-c", code, cgroup], check=True)


@pytest.mark.parametrize("found_by", ["first tick", "later tick", "release", "release after a tick", "next assign"])
def test_a_task_that_ran_and_ended_in_an_empty_control_group_makes_it_late(
    host: Host, cgroup: str, found_by: str
) -> None:
    """It was not detected, and the total was 0 and exact."""
    service(host, cgroup)
    if found_by in ("later tick", "release after a tick", "next assign"):
        host.manager.maintenance.tick()
        assert host.get(KEY).dormant
        assert baseline_of(host.get(KEY)) is Quality.EXACT
    run_in(cgroup)
    if found_by.startswith("release"):
        totals = release(host.ctx, KEY, owner="admin").totals
        assert {total.quality for total in totals} == {Quality.LATE}
        return
    if found_by == "next assign":
        service(host, cgroup)
    else:
        host.manager.maintenance.tick()
    totals = read(host.ctx, KEY)[2]
    assert {total.quality for total in totals} == {Quality.LATE}
    assert "of CPU time outside the group, 100.0 % of their CPU time" in totals[0].reason


def test_an_empty_control_group_in_which_nothing_runs_stays_exact(host: Host, cgroup: str) -> None:
    run_in(cgroup)
    service(host, cgroup)
    for _ in range(3):
        host.manager.maintenance.tick()
    host.restart()
    host.manager.maintenance.tick()
    totals = release(host.ctx, KEY, owner="admin").totals
    assert {total.quality for total in totals} == {Quality.EXACT}


@pytest.mark.parametrize("found_by", ["tick", "release", "release after a tick"])
@pytest.mark.parametrize("is_created_again", [True, False])
def test_a_removed_control_group_in_which_tasks_may_have_run_is_late(
    host: Host, cgroup: str, is_created_again: bool, found_by: str
) -> None:
    """Its path had another control group meanwhile."""
    service(host, cgroup)
    if found_by != "release":
        host.manager.maintenance.tick()
    os.rmdir(cgroup)
    os.mkdir(cgroup)
    run_in(cgroup)
    # The simulator knows a control group when it has looked at it.
    Path(host.mountpoint, SIMULATED_FOLDER, "tasks").read_bytes()
    if not is_created_again:
        os.rmdir(cgroup)
    if found_by == "tick":
        host.manager.maintenance.tick()
    assert {total.quality for total in release(host.ctx, KEY, owner="admin").totals} == {Quality.LATE}


def test_use_in_a_control_group_that_replaced_one_counts_after_the_next_assign(host: Host, cgroup: str) -> None:
    """It was taken for use before the run."""
    service(host, cgroup)
    os.rmdir(cgroup)
    os.mkdir(cgroup)
    run_in(cgroup)
    Path(host.mountpoint, SIMULATED_FOLDER, "tasks").read_bytes()
    service(host, cgroup)
    assert {total.quality for total in release(host.ctx, KEY, owner="admin").totals} == {Quality.LATE}


def test_a_task_that_ran_and_ended_in_an_empty_control_group_after_a_wait_for_an_rmid(
    tmp_path: Path, cgroup: str
) -> None:
    """The member had not entered the group at its Assign."""
    with own_host(tmp_path, "intel-rdt", 2) as host:
        foreign = host.make_foreign("foreign")
        service(host, cgroup)
        assert host.get(KEY).state is State.PENDING
        os.rmdir(host.tree.full_path(foreign))
        when_all_stand(host, KEY)
        for _ in range(2):
            host.manager.maintenance.tick()
        run_in(cgroup)
        host.manager.maintenance.tick()
        assert Quality.EXACT not in {total.quality for total in read(host.ctx, KEY)[2]}
        assert Quality.EXACT not in {total.quality for total in release(host.ctx, KEY, owner="admin").totals}
