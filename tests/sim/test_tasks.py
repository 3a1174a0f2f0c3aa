# SPDX-License-Identifier: Apache-2.0
"""The tasks file and the inheritance of groups, on virtual tasks."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resctrlmond.sim.kernel.commands import parse_int, task_tokens
from resctrlmond.sim.kernel.cpusets import cpu_list, cpu_mask
from resctrlmond.sim.kernel.tree import Caller
from tests.sim.virtual import ROOT, VirtualResctrl


@pytest.fixture(params=["polling", "reports"])
def resctrl(request: pytest.FixtureRequest) -> VirtualResctrl:
    """Return a model that polls for forks, and one whose kernel reports them: most tests must pass with both."""
    made = VirtualResctrl("intel-rdt", reports_forks=request.param == "reports")
    made.mkdir("mon_groups/a")
    made.mkdir("mon_groups/b")
    return made


def refusal(resctrl: VirtualResctrl, path: str, text: str, caller: Caller = ROOT) -> tuple[str, str]:
    with pytest.raises(OSError) as caught:
        resctrl.write(path, text, caller)
    return errno.errorcode[caught.value.errno or 0], resctrl.status


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10", 10),
        ("+10", 10),
        ("-5", -5),
        ("0x1F", 31),
        ("017", 15),
        ("0", 0),
        ("08", None),
        ("0x", None),
        ("", None),
        ("1 2", None),
        ("1_0", None),
        ("٣", None),
        ("2147483647", 2147483647),
        ("2147483648", None),
        ("-2147483648", -2147483648),
    ],
)
def test_numbers_are_read_in_base_zero(text: str, expected: int | None) -> None:
    assert parse_int(text) == expected


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("\n", []),
        ("\0 1", []),
        ("1\n", ["1"]),
        (" 1 ,\t2\n", ["1", "2"]),
        ("1,2,", ["1", "2"]),
        ("1,,2", ["1", "", "2"]),
        ("1\n2\n", ["1\n2"]),
        ("1,\n2", ["1"]),
        ("1\x002", ["1"]),
    ],
)
def test_task_lists_are_split_at_commas(text: str, tokens: list[str]) -> None:
    assert list(task_tokens(text)) == tokens


def test_empty_write_only_clears_the_status(resctrl: VirtualResctrl) -> None:
    refusal(resctrl, "tasks", "abc")
    resctrl.write("mon_groups/a/tasks", "")
    assert resctrl.status == "ok\n"


def test_writing_to_a_control_group_takes_a_task_out_of_its_monitoring_group(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("c1")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    assert resctrl.model.task_groups(tid) == "res:/\nmon:a\n"
    resctrl.write("c1/tasks", str(tid))
    assert resctrl.model.task_groups(tid) == "res:c1\nmon:\n"
    resctrl.write("tasks", str(tid))
    assert resctrl.model.task_groups(tid) == "res:/\nmon:\n"


def test_later_children_and_threads_follow_and_earlier_ones_do_not(resctrl: VirtualResctrl) -> None:
    parent = resctrl.tasks.fork()
    earlier = resctrl.tasks.fork(parent)
    resctrl.write("mon_groups/a/tasks", str(parent))
    later = {resctrl.tasks.fork(parent), resctrl.tasks.fork(parent, thread=True)}
    grandchild = resctrl.tasks.fork(max(later), thread=False)
    assert resctrl.tids("mon_groups/a") == {parent, *later, grandchild}
    assert earlier not in resctrl.tids("mon_groups/a")


def test_a_child_of_a_process_with_threads_in_two_groups_follows_the_thread_that_forked_it(
    resctrl: VirtualResctrl,
) -> None:
    leader = resctrl.tasks.fork()
    worker = resctrl.tasks.fork(leader, thread=True)
    resctrl.write("mon_groups/a/tasks", str(leader))
    resctrl.write("mon_groups/b/tasks", str(worker))
    of_leader, of_worker = resctrl.tasks.fork(leader), resctrl.tasks.fork(worker)
    assert resctrl.tids("mon_groups/a") == {leader, of_leader}
    assert resctrl.tids("mon_groups/b") == {worker, of_worker}


def test_reported_forks_find_children_of_an_unseen_parent() -> None:
    resctrl = VirtualResctrl("intel-rdt", reports_forks=True)
    resctrl.mkdir("mon_groups/a")
    shell = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(shell))
    middle = resctrl.tasks.fork(shell)
    orphan = resctrl.tasks.fork(middle)
    resctrl.tasks.exit(middle)
    assert resctrl.tids("mon_groups/a") == {shell, orphan}


def test_reported_forks_find_the_last_children_of_an_ended_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resctrl = VirtualResctrl("intel-rdt", reports_forks=True)
    resctrl.mkdir("mon_groups/a")
    shell = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(shell))
    orphan = resctrl.tasks.fork(shell)
    resctrl.tasks.exit(shell)
    # Forked and ended between the report of forks and the sample.
    later = iter([[], resctrl.tasks.forks()])
    monkeypatch.setattr(resctrl.tasks, "forks", lambda: next(later, []))
    assert resctrl.tids("mon_groups/a") == {orphan}


def test_a_child_of_a_reused_number_does_not_follow_the_task_that_had_it_before() -> None:
    resctrl = VirtualResctrl("intel-rdt", reports_forks=True)
    resctrl.mkdir("mon_groups/a")
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.tasks.exit(tid)
    assert resctrl.tids("mon_groups/a") == set()
    resctrl.tasks.fork(tid=tid)
    child = resctrl.tasks.fork(tid)
    assert resctrl.model.task_groups(child) == "res:/\nmon:\n"


def test_an_orphan_of_a_removed_group_is_in_the_group_above() -> None:
    resctrl = VirtualResctrl("intel-rdt", reports_forks=True)
    resctrl.mkdir("mon_groups/a")
    shell = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(shell))
    orphan = resctrl.tasks.fork(shell)
    forks, resctrl.tasks.unread_forks = resctrl.tasks.unread_forks, []
    resctrl.tasks.exit(shell)
    resctrl.rmdir("mon_groups/a")
    resctrl.tasks.unread_forks = forks
    assert resctrl.model.task_groups(orphan) == "res:/\nmon:\n"


def test_a_reused_number_is_another_task(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.tasks.exit(tid)
    resctrl.tasks.fork(1, tid=tid)
    assert resctrl.model.task_groups(tid) == "res:/\nmon:\n"
    assert resctrl.tids("mon_groups/a") == set()


def test_a_reused_number_can_be_put_into_the_group_that_it_had_before(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.tasks.exit(tid)
    resctrl.tasks.fork(1, tid=tid)
    resctrl.write("mon_groups/a/tasks", str(tid))
    assert resctrl.tids("mon_groups/a") == {tid}


def test_ended_task_has_no_group(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.tasks.exit(tid)
    assert resctrl.model.task_groups(tid) is None
    assert resctrl.read("mon_groups/a/tasks") == ""


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("0123456789,x- \n\0abcdef+"), max_size=40) | st.text(max_size=40))
def test_any_text_is_a_list_or_an_error_with_a_message(text: str) -> None:
    resctrl = VirtualResctrl("intel-rdt")
    resctrl.mkdir("mon_groups/a")
    try:
        resctrl.write("mon_groups/a/tasks", text)
    except OSError as failure:
        assert failure.errno in (errno.EINVAL, errno.ESRCH)
        assert resctrl.status != "ok\n"
    else:
        assert resctrl.status == "ok\n"


@pytest.mark.parametrize(
    ("cpus", "total", "mask", "listed"),
    [
        ([], 2, "0\n", "\n"),
        ([0, 1], 2, "3\n", "0-1\n"),
        ([0, 2, 3], 8, "0d\n", "0,2-3\n"),
        (range(40), 40, "ff,ffffffff\n", "0-39\n"),
        ([33], 64, "00000002,00000000\n", "33\n"),
    ],
)
def test_cpu_masks_and_lists(cpus: list[int], total: int, mask: str, listed: str) -> None:
    assert cpu_mask(cpus, total) == mask
    assert cpu_list(cpus) == listed


class AnyOrder(RuleBasedStateMachine):
    """The invariants hold after any sequence of operations."""

    reports_forks = False

    def __init__(self) -> None:
        super().__init__()
        self.resctrl = VirtualResctrl("intel-rdt", rmids=5, reports_forks=self.reports_forks)
        self.traffic: dict[int, int] = {}

    def groups(self) -> list[str]:
        classes = ["", *(f"c{n}/" for n in range(3) if f"c{n}" in self.resctrl.model.root.children)]
        return [
            f"{c}mon_groups/{name}" for c in classes for name in self.resctrl.directory(f"{c}mon_groups").children
        ]

    def attempt(self, what: str, *arguments: str) -> None:
        try:
            getattr(self.resctrl, what)(*arguments)
        except OSError as failure:
            assert failure.errno in (
                errno.EBUSY,
                errno.EEXIST,
                errno.EINVAL,
                errno.ENOENT,
                errno.ENOSPC,
                errno.EPERM,
            )

    places = st.sampled_from(["c0", "c1", "c2", "mon_groups/a", "mon_groups/b", "c0/mon_groups/a", "c1/mon_groups/b"])

    @rule(path=places)
    def mkdir(self, path: str) -> None:
        self.attempt("mkdir", path)

    @rule(path=places)
    def rmdir(self, path: str) -> None:
        self.attempt("rmdir", path)

    @rule(old=places, new=places)
    def rename(self, old: str, new: str) -> None:
        if old != new and not new.startswith(old + "/"):  # the VFS deals with these itself
            self.attempt("rename", old, new)

    @rule(path=places, data=st.data())
    def join(self, path: str, data: st.DataObject) -> None:
        tid = data.draw(st.sampled_from(sorted(self.resctrl.tasks.tasks)))
        self.attempt("write", path + "/tasks", str(tid))

    @rule(data=st.data(), thread=st.booleans())
    def fork(self, data: st.DataObject, thread: bool) -> None:
        self.resctrl.tasks.fork(data.draw(st.sampled_from(sorted(self.resctrl.tasks.tasks))), thread=thread)

    @precondition(lambda self: len(self.resctrl.tasks.tasks) > 1)
    @rule(data=st.data())
    def burn_and_exit(self, data: st.DataObject) -> None:
        tid = data.draw(st.sampled_from(sorted(self.resctrl.tasks.tasks)[1:]))
        self.resctrl.run(tid, 0.5)
        self.resctrl.poll()
        if not any(task.tgid == tid != task.tid for task in self.resctrl.tasks.tasks.values()):
            self.resctrl.tasks.exit(tid)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.resctrl.now += seconds

    @invariant()
    def used_limbo_and_free_are_all_rmids(self) -> None:
        used, limbo, free = self.resctrl.model.rmids.counts(self.resctrl.now)
        classes = [name for name in self.resctrl.model.root.children if name in ("c0", "c1", "c2")]
        assert used == 1 + len(self.groups()) + len(classes)
        assert used + limbo + free == 5

    @invariant()
    def every_task_is_in_one_class_and_at_most_one_group(self) -> None:
        classes = ["", *(f"{n}" for n in ("c0", "c1", "c2") if n in self.resctrl.model.root.children)]
        listed = [tid for name in classes for tid in self.resctrl.tids(name)]
        assert sorted(listed) == sorted(self.resctrl.tasks.tasks)
        grouped = [tid for group in self.groups() for tid in self.resctrl.tids(group)]
        assert len(grouped) == len(set(grouped))

    @invariant()
    def traffic_of_a_group_never_falls(self) -> None:
        now = {}
        for path in self.groups():
            counter = self.resctrl.file(path + "/mon_data/mon_L3_00/mbm_total_bytes")
            now[counter.inode] = int(counter.show())
            assert now[counter.inode] >= self.traffic.get(counter.inode, 0)
        self.traffic = now


class AnyOrderTold(AnyOrder):
    """The invariants hold after any sequence of operations if the kernel reports forks."""

    reports_forks = True


TestAnyOrder = AnyOrder.TestCase
TestAnyOrderTold = AnyOrderTold.TestCase
TestAnyOrder.settings = TestAnyOrderTold.settings = settings(deadline=None, max_examples=50, stateful_step_count=40)


def test_forks_and_exits_are_read_while_no_task_is_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue of the kernel, while the simulation is idle, would make it inexact."""
    resctrl = VirtualResctrl(reports_forks=True)
    read: list[str] = []

    def record(name: str) -> list[Any]:
        read.append(name)
        return []

    for name in ("forks", "exits"):
        monkeypatch.setattr(resctrl.tasks, name, partial(record, name))
    resctrl.poll()
    assert sorted(read) == ["exits", "forks"]
