# SPDX-License-Identifier: Apache-2.0
"""CPUs that go offline and come back; L3 domains that go with their last CPU and come back with the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from .actors import outcome
from .target import Resctrl

pytestmark = pytest.mark.two_domains
SECOND = "mon_data/mon_L3_01"
Switch = Callable[[bool], None]


@pytest.fixture
def second(fs: Resctrl) -> Iterator[Switch]:
    """Switches the CPUs of the second cache off or on."""
    cpus = fs.last_cache

    def all_of_it(online: bool) -> None:
        fs.switch(online, *cpus)

    yield all_of_it
    all_of_it(True)


@pytest.fixture
def last(fs: Resctrl) -> Iterator[Switch]:
    """Switches one CPU off or on, the last one."""
    yield lambda online: fs.switch(online, fs.cpus - 1)
    fs.switch(True, fs.cpus - 1)


def test_a_domain_goes_with_its_last_cpu(fs: Resctrl, second: Switch) -> None:
    """When the last CPU of a cache goes offline, its directory goes from every group."""
    fs.make("mon_groups/a")
    second(False)
    assert fs.names("mon_data") == fs.names("mon_groups/a/mon_data") == ["mon_L3_00"]


def test_a_domain_comes_back(fs: Resctrl, second: Switch) -> None:
    """When a CPU comes back, the directory does, in old and new groups, and its traffic begins at 0."""
    fs.make("mon_groups/a")
    second(False)
    fs.make("mon_groups/b")
    assert fs.names("mon_groups/b/mon_data") == ["mon_L3_00"]
    second(True)
    for group in ("mon_groups/a", "mon_groups/b"):
        assert fs.names(group, "mon_data") == ["mon_L3_00", "mon_L3_01"]
        assert fs.read(group, SECOND, "mbm_total_bytes") == "0\n"


def test_a_domain_that_comes_back_is_another_directory(fs: Resctrl, second: Switch) -> None:
    """Its inode tells that its counters began anew; that of a domain that stayed online is the same."""
    fs.make("mon_groups/a")

    def inodes() -> list[int]:
        return [os.stat(fs.path("mon_groups/a/mon_data", domain)).st_ino for domain in ("mon_L3_00", "mon_L3_01")]

    before = inodes()
    second(False)
    second(True)
    after = inodes()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_one_cpu_is_enough(fs: Resctrl, last: Switch) -> None:
    """While one CPU of a cache is online, nothing changes."""
    last(False)
    assert fs.domains == ["mon_L3_00", "mon_L3_01"]


def test_old_descriptors_of_a_domain(fs: Resctrl, second: Switch) -> None:
    """An open counter of a domain that has gone is ENODEV, also when the domain is back."""
    fs.make("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a", SECOND, "mbm_total_bytes"), os.O_RDONLY)
    try:
        assert outcome(lambda: os.pread(fd, 64, 0)) == "OK"
        second(False)
        assert outcome(lambda: os.pread(fd, 64, 0)) == "ENODEV"
        second(True)
        assert outcome(lambda: os.pread(fd, 64, 0)) == "ENODEV"
    finally:
        os.close(fd)
    assert fs.read("mon_groups/a", SECOND, "mbm_total_bytes") == "0\n"


def test_an_offline_cpu_leaves_its_group(fs: Resctrl, last: Switch) -> None:
    """A CPU that goes offline is in no group, and none can take it; when it comes back it belongs to root alone."""
    cpu = fs.cpus - 1
    fs.make("mon_groups/a")
    fs.write("mon_groups/a/cpus_list", cpu)
    last(False)
    assert fs.read("mon_groups/a/cpus_list") == "\n"
    assert fs.read("cpus_list") == f"0-{cpu - 1}\n"
    assert fs.tries("mon_groups/a/cpus_list", cpu) == ("EINVAL", "Can only assign online CPUs\n")
    last(True)
    assert fs.read("mon_groups/a/cpus_list") == "\n"
    assert fs.read("cpus_list") == f"0-{cpu}\n"


def test_an_offline_cpu_leaves_its_class(fs: Resctrl, last: Switch) -> None:
    """A CPU of a control group and of a monitoring group in it comes back to root."""
    cpu = fs.cpus - 1
    fs.make("class")
    fs.make("class/mon_groups/m")
    fs.write("class/cpus_list", f"0,{cpu}")
    fs.write("class/mon_groups/m/cpus_list", f"0,{cpu}")
    last(False)
    assert (fs.read("class/cpus_list"), fs.read("class/mon_groups/m/cpus_list")) == ("0\n", "0\n")
    last(True)
    assert (fs.read("class/cpus_list"), fs.read("class/mon_groups/m/cpus_list")) == ("0\n", "0\n")
    assert fs.read("cpus_list") == f"1-{cpu}\n"


def test_root_need_not_name_offline_cpus(fs: Resctrl, last: Switch) -> None:
    """Root keeps the CPUs that are online; the width of ``cpus`` stays that of all."""
    wide = len(fs.read("cpus"))
    last(False)
    assert len(fs.read("cpus")) == wide
    assert fs.tries("cpus_list", f"0-{fs.cpus - 2}") == ("OK", "ok\n")
    assert fs.tries("cpus_list", f"0-{fs.cpus - 1}") == ("EINVAL", "Can only assign online CPUs\n")


def test_the_other_domain_is_not_disturbed(fs: Resctrl, second: Switch) -> None:
    """An open counter of the domain that stays goes on working."""
    fs.make("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes"), os.O_RDONLY)
    try:
        second(False)
        assert outcome(lambda: os.pread(fd, 64, 0)) == "OK"
    finally:
        os.close(fd)


def test_a_domain_has_its_masks_only_while_it_is_there(fs: Resctrl, second: Switch) -> None:
    """schemata, size and bit_usage leave an offline cache out; when it comes back, all of it is everybody's."""
    fs.make("class")
    full = fs.read("info/L3/cbm_mask").strip()
    fs.write("class/schemata", "L3:0=1;1=1\n")
    second(False)
    assert fs.read("class/schemata") == "L3:0=1\n"
    assert [fs.read(name).count("=") for name in ("schemata", "class/size", "info/L3/bit_usage")] == [1, 1, 1]
    assert fs.tries("class/schemata", "L3:1=1\n") == ("EINVAL", "ok\n")
    second(True)
    assert fs.read("class/schemata") == f"L3:0=1;1={full}\n"


@pytest.mark.limbo
def test_limbo_does_not_wait_for_a_domain_that_has_gone(fs: Resctrl, second: Switch) -> None:
    """Freed RMIDs come back though one of their domains is offline."""
    fs.fill()
    second(False)
    fs.rmdir("mon_groups/fill-0")
    fs.make("mon_groups/one-more")
