# SPDX-License-Identifier: Apache-2.0
"""Another agent moves tasks between classes: the workload's groups follow, and no task is lost from sight."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.resctrl.errors import ClassMismatch, KernelRefused, OutOfResources
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.groups import relocation
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import ROOT_FOLDER, State
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.workloads.conftest import UID, Host, assignment, join, own_host, when_all_stand
from tests.workloads.evidence.test_interference import react, write
from tests.workloads.groups.test_cut import CTR, Fuse, cut, forget, fuse

__all__ = ["fuse"]

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resctrlmond.workloads.upkeep.maintenance.SWEEP_S", 0.0)


@pytest.fixture
def gold(host: Host) -> str:
    host.make_class("gold")
    return "gold"


def container(cgroup: str, *children: subprocess.Popen[bytes]) -> Assignment:
    for child in children:
        join(cgroup, child.pid)
    return assignment(UID, children[0].pid, "nri", member="c1", own_cgroup=cgroup)


def by_cgroup(cgroup: str, **more: object) -> Assignment:
    return Assignment(key=UID, owner="unit", cgroup=cgroup, **more)  # type: ignore[arg-type]


def test_group_follows_a_workload_whose_tasks_all_moved(
    host: Host, process: Start, cgroup: str, gold: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first, second = process(), process()
    before = assign(host.ctx, container(cgroup, first, second)).workload
    host.manager.maintenance.tick()
    for child in (first, second):
        host.tree.write_task(gold, child.pid)
    host.manager.maintenance.tick()
    record = host.get(UID)
    # The same directory, with its RMID and its counters.
    assert (record.first.class_, record.first.nonce, record.groups[1:]) == (gold, before.first.nonce, ())
    # They have used nothing outside.
    assert (record.state, record.generation, baseline_of(record)) == (State.ACTIVE, 1, Quality.EXACT)
    # Another workload that took the tasks over may have moved them: the log does not name another program.
    assert f"{UID}: its tasks are in class {gold} now, and its group followed" in caplog.messages
    for child in (first, second):
        assert host.tree.membership(child.pid) == Membership(gold, UID)
    host.check()
    link = Path(host.run, "groups", UID, "mon_data/mon_L3_00/llc_occupancy")
    assert (
        link.read_text()
        == Path(host.tree.full_path(record.first.ref), "mon_data/mon_L3_00/llc_occupancy").read_text()
    )


def test_moved_part_of_a_workload_gets_a_second_group(host: Host, process: Start, cgroup: str, gold: str) -> None:
    stays, moved = process(), process()
    assign(host.ctx, container(cgroup, stays, moved))
    host.manager.maintenance.tick()
    host.tree.write_task(gold, moved.pid)
    host.manager.maintenance.tick()
    record = host.get(UID)
    assert [group.class_ for group in record.groups] == ["", gold]
    assert host.tree.membership(stays.pid) == Membership("", UID)
    assert host.tree.membership(moved.pid) == Membership(gold, UID)
    assert host.get(UID).members[0].reason == ""
    host.check()
    # And back: its task joins those that stayed, and the group in gold waits for the next.
    host.tree.write_task("", moved.pid)
    host.manager.maintenance.tick()
    assert host.tree.membership(moved.pid) == Membership("", UID)
    host.restart()
    host.check()
    release(host.ctx, UID, owner="nri")
    host.check()


@pytest.mark.parametrize("name", ["theirs", UID])
def test_total_is_not_exact_while_tasks_run_in_a_foreign_group(
    host: Host, process: Start, puppet: Puppet, cgroup: str, name: str
) -> None:
    """A part was counted elsewhere, or nowhere, for as long as it lived, and the rest was called exact."""
    gold = "gold"
    host.make_class(gold)
    stays, moved = process(), puppet
    join(cgroup, moved.pid)
    assign(host.ctx, container(cgroup, stays))
    foreign = host.make_foreign(name, gold)
    host.tree.write_task(gold, moved.pid)
    if name != UID:
        host.tree.write_task(foreign.path, moved.pid)
    moved.do("burn 0.05")
    for _ in range(2):
        host.manager.maintenance.sweep(UID)
    moved.kill()
    host.manager.maintenance.sweep(UID)
    host.restart()
    assert {total.quality for total in release(host.ctx, UID, owner="nri").totals} == {Quality.LATE}
    host.check()


def test_a_process_without_a_control_group_is_followed_as_well(host: Host, process: Start, gold: str) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    host.tree.write_task(gold, child.pid)
    host.manager.maintenance.tick()
    assert host.tree.membership(child.pid) == Membership(gold, "k")
    assert host.get("k").groups[1:] == ()


def test_a_group_that_followed_is_not_forgotten_if_its_tasks_cannot_yet_be_moved(
    host: Host, process: Start, gold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    host.tree.write_task(gold, child.pid)

    def refuse(_tree: Tree, _before: Membership, directory: str, _tid: int) -> bool:
        raise KernelRefused("not now", path=directory)

    with monkeypatch.context() as patched:
        patched.setattr(Tree, "write_task_from", refuse)
        host.manager.maintenance.tick()
    record = host.get("k")
    assert (record.first.class_, record.state, baseline_of(record)) == (gold, State.ACTIVE, Quality.LATE)
    assert "not now" in record.members[0].reason
    assert record.members[0].late
    host.check()
    host.manager.maintenance.tick()
    assert host.tree.membership(child.pid) == Membership(gold, "k")


def test_second_group_is_created_if_groups_cannot_be_renamed(
    host: Host, process: Start, gold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    host.tree.write_task(gold, child.pid)

    def refuse(*_: object) -> None:
        raise ClassMismatch("this kernel cannot move groups")

    monkeypatch.setattr(relocation, "relocate", refuse)
    host.manager.maintenance.tick()
    assert [group.class_ for group in host.get("k").groups] == ["", gold]
    assert host.tree.membership(child.pid) == Membership(gold, "k")
    host.check()


def test_control_group_with_tasks_in_several_classes_is_assigned_completely(
    host: Host, process: Start, cgroup: str, gold: str
) -> None:
    children = [process() for _ in range(4)]
    for child in children:
        join(cgroup, child.pid)
    for child in children[::2]:
        host.tree.write_task(gold, child.pid)
    done = assign(host.ctx, by_cgroup(cgroup))
    assert done.moved.moved == 4
    assert done.workload.members[0].tasks_outside == 0
    places = [host.tree.membership(child.pid) for child in children]
    assert places == [Membership(gold, UID), Membership("", UID)] * 2
    assert {group.folder for group in done.workload.groups} in ({"", gold}, {"", ROOT_FOLDER})
    host.check()


def test_named_class_applies_to_all_tasks_or_to_none(host: Host, process: Start, cgroup: str, gold: str) -> None:
    for child in (process(), process()):
        join(cgroup, child.pid)
    host.tree.write_task(gold, child.pid)
    with pytest.raises(ClassMismatch):
        assign(host.ctx, by_cgroup(cgroup, class_=gold))
    assert host.ctx.store.all() == []
    assert host.marked_groups() == []
    record = assign(host.ctx, by_cgroup(cgroup, class_=gold, allow_class_change=True)).workload
    assert (record.first.class_, record.groups[1:], record.members[0].tasks_outside) == (gold, (), 0)


def test_failed_call_leaves_no_task_in_an_existing_group(host: Host, process: Start, cgroup: str, gold: str) -> None:
    """Those that were moved before it failed stayed, and counted in a workload that does not know them."""
    assign(host.ctx, assignment(UID, process().pid))
    before = host.get(UID)
    for child in (process(), process(), process()):
        join(cgroup, child.pid)
    pids = sorted(int(pid) for pid in Path(cgroup, "cgroup.procs").read_text().split())
    foreign = host.make_foreign("theirs")
    host.tree.write_task(foreign.path, pids[0])
    host.tree.write_task(gold, pids[2])
    places = [host.tree.membership(pid) for pid in pids]
    with pytest.raises(ClassMismatch):
        assign(host.ctx, by_cgroup(cgroup, class_="", take_over=True))
    assert [host.tree.membership(pid) for pid in pids] == places
    record = host.get(UID)
    assert (record.members, record.claims, record.groups[1:]) == (before.members, before.claims, ())
    # They ran in it until they were put back.
    assert baseline_of(record) is Quality.ESTIMATED
    assert assign(host.ctx, by_cgroup(cgroup, take_over=True)).moved.moved == 3
    os.rmdir(host.tree.full_path(foreign))
    host.check()


def test_a_call_that_fails_on_the_second_class_leaves_no_group_in_the_first(
    host: Host, process: Start, cgroup: str, gold: str
) -> None:
    for child in (process(), process(), process()):
        join(cgroup, child.pid)
    host.make_class("silver")
    pids = sorted(int(pid) for pid in Path(cgroup, "cgroup.procs").read_text().split())
    host.tree.write_task(gold, pids[1])
    host.tree.write_task("silver", pids[2])
    foreign = host.make_foreign(UID, "silver")
    with pytest.raises(Exception, match="another program created it"):
        assign(host.ctx, by_cgroup(cgroup))
    assert host.ctx.store.all() == []
    assert host.marked_groups() == []
    assert os.path.isdir(host.tree.full_path(foreign))


def test_sandbox_without_a_process_does_not_determine_the_class(host: Host, process: Start, gold: str) -> None:
    create(host.ctx, UID, owner="nri")
    add_member(host.ctx, UID, "sandbox", owner="nri")
    child = process()
    host.tree.write_task(gold, child.pid)
    record = assign(host.ctx, assignment(UID, child.pid, "nri", member="c1")).workload
    assert (record.first.class_, record.groups[1:]) == (gold, ())
    assert host.tree.membership(child.pid) == Membership(gold, UID)
    host.check()


def test_group_that_cannot_be_removed_is_kept_when_it_is_created_elsewhere(tmp_path: Path, process: Start) -> None:
    """Linux 6.1 moves no groups. The group in the old class remained with its RMID, and no record had it."""
    for folder in ("resctrl", "run"):
        (tmp_path / folder).mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 8, kernel="6.1"):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        host.make_class("gold")
        create(host.ctx, CTR, owner="other")
        child = process()
        host.tree.write_task("gold", child.pid)
        control = Control(host.mountpoint)
        control.set_faults(Fault(on=Operation.RMDIR, group=f"mon_groups/{CTR}", answer="ENOMEM", times=1))
        with pytest.raises(OutOfResources, match="ENOMEM"):
            assign(host.ctx, assignment(CTR, child.pid))
        assert control.faults == []
        host.check()
        host.manager.maintenance.tick()
        host.check()
        assign(host.ctx, assignment(CTR, child.pid))
        assert host.tree.membership(child.pid) == Membership("gold", CTR)
        assert [found.ref.class_ for found in host.marked_groups()] == ["gold"]


def test_a_group_that_waits_for_an_rmid_in_another_class_keeps_its_mark(tmp_path: Path) -> None:
    """Linux 6.1 moves no groups, and another program takes the RMID meanwhile. The second baseline was exact."""
    with own_host(tmp_path, "intel-rdt", 8, kernel="6.1") as host:
        host.make_class("gold")
        create(host.ctx, "k", owner="other")
        write(host, "mon_groups/k/cpus", "1")
        react(host)
        before = verdict(host.get("k"))
        assert before.quality is Quality.ESTIMATED
        Control(host.mountpoint).set_faults(
            Fault(on=Operation.MKDIR, group="gold/mon_groups/k", answer="ENOSPC", times=2)
        )
        assert move(host.ctx, "k", "gold").state is State.PENDING
        after = when_all_stand(host, "k")
        assert (after.first.class_, verdict(after)) == ("gold", before)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_kill_at_any_step_of_following(small_host: Host, process: Start, fuse: Fuse, whole: bool) -> None:
    host, gold = small_host, "gold"
    host.make_class(gold)
    step = 0
    killed = True
    while killed:
        children = [process(), process()]
        for number, child in enumerate(children):
            assign(host.ctx, assignment(CTR, child.pid, "oci", member=f"c{number}"))
        host.manager.maintenance.tick()
        leaving = children if whole else children[1:]
        for child in leaving:
            host.tree.write_task(gold, child.pid)
        killed = cut(fuse, step, host.manager.maintenance.tick)
        manager = host.restart()
        host.check()
        manager.maintenance.tick()
        record = manager.context.store.known(CTR)
        assert (record.state, record.generation) == (State.ACTIVE, 1), step
        for child in children:
            class_ = gold if child in leaving else ""
            assert host.tree.membership(child.pid) == Membership(class_, CTR), step
        for child in children:
            child.kill()
            child.wait()
        manager.maintenance.tick()
        assert manager.context.store.known(CTR).state is State.COMPLETED
        assert host.marked_groups() == []
        host.check()
        forget(host)
        step += 1
    assert step > 3


def test_a_task_that_ends_while_its_group_follows_it_makes_the_totals_late(
    host: Host, process: Start, gold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its use in the other class is missing, but no task was left to move, so nothing was marked."""
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    write(host, f"{gold}/tasks", child.pid)
    rename = host.tree.rename

    def rename_too_late(*refs: GroupRef) -> None:
        child.kill()
        child.wait()
        rename(*refs)

    monkeypatch.setattr(host.tree, "rename", rename_too_late)
    host.manager.maintenance.sweep("k")
    assert {total.quality for total in release(host.ctx, "k", owner="test").totals} == {Quality.LATE}
