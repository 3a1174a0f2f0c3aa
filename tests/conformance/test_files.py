# SPDX-License-Identifier: Apache-2.0
"""Opening, reading and writing files in general: kernfs' own rules, whichever file it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .actors import Actor, outcome, write
from .target import Resctrl

COUNTER = "mon_data/mon_L3_00/mbm_total_bytes"


def opens(fs: Resctrl, path: str, flags: int) -> str:
    return outcome(lambda: os.close(os.open(fs.path(path), flags)))


@pytest.mark.parametrize("path", ["info/last_cmd_status", "info/L3_MON/num_rmids", COUNTER])
def test_root_cannot_open_a_read_only_file_for_writing(fs: Resctrl, path: str) -> None:
    """Opening a file of mode 0444 for writing is EACCES even for root."""
    assert opens(fs, path, os.O_WRONLY) == "EACCES"
    assert opens(fs, path, os.O_RDWR) == "EACCES"


def test_a_counter_has_no_write_operation(fs: Resctrl) -> None:
    """After chmod 0644 a counter file still cannot be opened for writing: EACCES."""
    fs.create("mon_groups/a")
    os.chmod(fs.path("mon_groups/a", COUNTER), 0o644)
    assert opens(fs, f"mon_groups/a/{COUNTER}", os.O_WRONLY) == "EACCES"


def test_an_info_file_made_writable_takes_no_command(fs: Resctrl) -> None:
    """After chmod a 0444 file of info can be opened for writing, and the write is EINVAL."""
    path = fs.path("info/L3_MON/num_rmids")
    os.chmod(path, 0o644)
    try:
        assert outcome(lambda: write(path, "7\n")) == "EINVAL"
    finally:
        os.chmod(path, 0o444)


def test_root_cannot_open_a_file_of_mode_0(fs: Resctrl) -> None:
    """After chmod 0, root can open the file neither for reading nor for writing: EACCES."""
    fs.create("mon_groups/a")
    os.chmod(fs.path("mon_groups/a/tasks"), 0)
    assert opens(fs, "mon_groups/a/tasks", os.O_RDONLY) == "EACCES"
    assert opens(fs, "mon_groups/a/tasks", os.O_WRONLY) == "EACCES"


def test_truncation_is_accepted_and_ignored(fs: Resctrl, actor: Actor) -> None:
    """O_TRUNC and truncate do nothing, also to a group with tasks."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    assert opens(fs, "mon_groups/a/tasks", os.O_WRONLY | os.O_TRUNC) == "OK"
    os.truncate(fs.path("mon_groups/a/tasks"), 0)
    assert fs.members("mon_groups/a") == {actor.pid}


def test_no_file_can_be_created(fs: Resctrl) -> None:
    """O_CREAT of a missing name is EACCES; mknod, symlink and link are EPERM."""
    assert opens(fs, "mon_groups/file", os.O_CREAT | os.O_WRONLY) == "EACCES"
    assert outcome(lambda: os.mkfifo(fs.path("mon_groups/fifo"))) == "EPERM"
    assert outcome(lambda: os.symlink("x", fs.path("mon_groups/link"))) == "EPERM"
    assert outcome(lambda: os.link(fs.path("tasks"), fs.path("mon_groups/hard"))) == "EPERM"


def test_o_creat_of_an_existing_file_opens_it(fs: Resctrl) -> None:
    """O_CREAT of an existing file opens it, and with O_EXCL it is EEXIST."""
    assert opens(fs, "tasks", os.O_CREAT | os.O_WRONLY) == "OK"
    assert opens(fs, "tasks", os.O_CREAT | os.O_EXCL | os.O_WRONLY) == "EEXIST"


def test_no_file_can_be_removed(fs: Resctrl) -> None:
    """unlink is EPERM, rmdir of a file ENOTDIR, unlink of a directory EISDIR."""
    assert outcome(lambda: os.unlink(fs.path("tasks"))) == "EPERM"
    assert outcome(lambda: os.unlink(fs.path("info/last_cmd_status"))) == "EPERM"
    assert outcome(lambda: fs.rmdir("tasks")) == "ENOTDIR"
    assert outcome(lambda: os.unlink(fs.path("mon_groups"))) == "EISDIR"


def test_a_directory_cannot_be_opened_for_writing(fs: Resctrl) -> None:
    """Opening a group for writing is EISDIR."""
    assert opens(fs, "mon_groups", os.O_WRONLY) == "EISDIR"


def test_a_path_through_a_file_is_enotdir(fs: Resctrl) -> None:
    """A path through a file is ENOTDIR."""
    assert opens(fs, "tasks/x", os.O_RDONLY) == "ENOTDIR"


def test_a_command_of_4096_bytes_is_accepted(fs: Resctrl, actor: Actor) -> None:
    """A write of exactly 4096 bytes is one command."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", f"{actor.pid}".ljust(4096))
    assert fs.members("mon_groups/a") == {actor.pid}


def test_a_longer_command_is_e2big(fs: Resctrl, actor: Actor) -> None:
    """A write of 4097 bytes is E2BIG; it changes nothing, also not last_cmd_status."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    assert fs.try_write("mon_groups/a/tasks", f"{actor.pid}".ljust(4097)) == ("E2BIG", status)
    assert fs.members("mon_groups/a") == set()


def test_each_write_is_one_command(fs: Resctrl, actor: Actor) -> None:
    """The offset is ignored: the second write to one descriptor is a command of its own."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/tasks"), os.O_WRONLY)
    try:
        number = str(actor.pid).encode()
        assert os.write(fd, b"0") == 1
        assert os.getpid() in fs.members("mon_groups/a")
        assert os.write(fd, number) == len(number)
        assert os.pwrite(fd, b"\n", 3000) == 1
    finally:
        os.close(fd)
    fs.write("tasks" if fs.can_allocate else "mon_groups/a/tasks", os.getpid())
    assert actor.pid in fs.members("mon_groups/a")


def test_a_read_at_offset_0_returns_the_current_content(fs: Resctrl, actor: Actor) -> None:
    """pread at offset 0 on an open descriptor returns the current state."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/tasks"), os.O_RDONLY)
    try:
        assert os.pread(fd, 100, 0) == b""
        fs.write("mon_groups/a/tasks", actor.pid)
        assert os.pread(fd, 100, 0) == f"{actor.pid}\n".encode()
        assert os.read(fd, 100) == f"{actor.pid}\n".encode()
        assert os.read(fd, 100) == b""
        os.lseek(fd, 0, os.SEEK_SET)
        assert os.read(fd, 100) == f"{actor.pid}\n".encode()
    finally:
        os.close(fd)


def test_small_reads_see_one_snapshot(fs: Resctrl, actor: Actor) -> None:
    """Further reads return the rest of the content that the read at offset 0 created."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    fd = os.open(fs.path("mon_groups/a/tasks"), os.O_RDONLY)
    try:
        begun = os.read(fd, 1)
        actor.thread()
        fs.write("mon_groups/a/tasks", actor.thread())
        assert begun + os.read(fd, 4096) == f"{actor.pid}\n".encode()
    finally:
        os.close(fd)


def test_reading_does_not_clear_the_status(fs: Resctrl) -> None:
    """last_cmd_status reads the same again."""
    status = fs.set_status()
    assert (fs.status, fs.status) == (status, status)


@pytest.mark.parametrize("path", ["tasks", "cpus", "cpus_list", COUNTER, "mon_groups/a/tasks", "mon_groups/a/cpus"])
def test_reading_a_groups_file_clears_the_status(fs: Resctrl, path: str) -> None:
    """In 7.3, every read of a group's file clears last_cmd_status; in 6.12 reads change nothing."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    fs.read(path)
    assert fs.status == ("ok\n" if fs.is_6_16 else status)


@pytest.mark.parametrize("path", ["info/L3_MON/num_rmids", "info/L3_MON/mon_features"])
def test_reading_info_leaves_the_status(fs: Resctrl, path: str) -> None:
    """Reads of files of info without a group and of directories do not change last_cmd_status."""
    status = fs.set_status()
    fs.read(path)
    fs.names("mon_groups")
    os.stat(fs.path("tasks"))
    assert fs.status == status


def test_the_status_begins_ok(fs: Resctrl) -> None:
    """After a command that succeeds it reads ``ok``."""
    fs.set_status()
    fs.write("tasks", "\n")
    assert fs.status == "ok\n"


def test_descriptors_keep_to_the_access_mode(fs: Resctrl) -> None:
    """A write to a descriptor that is open for reading is EBADF."""
    with Path(fs.path("tasks")).open("rb") as file:
        assert outcome(lambda: os.write(file.fileno(), b"0")) == "EBADF"
