# SPDX-License-Identifier: Apache-2.0
"""mkdir: the directories and names of groups, and last_cmd_status."""

from __future__ import annotations

import pytest

from .target import Resctrl


def test_mkdir_clears_the_status(fs: Resctrl) -> None:
    """Since 6.16 a mkdir that succeeds clears last_cmd_status; in 6.12 it does not."""
    status = fs.set_status()
    fs.create("mon_groups/a")
    assert fs.status == ("ok\n" if fs.is_6_16 else status)


def test_an_existing_name(fs: Resctrl) -> None:
    """An existing group is EEXIST, and last_cmd_status stays, because the VFS returns it."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    assert fs.mkdir("mon_groups/a") == "EEXIST"
    assert fs.status == status


@pytest.mark.parametrize("name", ["tasks", "info", "mon_data", "mon_groups", "cpus"])
def test_names_of_files_in_root_are_eexist(fs: Resctrl, name: str) -> None:
    """Root's own names cannot be created again: EEXIST, even if no control group can be created."""
    status = fs.set_status()
    assert (fs.mkdir(name), fs.status) == ("EEXIST", status)


def test_mkdir_refuses_a_newline_in_the_name(fs: Resctrl) -> None:
    """A name with a newline is EINVAL, last_cmd_status stays."""
    status = fs.set_status()
    assert (fs.mkdir("mon_groups/x\ny"), fs.status) == ("EINVAL", status)


@pytest.mark.parametrize(
    "parent", ["mon_groups/a", "mon_data", "mon_groups/a/mon_data", "mon_data/mon_L3_00", "mon_groups/a/mon_data"]
)
def test_no_group_elsewhere(fs: Resctrl, parent: str) -> None:
    """In a monitoring group and in mon_data a mkdir is EPERM; since 6.16 it clears last_cmd_status."""
    fs.create("mon_groups/a")
    status = fs.set_status()
    assert (fs.mkdir(f"{parent}/x"), fs.status) == ("EPERM", "ok\n" if fs.is_6_16 else status)


@pytest.mark.allocation
def test_no_control_group_in_another(fs: Resctrl) -> None:
    """In a control group other than root a mkdir is EPERM."""
    fs.create("class")
    assert fs.mkdir("class/x") == "EPERM"
    assert fs.mkdir("class/mon_data/x") == "EPERM"


@pytest.mark.parametrize("parent", ["info", "info/L3_MON"])
def test_no_group_in_info(fs: Resctrl, parent: str) -> None:
    """In info, mkdir is ENODEV since 6.16 and EPERM before; last_cmd_status stays."""
    status = fs.set_status()
    assert (fs.mkdir(f"{parent}/x"), fs.status) == ("ENODEV" if fs.is_6_16 else "EPERM", status)


def test_a_monitoring_group_cannot_be_named_mon_groups(fs: Resctrl) -> None:
    """A monitoring group cannot be named mon_groups: EPERM."""
    status = fs.set_status()
    assert (fs.mkdir("mon_groups/mon_groups"), fs.status) == ("EPERM", "ok\n" if fs.is_6_16 else status)


@pytest.mark.parametrize(
    "name",
    [
        "mon_data",
        "info",
        "tasks",
        ".hidden",
        "with space",
        "a.b-c:d@e",
        "tab\there",
        "UPPER",
        "\udcff\udcfe",
        "ü",
        "-",
    ],
)
def test_a_monitoring_group_may_have_any_other_name(fs: Resctrl, name: str) -> None:
    """A monitoring group can have any other name, of any bytes."""
    fs.create(f"mon_groups/{name}")
    assert fs.names("mon_groups") == [name]
    assert fs.read("mon_groups", name, "tasks") == ""


@pytest.mark.parametrize("length", [255, 256, 1000])
def test_names_may_be_longer_than_255_characters(fs: Resctrl, length: int) -> None:
    """kernfs has no NAME_MAX: 256 and 1000 characters are accepted as well as 255."""
    fs.create("mon_groups/" + "n" * length)
    assert fs.names("mon_groups") == ["n" * length]


@pytest.mark.monitoring_only
def test_no_control_groups_without_allocation(fs: Resctrl) -> None:
    """In root, mkdir is EPERM without allocation."""
    status = fs.set_status()
    assert (fs.mkdir("class"), fs.status) == ("EPERM", "ok\n" if fs.is_6_16 else status)


@pytest.mark.allocation
def test_no_more_control_groups_than_closids(fs: Resctrl) -> None:
    """Beyond num_closids a mkdir in root is ENOSPC "Out of CLOSIDs"."""
    for number in range(1, fs.num_closids):
        fs.create(f"class{number}")
    fs.write("tasks", "\n")
    assert (fs.mkdir("one-more"), fs.status) == ("ENOSPC", "Out of CLOSIDs\n")
    fs.rmdir("class1")
    fs.create("one-more")


@pytest.mark.allocation
def test_newline_in_a_control_groups_name(fs: Resctrl) -> None:
    """In root a name with a newline is EINVAL as well."""
    assert fs.mkdir("x\ny") == "EINVAL"


@pytest.mark.allocation
def test_a_control_group_has_monitoring_groups(fs: Resctrl) -> None:
    """The same name can be used in two control groups."""
    fs.create("class")
    fs.create("class/mon_groups/a")
    fs.create("mon_groups/a")
    assert (fs.names("class/mon_groups"), fs.names("mon_groups")) == (["a"], ["a"])


def test_mkdir_in_a_missing_directory_is_enoent(fs: Resctrl) -> None:
    """In a missing directory, mkdir is ENOENT, and last_cmd_status stays."""
    status = fs.set_status()
    assert (fs.mkdir("mon_groups/none/x"), fs.status) == ("ENOENT", status)
    assert fs.mkdir("tasks/x") == "ENOTDIR"
