# SPDX-License-Identifier: Apache-2.0
"""The CPUs of a group: which masks are taken, and where the CPUs come from."""

from __future__ import annotations

import os

import pytest

from .actors import outcome
from .target import Resctrl

pytestmark = pytest.mark.kernel_only("the simulator lets nobody write to the masks of CPUs")


@pytest.fixture
def a(fs: Resctrl) -> str:
    return fs.make("mon_groups/a")


def cpus(fs: Resctrl, group: str) -> str:
    return fs.read(group, "cpus_list")


def test_a_cpu_goes_to_a_monitoring_group_and_stays_in_root(fs: Resctrl, a: str) -> None:
    """A monitoring group takes a CPU of its control group, which has it still."""
    before = cpus(fs, "")
    assert fs.tries(f"{a}/cpus_list", "0\n") == ("OK", "ok\n")
    assert (cpus(fs, a), cpus(fs, "")) == ("0\n", before)
    assert int(fs.read(a, "cpus").replace(",", ""), 16) == 1


def test_an_empty_mask_gives_the_cpus_back(fs: Resctrl, a: str) -> None:
    """An empty list leaves the group without a CPU."""
    fs.write(f"{a}/cpus_list", "0\n")
    assert fs.tries(f"{a}/cpus_list", "\n") == ("OK", "ok\n")
    assert cpus(fs, a) == "\n"


@pytest.mark.parametrize(
    ("name", "text", "result"),
    [
        ("cpus_list", "zz\n", "EINVAL"),
        ("cpus_list", "9999\n", "ERANGE"),
        ("cpus_list", "5000000000\n", "EOVERFLOW"),
        ("cpus", "zz\n", "EINVAL"),
        ("cpus", "0-1\n", "EINVAL"),
        ("cpus", "ffffffff,ffffffff,ffffffff,ffffffff\n", "EOVERFLOW"),
    ],
)
def test_bad_masks(fs: Resctrl, a: str, name: str, text: str, result: str) -> None:
    """What is no mask or no list, or has CPUs that cannot be, is refused."""
    assert fs.tries(f"{a}/{name}", text) == (result, "Bad CPU list/mask\n")


def test_root_keeps_its_cpus(fs: Resctrl) -> None:
    """CPUs cannot be taken from root by writing to root."""
    assert fs.tries("cpus_list", "\n") == ("EINVAL", "Can't drop CPUs from default group\n")


def test_a_cpu_is_in_one_monitoring_group(fs: Resctrl, a: str) -> None:
    """Another group that takes the CPU takes it away from the first."""
    fs.write(f"{a}/cpus_list", "0\n")
    b = fs.make("mon_groups/b")
    fs.write(f"{b}/cpus_list", "0\n")
    assert (cpus(fs, a), cpus(fs, b)) == ("\n", "0\n")


@pytest.mark.allocation
def test_a_control_group_takes_cpus_from_root(fs: Resctrl) -> None:
    """A control group has its CPUs for itself; rmdir gives them back to root."""
    before = cpus(fs, "")
    fs.make("class")
    assert fs.tries("class/cpus_list", "0\n") == ("OK", "ok\n")
    assert cpus(fs, "class") == "0\n"
    assert cpus(fs, "") != before
    fs.rmdir("class")
    assert cpus(fs, "") == before


@pytest.mark.allocation
def test_a_monitoring_group_takes_only_its_control_groups(fs: Resctrl) -> None:
    """A CPU of another control group is refused."""
    fs.make("class")
    fs.make("class/mon_groups/m")
    assert fs.tries("class/mon_groups/m/cpus_list", "0\n") == (
        "EINVAL",
        "Can only add CPUs to mongroup that belong to parent\n",
    )


@pytest.mark.allocation
def test_a_group_with_cpus_stays_with_its_parent(fs: Resctrl, a: str) -> None:
    """A group that monitors CPUs cannot move to another control group, and can get a new name."""
    fs.make("class")
    fs.write(f"{a}/cpus_list", "0\n")
    assert outcome(lambda: os.rename(fs.path(a), fs.path("class/mon_groups/a"))) == "EPERM"
    assert fs.status == "Cannot move a MON group that monitors CPUs\n"
    os.rename(fs.path(a), fs.path("mon_groups/b"))
    assert cpus(fs, "mon_groups/b") == "0\n"


def test_a_removed_group_gives_its_cpus_back(fs: Resctrl, a: str) -> None:
    """After rmdir another group can take the CPU."""
    fs.write(f"{a}/cpus_list", "0\n")
    fs.rmdir(a)
    b = fs.make("mon_groups/b")
    assert cpus(fs, b) == "\n"
    fs.write(f"{b}/cpus_list", "0\n")
    assert cpus(fs, b) == "0\n"
