# SPDX-License-Identifier: Apache-2.0
"""Use outside the groups, and of others in them, that no search finds: the witness has counted it.

All of it with real processes in real control groups, and the witness of the simulation.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resctrlmond.resctrl import cgroups, kernel_files, processes
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.witness import Ids
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.figures import verdict
from resctrlmond.workloads.figures.reasons import text_of
from resctrlmond.workloads.figures.verdict import baseline_of, outside_ns_of
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import canonical_key
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.profiles.requests import Assignment, UnitCommand
from resctrlmond.workloads.upkeep import maintenance
from resctrlmond.workloads.verbs import excluded
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.wait import wait_until
from tests.workloads.conftest import UID, Host, assignment, drop_removed, join, machine, own_host
from tests.workloads.evidence.test_interference import react, write
from tests.workloads.test_no_descriptors import left

CTR, POD, SERVICE = "4d" * 32, canonical_key(UID), "a.service"
FIRST, SECOND, THIRD = "1" * 64, "2" * 64, "3" * 64
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


@pytest.fixture
def control(simulation: str) -> Iterator[Control]:
    """Return the controls of the simulation, and load the witness again after the test."""
    made = Control(simulation)
    yield made
    made.set_witness(restart=True)


def session(cgroup: str, seconds: float) -> None:
    """Join the control group, use that much CPU time, and end."""
    subprocess.run([sys.executable, "-c", _SESSION, cgroup, str(seconds)], check=True)


def count(host: Host) -> None:
    """Let the simulation count the use in control groups that are about to be removed, as the kernel does."""
    Path(host.mountpoint, ".witness", "ended").read_text()


def assign_init(host: Host, init: Init) -> None:
    given = assignment(CTR, init.process.pid, "oci", member="c1", own_cgroup=init.cgroup, late=False)
    assert not assign(host.ctx, given).workload.members[0].late


def figures(host: Host, key: str = CTR) -> tuple[Quality, str]:
    """Return the quality of the totals of a workload now, and their reason."""
    totals = read(host.ctx, key)[2]
    (found,) = {(total.quality, total.reason) for total in totals}
    return found


def released(host: Host, key: str = CTR) -> tuple[Quality, str]:
    (found,) = {(total.quality, total.reason) for total in release(host.ctx, key, owner="oci").totals}
    return found


def seconds_outside(reason: str) -> float:
    found = re.fullmatch(
        r"tasks in its control groups used (\d+\.\d+) s of CPU time outside the group, \d+\.\d % of their CPU time",
        reason,
    )
    assert found is not None, reason
    return float(found[1])


def check_late(found: tuple[Quality, str]) -> None:
    quality, why = found
    assert quality is Quality.LATE, found
    assert "of CPU time outside the group" in why


# -- processes that join a container


@pytest.mark.parametrize("meanwhile", ["nothing", "restart of the daemon"])
def test_process_that_joined_and_ended_is_late_by_its_use(host: Host, init: Init, meanwhile: str) -> None:
    """It was missing, and the total was exact."""
    assign_init(host, init)
    host.manager.maintenance.sweep(CTR)
    assert figures(host) == (Quality.EXACT, "")
    session(init.cgroup, 0.3)
    if meanwhile == "restart of the daemon":
        host.restart()
    quality, why = figures(host)
    assert (quality, host.get(CTR).state) == (Quality.LATE, State.ACTIVE)
    # The start of its interpreter, too, may be in it.
    used = seconds_outside(why)
    assert 0.3 <= used < 1.5
    session(init.cgroup, 1.0)
    assert seconds_outside(figures(host)[1]) >= used + 1.0
    check_late(released(host))


def test_sweep_records_use_outside(host: Host, init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quality file is late although no caller reads the workload."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    assign_init(host, init)
    session(init.cgroup, 0.3)
    host.manager.maintenance.tick()
    assert outside_ns_of(host.get(CTR).proof) > 0.3e9
    assert "late" in host.ctx.snapshots.quality(CTR)
    host.check()


def test_short_sessions_are_saved_only_when_their_cpu_time_has_doubled(
    host: Host, init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each exec probe wrote the record and the quality anew."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    assign_init(host, init)
    session(init.cgroup, 1.0)
    host.manager.maintenance.tick()
    before = host.get(CTR).proof
    for _ in range(3):
        session(init.cgroup, 0.05)
        host.manager.maintenance.tick()
    assert host.get(CTR).proof == before
    session(init.cgroup, 1.5)
    host.manager.maintenance.tick()
    assert outside_ns_of(host.get(CTR).proof) > 2 * outside_ns_of(before)


def test_container_that_ended_with_a_session_while_no_daemon_ran(host: Host, init: Init) -> None:
    given = assignment(CTR, init.process.pid, "oci", member="c1", kind="container", own_cgroup=init.cgroup)
    assign(host.ctx, given)
    host.manager.maintenance.sweep(CTR)
    session(init.cgroup, 0.3)
    init.process.kill()
    init.process.wait()
    count(host)
    os.rmdir(init.cgroup)
    host.restart()
    host.manager.tick()
    assert host.get(CTR).state is State.COMPLETED
    check_late(figures(host))


def test_container_that_ended_while_no_daemon_ran_stays_exact(host: Host, init: Init) -> None:
    given = assignment(CTR, init.process.pid, "oci", member="c1", kind="container", own_cgroup=init.cgroup)
    assign(host.ctx, given)
    init.do("burn(0.2)")
    init.process.kill()
    init.process.wait()
    host.restart()
    host.manager.tick()
    assert host.get(CTR).state is State.COMPLETED
    assert figures(host)[0] is Quality.EXACT


ENDS = {
    "its process": "fork(lambda: time.sleep(600)); os.kill(os.getpid(), 9)",
    "its first thread": "threading.Thread(target=time.sleep, args=(600,)).start(); ctypes.CDLL(None).pthread_exit(0)",
}


@pytest.mark.parametrize("meanwhile", ["nothing", "tick", "restart of the daemon"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_process_that_joins_a_container_after_the_end_of_its_init_is_late(
    host: Host, init: Init, end: str, meanwhile: str
) -> None:
    """Such processes were not looked for any more."""
    given = assignment(CTR, init.process.pid, "oci", member="c1", kind="container", own_cgroup=init.cgroup)
    assign(host.ctx, given)
    assert init.process.stdin
    init.process.stdin.write(f"import ctypes; {end}\n")
    init.process.stdin.flush()
    wait_until(lambda: (found := processes.stat(init.process.pid)) is None or found.is_exiting)
    if meanwhile == "tick":
        host.manager.tick()
    elif meanwhile == "restart of the daemon":
        host.restart()
    assert (host.get(CTR).state, figures(host)) == (State.ACTIVE, (Quality.EXACT, ""))
    session(init.cgroup, 0.3)
    check_late(figures(host))
    check_late(released(host))


def test_process_that_is_in_the_container_at_the_release_and_not_in_its_group_is_late(host: Host, init: Init) -> None:
    """The totals were exact if the sweep had not come by."""
    assign_init(host, init)
    session(init.cgroup, 0.05)
    assert released(host)[0] is Quality.LATE


def test_new_run_in_the_control_group_of_the_last_one_detects_joiners(host: Host, init: Init) -> None:
    """Use in the last run hid as much use of processes that joined, and the total was exact."""
    assign_init(host, init)
    init.do("burn(0.6)")
    assert released(host) == (Quality.EXACT, "")
    init.end()
    again = Init(init.cgroup)
    try:
        assign_init(host, again)
        assert figures(host) == (Quality.EXACT, "")
        session(again.cgroup, 0.3)
        check_late(figures(host))
    finally:
        again.end()


def test_new_run_with_the_rmid_of_the_last_one_detects_joiners(tmp_path: Path, init: Init) -> None:
    """The new run continues the row of the witness that has the use in the last one."""
    with own_host(tmp_path, "intel-rdt", 6) as host:
        known: set[Ids | None] = set()
        while True:
            assign_init(host, init)
            init.do("burn(0.05)")
            assert figures(host) == (Quality.EXACT, "")
            ids = host.ctx.proofs.weighed(host.get(CTR)).first.ids
            if ids in known:
                break
            known.add(ids)
            release(host.ctx, CTR, owner="oci")
            time.sleep(0.5)  # for the limbo of RMIDs
        session(init.cgroup, 0.1)
        check_late(figures(host))


def assign_command(host: Host, init: Init) -> None:
    """Put the process of a command of a service into its group, as its call does."""
    command = UnitCommand(commands=(f"ExecStart={init.process.pid}",), most_before_ns=2 * 10**9)
    given = {"member": SERVICE, "kind": "unit", "own_cgroup": init.cgroup, "unit_command": command}
    assign(host.ctx, assignment(SERVICE, init.process.pid, SYSTEMD, **given))


def run_service(host: Host, cgroup: str) -> Ids | None:
    """Run a service for a while, and return the IDs of its group, which has used CPU time."""
    init = Init(cgroup)
    try:
        assign_command(host, init)
        init.do("burn(0.5)")
        assert figures(host, SERVICE) == (Quality.EXACT, "")
    finally:
        init.end()
    release(host.ctx, SERVICE, owner=SYSTEMD)
    return host.get(SERVICE).first.ids


def check_hides_no_joiner(host: Host, cgroup: str) -> Ids | None:
    """Check that a process that joins the service before its next run makes it late."""
    session(cgroup, 0.2)
    init = Init(cgroup)
    try:
        assign_command(host, init)
        check_late(figures(host, SERVICE))
        return host.get(SERVICE).first.ids
    finally:
        init.end()


def test_service_is_exact_after_an_exact_run_in_its_control_group(host: Host, cgroup: str) -> None:
    for _ in range(3):
        run_service(host, cgroup)


def test_run_of_a_service_with_the_rmid_of_an_earlier_one_detects_joiners(tmp_path: Path, cgroup: str) -> None:
    """The last run had seen the use of that one as use outside its own group."""
    with own_host(tmp_path, "intel-rdt", 3) as host:
        host.settings = host.ctx.config.settings = Settings(reserve=0, overflow=0)
        first = run_service(host, cgroup)
        time.sleep(0.5)  # for the limbo of RMIDs
        assert run_service(host, cgroup) != first
        time.sleep(0.5)
        assert check_hides_no_joiner(host, cgroup) == first


def test_service_detects_joiners_after_the_witness_has_dropped_what_its_last_run_used(
    host: Host, cgroup: str, control: Control
) -> None:
    inner, init = Path(cgroup, "inner"), Init(cgroup)
    inner.mkdir()
    try:
        assign_command(host, init)
        init.do(f"os.waitpid(fork(lambda: (open('{inner}/cgroup.procs', 'w').write('0'), burn(0.5))), 0)")
        assert figures(host, SERVICE) == (Quality.EXACT, "")
    finally:
        init.end()
    release(host.ctx, SERVICE, owner=SYSTEMD)
    inner.rmdir()
    count(host)
    drop_removed(host, cgroup)
    check_hides_no_joiner(host, cgroup)


def test_service_detects_joiners_after_the_witness_was_loaded_again(
    host: Host, cgroup: str, control: Control
) -> None:
    """Its sums began again, so use in the last run is not in them."""
    run_service(host, cgroup)
    control.set_witness(restart=True)
    check_hides_no_joiner(host, cgroup)


@pytest.mark.parametrize("meanwhile", ["nothing", "tick"])
@pytest.mark.parametrize("hidden_by", ["what its processes used", "what ran before it was assigned"])
def test_process_that_joined_a_container_that_was_started_again_is_late(
    host: Host, cgroup: str, hidden_by: str, meanwhile: str
) -> None:
    """Its new control group counts from 0, and had to use more than the old one before anything was noticed."""
    first = Init(cgroup)
    if hidden_by == "what ran before it was assigned":
        session(cgroup, 0.6)
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
        assert figures(host) == (Quality.EXACT, "")
        session(cgroup, 0.3)
        check_late(figures(host))
    finally:
        again.end()


def test_process_that_joined_a_container_that_had_used_nothing_is_late(
    host: Host, cgroup: str, process: Start
) -> None:
    """The 0 of its control group was mistaken for a kernel that does not count."""
    init = process()
    os.kill(init.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, init.pid, os.WSTOPPED | os.WNOWAIT)
    join(cgroup, init.pid)
    assert cgroups.cpu_time_ns(cgroup) == 0
    given = assignment(CTR, init.pid, "oci", member="c1", own_cgroup=cgroup, late=False)
    assert baseline_of(assign(host.ctx, given).workload) is Quality.EXACT
    assert figures(host) == (Quality.EXACT, "")
    session(cgroup, 0.3)
    assert seconds_outside(figures(host)[1]) >= 0.3


def test_container_that_is_assigned_again_hides_no_joiner(host: Host, init: Init) -> None:
    """Use of its own tasks in the group is not use before they entered it."""
    assign_init(host, init)
    init.do("burn(0.6)")
    assign_init(host, init)
    session(init.cgroup, 0.3)
    check_late(figures(host))


def test_use_before_the_control_group_hides_no_joiner(host: Host, cgroup: str) -> None:
    init = Init(os.path.dirname(cgroup))
    try:
        init.do("burn(0.5)")
        join(cgroup, init.process.pid)
        init.cgroup = cgroup
        init.do("burn(0.1)")
        assign_init(host, init)
        assert figures(host) == (Quality.EXACT, "")
        session(cgroup, 0.3)
        check_late(figures(host))
    finally:
        init.end()


@pytest.mark.parametrize("runs_on", [False, True])
def test_descendant_that_leaves_the_control_group_hides_no_joiner(
    host: Host, init: Init, cgroup: str, runs_on: bool
) -> None:
    """It is counted with the group's RMID, and looks like a task of others."""
    assign_init(host, init)
    host.manager.maintenance.sweep(CTR)
    other = f"{os.path.dirname(cgroup)}/cgroup.procs"
    outside = f"(open({other!r}, 'w').write(str(os.getpid())), burn(0.6)"
    init.do(
        f"r, w = os.pipe(); fork(lambda: {outside}, os.write(w, b'x'), time.sleep(600))); os.read(r, 1)"
        if runs_on
        else f"os.waitpid(fork(lambda: {outside})), 0)"
    )
    session(init.cgroup, 0.3)
    quality, why = figures(host)
    assert quality is Quality.ESTIMATED
    assert "tasks of other control groups used up to " in why
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
    "children during the read": "threading.Thread(target=lambda: "
    "[os.waitpid(fork(lambda: burn(0.002)), 0) for _ in range(100)]).start()",
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN.keys())
def test_use_of_a_containers_own_processes_is_exact(host: Host, init: Init, own: str) -> None:
    assign_init(host, init)
    for _ in range(3):
        init.do(own)
        for _ in range(3):
            assert figures(host) == (Quality.EXACT, "")
    assert released(host) == (Quality.EXACT, "")


def test_session_that_was_moved_in_counts_from_then_on(host: Host, init: Init, cgroup: str) -> None:
    """Use before is missing, and use in the group is not."""
    assign_init(host, init)
    joined = Init(cgroup)
    try:
        joined.do("burn(0.3)")
        host.manager.maintenance.sweep(CTR)
        before = host.ctx.proofs.weighed(host.get(CTR)).proof
        joined.do("burn(0.6)")
        after = host.ctx.proofs.weighed(host.get(CTR)).proof
        assert figures(host)[0] is Quality.LATE
        assert outside_ns_of(after) < outside_ns_of(before) + 10_000_000
        assert after.inside_ns >= before.inside_ns + 600_000_000
    finally:
        joined.end()


def test_task_that_was_moved_out_is_late_although_it_ended_unseen(host: Host, init: Init, cgroup: str) -> None:
    host.make_class("c1")
    assign_init(host, init)
    child = Init(cgroup)
    try:
        host.manager.maintenance.sweep(CTR)
        write(host, "c1/tasks", child.process.pid)
        child.do("burn(0.3)")
    finally:
        child.end()
    react(host)
    assert released(host)[0] is not Quality.EXACT


def test_probes_that_a_runtime_puts_into_a_class_make_only_their_container_late(
    host: Host, init: Init, pod: Pod, process: Start
) -> None:
    """crun writes them to the tasks of the class, and they end before they are listed: all workloads were doubted."""
    host.make_class("c1")
    steady, commands = pod.start(FIRST), {"in-class": process(), "in-root": process()}
    for pid in (init.process.pid, steady.process.pid, commands["in-class"].pid):
        write(host, "c1/tasks", pid)
    assign_init(host, init)
    pod.assign(host, FIRST)
    for key, command in commands.items():
        assign(host.ctx, assignment(key, command.pid, "oci"))
    classes = [host.get(key).first.class_ for key in (CTR, UID, *commands)]
    assert classes == ["c1", "c1", "c1", ""]
    probe = f"echo $$ >{init.cgroup}/cgroup.procs; echo $$ >{host.mountpoint}/c1/tasks; i=0; "
    probe += "while [ $i -lt 10000 ]; do i=$((i+1)); done; exec true"
    for _ in range(3):
        subprocess.run(["sh", "-c", probe], check=True)
        steady.do("burn(0.01)")
        react(host)
        host.manager.tick()
        check_late(figures(host))
        for key in (UID, *commands):
            assert figures(host, key) == (Quality.EXACT, ""), key
    check_late(released(host))
    for key in (UID, *commands):
        assert released(host, key) == (Quality.EXACT, ""), key


def test_task_of_another_control_group_in_the_group_is_estimated(host: Host, init: Init, cgroup: str) -> None:
    """It came and ended while no daemon looked."""
    assign_init(host, init)
    other = Init(os.path.dirname(cgroup))
    try:
        write(host, f"mon_groups/{CTR}/tasks", other.process.pid)
        other.do("burn(0.3)")
    finally:
        other.end()
    host.restart()
    quality, why = figures(host)
    assert quality is Quality.ESTIMATED
    assert "tasks of other control groups used up to " in why
    assert released(host)[0] is Quality.ESTIMATED


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
def test_control_group_that_does_not_count_cpu_time_is_estimated(
    host: Host, cgroup_v1: str, process: Start, is_container: bool
) -> None:
    if is_container:
        child = process()
        join(cgroup_v1, child.pid)
        assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1", own_cgroup=cgroup_v1))
    else:
        assign(host.ctx, assignment(CTR, None, "oci", member="c1", cgroup=cgroup_v1))  # type: ignore[arg-type]
    quality, why = figures(host)
    assert quality is Quality.ESTIMATED
    assert "the control group of c1 does not count CPU time, as in version 1" in why
    assert released(host)[0] is Quality.ESTIMATED


# -- the witness


def check_not_witnessed(found: tuple[Quality, str], cause: str) -> None:
    assert found[0] is Quality.ESTIMATED, found
    assert found[1].startswith("tasks may have used CPU time outside the group, or others in it: "), found
    assert cause in found[1]


@pytest.mark.parametrize("found_by", ["read", "sweep", "release", "start"])
def test_witness_that_was_loaded_again_during_the_run(
    host: Host, init: Init, control: Control, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    assign_init(host, init)
    assert figures(host) == (Quality.EXACT, "")
    control.set_witness(restart=True)
    if found_by == "sweep":
        host.manager.maintenance.tick()
        assert host.get(CTR).proof.cause
    elif found_by == "start":
        host.restart()
    found = released(host) if found_by == "release" else figures(host)
    check_not_witnessed(found, "resctrlmond-witness was loaded again during the run")


def test_run_that_begins_without_a_witness(host: Host, init: Init, control: Control) -> None:
    control.set_witness(available=False)
    assign_init(host, init)
    check_not_witnessed(figures(host), "resctrlmond-witness had not been loaded when the run began")
    control.set_witness()  # what it has seen meanwhile does not help
    check_not_witnessed(released(host), "resctrlmond-witness had not been loaded when the run began")


def test_next_run_has_a_witness_again(host: Host, init: Init, control: Control) -> None:
    control.set_witness(available=False)
    assign_init(host, init)
    release(host.ctx, CTR, owner="oci")
    control.set_witness()
    assign_init(host, init)
    assert released(host) == (Quality.EXACT, "")


@pytest.mark.parametrize("at", ["a read", "the end"])
def test_witness_that_is_unloaded_during_the_run(host: Host, init: Init, control: Control, at: str) -> None:
    assign_init(host, init)
    control.set_witness(available=False)
    check_not_witnessed(figures(host) if at == "a read" else released(host), "cannot read what the witness has seen")


def test_process_tree_needs_a_witness(host: Host, process: Start, control: Control) -> None:
    """Its tasks inherit its RMID, but nothing else shows that no other program has moved one."""
    control.set_witness(available=False)
    assign(host.ctx, assignment("tree", process().pid, "oci"))
    host.manager.maintenance.tick()
    check_not_witnessed(figures(host, "tree"), "had not been loaded")
    check_not_witnessed(released(host, "tree"), "had not been loaded")


def test_full_table_of_the_witness_is_a_gap(host: Host, init: Init, control: Control) -> None:
    assign_init(host, init)
    assert figures(host) == (Quality.EXACT, "")
    control.set_witness(rows=0)
    init.do("os.waitpid(fork(lambda: burn(0.1)), 0)")
    check_not_witnessed(figures(host), "could not record something")
    check_not_witnessed(released(host), "could not record something")


def session_below(host: Host, init: Init, seconds: float) -> None:
    """Run a session in a control group below that of the container, and remove that control group."""
    inner = Path(init.cgroup, "session")
    inner.mkdir()
    session(str(inner), seconds)
    count(host)
    inner.rmdir()
    count(host)


def test_use_that_the_witness_dropped_while_no_daemon_ran_may_be_missing(
    host: Host, init: Init, control: Control
) -> None:
    """The control group was removed, and the total was exact."""
    assign_init(host, init)
    session_below(host, init, 0.3)
    drop_removed(host, init.cgroup)
    host.restart()
    check_not_witnessed(figures(host), verdict.DROPPED)
    check_not_witnessed(released(host), verdict.DROPPED)


@pytest.mark.parametrize("use_ms", [300, 0])
@pytest.mark.parametrize("is_saved", [True, False])
def test_use_that_the_witness_dropped_after_a_saved_look_is_not_missing(
    tmp_path: Path, init: Init, monkeypatch: pytest.MonkeyPatch, use_ms: int, is_saved: bool
) -> None:
    """With virtual tasks: other programs may remove control groups of this machine after the look."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    if is_saved:
        monkeypatch.setattr(verdict, "_UNSAVED_NS", 0)
    with machine(tmp_path, "intel-rdt") as (host, control):
        control.spawn(tid=init.process.pid)
        assign_init(host, init)
        inner = Path(init.cgroup, "session")
        inner.mkdir()
        tid = control.spawn()
        control.set_cgroup(tid, str(inner))
        control.run(tid, use_ms * 10**6)
        inner.rmdir()
        count(host)
        host.manager.maintenance.tick()
        drop_removed(host, init.cgroup, tid)
        host.restart()
        if use_ms:
            check_late(figures(host))  # this amount was saved
        elif is_saved:
            assert figures(host) == (Quality.EXACT, "")
        else:
            check_not_witnessed(figures(host), verdict.DROPPED)


def test_run_that_begins_after_the_witness_has_dropped_something_is_exact(
    host: Host, init: Init, control: Control
) -> None:
    session_below(host, init, 0.3)
    drop_removed(host, init.cgroup)
    assign_init(host, init)
    assert figures(host) == (Quality.EXACT, "")
    host.restart()
    assert released(host) == (Quality.EXACT, "")


def test_lack_of_descriptors_fails_the_read_only(host: Host, init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    assign_init(host, init)
    with monkeypatch.context() as patched:
        starve(patched)
        with pytest.raises(NotRead, match="EMFILE"):
            read(host.ctx, CTR)
        with pytest.raises(NotRead, match="EMFILE"):
            host.ctx.proofs.weighed(host.get(CTR))
        host.manager.maintenance.tick()
    assert figures(host) == (Quality.EXACT, "")


def test_lack_of_descriptors_at_the_end_hides_no_use(host: Host, init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end fails and is tried again, or its values are not exact."""
    assign_init(host, init)
    session(init.cgroup, 0.3)
    with monkeypatch.context() as patched:
        starve(patched)
        with suppress(NotRead):
            release(host.ctx, CTR, owner="oci")
    for _ in range(3):
        host.manager.tick()
    assert host.get(CTR).state is State.COMPLETED
    assert figures(host)[0] is not Quality.EXACT


def starve(patched: pytest.MonkeyPatch) -> None:
    """Let no file of the witness be opened."""
    read_file = kernel_files.read

    def refuse(path: str) -> bytes:
        if "/.witness/" not in path:
            return read_file(path)
        with left(0):
            return read_file(path)

    patched.setattr("resctrlmond.resctrl.witness.kernel_files.read", refuse)


# -- pods


class Pod:
    """A control group of a pod with containers."""

    def __init__(self, top: str) -> None:
        self.path = Path(top, f"test-pod{UID.replace('-', '_')}.slice")
        self.path.mkdir()
        self._containers: dict[str, Init] = {}

    def start(self, id_: str, host: Host | None = None) -> Init:
        """Start a container; with a ``host``, its hook calls the daemon."""
        path = self.path / f"crio-{id_}.scope"
        path.mkdir()
        made = self._containers[id_] = Init(str(path))
        if host is not None:
            self.assign(host, id_)
        return made

    def assign(self, host: Host, id_: str, owner: str = "oci") -> None:
        init = self._containers[id_]
        given = assignment(
            UID,
            init.process.pid,
            owner,
            member=id_,
            kind="container",
            is_from_runtime=True,
            own_cgroup=init.cgroup,
            pod_cgroup=str(self.path),
        )
        assign(host.ctx, given)

    def end(self, id_: str) -> None:
        """Kill a container, and remove its control group."""
        self._containers.pop(id_).end()
        path = self.path / f"crio-{id_}.scope"
        while path.exists():
            with suppress(OSError):  # EBUSY until the kernel has released the last task
                path.rmdir()

    def remove(self) -> None:
        for id_ in list(self._containers):
            self.end(id_)
        if self.path.exists():
            self.path.rmdir()


@pytest.fixture
def pod(cgroup: str) -> Iterator[Pod]:
    made = Pod(cgroup)
    yield made
    made.remove()


@pytest.mark.parametrize("meanwhile", ["nothing", "restart of the daemon"])
def test_pod_whose_containers_are_all_known_is_exact(host: Host, pod: Pod, meanwhile: str) -> None:
    first, second = pod.start(FIRST, host), pod.start(SECOND, host)
    first.do("burn(0.2)")
    if meanwhile == "restart of the daemon":
        host.restart()
    second.do("burn(0.2)")
    assert figures(host, UID) == (Quality.EXACT, "")
    pod.end(SECOND)  # while no daemon runs
    host.restart()
    third = pod.start(THIRD, host)
    third.do("burn(0.1)")
    host.manager.tick()
    assert figures(host, UID)[0] is Quality.EXACT
    assert released(host, UID)[0] is Quality.EXACT


@pytest.mark.parametrize("meanwhile", ["nothing", "restart of the daemon"])
def test_container_without_a_call_makes_its_pod_late(host: Host, pod: Pod, meanwhile: str) -> None:
    """Its hook was killed, or found no socket. It left no trace, and its pod stayed exact."""
    pod.start(FIRST, host)
    host.manager.tick()
    pod.start(SECOND).do("burn(0.1)")
    pod.end(SECOND)
    if meanwhile == "restart of the daemon":
        host.restart()
    check_late(figures(host, UID))
    check_late(released(host, UID))


def test_container_without_a_call_that_runs_makes_its_pod_late_by_the_next_sweep(
    host: Host, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no task of its members has run since the last one."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    pod.start(FIRST, host)
    for _ in range(3):
        host.manager.tick()
    pod.start(SECOND).do("burn(0.1)")
    host.manager.maintenance.tick()
    assert "late" in host.ctx.snapshots.quality(POD)


def test_container_without_a_call_in_a_pod_whose_other_containers_have_ended(host: Host, pod: Pod) -> None:
    pod.start(FIRST, host)
    pod.end(FIRST)
    pod.start(SECOND).do("burn(0.1)")
    check_late(figures(host, UID))


def test_container_without_a_call_that_had_ended_when_the_pod_began(host: Host, pod: Pod) -> None:
    pod.start(SECOND).do("burn(0.1)")
    pod.end(SECOND)
    pod.start(FIRST, host)
    check_late(figures(host, UID))


def test_container_of_a_pod_that_is_assigned_again_hides_no_other(host: Host, pod: Pod) -> None:
    """After the hook, the NRI plugin assigns it too: what it used in the group was not used before it entered."""
    pod.start(FIRST, host).do("burn(0.6)")
    pod.assign(host, FIRST, "nri")
    assert figures(host, UID) == (Quality.EXACT, "")
    pod.start(SECOND).do("burn(0.3)")
    check_late(figures(host, UID))


def test_next_run_of_a_pod_is_weighed_on_its_own(host: Host, pod: Pod) -> None:
    """A static pod keeps its UID, and its control group what the last run used."""
    pod.start(FIRST, host).do("burn(0.6)")
    pod.start(SECOND).do("burn(0.2)")
    check_late(released(host, UID))
    pod.end(SECOND)
    pod.end(FIRST)
    pod.start(THIRD, host).do("burn(0.1)")
    assert figures(host, UID) == (Quality.EXACT, "")
    pod.start(SECOND).do("burn(0.2)")
    check_late(figures(host, UID))


def test_pod_whose_control_group_was_created_again_while_no_daemon_ran(host: Host, pod: Pod) -> None:
    """A static pod keeps its UID. Its new control group had used less CPU time than the removed one."""
    pod.start(FIRST, host).do("burn(0.3)")
    host.manager.tick()
    pod.remove()
    pod.path.mkdir()
    pod.start(SECOND).do("burn(0.1)")
    count(host)
    pod.end(SECOND)
    host.restart()
    host.manager.tick()
    pod.start(THIRD, host)
    check_late(figures(host, UID))


def test_use_in_a_control_group_of_a_pod_that_was_created_again_is_seen_before_it_is_dropped(
    host: Host, pod: Pod, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before a container in it has called."""
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    monkeypatch.setattr(verdict, "_UNSAVED_NS", 0)
    pod.start(FIRST, host)
    pod.remove()
    pod.path.mkdir()
    pod.start(SECOND).do("burn(0.1)")
    count(host)
    pod.end(SECOND)
    count(host)
    host.restart()
    host.manager.tick()
    drop_removed(host, str(pod.path))
    pod.start(THIRD, host)
    # Control groups of other programs that were removed just now may be dropped too.
    quality, why = figures(host, UID)
    assert quality is not Quality.EXACT
    assert "of CPU time outside the group" in why


def test_pod_that_was_removed_while_no_daemon_ran(host: Host, pod: Pod) -> None:
    pod.start(FIRST, host).do("burn(0.1)")
    pod.start(SECOND).do("burn(0.1)")
    count(host)
    pod.remove()
    host.restart()
    check_late(figures(host, UID))


def test_full_disk_hides_no_use_outside(host: Host, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device")

    monkeypatch.setattr(maintenance, "SWEEP_S", 0.0)
    pod.start(FIRST, host)
    pod.start(SECOND).do("burn(0.1)")
    pod.end(SECOND)
    with monkeypatch.context() as patch:
        patch.setattr("resctrlmond.workloads.records.store.write_file", fill)
        host.manager.maintenance.tick()
    host.restart()
    check_late(figures(host, UID))


def test_pod_that_is_late_already_has_both_reasons(host: Host, pod: Pod) -> None:
    why = excluded.by_profile("x", "quiet")
    pod.start(FIRST, host)
    with host.ctx.store.transaction(POD) as txn:
        excluded.mark_excluded(host.ctx, txn, why)
    pod.start(SECOND).do("burn(0.1)")
    quality, reasons = figures(host, UID)
    assert quality is Quality.LATE
    assert text_of(why) in reasons
    assert "of CPU time outside the group" in reasons


def test_status_states_why_there_is_no_witness(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.write_text("state unavailable\nreason no-btf\ndetail the kernel has no BTF\n")
    monkeypatch.setattr("resctrlmond.resctrl.witness.STATE", str(state))
    assert host.manager.watcher.look().unwitnessed == ""
    monkeypatch.setattr("resctrlmond.resctrl.witness.SIMULATED_FOLDER", "gone")
    host.restart()
    text = host.manager.watcher.look().unwitnessed
    assert text.startswith("no new run is exact without resctrlmond-witness: ")
    assert "the kernel has no BTF. Load it: " in text
    state.unlink()
    assert "No such file" in host.manager.watcher.look().unwitnessed


def test_control_group_that_is_created_again_is_late_by_what_it_used_outside(host: Host, cgroup: str) -> None:
    """As that of a service that restarts. Its processes were taken for strangers, and the totals were estimated."""
    first = Init(cgroup)
    begun = assign(host.ctx, Assignment(key=CTR, owner="admin", cgroup=cgroup))
    first.end()
    assert baseline_of(begun.workload) is Quality.LATE
    count(host)
    os.rmdir(cgroup)
    os.mkdir(cgroup)
    again = Init(cgroup)
    try:
        again.do("burn(0.2)")
        host.manager.maintenance.sweep(CTR)
        again.do("burn(0.3)")
        host.manager.maintenance.sweep(CTR)
        quality, reason = figures(host)
        proof = host.ctx.proofs.weighed(host.get(CTR)).proof
    finally:
        again.end()
    assert quality is Quality.LATE, reason
    assert 200_000_000 <= outside_ns_of(proof) < 400_000_000
    assert proof.inside_ns >= 300_000_000


def test_control_group_that_is_created_again_and_again_does_not_grow_the_record(host: Host, cgroup: str) -> None:
    assign(host.ctx, Assignment(key=CTR, owner="admin", cgroup=cgroup))
    sizes = []
    for number in range(1020):
        os.rmdir(cgroup)
        os.mkdir(cgroup)
        host.manager.maintenance._weigh()
        if number > 1000:
            sizes.append(len(host.get(CTR).proof.cgroups))
    assert set(sizes) == {1000}
    assert "it has had more than" in host.get(CTR).proof.cause
