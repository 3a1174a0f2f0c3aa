# SPDX-License-Identifier: Apache-2.0
"""A workload whose end comes while no daemon runs: use that is counted after the end is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.membership import Membership
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment, join

WHY = "its end values were not read at its end: resctrlmond was not running"
# Starts a process that outlives it, and ends with the first byte.
_COMMAND = """
import os, sys
child = os.fork()
if child == 0:
    os.close(1)
    while True:
        pass
print(child, flush=True)
sys.stdin.read(1)
"""


class Command:
    """A command, assigned before it executes, that leaves a busy process behind."""

    def __init__(self, *wrapper: str) -> None:
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-IS", "-c", f"import sys; sys.stdin.read(1){_COMMAND}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=0,
        )

    def begin(self) -> int:
        """Let it execute; the number of the process that it starts."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("x")
        return int(self.process.stdout.readline())

    def end(self) -> None:
        with self.process as ending:
            ending.kill()


@pytest.fixture
def command() -> Iterator[Command]:
    made = Command()
    yield made
    made.end()


def qualities(host: Host, key: str = "k") -> set[Quality]:
    return {total.quality for total in release(host.ctx, key, owner="test").totals}


def reasons(host: Host) -> str:
    return "; ".join(total.reason for total in read(host.ctx, "k")[2])


@pytest.mark.parametrize("ends", [EndRule.MEMBERS, EndRule.CONTAINER])
def test_a_command_that_ended_while_the_daemon_was_stopped_is_estimated(
    host: Host, command: Command, ends: EndRule
) -> None:
    """The use of the process that it left behind was counted until the start, and the total was exact."""
    host.settings = host.ctx.config.settings = Settings(linger_s=600)
    assign(host.ctx, assignment("k", command.process.pid, ends=ends))
    left = command.begin()
    try:
        assert host.tree.membership(left) == Membership("", "k")
        command.end()
        host.restart()
        host.check()
        assert WHY in reasons(host)
        assert qualities(host) == {Quality.ESTIMATED}
        assert f"processes that pid-{command.process.pid} had started" in reasons(host)
    finally:
        os.kill(left, signal.SIGKILL)


def test_command_that_continues_over_a_restart_of_the_daemon_is_exact(host: Host, command: Command) -> None:
    assign(host.ctx, assignment("k", command.process.pid, ends=EndRule.MEMBERS))
    left = command.begin()
    try:
        host.restart()
        command.end()
        host.manager.maintenance.tick()
        assert qualities(host) == {Quality.EXACT}
    finally:
        os.kill(left, signal.SIGKILL)


def test_workload_that_continues_until_its_release_is_exact(host: Host, command: Command) -> None:
    """All tasks that run in the group until then are counted."""
    assign(host.ctx, assignment("k", command.process.pid))
    left = command.begin()
    try:
        command.end()
        host.restart()
        assert qualities(host) == {Quality.EXACT}
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_container_with_a_control_group_that_ended_while_the_daemon_was_stopped_is_exact(
    host: Host, command: Command, cgroup: str
) -> None:
    join(cgroup, command.process.pid)
    host.settings = host.ctx.config.settings = Settings(linger_s=600)
    assign(host.ctx, assignment("k", command.process.pid, own_cgroup=cgroup, ends=EndRule.CONTAINER))
    left = command.begin()
    command.end()
    os.kill(left, signal.SIGKILL)
    while cgroups.is_populated(cgroup):
        pass
    host.restart()
    assert not host.get("k").living
    assert qualities(host) == {Quality.EXACT}


def test_a_pid_namespace_that_ended_while_the_daemon_was_stopped_is_exact(host: Host) -> None:
    command = Command("unshare", "--pid", "--fork", "--kill-child")
    try:
        [init] = _children(command.process.pid)
        record = assign(host.ctx, assignment("k", init, ends=EndRule.MEMBERS)).workload
        assert record.members[0].init
        command.begin()
    finally:
        command.end()
    while os.path.exists(f"/proc/{init}"):
        pass
    host.restart()
    assert qualities(host) == {Quality.EXACT}


def _children(pid: int) -> list[int]:
    while True:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            if found := file.read().split():
                return [int(child) for child in found]


def test_a_command_that_ended_before_the_stop_is_estimated_once_its_time_is_over(
    host: Host, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last values are read some seconds after the last member's end, but were read at the next start."""
    assign(host.ctx, assignment("k", command.process.pid, ends=EndRule.MEMBERS))
    left = command.begin()
    try:
        command.end()
        host.manager.maintenance.tick()
        assert host.get("k").state is State.IDLE
        host.restart()
        assert WHY not in reasons(host)
        monkeypatch.setattr("resctrlmond.workloads.groups.claims.MEMBERS_LINGER_S", 0)
        host.restart()
        record = host.get("k")
        assert record.state is State.COMPLETED
        assert {total.quality for total in read(host.ctx, "k")[2]} == {Quality.ESTIMATED}
    finally:
        os.kill(left, signal.SIGKILL)


def test_an_end_that_was_begun_and_not_completed_is_estimated(
    host: Host, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last values are read at the next start, and the process has run on."""
    assign(host.ctx, assignment("k", command.process.pid))
    left = command.begin()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patched:
            patched.setattr(host.ctx.snapshots, "end", killed)
            with pytest.raises(KeyboardInterrupt):
                release(host.ctx, "k", owner="test")
        assert host.get("k").state is State.ENDING
        host.restart()
        assert host.get("k").state is State.COMPLETED
        assert {total.quality for total in read(host.ctx, "k")[2]} == {Quality.ESTIMATED}
        assert WHY in reasons(host)
    finally:
        os.kill(left, signal.SIGKILL)


def test_end_without_a_release_is_estimated_if_processes_may_continue(
    host: Host, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """resctrlctl was killed, or its Release failed: for 10 s, processes of the command were counted, exactly."""
    monkeypatch.setattr("resctrlmond.workloads.groups.claims.MEMBERS_LINGER_S", 0.0)
    assign(host.ctx, assignment("k", command.process.pid, "run", ends=EndRule.MEMBERS))
    left = command.begin()
    command.end()
    host.manager.tick()
    os.kill(left, signal.SIGKILL)
    record, _, totals = read(host.ctx, "k")
    assert record.state is State.COMPLETED
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all("its end values were not read at its end" in total.reason for total in totals)
    host.check()


def test_an_end_that_failed_and_is_completed_later_is_estimated(host: Host, command: Command) -> None:
    assign(host.ctx, assignment("k", command.process.pid, "run", ends=EndRule.MEMBERS))
    left = command.begin()
    command.end()
    blocked = os.path.join(host.run, "groups", "k", "checkpoint")
    os.mkdir(blocked)
    with pytest.raises(NotWritten):
        release(host.ctx, "k", owner="run")
    os.rmdir(blocked)
    host.manager.tick()
    os.kill(left, signal.SIGKILL)
    record, _, totals = read(host.ctx, "k")
    assert record.state is State.COMPLETED
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    host.check()


def test_members_of_a_lost_run_end_with_its_last_claim(host: Host, command: Command) -> None:
    """They were shown as living for as long as the run was listed."""
    record = assign(host.ctx, assignment("k", command.process.pid, "run", ends=EndRule.MEMBERS)).workload
    os.rmdir(host.tree.full_path(record.first.ref))
    host.manager.tick()
    assert host.get("k").is_interrupted
    released = release(host.ctx, "k", owner="run").workload
    assert (released.state, released.living, released.claims) == (State.LOST, (), ())


def test_totals_stay_exact_while_another_claim_keeps_the_run(
    host: Host, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resctrlmond.workloads.groups.claims.MEMBERS_LINGER_S", 0.0)
    assign(host.ctx, assignment("k", command.process.pid, "run", ends=EndRule.MEMBERS))
    create(host.ctx, "k", owner="cli")
    left = command.begin()
    command.end()
    host.manager.tick()
    record, _, totals = read(host.ctx, "k")
    assert [claim.owner for claim in record.claims] == ["cli"]
    assert {total.quality for total in totals} == {Quality.EXACT}
    os.kill(left, signal.SIGKILL)
