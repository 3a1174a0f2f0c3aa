# SPDX-License-Identifier: Apache-2.0
"""Permissions of an ordinary user: read everything, and move its own tasks in a group that it was given."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from .actors import Actor
from .target import Resctrl

NOBODY = 65534


@pytest.fixture
def given(fs: Resctrl) -> str:
    """Return a group whose tasks file the user nobody may write."""
    path = fs.create("mon_groups/a")
    os.chown(fs.path(path, "tasks"), NOBODY, NOBODY)
    return path


def test_other_users_can_read_files(fs: Resctrl, nobody: Actor) -> None:
    """An ordinary user may read all files of the mode 0644 and 0444."""
    fs.create("mon_groups/a")
    for name in ("tasks", "info/last_cmd_status", "mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes"):
        assert nobody.call("open", path=fs.path(name), flags=os.O_RDONLY) == "OK"


def test_only_root_may_write(fs: Resctrl, nobody: Actor) -> None:
    """An ordinary user may not open tasks for writing: EACCES."""
    fs.create("mon_groups/a")
    for name in ("tasks", "mon_groups/a/tasks", "info/L3_MON/max_threshold_occupancy"):
        assert nobody.call("write", path=fs.path(name), text="0") == "EACCES"


def test_only_root_may_create_and_remove_groups(fs: Resctrl, nobody: Actor) -> None:
    """An ordinary user may not create or remove groups: EACCES, last_cmd_status stays."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    assert nobody.call("mkdir", path=fs.path("mon_groups/b")) == "EACCES"
    assert nobody.call("rmdir", path=fs.path("mon_groups/a")) == "EACCES"
    assert fs.status == status


def test_attributes_belong_to_the_owner(fs: Resctrl, nobody: Actor) -> None:
    """An ordinary user may not change another's modes and times: EPERM."""
    fs.create("mon_groups/a")
    assert nobody.call("chmod", path=fs.path("mon_groups/a"), mode=0o777) == "EPERM"
    assert nobody.call("utime", path=fs.path("mon_groups/a"), ns=5) == "EPERM"


def test_other_users_cannot_open_files_of_a_group_of_mode_0700(fs: Resctrl, nobody: Actor) -> None:
    """Other users cannot open the contents of a group of mode 0700: EACCES."""
    os.mkdir(fs.path("mon_groups/a"), 0o700)
    assert nobody.call("open", path=fs.path("mon_groups/a/tasks"), flags=os.O_RDONLY) == "EACCES"
    assert nobody.call("open", path=fs.path("mon_groups/a"), flags=os.O_RDONLY | os.O_DIRECTORY) == "EACCES"


def test_a_user_may_move_its_own_task(fs: Resctrl, given: str, nobody: Actor) -> None:
    """A user with write access to tasks moves the tasks of its own uid."""
    other = nobody.fork()
    assert nobody.call("write", path=fs.path(given, "tasks"), text=f"0,{other.pid}") == "OK"
    assert fs.members(given) == {nobody.pid, other.pid}


def test_a_user_may_not_move_another_users(
    fs: Resctrl, given: str, nobody: Actor, actors: Callable[[], Actor]
) -> None:
    """A task of another uid is EPERM, with two lines in last_cmd_status."""
    foreign = actors().pid
    assert nobody.call("write", path=fs.path(given, "tasks"), text=str(foreign)) == "EPERM"
    assert fs.status == f"No permission to move task {foreign}\nError while processing task {foreign}\n"
    assert fs.members(given) == set()


CREDENTIALS = [(NOBODY, 1, 1, "OK"), (1, 1, NOBODY, "OK"), (1, NOBODY, 1, "EPERM"), (1, 1, 1, "EPERM")]


@pytest.mark.parametrize("uids", CREDENTIALS)
def test_real_and_saved_uids_count(
    fs: Resctrl, given: str, nobody: Actor, actors: Callable[[], Actor], uids: tuple[int, int, int, str]
) -> None:
    """The real and the saved uid of the task must match; its effective uid does not matter."""
    real, effective, saved, result = uids
    task = actors()
    task.call("be", real=real, effective=effective, saved=saved)
    assert nobody.call("write", path=fs.path(given, "tasks"), text=str(task.pid)) == result


@pytest.mark.parametrize("call", ["seteuid", "setfsuid"])
def test_the_writers_effective_uid_counts(
    fs: Resctrl, given: str, actor: Actor, actors: Callable[[], Actor], call: str
) -> None:
    """The effective uid of the writer decides, not its fsuid, nor the process that opened the file."""
    foreign = actors().pid
    path = fs.path(given, "tasks")
    result = actor.call("write_as", path=path, text=str(foreign), call=call, uid=NOBODY)
    assert result == ("EPERM" if call == "seteuid" else "OK")
    assert fs.members(given) == (set() if call == "seteuid" else {foreign})


def test_a_list_stops_at_a_foreign_task(fs: Resctrl, given: str, nobody: Actor, actors: Callable[[], Actor]) -> None:
    """The tasks before a foreign one in the list have moved."""
    foreign = actors().pid
    assert nobody.call("write", path=fs.path(given, "tasks"), text=f"0,{foreign}") == "EPERM"
    assert fs.members(given) == {nobody.pid}


def test_a_user_with_a_directory_may_make_groups(fs: Resctrl, nobody: Actor) -> None:
    """The owner of a mon_groups may create groups in it, which it owns, and remove them."""
    os.chown(fs.path("mon_groups"), NOBODY, NOBODY)
    os.chmod(fs.path("mon_groups"), 0o755)
    try:
        assert nobody.call("mkdir", path=fs.path("mon_groups/mine")) == "OK"
        found = [os.stat(fs.path("mon_groups/mine", name)) for name in ("", "tasks", "mon_data")]
        assert {(stat.st_uid, stat.st_gid) for stat in found} == {(NOBODY, NOBODY)}
        assert nobody.call("write", path=fs.path("mon_groups/mine/tasks"), text="0") == "OK"
        assert fs.members("mon_groups/mine") == {nobody.pid}
        assert nobody.call("rmdir", path=fs.path("mon_groups/mine")) == "OK"
    finally:
        os.chown(fs.path("mon_groups"), 0, 0)
        os.chmod(fs.path("mon_groups"), 0o555)
