# SPDX-License-Identifier: Apache-2.0
"""Out of RMIDs is a state: it has a reason, ends by itself, and workloads that had to wait are late."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from resctrlmond.resctrl.errors import RmidsExhausted
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import Found, GroupRef, Tree
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.sim.messages import Operation
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model import clock
from resctrlmond.workloads.model.errors import InvalidRequest
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.upkeep.maintenance import log
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import save, workload
from tests.workloads.conftest import Host, assignment, own_host, when_all_stand

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Host]:
    """Return a machine with two RMIDs and root's, and without limbo."""
    with own_host(tmp_path, "monitoring-only", 3) as host:
        yield host


@pytest.fixture
def limbo(tmp_path: Path) -> Iterator[Host]:
    """Return a machine with one RMID and root's; a freed RMID stays in limbo for at least a second."""
    with own_host(tmp_path, "intel-rdt", 2) as host:
        yield host


def fill(host: Host) -> None:
    for key in ("one", "two"):
        create(host.ctx, key, owner="a")


def test_without_an_rmid_the_group_is_pending(small: Host, process: Start) -> None:
    fill(small)
    child = process()
    done = assign(small.ctx, assignment("k", child.pid, "a"))
    assert (done.workload.state, done.workload.first.in_limbo, done.moved.moved) == (State.PENDING, False, 0)
    assert "ENOSPC" in done.workload.reason
    assert create(small.ctx, "k", owner="a").state is State.PENDING
    assert read(small.ctx, "k") == (small.get("k"), [], [])
    assert "k" not in small.folder("groups")


def test_a_group_that_waits_names_its_own_path_only(small: Host, process: Start) -> None:
    """Every group behind the first one had the first one's reason, path included."""
    fill(small)
    for key in ("three", "four"):
        assert f"mon_groups/{key}: " in create(small.ctx, key, owner="a").reason
    with pytest.raises(RmidsExhausted) as refused:
        create(small.ctx, "five", owner="a", may_wait=False)
    assert "mon_groups/five: " in str(refused.value)
    with pytest.raises(RmidsExhausted) as refused:
        assign(small.ctx, assignment("six", process().pid, "a", may_wait=False))
    assert "mon_groups/six: " in str(refused.value)
    assert not [record for record in small.ctx.store.all() if record.key in ("five", "six")]


def test_a_call_that_may_not_wait_is_never_recorded_as_waiting(small: Host, process: Start) -> None:
    """It was, for a moment, and the journal had an entry that it waits for an RMID."""
    fill(small)
    child = process()
    waited: list[Workload] = []

    def watch(_key: str, record: Workload | None) -> None:
        if record is not None and record.reason:
            waited.append(record)

    small.ctx.store.on_change = watch
    for _ in range(2):
        with pytest.raises(RmidsExhausted):
            create(small.ctx, "k", owner="a", may_wait=False)
        with pytest.raises(RmidsExhausted):
            assign(small.ctx, assignment("k", child.pid, "a", may_wait=False))
        assert waited == []
        # The second time with a queue.
        create(small.ctx, "queued", owner="a")
        waited.clear()
    small.check()


def test_a_pending_workload_is_adopted_late_when_an_rmid_comes_free(small: Host, process: Start) -> None:
    fill(small)
    child = process()
    assign(small.ctx, assignment("k", child.pid, "a"))
    small.manager.maintenance.tick()
    assert small.get("k").state is State.PENDING
    release(small.ctx, "one", owner="a")
    small.manager.maintenance.tick()
    record = small.get("k")
    assert (record.state, baseline_of(record), record.reason) == (State.ACTIVE, Quality.LATE, "")
    assert [member.late for member in record.members] == [True]
    assert small.tree.membership(child.pid).group == "k"
    totals = release(small.ctx, "k", owner="a").totals
    assert {total.quality for total in totals} == {Quality.LATE}


@pytest.mark.parametrize("created_by", ["a tick", "a start after a kill"])
def test_a_member_that_ends_before_there_is_an_rmid_is_the_reason_of_late(
    small: Host, process: Start, monkeypatch: pytest.MonkeyPatch, created_by: str
) -> None:
    """The totals were late without a reason."""
    fill(small)
    child = process()
    assign(small.ctx, assignment("k", child.pid, "a", member="m"))
    child.kill()
    child.wait()
    release(small.ctx, "one", owner="a")
    if created_by != "a tick":
        begin = Snapshots.begin

        def cut_short(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Snapshots, "begin", cut_short)
        with pytest.raises(KeyboardInterrupt):
            small.manager.maintenance.tick()
        monkeypatch.setattr(Snapshots, "begin", begin)
        small.restart()
    small.manager.maintenance.tick()
    totals = release(small.ctx, "k", owner="a").totals
    assert {total.quality for total in totals} == {Quality.LATE}
    assert {total.reason for total in totals} == {"m ran before it was put into the group"}


def test_rmid_queue_order_ignores_clock_changes(small: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order was that of the time of day: a workload that came after the clock was set back went first."""
    fill(small)
    assert create(small.ctx, "first", owner="a").state is State.PENDING

    class SetBack(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> SetBack:
            return super().now(tz) - timedelta(days=1)

    monkeypatch.setattr(clock, "datetime", SetBack)
    assert create(small.ctx, "second", owner="a").first.created_at < small.get("first").first.created_at
    small.restart()
    release(small.ctx, "one", owner="a")
    small.manager.maintenance.tick()
    states = {key: small.get(key).state for key in ("first", "second")}
    assert states == {"first": State.IDLE, "second": State.PENDING}


def test_waiting_writes_no_record_and_reports_no_change(small: Host) -> None:
    """Every retry once wrote the record twice and sent two signals, each second, for each pending group."""
    fill(small)
    create(small.ctx, "k", owner="a")
    changed: list[str] = []
    small.ctx.store.on_change = lambda key, record: changed.append(key)
    before = os.stat(os.path.join(small.run, "records", "k.json"))
    for _ in range(3):
        small.manager.maintenance.tick()
    after = os.stat(os.path.join(small.run, "records", "k.json"))
    assert (changed, after.st_ino) == ([], before.st_ino)


def test_queue_is_served_by_priority_and_then_by_age(small: Host) -> None:
    """The order was that of the keys: the first key in the alphabet got the RMID."""
    fill(small)
    for key, priority in (("z-old", None), ("a-young", None), ("m-high", 10), ("b-low", -10)):
        create(small.ctx, key, owner="a", priority=priority)
    # A word that comes later counts as well.
    create(small.ctx, "b-low", owner="b", priority=5)
    served = []
    for freed in ("one", "two", "m-high", "b-low"):
        release(small.ctx, freed, owner="a")
        if freed == "b-low":
            release(small.ctx, freed, owner="b")
        small.manager.maintenance.tick()
        records = small.ctx.store.all()
        served.append([one.key for one in records if one.state is State.IDLE and one.key not in ("one", "two")])
    assert served == [["m-high"], ["b-low", "m-high"], ["b-low", "z-old"], ["a-young", "z-old"]]


@pytest.mark.parametrize("restarts", [False, True], ids=["at a tick", "at a start"])
def test_rmid_freed_while_the_queue_is_served_goes_to_its_head(
    small: Host, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """The first workload was refused an RMID; the RMID that was freed a moment later went to the second."""
    fill(small)
    create(small.ctx, "second", owner="a")
    create(small.ctx, "first", owner="a", priority=1)
    create_group = Tree.create

    def refused_then_freed(tree: Tree, ref: GroupRef, nonce: int) -> Found:
        try:
            return create_group(tree, ref, nonce)
        except RmidsExhausted:
            if (one := tree.find(GroupRef("", "one"))) is not None:
                os.rmdir(one.path)  # another program removes a group, which frees its RMID
            raise

    monkeypatch.setattr(Tree, "create", refused_then_freed)
    if restarts:
        small.restart()
    else:
        small.manager.maintenance.tick()
    states = {key: small.get(key).state for key in ("first", "second")}
    assert states == {"first": State.PENDING, "second": State.PENDING}
    small.manager.maintenance.tick()
    states = {key: small.get(key).state for key in ("first", "second")}
    assert states == {"first": State.IDLE, "second": State.PENDING}


def test_order_is_kept_over_a_restart(small: Host) -> None:
    fill(small)
    create(small.ctx, "young", owner="a")
    create(small.ctx, "high", owner="a", priority=1)
    release(small.ctx, "one", owner="a")
    manager = small.restart()
    assert (manager.context.store.known("high").state, manager.context.store.known("young").state) == (
        State.IDLE,
        State.PENDING,
    )


def test_failing_workload_does_not_block_the_queue(small: Host) -> None:
    fill(small)
    create(small.ctx, "k", owner="a", priority=1)
    create(small.ctx, "other", owner="a")
    release(small.ctx, "one", owner="a")
    small.make_foreign("k")
    release(small.ctx, "two", owner="a")
    small.manager.maintenance.tick()
    assert (small.get("k").state, small.get("other").state) == (State.FAILED, State.IDLE)


@pytest.mark.parametrize("priority", [-1001, 1001, 10**30])
def test_priority_is_limited(small: Host, priority: int) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        create(small.ctx, "k", owner="a", priority=priority)
    with pytest.raises(InvalidRequest, match="priority"):
        assign(small.ctx, assignment("k", os.getpid(), priority=priority))
    assert small.ctx.store.all() == []


def test_request_that_may_not_wait_creates_nothing(small: Host, process: Start) -> None:
    fill(small)
    with pytest.raises(RmidsExhausted) as caught:
        create(small.ctx, "k", owner="a", may_wait=False)
    assert not caught.value.in_limbo
    with pytest.raises(RmidsExhausted):
        assign(small.ctx, assignment("k", process().pid, "a", may_wait=False))
    assert [record.key for record in small.ctx.store.all()] == ["one", "two"]
    assert small.folder("records") == ["one.json", "two.json"]


def test_request_that_may_not_wait_for_a_pending_workload_fails(small: Host, process: Start) -> None:
    """A group that is pending for another caller is not a result for a caller that must not wait."""
    fill(small)
    pending = create(small.ctx, "k", owner="a")
    with pytest.raises(RmidsExhausted):
        create(small.ctx, "k", owner="b", may_wait=False)
    with pytest.raises(RmidsExhausted):
        assign(small.ctx, assignment("k", process().pid, "b", may_wait=False))
    assert small.get("k") == pending


def test_a_pending_workload_that_ends_never_had_a_group(small: Host) -> None:
    fill(small)
    with subprocess.Popen(["sleep", "600"]) as child:
        assign(small.ctx, assignment("4d" * 32, child.pid, "oci"))
        child.kill()
    small.manager.maintenance.tick()
    record = small.get("4d" * 32)
    assert (record.state, record.claims) == (State.COMPLETED, ())
    assert "never had an RMID" in record.reason
    create(small.ctx, "k", owner="a")
    released = release(small.ctx, "k", owner="a")
    assert (released.completed, released.totals) == (True, [])


def test_foreign_group_of_its_name_makes_a_pending_workload_fail(small: Host) -> None:
    fill(small)
    create(small.ctx, "k", owner="a")
    release(small.ctx, "one", owner="a")
    foreign = small.make_foreign("k")
    small.manager.maintenance.tick()
    record = small.get("k")
    assert (record.state, "another program created it" in record.reason) == (State.FAILED, True)
    assert small.tree.find(foreign) is not None


def test_end_of_a_pending_workload_keeps_a_foreign_group_of_its_name(small: Host) -> None:
    fill(small)
    create(small.ctx, "k", owner="a")
    release(small.ctx, "one", owner="a")
    foreign = small.make_foreign("k")
    assert release(small.ctx, "k", owner="a").workload.state is State.COMPLETED
    assert small.tree.find(foreign) is not None


def test_limbo_is_reported_and_ends(limbo: Host) -> None:
    create(limbo.ctx, "first", owner="a")
    release(limbo.ctx, "first", owner="a")
    record = create(limbo.ctx, "k", owner="a")
    assert (record.state, record.first.in_limbo) == (State.PENDING, True)
    assert "EBUSY" in record.reason
    with pytest.raises(RmidsExhausted) as caught:
        create(limbo.ctx, "other", owner="a", may_wait=False)
    assert caught.value.in_limbo
    record = when_all_stand(limbo, "k")
    assert (record.state, record.first.in_limbo, record.reason) == (State.IDLE, False, "")


def test_a_restart_keeps_waiting(small: Host, process: Start) -> None:
    fill(small)
    child = process()
    before = assign(small.ctx, assignment("k", child.pid, "a")).workload
    assert small.restart().context.store.known("k") == before
    release(small.ctx, "one", owner="a")
    record = small.restart().context.store.known("k")
    assert (record.state, baseline_of(record)) == (State.ACTIVE, Quality.LATE)
    assert small.tree.membership(child.pid).group == "k"


def test_tick_survives_an_error_of_one_workload(small: Host, caplog: pytest.LogCaptureFixture) -> None:
    """A file among the folders of ended runs ended the tick, and with it the daemon."""
    create(small.ctx, "k", owner="a")
    (Path(small.run) / "completed" / "junk").write_text("?")
    (Path(small.run) / "records").rename(Path(small.run) / "elsewhere")
    os.rmdir(small.tree.full_path(GroupRef("", "k")))
    with caplog.at_level("ERROR", log.name):
        small.manager.maintenance.tick()
        small.manager.maintenance.tick()
    [message] = caplog.messages
    assert message.startswith("k: ")
    assert "cannot write" in message
    (Path(small.run) / "elsewhere").rename(Path(small.run) / "records")
    small.manager.maintenance.tick()
    record: Workload = small.get("k")
    assert record.state is State.LOST


def test_new_request_does_not_overtake_the_queue(small: Host) -> None:
    fill(small)
    create(small.ctx, "waits", owner="a")
    release(small.ctx, "one", owner="a")
    # An RMID is free, and the tick has not assigned it to the queue yet.
    late = create(small.ctx, "late", owner="a")
    assert late.state is State.PENDING
    assert "mon_groups/late: cannot create the monitoring group: workloads of the same or a higher" in late.reason
    with pytest.raises(RmidsExhausted):
        create(small.ctx, "impatient", owner="a", may_wait=False)
    assert create(small.ctx, "urgent", owner="a", priority=1).state is State.IDLE
    release(small.ctx, "two", owner="a")
    small.manager.maintenance.tick()
    states = {record.key: record.state for record in small.ctx.store.all() if not record.state.is_over}
    assert states == {"waits": State.IDLE, "late": State.PENDING, "urgent": State.IDLE}


def test_workload_that_is_being_created_is_not_in_the_queue(small: Host) -> None:
    """Its record exists before its group; a request in between must not wait for it."""
    begun = workload("begun", State.PENDING)
    save(small.ctx.store, begun)
    assert create(small.ctx, "k", owner="a").state is State.IDLE


def test_take_over_is_kept_while_the_workload_is_pending(small: Host, process: Start) -> None:
    child = process()
    foreign = small.make_foreign("foreign")
    small.tree.write_task(foreign.path, child.pid)
    create(small.ctx, "one", owner="a")
    assign(small.ctx, assignment("k", child.pid, "a", take_over=True))
    assert small.tree.membership(child.pid).group == "foreign"
    small.restart()
    release(small.ctx, "one", owner="a")
    small.manager.maintenance.tick()
    assert small.tree.membership(child.pid).group == "k"
    # Only once: a group that takes the task later keeps it.
    small.tree.write_task(foreign.path, child.pid)
    small.manager.maintenance.sweep("k")
    assert small.tree.membership(child.pid).group == "foreign"
    os.rmdir(small.tree.full_path(foreign))


def test_change_of_class_is_kept_while_the_workload_waits(tmp_path: Path, process: Start) -> None:
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 3):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        host.make_class("gold")
        create(host.ctx, "one", owner="a")
        child = process()
        assign(host.ctx, assignment("k", child.pid, "a", class_="gold", allow_class_change=True))
        release(host.ctx, "one", owner="a")
        when_all_stand(host, "k")
        where = host.tree.membership(child.pid)
        assert (where.class_, where.group) == ("gold", "k")


def test_move_of_a_pending_workload_is_kept(tmp_path: Path, process: Start) -> None:
    """Its tasks stayed in their class, and as soon as it had its group that followed them back."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt", 3):
        host = Host(str(tmp_path / "resctrl"), str(tmp_path / "run"))
        host.make_class("gold")
        create(host.ctx, "one", owner="a")
        child = process()
        assert assign(host.ctx, assignment("k", child.pid, "a")).workload.state is State.PENDING
        assert move(host.ctx, "k", "gold").first.class_ == "gold"
        host.restart()
        # As an adapter does that was started anew.
        assert assign(host.ctx, assignment("k", child.pid, "a")).workload.first.class_ == "gold"
        release(host.ctx, "one", owner="a")
        record = when_all_stand(host, "k")
        assert (record.first.class_, record.groups[1:], record.members[0].allow_class_change) == ("gold", (), False)
        assert host.tree.membership(child.pid) == Membership("gold", "k")
        host.check()


def test_failed_adoption_is_retried(small: Host, process: Start) -> None:
    """The group was idle, and its members stayed outside until the daemon was restarted."""
    fill(small)
    child = process()
    waits = assign(small.ctx, assignment("k", child.pid, "a", take_over=True)).workload
    assert waits.state is State.PENDING
    release(small.ctx, "one", owner="a")
    Control(small.mountpoint).set_faults(Fault(on=Operation.TASKS, group="mon_groups/k", answer="EIO", times=1))
    small.manager.maintenance.tick()
    record = small.get("k")
    assert (record.state.has_group, "EIO" in record.members[0].reason) == (True, True)
    assert small.tree.membership(child.pid).group == ""
    small.manager.maintenance.sweep("k")
    record = small.get("k")
    assert (record.state, baseline_of(record), record.members[0].reason) == (State.ACTIVE, Quality.LATE, "")
    assert not record.members[0].take_over
    assert small.tree.membership(child.pid).group == "k"
    small.check()


@pytest.mark.parametrize("answer", ["ENOMEM", "EINTR", "EIO"])
def test_temporary_error_does_not_fail_a_pending_workload(small: Host, process: Start, answer: str) -> None:
    """A workload that was pending while the kernel lacked memory failed for ever, and its claims were lost."""
    fill(small)
    create(small.ctx, "other", owner="a", priority=-1)
    child = process()
    assign(small.ctx, assignment("k", child.pid, "a"))
    release(small.ctx, "one", owner="a")
    release(small.ctx, "two", owner="a")
    Control(small.mountpoint).set_faults(Fault(on=Operation.MKDIR, group="mon_groups/k", answer=answer, times=2))
    small.manager.maintenance.tick()
    states = [small.get(key).state for key in ("k", "other")]
    assert states == [State.PENDING, State.IDLE]
    small.check()
    small.manager.maintenance.tick()
    assert small.get("k").state is State.ACTIVE
    assert small.tree.membership(child.pid).group == "k"


@pytest.mark.parametrize("is_cut", [False, True], ids=["tick", "cut before the baseline"])
def test_member_that_ended_while_the_group_was_pending_is_reported(small: Host, process: Start, is_cut: bool) -> None:
    """A pod whose first container ran and ended before there was an RMID had an exact total."""
    fill(small)
    first, second = process(), process()
    assign(small.ctx, assignment("k", first.pid, "nri", member="c1"))
    first.kill()
    first.wait()
    small.manager.maintenance.tick()
    assert small.get("k").living == ()
    release(small.ctx, "one", owner="a")
    if is_cut:
        record = small.get("k")
        small.tree.create(record.first.ref, record.first.nonce)
        small.restart()
    else:
        small.manager.maintenance.tick()
    assert small.get("k").state is State.IDLE
    assign(small.ctx, assignment("k", second.pid, "nri", member="c2"))
    assert {total.quality for total in release(small.ctx, "k", owner="nri").totals} == {Quality.LATE}
    small.check()


class Cut(BaseException):
    """A kill of the daemon, simulated by an exception that no code catches."""


def test_member_that_ended_before_an_interrupted_adoption_is_reported(small: Host, process: Start) -> None:
    """The group's baseline was exact until its members were adopted: a member that was never in it had an exact 0."""
    fill(small)
    child = process()
    assign(small.ctx, assignment("k", child.pid, "a"))
    release(small.ctx, "one", owner="a")

    def cut(_: str, record: Workload | None) -> None:
        if record is not None and record.state is State.IDLE:
            raise Cut

    small.ctx.store.on_change = cut
    with pytest.raises(Cut):
        small.manager.maintenance.tick()
    child.kill()
    child.wait()
    small.restart()
    assert {total.quality for total in release(small.ctx, "k", owner="a").totals} == {Quality.LATE}
    small.check()
