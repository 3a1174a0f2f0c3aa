# SPDX-License-Identifier: Apache-2.0
"""The daemon loses nothing without free descriptors, with a full /run, or when the system time is set."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.client import Client, VarlinkError
from resctrlmond.sim.fuse.mount import Simulation, unmount
from tests.crash.site import Site
from tests.daemon.conftest import MANAGER

Make = Callable[..., Site]


@pytest.fixture
def site(tmp_path: Path, marked: None) -> Iterator[Make]:
    """Return a function that starts a daemon with given settings, wrapper and environment."""
    (tmp_path / "resctrl").mkdir()
    (tmp_path / "run").mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(Simulation(str(tmp_path / "resctrl"), "intel-rdt", 200, virtual_cpus=2))
        yield lambda *args, **more: stack.enter_context(contextlib.closing(Site(tmp_path, *args, **more)))


LIMIT = 50


def opened(site: Site) -> int:
    return len(os.listdir(f"/proc/{site.pid}/fd"))


def fill(site: Site) -> list[socket.socket]:
    """Connect until the daemon has at most one descriptor left: a connection takes two."""
    made = []
    while opened(site) < LIMIT - 1:
        before = opened(site)
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].connect(site.machine.socket)
        deadline = time.monotonic() + 20
        while opened(site) == before and time.monotonic() < deadline:
            time.sleep(0.005)
    return made


def test_the_daemon_without_free_descriptors_loses_nothing(site: Make) -> None:
    """Errors name the limit. When descriptors are free again, the daemon answers as before."""
    here = site("checkpoint_interval: 1s\n", "prlimit", f"--nofile={LIMIT}")
    worker = here.process()
    key = here.assigned(worker, member="c1")
    here.use(key, worker)
    names = set()
    for number in range(4):
        child = here.process()
        with Client(here.machine.socket) as client:
            client.call(f"{MANAGER}.Get", {"key": key})  # connected before the last descriptor is taken
            made = fill(here)
            for _ in range(number):
                made.pop(0).close()
            for verb, parameters in (
                ("Assign", {"key": f"new-{number}", "pid": child.pid, "claim": "engine"}),
                ("Read", {"key": key}),
                ("Status", {}),
                ("List", {}),
            ):
                try:
                    client.call(f"{MANAGER}.{verb}", parameters)
                except VarlinkError as error:
                    names.add(error.name.removeprefix(f"{MANAGER}."))
                    assert error.parameters["errno"] == "EMFILE", (number, verb, error)
                    assert "LimitNOFILE=" in error.parameters["remedy"], (number, verb, error)
            for one in made:
                one.close()
        assert not here.is_dead()
        assert here.machine.group(key)["state"] == "active", number
        here.check()
    assert names, "no call needed a descriptor"
    here.drain()


def test_the_daemon_with_a_full_run_folder_loses_nothing(site: Make, tmp_path: Path) -> None:
    """A tmpfs has no free inode: each call succeeds or changes nothing, and no end is lost."""
    run = tmp_path / "run"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=400", "tmpfs", run], check=True)
    try:
        here = site()
        worker = here.process()
        key = here.assigned(worker, member="c1")
        here.use(key, worker)
        used = 0
        for number in range(12):
            used = os.statvfs(run).f_files - os.statvfs(run).f_ffree
            room = ["mount", "-o", f"remount,nr_inodes={used + number}", str(run)]
            subprocess.run(room, check=True)
            child = here.process()
            assert here.attempt(
                "Assign", key=f"new-{number}", pid=child.pid, claim="engine", endRule="container"
            ) in (
                "NotWritten",
                "done",
            )
            assert here.attempt("Create", key=key, claim="engine") in ("NotWritten", "done")
            assert here.attempt("Read", key=key) == "done"
            subprocess.run(["mount", "-o", "remount,nr_inodes=4000", run], check=True)
            here.check()
        subprocess.run(["mount", "-o", f"remount,nr_inodes={used}", run], check=True)
        # The end values cannot be written: the group and its counters stay until then.
        assert here.attempt("Release", key=key, claim="engine") == "NotWritten"
        assert here.outside.tree.tasks(here.outside.marked_groups()[0].ref)
        subprocess.run(["mount", "-o", "remount,nr_inodes=4000", run], check=True)
        assert here.attempt("Release", key=key, claim="engine") == "done"
        here.drain()
        here.close()
    finally:
        assert unmount(str(run))


def ahead(clock: Path, seconds: int) -> None:
    new = clock.with_suffix(".new")
    new.write_text(f"{seconds}")
    new.rename(clock)


@pytest.mark.parametrize("days", [400, -400])
def test_setting_the_system_time_ends_and_removes_nothing(site: Make, tmp_path: Path, days: int) -> None:
    """The daemon only displays the system time: no workload ends or stays because of it."""
    clock = tmp_path / "clock"
    ahead(clock, 0)
    here = site(
        "snapshot_ttl: 1h\npod_linger: 2s\ncheckpoint_interval: 100ms\n",
        module="tests.crash.stepped",
        STEPPED_CLOCK=str(clock),
    )
    worker, over, pod = here.process(), here.process(), here.process()
    living = here.assigned(worker)
    here.use(living, worker)
    checkpoint = tmp_path / "run" / "groups" / living / "checkpoint"
    ended = here.assigned(over)
    here.call("Release", key=ended, claim="engine")
    # A pod without a control group: its end is a matter of time.
    uid = here.assigned(pod, key="0f8fad5b-d9cb-469f-a165-70867728950e", member="c1")
    here.end(pod)
    assert here.machine.reaches(uid, "idle")
    before = here.machine.group(ended)["completedAt"]
    while not checkpoint.exists():
        time.sleep(0.02)
    ahead(clock, days * 86_400)
    stepped = here.assigned(here.process())
    assert here.machine.group(stepped)["createdAt"][:4] != before[:4]
    # Neither at once after a step forward, nor a year later after a step back.
    assert here.machine.reaches(uid, "completed")
    for _ in range(2):  # a whole tick, after a tick that may have begun before
        last = checkpoint.stat().st_mtime_ns
        here.use(living, worker)  # a checkpoint that did not change is not written
        while checkpoint.stat().st_mtime_ns == last:
            time.sleep(0.02)
    assert here.machine.group(ended)["state"] == "completed"
    assert here.machine.group(living)["state"] == "active"
    here.check()
    here.drain()
