# SPDX-License-Identifier: Apache-2.0
"""Use that no call reports: each total that lacks it, or has that of others, is not exact.

The tasks are virtual, and are real idle processes too, so that they have control groups.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.tree import Tree
from resctrlmond.resctrl.witness import SIMULATED_FOLDER
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.model.errors import AlreadyMonitored
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import MAX_ENDED_MEMBERS
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import nested_totals, read
from resctrlmond.workloads.verbs.release import release
from tests.truth.crew import Crew, remove_cgroup
from tests.truth.world import mounted
from tests.workloads.builders import total_of
from tests.workloads.conftest import Host, assignment
from tests.workloads.evidence.test_interference import write

S = 10**9
GIB = 1 << 30
POD = "0f8fad5b-d9cb-469f-a165-70867728950e"


class Machine:
    """A simulated machine, and the manager in this process."""

    def __init__(self, simulation: Simulation, top: str, crew: Crew) -> None:
        self.host = Host(simulation.mountpoint, f"{top}/run")
        settings = Settings(checkpoint_interval_s=1e-9, reserve=0, overflow=0, linger_s=60.0)
        self.host.settings = self.host.ctx.config.settings = settings
        self.control = Control(simulation.mountpoint)
        self._crew = crew
        self._witness = Path(simulation.mountpoint, SIMULATED_FOLDER)

    def see(self) -> None:
        """Let the simulator see the control groups. The kernel sees them always."""
        (self._witness / "tasks").read_bytes()

    def cgroup(self, name: str, above: str = "") -> str:
        path = os.path.join(above or self._crew.cgroup, name)
        os.mkdir(path)
        self.see()
        return path

    def remove(self, *paths: str) -> None:
        for path in paths:
            remove_cgroup(path)
            self.see()

    def process(self, cgroup: str = "", *, by: int = 0) -> int:
        """Start a process, or fork it."""
        pid = self._crew.start(0, cgroup)[0]
        if by:
            self.control.fork(by, tid=pid)
        else:
            self.control.spawn(tid=pid)
        return pid

    def used(self, seconds: int, cgroup: str = "") -> None:
        """Let a process that joins the control group from outside use CPU time, and end."""
        pid = self.process(cgroup)
        self.control.run(pid, seconds * S, 0)
        self.end(pid)

    def end(self, pid: int) -> None:
        self.see()
        self.control.exit(pid)
        self._crew.end(pid)
        self.see()

    def close(self) -> None:
        self.host.ctx.interference.close()
        for pid in list(self._crew._pidfds):
            self._crew.end(pid)
        for path, _, _ in sorted(os.walk(self._crew.cgroup), reverse=True):
            if path != self._crew.cgroup and os.path.isdir(path):
                remove_cgroup(path)

    def container(
        self, key: str, name: str, cgroup: str, *, pod: str = "", sandbox: str = "", seconds: int = 1
    ) -> int:
        """Start a container with its hook, and let it use CPU time."""
        pid = self.process(cgroup)
        more = {"kind": "container", "member": name, "sandbox": sandbox}
        given = assignment(key, pid, "test", own_cgroup=cgroup, pod_cgroup=pod or None, **more)
        assign(self.host.ctx, given)
        self.control.run(pid, seconds * S, 0)
        return pid

    def check(self, key: str, expected: Quality, gib: int) -> None:
        """Check the quality and the value of a total, while it runs and at its end."""
        for totals in (read(self.host.ctx, key)[2], release(self.host.ctx, key, owner="test").totals):
            total = total_of(totals)
            assert (total.quality, total.number) == (expected, gib * GIB), total.reason


@pytest.fixture
def machine() -> Iterator[Machine]:
    with mounted("intel-aet", 24, 7, lag_ms=0) as (simulation, top), Crew() as crew:
        made = Machine(simulation, top, crew)
        with contextlib.closing(made):
            yield made


@pytest.mark.parametrize("tick", [True, False])
def test_start_of_a_container_without_a_hook_is_late(machine: Machine, tick: bool) -> None:
    for has_hook in (True, False, True):
        cgroup = machine.cgroup("box")
        if has_hook:
            machine.end(machine.container("box", "box", cgroup))
        else:
            machine.used(1, cgroup)
        machine.remove(cgroup)
        if tick:
            machine.host.manager.maintenance.tick()
    machine.check("box", Quality.LATE, 2)


@pytest.mark.parametrize("keys", [("a", "b"), ("b", "a")])
def test_start_without_a_hook_is_late_though_another_run_begins_at_its_path(
    machine: Machine, keys: tuple[str, str]
) -> None:
    """The other run has not had the control group that was removed before it began."""
    for key in (keys[0], "", keys[1]):
        cgroup = machine.cgroup("box")
        if key:
            machine.end(machine.container(key, "box", cgroup))
        else:
            machine.used(1, cgroup)
        machine.remove(cgroup)
    found = {usage.workload.key: total_of(usage.totals) for usage in machine.host.manager.usages.read_all()}
    assert [found[key].quality for key in keys] == [Quality.LATE, Quality.EXACT]
    for key, quality in zip(keys, (Quality.LATE, Quality.EXACT), strict=True):
        machine.check(key, quality, 1)


def test_pod_whose_control_group_was_made_again_without_a_hook_is_late(machine: Machine) -> None:
    for name in "abc":
        pod = machine.cgroup(f"pod{POD}")
        cgroup = machine.cgroup(name * 64, pod)
        if name == "b":
            machine.used(1, cgroup)
        else:
            machine.end(machine.container(POD, name * 64, cgroup, pod=pod))
        machine.remove(cgroup, pod)
        machine.host.manager.maintenance.tick()
    machine.check(POD, Quality.LATE, 2)


@pytest.mark.parametrize(
    "name",
    [
        "b" * 32,
        "0a8fad5b-d9cb-469f-a165-70867728950e",
        f"kata_{'b' * 64}",
        "run-u12.scope",
        f"system.slice/crio-{'b' * 64}.scope",
    ],
    ids=["32 digits", "UUID", "kata", "scope of systemd-run", "one level deeper"],
)
@pytest.mark.parametrize(("has_hook", "quality"), [(True, Quality.EXACT), (False, Quality.LATE)])
def test_container_of_a_pod_whose_control_group_has_a_name_of_another_form(
    machine: Machine, name: str, has_hook: bool, quality: Quality
) -> None:
    """No list of the containers of the pod had it."""
    pod = machine.cgroup(f"pod{POD}")
    machine.container(POD, "a" * 64, machine.cgroup("a" * 64, pod), pod=pod)
    above, _, last = name.rpartition("/")
    other = machine.cgroup(last, machine.cgroup(above, pod) if above else pod)
    if has_hook:
        machine.end(machine.container(POD, "b" * 64, other, pod=pod))
    else:
        machine.used(1, other)
        machine.remove(other)
        machine.host.manager.maintenance.tick()
    machine.check(POD, quality, 1 + has_hook)


@pytest.mark.parametrize("caller", ["NRI plugin", "hook"])
@pytest.mark.parametrize(("seconds", "quality"), [(0, Quality.EXACT), (10, Quality.LATE)])
def test_sandbox_that_works_is_missing(machine: Machine, seconds: int, quality: Quality, caller: str) -> None:
    """The NRI plugin adds the sandbox as a member, the hook states its id in the call of each container."""
    pod = machine.cgroup(f"pod{POD}")
    sandbox, cgroup = machine.cgroup("a" * 64, pod), machine.cgroup("b" * 64, pod)
    pause = machine.process(sandbox)
    machine.control.run(pause, S // 5, 0)
    if caller == "NRI plugin":
        create(machine.host.ctx, POD, owner="test")
        add_member(machine.host.ctx, POD, "a" * 64, owner="test")
    machine.container(POD, "b" * 64, cgroup, pod=pod, sandbox="a" * 64 if caller == "hook" else "")
    machine.control.run(pause, seconds * S or S // 20, 0)
    machine.check(POD, quality, 1)


@pytest.mark.parametrize("is_second_run", [False, True])
def test_container_that_ran_in_the_pod_before_is_missing(machine: Machine, is_second_run: bool) -> None:
    pod = machine.cgroup(f"pod{POD}")
    if is_second_run:
        first = machine.cgroup("a" * 64, pod)
        machine.end(machine.container(POD, "a" * 64, first, pod=pod))
        release(machine.host.ctx, POD, owner="test")
        machine.remove(first)
    unhooked = machine.process(machine.cgroup("b" * 64, pod))
    machine.control.run(unhooked, 5 * S, 0)
    machine.container(POD, "c" * 64, machine.cgroup("c" * 64, pod), pod=pod)
    machine.check(POD, Quality.LATE, 1)


def test_second_run_of_a_pod_is_exact(machine: Machine) -> None:
    pod = machine.cgroup(f"pod{POD}")
    for name in "ab":
        cgroup = machine.cgroup(name * 64, pod)
        machine.end(machine.container(POD, name * 64, cgroup, pod=pod, seconds=3))
        machine.remove(cgroup)
        machine.check(POD, Quality.EXACT, 3)


def test_process_that_gets_a_control_group_later_is_not_exact(machine: Machine) -> None:
    cgroup = machine.cgroup("job")
    pid = machine.process(cgroup)
    assign(machine.host.ctx, assignment("job", pid, "test", member="m"))
    child = machine.process(cgroup, by=pid)
    machine.control.steal(child)
    machine.control.run(child, 5 * S, 0)
    machine.end(child)
    assign(machine.host.ctx, assignment("job", pid, "test", member="m", own_cgroup=cgroup))
    machine.control.run(pid, S, 0)
    machine.check("job", Quality.ESTIMATED, 1)


def test_use_before_a_member_entered_below_another_one_is_missing(machine: Machine) -> None:
    cgroup = machine.cgroup("box")
    first = machine.container("box", "a", cgroup)
    below = machine.cgroup("below", cgroup)
    machine.used(5, below)
    second = machine.process(below, by=first)
    assign(machine.host.ctx, assignment("box", second, "test", own_cgroup=below, member="b"))
    machine.control.run(second, S, 0)
    machine.check("box", Quality.LATE, 2)


def test_use_outside_of_a_member_elsewhere_than_its_pod_is_missing(machine: Machine) -> None:
    pod = machine.cgroup(f"pod{POD}")
    machine.container(POD, "a" * 64, machine.cgroup("a" * 64, pod), pod=pod)
    elsewhere = machine.cgroup("b" * 64)
    machine.container(POD, "b" * 64, elsewhere, pod=pod)
    machine.used(5, elsewhere)
    machine.check(POD, Quality.LATE, 2)


def join_by_assign(machine: Machine, _inner: int) -> int:
    pid = machine.process()
    assign(machine.host.ctx, assignment("inner", pid, "test", late=None, member="other"))
    return pid


def fork(machine: Machine, inner: int) -> int:
    return machine.process(by=inner)


@pytest.mark.parametrize(("joined", "quality"), [(join_by_assign, Quality.ESTIMATED), (fork, Quality.EXACT)])
def test_processes_that_a_nested_workload_gives_back_may_be_of_others(
    machine: Machine, joined: Callable[[Machine, int], int], quality: Quality
) -> None:
    outer = machine.process()
    assign(machine.host.ctx, assignment("outer", outer, "test"))
    inner = machine.process(by=outer)
    assign(machine.host.ctx, assignment("inner", inner, "test", nested=True))
    other = joined(machine, inner)
    release(machine.host.ctx, "inner", owner="test")
    machine.control.run(other, 5 * S, 0)
    machine.check("outer", quality, 5)


def use_all_rmids(machine: Machine) -> None:
    """Create groups of another program until no RMID is free."""
    with pytest.raises(OSError, match="No space left"):
        for number in range(100):
            machine.control.make_group(f"mon_groups/other{number}")


def fill(machine: Machine, free: str) -> None:
    """Use all RMIDs but that of a group, which is removed."""
    use_all_rmids(machine)
    machine.control.remove_group(free)
    machine.control.advance(600)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(("is_pod", "quality"), [(True, Quality.LATE), (False, Quality.ESTIMATED)])
def test_use_outside_stays_missing_if_a_new_group_gets_its_rmid(
    machine: Machine, is_pod: bool, quality: Quality, is_read: bool
) -> None:
    """It was taken for use in the new group, and was missing no more."""
    pod = machine.cgroup(f"pod{POD}") if is_pod else ""
    cgroup = machine.cgroup("a" * 64, pod)
    first = machine.container(POD, "a" * 64, cgroup, pod=pod)
    other = machine.cgroup("b" * 64, pod or cgroup)
    theirs = "class/mon_groups/theirs"
    machine.control.make_group("class")
    machine.control.make_group(theirs)
    child = machine.process(cgroup if is_pod else other, by=first)
    for group in ("class", theirs):
        machine.control.steal(child, group)
    machine.control.run(child, 5 * S, 0)
    machine.end(child)
    if is_read:
        assert total_of(read(machine.host.ctx, POD)[2]).quality is Quality.LATE
    fill(machine, theirs)
    pid = machine.process(other)
    machine.control.steal(pid, "class")
    given = assignment(POD, pid, "test", own_cgroup=other, pod_cgroup=pod or None, kind="container", member="b" * 64)
    assign(machine.host.ctx, given)
    machine.control.run(pid, S, 0)
    # Charged now, so that it is in one sum with the use before.
    machine.end(pid)
    assert len(machine.host.get(POD).groups) == 2
    machine.check(POD, quality, 2)


def test_take_over_from_a_group_that_another_program_has_just_renamed_is_late(machine: Machine) -> None:
    first = machine.process()
    assign(machine.host.ctx, assignment("loser", first, "test"))
    machine.control.run(first, S, 0)
    child = machine.process(by=first)
    groups = Path(machine.host.mountpoint, "mon_groups")
    (groups / "loser").rename(groups / "renamed")
    assign(machine.host.ctx, assignment("winner", child, "test", take_over=True))
    machine.control.run(child, 5 * S, 0)
    machine.check("loser", Quality.LATE, 1)


def borrow_cpu(machine: Machine, key: str) -> None:
    """Give the group of a workload a CPU on which another task uses CPU time, and take it back."""
    stranger = machine.process()
    write(machine.host, f"mon_groups/{key}/cpus_list", "0")
    machine.control.run(stranger, 5 * S, 0)
    write(machine.host, f"mon_groups/{key}/cpus_list", "")


def test_cpu_that_a_group_had_before_it_is_read_makes_it_estimated(machine: Machine) -> None:
    pid = machine.process()
    assign(machine.host.ctx, assignment("job", pid, "test"))
    machine.control.run(pid, S, 0)
    borrow_cpu(machine, "job")
    machine.check("job", Quality.ESTIMATED, 6)


def test_cpu_that_a_nested_group_had_before_the_end_of_the_outer_one_makes_its_sum_estimated(
    machine: Machine,
) -> None:
    outer = machine.process()
    assign(machine.host.ctx, assignment("outer", outer, "test"))
    inner = machine.process(by=outer)
    assign(machine.host.ctx, assignment("inner", inner, "test", nested=True))
    borrow_cpu(machine, "inner")
    release(machine.host.ctx, "outer", owner="test")
    total = total_of(nested_totals(machine.host.ctx, machine.host.get("outer"), []))
    assert (total.quality, total.number) == (Quality.ESTIMATED, 5 * GIB)


def test_task_that_was_in_a_new_group_and_left_its_control_group_is_a_stranger(machine: Machine) -> None:
    """Its use was taken for that of a former user of the RMID."""
    create(machine.host.ctx, "box", owner="test")
    cgroup, other = machine.cgroup("box"), machine.cgroup("other")
    foreign = machine.process(cgroup)
    machine.control.steal(foreign, "mon_groups/box")
    Path(other, "cgroup.procs").write_text(str(foreign))
    machine.see()
    machine.control.run(foreign, 5 * S, 0)
    machine.end(foreign)
    machine.container("box", "box", cgroup)
    machine.check("box", Quality.ESTIMATED, 6)


def show_state(monkeypatch: pytest.MonkeyPatch, task: int, state: bytes) -> None:
    """Show a state of a virtual task: its real process sleeps."""
    fields = processes.stat_fields

    def show(tid: int) -> list[bytes]:
        found = fields(tid)
        return [state, *found[1:]] if found and tid == task else found

    monkeypatch.setattr(processes, "stat_fields", show)


@pytest.mark.parametrize(("state", "quality"), [(b"S", Quality.EXACT), (b"R", Quality.LATE)])
def test_task_that_is_being_forked_while_a_nested_workload_gives_back_its_tasks_may_be_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, state: bytes, quality: Quality
) -> None:
    """It is in no list of tasks yet, and keeps the RMID that its parent had. A task that sleeps forks none."""
    outer = machine.process()
    assign(machine.host.ctx, assignment("outer", outer, "test"))
    machine.control.run(outer, S, 0)
    inner = machine.process(by=outer)
    assign(machine.host.ctx, assignment("inner", inner, "test", nested=True))
    child = machine.process(by=inner)
    if state == b"R":
        machine.control.overlook(child)
        listed = Tree.tasks
        monkeypatch.setattr(Tree, "tasks", lambda *of: [tid for tid in listed(*of) if tid != child])
    show_state(monkeypatch, inner, state)
    release(machine.host.ctx, "inner", owner="test")
    machine.control.run(child, 5 * S, 0)
    machine.check("outer", quality, 6 if quality is Quality.EXACT else 1)


@pytest.mark.parametrize(("state", "quality"), [(b"S", Quality.EXACT), (b"R", Quality.ESTIMATED)])
def test_task_that_is_being_forked_while_its_parent_is_moved_out_of_a_new_group_may_stay(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, state: bytes, quality: Quality
) -> None:
    """The parent, and so the child, has the RMID of a removed group (rdt_move_group_tasks())."""
    theirs = "mon_groups/theirs"
    machine.control.make_group(theirs)
    parent = machine.process()
    machine.control.steal(parent, theirs)
    child = machine.process(by=parent)
    for task in (parent, child):
        machine.control.overlook(task)
    fill(machine, theirs)
    listed = Tree.tasks
    if state == b"R":
        monkeypatch.setattr(Tree, "tasks", lambda *of: [tid for tid in listed(*of) if tid != child])
    show_state(monkeypatch, parent, state)
    pid = machine.process()
    assign(machine.host.ctx, assignment("job", pid, "test"))
    machine.control.run(child, 5 * S, 0)
    machine.control.run(pid, S, 0)
    machine.check("job", quality, 1 if quality is Quality.EXACT else 6)


def test_task_that_is_being_forked_while_its_group_changes_its_class_is_counted(machine: Machine) -> None:
    """It has the CLOSID of the old class, and the RMID of the group."""
    machine.control.make_group("class")
    pid = machine.process()
    assign(machine.host.ctx, assignment("job", pid, "test"))
    machine.control.run(pid, S, 0)
    child = machine.process(by=pid)
    machine.control.overlook(child)
    move(machine.host.ctx, "job", "class")
    machine.control.run(child, 5 * S, 0)
    machine.check("job", Quality.EXACT, 6)


def test_task_that_left_a_nested_container_and_its_group_may_be_missing_in_both(machine: Machine) -> None:
    """Neither the control group of the container nor the group of the outer workload has the task then."""
    outer = machine.process()
    assign(machine.host.ctx, assignment("outer", outer, "test"))
    cgroup, elsewhere = machine.cgroup("box"), machine.cgroup("elsewhere")
    inner = machine.process(cgroup, by=outer)
    assign(machine.host.ctx, assignment("inner", inner, "test", own_cgroup=cgroup, kind="container", nested=True))
    child = machine.process(cgroup, by=inner)
    Path(elsewhere, "cgroup.procs").write_text(str(child))
    machine.control.steal(child)
    machine.control.run(inner, S, 0)
    machine.end(inner)
    machine.check("inner", Quality.ESTIMATED, 1)
    machine.control.run(child, 5 * S, 0)
    machine.check("outer", Quality.ESTIMATED, 0)


def test_task_that_forks_and_ends_when_a_nested_workload_lists_it_leaves_no_task_behind(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list had nothing that ran, and its child was in no workload."""
    outer = machine.process()
    assign(machine.host.ctx, assignment("outer", outer, "test"))
    inner = machine.process(by=outer)
    assign(machine.host.ctx, assignment("inner", inner, "test", nested=True))
    hoppers, is_running = [machine.process(by=inner)], processes.is_running
    machine.end(inner)

    def hop(tid: int) -> bool:
        if tid == hoppers[-1] and len(hoppers) < 5:
            hoppers.append(machine.process(by=tid))
            machine.end(tid)
        return is_running(tid)

    monkeypatch.setattr(processes, "is_running", hop)
    release(machine.host.ctx, "inner", owner="test")
    machine.control.run(hoppers[-1], 5 * S, 0)
    machine.check("outer", Quality.EXACT, 5)


@pytest.mark.parametrize("has_first", [True, False])
def test_stranger_in_a_group_in_which_no_member_began_is_found(machine: Machine, has_first: bool) -> None:
    """The IDs of such a group were not looked up, and its use by others was exact."""
    machine.control.make_group("class")
    pod = machine.cgroup(f"pod{POD}")
    cgroup = machine.cgroup("a" * 64, pod)
    if has_first:
        first = machine.container(POD, "a" * 64, cgroup, pod=pod)
        child = machine.process(cgroup, by=first)
        machine.control.steal(child, "class")
        machine.host.manager.maintenance.sweep(POD)
    else:
        create(machine.host.ctx, POD, owner="test", class_="")
        pid = machine.process(cgroup)
        machine.control.steal(pid, "class")
        given = {"own_cgroup": cgroup, "pod_cgroup": pod, "kind": "container", "member": "a" * 64}
        assign(machine.host.ctx, assignment(POD, pid, "test", **given))
    groups = machine.host.get(POD).groups
    assert len(groups) == 2
    stranger = machine.process()
    if has_first:
        machine.control.steal(stranger, "class")
    machine.control.steal(stranger, groups[has_first].ref.path)
    machine.control.run(stranger, 5 * S, 0)
    assert total_of(read(machine.host.ctx, POD)[2]).quality is Quality.ESTIMATED


def test_late_member_in_whose_place_another_is_named_stays_late(machine: Machine) -> None:
    pid = machine.process()
    machine.control.run(pid, 5 * S, 0)
    assign(machine.host.ctx, assignment("job", pid, "test", late=None, member="m"))
    machine.end(pid)
    machine.host.manager.maintenance.tick()
    add_member(machine.host.ctx, "job", "m", owner="test")
    machine.check("job", Quality.LATE, 0)


def test_container_without_a_control_group_is_late_when_it_is_forgotten(machine: Machine) -> None:
    cgroup = machine.cgroup("box")
    box = machine.process(cgroup)
    assign(machine.host.ctx, assignment("box", box, "test", member="box", kind="container"))
    machine.end(box)
    machine.host.manager.maintenance.tick()
    for number in range(MAX_ENDED_MEMBERS + 1):
        pid = machine.process()
        assign(machine.host.ctx, assignment("box", pid, "test", member=f"p{number}"))
        machine.end(pid)
        machine.host.manager.maintenance.record_ends("box")
    machine.check("box", Quality.LATE, 0)


def test_use_of_others_in_a_group_that_waited_is_found(machine: Machine) -> None:
    """The control group of a unit that had waited for an RMID was not asked for."""
    theirs = "mon_groups/theirs"
    machine.control.make_group(theirs)
    use_all_rmids(machine)
    cgroup, session = machine.cgroup("a.service"), machine.cgroup("session")
    pid = machine.process(cgroup)
    given = Assignment(key="a.service", owner=SYSTEMD, cgroup=cgroup, kind="unit", member="a.service")
    assign(machine.host.ctx, given)
    machine.control.remove_group(theirs)
    machine.control.advance(600)
    machine.host.manager.maintenance.tick()
    machine.control.run(pid, S, 0)
    child = machine.process(cgroup, by=pid)
    Path(session, "cgroup.procs").write_text(str(child))
    machine.see()
    machine.control.run(child, 5 * S, 0)
    assert total_of(read(machine.host.ctx, "a.service")[2]).quality is Quality.ESTIMATED


def test_pod_that_waits_remembers_over_a_restart_what_it_lacks(machine: Machine) -> None:
    theirs = "mon_groups/theirs"
    machine.control.make_group(theirs)
    use_all_rmids(machine)
    create(machine.host.ctx, POD, owner="test")
    elsewhere = machine.cgroup("b" * 64)
    pid = machine.process(elsewhere)
    machine.control.steal(pid, "mon_groups/other0")
    with pytest.raises(AlreadyMonitored):
        assign(
            machine.host.ctx,
            assignment(POD, pid, "test", own_cgroup=elsewhere, kind="container", member="b" * 64),
        )
    machine.host.restart()
    machine.control.remove_group(theirs)
    machine.control.advance(600)
    machine.host.manager.maintenance.tick()
    pod = machine.cgroup(f"pod{POD}")
    machine.container(POD, "a" * 64, machine.cgroup("a" * 64, pod), pod=pod)
    assert total_of(read(machine.host.ctx, POD)[2]).quality is Quality.LATE


@pytest.mark.parametrize("name", ["m", "other"])
def test_process_that_was_put_into_a_nested_workload_is_of_others_when_it_is_given_to_the_outer_one(
    machine: Machine, name: str
) -> None:
    """Only the members that the record still had were counted."""
    outer = machine.process()
    assign(machine.host.ctx, assignment("outer", outer, "test"))
    inner = machine.process(by=outer)
    assign(machine.host.ctx, assignment("inner", inner, "test", nested=True, member="m"))
    other = machine.process()
    assign(machine.host.ctx, assignment("inner", other, "test", member=name))
    child = machine.process(by=other)
    machine.end(other)
    machine.host.manager.maintenance.record_ends("inner")
    if name == "other":
        add_member(machine.host.ctx, "inner", name, owner="test")
    release(machine.host.ctx, "inner", owner="test")
    machine.control.run(child, 5 * S, 0)
    machine.check("outer", Quality.ESTIMATED, 5)


def test_others_in_the_group_of_a_container_whose_entry_was_cut_are_not_taken_for_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late states that use is missing, and here the figure is too high."""
    cgroup, elsewhere = machine.cgroup("box"), machine.cgroup("elsewhere")

    def be_killed(*_args: object, **_more: object) -> None:
        raise SystemExit

    monkeypatch.setattr(machine.host.ctx.proofs, "entered", be_killed)
    with pytest.raises(SystemExit):
        machine.container("box", "box", cgroup)
    machine.host.restart()
    (member,) = machine.host.get("box").members
    stranger = machine.process(cgroup, by=member.pid)
    Path(elsewhere, "cgroup.procs").write_text(str(stranger))
    machine.see()
    machine.control.run(stranger, 5 * S, 0)
    machine.check("box", Quality.ESTIMATED, 5)


@pytest.mark.parametrize("is_pod", [False, True])
@pytest.mark.parametrize(("seconds", "quality"), [(1, Quality.EXACT), (2, Quality.LATE)])
def test_much_use_in_the_control_group_of_a_container_before_its_assign_is_missing(
    machine: Machine, is_pod: bool, seconds: int, quality: Quality
) -> None:
    """It was taken for the runtime's, whatever had used it."""
    pod = machine.cgroup(f"pod{POD}") if is_pod else ""
    cgroup = machine.cgroup("a" * 64, pod)
    machine.used(seconds, cgroup)
    machine.container(POD, "a" * 64, cgroup, pod=pod)
    total = total_of(read(machine.host.ctx, POD)[2])
    assert (seconds == 1) is (f"used {seconds}.000 s of CPU time outside" not in total.reason)
    machine.check(POD, quality, 1)


@pytest.mark.parametrize("pod_is_stated", [False, True])
def test_start_without_a_hook_in_a_new_control_group_of_a_pod_is_late(machine: Machine, pod_is_stated: bool) -> None:
    """The control group of the pod is known by its name too."""
    for name in "ab":
        pod = machine.cgroup(f"pod{POD}")
        cgroup = machine.cgroup(name * 64, pod)
        if name == "a":
            machine.end(machine.container(POD, name * 64, cgroup, pod=pod if pod_is_stated else ""))
        else:
            machine.used(1, cgroup)
        machine.remove(cgroup, pod)
    machine.check(POD, Quality.LATE, 1)


def test_path_of_a_member_that_was_forgotten_is_still_known(machine: Machine) -> None:
    create(machine.host.ctx, "job", owner="test", class_="")
    for number in range(MAX_ENDED_MEMBERS + 2):
        name = f"box{number}"
        cgroup = machine.cgroup(name)
        machine.end(machine.container("job", name, cgroup, seconds=0))
        machine.remove(cgroup)
        machine.host.manager.maintenance.record_ends("job")
    assert machine.host.get("job").member("box0") is None
    cgroup = machine.cgroup("box0")
    machine.used(1, cgroup)
    machine.remove(cgroup)
    machine.check("job", Quality.LATE, 0)


@pytest.mark.parametrize("is_container", [True, False])
def test_stranger_in_a_group_that_was_in_another_class_between_two_looks_is_found(
    machine: Machine, is_container: bool
) -> None:
    """The group counts all use with its RMID, whatever the class."""
    machine.control.make_group("class")
    if is_container:
        pid = machine.container("job", "job", machine.cgroup("job"), seconds=0)
    else:
        assign(machine.host.ctx, assignment("job", pid := machine.process(), "test"))
    top = Path(machine.host.mountpoint)
    here, there = (top / below / "mon_groups/job" for below in ("", "class"))
    stranger = machine.process()
    here.rename(there)
    for group in ("class", "class/mon_groups/job"):
        machine.control.steal(stranger, group)
    machine.control.run(stranger, 5 * S, 0)
    for group in ("class", ""):
        machine.control.steal(stranger, group)
    there.rename(here)
    machine.control.run(pid, S, 0)
    machine.check("job", Quality.ESTIMATED, 6)


def test_use_in_a_group_that_was_in_another_class_between_two_looks_is_counted(machine: Machine) -> None:
    machine.control.make_group("class")
    pid = machine.container("job", "job", machine.cgroup("job"))
    top = Path(machine.host.mountpoint)
    (top / "mon_groups/job").rename(top / "class/mon_groups/job")
    machine.control.run(pid, 5 * S, 0)
    (top / "class/mon_groups/job").rename(top / "mon_groups/job")
    machine.check("job", Quality.EXACT, 6)


def test_quality_file_has_what_the_witness_has_seen_after_a_sweep(machine: Machine) -> None:
    """It can lack it before, also after a reply has had it."""
    cgroup = machine.cgroup("box")
    pid = machine.container("box", "box", cgroup)
    machine.used(5, cgroup)
    quality = Path(machine.host.run, "groups/box/quality")
    assert total_of(read(machine.host.ctx, "box")[2]).quality is Quality.LATE
    assert "exact" not in quality.read_text()
    for swept in (math.inf, -math.inf):
        machine.control.run(pid, S, 0)
        machine.host.manager.maintenance._swept = swept
        machine.host.manager.maintenance.tick()
    assert "exact" not in quality.read_text()


def test_end_of_a_nested_workload_that_does_not_state_what_became_of_its_tasks_is_not_exact(machine: Machine) -> None:
    outer = machine.process()
    assign(machine.host.ctx, assignment("outer", outer, "test"))
    inner = machine.process(by=outer)
    assign(machine.host.ctx, assignment("inner", inner, "test", nested=True))
    part = machine.host.get("inner").as_part
    machine.host.ctx.snapshots.write_nested("outer", part.name, b'{"totals":{}}')
    machine.check("outer", Quality.ESTIMATED, 0)
