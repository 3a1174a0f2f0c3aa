# SPDX-License-Identifier: Apache-2.0
"""The watch for ends of pods, without the tick that would detect the same ends a second later."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from resctrlmond.daemon.watch import Watch
from resctrlmond.resctrl.processes import stat
from resctrlmond.workloads.model.workload import Member, State, Workload
from tests.daemon.conftest import cgroup_root
from tests.workloads.builders import workload

KEY = "0f8fad5b-d9cb-469f-a165-70867728950e"


@dataclass
class ReportedKeys:
    """The keys that the watch has reported."""

    keys: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def next(self) -> str:
        """Wait for the next key."""
        async with asyncio.timeout(60):
            return await self.keys.get()

    async def next_recorded(self, watch: Watch) -> str:
        """Wait for the next key, and record its ends."""
        key = await self.next()
        watch.ends_recorded(key)
        return key

    async def expect_none(self) -> None:
        """Fail if a key is reported within 0.2 s."""
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert self.keys.empty()


@pytest.fixture
def pods() -> Iterator[Path]:
    """Create a control group for pods, as the kubelet does."""
    parent = cgroup_root() / f"resctrlmond-watch-{os.getpid()}"
    parent.mkdir()
    yield parent
    for directory, _, _ in os.walk(parent, topdown=False):
        os.rmdir(directory)


def pod(cgroup: Path, key: str = KEY, state: State = State.IDLE) -> Workload:
    """Return a pod with the given control group."""
    return workload(key, state, pod_cgroup=str(cgroup))


def test_pod_ends_with_its_control_group(pods: Path) -> None:
    """No runtime reports the end of a pod to hooks: CRI-O calls them only for containers."""

    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        watched, other = pods / "pod-watched", pods / "pod-other"
        watched.mkdir()
        other.mkdir()
        watch.update(KEY, pod(watched))
        watch.update(KEY, pod(watched, state=State.ACTIVE))
        other.rmdir()
        await reported.expect_none()
        watched.rmdir()
        assert await reported.next() == KEY
        watch.update(KEY, pod(watched, state=State.COMPLETED))
        watched.mkdir()
        watched.rmdir()
        await reported.expect_none()
        watch.close()

    asyncio.run(run())


def test_pod_that_ended_before_it_was_watched_is_reported(pods: Path) -> None:
    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        watch.update(KEY, pod(pods / "pod-gone"))
        assert await reported.next() == KEY
        watch.update("with-its-parent", pod(pods / "gone" / "pod-gone", "with-its-parent"))
        assert await reported.next() == "with-its-parent"
        watch.close()

    asyncio.run(run())


def test_pod_that_moved_ends_with_its_new_control_group(pods: Path) -> None:
    """A static pod that is created again has the same UID and can have another control group."""

    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        old, new = pods / "pod-old", pods / "pod-new"
        old.mkdir()
        new.mkdir()
        watch.update(KEY, pod(old))
        watch.update(KEY, pod(new))
        old.rmdir()
        await reported.expect_none()
        new.rmdir()
        assert await reported.next() == KEY
        watch.close()

    asyncio.run(run())


def test_end_of_a_pod_is_reported_after_its_parent_was_created_again(pods: Path) -> None:
    """A kubelet recreates the parent if its cgroup driver is changed and changed back.

    Not every kernel reports the removal of a watched control group: Linux 6.18 does so only for other filesystems.
    """

    gc.collect()  # closes those of earlier tests
    before = inotify_watches()

    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        parent = pods / "besteffort"
        old, new = parent / "pod-old", parent / "pod-new"
        old.mkdir(parents=True)
        watch.update(KEY, pod(old))
        old.rmdir()
        assert await reported.next_recorded(watch) == KEY
        parent.rmdir()
        # A static pod keeps its UID, and its old claims; a second pod is created with it.
        old.mkdir(parents=True)
        new.mkdir()
        watch.update(KEY, pod(old, state=State.ACTIVE))
        watch.update("new", pod(new, "new"))
        assert await reported.next_recorded(watch) == KEY, "the control group did not exist for some time"
        await reported.expect_none()
        new.rmdir()
        assert await reported.next_recorded(watch) == "new"
        old.rmdir()
        assert await reported.next_recorded(watch) == KEY
        watch.update(KEY, None)
        watch.update("new", None)
        assert inotify_watches() == before
        watch.close()

    asyncio.run(run())


def inotify_watches() -> int:
    """Return the number of inotify watches of this process."""
    return sum(file.read_text().count("inotify wd") for file in Path("/proc/self/fdinfo").iterdir() if file.exists())


def test_end_of_a_pod_is_reported_if_its_parent_was_created_later(pods: Path) -> None:
    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        watched = pods / "besteffort" / "pod-watched"
        watch.update(KEY, pod(watched))
        assert await reported.next_recorded(watch) == KEY
        watched.mkdir(parents=True)
        watch.update(KEY, pod(watched, state=State.ACTIVE))
        watched.rmdir()
        assert await reported.next_recorded(watch) == KEY
        watch.close()

    asyncio.run(run())


def test_both_workloads_of_one_control_group_are_reported(pods: Path) -> None:
    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        shared = pods / "pod-shared"
        shared.mkdir()
        for key in ("a", "b", "c"):
            watch.update(key, pod(shared, key))
        watch.update("c", None)
        shared.rmdir()
        assert {await reported.next(), await reported.next()} == {"a", "b"}
        await reported.expect_none()
        watch.close()

    asyncio.run(run())


@dataclass
class ReportedMembers:
    """The members that the watch has reported as watched, by key."""

    members: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, key: str, members: Iterable[Member]) -> None:
        self.members[key] = [member.id for member in members]


def start_of(child: subprocess.Popen[bytes]) -> int:
    found = stat(child.pid)
    assert found is not None
    return found.start_time


def test_member_is_reported_as_watched_until_it_may_have_ended(pods: Path) -> None:
    """The tick looks for the end of a member that is not watched: recording it may fail, and no event follows."""

    async def run() -> None:
        reported, watched = ReportedKeys(), ReportedMembers()
        watch = Watch(reported.keys.put_nowait, watched)
        with subprocess.Popen(["sleep", "600"]) as child:
            process = Member("process", "process", "a", child.pid, start_of(child))
            gone = Member("gone", "process", "a", child.pid, start_of(child) + 1)
            named = Member("named", "sandbox", "a")
            watch.update(KEY, workload(KEY, members=(process, gone, named)))
            assert await reported.next() == KEY, "one of its members has ended before"
            assert watched.members == {KEY: []}
            watch.ends_recorded(KEY)
            assert watched.members == {KEY: ["process"]}
            child.kill()
        assert await reported.next() == KEY
        assert watched.members == {KEY: []}
        watch.ends_recorded(KEY)
        assert watched.members == {KEY: []}
        watch.close()

    asyncio.run(run())


def test_each_member_of_one_process_has_its_own_descriptor(pods: Path) -> None:
    """They shared one: the end of the first closed it, and that of the second closed a file of another part.

    The containers of Kata Containers all have the process of the virtual machine.
    """

    async def run() -> None:
        watch = Watch(lambda _key: None)
        with sleeping() as child:
            first, second = (Member(name, "container", "a", child.pid, start_of(child)) for name in ("a", "b"))
            watch.update(KEY, workload(KEY, members=(first, second)))
            assert len(pidfds_of(child.pid)) == 2
            watch.update(KEY, workload(KEY, members=(second,)))
            assert len(pidfds_of(child.pid)) == 1
            # It gets the number of the descriptor that was closed.
            with Path("/dev/null").open() as other:
                watch.update(KEY, None)
                os.fstat(other.fileno())
            watch.close()

    asyncio.run(run())


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that sleeps, and kill it at the end of the block."""
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            yield child
        finally:
            child.kill()


def pidfds_of(pid: int) -> list[int]:
    """Return the descriptors of this process that refer to a process which nobody has waited for."""
    files = [file for file in Path("/proc/self/fdinfo").iterdir() if file.exists()]
    return [int(file.name) for file in files if f"Pid:\t{pid}\n" in file.read_text()]


def test_end_that_is_detected_twice_is_reported_once(pods: Path) -> None:
    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        cgroup = pods / "container"
        cgroup.mkdir()
        with subprocess.Popen(["sleep", "600"]) as child:
            (cgroup / "cgroup.procs").write_text(str(child.pid))
            member = Member("container", "container", "a", child.pid, start_of(child), cgroup=str(cgroup))
            watch.update(KEY, workload(KEY, members=(member,)))
            child.kill()
        assert await reported.next() == KEY
        await reported.expect_none()
        watch.update(KEY, workload(KEY, State.COMPLETED))
        watch.ends_recorded(KEY)
        await reported.expect_none()
        watch.close()

    asyncio.run(run())


def test_control_group_is_watched_again_when_the_end_is_recorded(pods: Path) -> None:
    async def run() -> None:
        reported, watched = ReportedKeys(), ReportedMembers()
        watch = Watch(reported.keys.put_nowait, watched)
        cgroup = pods / "service"
        cgroup.mkdir()
        with subprocess.Popen(["sleep", "600"]) as child:
            (cgroup / "cgroup.procs").write_text(str(child.pid))
            member = Member("service", "cgroup", "a", cgroup=str(cgroup), joining=True)
            for now in (member, msgspec.structs.replace(member, joining=False)):
                watch.update(KEY, workload(KEY, members=(now,)))
                assert watched.members == {KEY: ["service"]}
            await reported.expect_none()
            (cgroup / "cgroup.freeze").write_text("1")
            assert await reported.next() == KEY
            (cgroup / "cgroup.freeze").write_text("0")
            await reported.expect_none()
            watch.ends_recorded(KEY)
            assert await reported.next() == KEY, "the end of this change may not have been recorded"
            watch.ends_recorded(KEY, has_failed=True)
            assert watched.members == {KEY: []}, "the tick has to record the end"
            (cgroup / "cgroup.freeze").write_text("1")
            assert await reported.next_recorded(watch) == KEY
            assert watched.members == {KEY: ["service"]}
            with (cgroup / "cgroup.events").open() as events:
                events.read()
                child.kill()
                change = select.poll()
                change.register(events, select.POLLPRI)
                assert change.poll(60_000)
        # Removed before the watch reads the change.
        cgroup.rmdir()
        assert await reported.next() == KEY
        watch.ends_recorded(KEY)
        assert watched.members == {KEY: []}, "a new control group at this path would raise no event"
        watch.close()

    asyncio.run(run())


def test_control_group_without_tasks_is_reported_at_once(pods: Path) -> None:
    async def run() -> None:
        reported = ReportedKeys()
        watch = Watch(reported.keys.put_nowait)
        (pods / "service").mkdir()
        member = Member("service", "cgroup", "a", cgroup=str(pods / "service"))
        watch.update(KEY, workload(KEY, members=(member,)))
        assert await reported.next_recorded(watch) == KEY
        # Assigned again: it may be another control group of the same path.
        watch.update(KEY, workload(KEY, members=(msgspec.structs.replace(member, started_at="later"),)))
        assert await reported.next_recorded(watch) == KEY
        watch.close()

    asyncio.run(run())


def test_nothing_is_watched_after_the_end_of_the_watch(pods: Path) -> None:
    async def run() -> None:
        watched = ReportedMembers()
        watch = Watch(lambda _key: None, watched)
        with subprocess.Popen(["sleep", "600"]) as child:
            watch.update(KEY, workload(KEY, members=(Member("m", "process", "a", child.pid, start_of(child)),)))
            assert watched.members == {KEY: ["m"]}
            watch.close()
            child.kill()
        assert watched.members == {KEY: []}

    asyncio.run(run())


WITHOUT_INOTIFY = """
import asyncio, logging
from resctrlmond.workloads.model.workload import Group, GroupState, Workload
from resctrlmond.daemon.watch import Watch

async def run():
    watch = Watch(print)
    group = Group(name="k", state=GroupState.CREATED)
    watch.update("k", Workload(key="k", groups=(group,), pod_cgroup="/pods/gone"))
    await asyncio.sleep(0)
    watch.update("k", None)
    watch.close()

logging.basicConfig(format="%(levelname)s %(message)s")
asyncio.run(run())
"""


def test_watch_without_inotify_logs_a_warning() -> None:
    """On this host, root has used all inotify instances (fs.inotify.max_user_instances)."""
    command = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    command += ['echo 0 >/proc/sys/user/max_inotify_instances && exec "$@"', "sh"]
    done = subprocess.run(
        [*command, sys.executable, "-c", WITHOUT_INOTIFY], capture_output=True, text=True, check=False
    )
    warning = (
        "WARNING cannot watch pods by inotify, so their ends are detected up to a second late: Too many open files. "
        "Raise fs.inotify.max_user_instances or LimitNOFILE=\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", warning)
