# SPDX-License-Identifier: Apache-2.0
"""The RMID and CLOSID of a group, which the option debug shows, and the order in which freed ones are used."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from .actors import outcome
from .target import SHORT_LIMBO, Resctrl

THRESHOLD = "info/L3_MON/max_threshold_occupancy"
FREED = (9, 2, 5)  # groups, in the order in which they go


@pytest.fixture(scope="module")
def mounted_with_debug(target: Resctrl) -> Iterator[None]:
    """Mount with the option debug for all rules of this module."""
    assert target.unmount() == "OK"
    target.mount(debug=True)
    yield
    target.mount()
    target.clean()
    assert target.unmount() == "OK"


@pytest.fixture
def debug(mounted_with_debug: None, fs: Resctrl) -> Resctrl:
    """Return a resctrl whose groups show their ids."""
    return fs


def rmid(fs: Resctrl, group: str) -> int:
    return int(fs.read(group, "mon_hw_id"))


def free(fs: Resctrl) -> list[int]:
    """Remove some groups of a machine without a free RMID, and return their RMIDs in that order."""
    fs.fill()
    rmids = [rmid(fs, f"mon_groups/fill-{number}") for number in FREED]
    for number in FREED:
        fs.rmdir(f"mon_groups/fill-{number}")
    return rmids


def made(fs: Resctrl) -> list[int]:
    """Create groups, and return their RMIDs."""
    return [rmid(fs, fs.create(f"mon_groups/new-{number}")) for number in FREED]


def test_the_option_debug_shows_the_ids(debug: Resctrl) -> None:
    """With the option debug each group has mon_hw_id, of mode 0444; that of root is 0."""
    assert rmid(debug, "") == 0
    group = debug.create("mon_groups/a")
    assert 0 < rmid(debug, group) < debug.num_rmids
    assert stat.S_IMODE(os.lstat(debug.path(group, "mon_hw_id")).st_mode) == 0o444
    assert outcome(lambda: debug.write(f"{group}/mon_hw_id", "1")) == "EACCES"


def test_control_groups_have_a_closid(debug: Resctrl) -> None:
    """Control groups also have ctrl_hw_id, even if root is the only one; monitoring groups have none."""
    assert debug.read("ctrl_hw_id") == "0\n"
    assert "ctrl_hw_id" not in debug.names(debug.create("mon_groups/a"))


@pytest.mark.allocation
def test_the_lowest_closid_is_taken(debug: Resctrl) -> None:
    """A control group gets the lowest CLOSID that is free, and an RMID of its own."""
    debug.create("x")
    assert (debug.read("x/ctrl_hw_id"), rmid(debug, "x") > 0) == ("1\n", True)
    debug.rmdir("x")
    debug.create("y")
    assert debug.read("y/ctrl_hw_id") == "1\n"


@pytest.mark.kernel_only("a simulation is of another type in /proc/mounts")
def test_debug_is_in_proc_mounts(debug: Resctrl) -> None:
    """The option debug is in /proc/mounts."""
    wanted = f"resctrl {debug.root} resctrl rw,relatime,debug 0 0"
    assert wanted in Path("/proc/mounts").read_text().splitlines()


def test_no_two_groups_have_the_same_rmid(debug: Resctrl) -> None:
    """No two groups have the same RMID."""
    groups = ["", *(debug.create(f"mon_groups/{name}") for name in "abcd")]
    assert len({rmid(debug, group) for group in groups}) == len(groups)


def test_rename_keeps_the_rmid(debug: Resctrl) -> None:
    """A renamed group keeps its RMID."""
    before = rmid(debug, debug.create("mon_groups/a"))
    os.rename(debug.path("mon_groups/a"), debug.path("mon_groups/b"))
    assert rmid(debug, "mon_groups/b") == before


@pytest.mark.allocation
def test_a_move_to_another_class_keeps_the_rmid(debug: Resctrl) -> None:
    """A group that moves to another control group keeps its RMID."""
    before = rmid(debug, debug.create("mon_groups/a"))
    debug.create("x")
    os.rename(debug.path("mon_groups/a"), debug.path("x/mon_groups/a"))
    assert rmid(debug, "x/mon_groups/a") == before


@pytest.mark.no_occupancy
def test_freed_rmids_come_back_in_their_order(debug: Resctrl) -> None:
    """Without limbo, the RMID that was freed first is used first."""
    assert free(debug) == made(debug)


@pytest.mark.limbo
def test_rmids_leave_limbo_in_the_order_of_their_numbers(debug: Resctrl) -> None:
    """RMIDs that one run of the limbo worker finds clean become free in the order of their numbers."""
    before = debug.read(THRESHOLD)
    debug.fill()
    debug.write(THRESHOLD, 0)  # no RMID leaves limbo before all are in it
    try:
        freed = free(debug)
        debug.write(THRESHOLD, SHORT_LIMBO)
        assert made(debug) == sorted(freed)
    finally:
        debug.write(THRESHOLD, before)
