# SPDX-License-Identifier: Apache-2.0
"""No descriptor is left: files that cannot be read are reported as unread, and never treated as missing."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator

import pytest

from resctrlmond.resctrl import cgroups, mounts, processes
from resctrlmond.resctrl.errors import NotRead, ResctrlError
from resctrlmond.resctrl.membership import Membership
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import put_back
from resctrlmond.workloads.model.workload import State, Workload
from resctrlmond.workloads.records.store import Store
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]
CTR = "4d" * 32


@contextlib.contextmanager
def left(number: int) -> Iterator[None]:
    """Only so many descriptors can still be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = []
    try:
        # All numbers below the limit are in use, also those that were closed before.
        top = max(map(int, os.listdir("/proc/self/fd"))) + 1
        while (fd := os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)) < top:
            free.append(fd)
        free.append(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1 + number, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in free:
            os.close(fd)


ME = os.getpid()


@pytest.mark.parametrize(
    "reads",
    [
        lambda _: processes.stat(ME),
        lambda _: processes.threads(ME),
        lambda _: processes.children(ME, [ME]),
        lambda _: processes.descendants(ME),
        lambda _: processes.leader(ME),
        lambda _: processes.pid_namespaces(ME),
        lambda _: Process.open(ME),
        lambda _: mounts.mounts(),
        lambda _: mounts.boot_id(),
        lambda _: cgroups.cgroup_of(ME),
        lambda _: cgroups.check("/sys/fs/cgroup"),
        lambda _: cgroups.tasks("/sys/fs/cgroup"),
        lambda _: cgroups.is_populated("/sys/fs/cgroup"),
        lambda host: host.tree.check_mounted(),
        lambda host: list(Store(f"{host.run}/records").read_all()),
        lambda host: host.ctx.snapshots.load_begin(CTR),
        lambda host: host.ctx.snapshots.last_read(CTR),
        lambda host: host.ctx.snapshots.completed_at(CTR),
    ],
)
def test_file_that_cannot_be_opened_is_reported_with_path_and_remedy(
    host: Host, process: Start, reads: Callable[[Host], object]
) -> None:
    assign(host.ctx, assignment(CTR, process().pid))
    with left(0), pytest.raises(NotRead) as caught:
        reads(host)
    assert caught.value.path.startswith("/")
    assert "EMFILE" in str(caught.value)
    assert "LimitNOFILE=" in caught.value.remedy


@pytest.mark.parametrize(
    "verb",
    [
        lambda host, pid: create(host.ctx, "web", owner="other"),
        lambda host, pid: assign(host.ctx, assignment(CTR, pid)),
        lambda host, pid: read(host.ctx, "standing"),
        lambda host, pid: move(host.ctx, "standing", "gold"),
        lambda host, pid: release(host.ctx, "standing", owner="test"),
    ],
    ids=["create", "assign", "read", "move", "release"],
)
def test_a_verb_with_so_many_descriptors_left_fails_with_a_type_or_not_at_all(
    host: Host, process: Start, verb: Callable[[Host, int], object]
) -> None:
    host.make_class("gold")
    child = process()
    assign(host.ctx, assignment("standing", process().pid))
    for number in range(8):
        with left(number):
            try:
                verb(host, child.pid)
            except ResctrlError as error:
                assert "EMFILE" in str(error), number
            else:
                break
        host.manager.maintenance.tick()
        host.check()
    else:
        pytest.fail("it never came to its end")
    assert number >= 1
    host.manager.maintenance.tick()
    host.check()


def test_undo_without_descriptors_does_not_hide_the_first_error(host: Host, process: Start) -> None:
    child = process()
    start = processes.stat(child.pid)
    assert start is not None
    with left(0):
        put_back(host.tree, {child.pid: (start.start_time, Membership("gold", ""))}, [])


def test_tick_without_descriptors_drops_no_workload(host: Host, process: Start) -> None:
    """Files that it could not open counted as missing: resctrl as unmounted, and a group as lost."""
    assign(host.ctx, assignment(CTR, process().pid))
    for number in range(8):
        # The caller of the tick reports an error that concerns all workloads.
        with left(number), contextlib.suppress(ResctrlError):
            host.manager.maintenance.tick()
        assert host.get(CTR).state is State.ACTIVE, number
        host.check()


def test_start_without_descriptors_does_not_reject_records(host: Host, process: Start) -> None:
    """Its group, empty just then, was removed as one of no record, and its claims with it."""
    create(host.ctx, "web", owner="other")
    for number in range(8):
        with left(number), contextlib.suppress(ResctrlError):
            host.restart()
        assert host.folder("records") == ["web.json"], number
        assert host.tree.find(host.marked_groups()[0].ref), number
    host.restart()
    record = host.get("web")
    assert isinstance(record, Workload)
    assert record.is_claimed_by("other")
    host.check()
