# SPDX-License-Identifier: Apache-2.0
"""The mounted simulation answers what Linux 7.2 was seen to answer on a real resctrl, line by line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.actors import outcome
from tests.sim.conftest import Mounted, Puppet, mounted


@pytest.fixture(scope="module")
def rdt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    yield from mounted(tmp_path_factory.mktemp("rdt"), "intel-rdt")


@pytest.fixture(scope="module")
def monitoring_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    yield from mounted(tmp_path_factory.mktemp("mon"), "monitoring-only")


Step = tuple[str, Callable[[], object], str, str]


def follow(fs: Mounted, steps: list[Step]) -> None:
    """Does every step; each must end as the kernel's did, with the same last_cmd_status after it."""
    for label, action, expected, status in steps:
        assert (label, outcome(action), fs.status) == (label, expected, status)


def make(fs: Mounted, path: str) -> Callable[[], object]:
    return lambda: fs.mkdir(path)


def remove(fs: Mounted, path: str) -> Callable[[], object]:
    return lambda: fs.rmdir(path)


def put(fs: Mounted, path: str, text: object) -> Callable[[], object]:
    return lambda: fs.write(path, str(text))


def move(fs: Mounted, old: str, new: str) -> Callable[[], object]:
    return lambda: fs.rename(old, new)


@pytest.mark.parametrize("profile", ["rdt", "monitoring_only"])
def test_monitoring_group_basics(profile: str, request: pytest.FixtureRequest) -> None:
    fs: Mounted = request.getfixturevalue(profile)
    create = os.O_CREAT | os.O_WRONLY
    follow(
        fs,
        [
            ("a", make(fs, "mon_groups/a"), "OK", "ok"),
            ("a again", make(fs, "mon_groups/a"), "EEXIST", "ok"),
            ("a/sub", make(fs, "mon_groups/a/sub"), "EPERM", "ok"),
            ("mon_groups", make(fs, "mon_groups/mon_groups"), "EPERM", "ok"),
            ("newline", make(fs, "mon_groups/x\ny"), "EINVAL", "ok"),
            ("255 characters", make(fs, "mon_groups/" + "n" * 255), "OK", "ok"),
            ("256 characters", make(fs, "mon_groups/" + "n" * 256), "OK", "ok"),
            ("punctuation", make(fs, "mon_groups/a.b-c:d@e"), "OK", "ok"),
            ("O_CREAT", lambda: os.open(fs.path("mon_groups/file"), create), "EACCES", "ok"),
            ("unlink", lambda: os.unlink(fs.path("mon_groups/a/tasks")), "EPERM", "ok"),
            ("rmdir mon_groups", remove(fs, "mon_groups"), "EPERM", "ok"),
            ("rmdir mon_data", remove(fs, "mon_groups/a/mon_data"), "EPERM", "ok"),
        ],
    )
    assert sorted(os.listdir(fs.path("mon_groups/a"))) == ["cpus", "cpus_list", "mon_data", "tasks"]
    counters = ["mbm_local_bytes", "mbm_total_bytes"]
    if profile == "rdt":
        counters.insert(0, "llc_occupancy")
    assert sorted(os.listdir(fs.path("mon_groups/a/mon_data/mon_L3_00"))) == counters
    assert [fs.read("mon_groups/a/mon_data/mon_L3_00/" + name) for name in counters] == ["0\n"] * len(counters)
    assert f"{os.stat(fs.path('mon_groups/a')).st_mode:o}" == "40755"
    assert f"{os.stat(fs.path('mon_groups/a/tasks')).st_mode:o}" == "100644"
    fs.clean()


@pytest.mark.parametrize("profile", ["rdt", "monitoring_only"])
def test_tasks(profile: str, request: pytest.FixtureRequest, puppet: Puppet) -> None:
    fs: Mounted = request.getfixturevalue(profile)
    tasks, pid = "mon_groups/a/tasks", puppet.pid
    fs.mkdir("mon_groups/a")
    fs.mkdir("mon_groups/b")
    fs.write(tasks, str(pid))
    assert fs.read(tasks) == f"{pid}\n"
    child = int(puppet.do("fork"))
    assert child in fs.tids("mon_groups/a")
    # On a machine without allocation the root lists nothing.
    assert (pid in fs.tids("")) == (profile == "rdt")
    assert fs.groups_of(child) == "res:/\nmon:a\n"
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{zombie.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    dead = 4194304 - 1  # above every kernel's default pid_max on small machines, and hardly in use on others
    follow(
        fs,
        [
            ("0", put(fs, "mon_groups/b/tasks", 0), "OK", "ok"),
            ("dead", put(fs, tasks, dead), "ESRCH", f"No task {dead}\nError while processing task {dead}"),
            ("abc", put(fs, tasks, "abc"), "EINVAL", "Task list parsing error pid abc"),
            ("-1", put(fs, tasks, -1), "EINVAL", "Invalid pid -1"),
            ("newline", put(fs, tasks, "\n"), "OK", "ok"),
            ("comma list", put(fs, tasks, f"{pid},{child}"), "OK", "ok"),
            ("with newline", put(fs, tasks, f"{pid}\n"), "OK", "ok"),
            (
                "two lines",
                put(fs, tasks, f"{pid}\n{child}\n"),
                "EINVAL",
                f"Task list parsing error pid {pid}\n{child}",
            ),
            ("zombie", put(fs, tasks, zombie.pid), "OK", "ok"),
            ("other group", put(fs, "mon_groups/b/tasks", child), "OK", "ok"),
        ],
    )
    assert os.getpid() in fs.tids("mon_groups/b")
    assert child not in fs.tids("mon_groups/a")
    assert zombie.pid in fs.tids("mon_groups/a")
    zombie.wait()
    assert zombie.pid not in fs.tids("mon_groups/a")
    fs.clean()


def test_rmdir_with_tasks_and_open_files(rdt: Mounted, puppet: Puppet) -> None:
    fs = rdt
    fs.mkdir("mon_groups/a")
    fs.write("mon_groups/a/tasks", str(puppet.pid))
    counter = os.open(fs.path("mon_groups/a/mon_data/mon_L3_00/llc_occupancy"), os.O_RDONLY)
    tasks = os.open(fs.path("mon_groups/a/tasks"), os.O_RDWR)
    directory = os.open(fs.path("mon_groups/a"), os.O_DIRECTORY)
    follow(
        fs,
        [
            ("rmdir", remove(fs, "mon_groups/a"), "OK", "ok"),
            ("read", lambda: os.read(counter, 100), "ENODEV", "ok"),
            ("write", lambda: os.write(tasks, b"1"), "ENODEV", "ok"),
            ("openat", lambda: os.open("tasks", os.O_RDONLY, dir_fd=directory), "ENOENT", "ok"),
            ("rmdir again", remove(fs, "mon_groups/a"), "ENOENT", "ok"),
            ("same name", make(fs, "mon_groups/a"), "OK", "ok"),
            ("read still", lambda: os.pread(counter, 100, 0), "ENODEV", "ok"),
            ("openat still", lambda: os.open("tasks", os.O_RDONLY, dir_fd=directory), "ENOENT", "ok"),
        ],
    )
    for fd in (counter, tasks, directory):
        os.close(fd)
    assert fs.groups_of(puppet.pid) == "res:/\nmon:\n"
    fs.clean()


def fill(fs: Mounted) -> tuple[int, str, str]:
    for number in range(10**6):
        if (result := outcome(make(fs, f"mon_groups/g{number}"))) != "OK":
            return number, result, fs.status
    raise AssertionError("RMIDs never ran out")


def test_exhaustion_with_limbo(tmp_path: Path) -> None:
    for fs in mounted(tmp_path, "intel-rdt", 64):
        assert fill(fs) == (63, "ENOSPC", "Out of RMIDs")
        # How long it takes is shown with a clock of its own, in test_rmids.py: here nobody leaves before he may.
        threshold = fs.read("info/L3_MON/max_threshold_occupancy")
        fs.write("info/L3_MON/max_threshold_occupancy", "0")
        fs.clean()
        assert fill(fs) == (0, "EBUSY", "Out of RMIDs")
        fs.write("info/L3_MON/max_threshold_occupancy", threshold)
        while outcome(make(fs, "mon_groups/z")) != "OK":
            time.sleep(0.02)
        assert fill(fs) == (62, "ENOSPC", "Out of RMIDs")


def test_exhaustion_without_occupancy_knows_no_limbo(monitoring_only: Mounted) -> None:
    for _ in range(2):
        assert fill(monitoring_only) == (63, "ENOSPC", "Out of RMIDs")
        monitoring_only.clean()
    assert outcome(make(monitoring_only, "c1")) == "EPERM"
    assert monitoring_only.status == "ok"


def test_control_groups(tmp_path: Path, puppet: Puppet) -> None:
    for fs in mounted(tmp_path, "intel-rdt"):
        fs.mkdir("x2")
        fs.mkdir("x3")  # leaves one CLOSID, as on the machine that was seen
        pid, child = puppet.pid, int(puppet.do("fork"))
        other_class = f"Can't move task to different control group\nError while processing task {child}"
        steps = [
            ("c1", make(fs, "c1"), "OK", "ok"),
            ("c2", make(fs, "c2"), "ENOSPC", "Out of CLOSIDs"),
            ("m", make(fs, "mon_groups/m"), "OK", "ok"),
            ("m's task", put(fs, "mon_groups/m/tasks", pid), "OK", "ok"),
            ("k", make(fs, "c1/mon_groups/k"), "OK", "ok"),
            ("k: task of root", put(fs, "c1/mon_groups/k/tasks", child), "EINVAL", other_class),
            ("c1: task of root", put(fs, "c1/tasks", child), "OK", "ok"),
            ("k: task of c1", put(fs, "c1/mon_groups/k/tasks", child), "OK", "ok"),
            ("m into c1", move(fs, "mon_groups/m", "c1/mon_groups/m"), "OK", "ok"),
        ]
        follow(fs, steps)
        assert fs.groups_of(child) == "res:c1\nmon:k\n"
        assert fs.groups_of(pid) == "res:c1\nmon:m\n"
        assert fs.tids("c1/mon_groups/m") == {pid}
        steps = [
            ("m out, as m2", move(fs, "c1/mon_groups/m", "mon_groups/m2"), "OK", "ok"),
            ("m2 to m3", move(fs, "mon_groups/m2", "mon_groups/m3"), "OK", "ok"),
            ("c1 to c9", move(fs, "c1", "c9"), "EPERM", "Source must be a MON group"),
            ("k onto m3", move(fs, "c1/mon_groups/k", "mon_groups/m3"), "EEXIST", "ok"),
            ("c1: task of m3", put(fs, "c1/tasks", pid), "OK", "ok"),
        ]
        follow(fs, steps)
        assert (os.listdir(fs.path("mon_groups")), os.listdir(fs.path("c1/mon_groups"))) == (["m3"], ["k"])
        assert fs.groups_of(pid) == "res:c1\nmon:\n"
        follow(fs, [("rmdir c1", remove(fs, "c1"), "OK", "ok")])
        assert fs.groups_of(pid) == fs.groups_of(child) == "res:/\nmon:\n"


def test_info(rdt: Mounted) -> None:
    assert rdt.read("info/L3_MON/mon_features") == "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"
    assert rdt.read("info/L3_MON/num_rmids") == "64\n"
    assert rdt.read("info/L3_MON/mbm_assign_mode") == "[default]\n"
    assert rdt.read("info/L3/num_closids") == "4\n"
    assert rdt.read("schemata") == "L3:0=fff\n"
    assert rdt.read("mode") == "shareable\n"
    names = ["cpus", "cpus_list", "info", "mode", "mon_data", "mon_groups", "schemata", "size", "tasks"]
    assert sorted(os.listdir(rdt.path())) == names


def test_info_without_allocation(monitoring_only: Mounted) -> None:
    assert sorted(os.listdir(monitoring_only.path("info"))) == ["L3_MON", "last_cmd_status"]
    assert monitoring_only.read("info/L3_MON/mon_features") == "mbm_total_bytes\nmbm_local_bytes\n"
    assert monitoring_only.read("info/L3_MON/max_threshold_occupancy") == "0\n"
    assert monitoring_only.read("schemata") == ""
    names = ["cpus", "cpus_list", "info", "mode", "mon_data", "mon_groups", "schemata", "size", "tasks"]
    assert sorted(os.listdir(monitoring_only.path())) == names
