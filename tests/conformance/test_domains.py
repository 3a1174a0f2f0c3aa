# SPDX-License-Identifier: Apache-2.0
"""CPUs that go offline and return; L3 domains that disappear with their last CPU and return with the first."""

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
    """Return a function that takes the CPUs of the second cache offline or online."""
    cpus = fs.last_cache

    def all_of_it(online: bool) -> None:
        fs.switch(online, *cpus)

    yield all_of_it
    all_of_it(True)


@pytest.fixture
def last(fs: Resctrl) -> Iterator[Switch]:
    """Return a function that takes the last CPU offline or online."""
    yield lambda online: fs.switch(online, fs.cpus - 1)
    fs.switch(True, fs.cpus - 1)


def test_a_domain_disappears_with_its_last_cpu(fs: Resctrl, second: Switch) -> None:
    """When the last CPU of a cache goes offline, its directory disappears from each group."""
    fs.create("mon_groups/a")
    second(False)
    assert fs.names("mon_data") == fs.names("mon_groups/a/mon_data") == ["mon_L3_00"]


def test_a_domain_returns_with_its_first_cpu(fs: Resctrl, second: Switch) -> None:
    """When a CPU comes back, the directory does, in old and new groups, and its traffic begins at 0."""
    fs.create("mon_groups/a")
    second(False)
    fs.create("mon_groups/b")
    assert fs.names("mon_groups/b/mon_data") == ["mon_L3_00"]
    second(True)
    for group in ("mon_groups/a", "mon_groups/b"):
        assert fs.names(group, "mon_data") == ["mon_L3_00", "mon_L3_01"]
        assert fs.read(group, SECOND, "mbm_total_bytes") == "0\n"


def test_a_domain_that_returns_has_a_new_inode(fs: Resctrl, second: Switch) -> None:
    """Its new inode shows that its counters began again; a domain that stayed online keeps its inode."""
    fs.create("mon_groups/a")

    def inodes() -> list[int]:
        return [os.stat(fs.path("mon_groups/a/mon_data", domain)).st_ino for domain in ("mon_L3_00", "mon_L3_01")]

    before = inodes()
    second(False)
    second(True)
    after = inodes()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_domain_stays_while_one_cpu_is_online(fs: Resctrl, last: Switch) -> None:
    """While one CPU of a cache is online, nothing changes."""
    last(False)
    assert fs.domains == ["mon_L3_00", "mon_L3_01"]


def test_old_descriptors_of_a_domain(fs: Resctrl, second: Switch) -> None:
    """An open counter of a domain that has gone is ENODEV, also when the domain has returned."""
    fs.create("mon_groups/a")
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
    """An offline CPU is in no group, and no group can get it; when it returns, only root has it."""
    cpu = fs.cpus - 1
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/cpus_list", cpu)
    last(False)
    assert fs.read("mon_groups/a/cpus_list") == "\n"
    assert fs.read("cpus_list") == f"0-{cpu - 1}\n"
    assert fs.try_write("mon_groups/a/cpus_list", cpu) == ("EINVAL", "Can only assign online CPUs\n")
    last(True)
    assert fs.read("mon_groups/a/cpus_list") == "\n"
    assert fs.read("cpus_list") == f"0-{cpu}\n"


def test_an_offline_cpu_leaves_its_class(fs: Resctrl, last: Switch) -> None:
    """A CPU of a control group and of a monitoring group in it returns to root."""
    cpu = fs.cpus - 1
    fs.create("class")
    fs.create("class/mon_groups/m")
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
    assert fs.try_write("cpus_list", f"0-{fs.cpus - 2}") == ("OK", "ok\n")
    assert fs.try_write("cpus_list", f"0-{fs.cpus - 1}") == ("EINVAL", "Can only assign online CPUs\n")


def test_an_open_counter_of_the_other_domain_still_works(fs: Resctrl, second: Switch) -> None:
    """An open counter of the domain that stays online still works."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes"), os.O_RDONLY)
    try:
        second(False)
        assert outcome(lambda: os.pread(fd, 64, 0)) == "OK"
    finally:
        os.close(fd)


def test_an_offline_domain_has_no_masks(fs: Resctrl, second: Switch) -> None:
    """schemata, size and bit_usage leave an offline cache out; when it returns, each class has the full mask."""
    fs.create("class")
    full = fs.read("info/L3/cbm_mask").strip()
    fs.write("class/schemata", "L3:0=1;1=1\n")
    second(False)
    assert fs.read("class/schemata") == "L3:0=1\n"
    assert [fs.read(name).count("=") for name in ("schemata", "class/size", "info/L3/bit_usage")] == [1, 1, 1]
    assert fs.try_write("class/schemata", "L3:1=1\n") == ("EINVAL", "ok\n")
    second(True)
    assert fs.read("class/schemata") == f"L3:0=1;1={full}\n"


@pytest.mark.limbo
def test_limbo_does_not_wait_for_an_offline_domain(fs: Resctrl, second: Switch) -> None:
    """Freed RMIDs can be used again although one of their domains is offline."""
    fs.fill()
    second(False)
    fs.rmdir("mon_groups/fill-0")
    fs.create("mon_groups/one-more")
