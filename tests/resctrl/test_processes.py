# SPDX-License-Identifier: Apache-2.0
"""Processes are held by pidfd, and their data are read from /proc."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import NoSuchProcess
from resctrlmond.resctrl.processes import Process

from .conftest import kernel_thread
from .puppets import Puppet, pause_for_start_time


def test_a_process_is_held_with_its_start_time(puppet: Puppet) -> None:
    with Process.open(puppet.pid) as process:
        assert process.pid == puppet.pid
        assert not process.is_kernel_thread
        assert not process.has_ended()
        stat = processes.stat(puppet.pid)
        assert stat
        assert (stat.parent, stat.start_time) == (os.getpid(), process.start_time)
    Process.open(puppet.pid, process.start_time).close()


def test_the_start_time_is_in_ticks_since_boot(puppet: Puppet) -> None:
    ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    with Process.open(puppet.pid) as process:
        assert ticks - 1000 < process.start_time <= ticks + 1


def test_another_start_time_is_another_process(puppets: Callable[[], Puppet]) -> None:
    first = puppets()
    pause_for_start_time()
    second = puppets()
    with Process.open(first.pid) as process:
        assert process.start_time < start_time(second.pid)
        with pytest.raises(NoSuchProcess, match=f"process {second.pid} has ended"):
            Process.open(second.pid, process.start_time)


def start_time(pid: int) -> int:
    stat = processes.stat(pid)
    assert stat
    return stat.start_time


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**31 - 1, 2**31, 2**40, 2**64])
def test_a_number_of_no_process(pid: int) -> None:
    with pytest.raises(NoSuchProcess, match=str(pid)):
        Process.open(pid)


def test_a_thread_that_leads_no_process_is_none(puppet: Puppet) -> None:
    thread = puppet.make("thread")
    with pytest.raises(NoSuchProcess, match=f"no process {thread}"):
        Process.open(thread)


def test_a_zombie_has_ended(puppet: Puppet) -> None:
    zombie = puppet.make("zombie")
    assert processes.stat(zombie)
    with pytest.raises(NoSuchProcess, match=f"process {zombie} has ended"):
        Process.open(zombie)


def test_the_end_is_seen_before_it_is_reaped(puppet: Puppet) -> None:
    child = puppet.make("fork")
    with Process.open(child) as process:
        os.kill(child, 9)
        deadline = time.monotonic() + 60
        while not process.has_ended():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert processes.stat(child)


def test_a_process_whose_first_thread_ended_lives(puppets: Callable[[], Puppet]) -> None:
    program = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(flush=True);"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen(["python3", "-c", program], stdout=subprocess.PIPE) as running:
        assert running.stdout
        running.stdout.readline()
        deadline = time.monotonic() + 60
        while _state(running.pid) != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with Process.open(running.pid) as process:
            assert not process.has_ended()
            assert len(process.threads()) == 2
        running.kill()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_the_threads_of_a_process(puppet: Puppet) -> None:
    threads = {puppet.make("thread") for _ in range(8)}
    with Process.open(puppet.pid) as process:
        assert set(process.threads()) == {puppet.pid, *threads}
        puppet.kill()
        assert process.threads() == []


@pytest.mark.kernel_threads
def test_a_kernel_thread_is_recognised() -> None:
    with Process.open(kernel_thread()) as process:
        assert process.is_kernel_thread


def test_a_command_of_any_name_is_read(tmp_path: Path) -> None:
    command = tmp_path / ") R 1 2 ("
    shutil.copy("/bin/sleep", command)
    with subprocess.Popen([command, "600"]) as running:
        stat = processes.stat(running.pid)
        assert stat
        assert stat.parent == os.getpid()
        with open(f"/proc/{running.pid}/comm") as comm:
            assert comm.read() == ") R 1 2 (\n"
        running.kill()


def test_a_thread_has_a_leader_and_its_process_a_parent(puppet: Puppet) -> None:
    thread, child = puppet.make("thread"), puppet.make("fork")
    assert [processes.leader(tid) for tid in (thread, child, puppet.pid)] == [puppet.pid, child, puppet.pid]
    stat = processes.stat(child)
    assert stat
    assert stat.parent == puppet.pid


def test_dead_process_has_no_data(puppet: Puppet) -> None:
    puppet.kill()
    assert processes.stat(puppet.pid) is None
    assert processes.leader(puppet.pid) == 0
    assert processes.pid_namespaces(puppet.pid) == 0


@pytest.fixture
def nested() -> Iterator[int]:
    """A process in a PID namespace of its own."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as outer:
        assert outer.stdout
        outer.stdout.readline()
        (pid,) = [
            int(name)
            for name in os.listdir("/proc")
            if name.isdigit() and (stat := processes.stat(int(name))) and stat.parent == outer.pid
        ]
        yield pid
        outer.kill()


def test_nested_pid_namespaces_are_counted(nested: int, puppet: Puppet) -> None:
    assert processes.pid_namespaces(puppet.pid) == 1
    assert processes.pid_namespaces(nested) == 2
