# SPDX-License-Identifier: Apache-2.0
"""rmdir: what it removes, the new group of the tasks, and the errors of old descriptors."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from .actors import Actor, outcome, write
from .target import Resctrl

COUNTER = "mon_data/mon_L3_00/mbm_total_bytes"


def removes(fs: Resctrl, path: str) -> str:
    return outcome(lambda: fs.rmdir(path))


def test_rmdir_removes_a_group_without_tasks(fs: Resctrl) -> None:
    """An empty group is removed with all its files; 7.3 clears last_cmd_status, 6.12 does not."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    assert (removes(fs, "mon_groups/a"), fs.status) == ("OK", "ok\n" if fs.is_6_16 else status)
    assert fs.names("mon_groups") == []
    assert removes(fs, "mon_groups/a") == "ENOENT"


def test_rmdir_removes_a_group_with_tasks(fs: Resctrl, actor: Actor) -> None:
    """A group with tasks can be removed: its tasks move to the control group above."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    fs.rmdir("mon_groups/a")
    assert fs.groups_of(actor.pid) == ("/", "")


@pytest.mark.parametrize("path", ["mon_groups", "mon_data", "mon_data/mon_L3_00", "mon_groups/a/mon_data"])
def test_other_directories_are_refused(fs: Resctrl, path: str) -> None:
    """rmdir of mon_groups, mon_data or a domain is EPERM; 7.3 clears last_cmd_status, 6.12 does not."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    assert (removes(fs, path), fs.status) == ("EPERM", "ok\n" if fs.is_6_16 else status)


@pytest.mark.parametrize("path", ["info", "info/L3_MON"])
def test_rmdir_in_info_is_eperm(fs: Resctrl, path: str) -> None:
    """rmdir in info, which belongs to no group, is EPERM, and last_cmd_status stays."""
    status = fs.set_status()
    assert (removes(fs, path), fs.status) == ("EPERM", status)


def test_rmdir_of_root_is_ebusy(fs: Resctrl) -> None:
    """rmdir of root is EBUSY: it is a mount point."""
    assert outcome(lambda: os.rmdir(fs.root)) == "EBUSY"


def test_rmdir_moves_all_tasks_to_the_control_group(fs: Resctrl, actor: Actor) -> None:
    """rmdir moves all threads and processes of a group, not only the one that was written."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    others = [actor.thread(), actor.fork().pid]
    assert fs.members("mon_groups/a") == {actor.pid, *others}
    fs.rmdir("mon_groups/a")
    assert [fs.groups_of(tid) for tid in (actor.pid, *others)] == [("/", "")] * 3


def test_a_group_created_again_is_empty(fs: Resctrl, actor: Actor) -> None:
    """A group created again has none of the tasks of the removed group."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    fs.rmdir("mon_groups/a")
    fs.create("mon_groups/a")
    assert fs.members("mon_groups/a") == set()


@pytest.mark.allocation
def test_rmdir_of_a_control_group_removes_its_monitoring_groups(fs: Resctrl, actors: Callable[[], Actor]) -> None:
    """rmdir of a control group removes its monitoring groups; all tasks of both move to root."""
    fs.create("class")
    fs.create("class/mon_groups/a")
    inner, outer = actors(), actors()
    fs.write("class/tasks", f"{inner.pid},{outer.pid}")
    fs.write("class/mon_groups/a/tasks", inner.pid)
    fs.rmdir("class")
    assert not os.path.exists(fs.path("class"))
    assert (fs.groups_of(inner.pid), fs.groups_of(outer.pid)) == (("/", ""), ("/", ""))


@pytest.mark.allocation
def test_tasks_stay_in_their_control_group(fs: Resctrl, actor: Actor) -> None:
    """After rmdir of a monitoring group, its tasks are still in the control group."""
    fs.create("class")
    fs.create("class/mon_groups/a")
    fs.write("class/tasks", actor.pid)
    fs.write("class/mon_groups/a/tasks", actor.pid)
    fs.rmdir("class/mon_groups/a")
    assert fs.groups_of(actor.pid) == ("class", "")
    assert fs.members("class") == {actor.pid}


@pytest.mark.parametrize("name", ["tasks", COUNTER, "cpus_list"])
def test_old_descriptors_are_enodev(fs: Resctrl, name: str) -> None:
    """A file of a removed group that is open reads ENODEV, with read and with pread."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a", name), os.O_RDONLY)
    try:
        os.pread(fd, 100, 0)
        fs.rmdir("mon_groups/a")
        assert outcome(lambda: os.pread(fd, 100, 0)) == "ENODEV"
        assert outcome(lambda: os.read(fd, 100)) == "ENODEV"
    finally:
        os.close(fd)


def test_an_old_descriptor_takes_no_command(fs: Resctrl, actor: Actor) -> None:
    """A write to the tasks of a removed group is ENODEV, last_cmd_status stays, and no task moves."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/tasks"), os.O_WRONLY)
    try:
        fs.rmdir("mon_groups/a")
        status = fs.set_status()
        assert outcome(lambda: os.write(fd, str(actor.pid).encode())) == "ENODEV"
    finally:
        os.close(fd)
    assert (fs.status, fs.groups_of(actor.pid)) == (status, ("/", ""))


def test_a_new_group_of_the_name_does_not_revive_a_descriptor(fs: Resctrl) -> None:
    """An old descriptor is ENODEV even after a group of the same name is created."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/tasks"), os.O_RDWR)
    try:
        fs.rmdir("mon_groups/a")
        fs.create("mon_groups/a")
        assert outcome(lambda: os.pread(fd, 100, 0)) == "ENODEV"
        assert outcome(lambda: os.write(fd, b"0")) == "ENODEV"
    finally:
        os.close(fd)
    assert fs.members("mon_groups/a") == set()


def test_an_old_directory_finds_nothing(fs: Resctrl) -> None:
    """In the open directory of a removed group, each name is ENOENT, also for mkdir."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a"), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fs.rmdir("mon_groups/a")
        assert outcome(lambda: os.close(os.open("tasks", os.O_RDONLY, dir_fd=fd))) == "ENOENT"
        assert outcome(lambda: os.mkdir("x", dir_fd=fd)) == "ENOENT"
    finally:
        os.close(fd)


def test_a_descriptor_survives_rename(fs: Resctrl, actor: Actor) -> None:
    """An open file of a renamed group still works: the node is the same."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/tasks"), os.O_RDONLY)
    try:
        os.rename(fs.path("mon_groups/a"), fs.path("mon_groups/b"))
        write(fs.path("mon_groups/b/tasks"), str(actor.pid))
        assert os.pread(fd, 100, 0) == f"{actor.pid}\n".encode()
    finally:
        os.close(fd)
