# SPDX-License-Identifier: Apache-2.0
"""Nested runs: each task is counted in one workload, and the outer one knows what those inside it used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import nested, removal
from resctrlmond.workloads.groups.placement import sweep
from resctrlmond.workloads.model.errors import AlreadyMonitored, InvalidRequest, NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import EndRule, Nested, State
from resctrlmond.workloads.profiles.requests import Assigned
from resctrlmond.workloads.records import store
from resctrlmond.workloads.records.totals import used
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.read import nested_totals, read
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.workloads.builders import drop
from tests.workloads.conftest import Host, assignment, join, machine
from tests.workloads.groups.test_cut import Fuse, cut, forget, fuse
from tests.workloads.known_reasons import check_reasons

__all__ = ["fuse"]

Start = Callable[[], "subprocess.Popen[bytes]"]
ENERGY = "core_energy"
LEFT = "tasks of the nested workload inner may have run on after its end outside the group"
PIECE_NS = 31_250_000  # as in tests/truth: the simulator's counters represent its use exactly
PICO = 10**12


def inspect(host: Host, key: str) -> None:
    host.manager.maintenance._weigh()


class Family:
    """A machine with virtual tasks, of which some start others."""

    def __init__(self, host: Host, control: Control, process: Start) -> None:
        self.host = host
        self.control = control
        self._process = process

    def start(self, by: int = 0) -> int:
        """Start a process outside all groups, or fork one from task ``by``, in its group."""
        pid = self._process().pid
        return self.control.fork(by, tid=pid) if by else self.control.spawn(tid=pid)

    def run(self, *tids: int) -> None:
        for tid in tids:
            self.control.run(tid, 8 * PIECE_NS)

    def used(self, *tids: int) -> Decimal:
        """Return the joules that these tasks used, in all groups."""
        tasks = [task for tid in tids for task in self.control.truth(tid=tid).tasks]
        return sum((Decimal(row.picojoules) for task in tasks for row in task.used), Decimal(0)) / PICO

    def assign(self, key: str, pid: int, *, nested: bool = True, **more: Any) -> Assigned:
        return assign(self.host.ctx, assignment(key, pid, nested=nested, **more))

    def group(self, tid: int) -> str:
        return self.host.tree.membership(tid).group

    def read(self, key: str) -> tuple[Total, Total | None]:
        """Return the energy of a workload, and of those inside it."""
        workload, _, totals = read(self.host.ctx, key)
        return energy(totals), energy_if_any(nested_totals(self.host.ctx, workload, totals))

    def sweep(self, key: str) -> None:
        with self.host.ctx.store.transaction(key) as txn:
            sweep(self.host.ctx, txn)

    def inspect(self, key: str) -> None:
        inspect(self.host, key)

    def release(self, key: str) -> tuple[Total, Total | None]:
        """Release a workload. Return its energy, and that of the workloads inside it: Read returns the same later."""
        done = release(self.host.ctx, key, owner="test")
        found = energy(done.totals), energy_if_any(done.nested)
        assert done.completed
        assert self.read(key) == found
        return found


@pytest.fixture
def family(tmp_path: Path, process: Start) -> Iterator[Family]:
    with machine(tmp_path, "intel-aet", 32, residue=7) as (host, control):
        yield Family(host, control, process)


def write_as_other(top: str, tid: int) -> None:
    """Move a task to the root group, as another program does."""
    subprocess.run(["sh", "-c", f'echo {tid} > "$1/tasks"', "sh", top], check=True)


def energy(totals: list[Total]) -> Total:
    return next(total for total in totals if total.event.name == ENERGY)


def energy_if_any(totals: list[Total]) -> Total | None:
    for total in totals:
        check_reasons(total)
    return energy(totals) if totals else None


def exact(total: Total | None) -> Decimal:
    assert total is not None and total.quality is Quality.EXACT, total
    return Decimal(str(total.number))


def summed(found: tuple[Total, Total | None]) -> Decimal | None:
    """Return the sum of own and nested use, if both are exact."""
    own, inside = found
    if Quality.EXACT is not own.quality or (inside is not None and inside.quality is not Quality.EXACT):
        return None
    return exact(own) + (exact(inside) if inside is not None else 0)


def test_both_runs_are_exact_and_the_outer_one_includes_the_inner_one(family: Family) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.run(outer, inner)  # before its Assign, the inner one is counted in the outer one
    before = family.used(inner)
    assert family.assign("inner", inner).workload.part_of == ("outer",)
    child = family.start(by=inner)
    family.run(outer, inner, child)
    assert (family.group(inner), family.group(child)) == ("inner", "inner")
    assert summed(family.read("outer")) == family.used(outer, inner, child)
    family.host.check()
    family.host.manager.maintenance.tick()
    # The child runs on: from now on, it is counted in the outer run.
    own, inside = family.release("inner")
    assert (exact(own), inside) == (family.used(inner, child) - before, None)
    assert family.group(child) == "outer"
    family.run(outer, child)
    assert summed(family.read("outer")) == family.used(outer, inner, child)
    for _ in range(2):
        family.host.manager.maintenance.sweep("outer")
        family.inspect("outer")
    found = family.release("outer")
    assert exact(found[1]) == exact(own)
    assert summed(found) == family.used(outer, inner, child)
    assert family.host.get("outer").nested.count == 1
    family.host.check()


def test_nested_runs_one_after_the_other_are_added_up_in_the_record(family: Family) -> None:
    """A build with thousands of them would make the record too long."""
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = []
    for number in range(4):
        inner.append(family.start(by=outer))
        # The second key is used again: the files of the first run are set aside.
        family.assign(f"inner-{number % 3}", inner[-1])
        family.run(inner[-1])
        family.release(f"inner-{number % 3}")
    nested = family.host.get("outer").nested
    assert (nested.count, [part.key for part in nested.living]) == (4, ["inner-0"])
    assert summed(family.read("outer")) == family.used(outer, *inner)
    family.host.manager.maintenance.sweep("outer")
    assert family.host.get("outer").nested.living == ()
    assert os.listdir(f"{family.host.run}/groups/outer/nested") == []
    assert summed(family.release("outer")) == family.used(outer, *inner)


def test_use_of_an_earlier_run_with_the_same_key_is_not_counted_again(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was killed just after the record was written has left the file."""
    outer = family.start()
    family.assign("outer", outer, nested=False)
    first, second = family.start(by=outer), family.start(by=outer)
    family.assign("inner", first)
    family.run(first)
    family.release("inner")
    with monkeypatch.context() as patch:
        patch.setattr("resctrlmond.workloads.records.snapshot.Snapshots.remove_nested", lambda *_: None)
        family.host.manager.maintenance.sweep("outer")
    family.host.ctx.snapshots.delete("inner")
    drop(family.host.ctx.store, "inner")
    family.assign("inner", second)
    assert family.host.get("inner").generation == 1
    family.run(second)
    assert summed(family.read("outer")) == family.used(outer, first, second)
    family.run(second)
    family.release("inner")
    assert summed(family.release("outer")) == family.used(outer, first, second)


def test_run_inside_a_nested_run_is_counted_once_in_each_run_around_it(family: Family) -> None:
    tasks = [family.start()]
    family.assign("a", tasks[0], nested=False)
    for key in "bc":
        tasks.append(family.start(by=tasks[-1]))
        family.assign(key, tasks[-1])
    assert family.host.get("c").part_of == ("b", "a")
    family.run(*tasks)
    for number, key in enumerate("abc"):
        assert summed(family.read(key)) == family.used(*tasks[number:])
    # The run in the middle ends first. The innermost one goes on inside the outermost one.
    assert summed(family.release("b")) == family.used(*tasks[1:])
    assert family.group(tasks[1]) == "a"
    family.run(*tasks)
    assert summed(family.read("a")) == family.used(*tasks)
    family.release("c")
    assert family.group(tasks[2]) == "a"
    family.run(*tasks)
    assert summed(family.release("a")) == family.used(*tasks)
    family.host.check()


def test_inner_run_that_outlives_the_outer_one(family: Family) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    family.run(outer, inner)
    at_end = family.used(outer, inner)
    assert summed(family.release("outer")) == at_end
    family.run(inner)
    assert summed(family.read("outer")) == at_end
    assert exact(family.release("inner")[0]) == family.used(inner)
    assert family.host.tree.membership(inner) == Membership("", "")
    assert summed(family.read("outer")) == at_end


def test_nested_run_continues_after_a_kill_of_the_daemon(family: Family) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner, ended = family.start(by=outer), family.start(by=outer)
    for key, pid in (("inner", inner), ("ended", ended)):
        family.assign(key, pid)
    family.run(outer, inner, ended)
    family.release("ended")
    family.host.restart()
    family.host.manager.maintenance.tick()
    family.run(outer, inner, ended)
    assert summed(family.read("outer")) == family.used(outer, inner, ended)
    family.release("inner")
    family.host.restart()
    family.run(outer, inner)
    assert summed(family.release("outer")) == family.used(outer, inner, ended)
    family.host.check()


def test_end_of_an_inner_run_while_no_daemon_runs_is_not_exact(family: Family) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner, ends=EndRule.MEMBERS)
    child = family.start(by=inner)
    family.run(outer, inner, child)
    os.kill(inner, 9)
    os.waitpid(inner, 0)
    family.host.restart()
    family.release("inner")
    assert family.group(child) == "outer"
    own, inside = family.release("outer")
    assert (exact(own), inside and inside.quality) == (family.used(outer), Quality.ESTIMATED)


def test_sweep_of_the_outer_workload_leaves_the_tasks_of_the_inner_one(
    host: Host, process: Start, cgroup: str
) -> None:
    """A container, with a run inside."""
    init, inner = process(), process()
    for child in (init, inner):
        join(cgroup, child.pid)
    assign(host.ctx, assignment("ctr", init.pid, "oci", member="c1", own_cgroup=cgroup))
    host.manager.maintenance.sweep("ctr")
    assert host.tree.membership(inner.pid).group == "ctr"
    before = host.get("ctr")
    assign(host.ctx, assignment("inner", inner.pid, nested=True))
    for _ in range(2):
        host.manager.maintenance.sweep("ctr")
        inspect(host, "ctr")
    assert host.tree.membership(inner.pid).group == "inner"
    now = host.get("ctr")
    assert (now.groups, now.members) == (before.groups, before.members)
    assert baseline_of(host.get("inner")) is Quality.EXACT


def test_child_in_a_nested_run_does_not_look_as_if_it_was_moved_out(host: Host, puppet: Puppet) -> None:
    """A daemon that has started again does not know which tasks the last one moved."""
    assign(host.ctx, assignment("outer", puppet.pid))
    child = int(puppet.do("fork"))
    assert host.tree.membership(child).group == "outer"
    assign(host.ctx, assignment("inner", child, nested=True))
    host.restart()
    for _ in range(2):
        inspect(host, "outer")
    assert host.tree.membership(child).group == "inner"
    assert baseline_of(host.get("outer")) is Quality.EXACT


def test_task_of_another_program_or_of_no_nested_run_is_not_taken(family: Family) -> None:
    first = family.start()
    family.assign("first", first, nested=False)
    with pytest.raises(AlreadyMonitored):
        family.assign("second", first, nested=False)
    with pytest.raises(InvalidRequest, match="takeOver"):
        family.assign("second", first, take_over=True)
    foreign, other = family.host.make_foreign("theirs"), family.start()
    family.host.tree.write_task(foreign.path, other)
    with pytest.raises(AlreadyMonitored):
        family.assign("second", other)
    # A workload that exists already does not begin inside another one.
    family.assign("second", family.start(), nested=False)
    with pytest.raises(AlreadyMonitored):
        family.assign("second", first)
    assert [family.host.get(key).nested for key in ("first", "second")] == [Nested(), Nested()]
    # Outside every group, it is a workload as any other.
    assert family.assign("third", family.start()).workload.part_of == ()


def test_tasks_that_cannot_return_make_the_outer_run_late(family: Family) -> None:
    family.host.make_class("gold")
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner, class_="gold", allow_class_change=True)
    assert family.host.tree.membership(inner) == Membership("gold", "inner")
    family.run(outer, inner)
    assert summed(family.read("outer")) == family.used(outer, inner)
    assert exact(family.release("inner")[0]) == family.used(inner)
    family.run(inner)
    for own, inside in (family.read("outer"), family.release("outer")):
        assert (own.quality, own.reason) == (Quality.LATE, LEFT)
        assert exact(inside) < family.used(inner)


def test_take_over_of_a_task_of_the_inner_run_makes_the_outer_run_late(family: Family) -> None:
    """At the end of the inner run, the task does not return."""
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    child = family.start(by=inner)
    family.assign("other", child, nested=False, take_over=True)
    family.release("inner")
    family.release("other")
    family.run(child)
    own, _ = family.release("outer")
    assert (own.quality, own.reason) == (Quality.LATE, LEFT)


def test_outer_run_is_late_if_another_program_moves_a_task_out_of_the_inner_one(family: Family) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    child = family.start(by=inner)
    family.inspect("inner")
    write_as_other(family.host.tree.path, child)
    family.inspect("inner")
    assert family.host.get("inner").first.moved_out == 1
    family.run(child)
    os.kill(child, 9)
    os.waitpid(child, 0)
    family.release("inner")
    own, _ = family.release("outer")
    assert (own.quality, own.reason) == (Quality.LATE, LEFT)


@pytest.mark.parametrize("is_pruned", [False, True])
def test_tasks_that_cannot_return_while_run_is_full_make_the_outer_run_late(
    family: Family, monkeypatch: pytest.MonkeyPatch, is_pruned: bool
) -> None:
    """The file of the inner run is missing, and its record may be too."""
    family.host.make_class("gold")
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner, class_="gold", allow_class_change=True)
    family.run(outer, inner)
    used = family.used(inner)

    def fill(*_: object) -> None:
        raise NotWritten("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(family.host.ctx.snapshots, "write_nested", fill)
        family.release("inner")
    family.run(inner)
    if is_pruned:
        drop(family.host.ctx.store, "inner")
        family.sweep("outer")
    for own, inside in (family.read("outer"), family.release("outer")):
        assert (own.quality, own.reason) == (Quality.LATE, LEFT)
        assert inside is not None
        assert is_pruned or exact(inside) == used


def test_end_without_a_file_is_kept_by_the_next_sweep(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    family.run(outer, inner)

    def fill(*_: object) -> None:
        raise NotWritten("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(family.host.ctx.snapshots, "write_nested", fill)
        family.release("inner")
    family.sweep("outer")
    drop(family.host.ctx.store, "inner")
    assert summed(family.release("outer")) == family.used(outer, inner)


def test_tasks_that_return_to_a_run_further_out_make_the_nearest_one_late(family: Family) -> None:
    family.host.make_class("gold")
    tasks = [family.start()]
    family.assign("a", tasks[0], nested=False)
    tasks.append(family.start(by=tasks[0]))
    family.assign("b", tasks[1], class_="gold", allow_class_change=True)
    tasks.append(family.start(by=tasks[1]))
    family.assign("inner", tasks[2], class_="", allow_class_change=True)
    family.run(*tasks)
    family.release("inner")
    assert family.group(tasks[2]) == "a"
    family.run(*tasks)
    own, _ = family.release("b")
    assert (own.quality, own.reason) == (Quality.LATE, LEFT)


def test_end_that_is_completed_later_makes_the_outer_run_late(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that was forked while the others were moved has ended meanwhile."""
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)

    def fail(*_: object, **__: object) -> None:
        child = family.start()
        family.host.tree.write_task("mon_groups/inner", child)
        family.run(child)
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise NotWritten("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(nested, "has_new_tasks", fail)
        with pytest.raises(NotWritten):
            release(family.host.ctx, "inner", owner="test")
    family.host.manager.maintenance.tick()
    assert family.host.get("inner").state is State.COMPLETED
    own, _ = family.release("outer")
    assert (own.quality, own.reason) == (Quality.LATE, LEFT)


def test_later_run_with_the_key_of_an_outer_one_contains_nothing(family: Family) -> None:
    tasks = [family.start()]
    family.assign("a", tasks[0], nested=False)
    tasks.append(family.start(by=tasks[0]))
    family.assign("b", tasks[1])
    family.release("a")
    # A run that is inside b, so it is not around b.
    tasks.append(family.start(by=tasks[1]))
    assert family.assign("a", tasks[2]).workload.part_of == ("b",)
    family.run(*tasks)
    own, inside = family.read("a")
    assert (exact(own), inside) == (family.used(tasks[2]), None)
    assert summed(family.read("b")) == family.used(*tasks[1:])
    family.release("a")
    assert family.group(tasks[2]) == "b"
    # A run elsewhere.
    stranger = family.start()
    family.assign("a", stranger, nested=False)
    tasks.append(family.start(by=tasks[1]))
    family.assign("c", tasks[3])
    family.run(stranger, *tasks)
    own, inside = family.release("a")
    assert (exact(own), inside) == (family.used(stranger), None)
    assert summed(family.release("b")) == family.used(*tasks[1:])


def test_failed_assign_while_run_is_full_leaves_the_outer_run_exact(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [family.start()]
    family.assign("a", tasks[0], nested=False)
    tasks.append(family.start(by=tasks[0]))
    family.assign("b", tasks[1])
    tasks.append(family.start(by=tasks[1]))

    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device")

    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            patch.setattr("resctrlmond.workloads.records.store.write_file", fill)
            raise NotWritten("no space left on device")

        patch.setattr("resctrlmond.workloads.verbs.assign._move", fail)
        with pytest.raises(NotWritten):
            family.assign("inner", tasks[2])
    assert family.group(tasks[2]) == "b"
    family.run(*tasks)
    assert summed(family.read("a")) == family.used(*tasks)
    assert summed(family.release("b")) == family.used(*tasks[1:])
    assert summed(family.release("a")) == family.used(*tasks)


def test_task_that_is_forked_while_the_others_are_moved_makes_the_outer_run_late(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in no list yet, and had the RMID of the inner run."""
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    late: list[int] = []
    write_end = removal._write_end

    def fork(*arguments: Any) -> Any:
        done = write_end(*arguments)
        late.append(family.start())
        family.host.tree.write_task("mon_groups/inner", late[0])
        family.run(late[0])
        return done

    with monkeypatch.context() as patch:
        patch.setattr(removal, "_write_end", fork)
        family.release("inner")
    assert (family.group(inner), family.group(late[0])) == ("outer", "outer")
    own, _ = family.release("outer")
    assert own.quality is Quality.LATE


def test_task_that_a_container_takes_meanwhile_stays_there(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = family.start()
    family.assign("outer", outer)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    init = family.start(by=inner)
    create(family.host.ctx, "container", owner="oci")
    is_running = processes.is_running

    def moved_meanwhile(tid: int, start_time: int | None = None) -> bool:
        if tid == init:  # listed, and not moved yet
            family.host.tree.write_task(GroupRef("", "container").path, init)
        return is_running(tid, start_time)

    monkeypatch.setattr(processes, "is_running", moved_meanwhile)
    family.release("inner")
    assert (family.group(inner), family.group(init)) == ("outer", "container")


def test_run_in_another_class_that_leaves_no_task_is_exact(family: Family) -> None:
    family.host.make_class("gold")
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner, class_="gold", allow_class_change=True)
    family.run(inner)
    used = family.used(inner)
    os.kill(inner, 9)
    os.waitpid(inner, 0)
    family.release("inner")
    own, inside = family.release("outer")
    assert (exact(own), exact(inside)) == (Decimal(0), used)


def test_use_of_an_inner_run_that_is_lost_is_not_exact(family: Family) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    family.run(outer, inner)
    family.read("inner")
    os.rmdir(family.host.tree.full_path(GroupRef("", "inner")))
    family.run(inner)
    family.host.manager.maintenance.tick()
    assert family.host.get("inner").state is State.LOST
    own, inside = family.release("outer")
    assert (own.quality, own.reason) == (Quality.LATE, LEFT)
    assert inside is not None and inside.quality is Quality.ESTIMATED
    assert 0 < Decimal(str(inside.number)) < family.used(inner)


@pytest.mark.parametrize("what", ["file", "record"])
def test_nested_use_that_cannot_be_read_is_unknown(family: Family, what: str) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    family.run(outer, inner)
    if what == "file":
        family.release("inner")
        (end,) = Path(family.host.run, "groups/outer/nested").iterdir()
        end.write_text("{")
    drop(family.host.ctx.store, "inner")
    # Nor is it known whether tasks of it have run on elsewhere.
    family.sweep("outer")
    for own, inside in (family.read("outer"), family.release("outer")):
        assert (own.number, own.quality, own.reason) == (family.used(outer), Quality.LATE, LEFT)
        assert inside is not None
        assert (inside.quality, inside.number) == (Quality.UNKNOWN, None)
        assert inside.reason == "the use of nested workloads is not known: workload inner is missing"


def test_failed_assign_leaves_the_outer_run_as_it_was(family: Family) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    before = family.host.get("outer")
    family.control.set_faults(Fault(on=Operation.TASKS, group="mon_groups/inner", answer="EPERM"))
    with pytest.raises(ResctrlError):
        family.assign("inner", inner)
    family.control.set_faults()
    assert family.host.get("outer") == before
    assert family.group(inner) == "outer"
    family.run(outer, inner)
    found = family.release("outer")
    assert (exact(found[0]), found[1]) == (family.used(outer, inner), None)


@pytest.mark.parametrize("is_nested", [True, False])
def test_failed_assign_keeps_the_use_of_an_earlier_run_with_the_same_key(family: Family, is_nested: bool) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    first, second = family.start(by=outer), family.start(by=outer if is_nested else 0)
    family.assign("inner", first)
    family.run(outer, first)
    used = family.used(first)
    family.release("inner")
    family.control.set_faults(Fault(on=Operation.MKDIR, group="mon_groups/inner", answer="EPERM"))
    with pytest.raises(ResctrlError):
        family.assign("inner", second, nested=is_nested)
    family.control.set_faults()
    own, inside = family.release("outer")
    assert (exact(own), exact(inside)) == (family.used(outer, first, second) - used, used)


def test_outer_run_is_late_if_a_rejected_task_ran_outside(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)

    def fail(*_: object, **__: object) -> None:
        family.run(inner)
        raise ResctrlError("fails after the move")

    with monkeypatch.context() as patch:
        patch.setattr("resctrlmond.workloads.verbs.assign._with_lateness", fail)
        with pytest.raises(ResctrlError, match="after the move"):
            family.assign("inner", inner)
    assert family.group(inner) == "outer"
    own, inside = family.release("outer")
    assert (own.quality, own.reason, inside) == (
        Quality.LATE,
        Reason.MOVED_OUT.text(by="workload inner had one of them for a time"),
        None,
    )


def test_resumed_outer_run_keeps_the_nested_ones(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resctrlmond.workloads.groups.resumption.RESUME_S", 0.0)
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner, ended = family.start(by=outer), family.start(by=outer)
    for key, pid in (("inner", inner), ("ended", ended)):
        family.assign(key, pid)
        family.run(pid)
    family.release("ended")
    os.rmdir(family.host.tree.full_path(GroupRef("", "outer")))
    for _ in range(2):
        family.host.manager.maintenance.tick()
    assert family.host.get("outer").generation == 2
    family.run(inner)
    used = family.used(inner)
    family.release("inner")
    assert family.group(inner) == "outer"
    own, inside = family.release("outer")
    assert (own.quality, inside and inside.number) == (Quality.ESTIMATED, used + family.used(ended))


def test_sweep_finds_tasks_outside_while_the_end_of_a_nested_run_cannot_be_saved(
    host: Host, puppet: Puppet, process: Start, cgroup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While /run is full, a sweep cannot add the file of the nested run to the record."""
    join(cgroup, puppet.pid)
    assign(host.ctx, assignment("ctr", puppet.pid, "oci", member="c1", own_cgroup=cgroup))
    assign(host.ctx, assignment("inner", int(puppet.do("fork")), nested=True))
    release(host.ctx, "inner", owner="test")
    outside = process()
    join(cgroup, outside.pid)

    def fill(*_: object, **__: object) -> None:
        raise NotWritten("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("resctrlmond.workloads.records.store.write_file", fill)
        with suppress(NotWritten):
            host.manager.maintenance.sweep("ctr")
    host.manager.maintenance.sweep("ctr")
    assert host.get("ctr").nested.living == ()
    assert host.tree.membership(outside.pid).group == "ctr"


def test_nested_use_is_not_exact_after_a_loss_of_the_outer_group(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins before the group is created again is not in the list of the outer run."""
    monkeypatch.setattr("resctrlmond.workloads.groups.resumption.RESUME_S", 0.0)
    outer = family.start()
    family.assign("outer", outer, nested=False)
    first, missed = family.start(by=outer), family.start(by=outer)
    family.assign("first", first)
    os.rmdir(family.host.tree.full_path(GroupRef("", "outer")))
    family.host.manager.maintenance.tick()
    assert family.host.get("outer").state is State.LOST
    assert family.assign("missed", missed).workload.part_of == ()
    family.host.manager.maintenance.tick()
    assert family.host.get("outer").generation == 2
    family.run(first, missed)
    used = family.used(first)
    family.host.restart()
    family.release("first")
    for _, inside in (family.read("outer"), family.release("outer")):
        assert inside is not None
        assert (inside.number, inside.quality) == (used, Quality.ESTIMATED)
        assert (
            inside.reason
            == "the use of nested workloads is not known: those that began while its group was lost are not included"
        )


@pytest.mark.parametrize("lacks", ["first", "second", "both"])
def test_event_that_a_nested_run_lacks_is_not_exact(
    family: Family, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """As if the files of the event had not existed during that run."""
    outer = family.start()
    family.assign("outer", outer, nested=False)

    def lacking(snapshots: Any, workload: Any, live: Any) -> list[Total]:
        found = used(snapshots, workload, live)
        return [total for total in found if total.event.name != ENERGY or lacks not in (workload.key, "both")]

    monkeypatch.setattr("resctrlmond.workloads.groups.nested.used", lacking)
    counted = Decimal(0)
    for key in ("first", "second"):
        inner = family.start(by=outer)
        family.assign(key, inner)
        family.run(inner)
        if lacks not in (key, "both"):
            counted = family.used(inner)
        family.release(key)
    for _, inside in (family.read("outer"), family.release("outer")):
        assert inside is not None
        quality = Quality.UNKNOWN if lacks == "both" else Quality.ESTIMATED
        assert (inside.number, inside.quality) == (None if lacks == "both" else counted, quality)
        assert inside.reason == "the use of nested workloads is not known: they did not count this event"


def test_kill_at_any_step_of_a_nested_assign_and_release(family: Family, fuse: Fuse) -> None:
    """Whatever is counted where, no sum is exact and wrong."""
    outer = family.start()
    inner = family.start(by=outer)
    child = family.start(by=inner)
    exact_ones = 0
    for verb in ("assign", "release"):
        step, killed = 0, True
        while killed:
            for pid in (inner, child):
                family.control.steal(pid)
            begin = family.used(outer, inner, child)
            family.assign("outer", outer, nested=False)
            for pid in (inner, child):
                family.host.tree.write_task("mon_groups/outer", pid)
            family.run(outer, inner, child)
            if verb == "assign":
                killed = cut(fuse, step, lambda: family.assign("inner", inner))
            else:
                family.assign("inner", inner)
                family.host.tree.write_task("mon_groups/inner", child)
                family.run(inner, child)
                killed = cut(fuse, step, lambda: release(family.host.ctx, "inner", owner="test"))
            family.host.restart()
            family.run(outer, inner, child)
            family.host.check()
            inner_record = family.host.ctx.store.get("inner")
            if inner_record is not None and not inner_record.state.is_over:
                release(family.host.ctx, "inner", owner="test")
            assert {family.group(pid) for pid in (inner, child)} == {"outer"}, (verb, step)
            family.run(outer, inner, child)
            found = summed(family.release("outer"))
            assert found in (None, family.used(outer, inner, child) - begin), (verb, step)
            exact_ones += found is not None
            family.host.check()
            forget(family.host)
            step += 1
        assert step > 10
    assert exact_ones > 2


def test_release_that_cannot_be_recorded_leaves_the_tasks_in_the_inner_run(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    family.run(inner)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_file", refuse)
        with pytest.raises(NotWritten):
            release(family.host.ctx, "inner", owner="test")
    assert (family.host.get("inner").state, family.group(inner)) == (State.ACTIVE, "inner")
    family.run(inner)
    used = family.used(inner)
    family.control.exit(inner)
    assert exact(family.release("inner")[0]) == used
    assert summed(family.release("outer")) == used


def test_inner_run_whose_tasks_returned_before_the_end_values_were_read_is_estimated(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = family.start()
    family.assign("outer", outer, nested=False)
    inner = family.start(by=outer)
    family.assign("inner", inner)
    family.run(inner)
    with monkeypatch.context() as patch:
        patch.setattr(type(family.host.ctx.snapshots), "end", refuse)
        with pytest.raises(OSError, match="No space"):
            release(family.host.ctx, "inner", owner="test")
    assert (family.host.get("inner").state, family.group(inner)) == (State.ENDING, "outer")
    family.run(inner)
    used = family.used(inner)
    family.control.exit(inner)
    os.kill(inner, 9)
    os.waitpid(inner, 0)
    own, _ = family.release("inner")
    assert own.quality is Quality.ESTIMATED
    assert "its tasks may have been moved out of the group before" in own.reason
    total, inside = family.release("outer")
    assert inside is not None
    assert Decimal(str(total.number)) + Decimal(str(inside.number)) == used


def refuse(*_: object, **_more: object) -> None:
    raise OSError(28, "No space left on device")
