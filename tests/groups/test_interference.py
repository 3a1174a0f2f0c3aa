# SPDX-License-Identifier: Apache-2.0
"""Another program moves tasks out of our groups or into them, or gives them CPUs: no total stays exact."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from resctrlmond.groups import interference
from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.record import Record
from resctrlmond.resctrl import foreign_writes
from resctrlmond.resctrl.errors import NoSuchProcess
from resctrlmond.resctrl.foreign_writes import boot_ticks
from resctrlmond.resctrl.membership import Membership
from resctrlmond.sim.control import Control
from tests.groups.conftest import Host, assignment, join
from tests.sim.conftest import Puppet

Start = Callable[[], "subprocess.Popen[bytes]"]
TAKEN = "another program moved tasks out of the group"
WROTE = "another program wrote to {} of the group"


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that gives no inotify instance any more."""

    def none() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(foreign_writes, "Inotify", none)


@pytest.fixture
def class_(host: Host) -> str:
    host.make_class("c1")
    return "c1"


@pytest.fixture
def workload(host: Host, puppet: Puppet) -> Iterator[Record]:
    """A command that is known by its process alone, exact from its first instruction on."""
    record = host.manager.assign(assignment("k", puppet.pid)).record
    assert record.baseline is Quality.EXACT
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


def react(host: Host) -> None:
    while pause := host.manager.upkeep.react():
        time.sleep(pause)


def said(host: Host, quality: Quality, reason: str, key: str = "k") -> None:
    """That quality, with that reason, is in the record, in the file and in each total."""
    react(host)
    found(host, quality, reason, key)


def found(host: Host, quality: Quality, reason: str, key: str = "k") -> None:
    assert host.manager.get(key).baseline is quality
    totals = host.manager.read(key)[2]
    assert {total.quality for total in totals} == {quality}
    assert all(reason in total.reason for total in totals), totals[0].reason
    host.check()


def is_exact(host: Host, key: str = "k") -> None:
    react(host)
    host.manager.upkeep.interference.inspect(key)
    record = host.manager.get(key)
    assert (record.baseline, record.late_reasons) == (Quality.EXACT, ())


# -- out of a group


def test_a_descendant_that_is_moved_to_another_class_makes_its_workload_late(
    host: Host, class_: str, workload: Record, puppet: Puppet
) -> None:
    """A command's descendants were never looked for, and its figures stayed exact."""
    child = ask(puppet, "fork")
    write(host, f"{class_}/tasks", child)
    said(host, Quality.LATE, TAKEN)
    host.manager.upkeep.interference.inspect("k")
    assert len(host.manager.get("k").late_reasons) == 1


def test_a_thread_that_is_moved_to_the_root_makes_its_workload_late(
    host: Host, workload: Record, puppet: Puppet
) -> None:
    write(host, "tasks", ask(puppet, "thread"))
    said(host, Quality.LATE, "ran outside until")


def test_a_descendant_that_is_moved_to_a_group_of_another_program_makes_its_workload_late(
    host: Host, workload: Record, puppet: Puppet
) -> None:
    theirs = host.make_foreign("theirs")
    write(host, f"{theirs.path}/tasks", ask(puppet, "fork"))
    said(host, Quality.LATE, TAKEN)


@pytest.mark.parametrize("directory", ["mon_groups/theirs", "theirs"])
def test_a_descendant_that_was_in_a_group_of_another_program_that_is_gone_makes_its_workload_late(
    host: Host, workload: Record, puppet: Puppet, directory: str
) -> None:
    """The group was created, written to and removed before the daemon could watch it."""
    child = ask(puppet, "fork")
    react(host)
    os.mkdir(os.path.join(host.mountpoint, directory))
    write(host, f"{directory}/tasks", child)
    os.rmdir(os.path.join(host.mountpoint, directory))
    said(host, Quality.LATE, TAKEN)


def test_a_process_whose_parent_has_ended_is_missed_as_well(
    host: Host, class_: str, workload: Record, puppet: Puppet
) -> None:
    orphan = ask(puppet, "orphan")
    host.manager.upkeep.interference.inspect("k")
    write(host, f"{class_}/tasks", orphan)
    said(host, Quality.LATE, TAKEN)


def test_a_fork_of_a_process_whose_parent_has_ended_is_missed_as_well(
    host: Host, class_: str, process: Start, puppet: Puppet
) -> None:
    """It is not a descendant of a member that lives."""
    first = process()
    host.manager.assign(assignment("k", puppet.pid))
    host.manager.assign(assignment("k", first.pid))
    host.manager.remove_member("k", f"pid-{puppet.pid}")
    is_exact(host)
    write(host, f"{class_}/tasks", ask(puppet, "fork"))
    said(host, Quality.LATE, TAKEN)


@pytest.mark.usefixtures("blind")
def test_without_inotify_the_next_sweep_finds_a_descendant_outside(
    host: Host, class_: str, workload: Record, puppet: Puppet
) -> None:
    write(host, f"{class_}/tasks", ask(puppet, "fork"))
    host.manager.upkeep.interference.inspect("k")
    found(host, Quality.LATE, TAKEN)


def test_a_workload_that_ends_is_looked_at_before_its_totals_are_final(
    host: Host, class_: str, workload: Record, puppet: Puppet
) -> None:
    write(host, f"{class_}/tasks", ask(puppet, "fork"))
    totals = host.manager.release("k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.LATE}
    assert all(TAKEN in total.reason for total in totals)


def test_the_first_task_that_is_moved_out_is_taken_in_again_at_once(host: Host, process: Start) -> None:
    """It was taken in by the next sweep, and one that had ended by then was missed."""
    pid = process().pid
    record = host.manager.assign(assignment("k", pid)).record
    write(host, "tasks", pid)
    said(host, Quality.LATE, "pid-")
    assert host.tree.membership(pid) == Membership("", record.group_name)


def test_a_task_of_a_container_that_is_moved_out_is_taken_in_again_at_once(
    host: Host, class_: str, cgroup: str, process: Start
) -> None:
    pid = process().pid
    join(cgroup, pid)
    host.manager.assign(assignment("k", pid, own_cgroup=cgroup))
    write(host, f"{class_}/tasks", pid)
    said(host, Quality.LATE, "pid-")
    assert host.tree.membership(pid).group


def test_a_task_that_is_moved_out_and_put_back_is_seen(
    host: Host, class_: str, workload: Record, process: Start
) -> None:
    """Nothing but the event says so."""
    pid = process().pid
    host.manager.assign(assignment("other", pid))
    ref = host.manager.get("other").ref
    write(host, "tasks", pid)
    write(host, f"{ref.path}/tasks", pid)
    said(host, Quality.ESTIMATED, WROTE.format("tasks"), "other")
    is_exact(host, "k")


# -- into a group


def test_a_task_that_is_moved_into_a_group_makes_the_workload_estimated(
    host: Host, workload: Record, process: Start
) -> None:
    """It was counted as the workload's, and the figures stayed exact."""
    write(host, f"{workload.ref.path}/tasks", process().pid)
    said(host, Quality.ESTIMATED, WROTE.format("tasks"))


def test_a_task_that_is_moved_from_one_workload_to_another_marks_both(
    host: Host, workload: Record, process: Start, puppet: Puppet
) -> None:
    other = host.manager.assign(assignment("other", process().pid)).record
    write(host, f"{other.ref.path}/tasks", ask(puppet, "fork"))
    said(host, Quality.LATE, TAKEN)
    said(host, Quality.ESTIMATED, WROTE.format("tasks"), "other")


def test_a_write_is_in_the_final_totals_though_nobody_has_looked(
    host: Host, workload: Record, process: Start
) -> None:
    write(host, f"{workload.ref.path}/tasks", process().pid)
    totals = host.manager.release("k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all(WROTE.format("tasks") in total.reason for total in totals)


@pytest.mark.parametrize("file", ["cpus", "cpus_list"])
def test_cpus_that_are_given_to_a_group_make_the_workload_estimated(host: Host, workload: Record, file: str) -> None:
    write(host, f"{workload.ref.path}/{file}", "1")
    write(host, f"{workload.ref.path}/{file}", "")
    said(host, Quality.ESTIMATED, WROTE.format("cpus"))


@pytest.mark.usefixtures("blind")
def test_without_inotify_cpus_are_found_at_the_end(host: Host, workload: Record) -> None:
    write(host, f"{workload.ref.path}/cpus_list", "0")
    totals = host.manager.release("k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all("another program gave the group CPUs (0)" in total.reason for total in totals)


@pytest.mark.usefixtures("blind")
def test_without_inotify_a_sweep_finds_a_task_that_ran_elsewhere(
    host: Host, workload: Record, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = process().pid
    wait_a_tick()
    host.manager.upkeep.interference.inspect("k")
    # The process started within a second, so the list might have missed it.
    monkeypatch.setattr(interference, "_FORK_TICKS", 0)
    write(host, f"{workload.ref.path}/tasks", pid)
    host.manager.upkeep.interference.inspect("k")
    found(host, Quality.ESTIMATED, "another program moved tasks into the group")


def test_a_task_that_was_moved_in_while_no_daemon_ran_is_found_by_its_age(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "_FORK_TICKS", 0)
    stranger, member = process().pid, process().pid
    wait_a_tick()
    record = host.manager.assign(assignment("k", member)).record
    Control(host.mountpoint).steal(stranger, record.ref.path)
    host.restart()
    found(host, Quality.ESTIMATED, "another program moved tasks into the group")


def test_writes_of_the_daemon_hide_no_write_of_another_program(
    host: Host, workload: Record, process: Start, puppet: Puppet
) -> None:
    """All of them before the daemon reads the events: one that the kernel carries out, and one that it refuses."""
    ended = process()
    ended.kill()
    ended.wait()
    react(host)
    host.tree.write_task(workload.ref.path, puppet.pid)
    with pytest.raises(NoSuchProcess):
        host.tree.write_task(workload.ref.path, ended.pid)
    write(host, f"{workload.ref.path}/tasks", process().pid)
    said(host, Quality.ESTIMATED, WROTE.format("tasks"))


# -- what marks nothing


def test_the_daemons_own_writes_mark_nothing(host: Host, class_: str, process: Start, puppet: Puppet) -> None:
    pids = [process().pid for _ in range(3)]
    write(host, f"{class_}/tasks", pids[2])
    for number, pid in enumerate(pids):
        host.manager.assign(assignment(f"k{number}", pid))
        host.manager.assign(assignment("all", puppet.pid, late=False))
    host.manager.move("k0", class_)
    host.restart()
    for number in range(3):
        host.manager.upkeep.sweeping.sweep(f"k{number}")
        is_exact(host, f"k{number}")
    host.manager.release("k1", owner="test")
    host.manager.assign(assignment("k1", pids[1], late=False))
    is_exact(host, "k1")
    is_exact(host, "all")


def test_what_others_do_with_their_own_tasks_marks_nothing(
    host: Host, class_: str, workload: Record, process: Start, puppet: Puppet
) -> None:
    """As a runtime with classes does all day."""
    theirs = host.make_foreign("theirs", class_)
    for _ in range(3):
        pid = process().pid
        write(host, f"{class_}/tasks", pid)
        write(host, f"{theirs.path}/tasks", pid)
        write(host, "tasks", pid)
        ask(puppet, "fork")
        ask(puppet, "thread")
        is_exact(host)


def test_writes_elsewhere_cost_a_bounded_part_of_a_processor(
    host: Host, class_: str, workload: Record, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "_SHORTEST_PAUSE_S", 3600.0)
    write(host, f"{class_}/tasks", process().pid)
    assert host.manager.upkeep.react() == 0
    looks: list[str] = []
    monkeypatch.setattr(host.manager.upkeep.interference, "inspect", looks.append)
    write(host, f"{class_}/tasks", process().pid)
    assert host.manager.upkeep.react() > 3000, "not before the pause is over"
    assert looks == []


# -- the tree changes


@pytest.mark.parametrize("directory", ["later", "mon_groups/theirs"])
def test_classes_and_groups_that_come_later_are_watched(
    host: Host, workload: Record, puppet: Puppet, directory: str
) -> None:
    is_exact(host)
    host.make_class("later")
    host.make_foreign("theirs")
    is_exact(host)
    write(host, f"{directory}/tasks", ask(puppet, "fork"))
    said(host, Quality.LATE, TAKEN)


def test_a_write_to_a_group_that_was_renamed_is_seen(host: Host, workload: Record, process: Start) -> None:
    os.rename(host.tree.full_path(workload.ref), os.path.join(host.mountpoint, "mon_groups/renamed"))
    write(host, "mon_groups/renamed/tasks", process().pid)
    react(host)
    host.manager.upkeep.interference.inspect("k")
    said(host, Quality.ESTIMATED, WROTE.format("tasks"))


def test_a_group_of_the_same_name_is_not_marked_for_the_one_before_it(
    host: Host, workload: Record, puppet: Puppet, process: Start
) -> None:
    write(host, f"{workload.ref.path}/tasks", process().pid)
    host.manager.release("k", owner="test")
    host.manager.assign(assignment("k", puppet.pid, late=False))
    is_exact(host)
    write(host, f"{workload.ref.path}/tasks", process().pid)
    said(host, Quality.ESTIMATED, WROTE.format("tasks"))
