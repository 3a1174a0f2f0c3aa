# SPDX-License-Identifier: Apache-2.0
"""A kill at any step, and a full /run at any step: nothing leaks, nothing is lost, nothing is half there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.sim.fuse.mount import unmount
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import drop
from tests.workloads.conftest import Host, assignment, join, own_host
from tests.workloads.evidence.test_interference import react, write

Start = Callable[[], "subprocess.Popen[bytes]"]
CTR = "4d" * 32

# Everything by which a daemon changes a file or the tree; an "open" counts if it is for writing.
_CHANGES = {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.symlink", "os.utime", "shutil.rmtree"}


class Fuse:
    """Count the changes by this process, and kill it before the selected change."""

    def __init__(self) -> None:
        self.left = -1
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.left < 0 or event not in _CHANGES:
            return
        if event == "open":
            flags = arguments[2]
            assert isinstance(flags, int)
            if not flags & (os.O_WRONLY | os.O_RDWR):
                return
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


@pytest.fixture(scope="module")
def fuse() -> Fuse:
    return Fuse()


def cut(fuse: Fuse, step: int, action: Callable[[], object]) -> bool:
    """Do it in a process of its own that is killed before its change number ``step``; whether it came that far."""
    child = os.fork()
    if child == 0:
        fuse.left = step
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def joined(manager: Manager, pid: int) -> None:
    assign(manager.context, assignment(CTR, pid, "oci", member="c1"))


def created(manager: Manager, pid: int) -> None:
    create(manager.context, CTR, owner="other")
    manager.context.tree.write_task("gold", pid)


def followed(manager: Manager, pid: int) -> None:
    joined(manager, pid)
    release(manager.context, CTR, owner="other")


def moved(manager: Manager, pid: int) -> None:
    move(manager.context, CTR, "gold")


def came_back(manager: Manager, pid: int) -> None:
    release(manager.context, CTR, owner="oci")
    joined(manager, pid)


def checkpointed(manager: Manager, pid: int) -> None:
    manager.maintenance.tick()


Verb = Callable[[Manager, int], None]


@pytest.fixture
def host(small_host: Host) -> Host:
    return small_host


@pytest.mark.parametrize(
    "scenario",
    [(joined, came_back, 30), (joined, moved, 6), (created, followed, 10), (joined, checkpointed, 1)],
    ids=["released-and-joined", "moved", "followed", "checkpointed"],
)
def test_a_kill_at_any_step(host: Host, process: Start, fuse: Fuse, scenario: tuple[Verb, Verb, int]) -> None:
    before, action, least = scenario
    host.make_class("gold")
    step = 0
    killed = True
    while killed:
        child = process()
        before(host.manager, child.pid)
        killed = cut(fuse, step, lambda pid=child.pid: action(host.manager, pid))  # type: ignore[misc]
        manager = host.restart()
        host.check()
        for record in manager.context.store.all():
            inside = host.tree.membership(child.pid).group == CTR
            assert record.state is (State.ACTIVE if inside else State.COMPLETED if record.members else State.IDLE), (
                step
            )
        # The container ends, and its runtime does not call again.
        child.kill()
        child.wait()
        manager.maintenance.tick()
        if before is created and manager.context.store.all():
            release(manager.context, CTR, owner="other")
        assert host.marked_groups() == [], step
        assert {record.state for record in manager.context.store.all()} <= {State.COMPLETED}, (
            step,
            manager.context.store.all(),
        )
        host.check()
        forget(host)
        step += 1
    assert step > least


@pytest.mark.parametrize("classes", [["", "gold"], [""]], ids=["two classes", "one class"])
def test_release_is_completed_after_a_kill_at_any_step(
    host: Host, process: Start, fuse: Fuse, classes: list[str]
) -> None:
    """A further group that is removed before its end is recorded looks as if another program had removed it."""
    host.make_class("gold")
    step = ended = 0
    killed = True
    while killed:
        children = [process() for _ in classes]
        for class_, child in zip(classes, children, strict=True):
            host.tree.write_task(class_, child.pid)
            assign(host.ctx, assignment(CTR, child.pid, "nri"))
        killed = cut(fuse, step, lambda: release(host.ctx, CTR, owner="nri"))
        host.restart()
        host.check()
        record = host.get(CTR)
        expected = {Quality.EXACT, Quality.LATE}
        if record.state is State.ACTIVE:
            assert record.is_claimed_by("nri"), step
            record = release(host.ctx, CTR, owner="nri").workload
        else:
            ended += killed
            # Its processes ran on until the restart, at which the end values were read.
            expected.add(Quality.ESTIMATED)
        assert (record.state, record.reason) == (State.COMPLETED, "released"), step
        assert {total.quality for total in read(host.ctx, CTR)[2]} <= expected, step
        host.check()
        forget(host)
        step += 1
    assert ended > 5


@pytest.mark.parametrize("has_cgroup", [False, True], ids=["process", "control group"])
def test_use_outside_between_a_kill_and_the_next_start_is_not_exact(
    host: Host, process: Start, fuse: Fuse, cgroup: str, has_cgroup: bool
) -> None:
    """The container starts nevertheless, unmonitored, and no task is in a group."""
    step = outside = 0
    killed = True
    own = cgroup if has_cgroup else ""

    def joins(pid: int) -> None:
        assign(host.ctx, assignment(CTR, pid, "oci", member="c1", own_cgroup=own))

    while killed:
        child = process()
        join(cgroup, child.pid)
        killed = cut(fuse, step, lambda pid=child.pid: joins(pid))  # type: ignore[misc]
        was_inside = host.tree.membership(child.pid).group == CTR
        child.kill()
        child.wait()
        for record in host.restart().context.store.all():
            assert record.state is State.COMPLETED, step
            totals = read(host.ctx, CTR)[2]
            outside += not was_inside
            assert was_inside or Quality.EXACT not in {total.quality for total in totals}, step
        forget(host)
        step += 1
    assert outside > 2


def test_kill_at_any_step_of_a_take_over_leaves_no_workload_without_its_task_exact(
    host: Host, process: Start, fuse: Fuse
) -> None:
    child = process()
    step = robbed = 0
    killed = True
    while killed:
        assign(host.ctx, assignment("first", child.pid))

        def take() -> None:
            assign(host.ctx, assignment("thief", child.pid, take_over=True))

        killed = cut(fuse, step, take)
        manager = host.restart()
        if host.tree.membership(child.pid).group != "first":
            robbed += 1
            assert baseline_of(manager.context.store.known("first")) is Quality.LATE, step
        for record in manager.context.store.all():
            for claim in record.claims:
                release(manager.context, record.key, owner=claim.owner)
        forget(host)
        step += 1
    assert robbed > 1


def forget(host: Host) -> None:
    for record in host.ctx.store.all():
        host.ctx.snapshots.delete(record.key)
        drop(host.ctx.store, record.key)


def test_a_kill_at_any_step_of_the_recovery_itself(host: Host, process: Start, fuse: Fuse) -> None:
    step = 0
    killed = True
    while killed:
        living, ended = process(), process()
        assign(host.ctx, assignment("living", living.pid, "a"))
        assign(host.ctx, assignment(CTR, ended.pid, "oci"))
        create(host.ctx, "unrecorded", owner="a")
        drop(host.ctx.store, "unrecorded")
        ended.kill()
        ended.wait()
        killed = cut(fuse, step, host.restart)
        manager = host.restart()
        host.check()
        states = {record.key: record.state for record in manager.context.store.all()}
        assert states == {"living": State.ACTIVE, CTR: State.COMPLETED}, step
        assert release(manager.context, "living", owner="a").workload.generation == 1
        forget(host)
        step += 1
    assert step > 10


@pytest.fixture
def small_run(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Makes a run folder in a tmpfs of its own that has room for so many files; 0 lifts the bound."""
    folder = str(tmp_path / "small")
    os.mkdir(folder)
    mounted = False

    def limit(inodes: int) -> str:
        nonlocal mounted
        options = f"nr_inodes={inodes}" + (",remount" if mounted else "")
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
        mounted = True
        return folder

    yield limit
    if mounted:
        assert unmount(folder)


def inodes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_files - status.f_ffree


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_full_run_folder_at_any_step(
    small_simulation: str, process: Start, small_run: Callable[[int], str], again: bool
) -> None:
    """No space: the call fails, and neither a group nor a record nor a snapshot stays of it."""
    host = Host(small_simulation, small_run(1000))
    child = process()
    if again:
        joined(host.manager, child.pid)
        release(host.ctx, CTR, owner="oci")
    before = host.ctx.store.all()
    files = host.files(CTR)
    used = inodes(host.run)
    room = 0
    while True:
        small_run(used + room)
        try:
            joined(host.manager, child.pid)
        except NotWritten as error:
            assert "ENOSPC" in str(error)
            assert "df -i" in error.remedy
        else:
            break
        assert host.marked_groups() == [], room
        assert host.ctx.store.all() == before, room
        assert (host.files(CTR), inodes(host.run)) == (files, used) or again, room
        small_run(1000)
        assert host.restart().context.store.all() == before, room
        assert host.files(CTR) == files, room
        room += 1
    assert room > 10
    small_run(1000)
    release(host.ctx, CTR, owner="oci")
    host.check()


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("is_put_back", [False, True])
def test_mark_that_cannot_be_written_to_a_full_run_folder_is_not_lost(
    small_simulation: str, process: Start, small_run: Callable[[int], str], is_put_back: bool, is_killed: bool
) -> None:
    """Another program moves the task out while there is no space. Only the failed write had the mark."""
    host = Host(small_simulation, small_run(1000))
    child = process()
    workload = assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1", late=False)).workload
    react(host)
    assert qualities(host) == {Quality.EXACT}
    small_run(inodes(host.run))
    write(host, "tasks", child.pid)
    react(host)
    if is_put_back:
        write(host, f"{workload.first.ref.path}/tasks", child.pid)
        react(host)
    assert Quality.EXACT not in qualities(host)
    if is_killed:
        host.restart()
        assert Quality.EXACT not in qualities(host)
    child.kill()
    child.wait()
    host.manager.maintenance.tick()
    small_run(1000)
    host.manager.maintenance.tick()
    host.restart()
    assert Quality.EXACT not in qualities(host)
    release(host.ctx, CTR, owner="oci")
    assert Quality.EXACT not in qualities(host)


def test_assign_that_fails_in_a_full_run_folder_leaves_the_totals_exact(
    small_simulation: str, process: Start, small_run: Callable[[int], str]
) -> None:
    """The group stayed late without a reason, because of a member that was rejected before it was moved."""
    host = Host(small_simulation, small_run(1000))
    child, other = process(), process()
    assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1", late=False))
    small_run(inodes(host.run))
    with pytest.raises(NotWritten):
        assign(host.ctx, assignment(CTR, other.pid, "oci", member="c2", late=True))
    assert qualities(host) == {Quality.EXACT}
    small_run(1000)
    host.manager.maintenance.tick()
    assert qualities(host) == {Quality.EXACT}
    release(host.ctx, CTR, owner="oci")


def test_quality_file_is_not_better_while_a_mark_cannot_be_written(
    small_simulation: str, process: Start, small_run: Callable[[int], str]
) -> None:
    """There is no Read meanwhile, because it writes the file too."""
    host = Host(small_simulation, small_run(1000))
    child = process()
    assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1", late=False))
    react(host)
    small_run(inodes(host.run))
    write(host, "tasks", child.pid)
    host.manager.maintenance._weigh()
    assert " exact" not in host.ctx.snapshots.quality(CTR)
    small_run(1000)
    host.manager.maintenance.tick()
    host.manager.maintenance._weigh()
    host.check()
    assert " exact" not in host.ctx.snapshots.quality(CTR)
    release(host.ctx, CTR, owner="oci")


def qualities(host: Host) -> set[Quality]:
    return {total.quality for total in read(host.ctx, CTR)[2]}


def test_a_full_run_folder_at_the_end_loses_nothing(
    small_simulation: str, process: Start, small_run: Callable[[int], str]
) -> None:
    """The last values cannot be written: the group and its counters stay until they can be."""
    host = Host(small_simulation, small_run(1000))
    child = process()
    joined(host.manager, child.pid)
    room = 0
    while True:
        small_run(inodes(host.run) + room)
        try:
            release(host.ctx, CTR, owner="oci")
        except ResctrlError:
            assert [found.ref for found in host.marked_groups()] == [GroupRef("", CTR)], room
            assert not host.get(CTR).state.is_over
        else:
            break
        room += 1
        small_run(1000)
        host.restart()
        if not host.marked_groups():
            break
    small_run(1000)
    host.restart()
    assert host.get(CTR).state is State.COMPLETED
    assert host.marked_groups() == []
    host.check()


@pytest.mark.parametrize("restarts", [False, True], ids=["by the next tick", "by the next start"])
def test_links_that_could_not_follow_a_move_are_changed_later(host: Host, process: Start, restarts: bool) -> None:
    """Move put the group into its new class, failed at the links, and left them without a target for ever."""
    host.make_class("gold")
    joined(host.manager, process().pid)
    in_the_way = Path(host.run, "groups", CTR, "mon_data", "mon_L3_00", ".mbm_total_bytes.new")
    in_the_way.mkdir()
    with pytest.raises(NotWritten):
        move(host.ctx, CTR, "gold")
    in_the_way.rmdir()
    assert host.tree.find(GroupRef("gold", CTR)) is not None
    if restarts:
        host.restart()
    else:
        host.manager.maintenance.tick()
    host.check()


def test_the_daemon_starts_with_a_full_run_folder(
    small_simulation: str, process: Start, small_run: Callable[[int], str]
) -> None:
    host = Host(small_simulation, small_run(1000))
    child, other = process(), process()
    joined(host.manager, child.pid)
    assign(host.ctx, assignment("living", other.pid))
    child.kill()
    child.wait()
    small_run(inodes(host.run))
    manager = host.restart()
    assert any("ENOSPC" in problem for problem in manager.problems)
    assert manager.context.store.known("living").state is State.ACTIVE
    assert manager.context.store.known(CTR).state is State.ACTIVE
    small_run(1000)
    manager.maintenance.tick()
    assert manager.context.store.known(CTR).state is State.COMPLETED
    release(manager.context, "living", owner="test")
    host.check()


def test_end_of_the_last_member_and_the_begin_of_the_end_of_its_workload_are_one_write(
    host: Host, process: Start
) -> None:
    """They were two. The last look at the witness comes between these and the end values."""
    child = process()
    assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1"))
    written = []
    host.ctx.store.on_change = lambda _, workload: written.append(
        workload and (workload.state, [bool(one.ended_at) for one in workload.members], len(workload.claims))
    )
    child.kill()
    child.wait()
    host.manager.maintenance.record_ends(CTR)
    assert written == [(State.ENDING, [True], 0), (State.ENDING, [True], 0), (State.COMPLETED, [True], 0)]
    assert [member.reason for member in host.get(CTR).members] == ["ended"]


def test_member_of_a_workload_that_never_had_a_group_ends_with_its_own_reason(tmp_path: Path, process: Start) -> None:
    # A machine with one RMID and root's. On a machine that other tests share, their groups would wait.
    with own_host(tmp_path, "monitoring-only", 2) as host:
        create(host.ctx, "one", owner="test")
        child = process()
        done = assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1"))
        assert done.workload.state is State.PENDING
        child.kill()
        child.wait()
        host.manager.maintenance.record_ends(CTR)
        workload = host.get(CTR)
        assert workload.state is State.COMPLETED
        assert [member.reason for member in workload.members] == ["ended"]


def test_renamed_group_and_a_full_run_folder_do_not_stop_the_search(
    small_simulation: str, process: Start, cgroup: str, small_run: Callable[[int], str]
) -> None:
    """A process joined the container from outside, and was moved into the group when there was space again."""
    host = Host(small_simulation, small_run(1000))
    host.make_class("gold")
    first, second = process(), process()
    join(cgroup, first.pid)
    assign(host.ctx, assignment(CTR, first.pid, "oci", member="c1", kind="container", own_cgroup=cgroup))
    host.tree.write_task("gold", second.pid)
    assign(host.ctx, assignment(CTR, second.pid, "oci", member="helper"))
    host.manager.maintenance.tick()
    renamed = [GroupRef("", "renamed"), GroupRef("gold", "renamed")]
    for group, to in zip(host.get(CTR).groups, renamed, strict=True):
        host.tree.rename(group.ref, to)
    used = inodes(host.run)
    small_run(used)
    join(cgroup, process().pid)
    with pytest.raises(NotWritten):
        host.manager.maintenance.sweep(CTR)
    assert [group.ref for group in host.get(CTR).groups] == renamed
    small_run(1000)
    host.manager.maintenance.tick()
    host.manager.maintenance.sweep(CTR)
    record = host.restart().context.store.known(CTR)
    assert [group.ref for group in record.groups] == renamed
    release(host.ctx, CTR, owner="oci")
    host.check()
    host.clean()
