# SPDX-License-Identifier: Apache-2.0
"""Workloads of systemd units: each task is counted in the innermost workload, and in one that it belongs to."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.membership import Membership
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.errors import AlreadyMonitored
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import UID, Host, assignment, join

Start = Callable[[], "subprocess.Popen[bytes]"]
SLICE, SERVICE = "web.slice", "shop.service"


@pytest.fixture
def service(cgroup: str) -> Iterator[str]:
    """A control group below that of the slice."""
    path = os.path.join(cgroup, SERVICE)
    os.mkdir(path)
    yield path
    for pid in Path(path, "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
    os.rmdir(path)


def unit(host: Host, key: str, cgroup: str) -> Workload:
    request = Assignment(key=key, owner=SYSTEMD, cgroup=cgroup, kind="unit", member=key, priority=-1)
    return assign(host.ctx, request).workload


def group_of(host: Host, child: subprocess.Popen[bytes]) -> str:
    return host.tree.membership(child.pid).group


def sweep(host: Host, *keys: str) -> None:
    for key in keys:
        host.manager.maintenance.sweep(key)


@pytest.mark.parametrize("first", [SLICE, SERVICE])
def test_slice_counts_tasks_that_have_no_unit_of_their_own(
    host: Host, process: Start, cgroup: str, service: str, first: str
) -> None:
    own, other = process(), process()
    join(service, own.pid)
    join(cgroup, other.pid)
    for key, path in sorted([(SLICE, cgroup), (SERVICE, service)], key=lambda pair: pair[0] != first):
        unit(host, key, path)
    for _ in range(2):
        assert (group_of(host, own), group_of(host, other)) == (SERVICE, SLICE)
        sweep(host, SLICE, SERVICE)
    for key in (SLICE, SERVICE):
        record = host.get(key)
        assert (baseline_of(record), record.members[0].tasks_outside) == (Quality.LATE, 0)
    host.check()


def test_task_that_starts_in_the_group_of_the_slice_goes_to_its_unit(
    host: Host, process: Start, cgroup: str, service: str
) -> None:
    """A restarted unit of a user: the user's service manager is in the group of its own unit."""
    first, second = process(), process()
    join(service, first.pid)
    unit(host, SLICE, cgroup)
    unit(host, SERVICE, service)
    host.tree.write_task(host.get(SLICE).first.ref.path, second.pid)
    join(service, second.pid)
    sweep(host, SLICE, SERVICE)
    assert group_of(host, second) == SERVICE
    assert baseline_of(host.get(SLICE)) is Quality.LATE


def test_container_that_starts_in_the_group_of_a_unit_is_exact(host: Host, process: Start, cgroup: str) -> None:
    """The unit is that of its runtime, or the session of the user that starts it."""
    init, runtime = process(), process()
    join(cgroup, runtime.pid)
    join(cgroup, init.pid)
    unit(host, SERVICE, cgroup)
    assert group_of(host, init) == SERVICE
    record = assign(host.ctx, assignment(UID, init.pid, owner="oci", member="c1")).workload
    assert baseline_of(record) is Quality.EXACT
    for _ in range(2):
        assert (group_of(host, init), group_of(host, runtime)) == (UID, SERVICE)
        sweep(host, SERVICE)
    assert host.get(SERVICE).members[0].tasks_outside == 0


@pytest.mark.parametrize("move", [unit, lambda host, key, _: sweep(host, key)], ids=["assign", "sweep"])
def test_container_that_starts_during_a_move_into_its_slice_keeps_its_task(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch, move: Callable[..., object]
) -> None:
    """The runtime puts the task into the control group first, and calls the hook then."""
    pid = process().pid
    unit(host, SLICE, cgroup)
    join(cgroup, pid)
    test = cgroups.member_test

    def start(path: str) -> Callable[[int], bool]:
        """Start the container after the move has listed the task, and before it writes it."""
        monkeypatch.undo()
        record = assign(host.ctx, assignment(UID, pid, owner="oci", member="c1")).workload
        assert baseline_of(record) is Quality.EXACT
        return test(path)

    monkeypatch.setattr(cgroups, "member_test", start)
    move(host, SLICE, cgroup)
    assert cgroups.member_test is test
    assert host.tree.membership(pid).group == UID
    assert baseline_of(host.get(UID)) is Quality.EXACT


def test_task_that_leaves_the_control_group_is_moved_out_of_the_group(
    host: Host, process: Start, cgroup: str
) -> None:
    """A session that a service started was counted in that service for as long as it lasted."""
    daemon, session = process(), process()
    home = Path(f"/proc/{session.pid}/cgroup").read_text()
    above = os.path.dirname(cgroup)
    for child in (daemon, session):
        join(cgroup, child.pid)
    unit(host, SERVICE, cgroup)
    sweep(host, SERVICE)
    assert baseline_of(host.get(SERVICE)) is Quality.LATE
    join(above, session.pid)
    assert Path(f"/proc/{session.pid}/cgroup").read_text() == home
    sweep(host, SERVICE)
    assert host.tree.membership(session.pid) == Membership("", "")
    assert group_of(host, daemon) == SERVICE
    record = host.get(SERVICE)
    sweep(host, SERVICE)
    assert host.get(SERVICE) == record


def test_idle_task_that_left_its_control_group_lowers_no_quality(host: Host, process: Start, cgroup: str) -> None:
    session = process()
    join(cgroup, session.pid)
    unit(host, SERVICE, cgroup)
    join(os.path.dirname(cgroup), session.pid)
    host.manager.maintenance.record_ends(SERVICE)
    assert host.get(SERVICE).state is State.IDLE
    released = release(host.ctx, SERVICE, owner=SYSTEMD)
    # It has used nothing since.
    assert {total.quality for total in released.totals} == {Quality.LATE}


def test_only_tasks_of_units_are_moved_out(host: Host, process: Start, cgroup: str) -> None:
    """Those of an administrator's workload are counted wherever they go, as before."""
    child = process()
    join(cgroup, child.pid)
    unit(host, SERVICE, cgroup)
    assign(host.ctx, Assignment(key=SERVICE, owner="admin", cgroup=cgroup, kind="unit", member=SERVICE))
    join(os.path.dirname(cgroup), child.pid)
    sweep(host, SERVICE)
    assert group_of(host, child) == SERVICE


def test_unit_takes_no_task_of_another_workload(host: Host, process: Start, cgroup: str) -> None:
    mine, free, foreign = process(), process(), process()
    assign(host.ctx, assignment("mine", mine.pid))
    host.tree.write_task(host.make_foreign("theirs").path, foreign.pid)
    for child in (foreign, mine, free):
        join(cgroup, child.pid)
    record = unit(host, SERVICE, cgroup)
    sweep(host, SERVICE)
    assert [group_of(host, child) for child in (mine, free, foreign)] == ["mine", SERVICE, "theirs"]
    record = host.get(SERVICE)
    assert record.members[0].tasks_outside == 1, "that of another program"
    assert baseline_of(host.get("mine")) is Quality.EXACT


def test_control_group_of_another_workload_is_not_assigned_again(host: Host, process: Start, cgroup: str) -> None:
    """A scope of a container would hold an RMID without a task."""
    child = process()
    join(cgroup, child.pid)
    assign(host.ctx, assignment("c1", child.pid, own_cgroup=cgroup))
    with pytest.raises(AlreadyMonitored, match="belongs to workload c1"):
        unit(host, SERVICE, cgroup)
    assert host.ctx.store.get(SERVICE) is None
    release(host.ctx, "c1", owner="test")
    assert unit(host, SERVICE, cgroup).state is State.ACTIVE


def test_client_takes_a_unit_but_no_unit_below_its_control_group(
    host: Host, process: Start, cgroup: str, service: str
) -> None:
    child = process()
    join(service, child.pid)
    unit(host, SERVICE, service)
    with pytest.raises(AlreadyMonitored):
        assign(host.ctx, Assignment(key="mine", owner="me", cgroup=cgroup))
    assign(host.ctx, Assignment(key="mine", owner="me", cgroup=service))
    assert group_of(host, child) == "mine"
    sweep(host, SERVICE, "mine")
    assert group_of(host, child) == "mine"


def test_unit_is_late_also_if_its_tasks_have_ended_before_the_assign(host: Host, cgroup: str) -> None:
    record = unit(host, SERVICE, cgroup)
    assert baseline_of(record) is Quality.LATE


def test_unit_whose_control_groups_cannot_be_listed_ends(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = process()
    join(cgroup, child.pid)
    unit(host, SERVICE, cgroup)
    monkeypatch.setattr("resctrlmond.resctrl.cgroups.MAX_BELOW", 0)
    released = release(host.ctx, SERVICE, owner=SYSTEMD)
    assert released.completed
    assert {total.quality for total in released.totals} == {Quality.LATE}
