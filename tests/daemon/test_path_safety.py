# SPDX-License-Identifier: Apache-2.0
"""A path is unsafe if other users can change it: by owner or mode of any part, or of a link's target."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resctrlmond.daemon.path_safety import unsafe_part
from resctrlmond.daemon.startup import Exit
from tests.daemon.conftest import run_daemon

NOBODY = 65534


def test_path_in_a_folder_of_the_daemons_user_is_safe_even_if_parts_do_not_exist(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to("folder/../folder")
    for path in (folder, folder / "new" / "sim", tmp_path / "link", tmp_path / "link" / "new"):
        assert unsafe_part(str(path)) is None


def test_parent_of_another_user_is_unsafe(tmp_path: Path) -> None:
    """The owner of a parent can replace the directory with another one."""
    parent = tmp_path / "foreign"
    (parent / "own").mkdir(parents=True)
    os.chown(parent, NOBODY, NOBODY)
    unsafe = unsafe_part(str(parent / "own"))
    assert unsafe is not None
    assert unsafe[0] == str(parent)
    assert "belongs to the user" in unsafe[1]
    code, stderr = run_daemon("--simulate", str(parent / "own"))
    assert code == Exit.FAILURE
    assert f"because other users can change it: {parent} belongs to the user" in stderr


@pytest.mark.parametrize(("mode", "writers"), [(0o777, "all users"), (0o770, "the group")])
def test_parent_that_other_users_can_write_to_is_unsafe(tmp_path: Path, mode: int, writers: str) -> None:
    parent = tmp_path / "open"
    (parent / "own").mkdir(parents=True)
    os.chown(parent, -1, NOBODY)
    parent.chmod(mode)
    unsafe = unsafe_part(str(parent / "own"))
    assert unsafe is not None
    assert unsafe[0] == str(parent)
    assert f"can be written by {writers}" in unsafe[1]


def test_sticky_parent_is_safe_but_a_sticky_directory_is_not(tmp_path: Path) -> None:
    """In /tmp, other users cannot rename a directory of root, but they can create files."""
    sticky = tmp_path / "tmp"
    (sticky / "own").mkdir(parents=True)
    sticky.chmod(0o1777)
    assert unsafe_part(str(sticky / "own")) is None
    assert unsafe_part(str(sticky / "new")) is None
    assert unsafe_part(str(sticky)) == (str(sticky), "can be written by all users")


def test_link_of_another_user_and_link_to_an_unsafe_directory_are_unsafe(tmp_path: Path) -> None:
    target = tmp_path / "open"
    (target / "own").mkdir(parents=True)
    target.chmod(0o777)
    (tmp_path / "link").symlink_to(target)
    assert unsafe_part(str(tmp_path / "link" / "own")) == (str(target), "can be written by all users")
    sticky = tmp_path / "tmp"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "foreign").symlink_to(tmp_path)
    os.chown(sticky / "foreign", NOBODY, NOBODY, follow_symlinks=False)
    unsafe = unsafe_part(str(sticky / "foreign" / "own"))
    assert unsafe is not None
    assert unsafe[0] == str(sticky / "foreign")


def test_loop_of_links_is_unsafe(tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("first")
    unsafe = unsafe_part(str(tmp_path / "first"))
    assert unsafe is not None
    assert unsafe[1] == "is one of too many links"
