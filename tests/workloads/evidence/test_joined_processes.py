# SPDX-License-Identifier: Apache-2.0
"""Processes that join a container from outside and end before a check: detected by the CPU time that they used.

All of it with real processes in real control groups: how finely the kernel adds up is what decides.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl import cgroups, cpu_time
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tree import Tree
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment, join
from tests.workloads.evidence.test_interference import react, write
from tests.workloads.test_no_descriptors import left

CTR = "4d" * 32
Start = Callable[[], "subprocess.Popen[bytes]"]

# Executes each line that it is given, and answers.
_INIT = """
import os, signal, sys, threading, time

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def fork(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid

for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
# A session, as of podman exec: its parent is not in the container.
_SESSION = """
import os, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
end = time.process_time() + float(sys.argv[2])
while time.process_time() < end:
    pass
"""


class Init:
    """The first process of a container, in a control group of its own."""

    def __init__(self, cgroup: str) -> None:
        self.cgroup = cgroup
        self.process = subprocess.Popen(
            [sys.executable, "-c", _INIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        join(cgroup, self.process.pid)
        self.do("pass")

    def do(self, line: str) -> None:
        """Have it execute a line of Python."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def init(cgroup: str) -> Iterator[Init]:
    made = Init(cgroup)
    yield made
    made.end()


def session(cgroup: str, seconds: float) -> None:
    """Join the control group, use that much CPU time, and end."""
    subprocess.run([sys.executable, "-c", _SESSION, cgroup, str(seconds)], check=True)


def assign_init(host: Host, init: Init) -> None:
    given = assignment(CTR, init.process.pid, "oci", member="c1", own_cgroup=init.cgroup, late=False)
    assert assign(host.ctx, given).workload.first.baseline is Quality.EXACT


def reason(host: Host) -> str:
    totals = read(host.ctx, CTR)[2]
    assert {total.quality for total in totals} == {host.get(CTR).first.baseline}
    (found,) = {total.reason for total in totals}
    return found


def reported_cpu_time(text: str) -> float:
    found = re.fullmatch(
        r"processes that joined c1 from outside and ended used at least (\d+\.\d\d) s of CPU time: "
        r"their use is not counted",
        text,
    )
    assert found is not None, text
    return float(found[1])


def test_a_new_run_in_the_control_group_of_the_last_one_detects_joiners(host: Host, init: Init) -> None:
    """The CPU times of the last run's init hid as much use by processes that joined, and the total was exact."""
    assign_init(host, init)
    init.do("burn(0.6)")
    host.manager.maintenance.sweep(CTR)
    release(host.ctx, CTR, owner="oci")
    init.end()
    again = Init(init.cgroup)
    try:
        assign_init(host, again)
        session(again.cgroup, 0.3)
        host.manager.maintenance.sweep(CTR)
        assert host.get(CTR).first.baseline is Quality.LATE
    finally:
        again.end()


@pytest.mark.parametrize("meanwhile", ["nothing", "restart of the daemon"])
def test_process_that_joined_and_ended_between_two_checks_is_detected(host: Host, init: Init, meanwhile: str) -> None:
    """It was missing, and the total was exact."""
    assign_init(host, init)
    host.manager.maintenance.sweep(CTR)
    assert host.get(CTR).first.baseline is Quality.EXACT
    session(init.cgroup, 0.3)
    if meanwhile == "restart of the daemon":
        host.restart()
    host.manager.maintenance.sweep(CTR)
    record = host.get(CTR)
    assert (record.first.baseline, record.state) == (Quality.LATE, State.ACTIVE)
    # The start of its interpreter, too, is in it.
    used = reported_cpu_time(reason(host))
    assert 0.25 < used < 1.5
    session(init.cgroup, 1.0)
    host.manager.maintenance.sweep(CTR)
    assert reported_cpu_time(reason(host)) > used + 0.9


def test_container_that_ended_with_a_session_while_no_daemon_ran(host: Host, init: Init) -> None:
    """Its init was gone at the start, so the CPU time of the session was not searched, and the total was exact."""
    assign(
        host.ctx,
        assignment(
            CTR,
            init.process.pid,
            "oci",
            member="c1",
            kind="container",
            own_cgroup=init.cgroup,
            ends=EndRule.CONTAINER,
            late=False,
        ),
    )
    host.manager.maintenance.sweep(CTR)
    session(init.cgroup, 0.3)
    init.process.kill()
    init.process.wait()
    host.restart()
    host.manager.tick()
    assert host.get(CTR).state is State.COMPLETED
    assert reason(host) == (
        "c1 ended while resctrlmond was not running, so processes that had joined it from outside are not detected"
    )


def test_container_that_runs_on_while_no_daemon_runs_stays_exact(host: Host, init: Init) -> None:
    assign_init(host, init)
    host.restart()
    init.process.kill()
    init.process.wait()
    host.manager.tick()
    assert host.get(CTR).first.baseline is Quality.EXACT


def test_a_process_that_joined_and_ended_is_marked_at_the_release(host: Host, init: Init) -> None:
    assign_init(host, init)
    session(init.cgroup, 0.3)
    totals = release(host.ctx, CTR, owner="oci").totals
    assert {total.quality for total in totals} == {Quality.LATE}


def test_a_process_that_is_in_the_container_at_the_release_and_not_in_its_group_is_marked(
    host: Host, init: Init, process: Start
) -> None:
    """The totals were exact if the sweep had not come by."""
    assign_init(host, init)
    join(init.cgroup, process().pid)
    totals = release(host.ctx, CTR, owner="oci").totals
    assert {total.quality for total in totals} == {Quality.LATE}


def test_short_sessions_are_reported_again_only_when_their_cpu_time_has_doubled(
    host: Host, init: Init, caplog: pytest.LogCaptureFixture
) -> None:
    """Each exec probe wrote the record and the quality anew, was signalled, and logged."""
    caplog.set_level(logging.INFO, "resctrlmond")
    assign_init(host, init)
    session(init.cgroup, 1.0)
    host.manager.maintenance.sweep(CTR)
    record, before = host.get(CTR), reason(host)
    for _ in range(3):
        session(init.cgroup, 0.05)
        host.manager.maintenance.sweep(CTR)
    assert (host.get(CTR), reason(host)) == (record, before)
    session(init.cgroup, 1.5)
    host.manager.maintenance.sweep(CTR)
    assert reported_cpu_time(reason(host)) > 2 * reported_cpu_time(before)
    assert len(host.get(CTR).first.baseline_reasons) == 1
    assert caplog.text.count("joined c1 from outside") == 1


def test_session_that_was_moved_in_is_not_reported_as_uncounted(host: Host, init: Init, process: Start) -> None:
    assign_init(host, init)
    session(init.cgroup, 0.3)
    host.manager.maintenance.sweep(CTR)
    (first,) = host.get(CTR).first.baseline_reasons
    join(init.cgroup, process().pid)
    host.manager.maintenance.sweep(CTR)
    session(init.cgroup, 1.0)  # as if that one used it
    host.manager.maintenance.sweep(CTR)
    assert first in host.get(CTR).first.baseline_reasons


@pytest.mark.parametrize("found_by", ["sweep", "release"])
def test_container_whose_control_groups_cannot_be_searched_is_late(
    host: Host, init: Init, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    """Nothing that joined it was seen, and its totals were exact."""
    assign_init(host, init)
    monkeypatch.setattr(cgroups, "MAX_BELOW", 3)
    below = [f"{init.cgroup}/{number}" for number in range(3)]
    for path in below:
        os.mkdir(path)
    try:
        if found_by == "sweep":
            for _ in range(2):
                host.manager.maintenance.sweep(CTR)
            assert host.get(CTR).first.baseline_reasons == (
                f"processes that join c1 from outside are not detected: {init.cgroup}: "
                "has more than 3 control groups below it, and is not looked through",
            )
        totals = release(host.ctx, CTR, owner="oci").totals
        assert {total.quality for total in totals} == {Quality.LATE}
    finally:
        for path in below:
            os.rmdir(path)


@pytest.mark.parametrize(
    ("number", "quality"),
    [(errno.EACCES, Quality.LATE), (errno.EMFILE, Quality.EXACT), (errno.ENOMEM, Quality.EXACT)],
)
def test_temporary_failure_to_list_a_control_group_marks_nothing(
    host: Host, init: Init, monkeypatch: pytest.MonkeyPatch, number: int, quality: Quality
) -> None:
    assign_init(host, init)

    def refuse(path: str) -> list[int]:
        # root lists every control group, unless systemd runs the daemon in a user namespace (PrivateUsers=).
        raise NotRead("cannot list the control group", path=path, errno=number)

    with monkeypatch.context() as patched:
        patched.setattr(cgroups, "tasks", refuse)
        host.manager.maintenance.sweep(CTR)
    host.manager.maintenance.sweep(CTR)
    record = host.get(CTR)
    assert record.first.baseline is quality
    assert [member.reason for member in record.members] == [""]


@pytest.mark.parametrize("unreadable", ["", "the group", "the task"])
def test_a_task_that_was_moved_out_is_marked_if_its_control_group_cannot_be_listed(
    host: Host, init: Init, process: Start, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    """It was found outside, alive, and ended before the next sweep."""
    host.make_class("c1")
    joined = process()
    join(init.cgroup, joined.pid)
    assign_init(host, init)
    if unreadable == "the group":
        assign(host.ctx, assignment(CTR, process().pid))  # only the group's list shows its descendants
    react(host)
    assert host.get(CTR).first.baseline is Quality.EXACT

    def starve(*_: object) -> list[int]:
        raise NotRead("cannot be read", errno=errno.EMFILE)

    with monkeypatch.context() as patched:
        patched.setattr(cgroups, "tasks", starve)
        if unreadable == "the group":
            patched.setattr(Tree, "tasks", starve)
        elif unreadable == "the task":
            patched.setattr(cgroups, "cgroup_of", starve)
        write(host, "c1/tasks", joined.pid)
        react(host)
    joined.kill()
    joined.wait()
    if unreadable == "the group":
        release(host.ctx, CTR, owner="test")
    totals = release(host.ctx, CTR, owner="oci").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED if unreadable else Quality.LATE}


@pytest.mark.parametrize("ends", ["Release", "a purge"])
def test_a_control_group_that_cannot_be_listed_at_the_end_makes_the_totals_late(
    host: Host, init: Init, process: Start, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """No later sweep finds the process that joined it, and the totals were called exact."""
    assign_init(host, init)
    join(init.cgroup, process().pid)
    tasks = cgroups.tasks

    def starve(path: str) -> list[int]:
        with left(0):
            return tasks(path)

    monkeypatch.setattr(cgroups, "tasks", starve)
    if ends == "Release":
        release(host.ctx, CTR, owner="oci")
    else:
        assert host.manager.release_all() == []
    totals = read(host.ctx, CTR)[2]
    assert {total.quality for total in totals} == {Quality.LATE}
    assert "tasks of c1 may have been outside the group at its end: " in totals[0].reason
    assert "EMFILE" in totals[0].reason


@pytest.mark.parametrize("at", ["the Assign", "the end"])
def test_cpu_time_that_cannot_be_read_leaves_no_exact_total(
    host: Host, init: Init, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The session had ended, and only the CPU time of the control group showed it."""
    of_tree, cpu_time_ns = cpu_time.of_tree, cgroups.cpu_time_ns

    def starve(process: Process) -> cpu_time.TreeTime | None:
        with left(0):
            return of_tree(process)

    def starve_cgroup(path: str) -> int | None:
        with left(0):
            return cpu_time_ns(path)

    if at == "the Assign":
        with monkeypatch.context() as patched:
            patched.setattr(cpu_time, "of_tree", starve)
            with pytest.raises(NotRead, match="EMFILE"):
                assign_init(host, init)
        assert host.ctx.store.all() == []
        return
    assign_init(host, init)
    session(init.cgroup, 0.3)
    monkeypatch.setattr(cgroups, "cpu_time_ns", starve_cgroup)
    totals = release(host.ctx, CTR, owner="oci").totals
    assert {total.quality for total in totals} == {Quality.LATE}
    assert "tasks of c1 may have been outside the group at its end: " in totals[0].reason


@pytest.mark.parametrize("meanwhile", ["nothing", "tick"])
@pytest.mark.parametrize("hidden_by", ["what its processes used", "what ran before it was assigned"])
def test_a_process_that_joined_a_container_that_was_started_again_is_marked(
    host: Host, cgroup: str, hidden_by: str, meanwhile: str
) -> None:
    """Its new control group counts from 0, and had to use more than the old one before anything was noticed."""
    first = Init(cgroup)
    if hidden_by == "what ran before it was assigned":
        session(cgroup, 1.5)
    assign_init(host, first)
    if hidden_by == "what its processes used":
        first.do("burn(1.5)")
    host.manager.maintenance.sweep(CTR)
    first.end()
    if meanwhile == "tick":
        host.manager.maintenance.tick()
    os.rmdir(cgroup)
    os.mkdir(cgroup)
    again = Init(cgroup)
    try:
        assign_init(host, again)
        session(cgroup, 0.3)
        host.manager.maintenance.sweep(CTR)
        assert host.get(CTR).first.baseline is Quality.LATE
    finally:
        again.end()


def test_a_process_that_joined_a_container_that_had_used_nothing_in_its_control_group_is_marked(
    host: Host, cgroup: str, process: Start
) -> None:
    """The 0 of its control group was mistaken for a kernel that does not count, and nothing was searched."""
    init = process()
    os.kill(init.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, init.pid, os.WSTOPPED | os.WNOWAIT)
    join(cgroup, init.pid)
    assert cgroups.cpu_time_ns(cgroup) == 0
    given = assignment(CTR, init.pid, "oci", member="c1", own_cgroup=cgroup, late=False)
    assert assign(host.ctx, given).workload.first.baseline is Quality.EXACT
    session(cgroup, 0.3)
    host.manager.maintenance.sweep(CTR)
    assert reported_cpu_time(reason(host)) > 0.25


@pytest.fixture
def cgroup_v1(tmp_path: Path) -> Iterator[str]:
    """A control group of a hierarchy of version 1."""
    top = tmp_path / "v1"
    top.mkdir()
    subprocess.run(["mount", "-t", "cgroup", "-o", f"none,name=test{os.getpid()}", "none", str(top)], check=True)
    (top / "c1").mkdir()
    try:
        yield str(top / "c1")
    finally:
        (top / "cgroup.procs").write_text((top / "c1" / "cgroup.procs").read_text() or str(os.getpid()))
        (top / "c1").rmdir()
        subprocess.run(["umount", str(top)], check=True)


@pytest.mark.parametrize("is_container", [True, False])
def test_a_control_group_that_does_not_count_cpu_time_is_late(
    host: Host, cgroup_v1: str, process: Start, is_container: bool
) -> None:
    """Tasks that joined it and ended were not detected, and the totals were exact."""
    if is_container:
        child = process()
        join(cgroup_v1, child.pid)
        assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1", own_cgroup=cgroup_v1))
    else:
        assign(host.ctx, assignment(CTR, None, "oci", member="c1", cgroup=cgroup_v1))  # type: ignore[arg-type]
    assert reason(host) == (
        "the control group of c1 does not count CPU time, as in version 1, so tasks that join it and end between two "
        "checks are not detected"
    )
    assert {total.quality for total in release(host.ctx, CTR, owner="oci").totals} == {Quality.LATE}


def test_use_before_the_control_group_does_not_hide_a_joiner(host: Host, cgroup: str) -> None:
    init = Init(os.path.dirname(cgroup))
    try:
        init.do("burn(1.0)")
        join(cgroup, init.process.pid)
        init.cgroup = cgroup
        init.do("burn(0.1)")
        assign_init(host, init)
        session(cgroup, 0.3)
        host.manager.maintenance.sweep(CTR)
        assert reported_cpu_time(reason(host)) > 0.25
    finally:
        init.end()


@pytest.mark.parametrize("runs_on", [False, True])
def test_use_outside_the_control_group_does_not_hide_a_joiner(
    host: Host, init: Init, cgroup: str, runs_on: bool
) -> None:
    """The use of a joined process that had ended was subtracted from it, and the totals were exact."""
    assign_init(host, init)
    host.manager.maintenance.sweep(CTR)
    other = f"{os.path.dirname(cgroup)}/cgroup.procs"
    outside = f"(open({other!r}, 'w').write(str(os.getpid())), burn(0.6)"
    init.do(
        f"r, w = os.pipe(); fork(lambda: {outside}, os.write(w, b'x'), time.sleep(600))); os.read(r, 1)"
        if runs_on
        else f"os.waitpid(fork(lambda: {outside})), 0)"
    )
    session(init.cgroup, 0.2)
    host.manager.maintenance.sweep(CTR)
    assert host.get(CTR).first.baseline is Quality.LATE
    assert re.fullmatch(
        r"processes of c1 used at least 0\.\d\d s of CPU time outside its control group, which hides processes that "
        r"join it from outside and end",
        reason(host),
    ), reason(host)
    if runs_on:
        init.do("os.kill(int(open('/proc/self/task/%d/children' % os.getpid()).read()), 9)")


OWN = {
    "itself": "burn(0.2)",
    "a child that is waited for": "os.waitpid(fork(lambda: burn(0.2)), 0)",
    "a child that runs": "fork(lambda: (burn(0.2), time.sleep(600)))",
    "a child that its parent does not wait for": "fork(lambda: burn(0.2)); time.sleep(0.3)",
    "grandchildren": "os.waitpid(fork(lambda: os.waitpid(fork(lambda: burn(0.2)), 0)), 0)",
    "threads": "t = [threading.Thread(target=burn, args=(0.05,)) for _ in range(5)]; [x.start() for x in t]; "
    "[x.join() for x in t]",
    "many short children": "[os.waitpid(fork(lambda: None), 0) for _ in range(200)]",
    "children during the check": "threading.Thread(target=lambda: "
    "[os.waitpid(fork(lambda: burn(0.002)), 0) for _ in range(100)]).start()",
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN.keys())
def test_use_of_a_containers_own_processes_is_not_a_joiners(host: Host, init: Init, own: str) -> None:
    assign_init(host, init)
    for _ in range(3):
        init.do(own)
        for _ in range(5):
            host.manager.maintenance.sweep(CTR)
            assert host.get(CTR).first.baseline is Quality.EXACT, host.get(CTR).first.baseline_reasons
    totals = release(host.ctx, CTR, owner="oci").totals
    assert {total.quality for total in totals} == {Quality.EXACT}


def test_process_tree_of_an_idle_container_is_not_read(
    host: Host, init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign_init(host, init)
    init.do("burn(0.1)")
    host.manager.maintenance.sweep(CTR)
    walks: list[int] = []
    of_tree = cpu_time.of_tree

    def record(one: Process) -> cpu_time.TreeTime | None:
        walks.append(one.pid)
        return of_tree(one)

    monkeypatch.setattr(cpu_time, "of_tree", record)
    for _ in range(5):
        host.manager.maintenance.sweep(CTR)
    assert walks == []
    init.do("burn(0.1)")
    host.manager.maintenance.sweep(CTR)
    assert walks == [init.process.pid]


def test_container_that_is_late_for_another_reason_is_not_checked(
    host: Host, init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign(host.ctx, assignment(CTR, init.process.pid, "oci", member="c1", own_cgroup=init.cgroup, late=True))
    monkeypatch.setattr(cgroups, "cpu_time_ns", lambda _: pytest.fail("it was read"))
    host.manager.maintenance.sweep(CTR)


def test_cpu_time_of_an_exiting_process_is_unknown(init: Init) -> None:
    """The kernel kills the processes in its PID namespace, and does not add their CPU times."""
    with Process.open(init.process.pid) as held:
        assert cpu_time.of_tree(held) is not None
        os.kill(init.process.pid, 9)
        os.waitid(os.P_PID, init.process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{init.process.pid}/stat").exists()
        assert cpu_time.of_tree(held) is None
