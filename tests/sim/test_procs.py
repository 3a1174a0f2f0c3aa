# SPDX-License-Identifier: Apache-2.0
"""The host's tasks as the model sees them, with and without the kernel's reports of forks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.sim.host.forks import ForkEvents
from resctrlmond.sim.host.procs import ProcTable
from resctrlmond.sim.kernel.model import Resctrl
from resctrlmond.sim.kernel.tree import Caller, Directory, File, lookup
from resctrlmond.sim.profiles import profile_named
from tests.sim.conftest import Puppet

ROOT = Caller(0, 0, 1)


@pytest.fixture(params=["polling", "reports if the kernel has them"])
def table(request: pytest.FixtureRequest) -> Iterator[ProcTable]:
    events = None if request.param == "polling" else ForkEvents.open()
    yield ProcTable(events)
    if events:
        events.close()


class Group:
    """Return a model of the host's tasks with the group ``a``."""

    def __init__(self, table: ProcTable) -> None:
        self.model = Resctrl(profile_named("intel-rdt"), table)
        above = lookup(self.model.root, "mon_groups", ROOT)
        assert isinstance(above, Directory)
        self.model.mkdir(above, "a", 0o755, ROOT)
        tasks = lookup(self.model.root, "mon_groups/a/tasks", ROOT)
        assert isinstance(tasks, File)
        self.tasks = tasks

    def join(self, tid: int) -> None:
        assert self.tasks.store
        self.tasks.store(ROOT, str(tid))

    @property
    def tids(self) -> set[int]:
        return {int(line) for line in self.tasks.show().split()}


def test_inheritance_of_real_tasks(table: ProcTable, puppet: Puppet) -> None:
    group = Group(table)
    thread = int(puppet.do("thread"))
    earlier = int(puppet.do("fork"))
    group.join(puppet.pid)
    later = {int(puppet.do("fork")), int(puppet.do("thread"))}
    assert group.tids == {puppet.pid} | later
    outside = int(puppet.do(f"fork-in {thread}"))
    is_reported = table.forks() is not None or Path(f"/proc/{puppet.pid}/task/{thread}/children").exists()
    assert not is_reported or outside not in group.tids
    assert earlier not in group.tids


def test_stat_is_the_threads_own_and_not_the_processs(table: ProcTable) -> None:
    burning = threading.Event()

    def burn() -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        burning.set()
        done.wait()

    done = threading.Event()
    thread = threading.Thread(target=burn)
    thread.start()
    burning.wait()
    before = table.stat(os.getpid())
    other = table.stat(thread.native_id or 0)
    done.set()
    thread.join()
    assert before
    assert other
    assert 150_000_000 <= other.cpu_ns <= 400_000_000
    assert other.start >= before.start
    assert table.threads()[os.getpid()] == os.getpid()


def test_ended_task_has_neither_stat_nor_credentials(table: ProcTable) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert table.stat(pid) is None
    assert table.credentials(pid) is None
    assert table.groups(pid) == frozenset()
    assert pid not in table.threads()


def test_a_name_full_of_parentheses_does_not_shift_the_fields(table: ProcTable) -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    comm.write_text(") R 1 (x) 2")
    try:
        stat = table.stat(os.getpid())
    finally:
        comm.write_text(before)
    assert stat
    assert stat.ppid == os.getppid()


def test_every_fork_is_reported_once_and_in_order() -> None:
    events = ForkEvents.open()
    if events is None:
        # Not the host's namespaces, or no CAP_NET_ADMIN: then the kernel reports nothing.
        assert ProcTable(None).forks() is None
        return
    with_events = ProcTable(events)
    with_events.forks()
    children = []
    for _ in range(20):
        children.append(pid := os.fork())
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    reported = [fork for fork in with_events.forks() or [] if fork.parent == os.getpid()]
    assert [fork.child for fork in reported] == children
    assert all(fork.tgid == fork.child for fork in reported)
    assert not [fork for fork in with_events.forks() or [] if fork.parent == os.getpid()]
    events.close()
