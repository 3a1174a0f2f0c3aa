# SPDX-License-Identifier: Apache-2.0
"""Differences of Linux 6.1 from newer kernels."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from resctrlmond.sim.kernel.tree import Caller
from resctrlmond.sim.profiles import profile_named
from tests.sim.virtual import Lab

SOILED = "Can't move task to different control group\n"


@pytest.fixture
def lab() -> Lab:
    made = Lab(kernel="6.1")
    made.mkdir("mon_groups/a")
    return made


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


def soil(lab: Lab) -> None:
    lab.mkdir("x")
    tid = lab.tasks.fork()
    lab.write("x/tasks", str(tid))
    assert refused(lambda: lab.write("mon_groups/a/tasks", str(tid))) == "EINVAL"
    assert lab.status == SOILED


def test_a_write_is_one_number(lab: Lab) -> None:
    for form in ("{}", " {}\n", "{:#x}", "+{}\n", "{}\0zz"):
        tid = lab.tasks.fork()
        lab.write("mon_groups/a/tasks", form.format(tid))
        assert tid in lab.tids("mon_groups/a")


@pytest.mark.parametrize("text", ["", "\n", "1,1", "1,", "abc", "-1", "1\n1\n", "99999999999"])
def test_invalid_number_is_refused_without_a_message(lab: Lab, text: str) -> None:
    soil(lab)
    assert refused(lambda: lab.write("mon_groups/a/tasks", text)) == "EINVAL"
    assert lab.status == SOILED


def test_its_words_are_one_line(lab: Lab) -> None:
    assert refused(lambda: lab.write("mon_groups/a/tasks", "4000")) == "ESRCH"
    assert lab.status == "No task 4000\n"
    assert refused(lambda: lab.write("mon_groups/a/tasks", "1", Caller(5, 5, 1))) == "EPERM"
    assert lab.status == "No permission to move task 1\n"
    lab.write("mon_groups/a/tasks", "0")
    assert (lab.status, lab.tids("mon_groups/a")) == ("ok\n", {1})


def test_there_is_no_rename(lab: Lab) -> None:
    soil(lab)
    assert refused(lambda: lab.rename("mon_groups/a", "mon_groups/b")) == "EPERM"
    assert lab.status == SOILED


def test_an_rmid_whose_cache_is_clean_is_free_at_once(lab: Lab) -> None:
    lab.rmdir("mon_groups/a")
    assert lab.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_an_rmid_that_holds_cache_waits(lab: Lab) -> None:
    lab.write("mon_groups/a/tasks", str(lab.tasks.fork()))
    lab.rmdir("mon_groups/a")
    assert lab.model.rmid_counts() == "used=1 limbo=1 free=62\n"
    lab.now += 10
    assert lab.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_elsewhere_than_where_it_is_removed_it_waits_for_the_worker() -> None:
    lab = Lab(kernel="6.1", domains=2)
    lab.mkdir("mon_groups/a")
    lab.rmdir("mon_groups/a")
    assert lab.model.rmid_counts() == "used=1 limbo=1 free=62\n"
    lab.now += 1
    assert lab.model.rmid_counts() == "used=1 limbo=0 free=63\n"


def test_newer_kernels_wait_always() -> None:
    for kernel in ("6.12", "newest"):
        lab = Lab(kernel=kernel)
        lab.mkdir("mon_groups/a")
        lab.rmdir("mon_groups/a")
        assert lab.model.rmid_counts() == "used=1 limbo=1 free=62\n"


def test_its_files(lab: Lab) -> None:
    assert "sparse_masks" not in lab.directory("info/L3").children
    assert "mbm_assign_mode" not in lab.directory("info/L3_MON").children


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
