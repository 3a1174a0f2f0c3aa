# SPDX-License-Identifier: Apache-2.0
"""Which paths other users can change: by the owner or the mode of any part, or of a link's target."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resctrlmond.daemon.path_safety import unsafe_part
from resctrlmond.daemon.startup import Exit
from tests.daemon.test_life import failing

NOBODY = 65534


def test_a_path_in_a_folder_of_ours_is_safe_also_where_parts_do_not_exist(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to("folder/../folder")
    for path in (folder, folder / "new" / "sim", tmp_path / "link", tmp_path / "link" / "new"):
        assert unsafe_part(str(path)) is None


def test_a_parent_of_another_user_is_unsafe(tmp_path: Path) -> None:
    """The owner of a parent can rename our directory, and put another one in its place."""
    parent = tmp_path / "theirs"
    (parent / "ours").mkdir(parents=True)
    os.chown(parent, NOBODY, NOBODY)
    unsafe = unsafe_part(str(parent / "ours"))
    assert unsafe is not None
    assert unsafe[0] == str(parent)
    assert "belongs to the user" in unsafe[1]
    code, said = failing("--simulate", str(parent / "ours"))
    assert code == Exit.FAILURE
    assert f"because other users can change it: {parent} belongs to the user" in said


@pytest.mark.parametrize(("mode", "writers"), [(0o777, "all users"), (0o770, "the group")])
def test_a_parent_that_others_can_write_to_is_unsafe(tmp_path: Path, mode: int, writers: str) -> None:
    parent = tmp_path / "open"
    (parent / "ours").mkdir(parents=True)
    os.chown(parent, -1, NOBODY)
    parent.chmod(mode)
    unsafe = unsafe_part(str(parent / "ours"))
    assert unsafe is not None
    assert unsafe[0] == str(parent)
    assert f"can be written by {writers}" in unsafe[1]


def test_a_sticky_parent_is_safe_but_a_sticky_directory_is_not(tmp_path: Path) -> None:
    """In /tmp nobody can rename our directory, but everybody can add files."""
    sticky = tmp_path / "tmp"
    (sticky / "ours").mkdir(parents=True)
    sticky.chmod(0o1777)
    assert unsafe_part(str(sticky / "ours")) is None
    assert unsafe_part(str(sticky / "new")) is None
    assert unsafe_part(str(sticky)) == (str(sticky), "can be written by all users")


def test_a_link_of_another_user_and_one_to_an_unsafe_place_are_unsafe(tmp_path: Path) -> None:
    target = tmp_path / "open"
    (target / "ours").mkdir(parents=True)
    target.chmod(0o777)
    (tmp_path / "link").symlink_to(target)
    assert unsafe_part(str(tmp_path / "link" / "ours")) == (str(target), "can be written by all users")
    sticky = tmp_path / "tmp"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "theirs").symlink_to(tmp_path)
    os.chown(sticky / "theirs", NOBODY, NOBODY, follow_symlinks=False)
    unsafe = unsafe_part(str(sticky / "theirs" / "ours"))
    assert unsafe is not None
    assert unsafe[0] == str(sticky / "theirs")


def test_a_circle_of_links_is_unsafe(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    unsafe = unsafe_part(str(tmp_path / "one"))
    assert unsafe is not None
    assert unsafe[1] == "is one of too many links"
