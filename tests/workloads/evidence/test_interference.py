# SPDX-License-Identifier: Apache-2.0
"""Another program moves tasks out of the daemon's groups or into them, or gives them CPUs: no total stays exact."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resctrlmond.resctrl import foreign_directories, processes
from resctrlmond.resctrl.errors import NotMounted, NotRead, ResctrlError
from resctrlmond.resctrl.inotify import Event, Inotify
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.tree import Found, GroupRef, Tree
from resctrlmond.resctrl.witness import Moves, Witness
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.kernel.witness import MOVES
from resctrlmond.workloads.evidence.witnessed import Proofs
from resctrlmond.workloads.figures.reasons import Reason
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.groups import creation
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import ProofKind, Quality
from resctrlmond.workloads.model.workload import Group, Proof, Workload, replace
from resctrlmond.workloads.records.store import Limit, Transaction
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import remove_member
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read, with_proofs
from resctrlmond.workloads.verbs.release import release
from tests import aio
from tests.sim.conftest import Puppet
from tests.workloads.conftest import Host, assignment, join

Start = Callable[[], "subprocess.Popen[bytes]"]
TAKEN = "tasks were moved out of the group"
ADDED = "tasks of others were moved into the group"
WROTE = "another program gave the group CPUs"


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that gives no inotify instance any more."""

    monkeypatch.setattr(foreign_directories, "Inotify", no_instance)


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
    assert baseline_of(record) is Quality.EXACT
    yield record


def as_another_program(work: Callable[[], None]) -> None:
    """Do the work in another process. Raises its OSError."""
    pid = os.fork()
    if pid == 0:
        code = errno.EIO
        try:
            work()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))


def write(host: Host, file: str, text: str | int, *, times: int = 1) -> None:
    """Write to a file of resctrl as another program does."""

    def write_it() -> None:
        fd = os.open(os.path.join(host.mountpoint, file), os.O_WRONLY)
        for _ in range(times):
            os.write(fd, f"{text}\n".encode())

    as_another_program(write_it)


def ask(puppet: Puppet, verb: str) -> int:
    return int(puppet.do(verb))


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
    host.ctx.interference.update()
    host.manager.maintenance._weigh()


def figures(host: Host, key: str = "k") -> tuple[Quality, str]:
    """Return the quality of the totals of a workload now, and their reason."""
    (found,) = {(total.quality, total.reason) for total in read(host.ctx, key)[2]}
    return found


def expect_reason(host: Host, quality: Quality, reason: str, key: str = "k") -> None:
    """That quality, with that reason, is in each total, and in the file and after a restart."""
    for _ in range(2):
        react(host)
        now, why = figures(host, key)
        assert (now, reason in why) == (quality, True), why
        host.manager.maintenance._weigh()
        host.check()
        host.restart()


def is_exact(host: Host, key: str = "k") -> None:
    react(host)
    assert figures(host, key) == (Quality.EXACT, "")


# -- out of a group


@pytest.fixture
def other(host: Host, process: Start) -> Workload:
    """A second workload."""
    return assign(host.ctx, assignment("other", process().pid)).workload


@pytest.mark.parametrize("directory", ["c1", "", "mon_groups/theirs", "mon_groups/other"])
@pytest.mark.parametrize(
    "task", ["fork", "fork that ends", "thread", "thread that ends", "orphan", "orphan that ends"]
)
def test_a_task_that_is_moved_out_makes_its_workload_late_and_no_other(
    host: Host, other: Workload, puppet: Puppet, task: str, directory: str
) -> None:
    host.make_class("c1")
    host.make_foreign("theirs")
    assign(host.ctx, assignment("k", puppet.pid))
    verb, _, ends = task.partition(" that ")
    tid = ask(puppet, verb)
    write(host, f"{directory}/tasks".lstrip("/"), tid)
    if ends and verb == "thread":
        end_thread(puppet, tid)
    elif ends:
        os.kill(tid, signal.SIGKILL)
        wait_until_gone(tid)
    # The sweep of the next start finds a thread of the member's own process, but for one in another class.
    is_found = task == "thread" and directory in ("", "mon_groups/theirs", "mon_groups/other")
    expect_reason(host, Quality.LATE, "" if is_found else TAKEN)
    if directory == "mon_groups/other":
        expect_reason(host, Quality.ESTIMATED, ADDED, "other")
    else:
        is_exact(host, "other")


@pytest.mark.parametrize("directory", ["mon_groups/theirs", "theirs"])
def test_a_task_that_was_in_a_group_that_is_gone_makes_its_workload_late(
    host: Host, workload: Workload, puppet: Puppet, directory: str
) -> None:
    """The group was created, written to and removed before the daemon could look."""
    child = ask(puppet, "fork")
    os.mkdir(os.path.join(host.mountpoint, directory))
    write(host, f"{directory}/tasks", child)
    os.kill(child, signal.SIGKILL)
    wait_until_gone(child)
    os.rmdir(os.path.join(host.mountpoint, directory))
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


def test_lists_and_several_writes_hide_no_task(host: Host, class_: str, workload: Workload, puppet: Puppet) -> None:
    """Each living task of another program explained a write, although that had moved a task that ended at once."""
    with contextlib.closing(Puppet()) as stranger:
        for text in ("{stranger},{own}", "{own},{stranger}"):
            child = ask(puppet, "fork")
            write(host, f"{class_}/tasks", text.format(stranger=stranger.pid, own=child))
            write(host, "tasks", stranger.pid)
            os.kill(child, signal.SIGKILL)
            wait_until_gone(child)
    assert host.ctx.proofs.weighed(host.get("k")).first.moved_out == 2
    expect_reason(host, Quality.LATE, TAKEN)


def test_asynchronous_write_is_found(host: Host, workload: Workload, puppet: Puppet) -> None:
    """It raises no event of inotify."""
    tid = ask(puppet, "thread")
    as_another_program(lambda: aio.write(f"{host.mountpoint}/tasks", str(tid)))
    as_another_program(lambda: aio.write(f"{host.mountpoint}/{workload.first.ref.path}/tasks", str(tid)))
    assert host.tree.membership(tid).group == "k"
    of = host.ctx.proofs.weighed(host.get("k")).first
    assert (of.moved_out, of.moved_in) == (1, 1)
    expect_reason(host, Quality.ESTIMATED, ADDED)


def test_program_that_has_moved_a_task_is_logged_and_stated(
    host: Host, workload: Workload, puppet: Puppet, caplog: pytest.LogCaptureFixture
) -> None:
    host.manager.maintenance._weigh()
    assert not caplog.messages
    path = f"{host.mountpoint}/tasks"
    mover = subprocess.Popen(["sh", "-c", f"echo {ask(puppet, 'fork')} >{path}"])
    assert mover.wait() == 0
    for _ in range(2):
        host.manager.maintenance._weigh()
    by = f"sh (process {mover.pid})"
    assert caplog.messages == [f"k: {Reason.MOVED_OUT.text(by=by)}", f"k: the last task was moved by {by}"]
    (closed,) = (one for one in with_proofs(host.ctx, "k")[1] if one.kind is ProofKind.CLOSED)
    assert f"other programs (the last one was {by}) have moved 1 task out of its groups" in closed.text


def test_move_is_in_the_final_totals(host: Host, class_: str, workload: Workload, puppet: Puppet) -> None:
    write(host, f"{class_}/tasks", ask(puppet, "fork"))
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.LATE}
    assert all(TAKEN in total.reason for total in totals)


@pytest.mark.parametrize("has_cgroup", [True, False])
def test_first_task_that_is_moved_out_is_moved_back(
    host: Host, cgroup: str, process: Start, has_cgroup: bool
) -> None:
    pid = process().pid
    if has_cgroup:
        join(cgroup, pid)
    record = assign(host.ctx, assignment("k", pid, own_cgroup=cgroup if has_cgroup else "")).workload
    write(host, "tasks", pid)
    host.manager.maintenance.sweep("k")
    # In a control group, it has used nothing outside.
    assert figures(host)[0] is (Quality.EXACT if has_cgroup else Quality.LATE)
    assert host.tree.membership(pid) == Membership("", record.first.name)


def test_task_that_is_moved_out_and_back_is_detected(host: Host, workload: Workload, puppet: Puppet) -> None:
    write(host, "tasks", puppet.pid)
    write(host, f"{workload.first.ref.path}/tasks", puppet.pid)
    expect_reason(host, Quality.ESTIMATED, ADDED)


def test_moves_while_no_daemon_runs_are_found_and_those_of_an_earlier_daemon_are_not_of_others(
    host: Host, workload: Workload, puppet: Puppet, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign(host.ctx, assignment("k", process().pid, late=True))
    assert figures(host)[0] is Quality.LATE
    create(host.ctx, "own", owner="test")
    assign(host.ctx, assignment("own", process().pid))
    # The next daemon is another process.
    monkeypatch.setattr(os, "getpid", lambda: 4_000_000)
    host.restart()
    assert host.get("own").proof.movers == (4_000_000,)
    is_exact(host, "own")
    host.ctx.interference.close()
    write(host, f"{host.get('own').first.ref.path}/tasks", process().pid)
    host.restart()
    expect_reason(host, Quality.ESTIMATED, ADDED, "own")


@pytest.mark.parametrize("when", ["before the baseline", "after the group was cleared"])
def test_move_into_a_group_that_is_being_created_is_undone_or_found(
    host: Host, process: Start, puppet: Puppet, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    stranger, begin, cleared = process().pid, host.ctx.proofs.begin, creation._cleared

    def add() -> None:
        write(host, "mon_groups/k/tasks", stranger)

    def begin_later() -> Proof:
        add()
        return begin()

    def clear_and_add(*arguments: Any) -> Group:
        found = cleared(*arguments)
        add()
        return found

    with monkeypatch.context() as patched:
        if when == "before the baseline":
            patched.setattr(host.ctx.proofs, "begin", begin_later)
        else:
            patched.setattr(creation, "_cleared", clear_and_add)
        assign(host.ctx, assignment("k", puppet.pid))
    if when == "before the baseline":
        assert host.tree.membership(stranger).group == ""
        is_exact(host)
    else:
        expect_reason(host, Quality.ESTIMATED, ADDED)


@pytest.mark.parametrize("looks", [True, False])
def test_moves_that_the_witness_has_forgotten_are_exact_only_if_they_were_looked_at(
    host: Host, workload: Workload, process: Start, looks: bool
) -> None:
    pid = process().pid
    for _ in range(5):
        write(host, "tasks", pid, times=MOVES // 4)
        if looks:
            host.manager.maintenance._weigh()
    quality, why = figures(host)
    assert quality is (Quality.EXACT if looks else Quality.ESTIMATED), why
    assert looks or "has overwritten moves" in why
    host.restart()
    assert figures(host)[0] is quality


def test_number_of_an_earlier_daemon_may_belong_to_another_program(
    host: Host, workload: Workload, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 4_000_000)
    host.restart()
    is_exact(host)
    # This process has the number of the first daemon.
    Path(host.mountpoint, host.get("k").first.ref.path, "tasks").write_text(f"{process().pid}\n")
    expect_reason(host, Quality.ESTIMATED, ADDED)


def test_own_moves_after_a_failed_save_at_the_start_are_not_of_others(
    host: Host, workload: Workload, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Transaction.save

    def refuse(txn: Transaction, workload: Workload, limit: Limit | None = None) -> Workload:
        if 4_000_000 in workload.proof.movers:
            raise NotWritten("cannot write", errno=errno.ENOSPC)
        return save(txn, workload, limit)

    pid = process().pid
    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "save", refuse)
        patched.setattr(os, "getpid", lambda: 4_000_000)
        host.restart()
    assert 4_000_000 not in host.get("k").proof.movers
    # The daemon has its number again, and not that in the record.
    with host.ctx.store.transaction("k") as txn:
        txn.save(replace(txn.workload, proof=replace(txn.workload.proof, movers=(4_000_000,))))
    assign(host.ctx, assignment("k", pid))
    is_exact(host)


def test_daemon_that_does_not_know_its_own_moves_is_never_exact(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a PID namespace, it has another number than the witness states."""
    monkeypatch.setattr(Proofs, "_mover", lambda _: 0)
    assign(host.ctx, assignment("k", puppet.pid))
    expect_reason(host, Quality.ESTIMATED, "cannot distinguish its own moves from those of other programs")


def test_look_that_fails_for_lack_of_descriptors_is_made_later(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_witness: Witness) -> Moves:
        raise NotRead("too many open files", path="moves", errno=errno.EMFILE)

    with monkeypatch.context() as patched:
        patched.setattr(Witness, "moves", fail)
        assign(host.ctx, assignment("k", puppet.pid))
    is_exact(host)


def test_move_into_the_group_that_the_witness_has_not_seen_is_not_exact(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the IDs of the group are not known, and no later move out of it is recognized."""
    with monkeypatch.context() as patched:
        patched.setattr(Moves, "into", lambda *_: [])
        assign(host.ctx, assignment("k", puppet.pid))
    expect_reason(host, Quality.ESTIMATED, "has not seen the move of")


def test_record_that_is_not_complete_makes_no_end_exact(
    host: Host, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look sees the move, but for the last look."""
    now = host.ctx.proofs._witness.moves()
    monkeypatch.setattr(Witness, "moves", lambda _: msgspec.structs.replace(now, is_whole=False))
    host.manager.maintenance._weigh()
    is_exact(host)
    (quality,) = {total.quality for total in release(host.ctx, "k", owner="test").totals}
    assert quality is Quality.ESTIMATED


def test_many_moves_of_the_daemon_hide_none_of_others(host: Host, workload: Workload, puppet: Puppet) -> None:
    """They fill the list of the witness."""
    child = ask(puppet, "fork")
    write(host, "tasks", child)
    paths = itertools.cycle([workload.first.ref.path, ""])
    for path in itertools.islice(paths, MOVES):
        host.tree.write_task(path, puppet.pid)
    host.tree.write_task(workload.first.ref.path, puppet.pid)
    quality, why = figures(host)
    assert (quality, TAKEN in why) == (Quality.LATE, True)
    assert host.ctx.proofs.weighed(host.get("k")).first.moved_in == 0


@pytest.mark.parametrize("error", [NotRead("no", path="moves", errno=errno.EMFILE), NotMounted("gone", path="x")])
def test_look_that_fails_for_one_workload_keeps_no_other_from_being_read(
    host: Host, workload: Workload, other: Workload, monkeypatch: pytest.MonkeyPatch, error: ResctrlError
) -> None:
    create(host.ctx, "empty", owner="test")
    find = Tree.find

    def fail(tree: Tree, ref: GroupRef) -> Found | None:
        if ref.name == "empty":
            raise error
        return find(tree, ref)

    with monkeypatch.context() as patched:
        patched.setattr(Tree, "find", fail)
        usages = {usage.workload.key: usage for usage in host.manager.usages.read_all()}
    assert {total.quality for key in ("k", "other") for total in usages[key].totals} == {Quality.EXACT}


def test_inner_run_of_which_the_witness_shows_nothing_leaves_no_outer_one_exact(
    host: Host, workload: Workload, puppet: Puppet, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(host.ctx.proofs, "begin", Proof)
        assign(host.ctx, assignment("inner", ask(puppet, "fork"), nested=True))
    write(host, "mon_groups/inner/tasks", process().pid)
    release(host.ctx, "inner", owner="test")
    assert figures(host)[0] is Quality.ESTIMATED


@pytest.mark.parametrize("is_late", [True, False])
def test_gap_makes_a_late_command_estimated_too(host: Host, puppet: Puppet, simulation: str, is_late: bool) -> None:
    """Another program may have moved tasks into its group."""
    assign(host.ctx, assignment("k", puppet.pid, late=is_late))
    Control(simulation).set_witness(restart=True)
    assert figures(host)[0] is Quality.ESTIMATED


def test_counters_of_a_command_are_not_doubted_for_its_moves(host: Host, workload: Workload, puppet: Puppet) -> None:
    for _ in range(2):
        read(host.ctx, "k")
        (found,) = (one for one in with_proofs(host.ctx, "k")[1] if one.kind is ProofKind.READ)
        assert found.shown, found.text
        write(host, "tasks", ask(puppet, "fork"))


def test_tasks_of_others_in_a_nested_run_make_the_outer_one_estimated(
    host: Host, workload: Workload, puppet: Puppet, process: Start
) -> None:
    """At the end of the inner run, its tasks are moved into the group of the outer one."""
    inner, stranger = ask(puppet, "fork"), process().pid
    assign(host.ctx, assignment("inner", inner, nested=True))
    write(host, "mon_groups/inner/tasks", stranger)
    release(host.ctx, "inner", owner="test")
    assert host.tree.membership(stranger).group == "k"
    assert figures(host)[0] is Quality.ESTIMATED
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert "the nested workload inner may have had tasks of others" in totals[0].reason


def test_task_that_is_assigned_to_another_workload_at_the_same_time_is_in_one_of_them(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call took it out of the group of the first one, whose totals stayed exact."""
    write_task_from, begun = host.tree.write_task_from, list[str]()

    def write_later(before: Membership, directory: str, tid: int) -> bool:
        if not begun:
            begun.append(directory)
            assign(host.ctx, assignment("first", puppet.pid))
        return write_task_from(before, directory, tid)

    with monkeypatch.context() as patched:
        patched.setattr(host.tree, "write_task_from", write_later)
        assign(host.ctx, assignment("second", puppet.pid))
    assert host.tree.membership(puppet.pid).group == "first"
    is_exact(host, "first")
    assert figures(host, "second")[0] is Quality.LATE


# -- into a group


def test_a_task_that_is_moved_into_a_group_makes_the_workload_estimated(
    host: Host, workload: Workload, process: Start
) -> None:
    """It was counted as the workload's, and the figures stayed exact."""
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    expect_reason(host, Quality.ESTIMATED, ADDED)


def test_move_into_a_group_is_in_the_final_totals(host: Host, workload: Workload, process: Start) -> None:
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    totals = release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all(ADDED in total.reason for total in totals)


def test_move_into_a_group_that_is_still_empty_is_detected(host: Host, process: Start, puppet: Puppet) -> None:
    create(host.ctx, "k", owner="test")
    write(host, f"{host.get('k').first.ref.path}/tasks", process().pid)
    assign(host.ctx, assignment("k", puppet.pid))
    expect_reason(host, Quality.ESTIMATED, ADDED)


@pytest.mark.parametrize("file", ["cpus", "cpus_list"])
def test_cpus_that_are_given_to_a_group_make_the_workload_estimated(
    host: Host, workload: Workload, file: str
) -> None:
    write(host, f"{workload.first.ref.path}/{file}", "1")
    write(host, f"{workload.first.ref.path}/{file}", "")
    expect_reason(host, Quality.ESTIMATED, WROTE)


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.usefixtures("blind")
def test_cpus_are_known_without_inotify(host: Host, puppet: Puppet, is_read: bool) -> None:
    host.restart()
    assert host.ctx.interference.has_trouble
    record = assign(host.ctx, assignment("k", puppet.pid)).workload
    is_exact(host)
    write(host, f"{record.first.ref.path}/cpus_list", "0")
    write(host, f"{record.first.ref.path}/cpus_list", "")
    totals = read(host.ctx, "k")[2] if is_read else release(host.ctx, "k", owner="test").totals
    assert {total.quality for total in totals} == {Quality.ESTIMATED}
    assert all(WROTE in total.reason for total in totals)


@pytest.mark.parametrize("is_killed", [True, False])
def test_cpus_that_are_taken_back_while_no_daemon_runs_are_known(
    host: Host, workload: Workload, is_killed: bool
) -> None:
    """The daemon looked for CPUs at its start, and a write shortly before a kill was not recorded either."""
    for _ in range(2):
        is_exact(host)
        host.restart()
    if not is_killed:
        host.ctx.interference.close()
    write(host, f"{workload.first.ref.path}/cpus", "1")
    write(host, f"{workload.first.ref.path}/cpus", "")
    host.restart()
    expect_reason(host, Quality.ESTIMATED, WROTE)


@pytest.fixture
def contained(host: Host, cgroup: str, process: Start) -> Workload:
    """A workload that is known by a control group."""
    child = process()
    join(cgroup, child.pid)
    record = assign(host.ctx, assignment("k", child.pid, own_cgroup=cgroup)).workload
    is_exact(host)
    return record


@pytest.mark.usefixtures("contained")
def test_writes_that_the_witness_has_overwritten_unread_leave_no_workload_exact(host: Host) -> None:
    with pytest.raises(OSError, match="Invalid"):
        write(host, "cpus", "none")
    is_exact(host)

    def flood() -> None:
        fd = os.open(os.path.join(host.mountpoint, "cpus"), os.O_WRONLY)
        for _ in range(MOVES + 1):
            with contextlib.suppress(OSError):
                os.write(fd, b"none")

    as_another_program(flood)
    expect_reason(host, Quality.ESTIMATED, "the witness has overwritten writes to resctrl")


def test_many_writes_that_were_looked_at_leave_a_workload_exact_after_a_restart(
    host: Host, contained: Workload, process: Start
) -> None:
    """The record of the time of the last look was half an hour old."""
    other = process().pid
    for number in range(MOVES + 1):
        host.tree.write_task("", other)
        if number % 1000 == 0:
            react(host)
    react(host)
    host.restart()
    is_exact(host)


def test_events_that_cannot_be_read_fail_no_verb(
    host: Host, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_inotify: Inotify) -> list[Event]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Inotify, "read", fail)
        create(host.ctx, "other", owner="test")
    is_exact(host)


def test_inotify_that_the_host_gives_later_is_used(
    host: Host, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(foreign_directories, "Inotify", no_instance)
        host.restart()
        react(host)
        assert host.ctx.interference.has_trouble
    react(host)
    assert not host.ctx.interference.has_trouble
    is_exact(host)


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


def test_refused_write_marks_nothing(host: Host, workload: Workload, process: Start) -> None:
    with pytest.raises(ProcessLookupError):
        write(host, f"{workload.first.ref.path}/tasks", ended_pid(process))
    os.truncate(os.path.join(host.mountpoint, workload.first.ref.path, "tasks"), 0)
    is_exact(host)


# -- the tree changes


def test_group_of_the_daemon_is_its_own_while_it_is_being_created(
    host: Host, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads read events at any time."""
    create_group, created = Tree.create, list[str]()
    monkeypatch.setattr(host.ctx.interference, "on_created", created.extend)

    def read_after(tree: Tree, *arguments: object) -> object:
        found = create_group(tree, *arguments)  # type: ignore[arg-type]
        host.ctx.interference.read_events()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Tree, "create", read_after)
        create(host.ctx, "new", owner="test")
    react(host)
    assert created == []
    host.make_foreign("theirs")
    react(host)
    assert created == ["mon_groups/theirs"]
    write(host, "mon_groups/new/cpus_list", 0)
    expect_reason(host, Quality.ESTIMATED, WROTE, "new")


def test_write_to_a_renamed_group_is_detected(host: Host, workload: Workload, process: Start) -> None:
    os.rename(host.tree.full_path(workload.first.ref), os.path.join(host.mountpoint, "mon_groups/renamed"))
    write(host, "mon_groups/renamed/tasks", process().pid)
    host.manager.maintenance.tick()
    expect_reason(host, Quality.ESTIMATED, ADDED)


def test_cpus_of_a_renamed_group_are_known_by_a_look_that_finds_another_one_at_its_path(
    host: Host, workload: Workload
) -> None:
    """A look between the rename and the tick that follows it took the write for one about another group."""
    os.rename(host.tree.full_path(workload.first.ref), os.path.join(host.mountpoint, "mon_groups/renamed"))
    host.make_foreign("k")
    write(host, "mon_groups/renamed/cpus", "1")
    write(host, "mon_groups/renamed/cpus", "")
    assert baseline_of(host.ctx.proofs.weighed(workload)) is Quality.ESTIMATED


def test_group_is_not_marked_for_an_earlier_group_of_its_name(
    host: Host, workload: Workload, puppet: Puppet, process: Start
) -> None:
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    release(host.ctx, "k", owner="test")
    assign(host.ctx, assignment("k", puppet.pid, late=False))
    is_exact(host)
    write(host, f"{workload.first.ref.path}/tasks", process().pid)
    expect_reason(host, Quality.ESTIMATED, ADDED)
