# SPDX-License-Identifier: Apache-2.0
"""rename (Linux 6.5 and newer): monitoring groups can be renamed and moved, nothing else can."""

from __future__ import annotations

import ctypes
import os

import pytest

from .actors import Actor, outcome
from .target import Resctrl

NO_GROUP = "Source must be a MON group\n"
NO_PLACE = "Destination must be a mon_groups subdirectory\n"


def rename(fs: Resctrl, old: str, new: str) -> tuple[str, str]:
    return outcome(lambda: os.rename(fs.path(old), fs.path(new))), fs.status


def renameat2(fs: Resctrl, old: str, new: str, flags: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)

    def call() -> None:
        if libc.renameat2(-100, os.fsencode(fs.path(old)), -100, os.fsencode(fs.path(new)), flags):
            raise OSError(ctypes.get_errno(), "renameat2")

    return outcome(call)


def test_rename_keeps_the_tasks(fs: Resctrl, actor: Actor) -> None:
    """A monitoring group gets a new name, keeps its tasks, and last_cmd_status is cleared."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    inode = os.stat(fs.path("mon_groups/a")).st_ino
    fs.set_status()
    assert rename(fs, "mon_groups/a", "mon_groups/b") == ("OK", "ok\n")
    assert fs.names("mon_groups") == ["b"]
    assert fs.members("mon_groups/b") == {actor.pid}
    assert fs.groups_of(actor.pid) == ("/", "b")
    assert os.stat(fs.path("mon_groups/b")).st_ino == inode


def test_the_old_name_is_free(fs: Resctrl) -> None:
    """After a rename the old name can be used again."""
    fs.create("mon_groups/a")
    rename(fs, "mon_groups/a", "mon_groups/b")
    fs.create("mon_groups/a")
    assert fs.names("mon_groups") == ["a", "b"]


@pytest.mark.allocation
def test_rename_moves_a_monitoring_group_to_another_control_group(fs: Resctrl, actor: Actor) -> None:
    """A monitoring group moves to another control group with its tasks, and back under a new name."""
    fs.create("class")
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    assert rename(fs, "mon_groups/a", "class/mon_groups/a") == ("OK", "ok\n")
    assert fs.groups_of(actor.pid) == ("class", "a")
    assert fs.members("class") == {actor.pid}
    assert rename(fs, "class/mon_groups/a", "mon_groups/b") == ("OK", "ok\n")
    assert fs.groups_of(actor.pid) == ("/", "b")


def test_rename_to_an_existing_group_is_eexist(fs: Resctrl) -> None:
    """An existing name is EEXIST."""
    fs.create("mon_groups/a")
    fs.create("mon_groups/b")
    fs.set_status()
    assert rename(fs, "mon_groups/a", "mon_groups/b") == ("EEXIST", "ok\n")
    assert fs.names("mon_groups") == ["a", "b"]


def test_rename_to_the_same_name_succeeds(fs: Resctrl) -> None:
    """A rename to the same name succeeds in the VFS."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    assert rename(fs, "mon_groups/a", "mon_groups/a") == ("OK", status)


@pytest.mark.allocation
def test_a_control_group_cannot_be_renamed(fs: Resctrl) -> None:
    """A control group cannot be renamed: EPERM."""
    fs.create("class")
    assert rename(fs, "class", "other") == ("EPERM", NO_GROUP)
    assert rename(fs, "class", "mon_groups/other") == ("EPERM", NO_GROUP)


@pytest.mark.parametrize("path", ["mon_groups", "mon_data", "mon_groups/a/mon_data", "mon_data/mon_L3_00"])
def test_other_directories_are_refused(fs: Resctrl, path: str) -> None:
    """Directories that are not groups cannot be renamed: EPERM."""
    fs.create("mon_groups/a")
    assert rename(fs, path, "other") == ("EPERM", NO_GROUP)


@pytest.mark.parametrize("path", ["tasks", "mon_groups/a/tasks", "info/L3_MON/num_rmids"])
def test_files_cannot_be_renamed(fs: Resctrl, path: str) -> None:
    """Files cannot be renamed: EPERM, also in info/L3_MON, and the message has no newline."""
    fs.create("mon_groups/a")
    assert rename(fs, path, "mon_groups/b") == ("EPERM", "Source and destination must be directories")


def test_the_contents_of_info_cannot_be_renamed(fs: Resctrl) -> None:
    """The contents of info belong to no group: ENOENT."""
    assert rename(fs, "info/L3_MON", "mon_groups/x")[0] == "ENOENT"
    assert rename(fs, "info", "mon_groups/x")[0] == "ENOENT"
    assert rename(fs, "info/last_cmd_status", "mon_groups/x")[0] == "ENOENT"
    fs.create("mon_groups/a")
    assert rename(fs, "mon_groups/a", "info/a")[0] == "ENOENT"


@pytest.mark.parametrize(
    "place", ["a", "mon_data/a", "mon_groups/b/a", "mon_groups/b/mon_data/a", "mon_groups/mon_groups"]
)
def test_a_monitoring_group_can_only_move_to_a_mon_groups(fs: Resctrl, place: str) -> None:
    """A monitoring group can only be in a mon_groups, and cannot have that name: EPERM."""
    fs.create("mon_groups/a")
    fs.create("mon_groups/b")
    assert rename(fs, "mon_groups/a", place) == ("EPERM", NO_PLACE)


def test_rename_of_a_missing_group_is_enoent(fs: Resctrl) -> None:
    """A missing group is ENOENT, last_cmd_status stays."""
    status = fs.set_status()
    assert rename(fs, "mon_groups/a", "mon_groups/b") == ("ENOENT", status)


def test_a_new_name_may_contain_a_newline(fs: Resctrl) -> None:
    """A new name may have a newline, which mkdir refuses."""
    fs.create("mon_groups/a")
    assert rename(fs, "mon_groups/a", "mon_groups/x\ny") == ("OK", "ok\n")
    assert fs.names("mon_groups") == ["x\ny"]


@pytest.mark.kernel_only("mfusepy does not hand the flags on")
@pytest.mark.parametrize("flags", [1, 2, 4])
def test_renameat2_with_flags_is_einval(fs: Resctrl, flags: int) -> None:
    """renameat2 with RENAME_NOREPLACE, RENAME_EXCHANGE or RENAME_WHITEOUT is EINVAL."""
    fs.create("mon_groups/a")
    # To exchange, there has to be something to exchange it with.
    new = "mon_groups/b" if flags != 2 else fs.create("mon_groups/b")
    assert renameat2(fs, "mon_groups/a", new, flags) == "EINVAL"


def test_rename_keeps_the_counters(fs: Resctrl) -> None:
    """A renamed group keeps its counters."""
    fs.create("mon_groups/a")
    rename(fs, "mon_groups/a", "mon_groups/b")
    assert fs.read("mon_groups/b/mon_data/mon_L3_00/mbm_total_bytes").strip().isdigit()
