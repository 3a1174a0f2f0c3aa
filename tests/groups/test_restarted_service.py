# SPDX-License-Identifier: Apache-2.0
"""A control group that was assigned, as of a service, loses its tasks or goes away, and comes back."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
from collections.abc import Callable

import pytest

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.record import State
from resctrlmond.groups.target import Assignment
from resctrlmond.resctrl.membership import Membership
from tests.groups.conftest import Host, join

Start = Callable[[], "subprocess.Popen[bytes]"]
KEY = "unit.service"


def service(host: Host, cgroup: str, child: subprocess.Popen[bytes] | None = None) -> None:
    if child is not None:
        join(cgroup, child.pid)
    host.manager.assign(Assignment(key=KEY, owner="admin", cgroup=cgroup, kind="unit"))


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
def test_a_service_that_is_restarted_goes_on_late_and_this_is_logged(
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
    host.manager.upkeep.tick()
    stop(cgroup, first, removed=removed)
    if meanwhile == "tick":
        host.manager.upkeep.tick()
        assert host.manager.get(KEY).state is State.IDLE
        assert "are taken in, late" in caplog.text
    elif meanwhile == "restart of the daemon":
        host.restart()
    start(cgroup, second)
    host.manager.upkeep.sweeping.sweep(KEY)
    host.manager.upkeep.tick()
    record = host.manager.get(KEY)
    assert (record.state, record.baseline, record.generation) == (State.ACTIVE, Quality.LATE, 1)
    assert [(member.late, member.lives, member.awaited, member.reason) for member in record.members] == [
        (True, True, False, "")
    ]
    assert host.tree.membership(second.pid) == Membership("", KEY)
    assert "has tasks again" in caplog.text or "moved 1 task" in caplog.text
    stop(cgroup, second)
    host.manager.upkeep.tick()
    assert host.manager.get(KEY).state is State.IDLE
    host.check()


def test_an_empty_control_group_whose_tasks_come_later_is_not_exact(host: Host, process: Start, cgroup: str) -> None:
    child = process()
    service(host, cgroup)
    host.manager.upkeep.tick()
    start(cgroup, child)
    host.manager.upkeep.tick()
    record = host.manager.get(KEY)
    assert (record.state, record.baseline) == (State.ACTIVE, Quality.LATE)
    assert host.tree.membership(child.pid).group == KEY


@pytest.mark.parametrize("how", ["removed as a member", "released by its owner"])
def test_a_control_group_that_nobody_wants_any_more_is_not_taken_back(
    host: Host, process: Start, cgroup: str, how: str
) -> None:
    first, second = process(), process()
    host.manager.create(KEY, owner="another")
    service(host, cgroup, first)
    stop(cgroup, first)
    host.manager.upkeep.tick()
    if how == "removed as a member":
        host.manager.remove_member(KEY, os.path.basename(cgroup))
    else:
        host.manager.release(KEY, owner="admin")
    start(cgroup, second)
    for _ in range(2):
        host.manager.upkeep.tick()
    assert host.manager.get(KEY).state is State.IDLE
    assert host.tree.membership(second.pid).group == ""


def test_a_service_that_is_down_while_its_group_is_lost_is_still_awaited(
    host: Host, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resctrlmond.groups.plan.RESUME_S", 0.0)
    first, second = process(), process()
    service(host, cgroup, first)
    stop(cgroup, first)
    host.manager.upkeep.tick()
    os.rmdir(host.tree.full_path(host.manager.get(KEY).ref))
    for _ in range(2):
        host.manager.upkeep.tick()
    assert (host.manager.get(KEY).state, host.manager.get(KEY).generation) == (State.IDLE, 2)
    start(cgroup, second)
    host.manager.upkeep.tick()
    record = host.manager.get(KEY)
    assert (record.state, record.baseline) == (State.ACTIVE, Quality.LATE)
    assert host.tree.membership(second.pid).group == KEY
