# SPDX-License-Identifier: Apache-2.0
"""The watch by itself, with no tick beside it that would find the same a second later."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from resctrlmond.daemon.watch import Watch
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.workloads.model import State, Workload
from tests.workloads.builders import workload

KEY = "0f8fad5b-d9cb-469f-a165-70867728950e"


@dataclass
class Heard:
    """The keys that were told, each waited for."""

    keys: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def next(self) -> str:
        async with asyncio.timeout(60):
            return await self.keys.get()

    async def nothing(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert self.keys.empty()


@pytest.fixture
def pods() -> Iterator[Path]:
    """A place in the host's control groups, as the kubelet's, for pods."""
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    place = Path(top, f"resctrlmond-watch-{os.getpid()}")
    place.mkdir()
    yield place
    for directory, _, _ in os.walk(place, topdown=False):
        os.rmdir(directory)


def pod(cgroup: Path, key: str = KEY, state: State = State.IDLE) -> Workload:
    return workload(key, state, pod_cgroup=str(cgroup))


def test_a_pod_ends_with_its_control_group(pods: Path) -> None:
    """The end that no runtime tells: CRI-O's hooks hear of containers alone."""

    async def scene() -> None:
        heard = Heard()
        watch = Watch(heard.keys.put_nowait)
        ours, other = pods / "pod-ours", pods / "pod-other"
        ours.mkdir()
        other.mkdir()
        watch.update(KEY, pod(ours))
        watch.update(KEY, pod(ours, state=State.ACTIVE))
        other.rmdir()
        await heard.nothing()
        ours.rmdir()
        assert await heard.next() == KEY
        watch.update(KEY, pod(ours, state=State.COMPLETED))
        ours.mkdir()
        ours.rmdir()
        await heard.nothing()
        watch.close()

    asyncio.run(scene())


def test_a_pod_that_went_before_it_was_watched(pods: Path) -> None:
    async def scene() -> None:
        heard = Heard()
        watch = Watch(heard.keys.put_nowait)
        watch.update(KEY, pod(pods / "pod-gone"))
        assert await heard.next() == KEY
        watch.update("with-its-parent", pod(pods / "gone" / "pod-gone", "with-its-parent"))
        assert await heard.next() == "with-its-parent"
        watch.close()

    asyncio.run(scene())


def test_a_pod_that_moves_to_another_control_group(pods: Path) -> None:
    """Its UID is a static pod's, made anew elsewhere: the new one counts, the old one is nobody's."""

    async def scene() -> None:
        heard = Heard()
        watch = Watch(heard.keys.put_nowait)
        old, new = pods / "pod-old", pods / "pod-new"
        old.mkdir()
        new.mkdir()
        watch.update(KEY, pod(old))
        watch.update(KEY, pod(new))
        old.rmdir()
        await heard.nothing()
        new.rmdir()
        assert await heard.next() == KEY
        watch.close()

    asyncio.run(scene())


def test_a_pod_whose_parent_was_made_anew(pods: Path) -> None:
    """As by a kubelet that was told another driver and back. Of a control group that is gone with the watch on it not
    every kernel tells: Linux 6.18 does not, where any other filesystem does.
    """

    async def scene() -> None:
        heard = Heard()
        watch = Watch(heard.keys.put_nowait)
        parent = pods / "besteffort"
        old, new = parent / "pod-old", parent / "pod-new"
        old.mkdir(parents=True)
        watch.update(KEY, pod(old))
        old.rmdir()
        assert await heard.next() == KEY
        parent.rmdir()
        # Somebody claims it still, and it comes again under its UID, as static pods do; and with it another one.
        old.mkdir(parents=True)
        new.mkdir()
        watch.update(KEY, pod(old, state=State.ACTIVE))
        watch.update("new", pod(new, "new"))
        assert await heard.next() == KEY, "it was gone for a time"
        await heard.nothing()
        new.rmdir()
        assert await heard.next() == "new"
        old.rmdir()
        assert await heard.next() == KEY
        watch.update(KEY, None)
        watch.update("new", None)
        assert not inotify_watches()
        watch.close()

    asyncio.run(scene())


def inotify_watches() -> int:
    return sum(file.read_text().count("inotify wd") for file in Path("/proc/self/fdinfo").iterdir() if file.exists())


def test_a_pod_whose_parent_was_not_there_at_first(pods: Path) -> None:
    async def scene() -> None:
        heard = Heard()
        watch = Watch(heard.keys.put_nowait)
        ours = pods / "besteffort" / "pod-ours"
        watch.update(KEY, pod(ours))
        assert await heard.next() == KEY
        ours.mkdir(parents=True)
        watch.update(KEY, pod(ours, state=State.ACTIVE))
        ours.rmdir()
        assert await heard.next() == KEY
        watch.close()

    asyncio.run(scene())


def test_both_workloads_of_one_control_group_are_reported(pods: Path) -> None:
    async def scene() -> None:
        heard = Heard()
        watch = Watch(heard.keys.put_nowait)
        shared = pods / "pod-shared"
        shared.mkdir()
        for key in ("a", "b", "c"):
            watch.update(key, pod(shared, key))
        watch.update("c", None)
        shared.rmdir()
        assert {await heard.next(), await heard.next()} == {"a", "b"}
        await heard.nothing()
        watch.close()

    asyncio.run(scene())


WITHOUT_INOTIFY = """
import asyncio, logging
from resctrlmond.workloads.model import Group, GroupState, Workload
from resctrlmond.daemon.watch import Watch

async def scene():
    watch = Watch(print)
    group = Group(name="k", state=GroupState.STANDING)
    watch.update("k", Workload(key="k", groups=(group,), pod_cgroup="/pods/gone"))
    await asyncio.sleep(0)
    watch.update("k", None)
    watch.close()

logging.basicConfig(format="%(levelname)s %(message)s")
asyncio.run(scene())
"""


def test_without_inotify_it_goes_on_and_says_so() -> None:
    """As on a host whose root has used up fs.inotify.max_user_instances."""
    command = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    command += ['echo 0 >/proc/sys/user/max_inotify_instances && exec "$@"', "sh"]
    done = subprocess.run(
        [*command, sys.executable, "-c", WITHOUT_INOTIFY], capture_output=True, text=True, check=False
    )
    said = (
        "WARNING cannot watch pods by inotify, so their ends are detected up to a second late: Too many open files. "
        "Raise fs.inotify.max_user_instances or LimitNOFILE=\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", said)
