# SPDX-License-Identifier: Apache-2.0
"""Directories and files, with their modes, owners and contents."""

from __future__ import annotations

import os
import stat

import pytest

from .actors import Actor, outcome
from .target import Resctrl

EVERY_GROUP = {"tasks", "cpus", "cpus_list", "mon_data"}
CONTROL_GROUP = {*EVERY_GROUP, "mon_groups", "schemata", "mode", "size"}


def mode(fs: Resctrl, path: str) -> str:
    return f"{os.lstat(fs.path(path)).st_mode:o}"


def test_root_has_the_files_of_a_control_group_and_info(fs: Resctrl) -> None:
    """Root is the default control group: it has a control group's files and ``info``."""
    # The files of allocation too if the machine only monitors (rdt_get_tree() adds them on every machine).
    assert set(fs.names()) == CONTROL_GROUP | {"info"}


def test_a_monitoring_group_has_four_entries(fs: Resctrl) -> None:
    """A monitoring group has tasks, cpus, cpus_list and mon_data, and no mon_groups."""
    assert set(fs.names(fs.create("mon_groups/a"))) == EVERY_GROUP


@pytest.mark.allocation
def test_a_control_group_has_roots_files_without_info(fs: Resctrl) -> None:
    """A control group has the files of root except ``info``."""
    assert set(fs.names(fs.create("class"))) == CONTROL_GROUP


def test_domains_have_one_file_per_event(fs: Resctrl) -> None:
    """``mon_data`` has mon_L3_NN with at least two digits, and in it a file for each line of mon_features."""
    fs.create("mon_groups/a")
    for group in ("", "mon_groups/a"):
        domains = fs.names(group, "mon_data")
        assert domains == [f"mon_L3_{number:02d}" for number in range(len(domains))]
        assert domains
        for domain in domains:
            assert fs.names(group, "mon_data", domain) == sorted(fs.events)


@pytest.mark.two_domains
def test_every_group_has_every_domain(fs: Resctrl) -> None:
    """With two caches, each group has a directory for each of them."""
    assert fs.names(fs.create("mon_groups/a"), "mon_data") == ["mon_L3_00", "mon_L3_01"] == fs.domains
    assert fs.names(fs.create("class"), "mon_data") == ["mon_L3_00", "mon_L3_01"]


def test_info_has_the_monitored_resources(fs: Resctrl) -> None:
    """``info`` has last_cmd_status, L3_MON, and L3 if there is allocation."""
    assert set(fs.names("info")) == {"last_cmd_status", "L3_MON"} | ({"L3"} if fs.can_allocate else set())


def test_info_of_monitoring(fs: Resctrl) -> None:
    """``L3_MON`` has num_rmids, mon_features, mbm_assign_mode since 6.18, and the threshold only with occupancy."""
    found = set(fs.names("info/L3_MON"))
    wanted = {"num_rmids", "mon_features"} | ({"mbm_assign_mode"} if fs.is_6_16 else set())
    # The file of the threshold exists without occupancy too: fs/resctrl gives it to every L3 that monitors.
    assert found == wanted | {"max_threshold_occupancy"}


@pytest.mark.allocation
def test_info_of_allocation(fs: Resctrl) -> None:
    """``L3`` has six files."""
    wanted = ["bit_usage", "cbm_mask", "min_cbm_bits", "num_closids", "shareable_bits", "sparse_masks"]
    assert fs.names("info/L3") == wanted


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("", "40555"),
        ("tasks", "100644"),
        ("cpus", "100644"),
        ("cpus_list", "100644"),
        ("info", "40555"),
        ("info/L3_MON", "40555"),
        ("mon_groups", "40555"),
        ("mon_data", "40555"),
        ("mon_data/mon_L3_00", "40555"),
        ("mon_data/mon_L3_00/mbm_total_bytes", "100444"),
        ("info/last_cmd_status", "100444"),
        ("info/L3_MON/num_rmids", "100444"),
        ("info/L3_MON/mon_features", "100444"),
        ("info/L3_MON/max_threshold_occupancy", "100644"),
        ("mon_groups/a", "40755"),
        ("mon_groups/a/tasks", "100644"),
        ("mon_groups/a/cpus", "100644"),
        ("mon_groups/a/mon_data", "40755"),
        ("mon_groups/a/mon_data/mon_L3_00", "40755"),
        ("mon_groups/a/mon_data/mon_L3_00/mbm_local_bytes", "100444"),
    ],
)
def test_each_file_has_its_mode(fs: Resctrl, path: str, wanted: str) -> None:
    """Files have the mode of the kernel's table; root's directories have 0555, a group's the mode of mkdir."""
    fs.create("mon_groups/a")
    assert mode(fs, path) == wanted


@pytest.mark.allocation
@pytest.mark.parametrize(("name", "wanted"), [("schemata", "100644"), ("mode", "100644"), ("size", "100444")])
def test_modes_of_allocation_files(fs: Resctrl, name: str, wanted: str) -> None:
    """schemata and mode can be written, size cannot."""
    assert mode(fs, fs.create("class") + "/" + name) == wanted


def test_mkdirs_mode_counts_for_directories_only(fs: Resctrl) -> None:
    """A group made with mode 0700 has it, mon_data and the domains inherit it, the files do not."""
    os.mkdir(fs.path("mon_groups/a"), 0o700)
    modes = [mode(fs, f"mon_groups/a/{name}") for name in ("", "mon_data", "mon_data/mon_L3_00", "tasks")]
    assert modes == ["40700", "40700", "40700", "100644"]


def test_mode_0000_is_usable_by_root(fs: Resctrl, actor: Actor) -> None:
    """A group made with mode 0 works for root."""
    os.mkdir(fs.path("mon_groups/a"), 0)
    assert mode(fs, "mon_groups/a") == "40000"
    fs.write("mon_groups/a/tasks", actor.pid)
    assert fs.members("mon_groups/a") == {actor.pid}


def test_mkdir_applies_the_umask(fs: Resctrl) -> None:
    """mkdir applies the umask to the mode."""
    before = os.umask(0o027)
    try:
        os.mkdir(fs.path("mon_groups/a"), 0o777)
    finally:
        os.umask(before)
    assert mode(fs, "mon_groups/a") == "40750"


def test_all_sizes_are_0(fs: Resctrl) -> None:
    """Every file and directory has size 0, though there is something to read."""
    assert fs.read("info/L3_MON/num_rmids")
    for path in ("", "tasks", "cpus", "info/L3_MON/num_rmids", "mon_data/mon_L3_00/mbm_total_bytes", "mon_groups"):
        assert os.lstat(fs.path(path)).st_size == 0, path


def test_directories_count_their_directories(fs: Resctrl) -> None:
    """A directory has two links and one more for each directory in it."""
    before = os.lstat(fs.path("mon_groups")).st_nlink
    fs.create("mon_groups/a")
    assert (before, os.lstat(fs.path("mon_groups")).st_nlink) == (2, 3)
    assert os.lstat(fs.path("mon_groups/a")).st_nlink == 3
    assert os.lstat(fs.path("mon_groups/a/tasks")).st_nlink == 1


def test_groups_belong_to_their_creator(fs: Resctrl) -> None:
    """All nodes of a new group have the fsuid and fsgid of its creator."""
    os.setegid(4242)
    try:
        fs.create("mon_groups/a")
    finally:
        os.setegid(0)
    for name in ("", "tasks", "mon_data", "mon_data/mon_L3_00/mbm_total_bytes"):
        found = os.lstat(fs.path("mon_groups/a", name))
        assert (found.st_uid, found.st_gid) == (0, 4242), name


def test_chmod_chown_and_utime_persist(fs: Resctrl) -> None:
    """chmod, chown and utime work on any node, and last, also after a rename."""
    fs.create("mon_groups/a")
    os.chmod(fs.path("mon_groups/a"), 0o711)
    os.chown(fs.path("mon_groups/a"), 17, 18)
    os.utime(fs.path("mon_groups/a"), ns=(5, 1_700_000_000_123_456_789))
    os.chmod(fs.path("mon_groups/a/tasks"), 0o600)
    os.rename(fs.path("mon_groups/a"), fs.path("mon_groups/b"))
    found = os.lstat(fs.path("mon_groups/b"))
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o711, 17, 18)
    assert found.st_mtime_ns == 1_700_000_000_123_456_789
    assert mode(fs, "mon_groups/b/tasks") == "100600"


def test_a_group_created_again_has_default_attributes(fs: Resctrl) -> None:
    """A group created again does not have the attributes of the removed one."""
    fs.create("mon_groups/a")
    os.utime(fs.path("mon_groups/a"), ns=(5, 5))
    os.chmod(fs.path("mon_groups/a"), 0o700)
    fs.rmdir("mon_groups/a")
    fs.create("mon_groups/a")
    assert os.lstat(fs.path("mon_groups/a")).st_mtime_ns != 5
    assert mode(fs, "mon_groups/a") == "40755"


def test_a_group_inside_changes_the_mtime_of_mon_groups(fs: Resctrl) -> None:
    """mkdir and rmdir in mon_groups change its mtime."""
    os.utime(fs.path("mon_groups"), ns=(5, 5))
    fs.create("mon_groups/a")
    assert os.lstat(fs.path("mon_groups")).st_mtime_ns != 5
    os.utime(fs.path("mon_groups"), ns=(5, 5))
    fs.rmdir("mon_groups/a")
    assert os.lstat(fs.path("mon_groups")).st_mtime_ns != 5


def test_user_attributes_are_refused(fs: Resctrl) -> None:
    """Extended attributes of the class user cannot be set."""
    fs.create("mon_groups/a")
    assert outcome(lambda: os.setxattr(fs.path("mon_groups/a"), "user.mine", b"1")) == "ENOTSUP"


def test_numbers_end_with_a_newline(fs: Resctrl) -> None:
    """Files with one number have that number and a newline."""
    for path in ("info/L3_MON/num_rmids", "info/L3_MON/max_threshold_occupancy"):
        text = fs.read(path)
        assert text == f"{int(text)}\n"


def test_mon_features_are_lines(fs: Resctrl) -> None:
    """mon_features has one event per line, llc_occupancy before the traffic of memory."""
    known = ["llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"]
    assert fs.read("info/L3_MON/mon_features") == "".join(f"{name}\n" for name in known if name in fs.events)
    assert set(fs.events) <= set(known)


def test_assign_mode_without_assignable_counters(fs: Resctrl) -> None:
    """If counters need no assignment, mbm_assign_mode (6.18 and newer) reads ``[default]``."""
    if fs.is_6_16:
        assert fs.read("info/L3_MON/mbm_assign_mode") == "[default]\n"


@pytest.mark.parametrize(
    ("text", "result", "status"),
    [
        ("default\n", "OK", "ok\n"),
        ("default\0zz\n", "OK", "ok\n"),
        ("mbm_event\n", "EINVAL", "mbm_event mode is not supported\n"),
        ("foo\n", "EINVAL", "Unsupported assign mode\n"),
        ("\n", "EINVAL", "Unsupported assign mode\n"),
        ("default", "EINVAL", "mbm_assign_mode: Invalid input\n"),
    ],
)
def test_commands_of_the_assign_mode(fs: Resctrl, text: str, result: str, status: str) -> None:
    """If counters need no assignment, the mode is the default one, and a write of another mode has a message."""
    if fs.is_6_16:
        fs.set_status()
        assert fs.try_write("info/L3_MON/mbm_assign_mode", text) == (result, status)
        assert fs.read("info/L3_MON/mbm_assign_mode") == "[default]\n"
