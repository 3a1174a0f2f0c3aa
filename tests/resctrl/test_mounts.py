# SPDX-License-Identifier: Apache-2.0
"""Only a real resctrl is opened, and it can be unmounted at any time."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.errors import NoSuchGroup, NotMounted, ResctrlError
from resctrlmond.resctrl.mounts import boot_id, mount_of, mounts, parse
from resctrlmond.resctrl.tree import GroupRef, Tree

from .conftest import NONCE, Make, descriptors
from .places import KERNEL, Place, Simulated

A = GroupRef("", "a")
B = GroupRef("", "b")


def refused(path: str) -> NotMounted:
    with pytest.raises(NotMounted) as caught:
        Tree.open(path, allow_simulation=True)
    assert path in str(caught.value)
    return caught.value


@pytest.fixture
def bound(directory: Path) -> Iterator[Callable[[str, Path], None]]:
    """Binds a directory to another place for the time of a test."""
    made: list[Path] = []

    def bind(source: str, target: Path) -> None:
        subprocess.run(["mount", "--bind", source, target], check=True)
        made.append(target)

    yield bind
    for target in made:
        subprocess.run(["umount", "--lazy", target], check=True)


def test_a_plain_directory_is_not_mounted(tmp_path: Path) -> None:
    error = refused(str(tmp_path))
    assert "is not a resctrl filesystem but" in str(error)
    assert "mount -t resctrl" in error.remedy


def test_a_directory_that_looks_like_resctrl_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "mon_groups").mkdir()
    (tmp_path / "info/L3_MON").mkdir(parents=True)
    refused(str(tmp_path))


def test_a_missing_path_and_a_file_are_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "No such file or directory (ENOENT)" in str(refused(str(tmp_path / "nowhere")))
    assert "(ENOTDIR)" in str(refused(str(tmp_path / "file")))


def test_another_filesystem_is_named() -> None:
    assert "but proc" in str(refused("/proc"))


@pytest.mark.simulator
def test_simulator_is_refused_unless_requested(place: Place) -> None:
    with pytest.raises(NotMounted, match=f"{place.root}: is a simulated resctrl") as caught:
        Tree.open(place.root)
    assert "--simulate" in caught.value.remedy
    assert Tree.open(place.root, allow_simulation=True).simulation == place.name


def test_kernels_resctrl_is_not_a_simulation(tree: Tree, place: Place) -> None:
    assert tree.simulation == (None if place.name == KERNEL else place.name)


def test_a_directory_inside_is_not_the_filesystem(tree: Tree) -> None:
    refused(f"{tree.path}/mon_groups")
    refused(f"{tree.path}/info")


def test_a_bind_mount_of_a_part_is_refused(tree: Tree, directory: Path, bound: Callable[[str, Path], None]) -> None:
    bound(f"{tree.path}/mon_groups", directory)
    refused(str(directory))


def test_bind_mount_of_the_root_is_accepted(tree: Tree, directory: Path, bound: Callable[[str, Path], None]) -> None:
    bound(tree.path, directory)
    assert Tree.open(str(directory), allow_simulation=True).scan() == []


def test_symlink_to_the_mount_is_accepted(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree.path)
    opened = Tree.open(str(tmp_path / "link"), allow_simulation=True)
    assert opened.classes() == [""]
    opened.check_mounted()


def test_a_mount_on_top_of_it_is_another_filesystem(tree: Tree, place: Place) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", place.root], check=True)
    try:
        with pytest.raises(NotMounted, match="but tmpfs"):
            tree.check_mounted()
        with pytest.raises(NotMounted):
            tree.create(A, NONCE)
        assert os.listdir(place.root) == []
    finally:
        subprocess.run(["umount", place.root], check=True)
    tree.check_mounted()


OPERATIONS: dict[str, Callable[[Tree], object]] = {
    "check_mounted": lambda tree: tree.check_mounted(),
    "classes": lambda tree: tree.classes(),
    "has_class": lambda tree: tree.has_class(""),
    "scan": lambda tree: tree.scan(),
    "capacity": lambda tree: tree.capacity(),
    "read": lambda tree: tree.read(A),
    "tasks": lambda tree: tree.tasks(A),
    "membership": lambda tree: tree.membership(os.getpid()),
    "create": lambda tree: tree.create(A, NONCE),
    "set_nonce": lambda tree: tree.set_nonce(A, NONCE),
    "remove": lambda tree: tree.remove(A),
    "rename": lambda tree: tree.rename(A, B),
    "write_task": lambda tree: tree.write_task(A.path, os.getpid()),
}


def test_every_operation_reports_that_the_tree_was_unmounted(tree: Tree, place: Place, make: Make) -> None:
    make("a")
    place.unmount()
    before = len(descriptors())
    for name, operation in OPERATIONS.items():
        with pytest.raises(NotMounted):
            pytest.fail(f"{name} answered {operation(tree)!r}")
        assert len(descriptors()) == before, name
    assert tree.find(A) is None
    assert tree.last_cmd_status() == ""
    assert os.listdir(place.root) == []


def test_a_remounted_resctrl_works_again(tree: Tree, place: Place, make: Make) -> None:
    make("a")
    place.unmount()
    place.mount()
    tree.check_mounted()
    assert tree.scan() == []
    assert make("a") == A
    assert tree.read(A)


def test_an_idle_tree_does_not_keep_it_mounted(tree: Tree, place: Place, make: Make) -> None:
    ref = make("a")
    tree.read(ref)
    tree.tasks(ref)
    tree.membership(os.getpid())
    tree.capacity()
    tree.scan()
    with pytest.raises(NoSuchGroup):
        tree.read(B)
    place.unmount()  # fails with EBUSY if anything were open


def test_only_an_open_descriptor_keeps_it_mounted(tree: Tree, place: Place) -> None:
    fd = os.open(place.root, os.O_RDONLY)
    try:
        with pytest.raises(subprocess.CalledProcessError):
            place.unmount()
    finally:
        os.close(fd)


@pytest.mark.simulator
def test_a_simulator_that_died_is_not_mounted(tree: Tree, place: Place, make: Make) -> None:
    assert isinstance(place, Simulated)
    make("a")
    place.kill()
    try:
        for name, operation in OPERATIONS.items():
            with pytest.raises(NotMounted):
                pytest.fail(f"{name} answered {operation(tree)!r}")
        assert tree.find(A) is None
    finally:
        place.clear()


def test_unmounting_between_two_system_calls_is_a_typed_error(tree: Tree, place: Place) -> None:
    script = "umount --lazy $1"
    if place.name == KERNEL:
        script = "for n in $(seq 6); do umount --lazy $1; mount -t resctrl resctrl $1; done"
    with subprocess.Popen(["sh", "-c", script, "sh", place.root], stderr=subprocess.DEVNULL) as administrator:
        while administrator.poll() is None:
            for operation in OPERATIONS.values():
                with contextlib.suppress(ResctrlError):
                    operation(tree)


def test_mount_points_may_have_any_bytes(tree: Tree, directory: Path, bound: Callable[[str, Path], None]) -> None:
    odd = directory / "a\rb\x0bc\x85d\u2003e\\040f\tg\nh - i"
    odd.mkdir()
    (directory / "source").mkdir()
    bound(str(directory / "source"), odd)
    assert str(odd) in {mount.point for mount in mounts()}
    tree.check_mounted()
    assert tree.classes() == [""]


# The characters that the kernel escapes in mountinfo (fs/proc_namespace.c, show_mountinfo()).
ESCAPED = {character: f"\\{ord(character):03o}" for character in " \t\n\\"}


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_every_mount_point_is_read_as_it_is(name: str) -> None:
    escaped = "".join(ESCAPED.get(character, character) for character in name)
    mount = parse(f"36 35 0:30 / /mnt/{escaped} rw,noatime shared:1 master:2 - resctrl none rw,cdp")
    assert (mount.mount_id, mount.root, mount.point) == (36, "/", f"/mnt/{name}")
    assert (mount.fstype, set(mount.options)) == ("resctrl", {"rw", "cdp"})


def test_the_mount_of_an_open_file() -> None:
    fd = os.open("/proc/self", os.O_RDONLY)
    try:
        mount = mount_of(fd)
    finally:
        os.close(fd)
    assert mount
    assert (mount.point, mount.fstype) == ("/proc", "proc")


def test_the_boot_id_stays_in_a_boot() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


def test_boot_id_is_equal_to_that_of_the_service_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    read = boot_id()
    monkeypatch.setenv("RESCTRLMOND_BOOT_ID", read.replace("-", ""))  # as systemd formats it
    assert boot_id() == read
    monkeypatch.setenv("RESCTRLMOND_BOOT_ID", "0123456789abcdef0123456789abcdef")
    assert boot_id() == "01234567-89ab-cdef-0123-456789abcdef"
