# SPDX-License-Identifier: Apache-2.0
"""Differences of Linux 6.1 from newer kernels."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from resctrlmond.sim.kernel.tree import Caller
from resctrlmond.sim.profiles import profile_named
from tests.sim.virtual import VirtualResctrl

SOILED = "Can't move task to different control group\n"


@pytest.fixture
def resctrl() -> VirtualResctrl:
    made = VirtualResctrl(kernel="6.1")
    made.mkdir("mon_groups/a")
    return made


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


def soil(resctrl: VirtualResctrl) -> None:
    resctrl.mkdir("x")
    tid = resctrl.tasks.fork()
    resctrl.write("x/tasks", str(tid))
    assert refused(lambda: resctrl.write("mon_groups/a/tasks", str(tid))) == "EINVAL"
    assert resctrl.status == SOILED


def test_a_write_is_one_number(resctrl: VirtualResctrl) -> None:
    for form in ("{}", " {}\n", "{:#x}", "+{}\n", "{}\0zz"):
        tid = resctrl.tasks.fork()
        resctrl.write("mon_groups/a/tasks", form.format(tid))
        assert tid in resctrl.tids("mon_groups/a")


@pytest.mark.parametrize("text", ["", "\n", "1,1", "1,", "abc", "-1", "1\n1\n", "99999999999"])
def test_invalid_number_is_refused_without_a_message(resctrl: VirtualResctrl, text: str) -> None:
    soil(resctrl)
    assert refused(lambda: resctrl.write("mon_groups/a/tasks", text)) == "EINVAL"
    assert resctrl.status == SOILED


def test_messages_have_one_line(resctrl: VirtualResctrl) -> None:
    assert refused(lambda: resctrl.write("mon_groups/a/tasks", "4000")) == "ESRCH"
    assert resctrl.status == "No task 4000\n"
    assert refused(lambda: resctrl.write("mon_groups/a/tasks", "1", Caller(5, 5, 1))) == "EPERM"
    assert resctrl.status == "No permission to move task 1\n"
    resctrl.write("mon_groups/a/tasks", "0")
    assert (resctrl.status, resctrl.tids("mon_groups/a")) == ("ok\n", {1})


def test_there_is_no_rename(resctrl: VirtualResctrl) -> None:
    soil(resctrl)
    assert refused(lambda: resctrl.rename("mon_groups/a", "mon_groups/b")) == "EPERM"
    assert resctrl.status == SOILED


def test_an_rmid_whose_cache_is_clean_is_free_at_once(resctrl: VirtualResctrl) -> None:
    resctrl.rmdir("mon_groups/a")
    assert resctrl.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_an_rmid_that_holds_cache_waits(resctrl: VirtualResctrl) -> None:
    resctrl.write("mon_groups/a/tasks", str(resctrl.tasks.fork()))
    resctrl.rmdir("mon_groups/a")
    assert resctrl.model.rmid_counts() == "used=1 limbo=1 free=62\n"
    resctrl.now += 10
    assert resctrl.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_rmid_in_other_domains_waits_for_the_worker() -> None:
    resctrl = VirtualResctrl(kernel="6.1", domains=2)
    resctrl.mkdir("mon_groups/a")
    resctrl.rmdir("mon_groups/a")
    assert resctrl.model.rmid_counts() == "used=1 limbo=1 free=62\n"
    resctrl.now += 1
    assert resctrl.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_newer_kernels_wait_always() -> None:
    for kernel in ("6.12", "newest"):
        resctrl = VirtualResctrl(kernel=kernel)
        resctrl.mkdir("mon_groups/a")
        resctrl.rmdir("mon_groups/a")
        assert resctrl.model.rmid_counts() == "used=1 limbo=1 free=62\n"


def test_its_files(resctrl: VirtualResctrl) -> None:
    assert "sparse_masks" not in resctrl.directory("info/L3").children
    assert "mbm_assign_mode" not in resctrl.directory("info/L3_MON").children


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("intel-aet", {}),
        ("amd-abmc", {}),
        ("intel-snc2", {}),
        ("amd-bmec", {}),
        ("intel-rdt", {"debug": True}),
        ("intel-rdt", {"sparse_masks": 1}),
    ],
)
def test_newer_files_are_missing(name: str, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"needs a newer kernel than 6\.1: leave --kernel out"):
        profile_named(name, kernel="6.1", **numbers)  # type: ignore[arg-type]
