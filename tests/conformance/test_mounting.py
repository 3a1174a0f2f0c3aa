# SPDX-License-Identifier: Apache-2.0
"""Mount and unmount: one instance, nothing of it survives, and its users are not disturbed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .actors import Actor, outcome, write
from .target import Resctrl


def test_an_open_file_keeps_it_mounted(fs: Resctrl) -> None:
    """While a file in it is open, umount is EBUSY and changes nothing."""
    fs.create("mon_groups/a")
    with Path(fs.path("mon_groups/a/tasks")).open():
        assert fs.unmount() == "EBUSY"
    assert fs.names("mon_groups") == ["a"]


def test_a_working_directory_keeps_it_mounted(fs: Resctrl) -> None:
    """While a process is in it, umount is EBUSY."""
    here = os.getcwd()
    os.chdir(fs.path("mon_groups"))
    try:
        assert fs.unmount() == "EBUSY"
    finally:
        os.chdir(here)


def test_an_unmount_removes_all_groups(fs: Resctrl, actor: Actor) -> None:
    """After umount and mount there is no group, and all tasks are in root."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    assert fs.unmount() == "OK"
    assert os.listdir(fs.root) == []
    fs.mount()
    assert fs.names("mon_groups") == []
    assert fs.groups_of(actor.pid) == ("/", "")
    fs.create("mon_groups/a")
    assert fs.members("mon_groups/a") == set()


@pytest.mark.allocation
def test_an_unmount_removes_all_control_groups(fs: Resctrl, actor: Actor) -> None:
    """After umount and mount, there is no control group."""
    fs.create("class")
    fs.write("class/tasks", actor.pid)
    assert fs.unmount() == "OK"
    fs.mount()
    assert not os.path.exists(fs.path("class"))
    assert fs.groups_of(actor.pid) == ("/", "")


def test_an_unmount_resets_modes(fs: Resctrl) -> None:
    """A chmod of root's files is lost with the mount."""
    os.chmod(fs.path("tasks"), 0o600)
    assert fs.unmount() == "OK"
    fs.mount()
    assert os.stat(fs.path("tasks")).st_mode & 0o777 == 0o644


def test_the_status_is_ok_after_a_mount(fs: Resctrl) -> None:
    """A mount begins with ``ok``."""
    fs.set_status()
    assert fs.unmount() == "OK"
    fs.mount()
    assert fs.status == "ok\n"


@pytest.mark.kernel_only("each simulation is an instance of its own")
def test_a_second_mount_is_ebusy(fs: Resctrl, tmp_path: Path) -> None:
    """A second mount elsewhere is EBUSY."""
    done = subprocess.run(
        ["mount", "-t", "resctrl", "resctrl", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 32
    assert "already mounted" in done.stderr


@pytest.mark.kernel_only("options are given to the simulator when it is started")
@pytest.mark.parametrize("option", ["bogus", "cdp", "cdpl2", "mba_MBps"])
def test_an_unknown_option_is_refused(fs: Resctrl, option: str) -> None:
    """An unknown option, or one that the machine does not support, refuses the mount."""
    assert fs.unmount() == "OK"
    command = ["mount", "-t", "resctrl", "-o", option, "resctrl", fs.root]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 32
    assert os.listdir(fs.root) == []


@pytest.mark.kernel_only("a simulation ends with its mount, and its threshold with it")
@pytest.mark.limbo
def test_an_unmount_keeps_the_threshold(fs: Resctrl) -> None:
    """max_threshold_occupancy belongs to the kernel, not to the mount."""
    before = fs.read("info/L3_MON/max_threshold_occupancy")
    fs.write("info/L3_MON/max_threshold_occupancy", 0)
    try:
        assert fs.unmount() == "OK"
        fs.mount()
        assert fs.read("info/L3_MON/max_threshold_occupancy") == "0\n"
    finally:
        fs.mount()
        fs.write("info/L3_MON/max_threshold_occupancy", before)


@pytest.mark.kernel_only("a simulation ends with its mount, and its limbo with it")
@pytest.mark.limbo
def test_limbo_continues_after_an_unmount(fs: Resctrl) -> None:
    """The RMIDs of the groups that an unmount has removed are in limbo after the next mount."""
    fs.fill()
    before = fs.read("info/L3_MON/max_threshold_occupancy")
    fs.write("info/L3_MON/max_threshold_occupancy", 0)
    try:
        assert fs.unmount() == "OK"
        fs.mount()
        assert outcome(lambda: os.mkdir(fs.path("mon_groups/a"))) == "EBUSY"
    finally:
        fs.mount()
        fs.write("info/L3_MON/max_threshold_occupancy", before)


@pytest.mark.kernel_only("a simulation has nothing in /proc")
def test_without_a_mount_proc_names_no_group(fs: Resctrl) -> None:
    """Without a mount, /proc/PID/cpu_resctrl_groups names no group, not even root."""
    assert fs.groups_of(os.getpid()) == ("/", "")
    assert fs.unmount() == "OK"
    assert fs.groups_of(os.getpid()) == ("", "")


@pytest.mark.kernel_only("FUSE decides which users may mount a simulation")
def test_only_the_hosts_root_may_mount(fs: Resctrl, tmp_path: Path) -> None:
    """Root of another user namespace may not mount it."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "resctrl", "resctrl", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 32
    assert "permission denied" in done.stderr


@pytest.mark.kernel_only("a descriptor of a simulation that has ended belongs to a dead connection")
def test_a_lazy_unmount_keeps_what_is_open(fs: Resctrl, actor: Actor) -> None:
    """After umount --lazy, an open tasks file still works: the groups end with the last descriptor."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/tasks"), os.O_RDWR)
    try:
        subprocess.run(["umount", "--lazy", fs.root], check=True)
        assert outcome(lambda: os.write(fd, str(actor.pid).encode())) == "OK"
        assert os.pread(fd, 100, 0) == f"{actor.pid}\n".encode()
    finally:
        os.close(fd)
    fs.mount()
    assert fs.names("mon_groups") == []


def test_a_write_through_another_path(fs: Resctrl, actor: Actor, tmp_path: Path) -> None:
    """A bind mount is the same filesystem."""
    fs.create("mon_groups/a")
    subprocess.run(["mount", "--bind", fs.root, tmp_path], check=True)
    try:
        write(str(tmp_path / "mon_groups/a/tasks"), str(actor.pid))
        assert fs.members("mon_groups/a") == {actor.pid}
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_ctime_of_root_identifies_the_mount(fs: Resctrl) -> None:
    """mkdir and rmdir do not change it; after umount and mount it differs."""
    before = os.stat(fs.root).st_ctime_ns
    fs.create("mon_groups/a")
    fs.rmdir("mon_groups/a")
    if fs.can_allocate:
        fs.create("gold")
        fs.rmdir("gold")
    assert os.stat(fs.root).st_ctime_ns == before
    assert fs.unmount() == "OK"
    fs.mount()
    assert os.stat(fs.root).st_ctime_ns > before
