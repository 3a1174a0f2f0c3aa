# SPDX-License-Identifier: Apache-2.0
"""The verbs on a simulated machine: their effects, the groups that they do not change, and repeated calls."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

import pytest

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    PermissionDenied,
    ResctrlError,
)
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import Found, GroupRef
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.model.errors import (
    AlreadyMonitored,
    ForeignGroup,
    InvalidAttributes,
    InvalidClass,
    InvalidKey,
    InvalidRequest,
    NoSuchClaim,
    NoSuchWorkload,
)
from resctrlmond.workloads.model.settings import Settings
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.profiles.requests import Assignment
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member, remove_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import reconcile, release
from tests.sim.conftest import Puppet
from tests.workloads.conftest import UID, Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]


def test_create_is_idempotent(host: Host) -> None:
    first = create(host.ctx, "k", owner="a", attributes={"x": "1"})
    files = host.files("k")
    again = create(host.ctx, "k", owner="a", attributes={"x": "1"})
    assert again == first
    assert (first.state, baseline_of(first), first.first.class_) == (State.IDLE, Quality.EXACT, "")
    third = create(host.ctx, "k", owner="b", attributes={"y": "2"})
    assert [claim.owner for claim in third.claims] == ["a", "b"]
    assert third.attributes == {"x": "1", "y": "2"}
    assert (third.first.nonce, third.first.ref) == (first.first.nonce, first.first.ref)
    assert host.files("k") == files
    host.check()


@pytest.mark.parametrize("spelling", [UID, UID.upper(), UID.replace("-", "")])
def test_a_pod_has_one_group_under_its_bare_uid(host: Host, spelling: str) -> None:
    host.settings = Settings(group_prefix="rm-")
    host.restart()
    assert create(host.ctx, spelling, owner="a").first.ref == GroupRef("", UID)
    assert create(host.ctx, "unit.service", owner="a").first.ref == GroupRef("", "rm-unit.service")
    assert host.get(spelling).key == UID


def test_the_group_follows_its_first_task(host: Host, process: Start) -> None:
    host.make_class("gold")
    child = process()
    host.tree.write_task("gold", child.pid)
    created = create(host.ctx, "k", owner="a")
    assert created.first.class_ == ""
    done = assign(host.ctx, assignment("k", child.pid, "a"))
    assert done.workload.first.ref == GroupRef("gold", "k")
    assert done.workload.first.nonce == created.first.nonce
    assert host.tree.membership(child.pid) == Membership("gold", "k")
    assert os.path.exists(os.path.join(host.run, "groups/k/mon_data/mon_L3_00/llc_occupancy"))
    host.check()
    # Once: it stays where its first task is.
    other = process()
    assert assign(host.ctx, assignment("k", other.pid, "a")).workload.first.ref == done.workload.first.ref
    assert host.tree.membership(child.pid) == Membership("gold", "k")


def test_assign_moves_all_threads(host: Host, puppet: Puppet) -> None:
    threads = {int(puppet.do("thread")) for _ in range(3)}
    done = assign(host.ctx, assignment("k", puppet.pid))
    assert done.moved.moved == 4
    assert set(host.tree.tasks(done.workload.first.ref)) == threads | {puppet.pid}
    again = assign(host.ctx, assignment("k", puppet.pid))
    assert (again.moved.moved, again.workload.state) == (0, State.ACTIVE)
    assert len(again.workload.members) == 1


def test_a_class_other_than_the_tasks_own_is_refused_unless_allowed(host: Host, process: Start) -> None:
    host.make_class("gold")
    child = process()
    with pytest.raises(ClassMismatch):
        assign(host.ctx, assignment("k", child.pid, class_="gold"))
    assert (host.marked_groups(), host.ctx.store.all(), host.folder("groups")) == ([], [], [])
    assert host.tree.membership(child.pid) == Membership("", "")
    assign(host.ctx, assignment("k", child.pid, class_="gold", allow_class_change=True))
    assert host.tree.membership(child.pid) == Membership("gold", "k")


def test_owners_do_not_end_each_others_claims(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid, "nri"))
    create(host.ctx, "k", owner="cli")
    released = release(host.ctx, "k", owner="cli")
    assert not released.completed
    assert host.get("k").state is State.ACTIVE
    with pytest.raises(NoSuchClaim, match="claimed by nri"):
        release(host.ctx, "k", owner="stranger")
    assert host.get("k").state is State.ACTIVE
    last = release(host.ctx, "k", owner="nri", reason="pod\x1b[0m gone")
    assert last.completed
    assert (last.workload.state, last.workload.reason, last.workload.claims) == (State.COMPLETED, "pod[0m gone", ())
    assert host.tree.membership(child.pid) == Membership("", "")
    host.check()


def test_release_gives_the_same_totals_again(host: Host, puppet: Puppet) -> None:
    assign(host.ctx, assignment("k", puppet.pid))
    puppet.do("burn 0.2")
    first = release(host.ctx, "k", owner="test")
    again = release(host.ctx, "k", owner="test")
    assert again == first
    assert read(host.ctx, "k") == (first.workload, [], first.totals)
    totals = {total.event.name: total for total in first.totals}
    assert {total.quality for total in first.totals} == {Quality.EXACT}
    # The simulation's rates: 2.5 J and 1 GiB for a second of CPU time, independent of the begin values.
    assert 0.3 < float(totals["core_energy"].number or 0) < 2
    assert 1 << 27 < (totals["mbm_total_bytes"].number or 0) < 1 << 30


def test_reading_a_living_group(host: Host, puppet: Puppet) -> None:
    assign(host.ctx, assignment("k", puppet.pid))
    puppet.do("burn 0.1")
    record, readings, totals = read(host.ctx, "k")
    assert record.state is State.ACTIVE
    assert {reading.event for reading in readings} >= {"llc_occupancy", "mbm_total_bytes", "core_energy"}
    assert all(total.number is not None for total in totals)


def test_reused_key_begins_a_new_run_and_keeps_the_old_run(host: Host, process: Start) -> None:
    for generation in (1, 2, 3):
        record = assign(host.ctx, assignment("k", process().pid)).workload
        assert (record.generation, record.state) == (generation, State.ACTIVE)
        release(host.ctx, "k", owner="test")
    assert host.folder("completed/k") == ["1", "2"]
    for run in ("1", "2"):
        assert host.folder(f"completed/k/{run}") == [
            "checkpoint",
            "completed_at",
            "created_at",
            "mon_data",
            "quality",
        ]
    host.check()


def test_a_failed_create_leaves_the_ended_run_as_it_was(host: Host) -> None:
    """A class that is not there must cost neither the last run's totals nor its number."""
    create(host.ctx, "k", owner="a")
    ended = release(host.ctx, "k", owner="a")
    files = host.files("k")
    with pytest.raises(NoSuchClass):
        create(host.ctx, "k", owner="a", class_="nowhere")
    assert release(host.ctx, "k", owner="a") == ended
    assert host.files("k") == files
    assert create(host.ctx, "k", owner="a").generation == 2


def test_foreign_groups_are_listed_and_never_changed(host: Host, process: Start) -> None:
    foreign = host.make_foreign("k")
    before = host.tree.find(foreign)
    child = process()
    with pytest.raises(ForeignGroup, match="another program created it"):
        create(host.ctx, "k", owner="a")
    with pytest.raises(ForeignGroup):
        assign(host.ctx, assignment("k", child.pid))
    assert host.manager.watcher.look().foreign == (before,)
    assert (host.ctx.store.all(), host.folder("records"), host.folder("groups")) == ([], [], [])
    host.restart()
    assert host.tree.find(foreign) == before


def test_status_looks_only_at_the_groups_of_other_programs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 500 workloads, each List had 500 system calls on resctrl, which wait for the kernel's lock."""
    foreign = host.make_foreign("other")
    for key in ("a", "b"):
        create(host.ctx, key, owner="me")
    looked_at: list[GroupRef] = []
    find = host.tree.find

    def counted(ref: GroupRef) -> Found | None:
        looked_at.append(ref)
        return find(ref)

    monkeypatch.setattr(host.tree, "find", counted)
    seen = host.manager.watcher.look()
    assert looked_at == [foreign]
    assert (seen.used, [found.ref for found in seen.foreign]) == (4, [foreign])


def test_tasks_of_other_groups_are_not_stolen(host: Host, process: Start, puppet: Puppet) -> None:
    child = process()
    assign(host.ctx, assignment("mine", child.pid))
    with pytest.raises(AlreadyMonitored, match=r"mine.*takeOver"):
        assign(host.ctx, assignment("other", child.pid))
    assert [record.key for record in host.ctx.store.all()] == ["mine"]
    foreign = host.make_foreign("foreign")
    thread = int(puppet.do("thread"))
    host.tree.write_task(foreign.path, thread)
    done = assign(host.ctx, assignment("partly", puppet.pid))
    assert done.moved.in_other_groups == {thread}
    assert (done.workload.members[0].tasks_outside, baseline_of(done.workload)) == (1, Quality.LATE)
    assert verdict(done.workload).reasons == (f"pid-{puppet.pid} ran before it was put into the group",)
    assert host.tree.membership(thread).group == "foreign"
    assign(host.ctx, assignment("other", child.pid, take_over=True))
    assert host.tree.membership(child.pid) == Membership("", "other")


def test_a_workload_whose_task_is_taken_over_is_late_at_once(host: Host, process: Start, puppet: Puppet) -> None:
    """It ended before the next sweep, and its total was exact."""
    for key in ("first", "second", "third"):
        assign(host.ctx, assignment(key, puppet.pid if key == "first" else process().pid))
    thread = int(puppet.do("thread"))
    assign(host.ctx, assignment("thief", puppet.pid, take_over=True))
    assert host.tree.membership(thread) == Membership("", "thief")
    done = release(host.ctx, "first", owner="test")
    taken = "tasks were moved out of the group, and their use outside is not counted: workload thief took them over"
    assert all((total.quality, taken in total.reason) == (Quality.LATE, True) for total in done.totals)
    assert {baseline_of(host.get(key)) for key in ("second", "third")} == {Quality.EXACT}


def test_reasons_after_a_take_over_do_not_state_that_a_task_stayed_where_it_was(host: Host, process: Start) -> None:
    """The task was in the group until the other workload took it, and the next sweep finds it outside."""
    pid = process().pid
    for key in ("first", "thief"):
        assign(host.ctx, assignment(key, pid, take_over=True))
    host.manager.maintenance.sweep("first")
    assert verdict(host.get("first")).reasons == (
        f"pid-{pid} may have run before it was in the group: a task of it was found outside",
        "tasks were moved out of the group, and their use outside is not counted: workload thief took them over",
    )


def test_two_workloads_that_take_tasks_from_each_other_do_not_wait_for_ever(host: Host, process: Start) -> None:
    pids = [process().pid, process().pid]
    for key, pid in zip("ab", pids, strict=True):
        assign(host.ctx, assignment(key, pid))

    def rob(key: str) -> None:
        for _ in range(20):
            for pid in pids:
                assign(host.ctx, assignment(key, pid, take_over=True))

    thieves = [threading.Thread(target=rob, args=(key,), daemon=True) for key in "ab"]
    for thief in thieves:
        thief.start()
    for thief in thieves:
        thief.join(120)
        assert not thief.is_alive()
    assert {baseline_of(host.get(key)) for key in "ab"} == {Quality.LATE}


def test_move_keeps_nonce_counters_and_tasks(host: Host, puppet: Puppet) -> None:
    host.make_class("gold")
    before = assign(host.ctx, assignment("k", puppet.pid)).workload
    puppet.do("burn 0.2")
    _, _, used = read(host.ctx, "k")
    moved = move(host.ctx, "k", "gold")
    assert (moved.first.class_, moved.first.nonce, moved.generation) == ("gold", before.first.nonce, 1)
    assert host.tree.membership(puppet.pid) == Membership("gold", "k")
    links = [text for text in host.files("k").values() if text.startswith("-> ")]
    assert links
    assert all(text.startswith(f"-> {host.mountpoint}/gold/mon_groups/k/") for text in links)
    _, _, after = read(host.ctx, "k")
    for one, other in zip(used, after, strict=True):
        assert (other.number or 0) >= (one.number or 0)
    with pytest.raises(NoSuchClass):
        move(host.ctx, "k", "nowhere")
    assert move(host.ctx, "k", "gold") == moved
    host.check()


def test_reconcile_touches_only_its_owner(host: Host) -> None:
    for key, owner in (("a", "nri"), ("b", "nri"), ("c", "cli"), ("both", "nri"), ("both", "cli")):
        create(host.ctx, key, owner=owner)
    done = reconcile(host.ctx, "nri", ["a", "unknown", "../etc", "c"])
    assert done.kept == ["a"]
    assert sorted(done.released) == ["b", "both"]
    assert {key: type(error) for key, error in done.failures.items()} == {
        "unknown": NoSuchWorkload,
        "c": NoSuchClaim,
        "../etc": InvalidKey,
    }
    states = {record.key: record.state for record in host.ctx.store.all()}
    assert states == {"a": State.IDLE, "b": State.COMPLETED, "both": State.IDLE, "c": State.IDLE}
    host.check()


def test_members_are_added_and_removed_by_id(host: Host) -> None:
    create(host.ctx, "k", owner="nri")
    add_member(host.ctx, "k", "sandbox-1", owner="nri")
    host.manager.maintenance.record_ends("k")
    assert [member.is_living for member in host.get("k").members] == [True]
    record = remove_member(host.ctx, "k", "sandbox-1")
    assert [member.is_living for member in record.members] == [False]
    assert remove_member(host.ctx, "k", "sandbox-1") == record
    assert remove_member(host.ctx, "k", "never-seen") == record
    release(host.ctx, "k", owner="nri")
    with pytest.raises(NoSuchGroup, match="ended"):
        add_member(host.ctx, "k", "late", owner="nri")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda manager: create(manager.context, "../k", owner="a"), InvalidKey),
        (lambda manager: create(manager.context, "k", owner="a", class_="../.."), InvalidClass),
        (lambda manager: create(manager.context, "k", owner="a", class_="info"), InvalidClass),
        (lambda manager: create(manager.context, "k", owner=""), InvalidRequest),
        (lambda manager: create(manager.context, "k", owner="a\nb"), InvalidRequest),
        (lambda manager: create(manager.context, "k", owner="x" * 129), InvalidRequest),
        (lambda manager: create(manager.context, "k", owner="\ud800"), InvalidRequest),
        (lambda manager: create(manager.context, "k", owner="a", attributes={"x": "\ud800"}), InvalidAttributes),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a")), InvalidRequest),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=5, cgroup="/x")), InvalidRequest),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", cgroup="/x\0y")), InvalidRequest),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", cgroup="\ud800")), InvalidRequest),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", cgroup="/etc")), ResctrlError),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=2**70)), NoSuchProcess),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=0)), NoSuchProcess),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=-1)), NoSuchProcess),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=1)), PermissionDenied),
        (lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=os.getpid())), PermissionDenied),
        (
            lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=os.getppid(), kind="\0")),
            InvalidRequest,
        ),
        (
            lambda manager: assign(manager.context, Assignment(key="k", owner="a", pid=os.getppid(), member="..")),
            InvalidKey,
        ),
        (lambda manager: add_member(manager.context, "k", "../m", owner="a"), InvalidKey),
        (lambda manager: add_member(manager.context, "k", "m", owner="a"), NoSuchGroup),
        (lambda manager: remove_member(manager.context, "k", "m"), NoSuchGroup),
        (lambda manager: release(manager.context, "k", owner="a"), NoSuchGroup),
        (lambda manager: move(manager.context, "k", "gold"), NoSuchGroup),
        (lambda manager: manager.context.store.known("k"), NoSuchGroup),
        (lambda manager: read(manager.context, "k"), NoSuchGroup),
    ],
)
def test_invalid_request_is_refused_and_leaves_nothing(
    host: Host, call: Callable[[object], object], error: type[ResctrlError]
) -> None:
    with pytest.raises(error):
        call(host.manager)
    assert (host.marked_groups(), host.ctx.store.all()) == ([], [])
    assert (host.folder("records"), host.folder("groups")) == ([], [])


def test_failed_assign_of_an_ended_process_leaves_nothing(host: Host) -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        with pytest.raises(NoSuchProcess):
            assign(host.ctx, assignment("k", child.pid))
    assert (host.marked_groups(), host.ctx.store.all(), host.folder("groups")) == ([], [], [])


def test_zombie_cannot_be_assigned(host: Host) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(NoSuchProcess):
        assign(host.ctx, assignment("k", child.pid))
    child.wait()
    assert host.marked_groups() == []


def test_a_kernel_thread_or_init_is_never_moved(host: Host) -> None:
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    stats = {number: processes.stat(number) for number in numbers}
    kthreads = [number for number, stat in stats.items() if stat is not None and stat.is_kernel_thread]
    for pid in (1, *kthreads[:3]):
        with pytest.raises((PermissionDenied, NoSuchProcess)):
            assign(host.ctx, assignment("k", pid))


def test_undo_keeps_the_earlier_state(host: Host, process: Start) -> None:
    """A second member that cannot join changes nothing of the first one's group."""
    host.make_class("gold")
    first, second = process(), process()
    before = assign(host.ctx, assignment("k", first.pid, attributes={"x": "1"})).workload
    failing = assignment("k", second.pid, "other", class_="gold", attributes={"x": "2"}, pod_cgroup="/nowhere")
    with pytest.raises(ClassMismatch):
        assign(host.ctx, failing)
    assert host.get("k") == before
    host.check()
    assert host.restart().context.store.known("k") == before


def test_removed_group_is_created_again_for_the_next_member(host: Host, process: Start) -> None:
    first, second = process(), process()
    record = assign(host.ctx, assignment("k", first.pid)).workload
    os.rmdir(host.tree.full_path(record.first.ref))
    again = assign(host.ctx, assignment("k", second.pid)).workload
    assert (again.generation, again.state) == (2, State.ACTIVE)
    assert host.tree.membership(second.pid).group == "k"
    host.check()


def test_foreign_group_in_the_place_of_a_group_is_not_used(host: Host, process: Start) -> None:
    record = assign(host.ctx, assignment("k", process().pid)).workload
    os.rmdir(host.tree.full_path(record.first.ref))
    foreign = host.make_foreign("k")
    with pytest.raises(NoSuchGroup, match="another group"):
        read(host.ctx, "k")
    host.manager.maintenance.tick()
    assert host.get("k").state is State.LOST
    assert host.tree.find(foreign) is not None


def test_two_keys_of_one_directory_name_do_not_share_a_group(host: Host, process: Start) -> None:
    """After a reload with another group_prefix, "x" of before and "rm-x" of after would be the same directory."""
    host.ctx.config.settings = Settings(group_prefix="rm-")
    first = assign(host.ctx, assignment("x", process().pid)).workload
    host.ctx.config.settings = Settings()
    with pytest.raises(ResctrlError, match="exists"):
        assign(host.ctx, assignment("rm-x", process().pid))
    assert host.get("x") == first
    assert [record.key for record in host.ctx.store.all()] == ["x"]
    host.check()


def test_release_of_a_removed_group_succeeds(host: Host) -> None:
    record = create(host.ctx, "k", owner="a")
    create(host.ctx, "k", owner="b")
    os.rmdir(host.tree.full_path(record.first.ref))
    released = release(host.ctx, "k", owner="a")
    assert not released.completed
    assert all(total.number is None for total in released.totals)
    last = release(host.ctx, "k", owner="b")
    assert (last.completed, last.workload.state) == (True, State.LOST)
    host.check()


def test_only_a_foreign_group_is_read_as_one(host: Host) -> None:
    ref = host.make_foreign("pqos-1")
    create(host.ctx, "ours", owner="a")
    found, readings = host.manager.watcher.read_foreign(ref)
    assert (found.ref, bool(readings)) == (ref, True)
    for other in (GroupRef("", "ours"), GroupRef("gold", "pqos-1"), GroupRef("", "../mon_groups/pqos-1")):
        with pytest.raises(NoSuchGroup, match="there is no foreign monitoring group"):
            host.manager.watcher.read_foreign(other)
