# SPDX-License-Identifier: Apache-2.0
"""L3 domains that go with their last CPU and come back with the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .actors import outcome
from .target import Resctrl

pytestmark = [
    pytest.mark.two_domains,
    pytest.mark.kernel_only(
        "CPUs of the host cannot be taken away for a test; tests/sim switches the domains itself"
    ),
]
SECOND = "mon_data/mon_L3_01"


def switch(cpu: int, online: int) -> None:
    Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text(str(online))


@pytest.fixture
def second() -> Iterator[Callable[[int], None]]:
    """Switches the CPUs of the second cache off (0) or on (1)."""
    cpus = [int(word) for word in _shared_with(os.cpu_count() or 1)]

    def both(online: int) -> None:
        for cpu in cpus:
            switch(cpu, online)

    yield both
    both(1)


def _shared_with(count: int) -> list[str]:
    """The CPUs that share an L3 with the last one."""
    text = Path(f"/sys/devices/system/cpu/cpu{count - 1}/cache/index3/shared_cpu_list").read_text().strip()
    low, _, high = text.partition("-")
    return [str(cpu) for cpu in range(int(low), int(high or low) + 1)]


def test_a_domain_goes_with_its_last_cpu(fs: Resctrl, second: Callable[[int], None]) -> None:
    """When the last CPU of a cache goes offline, its directory goes from every group."""
    fs.make("mon_groups/a")
    second(0)
    assert fs.names("mon_data") == fs.names("mon_groups/a/mon_data") == ["mon_L3_00"]


def test_a_domain_comes_back(fs: Resctrl, second: Callable[[int], None]) -> None:
    """When a CPU comes back, the directory does, in old and new groups, and its traffic begins at 0."""
    fs.make("mon_groups/a")
    second(0)
    fs.make("mon_groups/b")
    assert fs.names("mon_groups/b/mon_data") == ["mon_L3_00"]
    second(1)
    for group in ("mon_groups/a", "mon_groups/b"):
        assert fs.names(group, "mon_data") == ["mon_L3_00", "mon_L3_01"]
        assert fs.read(group, SECOND, "mbm_total_bytes") == "0\n"


def test_a_domain_that_comes_back_is_another_directory(fs: Resctrl, second: Callable[[int], None]) -> None:
    """Its inode tells that its counters began anew; that of a domain that stayed online is the same."""
    fs.make("mon_groups/a")

    def inodes() -> list[int]:
        return [os.stat(fs.path("mon_groups/a/mon_data", domain)).st_ino for domain in ("mon_L3_00", "mon_L3_01")]

    before = inodes()
    second(0)
    second(1)
    after = inodes()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_one_cpu_is_enough(fs: Resctrl, second: Callable[[int], None]) -> None:
    """While one CPU of a cache is online, nothing changes."""
    switch((os.cpu_count() or 1) - 1, 0)
    assert fs.domains == ["mon_L3_00", "mon_L3_01"]


def test_old_descriptors_of_a_domain(fs: Resctrl, second: Callable[[int], None]) -> None:
    """An open counter of a domain that has gone is ENODEV, also when the domain is back."""
    fs.make("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a", SECOND, "mbm_total_bytes"), os.O_RDONLY)
    try:
        assert outcome(lambda: os.pread(fd, 64, 0)) == "OK"
        second(0)
        assert outcome(lambda: os.pread(fd, 64, 0)) == "ENODEV"
        second(1)
        assert outcome(lambda: os.pread(fd, 64, 0)) == "ENODEV"
    finally:
        os.close(fd)
    assert fs.read("mon_groups/a", SECOND, "mbm_total_bytes") == "0\n"


def test_an_offline_cpu_leaves_its_group(fs: Resctrl, second: Callable[[int], None]) -> None:
    """A CPU that comes back belongs to root alone."""
    cpu = (os.cpu_count() or 1) - 1
    fs.make("mon_groups/a")
    fs.write("mon_groups/a/cpus_list", cpu)
    switch(cpu, 0)
    assert fs.read("mon_groups/a/cpus_list") == "\n"
    assert fs.tries("mon_groups/a/cpus_list", cpu) == ("EINVAL", "Can only assign online CPUs\n")
    switch(cpu, 1)
    assert fs.read("mon_groups/a/cpus_list") == "\n"
    assert fs.read("cpus_list") == f"0-{cpu}\n"


def test_the_other_domain_is_not_disturbed(fs: Resctrl, second: Callable[[int], None]) -> None:
    """An open counter of the domain that stays goes on working."""
    fs.make("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes"), os.O_RDONLY)
    try:
        second(0)
        assert outcome(lambda: os.pread(fd, 64, 0)) == "OK"
    finally:
        os.close(fd)


@pytest.mark.limbo
def test_limbo_does_not_wait_for_a_domain_that_has_gone(fs: Resctrl, second: Callable[[int], None]) -> None:
    """Freed RMIDs come back though one of their domains is offline."""
    fs.fill()
    second(0)
    fs.rmdir("mon_groups/fill-0")
    fs.make("mon_groups/one-more")
