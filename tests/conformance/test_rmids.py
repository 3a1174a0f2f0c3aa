# SPDX-License-Identifier: Apache-2.0
"""The pool of RMIDs: the number of groups, exhaustion, and the reuse of freed RMIDs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from .actors import outcome, wait_until
from .target import SHORT_LIMBO, Resctrl

OUT = "Out of RMIDs\n"


@pytest.fixture
def full(fs: Resctrl) -> Resctrl:
    """Return a resctrl without a free RMID, and without one in limbo."""
    fs.fill()
    return fs


@pytest.fixture
def stuck(full: Resctrl) -> Iterator[Resctrl]:
    """Return a full resctrl with a threshold of 0: no freed RMID becomes clean."""
    before = full.read("info/L3_MON/max_threshold_occupancy")
    full.write("info/L3_MON/max_threshold_occupancy", 0)
    yield full
    full.write("info/L3_MON/max_threshold_occupancy", before)


def mkdir(fs: Resctrl, name: str) -> tuple[str, str]:
    return outcome(lambda: os.mkdir(fs.path("mon_groups", name))), fs.status


def test_num_rmids_counts_root(fs: Resctrl) -> None:
    """There can be num_rmids - 1 groups besides root."""
    assert fs.fill() == fs.num_rmids - 1


@pytest.mark.allocation
def test_a_control_group_needs_an_rmid(fs: Resctrl) -> None:
    """Control groups and monitoring groups take RMIDs from one pool."""
    fs.create("class")
    fs.create("class/mon_groups/a")
    assert fs.fill() == fs.num_rmids - 3


def test_mkdir_without_a_free_rmid_is_enospc(full: Resctrl) -> None:
    """Without a free RMID, mkdir is ENOSPC "Out of RMIDs"."""
    full.write("tasks", "\n")
    assert mkdir(full, "one-more") == ("ENOSPC", OUT)
    assert not os.path.exists(full.path("mon_groups/one-more"))


def test_each_mkdir_without_a_free_rmid_has_a_message(full: Resctrl) -> None:
    """Since 6.16 each mkdir has its own message; 6.12 appends them."""
    full.write("tasks", "\n")
    mkdir(full, "one-more")
    assert mkdir(full, "one-more") == ("ENOSPC", OUT if full.is_6_16 else OUT * 2)


@pytest.mark.allocation
def test_no_control_group_without_an_rmid(full: Resctrl) -> None:
    """A control group needs an RMID too: ENOSPC "Out of RMIDs", and its CLOSID is free again."""
    full.write("tasks", "\n")
    assert (full.mkdir("class"), full.status) == ("ENOSPC", OUT)
    full.rmdir("mon_groups/fill-0")
    full.create("class")


def test_an_existing_name_when_full(full: Resctrl) -> None:
    """An existing name is EEXIST, also without a free RMID."""
    assert mkdir(full, "fill-0")[0] == "EEXIST"


@pytest.mark.limbo
def test_mkdir_is_ebusy_while_rmids_are_in_limbo(stuck: Resctrl) -> None:
    """While freed RMIDs are in limbo mkdir is EBUSY, with the same message as ENOSPC."""
    stuck.rmdir("mon_groups/fill-0")
    stuck.write("tasks", "\n")
    assert mkdir(stuck, "one-more") == ("EBUSY", OUT)


@pytest.mark.limbo
def test_limbo_lasts_while_the_threshold_is_0(stuck: Resctrl) -> None:
    """An RMID that holds at least the threshold is never clean: at 0, none becomes free."""
    stuck.rmdir("mon_groups/fill-0")
    # Longer than the worker that looks every second.
    time.sleep(2.5)
    assert mkdir(stuck, "one-more")[0] == "EBUSY"


@pytest.mark.limbo
def test_a_higher_threshold_ends_limbo(stuck: Resctrl) -> None:
    """When the threshold is raised, the worker finds the RMID clean, and a group can be created."""
    stuck.rmdir("mon_groups/fill-0")
    assert mkdir(stuck, "one-more")[0] == "EBUSY"
    stuck.write("info/L3_MON/max_threshold_occupancy", 29360191)
    wait_until(lambda: mkdir(stuck, "one-more")[0] == "OK")
    assert mkdir(stuck, "two-more")[0] == "ENOSPC"


@pytest.mark.limbo
def test_all_rmids_can_be_used_again_after_limbo(full: Resctrl) -> None:
    """After limbo, the same number of groups can be created."""
    full.clean()
    assert full.fill() == full.num_rmids - 1


def test_a_freed_rmid_can_be_used_again(full: Resctrl) -> None:
    """After an rmdir, one group can be created, immediately or after limbo, and no second one."""
    full.rmdir("mon_groups/fill-0")
    full.create("mon_groups/one-more")
    assert full.mkdir("mon_groups/two-more") == "ENOSPC"


@pytest.mark.parametrize(
    ("text", "result", "words"),
    [
        ("abc", "EINVAL", "Invalid input\n"),
        ("-1", "EINVAL", "Invalid input\n"),
        ("\n", "EINVAL", "Invalid input\n"),
        (" 5", "EINVAL", "Invalid input\n"),
        ("5 ", "EINVAL", "Invalid input\n"),
        ("1,2", "EINVAL", "Invalid input\n"),
        ("4294967295", "EINVAL", "Exceeds limit (before adjustment) of 33554432 bytes\n"),
        ("4294967296", "ERANGE", "Invalid input\n"),
        ("99999999999999999999", "ERANGE", "Invalid input\n"),
        ("0", "OK", ""),
        ("0x0\n", "OK", ""),
        ("0\n", "OK", ""),
    ],
)
def test_commands_of_the_threshold(fs: Resctrl, text: str, result: str, words: str) -> None:
    """An unsigned number of any base, not more than the cache; 7.3 has a message, 6.12 keeps the status."""
    path = "info/L3_MON/max_threshold_occupancy"
    before = fs.read(path)
    status = fs.set_status()
    if fs.is_6_16:
        status = f"max_threshold_occupancy: {words}" if words else "ok\n"
    try:
        assert fs.try_write(path, text) == (result, status)
        assert fs.read(path) == ("0\n" if result == "OK" else before)
    finally:
        fs.write(path, before)


def test_the_threshold_is_rounded_down(fs: Resctrl) -> None:
    """The threshold is rounded down to the counter's unit, also without an RMID in limbo."""
    path = "info/L3_MON/max_threshold_occupancy"
    before = fs.read(path)
    try:
        fs.write(path, SHORT_LIMBO)
        unit = int(fs.read(path))
        fs.write(path, unit)
        assert int(fs.read(path)) == unit
        fs.write(path, unit - 1)
        assert int(fs.read(path)) < unit
    finally:
        fs.write(path, before)


@pytest.mark.no_occupancy
def test_the_threshold_without_occupancy(fs: Resctrl) -> None:
    """Without occupancy, the threshold is 0 and unused."""
    assert fs.read("info/L3_MON/max_threshold_occupancy") == "0\n"


@pytest.mark.no_occupancy
def test_without_occupancy_a_freed_rmid_is_free(full: Resctrl) -> None:
    """Without occupancy, there is no limbo: the next mkdir gets the RMID, and is never EBUSY."""
    for _ in range(3):
        full.rmdir("mon_groups/fill-0")
        assert mkdir(full, "fill-0")[0] == "OK"
        assert mkdir(full, "one-more")[0] == "ENOSPC"


@pytest.mark.no_occupancy
def test_without_occupancy_all_rmids_are_free_at_once(full: Resctrl) -> None:
    """All groups of a full machine are removed, and the same number is created without a wait."""
    names = full.names("mon_groups")
    for name in names:
        full.rmdir(f"mon_groups/{name}")
    assert {mkdir(full, name)[0] for name in names} == {"OK"}
    assert mkdir(full, "one-more")[0] == "ENOSPC"
