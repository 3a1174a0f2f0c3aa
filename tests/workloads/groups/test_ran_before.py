# SPDX-License-Identifier: Apache-2.0
"""Assign of a process that runs already: its figures are late, and nothing of it stays outside unsaid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resctrlmond.resctrl import kernel_files, processes
from resctrlmond.resctrl.errors import NoSuchProcess
from resctrlmond.resctrl.membership import Membership
from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import InvalidRequest
from resctrlmond.workloads.model.states import Quality, seconds_up_to
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.sim.conftest import Puppet
from tests.wait import wait_until
from tests.workloads.builders import save
from tests.workloads.conftest import Host, assignment, join, own_host, when_all_stand

Start = Callable[[], "subprocess.Popen[bytes]"]

# Forks all the time: each process starts the next one and lives on for a moment.
_FORKER = """
import os, time
generation = 0
while True:
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    time.sleep(0.002)
"""


# A subreaper with a child, which has a child too.
_REAPER = """
import ctypes, signal, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as child:
    if sys.argv[1:] == ["reaps"]:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(child.pid, child.stdout.readline(), end="", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["reaps", "leaves a zombie"])
def family(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    """A subreaper, its child and its grandchild, which becomes its child when the child ends."""
    command = [sys.executable, "-IS", "-c", _REAPER, request.param]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as made:
        assert made.stdout
        child, grandchild = map(int, made.stdout.readline().split())
        yield made.pid, child, grandchild
        os.killpg(made.pid, signal.SIGKILL)


def when_children_were_read(monkeypatch: pytest.MonkeyPatch, pid: int, end: Callable[[], object]) -> None:
    """Call a function once, after the list of children of the first thread of a process was read."""
    read, waiting = kernel_files.read, [end]

    def read_and_end(path: str) -> bytes:
        content = read(path)
        if path == f"/proc/{pid}/task/{pid}/children" and waiting:
            waiting.pop()()
        return content

    monkeypatch.setattr(kernel_files, "read", read_and_end)


def end_child(child: int, grandchild: int) -> None:
    """Kill a process, and wait until its child has another parent."""
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: (found := processes.stat(grandchild)) is not None and found.parent != child)


@pytest.fixture
def forker() -> Iterator[int]:
    """A process with a child, and both fork all the time."""
    child = f"import os\nos.fork()\n{_FORKER}"
    with subprocess.Popen([sys.executable, "-IS", "-c", child], start_new_session=True) as made:
        yield made.pid
        os.killpg(made.pid, signal.SIGKILL)


def reasons(manager: Manager, key: str) -> set[str]:
    return {total.reason for total in read(manager.context, key)[2]}


def test_process_that_has_run_is_late_with_its_cpu_time(host: Host, puppet: Puppet) -> None:
    """It used 0.2 s of CPU time before, and its total was exact."""
    puppet.do("burn 0.2")
    done = assign(host.ctx, assignment("k", puppet.pid, late=None))
    member = done.workload.members[0]
    assert (member.late, baseline_of(done.workload)) == (True, Quality.LATE)
    # More than it burnt, for it also started; less than all that it has used by now.
    puppet.do("burn 0.05")
    assert 200_000_000 <= member.cpu_time_before_ns <= (processes.cpu_time_ns(puppet.pid) or 0)
    (reason,) = reasons(host.manager, "k")
    assert reason == (
        f"pid-{puppet.pid} ran and had used up to {seconds_up_to(member.cpu_time_before_ns)} s of CPU time "
        "before it was put into the group"
    )
    assert {total.quality for total in release(host.ctx, "k", owner="test").totals} == {Quality.LATE}


@pytest.mark.parametrize(("late", "quality"), [(False, Quality.EXACT), (True, Quality.LATE)])
def test_late_false_of_a_caller_is_accepted(host: Host, process: Start, late: bool, quality: Quality) -> None:
    done = assign(host.ctx, assignment("k", process().pid, late=late))
    assert (done.workload.members[0].late, baseline_of(done.workload)) == (quality is Quality.LATE, quality)


def test_late_false_with_a_pidfd_is_accepted(host: Host, process: Start) -> None:
    with contextlib.closing(processes.Descriptor(os.pidfd_open(process().pid))) as pidfd:
        done = assign(host.ctx, assignment("k", None, pidfd=pidfd, late=False))  # type: ignore[arg-type]
    assert (done.workload.members[0].late, baseline_of(done.workload)) == (False, Quality.EXACT)


def test_process_assigned_before_it_ran_stays_exact_when_it_is_assigned_again(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    again = assign(host.ctx, assignment("k", child.pid, late=None))
    assert (again.moved.moved, baseline_of(again.workload)) == (0, Quality.EXACT)


def test_process_that_is_reported_later_to_have_run_is_late(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    again = assign(host.ctx, assignment("k", child.pid, late=True))
    assert (again.workload.members[0].late, baseline_of(again.workload)) == (True, Quality.LATE)


def test_process_is_late_if_the_daemon_was_killed_during_its_assign(host: Host, process: Start) -> None:
    """The call got no reply, and it is unknown whether its caller waited."""
    assign(host.ctx, assignment("k", process().pid))
    record = host.get("k")
    joining = msgspec.structs.replace(record.members[0], joining=True)
    save(host.ctx.store, record.with_member(joining))
    after = host.restart().context.store.known("k")
    assert (after.members[0].late, after.members[0].joining, baseline_of(after)) == (True, False, Quality.LATE)
    assert reasons(host.manager, "k") == {
        f"{joining.id} may have run before it was in the group: resctrlmond was killed while it was put into it"
    }


@pytest.mark.parametrize(
    ("ns", "text"),
    [(1, "0.001"), (1_000_000, "0.001"), (1_000_001, "0.002"), (1_250_000_000, "1.250"), (61 * 10**9, "61.000")],
)
def test_upper_bound_is_rounded_up(ns: int, text: str) -> None:
    """A process that had used 0.4 ms had used "up to 0.000 s"."""
    assert seconds_up_to(ns) == text


def test_a_task_that_had_left_when_its_process_is_assigned_again_makes_it_late(host: Host, puppet: Puppet) -> None:
    assign(host.ctx, assignment("k", puppet.pid))
    host.tree.write_task("", puppet.pid)
    again = assign(host.ctx, assignment("k", puppet.pid))
    assert (again.moved.moved, baseline_of(again.workload)) == (1, Quality.LATE)
    assert host.tree.membership(puppet.pid) == Membership("", "k")


def test_existing_descendants_stay_outside_and_their_number_is_reported(host: Host, puppet: Puppet) -> None:
    """A busy child outside, and the total was 0 and exact."""
    child = int(puppet.do("fork"))
    done = assign(host.ctx, assignment("k", puppet.pid, late=None))
    assert host.tree.membership(child) == Membership("", "")
    assert (done.descendants_outside, done.moved.outside, baseline_of(done.workload)) == (1, 0, Quality.LATE)
    assert "1 descendant stayed outside" in reasons(host.manager, "k").pop()
    # A later one is its parent's in all.
    assert host.tree.membership(int(puppet.do("fork"))) == Membership("", "k")
    # A descendant in the workload's own group is not outside.
    assign(host.ctx, assignment("k", child, late=None))
    assert assign(host.ctx, assignment("k", puppet.pid, late=None)).descendants_outside == 0


@pytest.mark.parametrize(("tree", "is_zombie"), [(False, False), (True, False), (False, True)])
def test_the_cost_of_an_assign_does_not_grow_with_the_processes_of_the_host(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch, tree: bool, is_zombie: bool
) -> None:
    """All processes of the host were read, to find those below the one that is assigned."""
    child = int(puppet.do("fork"))
    own = {puppet.pid, child, os.getpid()}
    if is_zombie:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: processes.stat_fields(child)[:1] == [b"Z"])
    opened: list[str] = []

    def noting(path: str, *arguments: Any, **options: Any) -> int:
        opened.append(str(path))
        return open_(path, *arguments, **options)

    open_ = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", noting)
        done = assign(host.ctx, assignment("k", puppet.pid, late=None, include_descendants=tree))
    assert (done.descendants_outside, baseline_of(done.workload)) == (0 if tree else 1, Quality.LATE)
    read = {int(pid) for path in opened if (pid := path.removeprefix("/proc/").partition("/")[0]).isdecimal()}
    assert puppet.pid in read
    assert read <= own


def test_a_descendant_in_another_control_group_is_counted(host: Host, puppet: Puppet, cgroup: str) -> None:
    join(cgroup, int(puppet.do("fork")))
    assert assign(host.ctx, assignment("k", puppet.pid, late=None)).descendants_outside == 1


def test_descendants_are_found_by_a_kernel_that_does_not_list_children(
    host: Host, family: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reaper, child, grandchild = family
    listed = processes.descendants(reaper)
    monkeypatch.setattr(processes, "children", lambda *_: None)
    assert processes.descendants(reaper) == listed == [child, grandchild]
    assert assign(host.ctx, assignment("k", reaper, late=None)).descendants_outside == 2


def test_child_shows_that_a_process_ran_also_if_the_kernel_does_not_list_children(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement of its caller that it had not run was believed, and the use of the child was missing."""
    puppet.do("fork")
    monkeypatch.setattr(processes, "children", lambda *_: None)
    assert baseline_of(assign(host.ctx, assignment("k", puppet.pid, late=False)).workload) is Quality.LATE


def test_a_descendant_whose_parent_ends_during_the_assign_is_counted(
    host: Host, family: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It became a child of a process whose children had been read."""
    reaper, child, grandchild = family
    when_children_were_read(monkeypatch, reaper, lambda: end_child(child, grandchild))
    done = assign(host.ctx, assignment("k", reaper, late=None))
    # A zombie is a process in a group, too.
    assert done.descendants_outside == 1 + os.path.exists(f"/proc/{child}")
    assert host.tree.membership(grandchild) == Membership("", "")


def test_a_child_of_a_thread_that_ends_during_the_assign_is_counted(
    host: Host, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It became a child of a thread whose children had been read."""
    thread = int(puppet.do("thread"))
    puppet.do(f"fork-in {thread}")

    def end_thread() -> None:
        puppet.do(f"end {thread}")
        wait_until(lambda: not os.path.exists(f"/proc/{puppet.pid}/task/{thread}"))

    when_children_were_read(monkeypatch, puppet.pid, end_thread)
    assert assign(host.ctx, assignment("k", puppet.pid, late=None)).descendants_outside == 1


def test_late_false_is_not_accepted_if_the_parent_of_a_descendant_ends_during_the_assign(
    host: Host, family: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child that was found had ended, its own child was outside, and the totals were exact."""
    reaper, child, grandchild = family
    when_children_were_read(monkeypatch, reaper, lambda: end_child(child, grandchild))
    done = assign(host.ctx, assignment("k", reaper, late=False))
    assert host.tree.membership(grandchild) == Membership("", "")
    assert baseline_of(done.workload) is Quality.LATE


def test_descendants_are_found_while_others_start_and_end(forker: int) -> None:
    wait_until(lambda: len(processes.children(forker) or []) > 10)
    number = 0
    for _ in range(50):
        before = {pid: found.start_time for pid in processes.children(forker) or [] if (found := processes.stat(pid))}
        below = processes.descendants(forker)
        for pid, start_time in before.items():
            after = processes.stat(pid)
            if after is not None and after.start_time == start_time and after.parent == forker:
                assert pid in below
                number += 1
    assert number


@pytest.mark.parametrize("tree", [False, True])
def test_late_false_is_not_accepted_for_a_process_with_a_child_outside(
    host: Host, puppet: Puppet, tree: bool
) -> None:
    """The child was not counted, and the totals were exact."""
    puppet.do("fork")
    done = assign(host.ctx, assignment("k", puppet.pid, late=False, include_descendants=tree))
    assert (done.descendants_outside, baseline_of(done.workload)) == (0 if tree else 1, Quality.LATE)
    assert f"pid-{puppet.pid} ran and had used" in reasons(host.manager, "k").pop()


def test_a_process_whose_children_are_in_the_group_is_exact_when_it_is_assigned_again(
    host: Host, puppet: Puppet
) -> None:
    assign(host.ctx, assignment("k", puppet.pid, late=False))
    puppet.do("fork")
    again = assign(host.ctx, assignment("k", puppet.pid, late=False))
    assert (again.descendants_outside, baseline_of(again.workload)) == (0, Quality.EXACT)


def test_process_tree_is_moved_with_children_that_it_forks_meanwhile(host: Host, forker: int) -> None:
    done = assign(host.ctx, assignment("k", forker, late=None, include_descendants=True))
    assert (done.descendants_outside, done.moved.outside, baseline_of(done.workload)) == (0, 0, Quality.LATE)
    for _ in range(3):
        # Between two of its children it has none.
        while not (below := processes.descendants(forker)):
            pass
        for pid in below:
            try:
                assert host.tree.membership(pid) == Membership("", "k")
            except NoSuchProcess:
                continue
    assert not host.get("k").members[0].include_descendants


def test_process_tree_that_waits_for_an_rmid_is_moved_completely(tmp_path: Path, puppet: Puppet) -> None:
    child = int(puppet.do("fork"))
    with own_host(tmp_path, "monitoring-only", 2) as host:
        filler = host.make_foreign("filler")
        waits = assign(host.ctx, assignment("k", puppet.pid, late=None, include_descendants=True))
        assert (waits.moved.outside, waits.workload.members[0].tasks_outside) == (2, 2)
        os.rmdir(host.tree.full_path(filler))
        when_all_stand(host, "k")
        assert host.tree.membership(child) == Membership("", "k")
        member = host.get("k").members[0]
        assert (member.include_descendants, member.tasks_outside) == (False, 0)


def test_descendants_are_included_only_for_a_process(host: Host, cgroup: str) -> None:
    with pytest.raises(InvalidRequest, match="includeDescendants"):
        assign(host.ctx, assignment("k", None, cgroup=cgroup, include_descendants=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("late", [None, False])
def test_an_empty_control_group_is_exact_until_a_task_joins(
    host: Host, cgroup: str, puppet: Puppet, late: bool | None
) -> None:
    join(cgroup, puppet.pid)
    puppet.do("burn 0.05")
    join(os.path.dirname(cgroup), puppet.pid)
    done = assign(host.ctx, assignment("k", None, cgroup=cgroup, late=late))  # type: ignore[arg-type]
    assert (done.workload.members[0].late, baseline_of(done.workload)) == (False, Quality.EXACT)
    join(cgroup, puppet.pid)
    host.manager.maintenance.sweep("k")
    # Nothing was used outside since then.
    assert {total.quality for total in read(host.ctx, "k")[2]} == {Quality.EXACT}
    join(os.path.dirname(cgroup), puppet.pid)
    host.tree.write_task("", puppet.pid)
    join(cgroup, puppet.pid)
    puppet.do("burn 0.05")
    assert {total.quality for total in read(host.ctx, "k")[2]} == {Quality.LATE}


@pytest.mark.parametrize("kind", ["container", "process"])
def test_process_that_has_worked_before_its_assign_is_late(
    host: Host, cgroup: str, puppet: Puppet, kind: str
) -> None:
    """As that of a virtual machine for which the hook is called: its use before was missing, and the total exact."""
    join(cgroup, puppet.pid)
    puppet.do("burn 1.2")
    given = assignment("k", puppet.pid, kind=kind, own_cgroup=cgroup, late=False)
    member = assign(host.ctx, given).workload.members[0]
    assert member.late
    assert member.cpu_time_before_ns >= 1_200_000_000
    assert {total.quality for total in read(host.ctx, "k")[2]} == {Quality.LATE}


def test_earlier_cpu_time_of_a_control_group_is_reported(host: Host, cgroup: str, puppet: Puppet) -> None:
    join(cgroup, puppet.pid)
    puppet.do("burn 0.2")
    done = assign(host.ctx, assignment("k", None, cgroup=cgroup, late=None))  # type: ignore[arg-type]
    member = done.workload.members[0]
    assert member.late
    used = dict(line.split() for line in Path(cgroup, "cpu.stat").read_text().splitlines())
    assert 190_000_000 <= member.cpu_time_before_ns <= int(used["usage_usec"]) * 1000


def test_the_cpu_time_of_a_process_counts_threads_that_have_ended(puppet: Puppet) -> None:
    before = processes.cpu_time_ns(puppet.pid)
    assert before
    thread = int(puppet.do("thread"))
    puppet.do(f"end {thread}")
    assert (processes.cpu_time_ns(puppet.pid) or 0) >= before
    assert processes.cpu_time_ns(2**22) is None
