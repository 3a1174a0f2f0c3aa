# SPDX-License-Identifier: Apache-2.0
"""A workload whose tasks are in several classes has a group in each class, and is one workload."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from resctrlmond.api import translate, types
from resctrlmond.api.access import Caller
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl.counters import EVENTS, Status, added_values, parse_value
from resctrlmond.resctrl.errors import ClassMismatch, RmidsExhausted
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.figures.accounting import Total, added
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import removal
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import InvalidClass
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import ROOT_FOLDER, GroupState, State, Workload
from resctrlmond.workloads.records.store import Limit, Transaction
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.workloads.conftest import UID, Host, assignment, own_host, when_all_stand
from tests.workloads.evidence.test_interference import write
from tests.workloads.groups.test_cut import Fuse, cut, forget, fuse

__all__ = ["fuse"]

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Host]:
    """RMIDs for the root, two classes and two groups."""
    with own_host(tmp_path, "intel-rdt", 5) as host:
        yield host


def spread(host: Host, process: Start, *classes: str) -> list[subprocess.Popen[bytes]]:
    """A pod with one container in each of the classes."""
    children = []
    for number, class_ in enumerate(classes):
        child = process()
        if class_:
            if not host.tree.has_class(class_):
                host.make_class(class_)
            host.tree.write_task(class_, child.pid)
        assign(host.ctx, assignment(UID, child.pid, "nri", member=f"c{number}"))
        children.append(child)
    return children


def test_each_class_gets_a_group_and_no_allocation_changes(host: Host, process: Start) -> None:
    children = spread(host, process, "gold", "", "silver", "gold")
    record = host.get(UID)
    assert [group.ref for group in record.groups] == [GroupRef(class_, UID) for class_ in ("gold", "", "silver")]
    assert [host.tree.membership(child.pid) for child in children] == [
        Membership(class_, UID) for class_ in ("gold", "", "silver", "gold")
    ]
    assert [member.folder for member in record.members] == ["", ROOT_FOLDER, "silver", ""]
    assert len({group.nonce for group in record.groups}) == 3
    files = host.files(UID)
    assert "classes/silver/mon_data/mon_L3_00/mbm_total_bytes.begin" in files
    assert f"classes/{ROOT_FOLDER}/mon_data/mon_L3_00/mbm_total_bytes.begin" in files
    live = f"-> {host.mountpoint}/silver/mon_groups/{UID}/mon_data/mon_L3_00/mbm_total_bytes"
    assert files["classes/silver/mon_data/mon_L3_00/mbm_total_bytes"] == live
    host.check()


@pytest.mark.parametrize("is_member", [False, True], ids=["at its start", "later"])
def test_tasks_in_a_class_whose_name_cannot_be_recorded_are_refused(
    host: Host, process: Start, puppet: Puppet, is_member: bool
) -> None:
    odd = os.fsdecode(b"od\xffd")
    host.make_class(odd)
    child = process()
    if is_member:
        assign(host.ctx, assignment("k", puppet.pid))
        for pid in (puppet.pid, int(puppet.do("thread"))):
            write(host, os.path.join(odd, "tasks"), pid)
        host.manager.maintenance.sweep("k")
        assert "not allowed" in host.get("k").members[0].reason
        assert {total.quality for total in read(host.ctx, "k")[2]} == {Quality.LATE}
    host.tree.write_task(odd, child.pid)
    with pytest.raises(InvalidClass, match="not allowed"):
        assign(host.ctx, assignment("other", child.pid))
    assert [workload.key for workload in host.ctx.store.all()] == ["k"] * is_member
    host.check()


def test_reads_and_totals_are_sums(host: Host, puppet: Puppet, process: Start) -> None:
    host.make_class("gold")
    assign(host.ctx, assignment("k", process().pid))
    host.tree.write_task("gold", puppet.pid)
    assign(host.ctx, assignment("k", puppet.pid))
    puppet.do("burn 0.2")
    _, readings, totals = read(host.ctx, "k")
    names = [(reading.domain, reading.event) for reading in readings]
    assert len(names) == len(set(names))
    assert {reading.value.status for reading in readings} == {Status.OK}
    # All of it was used in the second class.
    traffic = next(total for total in totals if total.event.name == "mbm_total_bytes")
    assert traffic.number is not None
    assert traffic.number > 0
    final = release(host.ctx, "k", owner="test")
    assert final.completed
    assert {total.quality for total in final.totals} == {Quality.EXACT}
    ends = {name: text for name, text in host.files("k").items() if name.endswith("mbm_total_bytes.end")}
    assert any(name.startswith("classes/gold/") for name in ends)
    begins = [int(host.files("k")[name.removesuffix("end") + "begin"]) for name in ends]
    [traffic] = [total for total in final.totals if total.event.name == "mbm_total_bytes"]
    assert traffic.number == sum(map(int, ends.values())) - sum(begins)
    assert read(host.ctx, "k") == (host.get("k"), [], final.totals)
    host.check()


def test_restart_keeps_the_groups_of_all_classes(host: Host, process: Start) -> None:
    spread(host, process, "gold", "")
    record, files = host.get(UID), host.files(UID)
    manager = host.restart()
    assert (manager.context.store.known(UID), host.files(UID), manager.problems) == (record, files, [])
    host.check()


def test_group_moved_without_a_daemon_is_kept_with_the_next_group(host: Host, process: Start) -> None:
    """The next group in its old class was recorded instead: its directory remained, and no total included it."""
    spread(host, process, "", "gold")
    host.make_class("silver")
    moved = GroupRef("silver", UID)
    os.rename(host.tree.full_path(GroupRef("gold", UID)), host.tree.full_path(moved))
    host.restart()
    third = process()
    host.tree.write_task("gold", third.pid)
    record = assign(host.ctx, assignment(UID, third.pid, "nri", member="c3")).workload
    assert [group.class_ for group in record.groups] == ["", "silver", "gold"]
    assert host.tree.membership(third.pid) == Membership("gold", UID)
    host.check()
    host.restart()
    host.check()
    done = release(host.ctx, UID, owner="nri")
    assert {total.quality for total in done.totals} == {Quality.EXACT}
    assert len({done.workload.subfolder(group) for group in done.workload.groups}) == 3
    assert host.marked_groups() == []
    host.check()


def test_release_ends_the_groups_of_all_classes(host: Host, process: Start) -> None:
    children = spread(host, process, "gold", "")
    done = release(host.ctx, UID, owner="nri")
    assert {group.state for group in done.workload.groups} == {GroupState.COMPLETED}
    assert host.marked_groups() == []
    assert [host.tree.membership(child.pid) for child in children] == [Membership("gold", ""), Membership("", "")]
    again = assign(host.ctx, assignment(UID, children[1].pid, "nri")).workload
    assert (again.generation, again.groups[1:]) == (2, ())
    host.check()


def test_group_remains_without_members_and_is_used_again(host: Host, process: Start) -> None:
    """The next container of that class counts in the same group: its RMID and its values are kept."""
    _, second = spread(host, process, "gold", "")
    before = host.get(UID)
    second.kill()
    second.wait()
    host.manager.maintenance.tick()
    assert host.get(UID).state is State.ACTIVE
    third = process()
    record = assign(host.ctx, assignment(UID, third.pid, "nri", member="c3")).workload
    assert [group.nonce for group in record.groups] == [group.nonce for group in before.groups]
    assert host.tree.membership(third.pid) == Membership("", UID)
    # A member whose process is assigned already is in no other monitoring group.
    assert assign(host.ctx, assignment(UID, third.pid, "nri", member="c3")).workload == record


def test_named_class_requires_permission_to_change_and_gets_a_group(host: Host, process: Start) -> None:
    host.make_class("gold")
    assign(host.ctx, assignment("k", process().pid))
    child = process()
    with pytest.raises(ClassMismatch):
        assign(host.ctx, assignment("k", child.pid, class_="gold"))
    assert host.get("k").groups[1:] == ()
    host.check()
    done = assign(host.ctx, assignment("k", child.pid, class_="gold", allow_class_change=True))
    assert [group.class_ for group in done.workload.groups] == ["", "gold"]
    assert host.tree.membership(child.pid) == Membership("gold", "k")
    host.check()


def test_move_refuses_a_workload_in_several_classes(host: Host, process: Start) -> None:
    spread(host, process, "gold", "", "silver")
    for class_ in ("", "silver"):
        with pytest.raises(ClassMismatch, match="in several classes"):
            move(host.ctx, UID, class_)
    host.check()


@pytest.mark.parametrize("class_", ["gold", ""])
def test_lost_group_ends_the_run_with_the_values_of_all_groups(host: Host, process: Start, class_: str) -> None:
    spread(host, process, "gold", "")
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(GroupRef(class_, UID)))
    host.manager.maintenance.tick()
    record = host.get(UID)
    assert (record.state, record.is_interrupted) == (State.LOST, True)
    assert host.marked_groups() == []
    host.check()
    totals = read(host.ctx, UID)[2]
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all("last read: " in total.reason for total in totals)


def test_group_lost_without_a_daemon_ends_the_run(host: Host, process: Start) -> None:
    spread(host, process, "gold", "")
    os.rmdir(host.tree.full_path(GroupRef("", UID)))
    host.restart()
    assert host.get(UID).state is State.LOST
    assert host.manager.problems == []
    assert host.marked_groups() == []
    host.check()


@pytest.mark.parametrize("name", ["with a line\nbreak", "no UTF-8 \udcff"])
def test_group_with_a_name_that_records_cannot_have_is_lost(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The record with that name could not be read by the next start, or not be written."""
    spread(host, process, "gold", "")
    host.tree.rename(GroupRef("gold", UID), GroupRef("gold", name))
    os.rmdir(host.tree.full_path(GroupRef("", UID)))
    saved: list[str] = []
    save = Transaction.save

    def keep(txn: Transaction, workload: Workload, limit: Limit | None = None) -> Workload:
        saved.extend(group.name for group in workload.groups)
        return save(txn, workload, limit)

    monkeypatch.setattr(Transaction, "save", keep)
    with host.ctx.store.transaction(UID) as txn:
        removal.lose(host.ctx, txn, "lost")
    assert set(saved) == {UID}
    assert host.marked_groups() == []
    assert host.restart().recovery.unreadable == []
    assert host.get(UID).state is State.LOST


def test_foreign_group_in_one_class_does_not_affect_the_other_classes(host: Host, process: Start) -> None:
    host.make_class("gold")
    foreign = host.make_foreign(UID, "gold")
    first, second = process(), process()
    before = assign(host.ctx, assignment(UID, first.pid, "nri")).workload
    host.tree.write_task("gold", second.pid)
    with pytest.raises(Exception, match="another program created it"):
        assign(host.ctx, assignment(UID, second.pid, "nri"))
    assert host.get(UID) == before
    assert host.tree.find(foreign) is not None
    host.check()


def test_without_an_rmid_the_further_group_waits_and_is_late(tight: Host, process: Start) -> None:
    tight.make_class("gold")
    tight.make_class("silver")
    create(tight.ctx, "other", owner="a")
    spread(tight, process, "gold", "silver")
    record = tight.get(UID)
    assert [group.state for group in record.groups] == [GroupState.CREATED, GroupState.PENDING]
    assert "ENOSPC" in record.members[1].reason
    _, _, totals = read(tight.ctx, UID)
    assert {total.quality for total in totals} == {Quality.LATE}
    assert all("class silver is not included" in total.reason for total in totals)
    with pytest.raises(RmidsExhausted):
        child = process()
        assign(tight.ctx, assignment(UID, child.pid, "nri", may_wait=False))
    tight.check()
    assert tight.restart().context.store.known(UID) == record
    release(tight.ctx, "other", owner="a")
    record = when_all_stand(tight, UID)
    assert baseline_of(record) is Quality.LATE
    assert (record.members[1].late, record.members[1].reason) == (True, "")
    assert tight.tree.membership(record.members[1].pid) == Membership("silver", UID)
    assert {total.quality for total in release(tight.ctx, UID, owner="nri").totals} == {Quality.LATE}
    tight.check()


def test_assign_counts_tasks_left_in_a_class_whose_group_waits(tight: Host, process: Start, puppet: Puppet) -> None:
    """The reply reported that no task stayed outside, also if threads were in another class."""
    tight.make_class("gold")
    tight.make_class("silver")
    create(tight.ctx, "other", owner="a")
    caller = Caller(0, frozenset({0}), os.getpid(), pid_namespaces=1)

    def assign_pid(pid: int) -> types.Reply:
        return VERBS["Assign"].run(tight.manager, types.AssignRequest(key=UID, pid=pid, late=True), caller)

    assign(tight.ctx, assignment(UID, process().pid))
    # One thread of two is in another class.
    tight.tree.write_task("gold", int(puppet.do("thread")))
    # A whole process in another class.
    child = process()
    tight.tree.write_task("gold", child.pid)
    for pid, moved in ((puppet.pid, 1), (child.pid, 0)):
        reply = assign_pid(pid)
        assert isinstance(reply, types.AssignReply)
        assert (reply.moved, reply.tasks_outside) == (moved, 1)
        member = next(member for member in reply.workload.members if member.pid == pid)
        assert member.tasks_outside == 1
        assert "ENOSPC" in member.reason
    release(tight.ctx, "other", owner="a")
    when_all_stand(tight, UID)
    tight.manager.maintenance.sweep(UID)
    assert [(member.tasks_outside, member.reason) for member in tight.get(UID).members] == 3 * [(0, "")]
    tight.check()


def test_pending_group_of_a_removed_class_is_created_in_the_current_class(tight: Host, process: Start) -> None:
    """Its group failed, and its tasks, which the kernel had moved to the root, were not searched again."""
    for class_ in ("gold", "silver"):
        tight.make_class(class_)
    create(tight.ctx, "other", owner="a")
    second = spread(tight, process, "", "gold")[1]
    assert [group.state for group in tight.get(UID).groups] == [GroupState.CREATED, GroupState.PENDING]
    os.rmdir(os.path.join(tight.mountpoint, "gold"))
    when_all_stand(tight, UID)
    tight.manager.maintenance.sweep(UID)
    assert tight.tree.membership(second.pid) == Membership("", UID)
    assert baseline_of(tight.get(UID)) is Quality.LATE
    tight.check()


def test_first_group_of_a_pending_workload_is_created_first(tight: Host, process: Start) -> None:
    tight.make_class("gold")
    for key in ("one", "two", "three"):
        create(tight.ctx, key, owner="a")
    children = [process(), process()]
    assign(tight.ctx, assignment(UID, children[0].pid, "nri"))
    tight.tree.write_task("gold", children[1].pid)
    done = assign(tight.ctx, assignment(UID, children[1].pid, "nri"))
    assert [group.state for group in done.workload.groups] == [GroupState.PENDING, GroupState.PENDING]
    for key in ("one", "two"):
        release(tight.ctx, key, owner="a")
    record = when_all_stand(tight, UID)
    assert record.state is State.ACTIVE
    assert [tight.tree.membership(child.pid) for child in children] == [Membership("", UID), Membership("gold", UID)]
    tight.check()


def test_a_kill_at_any_step_of_joining_another_class(
    small_simulation: str, tmp_path: Path, process: Start, fuse: Fuse
) -> None:
    host = Host(small_simulation, str(tmp_path))
    host.make_class("gold")
    step = 0
    killed = True
    while killed:
        first, second = process(), process()
        assign(host.ctx, assignment(UID, first.pid, "oci", pod_cgroup="/nowhere"))
        host.tree.write_task("gold", second.pid)
        killed = cut(fuse, step, lambda pid=second.pid: join(host.manager, pid))  # type: ignore[misc]
        manager = host.restart()
        host.check()
        record = manager.context.store.known(UID)
        # Known and counted, or not known at all.
        inside = host.tree.membership(second.pid) == Membership("gold", UID)
        assert inside == (len(record.members) == 2), step
        cut(fuse, step, lambda: release(host.ctx, UID, owner="oci"))
        manager = host.restart()
        host.check()
        release(manager.context, UID, owner="oci")
        assert host.marked_groups() == [], step
        assert ends_are_whole(host, manager.context.store.known(UID)), step
        forget(host)
        first.kill()
        second.kill()
        step += 1
    assert step > 15
    host.clean()


def join(manager: Manager, pid: int) -> None:
    assign(manager.context, assignment(UID, pid, "oci", pod_cgroup="/nowhere"))


def ends_are_whole(host: Host, record: Workload) -> bool:
    snapshots = host.ctx.snapshots
    return all(snapshots.is_complete(record.subfolder(group)) for group in record.groups)


def test_groups_of_both_classes_are_adopted_without_records(host: Host, process: Start) -> None:
    children = spread(host, process, "gold", "")
    shutil.rmtree(os.path.join(host.run, "records"))
    os.mkdir(os.path.join(host.run, "records"))
    host.restart()
    record = host.get(UID)
    assert sorted(group.class_ for group in record.groups) == ["", "gold"]
    assert baseline_of(record) is Quality.UNKNOWN
    host.check()
    children[0].kill()
    children[0].wait()
    host.manager.maintenance.tick()
    assert host.get(UID).state is State.ACTIVE
    children[1].kill()
    children[1].wait()
    host.manager.maintenance.tick()
    assert host.get(UID).state is State.COMPLETED
    host.check()


def test_values_are_added_exactly_and_invalid_numbers_are_returned() -> None:
    values = [parse_value(text) for text in ("9" * 20 + ".000000001", "0.000000002")]
    assert added_values(values).text == "9" * 20 + ".000000003"
    assert added_values([parse_value("1"), parse_value("2")]).number == 3
    assert added_values([parse_value("1"), parse_value("Unavailable")]).status is Status.UNAVAILABLE


def test_totals_are_as_good_as_their_worst_group() -> None:
    energy = EVENTS["core_energy"]
    exact, late = Total(energy, Decimal("1.5"), Quality.EXACT), Total(energy, Decimal(2), Quality.LATE, "why")
    assert added([[exact], [late]]) == [Total(energy, Decimal("3.5"), Quality.LATE, "why")]
    unknown = Total(energy, None, Quality.UNKNOWN, "lost")
    assert added([[exact], [unknown]]) == [Total(energy, Decimal("1.5"), Quality.ESTIMATED, "lost")]
    assert added([[unknown]]) == [unknown]


def test_a_baseline_that_is_late_in_a_second_class_only_is_reported(host: Host, puppet: Puppet) -> None:
    """It was exact, and the totals were late."""
    host.make_class("gold")
    assign(host.ctx, assignment(UID, puppet.pid))
    host.tree.write_task("gold", int(puppet.do("thread")))
    host.manager.maintenance.sweep(UID)
    record = host.get(UID)
    assert [group.class_ for group in record.groups] == ["", "gold"]
    assert {total.quality for total in read(host.ctx, UID)[2]} == {Quality.LATE}
    assert translate.workload_of(record, None).baseline is Quality.LATE
