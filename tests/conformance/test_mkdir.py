# SPDX-License-Identifier: Apache-2.0
"""mkdir: where groups can be made, under which names, and what last_cmd_status says of it."""

from __future__ import annotations

import pytest

from .target import Resctrl


def test_mkdir_clears_the_status(fs: Resctrl) -> None:
    """Since 6.16 a mkdir that succeeds clears last_cmd_status; in 6.12 it leaves what was there."""
    said = fs.soil()
    fs.make("mon_groups/a")
    assert fs.status == ("ok\n" if fs.is_6_16 else said)


def test_an_existing_name(fs: Resctrl) -> None:
    """An existing group is EEXIST, and last_cmd_status stays: the VFS says so."""
    fs.make("mon_groups/a")
    said = fs.soil()
    assert fs.mkdir("mon_groups/a") == "EEXIST"
    assert fs.status == said


@pytest.mark.parametrize("name", ["tasks", "info", "mon_data", "mon_groups", "cpus"])
def test_names_of_root_are_taken(fs: Resctrl, name: str) -> None:
    """Root's own names cannot be created again: EEXIST, even if no control group can be created."""
    said = fs.soil()
    assert (fs.mkdir(name), fs.status) == ("EEXIST", said)


def test_a_newline_in_the_name(fs: Resctrl) -> None:
    """A name with a newline is EINVAL, last_cmd_status stays."""
    said = fs.soil()
    assert (fs.mkdir("mon_groups/x\ny"), fs.status) == ("EINVAL", said)


@pytest.mark.parametrize(
    "parent", ["mon_groups/a", "mon_data", "mon_groups/a/mon_data", "mon_data/mon_L3_00", "mon_groups/a/mon_data"]
)
def test_no_group_elsewhere(fs: Resctrl, parent: str) -> None:
    """In a monitoring group and in mon_data a mkdir is EPERM; since 6.16 it clears last_cmd_status."""
    fs.make("mon_groups/a")
    said = fs.soil()
    assert (fs.mkdir(f"{parent}/x"), fs.status) == ("EPERM", "ok\n" if fs.is_6_16 else said)


@pytest.mark.allocation
def test_no_control_group_in_another(fs: Resctrl) -> None:
    """In a control group other than root a mkdir is EPERM."""
    fs.make("class")
    assert fs.mkdir("class/x") == "EPERM"
    assert fs.mkdir("class/mon_data/x") == "EPERM"


@pytest.mark.parametrize("parent", ["info", "info/L3_MON"])
def test_no_group_in_info(fs: Resctrl, parent: str) -> None:
    """In info there is no group to make it in: ENODEV since 6.16, EPERM before; last_cmd_status stays."""
    said = fs.soil()
    assert (fs.mkdir(f"{parent}/x"), fs.status) == ("ENODEV" if fs.is_6_16 else "EPERM", said)


def test_the_forbidden_name(fs: Resctrl) -> None:
    """A monitoring group cannot be called mon_groups: EPERM."""
    said = fs.soil()
    assert (fs.mkdir("mon_groups/mon_groups"), fs.status) == ("EPERM", "ok\n" if fs.is_6_16 else said)


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
def test_other_names(fs: Resctrl, name: str) -> None:
    """Any other name is good for a monitoring group, whatever bytes it has."""
    fs.make(f"mon_groups/{name}")
    assert fs.names("mon_groups") == [name]
    assert fs.read("mon_groups", name, "tasks") == ""


@pytest.mark.parametrize("length", [255, 256, 1000])
def test_long_names(fs: Resctrl, length: int) -> None:
    """kernfs has no NAME_MAX: 256 and 1000 characters are accepted as well as 255."""
    fs.make("mon_groups/" + "n" * length)
    assert fs.names("mon_groups") == ["n" * length]


@pytest.mark.monitoring_only
def test_no_control_groups_without_allocation(fs: Resctrl) -> None:
    """In root a mkdir is EPERM where there is no allocation."""
    said = fs.soil()
    assert (fs.mkdir("class"), fs.status) == ("EPERM", "ok\n" if fs.is_6_16 else said)


@pytest.mark.allocation
def test_no_more_control_groups_than_closids(fs: Resctrl) -> None:
    """Beyond num_closids a mkdir in root is ENOSPC "Out of CLOSIDs"."""
    for number in range(1, fs.num_closids):
        fs.make(f"class{number}")
    fs.write("tasks", "\n")
    assert (fs.mkdir("one-more"), fs.status) == ("ENOSPC", "Out of CLOSIDs\n")
    fs.rmdir("class1")
    fs.make("one-more")


@pytest.mark.allocation
def test_newline_in_a_control_groups_name(fs: Resctrl) -> None:
    """In root a name with a newline is EINVAL as well."""
    assert fs.mkdir("x\ny") == "EINVAL"


@pytest.mark.allocation
def test_a_control_group_has_monitoring_groups(fs: Resctrl) -> None:
    """The same name can be used in two control groups."""
    fs.make("class")
    fs.make("class/mon_groups/a")
    fs.make("mon_groups/a")
    assert (fs.names("class/mon_groups"), fs.names("mon_groups")) == (["a"], ["a"])


def test_a_missing_parent(fs: Resctrl) -> None:
    """In a directory that is not there a mkdir is ENOENT, last_cmd_status stays."""
    said = fs.soil()
    assert (fs.mkdir("mon_groups/none/x"), fs.status) == ("ENOENT", said)
    assert fs.mkdir("tasks/x") == "ENOTDIR"
