# SPDX-License-Identifier: Apache-2.0
"""Another program moves tasks out of the daemon's groups or into them, or gives them CPUs: no total stays exact."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl import foreign_writes, processes
from resctrlmond.resctrl.errors import GroupExists, NoSuchProcess, NotRead
from resctrlmond.resctrl.foreign_writes import boot_ticks
from resctrlmond.resctrl.inotify import IN_MODIFY, Event, Inotify
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.sim.control.client import Control
from resctrlmond.workloads.evidence import attribution, inspection, interference
from resctrlmond.workloads.model.errors import ForeignGroup
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.upkeep.maintenance import Maintenance
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.workloads.conftest import Host, assignment, join

Start = Callable[[], "subprocess.Popen[bytes]"]
TAKEN = "another program moved tasks out of the group"
WROTE = "another program wrote to {} of the group"
ENDED = "or tried to, and may have moved a task of this workload that ended before it could be seen"
GONE = "before resctrlmond could see which tasks were moved there"


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that gives no inotify instance any more."""

    monkeypatch.setattr(foreign_writes, "Inotify", no_instance)


def no_instance() -> None:
    raise OSError(24, "Too many open files")


@pytest.fixture
def class_(host: Host) -> str:
    host.make_class("c1")
    return "c1"


@pytest.fixture
def workload(host: Host, puppet: Puppet) -> Iterator[Workload]:
    """A command that is known by its process alone, exact from its first instruction on."""
    record = assign(host.ctx, assignment("k", puppet.pid)).workload
    assert record.first.baseline is Quality.EXACT
    yield record


def write(host: Host, file: str, text: str | int) -> None:
    """As another program does."""
    fd = os.open(os.path.join(host.mountpoint, file), os.O_WRONLY)
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


def ask(puppet: Puppet, verb: str) -> int:
    return int(puppet.do(verb))


def wait_a_tick() -> None:
    """Until what has been started is older than what comes, by the kernel's clock of start times."""
    now = boot_ticks()
    while boot_ticks() == now:
        time.sleep(0.001)


def ended_pid(process: Start) -> int:
    """Return the number of a process that has ended."""
    ended = process()
    ended.kill()
    ended.wait()
    return ended.pid


def wait_until_gone(tid: int) -> None:
    while (found := processes.stat(tid)) is not None and not found.is_exiting:
        time.sleep(0.001)


def end_thread(puppet: Puppet, tid: int) -> None:
    """End a thread of the puppet, and wait until the kernel has removed it from its group."""
    puppet.do(f"end {tid}")
    wait_until_gone(tid)


def react(host: Host) -> None:
    while pause := host.manager.maintenance.react():
        time.sleep(pause)


def inspect(host: Host, key: str) -> None:
    with host.ctx.store.transaction(key) as txn:
        host.ctx.interference.inspect(txn)


def expect_reason(host: Host, quality: Quality, reason: str, key: str = "k") -> None:
    """That quality, with that reason, is in the record, in the file and in each total."""
    react(host)
    found(host, quality, reason, key)


def found(host: Host, quality: Quality, reason: str, key: str = "k") -> None:
    assert host.get(key).first.baseline is quality
    totals = read(host.ctx, key)[2]
    assert {total.quality for total in totals} == {quality}
    assert all(reason in total.reason for total in totals), totals[0].reason
    host.check()


def is_exact(host: Host, key: str = "k") -> None:
    react(host)
    inspect(host, key)
    record = host.get(key)
    assert (record.first.baseline, record.first.baseline_reasons) == (Quality.EXACT, ())


# -- out of a group


def test_a_descendant_that_is_moved_to_another_class_makes_its_workload_late(
    host: Host, class_: str, workload: Workload, puppet: Puppet
) -> None:
    """A command's descendants were not searched, and its figures stayed exact."""
    child = ask(puppet, "fork")
    write(host, f"{class_}/tasks", child)
    expect_reason(host, Quality.LATE, TAKEN)
    inspect(host, "k")
    assert len(host.get("k").first.baseline_reasons) == 1


def test_a_thread_that_is_moved_to_the_root_makes_its_workload_late(
    host: Host, workload: Workload, puppet: Puppet
) -> None:
    write(host, "tasks", ask(puppet, "thread"))
    expect_reason(host, Quality.LATE, "ran outside until")


def test_a_descendant_that_is_moved_to_a_group_of_another_program_makes_its_workload_late(
    host: Host, workload: Workload, puppet: Puppet
) -> None:
    foreign = host.make_foreign("theirs")
    write(host, f"{foreign.path}/tasks", ask(puppet, "fork"))
    expect_reason(host, Quality.LATE, TAKEN)


@pytest.mark.parametrize("directory", ["mon_groups/theirs", "theirs"])
def test_a_descendant_that_was_in_a_group_of_another_program_that_is_gone_makes_its_workload_late(
    host: Host, workload: Workload, puppet: Puppet, directory: str
) -> None:
    """The group was created, written to and removed before the daemon could watch it."""
    child = ask(puppet, "fork")
    react(host)
    os.mkdir(os.path.join(host.mountpoint, directory))
    write(host, f"{directory}/tasks", child)
    os.rmdir(os.path.join(host.mountpoint, directory))
    expect_reason(host, Quality.LATE, TAKEN)


def test_a_process_whose_parent_has_ended_is_missed_as_well(
    host: Host, class_: str, workload: Workload, puppet: Puppet
) -> None:
    orphan = ask(puppet, "orphan")
    inspect(host, "k")
    write(host, f"{class_}/tasks", orphan)
    expect_reason(host, Quality.LATE, TAKEN)


def test_a_fork_of_a_process_whose_parent_has_ended_is_missed_as_well(
    host: Host, class_: str, process: Start, puppet: Puppet
) -> None:
    """It is not a descendant of a member that lives."""
    first = process()
    assign(host.ctx, assignment("k", puppet.pid))
    assign(host.ctx, assignment("k", first.pid))
    remove_member(host.ctx, "k", f"pid-{puppet.pid}")
    is_exact(host)
    write(host, f"{class_}/tasks", ask(puppet, "fork"))
    expect_reason(host, Quality.LATE, TAKEN)


@pytest.mark.parametrize("name", [b"od\xffd", b"a\xe2\x80\xaeb"], ids=["not UTF-8", "not visible"])
def test_a_task_that_ended_in_a_group_with_an_odd_name_makes_its_workload_estimated(
    host: Host, workload: Workload, puppet: Puppet, name: bytes
) -> None:
    """The reason could not be written to the record, and the workload stayed exact."""
    foreign = host.make_foreign(os.fsdecode(name))
    react(host)
    child = ask(puppet, "fork")
    write(host, f"{foreign.path}/tasks", child)
    os.kill(child, signal.SIGKILL)
    wait_until_gone(child)
    expect_reason(host, Quality.ESTIMATED, ENDED)
    assert host.manager.problems == []


@pytest.mark.usefixtures("blind")
def test_without_inotify_the_next_sweep_finds_a_descendant_outside(
    host: Host, class_: str, workload: Workload, puppet: Puppet
) -> None:
    write(host, f"{class_}/tasks", ask(puppet, "fork"))
    inspect(host, "k")
    found(host, Quality.LATE, TAKEN)


def test_ending_workload_is_inspected_before_its_totals_are_final(
    host: Host, class_: str, workload: Workload, puppet: Puppet
) -> None:
    write(host, f"{class_}/tasks", ask(puppet, "fork"))
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.LATE}
    assert all(TAKEN in total.reason for total in totals)


def test_first_task_that_is_moved_out_is_moved_back_at_once(host: Host, process: Start) -> None:
    """The next sweep moved it in, and missed a task that had ended by then."""
    pid = process().pid
    record = assign(host.ctx, assignment("k", pid)).workload
    write(host, "tasks", pid)
    expect_reason(host, Quality.LATE, "pid-")
    assert host.tree.membership(pid) == Membership("", record.first.name)


def test_task_of_a_container_that_is_moved_out_is_moved_back_at_once(
    host: Host, class_: str, cgroup: str, process: Start
) -> None:
    pid = process().pid
    join(cgroup, pid)
    assign(host.ctx, assignment("k", pid, own_cgroup=cgroup))
    write(host, f"{class_}/tasks", pid)
    expect_reason(host, Quality.LATE, "pid-")
    assert host.tree.membership(pid).group


def test_task_that_is_moved_out_and_back_is_detected(
    host: Host, class_: str, workload: Workload, process: Start
) -> None:
    """Only the event shows it."""
    pid = process().pid
    assign(host.ctx, assignment("other", pid))
    ref = host.get("other").first.ref
    write(host, "tasks", pid)
    write(host, f"{ref.path}/tasks", pid)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"), "other")


def test_a_living_task_that_is_moved_out_to_its_class_marks_its_own_workload_only(
    host: Host, workload: Workload, puppet: Puppet, process: Start
) -> None:
    """It was in the list of the class before, which has the tasks of its groups too."""
    child, pid = ask(puppet, "fork"), process().pid
    assign(host.ctx, assignment("other", pid))
    host.restart()
    write(host, "tasks", child)
    expect_reason(host, Quality.LATE, TAKEN)
    is_exact(host, "other")
    write(host, "tasks", pid)
    expect_reason(host, Quality.LATE, "pid-", "other")
    assert host.get("k").first.baseline is Quality.LATE


# -- a task that ends before the inspection


@pytest.fixture
def other(host: Host, process: Start) -> Workload:
    """A second workload."""
    return assign(host.ctx, assignment("other", process().pid)).workload


@pytest.mark.parametrize("directory", ["c1", "", "mon_groups/theirs"])
def test_a_task_that_is_moved_out_and_ends_at_once_makes_every_workload_estimated(
    host: Host, workload: Workload, other: Workload, puppet: Puppet, directory: str
) -> None:
    """Nothing was found of it, and the total of its workload stayed exact."""
    host.make_class("c1")
    host.make_foreign("theirs")
    thread = ask(puppet, "thread")
    react(host)
    write(host, f"{directory}/tasks".lstrip("/"), thread)
    end_thread(puppet, thread)
    expect_reason(host, Quality.ESTIMATED, ENDED)
    expect_reason(host, Quality.ESTIMATED, os.path.join(host.mountpoint, directory, "tasks"), "other")


def test_a_task_that_is_moved_to_another_workload_and_ends_at_once_makes_both_estimated(
    host: Host, workload: Workload, other: Workload, puppet: Puppet
) -> None:
    thread = ask(puppet, "thread")
    write(host, f"{other.first.ref.path}/tasks", thread)
    end_thread(puppet, thread)
    expect_reason(host, Quality.ESTIMATED, ENDED)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"), "other")


def test_a_zombie_explains_no_write(host: Host, class_: str, workload: Workload, puppet: Puppet) -> None:
    child = ask(puppet, "fork")
    write(host, f"{class_}/tasks", child)
    os.kill(child, signal.SIGKILL)
    wait_until_gone(child)
    expect_reason(host, Quality.ESTIMATED, ENDED)


def test_a_task_of_another_program_that_ends_at_once_makes_every_workload_estimated(
    host: Host, class_: str, workload: Workload, process: Start
) -> None:
    """It cannot be known that it was not a task of the workload."""
    ended = process()
    write(host, f"{class_}/tasks", ended.pid)
    ended.kill()
    ended.wait()
    expect_reason(host, Quality.ESTIMATED, ENDED)


def test_a_living_task_explains_one_write_only(
    host: Host, class_: str, workload: Workload, process: Start, puppet: Puppet
) -> None:
    thread = ask(puppet, "thread")
    write(host, f"{class_}/tasks", thread)
    puppet.do(f"end {thread}")
    write(host, f"{class_}/tasks", process().pid)
    wait_until_gone(thread)
    expect_reason(host, Quality.ESTIMATED, ENDED)


def test_a_task_that_was_forked_in_a_class_explains_no_write_to_it(
    host: Host, class_: str, workload: Workload, puppet: Puppet
) -> None:
    with contextlib.closing(Puppet()) as other:
        write(host, f"{class_}/tasks", other.pid)
        is_exact(host)
        thread = ask(puppet, "thread")
        write(host, f"{class_}/tasks", thread)
        end_thread(puppet, thread)
        ask(other, "fork")
        ask(other, "thread")
        expect_reason(host, Quality.ESTIMATED, ENDED)


def test_a_workload_that_is_created_after_the_write_stays_exact(
    host: Host, class_: str, workload: Workload, process: Start, puppet: Puppet
) -> None:
    thread = ask(puppet, "thread")
    write(host, f"{class_}/tasks", thread)
    end_thread(puppet, thread)
    assign(host.ctx, assignment("later", process().pid))
    expect_reason(host, Quality.ESTIMATED, ENDED)
    is_exact(host, "later")


def test_workload_that_ends_before_an_inspection_is_estimated(
    host: Host, class_: str, workload: Workload, puppet: Puppet
) -> None:
    thread = ask(puppet, "thread")
    write(host, f"{class_}/tasks", thread)
    end_thread(puppet, thread)
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all(ENDED in total.reason for total in totals)


def test_task_that_ends_before_the_inspection_of_its_workload_makes_it_late(
    host: Host, class_: str, workload: Workload, other: Workload, puppet: Puppet
) -> None:
    """It lived when its class was listed, so that no other workload is marked."""
    looks = host.ctx.interference
    looks._inspect_not_before = float("inf")
    thread = ask(puppet, "thread")
    write(host, f"{class_}/tasks", thread)
    host.manager.maintenance.react()
    end_thread(puppet, thread)
    looks._inspect_not_before = 0.0
    expect_reason(host, Quality.LATE, TAKEN)
    is_exact(host, "other")


@pytest.mark.parametrize("is_new", [True, False])
def test_group_removed_before_an_inspection_makes_every_workload_estimated(
    host: Host, workload: Workload, puppet: Puppet, is_new: bool
) -> None:
    foreign = host.make_foreign("theirs")
    if not is_new:
        react(host)
    thread = ask(puppet, "thread")
    write(host, f"{foreign.path}/tasks", thread)
    end_thread(puppet, thread)
    os.rmdir(host.tree.full_path(foreign))
    expect_reason(host, Quality.ESTIMATED, GONE)


def test_events_that_the_kernel_dropped_make_every_workload_estimated(
    host: Host, workload: Workload, tmp_path: Path
) -> None:
    foreign = host.ctx.interference._foreign
    assert foreign is not None
    assert foreign._inotify is not None
    # A faster filesystem fills the same queue.
    foreign._inotify.add(str(tmp_path), IN_MODIFY)
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"")
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(most + 2):
        os.truncate(files[number % 2], 0)
    expect_reason(host, Quality.ESTIMATED, "were not seen, because they were too many")


def test_events_that_cannot_be_read_make_every_workload_estimated_and_fail_no_verb(
    host: Host, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_inotify: Inotify) -> list[Event]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Inotify, "read", fail)
        create(host.ctx, "other", owner="test")
    expect_reason(host, Quality.ESTIMATED, "or because the kernel's events could not be read")


def test_group_whose_tasks_cannot_be_listed_after_a_write_is_estimated(
    host: Host, class_: str, workload: Workload, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that was moved out may end before the next list."""

    listed = Tree.tasks

    def starve(tree: Tree, directory: GroupRef | str) -> list[int]:
        if isinstance(directory, str):
            return listed(tree, directory)
        raise NotRead("cannot list the tasks of the group", path=directory.path, errno=errno.EMFILE)

    with monkeypatch.context() as patched:
        patched.setattr(Tree, "tasks", starve)
        write(host, f"{class_}/tasks", process().pid)
        react(host)
    expect_reason(host, Quality.ESTIMATED, "a task that it may have moved cannot be found: ")


# -- into a group


def test_a_task_that_is_moved_into_a_group_makes_the_workload_estimated(
    host: Host, workload: Workload, process: Start
) -> None:
    """It was counted as the workload's, and the figures stayed exact."""
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"))


def test_a_task_that_is_moved_from_one_workload_to_another_marks_both(
    host: Host, workload: Workload, process: Start, puppet: Puppet
) -> None:
    other = assign(host.ctx, assignment("other", process().pid)).workload
    write(host, f"{other.first.ref.path}/tasks", ask(puppet, "fork"))
    expect_reason(host, Quality.LATE, TAKEN)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"), "other")


def test_write_is_in_the_final_totals_before_an_inspection(host: Host, workload: Workload, process: Start) -> None:
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all(WROTE.format("tasks") in total.reason for total in totals)


@pytest.mark.parametrize("file", ["cpus", "cpus_list"])
def test_cpus_that_are_given_to_a_group_make_the_workload_estimated(
    host: Host, workload: Workload, file: str
) -> None:
    write(host, f"{workload.first.ref.path}/{file}", "1")
    write(host, f"{workload.first.ref.path}/{file}", "")
    expect_reason(host, Quality.ESTIMATED, WROTE.format("cpus"))


@pytest.mark.usefixtures("blind")
def test_without_inotify_cpus_are_found_at_the_end(host: Host, workload: Workload) -> None:
    write(host, f"{workload.first.ref.path}/cpus_list", "0")
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all("another program gave the group CPUs (0)" in total.reason for total in totals)


@pytest.mark.usefixtures("blind")
def test_without_inotify_a_sweep_finds_a_task_that_ran_elsewhere(
    host: Host, workload: Workload, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = process().pid
    wait_a_tick()
    inspect(host, "k")
    # The process started within a second, so the list might have missed it.
    monkeypatch.setattr(inspection, "_FORK_TICKS", 0)
    write(host, f"{workload.first.ref.path}/tasks", pid)
    inspect(host, "k")
    found(host, Quality.ESTIMATED, "another program moved tasks into the group")


def test_task_moved_in_without_a_daemon_is_found_by_its_age(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_FORK_TICKS", 0)
    stranger, member = process().pid, process().pid
    wait_a_tick()
    record = assign(host.ctx, assignment("k", member)).workload
    Control(host.mountpoint).steal(stranger, record.first.ref.path)
    host.restart()
    found(host, Quality.ESTIMATED, "another program moved tasks into the group")


def test_group_that_is_renamed_during_the_start_is_inspected(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_FORK_TICKS", 0)
    stranger, member = process().pid, process().pid
    wait_a_tick()
    record = assign(host.ctx, assignment("k", member)).workload
    Control(host.mountpoint).steal(stranger, record.first.ref.path)
    begin = Maintenance.begin

    def rename_first(maintenance: Maintenance) -> None:
        os.rename(host.tree.full_path(record.first.ref), os.path.join(host.mountpoint, "mon_groups/renamed"))
        begin(maintenance)

    monkeypatch.setattr(Maintenance, "begin", rename_first)
    host.restart()
    assert host.get("k").first.name == "renamed"
    found(host, Quality.ESTIMATED, "another program moved tasks into the group")


def test_writes_of_the_daemon_hide_no_write_of_another_program(
    host: Host, workload: Workload, process: Start, puppet: Puppet
) -> None:
    """Both are before the daemon reads the events: a write that the kernel accepts, and a write that it refuses."""
    ended = ended_pid(process)
    react(host)
    host.tree.write_task(workload.first.ref.path, puppet.pid)
    with pytest.raises(NoSuchProcess):
        host.tree.write_task(workload.first.ref.path, ended)
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"))


def test_inotify_that_the_host_gives_later_is_used(
    host: Host, workload: Workload, process: Start, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.make_class("c1")
    with monkeypatch.context() as full:
        full.setattr(foreign_writes, "Inotify", no_instance)
        host.restart()
        react(host)
        assert host.ctx.interference.fd == -1
        child = ask(puppet, "fork")
        write(host, "c1/tasks", child)
    expect_reason(host, Quality.LATE, TAKEN)
    assert host.ctx.interference.fd >= 0
    release(host.ctx, "k", owner="test")
    assign(host.ctx, assignment("k", puppet.pid, late=False))
    write(host, f"{host.get('k').first.ref.path}/tasks", process().pid)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"))


# -- what marks nothing


def test_the_daemons_own_writes_mark_nothing(host: Host, class_: str, process: Start, puppet: Puppet) -> None:
    pids = [process().pid for _ in range(3)]
    write(host, f"{class_}/tasks", pids[2])
    for number, pid in enumerate(pids):
        assign(host.ctx, assignment(f"k{number}", pid))
        assign(host.ctx, assignment("all", puppet.pid, late=False))
    move(host.ctx, "k0", class_)
    host.restart()
    for number in range(3):
        host.manager.maintenance.sweep(f"k{number}")
        is_exact(host, f"k{number}")
    release(host.ctx, "k1", owner="test")
    assign(host.ctx, assignment("k1", pids[1], late=False))
    is_exact(host, "k1")
    is_exact(host, "all")


def test_moves_of_other_programs_own_tasks_mark_nothing(
    host: Host, class_: str, workload: Workload, process: Start, puppet: Puppet
) -> None:
    """As a runtime with classes does all day."""
    foreign = host.make_foreign("theirs", class_)
    for _ in range(3):
        pid = process().pid
        write(host, f"{class_}/tasks", pid)
        write(host, f"{foreign.path}/tasks", pid)
        is_exact(host)
        write(host, f"{class_}/tasks", pid)
        is_exact(host)
        write(host, "tasks", pid)
        ask(puppet, "fork")
        ask(puppet, "thread")
        is_exact(host)


def test_a_runtime_that_puts_a_container_into_a_class_marks_nothing(
    host: Host, class_: str, workload: Workload, process: Start
) -> None:
    """The daemon moves the container into a group of that class before it inspects what the runtime wrote."""
    pid = process().pid
    write(host, f"{class_}/tasks", pid)
    assign(host.ctx, assignment("container", pid))
    assert host.get("container").first.class_ == class_
    for key in ("k", "container"):
        is_exact(host, key)


def test_a_process_that_is_moved_with_its_threads_and_children_marks_nothing(
    host: Host, class_: str, workload: Workload
) -> None:
    """Each of them is written, as by a shell's loop over a control group."""
    with contextlib.closing(Puppet()) as other:
        tids = [other.pid, ask(other, "thread"), ask(other, "thread"), ask(other, "fork")]
        for tid in tids:
            write(host, f"{class_}/tasks", tid)
        is_exact(host)
        for tid in tids:
            write(host, "tasks", tid)
        is_exact(host)


def open_truncated(host: Host, directory: str) -> int:
    """Open the tasks file as a shell does: O_TRUNC raises an event although nothing is written."""
    return os.open(os.path.join(host.mountpoint, directory, "tasks"), os.O_WRONLY | os.O_TRUNC)


def write_refused(fd: int, tid: int) -> None:
    """Write a task that has ended to an open tasks file, which the kernel refuses, and close the file."""
    with pytest.raises(ProcessLookupError):
        os.write(fd, b"%d\n" % tid)
    os.close(fd)


@pytest.mark.parametrize("is_seen_open", [True, False])
def test_refused_write_with_truncation_counts_as_a_write(
    host: Host, class_: str, workload: Workload, process: Start, is_seen_open: bool
) -> None:
    """The event of the truncation is the same as that of a write, and a task that was written may have ended."""
    tid = ended_pid(process)
    react(host)
    fd = open_truncated(host, class_)
    if is_seen_open:
        host.manager.maintenance.react()
    write_refused(fd, tid)
    expect_reason(host, Quality.ESTIMATED, ENDED)


def test_refused_write_without_truncation_marks_nothing(
    host: Host, class_: str, workload: Workload, process: Start
) -> None:
    react(host)
    with pytest.raises(ProcessLookupError):
        write(host, f"{class_}/tasks", ended_pid(process))
    is_exact(host)


def test_refused_write_does_not_hide_another_one_through_the_same_file(
    host: Host, class_: str, workload: Workload, process: Start, puppet: Puppet
) -> None:
    """As ``{ echo 1; echo 2; } >tasks``: last_cmd_status is about the second one."""
    thread, tid = ask(puppet, "thread"), ended_pid(process)
    react(host)
    fd = open_truncated(host, class_)
    os.write(fd, b"%d\n" % thread)
    end_thread(puppet, thread)
    write_refused(fd, tid)
    expect_reason(host, Quality.ESTIMATED, ENDED)


def test_refused_write_does_not_hide_another_write(
    host: Host, class_: str, workload: Workload, process: Start, puppet: Puppet
) -> None:
    """The text in last_cmd_status is about the last write only."""
    thread, tid = ask(puppet, "thread"), ended_pid(process)
    fd = open_truncated(host, "")
    host.manager.maintenance.react()
    write(host, f"{class_}/tasks", thread)
    end_thread(puppet, thread)
    write_refused(fd, tid)
    expect_reason(host, Quality.ESTIMATED, ENDED)


def test_earlier_refusal_does_not_hide_a_write(
    host: Host, class_: str, workload: Workload, process: Start, puppet: Puppet
) -> None:
    """While the file is open, last_cmd_status is still about an earlier write."""
    thread, tid = ask(puppet, "thread"), ended_pid(process)
    with pytest.raises(ProcessLookupError):
        write(host, f"{class_}/tasks", tid)
    react(host)
    fd = open_truncated(host, class_)
    host.manager.maintenance.react()
    os.write(fd, b"%d\n" % thread)
    end_thread(puppet, thread)
    os.close(fd)
    expect_reason(host, Quality.ESTIMATED, ENDED)


def test_write_through_a_file_that_stays_open_is_judged(
    host: Host, workload: Workload, process: Start, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write is explained by its task, and the second write is of a task that has ended."""
    monkeypatch.setattr(attribution, "_MAX_DELAY_S", 0.2)
    host.make_class("c1")
    thread = ask(puppet, "thread")
    fd = open_truncated(host, "c1")
    try:
        os.write(fd, b"%d\n" % process().pid)
        is_exact(host)
        os.write(fd, b"%d\n" % thread)
        end_thread(puppet, thread)
        expect_reason(host, Quality.ESTIMATED, ENDED)
    finally:
        os.close(fd)


def test_writes_elsewhere_cost_a_bounded_part_of_a_processor(
    host: Host, class_: str, workload: Workload, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "_MIN_PAUSE_S", 3600.0)
    write(host, f"{class_}/tasks", process().pid)
    assert host.manager.maintenance.react() == 0
    looks: list[str] = []
    monkeypatch.setattr(host.ctx.interference, "inspect", looks.append)
    write(host, f"{class_}/tasks", process().pid)
    while (pause := host.manager.maintenance.react()) < 3000:
        assert pause, "not before the pause is over"
        time.sleep(pause)
    assert looks == []


def test_lists_of_tasks_cost_a_bounded_part_of_a_processor(
    host: Host, class_: str, workload: Workload, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(host, f"{class_}/tasks", process().pid)
    monkeypatch.setattr(interference, "_PAUSE_FACTOR", 1e9)
    assert host.manager.maintenance.react() == 0
    write(host, f"{class_}/tasks", process().pid)
    lists: list[str] = []
    monkeypatch.setattr(host.ctx.interference._arrivals, "find", lists.append)
    assert host.manager.maintenance.react() > 0
    assert lists == []


# -- the tree changes


@pytest.mark.parametrize("directory", ["later", "mon_groups/theirs"])
def test_classes_and_groups_that_come_later_are_watched(
    host: Host, workload: Workload, puppet: Puppet, directory: str
) -> None:
    is_exact(host)
    host.make_class("later")
    host.make_foreign("theirs")
    is_exact(host)
    write(host, f"{directory}/tasks", ask(puppet, "fork"))
    expect_reason(host, Quality.LATE, TAKEN)


def test_group_of_the_daemon_is_its_own_while_it_is_being_created(
    host: Host, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads read events at any time. As the group of another program, it would cost an inspection of each group."""
    create_group = Tree.create
    inspected: list[str] = []

    def read_after(tree: Tree, *arguments: object) -> object:
        created = create_group(tree, *arguments)  # type: ignore[arg-type]
        host.ctx.interference.read_events()
        return created

    with monkeypatch.context() as patched:
        patched.setattr(Tree, "create", read_after)
        create(host.ctx, "new", owner="test")

    def inspect(_inspector: object, workload: Workload) -> Workload:
        inspected.append(workload.key)
        return workload

    monkeypatch.setattr(inspection.Inspector, "inspect", inspect)
    react(host)
    assert not inspected
    write(host, "mon_groups/new/cpus_list", 0)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("cpus"), "new")


def test_end_of_a_group_leaves_no_events_for_which_a_thread_is_woken(host: Host, workload: Workload) -> None:
    events = select.poll()
    events.register(host.ctx.interference.fd, select.POLLIN)
    release(host.ctx, "k", owner="test")
    assert not events.poll(0)


def test_group_of_another_program_is_watched_if_the_daemon_was_about_to_create_it(
    host: Host, workload: Workload, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_instead(_tree: Tree, ref: GroupRef, _nonce: int) -> None:
        host.make_foreign(ref.name)
        host.ctx.interference.read_events()
        raise GroupExists("it exists", path=ref.path)

    tid = ask(puppet, "fork")
    with monkeypatch.context() as patched:
        patched.setattr(Tree, "create", create_instead)
        with pytest.raises(ForeignGroup):
            create(host.ctx, "new", owner="test")
    write(host, "mon_groups/new/tasks", tid)
    expect_reason(host, Quality.LATE, TAKEN)


def test_write_to_a_renamed_group_is_detected(host: Host, workload: Workload, process: Start) -> None:
    os.rename(host.tree.full_path(workload.first.ref), os.path.join(host.mountpoint, "mon_groups/renamed"))
    write(host, "mon_groups/renamed/tasks", process().pid)
    react(host)
    inspect(host, "k")
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"))


def test_group_is_not_marked_for_an_earlier_group_of_its_name(
    host: Host, workload: Workload, puppet: Puppet, process: Start
) -> None:
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    release(host.ctx, "k", owner="test")
    assign(host.ctx, assignment("k", puppet.pid, late=False))
    is_exact(host)
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    expect_reason(host, Quality.ESTIMATED, WROTE.format("tasks"))


def test_event_loop_is_not_woken_for_the_daemons_own_writes(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop competed with the thread of the verb for Python's lock."""
    manager, was_woken = host.manager, []
    write_task = manager.context.tree.write_task

    def is_readable() -> bool:
        poll = select.poll()
        poll.register(manager.context.interference.fd, select.POLLIN)
        return bool(poll.poll(0))

    def checked(directory: str, tid: int) -> None:
        write_task(directory, tid)
        was_woken.append(is_readable())

    monkeypatch.setattr(manager.context.tree, "write_task", checked)
    assign(manager.context, assignment("k", process().pid))
    assert was_woken == [False]
    assert not is_readable()
    write(host, f"{manager.context.store.known('k').first.ref.path}/tasks", process().pid)
    assert is_readable()
