# SPDX-License-Identifier: Apache-2.0
"""The mounted simulation as a filesystem, with real processes and threads in its groups."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from resctrlmond.resctrl.tree import SIMULATION_ATTRIBUTE, SIMULATION_FSTYPE
from resctrlmond.sim.host.forks import ForkEvents
from tests.conformance.actors import outcome
from tests.sim.conftest import Mounted, Puppet
from tests.wait import wait_until

L3 = "mon_data/mon_L3_00/"
NOBODY = 65534


def test_attribute_shows_that_it_is_a_simulation(sim: Mounted) -> None:
    assert os.getxattr(sim.root, SIMULATION_ATTRIBUTE) == b"intel-aet"
    assert os.listxattr(sim.root) == [SIMULATION_ATTRIBUTE]
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    fstypes = [line[line.index("-") + 1] for line in lines if line[4] == sim.root]
    assert fstypes == [SIMULATION_FSTYPE]


@pytest.mark.parametrize("number", ["4194303", "0", "x", "-1", "", "9" * 100])
def test_membership_of_a_missing_task_is_enodata(sim: Mounted, number: str) -> None:
    assert outcome(lambda: sim.groups_of(number)) == "ENODATA"


def test_state_of_the_rmids_can_be_read(sim: Mounted) -> None:
    def counts() -> dict[str, int]:
        words = os.getxattr(sim.root, "user.resctrlmond.rmids").decode().split()
        return {name: int(number) for name, _, number in (word.partition("=") for word in words)}

    before = counts()
    assert sum(before.values()) == 576
    sim.mkdir("mon_groups/a")
    assert counts()["used"] == before["used"] + 1
    sim.rmdir("mon_groups/a")
    assert counts()["used"] == before["used"]
    assert counts()["limbo"] > 0


def test_other_attributes_are_not_supported(sim: Mounted) -> None:
    assert outcome(lambda: os.getxattr(sim.path("tasks"), "user.x")) == "ENOTSUP"
    assert outcome(lambda: os.setxattr(sim.root, "user.x", b"")) == "ENOTSUP"


def test_two_packages_with_energy(sim: Mounted) -> None:
    sim.mkdir("mon_groups/a")
    assert sorted(os.listdir(sim.path("mon_groups/a/mon_data"))) == [
        "mon_L3_00",
        "mon_L3_01",
        "mon_PERF_PKG_00",
        "mon_PERF_PKG_01",
    ]
    assert sorted(os.listdir(sim.path("mon_groups/a/mon_data/mon_PERF_PKG_00"))) == ["activity", "core_energy"]
    assert sim.read("info/PERF_PKG_MON/mon_features") == "core_energy\nactivity\n"
    assert sim.read("info/PERF_PKG_MON/num_rmids") == "576\n"


# Reading and writing


def test_sizes_are_zero_and_directories_count_their_subdirectories(sim: Mounted) -> None:
    assert os.stat(sim.path("info/L3_MON/mon_features")).st_size == 0
    assert os.stat(sim.path("mon_data")).st_nlink == 2 + 4


def test_pread_at_zero_makes_the_content_anew_and_chunks_see_one_snapshot(sim: Mounted) -> None:
    fd = os.open(sim.path("info/last_cmd_status"), os.O_RDONLY)
    assert os.read(fd, 1) == b"o"
    assert outcome(lambda: sim.write("tasks", "abc")) == "EINVAL"
    assert os.read(fd, 10) == b"k\n"
    assert os.read(fd, 10) == b""
    assert os.pread(fd, 100, 0) == b"Task list parsing error pid abc\n"
    os.close(fd)


def test_a_write_is_one_command_of_at_most_4096_bytes_wherever_the_offset_is(sim: Mounted) -> None:
    sim.mkdir("mon_groups/a")
    fd = os.open(sim.path("mon_groups/a/tasks"), os.O_WRONLY | os.O_TRUNC)
    own = f"{os.getpid()}\n".encode()
    assert os.write(fd, own.rjust(4096)) == 4096
    assert os.pwrite(fd, own, 12345) == len(own)
    assert outcome(lambda: os.write(fd, own.rjust(4097))) == "E2BIG"
    assert outcome(lambda: os.write(fd, own.rjust(9000))) == "E2BIG"
    assert sim.status == "ok"
    os.close(fd)
    os.truncate(sim.path("mon_groups/a/tasks"), 0)
    assert sim.tids("mon_groups/a") == {os.getpid()}


def test_bytes_that_are_not_text_are_kept(sim: Mounted) -> None:
    name = os.fsencode(sim.path("mon_groups")) + b"/\xff\xfe"
    os.mkdir(name)
    assert os.listdir(os.path.dirname(name)) == [b"\xff\xfe"]
    with open(name + b"/tasks", "wb", buffering=0) as tasks:
        tasks.write(str(os.getpid()).encode())
        assert outcome(lambda: tasks.write(b"\xff\x80 x")) == "EINVAL"
    assert Path(sim.path("info/last_cmd_status")).read_bytes() == b"Task list parsing error pid \xff\x80 x\n"
    assert os.getxattr(sim.root, f"user.resctrlmond.task.{os.getpid()}") == b"res:/\nmon:\xff\xfe\n"


@pytest.mark.parametrize(
    ("path", "flags", "expected"),
    [
        ("mon_data/mon_L3_00/llc_occupancy", os.O_WRONLY, "EACCES"),
        ("mon_data/mon_L3_00/llc_occupancy", os.O_RDWR, "EACCES"),
        ("info/L3_MON/num_rmids", os.O_WRONLY, "EACCES"),
        ("info/last_cmd_status", os.O_RDWR, "EACCES"),
        ("tasks", os.O_RDWR, "OK"),
        ("info/L3_MON/max_threshold_occupancy", os.O_RDWR, "OK"),
        ("nothing", os.O_RDONLY, "ENOENT"),
        ("tasks/nothing", os.O_RDONLY, "ENOTDIR"),
    ],
)
def test_open_as_root(sim: Mounted, path: str, flags: int, expected: str) -> None:
    assert outcome(lambda: os.close(os.open(sim.path(path), flags))) == expected


def test_unlink_of_an_open_file_is_refused_without_a_trace(sim: Mounted) -> None:
    sim.mkdir("mon_groups/a")
    with open(sim.path("mon_groups/a/tasks")):
        assert outcome(lambda: os.unlink(sim.path("mon_groups/a/tasks"))) == "EPERM"
    assert sim.status == "ok"
    assert sorted(os.listdir(sim.path("mon_groups/a"))) == ["cpus", "cpus_list", "mon_data", "tasks"]


def test_readdir_and_stat_agree_on_inode_numbers(sim: Mounted) -> None:
    with os.scandir(sim.path("info")) as entries:
        found = {entry.path: (entry.inode(), entry.is_dir()) for entry in entries}
    assert found == {path: (os.stat(path).st_ino, os.path.isdir(path)) for path in found}
    assert len({inode for inode, _ in found.values()}) == len(found) > 3


def test_open_files_of_a_removed_group_do_not_find_a_new_group_of_its_name(sim: Mounted) -> None:
    sim.mkdir("mon_groups/a")
    counter = os.open(sim.path("mon_groups/a/" + L3 + "llc_occupancy"), os.O_RDONLY)
    directory = os.open(sim.path("mon_groups/a"), os.O_DIRECTORY)
    sim.rmdir("mon_groups/a")
    sim.mkdir("mon_groups/a")
    assert outcome(lambda: os.pread(counter, 100, 0)) == "ENODEV"
    assert outcome(lambda: os.open("tasks", os.O_RDONLY, dir_fd=directory)) == "ENOENT"
    assert sim.status == "ok"
    os.close(counter)
    os.close(directory)


# Owner, mode and time, which identify the daemon's groups


def test_group_has_the_group_id_of_its_creator_from_mkdir_on_and_over_rename(sim: Mounted) -> None:
    subprocess.run(["mkdir", sim.path("mon_groups/a")], check=True, group=4242, extra_groups=[])
    nodes = [Path(sim.path("mon_groups/a")), *Path(sim.path("mon_groups/a")).rglob("*")]
    assert len(nodes) > 10
    assert {(node.stat().st_uid, node.stat().st_gid) for node in nodes} == {(0, 4242)}
    sim.rename("mon_groups/a", "mon_groups/b")
    assert os.stat(sim.path("mon_groups/b")).st_gid == 4242
    sim.mkdir("mon_groups/c")
    assert os.stat(sim.path("mon_groups/c")).st_gid == os.getgid()


def test_a_mtime_that_was_set_stays_over_rename_and_use_and_not_over_a_new_directory(sim: Mounted) -> None:
    nonce = 1_234_567_890_123_456_789
    sim.mkdir("c1")
    sim.mkdir("mon_groups/a")
    os.utime(sim.path("mon_groups/a"), ns=(nonce, nonce))
    sim.write("mon_groups/a/tasks", str(os.getpid()))
    sim.read("mon_groups/a/tasks")
    assert os.stat(sim.path("mon_groups/a")).st_mtime_ns == nonce
    sim.rename("mon_groups/a", "c1/mon_groups/b")
    assert os.stat(sim.path("c1/mon_groups/b")).st_mtime_ns == nonce
    sim.rmdir("c1/mon_groups/b")
    sim.mkdir("mon_groups/a")
    assert abs(os.stat(sim.path("mon_groups/a")).st_mtime_ns - time.time_ns()) < 10**10


def test_one_time_can_be_set_without_the_other(sim: Mounted) -> None:
    sim.mkdir("mon_groups/a")
    a = sim.path("mon_groups/a")
    os.utime(a, ns=(111, 222))
    subprocess.run(["touch", "-a", "-d", "@5", a], check=True)
    assert (os.stat(a).st_atime_ns, os.stat(a).st_mtime_ns) == (5 * 10**9, 222)
    os.utime(a)
    assert abs(os.stat(a).st_mtime_ns - time.time_ns()) < 10**10


def test_mode_and_owner_are_kept_and_root_ignores_mode_zero(sim: Mounted) -> None:
    os.mkdir(sim.path("mon_groups/a"), 0)
    assert os.stat(sim.path("mon_groups/a")).st_mode & 0o7777 == 0
    assert os.stat(sim.path("mon_groups/a/mon_data")).st_mode & 0o7777 == 0
    assert sim.read("mon_groups/a/tasks") == ""
    os.chmod(sim.path("mon_groups/a"), 0o750)
    os.chown(sim.path("mon_groups/a"), 12, 34)
    status = os.stat(sim.path("mon_groups/a"))
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o750, 12, 34)


def write(path: str, text: str) -> None:
    os.write(os.open(path, os.O_WRONLY), text.encode())


def as_nobody(where: str, action: Callable[[], object]) -> str:
    """Return the outcome of ``action`` for a user without capabilities, with ``where`` as the working directory."""
    receiving, sending = os.pipe()
    if (pid := os.fork()) == 0:
        os.chdir(where)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        os.write(sending, outcome(action).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(sending)
    with open(receiving) as answer:
        return answer.read()


def test_a_user_may_read_counters_and_change_nothing(sim: Mounted) -> None:
    sim.mkdir("mon_groups/a")
    sim.mkdir("mon_groups/mine")
    os.chmod(sim.path("mon_groups/a/tasks"), 0o666)
    os.chmod(sim.path("mon_groups/mine"), 0o700)
    sim.read("mon_groups/mine/tasks")  # what root has just looked up opens no way for others

    outcomes: dict[Callable[[], object], str] = {
        lambda: Path("mon_groups/a", L3, "llc_occupancy").read_text(): "OK",
        lambda: os.mkdir("mon_groups/x"): "EACCES",
        lambda: os.rmdir("mon_groups/a"): "EACCES",
        lambda: os.rename("mon_groups/a", "mon_groups/b"): "EACCES",
        lambda: os.chmod("mon_groups/a", 0o777): "EPERM",
        lambda: os.chown("mon_groups/a", NOBODY, NOBODY): "EPERM",
        lambda: os.utime("mon_groups/a", (1, 1)): "EPERM",
        lambda: write("tasks", "0"): "EACCES",
        lambda: write("mon_groups/a/tasks", "1"): "EPERM",
        lambda: write("mon_groups/a/tasks", "0"): "OK",
        lambda: os.listdir("mon_groups/mine"): "EACCES",
        lambda: os.stat("mon_groups/mine/tasks"): "EACCES",
        lambda: write("info/L3_MON/max_threshold_occupancy", "0"): "EACCES",
    }
    assert [as_nobody(sim.root, action) for action in outcomes] == list(outcomes.values())


# Real tasks


def test_children_of_a_short_lived_parent_inherit_its_group_if_the_kernel_reports_forks(sim: Mounted) -> None:
    sim.mkdir("mon_groups/a")
    script = "read go; (sleep 60 & echo $!); read go; (sleep 60 & echo $!)"
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, text=True) as shell:
        assert shell.stdin
        assert shell.stdout
        sim.write("mon_groups/a/tasks", str(shell.pid))
        shell.stdin.write("\n\n")
        shell.stdin.flush()
        orphans = {int(shell.stdout.readline()), int(shell.stdout.readline())}
    listed = sim.tids("mon_groups/a")
    for orphan in orphans:
        os.kill(orphan, 9)
    if (events := ForkEvents.open()) is not None:
        events.close()
        assert listed == orphans


def cpu_seconds(pid: int) -> Decimal:
    """Return the CPU time of a process's first thread in nanoseconds."""
    return Decimal(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 10**9


def wait_until_idle(puppet: Puppet) -> None:
    """Wait until the puppet waits for its next order: it uses CPU time after its reply."""
    wait_until(lambda: Path(f"/proc/{puppet.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")


def total(sim: Mounted, group: str, resource: str, event: str) -> Decimal:
    """Return the sum over both domains."""
    domains = [os.path.join(group, "mon_data", f"mon_{resource}_{number:02d}") for number in (0, 1)]
    texts = [sim.read(os.path.join(domain, event)).strip() for domain in domains]
    return sum((Decimal(text) for text in texts if text != "Unavailable"), Decimal(0))


def test_counters_are_the_model_times_the_cpu_time_since_joining(sim: Mounted, puppet: Puppet) -> None:
    sim.mkdir("mon_groups/a")
    puppet.do("burn 0.1")
    energy, activity = (total(sim, "mon_groups/a", "PERF_PKG", name) for name in ("core_energy", "activity"))
    before = cpu_seconds(puppet.pid)
    sim.write("mon_groups/a/tasks", str(puppet.pid))
    joined = cpu_seconds(puppet.pid)
    puppet.do("burn 0.4")
    wait_until_idle(puppet)
    time.sleep(0.01)  # longer than the lag of telemetry
    least = cpu_seconds(puppet.pid) - joined
    used = {name: total(sim, "mon_groups/a", "PERF_PKG", name) for name in ("core_energy", "activity")}
    traffic = total(sim, "mon_groups/a", "L3", "mbm_total_bytes")
    most = cpu_seconds(puppet.pid) - before
    assert least >= Decimal("0.39")
    # Two packages, each cut off at 2^-18.
    last = Decimal(2) / (1 << 18) + Decimal("0.000002")
    assert least * Decimal("2.5") - last <= used["core_energy"] - energy <= most * Decimal("2.5") + last
    assert least * Decimal("1.5") - last <= used["activity"] - activity <= most * Decimal("1.5") + last
    assert least * (1 << 30) - 2 * 65536 <= traffic <= most * (1 << 30)


def test_an_idle_group_counts_nothing(sim: Mounted, puppet: Puppet) -> None:
    sim.mkdir("mon_groups/a")
    puppet.do("burn 0.01")  # its interpreter is up from here on
    wait_until_idle(puppet)
    time.sleep(0.05)
    sim.write("mon_groups/a/tasks", str(puppet.pid))
    first = total(sim, "mon_groups/a", "L3", "mbm_total_bytes")
    time.sleep(0.1)
    assert total(sim, "mon_groups/a", "L3", "mbm_total_bytes") == first


def test_root_counts_more_than_any_group_in_it(sim: Mounted, puppet: Puppet) -> None:
    sim.mkdir("mon_groups/a")
    sim.write("mon_groups/a/tasks", str(puppet.pid))
    puppet.do("burn 0.2")
    group = total(sim, "mon_groups/a", "L3", "mbm_total_bytes")
    assert total(sim, "", "L3", "mbm_total_bytes") >= group > 0
