# SPDX-License-Identifier: Apache-2.0
"""Containers whose runtime has created a group for them: read from their start to their end, and never changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api.translate import workload_of
from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.groups import creation
from resctrlmond.workloads.groups.resumption import RESUME_S
from resctrlmond.workloads.model.errors import AlreadyMonitored, ForeignGroup, InvalidClass, NotWritten
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Pool, Quality
from resctrlmond.workloads.model.validation import MAX_ATTRIBUTES
from resctrlmond.workloads.model.workload import EndRule, State
from resctrlmond.workloads.profiles.requests import Assigned, Assignment
from resctrlmond.workloads.verbs import excluded, observed
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import reconcile, release
from tests.commanded import Commanded
from tests.wait import wait_until
from tests.workloads.conftest import UID, Host, assignment, join, machine, own_host
from tests.workloads.evidence.test_interference import wait_until_gone, write

Start = Callable[[], "subprocess.Popen[bytes]"]
ID = "5" * 64
TRAFFIC = "mbm_total_bytes"
APART = f"{ID} is not included: its runtime has its own group for it, so it is a workload of its own"
OWNED = "another program owns the group, and may have moved tasks into or out of it"


def create_as_runtime(host: Host, pid: int, class_: str = "", name: str = ID) -> GroupRef:
    """Create a group for a container and move its init there, as a runtime does."""
    ref = host.make_foreign(name, class_)
    if class_:
        write(host, f"{class_}/tasks", pid)
    write(host, f"{ref.path}/tasks", pid)
    return ref


def start(host: Host, pid: int, key: str = ID, **more: Any) -> Assigned:
    """Call Assign as the hook of a container does."""
    more = {"owner": "oci", "member": ID, "kind": "container", "is_from_runtime": True, **more}
    return assign(host.ctx, assignment(key, pid, **more))


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def total(totals: list[Total]) -> Total:
    return next(of for of in totals if of.event.name == TRAFFIC)


def is_exact(done: Assigned) -> bool:
    return baseline_of(done.workload) is Quality.EXACT


def identity(host: Host, ref: GroupRef) -> tuple[object, ...]:
    """Return what resctrlmond would change of a group of its own."""
    path = host.tree.full_path(ref)
    status = os.stat(path)
    return status.st_ino, status.st_gid, status.st_mtime_ns, sorted(os.listdir(path)), host.tree.tasks(ref)


def test_a_group_of_a_runtime_is_observed_and_never_changed(host: Host, process: Start) -> None:
    child = process()
    ref = create_as_runtime(host, child.pid)
    before = identity(host, ref)
    done = start(host, child.pid, attributes={"container.name": "web"})
    workload = done.workload
    assert (workload.key, workload.state, workload.is_observed) == (ID, State.ACTIVE, True)
    assert (workload.first.ref, baseline_of(workload)) == (ref, Quality.ESTIMATED)
    assert verdict(workload).reasons == (OWNED,)
    assert workload.attributes == {"container.name": "web"}
    assert workload_of(workload, None).observed
    assert host.tree.membership(child.pid) == Membership("", ID)
    host.manager.tick()
    host.manager.maintenance.sweep(ID)
    assert start(host, child.pid).workload.generation == 1  # prestart after createRuntime
    host.check()
    assert identity(host, ref) == before
    # It is not a foreign group twice, and its use is of the pool of foreign groups.
    assert host.manager.watcher.look().foreign == ()
    end(child)
    host.manager.maintenance.record_ends(ID)
    over = host.get(ID)
    assert (over.state, over.claims, over.reason) == (State.COMPLETED, (), "its last member ended")
    assert all(of.quality in (Quality.ESTIMATED, Quality.UNKNOWN) for of in read(host.ctx, ID)[2])
    assert os.path.isdir(host.tree.full_path(ref))
    host.check()


def test_a_group_of_a_runtime_in_a_class_is_observed_there(host: Host, process: Start) -> None:
    host.make_class("gold")
    child = process()
    ref = create_as_runtime(host, child.pid, "gold")
    assert start(host, child.pid).workload.first.ref == ref
    with pytest.raises(ForeignGroup, match="only observed"):
        move(host.ctx, ID, "")
    assert start(host, child.pid).workload.first.ref == ref
    host.check()


@pytest.mark.parametrize(
    "more",
    [{"member": "other"}, {"kind": "process"}, {"member": UID}],
    ids=["of another container", "of no container", "of a pod"],
)
def test_other_groups_of_other_programs_are_not_observed(host: Host, process: Start, more: dict[str, Any]) -> None:
    child = process()
    create_as_runtime(host, child.pid, name=UID if more.get("member") == UID else ID)
    with pytest.raises(AlreadyMonitored):
        start(host, child.pid, **more)
    assert host.ctx.store.all() == []


def test_own_group_with_the_name_of_a_container_is_not_observed(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment(ID, child.pid))
    assert not start(host, child.pid).workload.is_observed


def test_group_in_a_class_whose_name_cannot_be_recorded_is_not_observed(host: Host, process: Start) -> None:
    child, class_ = process(), os.fsdecode(b"od\xffd")
    host.make_class(class_)
    create_as_runtime(host, child.pid, class_)
    with pytest.raises(InvalidClass, match="not allowed"):
        start(host, child.pid)
    assert (host.ctx.store.all(), host.folder("groups")) == ([], [])


def test_nothing_else_is_put_into_an_observed_group(host: Host, process: Start) -> None:
    child, other = process(), process()
    create_as_runtime(host, child.pid)
    start(host, child.pid)
    for member in ("x", ID):
        with pytest.raises(ForeignGroup, match="only observed"):
            assign(host.ctx, assignment(ID, other.pid, member=member))
    assert host.tree.membership(other.pid) == Membership("", "")
    # A claim of another owner neither keeps the workload from ending nor ends it early.
    create(host.ctx, ID, owner="cli")
    release(host.ctx, ID, owner="cli")
    assert host.get(ID).state is State.ACTIVE
    create(host.ctx, ID, owner="cli")
    end(child)
    host.manager.maintenance.record_ends(ID)
    assert host.get(ID).state is State.COMPLETED


def test_a_pod_without_its_observed_container_is_late(host: Host, process: Start) -> None:
    sandbox, child, later = process(), process(), process()
    assert is_exact(assign(host.ctx, assignment(UID, sandbox.pid, "oci")))
    create_as_runtime(host, child.pid)
    done = start(host, child.pid, key=UID)
    assert (done.workload.key, done.workload.attributes["pod.uid"]) == (ID, UID)
    assert baseline_of(host.get(UID)) is Quality.LATE
    assert verdict(host.get(UID)).reasons == (APART,)
    # Also a pod whose group is created later, and by another daemon.
    release(host.ctx, UID, owner="oci")
    host.restart()
    again = assign(host.ctx, assignment(UID, later.pid, "oci", member="later", kind="container"))
    assert APART in verdict(again.workload).reasons
    host.check()


def test_pod_is_late_before_its_container_is_observed(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, child = process(), process()
    assign(host.ctx, assignment(UID, sandbox.pid, "oci"))
    create_as_runtime(host, child.pid)
    exact = []

    def observe(*_arguments: object) -> None:
        exact.append(baseline_of(host.get(UID)) is Quality.EXACT)
        raise ResctrlError("killed")

    monkeypatch.setattr(observed, "observe", observe)
    with pytest.raises(ResctrlError, match="killed"):
        start(host, child.pid, key=UID)
    assert exact == [False]


def test_second_caller_names_the_pod_of_an_observed_container(host: Host, process: Start) -> None:
    """The hook does not know the pod of a container that is not in the control group of a pod, but NRI does."""
    sandbox, child = process(), process()
    assign(host.ctx, assignment(UID, sandbox.pid, "nri"))
    create_as_runtime(host, child.pid)
    start(host, child.pid, attributes={"bundle": "/b"})
    assert baseline_of(host.get(UID)) is Quality.EXACT
    done = start(host, child.pid, UID, owner="nri", is_from_runtime=False, attributes={"pod.containers": "web"})
    assert done.workload.attributes == {"bundle": "/b", "pod.containers": "web", "pod.uid": UID}
    assert [claim.owner for claim in done.workload.claims] == ["oci"]
    assert verdict(host.get(UID)).reasons == (APART,)


def test_callers_may_name_a_process_or_a_control_group(host: Host, process: Start, cgroup: str) -> None:
    """NRI names the control group of a container that runs already, as after a restart of the adapter."""
    child = process()
    join(cgroup, child.pid)
    create_as_runtime(host, child.pid)
    start(host, child.pid)
    late = Assignment(key=UID, owner="nri", cgroup=cgroup, member=ID, kind="container", late=True)
    workload = assign(host.ctx, late).workload
    assert (workload.generation, workload.state) == (1, State.ACTIVE)
    assert [(member.pid, member.cgroup) for member in workload.members] == [(child.pid, cgroup)]


def test_pod_of_an_observed_container_with_many_attributes_is_late(host: Host, process: Start) -> None:
    sandbox, child, later = process(), process(), process()
    assign(host.ctx, assignment(UID, sandbox.pid, "oci"))
    create_as_runtime(host, child.pid)
    start(host, child.pid, UID, attributes={f"label-{number}": "x" for number in range(MAX_ATTRIBUTES)})
    assert verdict(host.get(UID)).reasons == (APART,)
    release(host.ctx, UID, owner="oci")
    host.restart()
    assert APART in verdict(assign(host.ctx, assignment(UID, later.pid)).workload).reasons


def test_any_workload_that_lacks_its_observed_container_is_late(host: Host, process: Start) -> None:
    member, child = process(), process()
    assign(host.ctx, assignment("web", member.pid))
    create_as_runtime(host, child.pid)
    assert start(host, child.pid, "web").workload.key == ID
    assert verdict(host.get("web")).reasons == (APART,)
    release(host.ctx, "web", owner="test")
    assert is_exact(assign(host.ctx, assignment("web", member.pid)))


def test_pods_of_living_observed_containers_are_not_forgotten(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(excluded, "_MAX_PODS", 2)
    child, later = process(), process()
    create_as_runtime(host, child.pid)
    start(host, child.pid, UID)
    for number in range(4):
        other, name = process(), f"{number}" * 64
        create_as_runtime(host, other.pid, name=name)
        start(host, other.pid, f"{number}" * 32, member=name)
        end(other)
        host.manager.maintenance.record_ends(name)
    assert len(host.ctx.memory.excluded) <= 2
    assert APART in verdict(assign(host.ctx, assignment(UID, later.pid)).workload).reasons


def test_owner_of_pods_does_not_end_an_observed_container(host: Host, process: Start) -> None:
    child = process()
    create_as_runtime(host, child.pid)
    assign(
        host.ctx, assignment(UID, child.pid, "nri", member=ID, kind="container", ends=EndRule.RELEASE, attributes={})
    )
    reconcile(host.ctx, "nri", [UID])
    assert host.get(ID).state is State.ACTIVE


def test_a_container_that_ran_before_is_late_too(host: Host, puppet: Commanded) -> None:
    create_as_runtime(host, puppet.pid)
    workload = start(host, puppet.pid, late=None).workload
    assert verdict(workload) == (Quality.ESTIMATED, (f"{ID} ran before it was put into the group", OWNED))


def test_tasks_outside_an_observed_group_are_reported_and_left_there(host: Host, puppet: Commanded) -> None:
    create_as_runtime(host, puppet.pid)
    start(host, puppet.pid)
    thread = int(puppet.do("thread"))
    write(host, "tasks", thread)
    host.manager.maintenance.sweep(ID)
    workload = host.get(ID)
    assert workload.members[0].tasks_outside == 1
    assert OWNED in verdict(workload).reasons
    assert host.tree.membership(thread) == Membership("", "")


@pytest.mark.parametrize("found_by", ["fork", "orphan"])
def test_workload_that_a_container_is_moved_out_of_is_not_exact(
    host: Host, puppet: Commanded, cgroup: str, found_by: str
) -> None:
    """Its runtime runs in the workload: ``resctrlctl run podman run``, or a container that starts containers.

    The container is found by its parent, or by its use in the control group of the workload.
    """
    inner = os.path.join(cgroup, "payload")
    os.mkdir(inner)
    try:
        join(cgroup, puppet.pid)
        own = cgroup if found_by == "orphan" else ""
        assert is_exact(assign(host.ctx, assignment("outer", puppet.pid, own_cgroup=own)))
        child = int(puppet.do(found_by))
        join(inner, child)
        ref = create_as_runtime(host, child)
        start(host, child, own_cgroup=inner)
        if found_by == "orphan":
            run_in(inner, host.tree.full_path(ref))
        os.kill(child, signal.SIGKILL)
        wait_until_gone(child)
        totals = read(host.ctx, "outer")[2]
        assert {total.quality for total in totals} == {Quality.LATE}
        why = "tasks were moved out of the group, and their use outside is not counted"
        assert (why if found_by == "fork" else "of CPU time outside the group") in totals[0].reason
        assert host.tree.find(ref) is not None
    finally:
        wait_until(lambda: not cgroups.is_populated(inner))
        os.rmdir(inner)


def run_in(cgroup: str, group: str) -> None:
    """Use CPU time in a control group and a monitoring group, and end."""
    code = """
import os, sys, time
for path in sys.argv[1:]:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
"""
    subprocess.run([sys.executable, "-c", code, f"{cgroup}/cgroup.procs", f"{group}/tasks"], check=True)


def test_observed_group_is_found_again_after_a_restart(host: Host, process: Start) -> None:
    child = process()
    ref = create_as_runtime(host, child.pid)
    before = identity(host, ref)
    start(host, child.pid)
    host.restart()
    assert host.get(ID).state is State.ACTIVE
    assert host.manager.problems == []
    assert identity(host, ref) == before
    host.check()
    host.manager.release_all()
    assert host.get(ID).state is State.COMPLETED
    assert identity(host, ref) == before


def test_tree_is_not_searched_for_the_removed_group_of_a_runtime(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runtimes remove their groups at each end, and a search walks over all groups of the host."""
    child = process()
    ref = create_as_runtime(host, child.pid)
    start(host, child.pid)
    end(child)
    os.rmdir(host.tree.full_path(ref))

    def scan(_tree: Tree) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(Tree, "scan", scan)
        host.manager.maintenance.record_ends(ID)
    assert host.get(ID).state is State.LOST


@pytest.mark.parametrize("restarts", [False, True], ids=["while it runs", "while no daemon runs"])
def test_removed_group_of_a_runtime_ends_with_the_last_reading(host: Host, process: Start, restarts: bool) -> None:
    child = process()
    ref = create_as_runtime(host, child.pid)
    start(host, child.pid)
    host.manager.tick()  # takes the first checkpoint
    end(child)
    os.rmdir(host.tree.full_path(ref))
    if restarts:
        host.restart()
    else:
        host.manager.maintenance.record_ends(ID)
    over = host.get(ID)
    assert (over.state, over.claims) == (State.LOST, ())
    traffic = total(read(host.ctx, ID)[2])
    assert traffic.quality is Quality.ESTIMATED
    assert "last read: " in traffic.reason
    assert "the program that owns the group removed it before the last reading" in traffic.reason or restarts
    host.check()


def test_group_that_a_runtime_removes_while_its_container_runs_is_not_created_again(
    host: Host, process: Start
) -> None:
    child = process()
    ref = create_as_runtime(host, child.pid)
    start(host, child.pid)
    os.rmdir(host.tree.full_path(ref))
    host.manager.tick()
    over = host.get(ID)
    assert (over.state, over.claims) == (State.LOST, ())
    time.sleep(RESUME_S)
    host.manager.tick()
    assert host.get(ID) == over
    host.check()


def test_another_group_of_the_same_name_is_not_taken_for_it(host: Host, process: Start) -> None:
    child, other = process(), process()
    ref = create_as_runtime(host, child.pid)
    start(host, child.pid)
    os.rename(host.tree.full_path(ref), host.tree.full_path(GroupRef("", "aside")))
    create_as_runtime(host, other.pid)
    host.manager.tick()
    assert (host.get(ID).state, host.get(ID).reason) == (State.LOST, "another group is in its place")


def test_group_of_the_next_mount_is_not_taken_for_it(tmp_path: Path, process: Start) -> None:
    first, second = process(), process()
    (tmp_path / "run").mkdir()
    resctrl = tmp_path / "resctrl"
    resctrl.mkdir()
    with Simulation(str(resctrl), "intel-rdt", 16):
        host = Host(str(resctrl), str(tmp_path / "run"))
        ref = create_as_runtime(host, first.pid)
        start(host, first.pid)
        before = host.tree.find(ref)
        assert unmount(str(resctrl))
    with Simulation(str(resctrl), "intel-rdt", 16):
        create_as_runtime(host, second.pid)
        now = host.tree.find(ref)
        assert before is not None
        assert now is not None
        assert now.inode == before.inode
        assert start(host, second.pid).workload.generation == 2
        totals = host.ctx.snapshots.completed.path(ID, 1)
        assert "unmounted and mounted again" in Path(totals, "quality").read_text()


def test_a_restarted_container_of_the_same_id_is_a_new_run(host: Host, process: Start) -> None:
    first, second = process(), process()
    ref = create_as_runtime(host, first.pid)
    start(host, first.pid)
    end(first)
    host.manager.maintenance.record_ends(ID)
    os.rmdir(host.tree.full_path(ref))
    create_as_runtime(host, second.pid)
    done = start(host, second.pid)
    assert (done.workload.generation, done.workload.state) == (2, State.ACTIVE)
    host.check()


def test_group_that_is_used_again_before_its_end_was_seen_is_a_new_run(host: Host, process: Start) -> None:
    first, second = process(), process()
    ref = create_as_runtime(host, first.pid)
    start(host, first.pid)
    end(first)
    write(host, f"{ref.path}/tasks", second.pid)
    done = start(host, second.pid)
    assert (done.workload.generation, done.workload.state) == (2, State.ACTIVE)
    assert host.folder("completed") == [ID]
    host.check()


def test_member_without_tasks_does_not_keep_an_observed_container(host: Host, process: Start) -> None:
    child = process()
    create_as_runtime(host, child.pid)
    start(host, child.pid)
    add_member(host.ctx, ID, "by-name", owner="cli")
    host.manager.maintenance.record_ends(ID)
    assert host.get(ID).state is State.ACTIVE
    end(child)
    host.manager.maintenance.record_ends(ID)
    over = host.get(ID)
    assert (over.state, over.living) == (State.COMPLETED, ())


@pytest.mark.parametrize("again", [False, True], ids=["first run", "after another run"])
def test_a_failed_observation_leaves_nothing(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    child = process()
    ref = create_as_runtime(host, child.pid)
    if again:
        other = process()
        write(host, "tasks", child.pid)
        write(host, f"{ref.path}/tasks", other.pid)
        start(host, other.pid)
        end(other)
        host.manager.maintenance.record_ends(ID)
        write(host, f"{ref.path}/tasks", child.pid)
    before = host.ctx.store.all()

    def fail(*_arguments: object) -> None:
        raise ResctrlError("full")

    with monkeypatch.context() as patch:
        patch.setattr(type(host.ctx.store), "check_limits", fail)
        with pytest.raises(ResctrlError, match="full"):
            start(host, child.pid)
    assert host.ctx.store.all() == before
    assert host.folder("groups") == ([ID] if again else [])
    assert host.folder("completed") == ([ID] if again else []) or host.folder("completed") == []
    host.check()
    assert start(host, child.pid).workload.generation == (2 if again else 1)


def test_failed_observation_keeps_the_values_of_the_run_before(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, child = process(), process()
    ref = create_as_runtime(host, first.pid)
    start(host, first.pid)
    end(first)
    host.manager.maintenance.record_ends(ID)
    before = host.files(ID)
    write(host, f"{ref.path}/tasks", child.pid)

    def fail(*_arguments: object) -> None:
        raise NotWritten("full")

    with monkeypatch.context() as patch:
        patch.setattr(host.ctx.snapshots, "set_aside", fail)
        with pytest.raises(NotWritten, match="full"):
            start(host, child.pid)
    assert host.files(ID) == before
    host.check()


class Killed(BaseException):
    """The daemon ends at this point."""


def cut(host: Host, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a container, and kill the daemon before the first reading of its group."""

    def kill(*_arguments: object, **_more: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(creation, "with_baseline", kill)
        with pytest.raises(Killed):
            start(host, pid)


@pytest.mark.parametrize("is_earlier", [False, True], ids=["first run", "after another run"])
def test_container_is_observed_late_after_a_kill_during_its_start(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    first, child = process(), process()
    ref = create_as_runtime(host, first.pid)
    if is_earlier:
        start(host, first.pid)
        end(first)
        host.manager.maintenance.record_ends(ID)
    write(host, f"{ref.path}/tasks", child.pid)
    before = identity(host, ref)
    cut(host, child.pid, monkeypatch)
    host.restart()
    workload = host.get(ID)
    assert (workload.state, baseline_of(workload)) == (State.ACTIVE, Quality.ESTIMATED)
    assert verdict(workload).reasons == (f"{ID} ran before it was put into the group", OWNED)
    assert (workload.members[0].late, workload.generation) == (True, 2 if is_earlier else 1)
    assert identity(host, ref) == before
    host.check()


def test_start_that_was_cut_short_fails_if_the_group_is_gone(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = process()
    ref = create_as_runtime(host, child.pid)
    cut(host, child.pid, monkeypatch)
    os.rmdir(host.tree.full_path(ref))
    host.restart()
    over = host.get(ID)
    assert (over.state, over.claims) == (State.FAILED, ())
    assert over.reason == "the program that owns the group removed it before the last reading"
    assert host.folder("groups") == []
    host.check()


def test_start_that_was_cut_short_does_not_wait_for_an_rmid(
    tmp_path: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_host(tmp_path, "intel-rdt", 2) as host:
        child, other = process(), process()
        create_as_runtime(host, child.pid)
        assert assign(host.ctx, assignment("a", other.pid, priority=1)).workload.state is State.PENDING
        cut(host, child.pid, monkeypatch)
        host.restart()
        assert host.get("a").state is State.PENDING
        assert host.get(ID).state is State.ACTIVE


@pytest.fixture
def metered(tmp_path: Path) -> Iterator[tuple[Host, Control]]:
    with machine(tmp_path, "intel-aet") as made:
        yield made


def observed_use(host: Host) -> Total:
    return total(read(host.ctx, ID)[2])


def test_use_of_an_observed_group_is_counted_from_its_first_reading(
    metered: tuple[Host, Control], process: Start
) -> None:
    host, control = metered
    child = process()
    control.spawn(tid=child.pid)
    create_as_runtime(host, child.pid)
    control.run(child.pid, 1_000_000_000)  # the runtime's own code
    start(host, child.pid)
    assert observed_use(host).number == 0
    pools = host.ctx.machine
    pools.read()
    control.run(child.pid, 1_000_000_000)
    (used,) = control.truth(tid=child.pid).tasks[0].used
    assert observed_use(host).number == used.bytes // 2 > 0
    # The group is not of resctrlmond, so its use is of another pool, also after the end.
    for over in (False, True):
        if over:
            end(child)
            host.manager.maintenance.record_ends(ID)
        found = [of for of in pools.read().pools if of.event.name == TRAFFIC]
        for pool, number in ((Pool.FOREIGN, used.bytes // 2), (Pool.TRACKED, 0)):
            assert sum(of.number or 0 for of in found if of.pool is pool) == number
            assert not any(of.reason for of in found if of.pool is pool)
    assert observed_use(host).number == used.bytes // 2


def test_class_that_a_runtime_removes_is_read_when_its_container_ends(
    metered: tuple[Host, Control], process: Start
) -> None:
    host, control = metered
    host.settings = host.ctx.config.settings = Settings(linger_s=60)
    host.make_class(ID)
    child = process()
    control.spawn(tid=child.pid)
    write(host, f"{ID}/tasks", child.pid)
    done = start(host, child.pid)
    assert done.workload.first.ref == GroupRef(ID, ID)
    host.manager.tick()  # takes the first checkpoint
    control.run(child.pid, 1_000_000_000)
    (used,) = control.truth(tid=child.pid).tasks[0].used
    control.exit(child.pid)
    end(child)
    host.manager.maintenance.record_ends(ID)
    os.rmdir(os.path.join(host.mountpoint, ID))
    host.manager.tick()
    assert host.get(ID).state is State.LOST
    assert (observed_use(host).number, observed_use(host).quality) == (used.bytes, Quality.ESTIMATED)
