# SPDX-License-Identifier: Apache-2.0
"""cpus and cpus_list: accepted masks and lists, and the groups that lose and get CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

from .actors import outcome
from .target import Resctrl

NOT_THE_PARENTS = ("EINVAL", "Can only add CPUs to mongroup that belong to parent\n")
BAD = "Bad CPU list/mask\n"
ROOT_KEEPS = ("EINVAL", "Can't drop CPUs from default group\n")


@pytest.fixture
def a(fs: Resctrl) -> str:
    return fs.create("mon_groups/a")


@pytest.fixture
def rest(fs: Resctrl) -> str:
    """Return the CPUs of root without CPU 0."""
    return {1: "\n", 2: "1\n"}.get(fs.cpus, f"1-{fs.cpus - 1}\n")


def cpus(fs: Resctrl, *groups: str) -> list[str]:
    return [fs.read(group, "cpus_list") for group in groups]


# -- valid writes


def test_all_begin_in_root(fs: Resctrl, a: str) -> None:
    """Root has all CPUs; a new group has none, which is an empty line of cpus_list and zeroes in cpus."""
    assert int(fs.read("cpus").replace(",", ""), 16) == (1 << fs.cpus) - 1
    assert cpus(fs, "", a) == ["0\n" if fs.cpus == 1 else f"0-{fs.cpus - 1}\n", "\n"]
    assert fs.read(a, "cpus") == fs.read("cpus").translate(str.maketrans("1237f", "00000"))


def tried(fs: Resctrl, path: str, texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the result of each text, and the CPUs of the group, which had CPU 0 before."""
    found = {}
    for text in texts:
        fs.write(f"{os.path.dirname(path)}/cpus_list", "0")
        fs.clear()
        found[text] = (*fs.try_write(path, text), *cpus(fs, os.path.dirname(path)))
    return found


def test_cpus_list_accepts_numbers_and_ranges(fs: Resctrl, a: str) -> None:
    """cpus_list accepts numbers and ranges, separated by commas or white space; it ignores all after a NUL.

    A range may take so many out of every so many, the first of them; ``all`` in either case is every CPU.
    """
    last = fs.cpus - 1
    texts = ["0", "0\n", " 0\t\n", "0,", ",0", "0,0", "0 0", "0\n0", "00", "0-0", "0\0zz", "0-0:1/1", "0-0:1/2"]
    assert tried(fs, f"{a}/cpus_list", texts) == dict.fromkeys(texts, ("OK", "ok\n", "0\n"))
    texts = ["all", "ALL", f"0-{last}", "0-N", "N,0-N", "all:1/1", "0-N:1/1"]
    assert tried(fs, f"{a}/cpus_list", texts) == dict.fromkeys(texts, ("OK", "ok\n", *cpus(fs, "")))
    texts = ["N", "N-N", f"{last}"]
    assert tried(fs, f"{a}/cpus_list", texts) == dict.fromkeys(texts, ("OK", "ok\n", f"{last}\n"))


@pytest.mark.two_domains
def test_a_range_may_have_a_pattern(fs: Resctrl, a: str) -> None:
    """A range may have a pattern USED/GROUP: the first USED CPUs of every GROUP."""
    wanted = {"0-3:1/2": "0,2\n", "1-3:2/3": "1-2\n", "all:1/3": "0,3\n", "0-3:0/2": "\n", "0-2:3/9": "0-2\n"}
    assert tried(fs, f"{a}/cpus_list", wanted) == {text: ("OK", "ok\n", got) for text, got in wanted.items()}


def test_an_invalid_list_changes_nothing(fs: Resctrl, a: str) -> None:
    """An invalid list is EINVAL, an impossible CPU ERANGE, a number above 32 bits EOVERFLOW; nothing changes."""
    results = {
        "EINVAL": [
            "zz",
            "-1",
            "+0",
            "0x0",
            "1-0",
            "0-",
            "0--0",
            "n",
            "none",
            "allx",
            "0_0",
            "0:1/2",
            "0-0:1",
            "0-0:1/0",
            "0-0:2/1",
            "0-0:1/",
            "0-0:/1",
        ],
        "ERANGE": ["9999", "0,9999", "0-9999", f"{fs.cpus}"],
        "EOVERFLOW": ["5000000000", "0-0:5000000000/1", "9" * 30],
    }
    wanted = {text: (name, BAD, "0\n") for name, texts in results.items() for text in texts}
    # Its length plus one, which is 0 in 32 bits.
    wanted["4294967295"] = ("EINVAL", BAD, "0\n")
    assert tried(fs, f"{a}/cpus_list", wanted) == wanted


def test_cpus_accepts_hexadecimal_masks(fs: Resctrl, a: str) -> None:
    """cpus accepts a hexadecimal mask in one line. A word of eight digits may follow any character."""
    texts = ["1", "1\n", "01", "00000001", "1,", ",1", " 1\t", "1\n5", "1\0zz", "x00000001", "-00000001,"]
    assert tried(fs, f"{a}/cpus", texts) == dict.fromkeys(texts, ("OK", "ok\n", "0\n"))
    assert int(fs.read(a, "cpus").replace(",", ""), 16) == 1


def test_an_invalid_mask_changes_nothing(fs: Resctrl, a: str) -> None:
    """An invalid mask is EINVAL; words or masks that are too long, and impossible CPUs, are EOVERFLOW."""
    results = {
        "EINVAL": ["zz", "0-1", "-1", "+1", "0x1", "1_1", "all", "N", "x1"],
        # The last one has a word more than any machine has CPUs for.
        "EOVERFLOW": [f"{1 << fs.cpus:x}", "000000001", ",".join(["ffffffff"] * 33), ",".join(["0"] * 257)],
    }
    wanted = {text: (name, BAD, "0\n") for name, texts in results.items() for text in texts}
    assert tried(fs, f"{a}/cpus", wanted) == wanted


def test_empty_write_removes_all_cpus(fs: Resctrl, a: str) -> None:
    """After an empty write, the group has no CPU."""
    wanted = dict.fromkeys(["\n", " ", ",", "\0", " ,\n"], ("OK", "ok\n", "\n"))
    assert tried(fs, f"{a}/cpus_list", wanted) == tried(fs, f"{a}/cpus", wanted) == wanted


def test_a_write_clears_the_status(fs: Resctrl, a: str) -> None:
    """A write to cpus clears last_cmd_status; in Linux 6.12 it does not."""
    status = fs.set_status()
    assert fs.try_write(f"{a}/cpus_list", "0") == ("OK", "ok\n" if fs.is_6_16 else status)
    assert fs.try_write(f"{a}/cpus_list", "zz")[1] == ("" if fs.is_6_16 else status) + "Bad CPU list/mask\n"


# -- origin of CPUs


def test_a_cpu_goes_to_a_monitoring_group_and_stays_in_root(fs: Resctrl, a: str) -> None:
    """A monitoring group gets a CPU of its control group, which keeps it."""
    before = cpus(fs, "")
    assert fs.try_write(f"{a}/cpus_list", "0\n") == ("OK", "ok\n")
    assert cpus(fs, a, "") == ["0\n", *before]


def test_root_keeps_its_cpus(fs: Resctrl) -> None:
    """CPUs cannot be taken from root by writing to root."""
    before = cpus(fs, "")
    assert fs.try_write("cpus_list", "\n") == ROOT_KEEPS
    fs.clear()
    assert fs.try_write("cpus", "0\n") == ROOT_KEEPS
    assert cpus(fs, "") == before


def test_writing_roots_cpus_to_root_removes_them_from_its_monitoring_groups(fs: Resctrl, a: str) -> None:
    """The CPUs of root may be written to root; its monitoring groups lose theirs."""
    fs.write(f"{a}/cpus_list", "0")
    assert fs.try_write("cpus_list", cpus(fs, "")[0]) == ("OK", "ok\n")
    assert cpus(fs, a) == ["\n"]


def test_a_cpu_is_in_one_monitoring_group(fs: Resctrl, a: str) -> None:
    """A monitoring group that gets a CPU removes it from another one."""
    fs.write(f"{a}/cpus_list", "0\n")
    b = fs.create("mon_groups/b")
    fs.write(f"{b}/cpus_list", "0\n")
    assert cpus(fs, a, b) == ["\n", "0\n"]


@pytest.mark.two_domains
def test_a_write_moves_only_the_named_cpus(fs: Resctrl, a: str) -> None:
    """Groups keep the CPUs that are not named; a new list replaces the old one."""
    b = fs.create("mon_groups/b")
    fs.write(f"{a}/cpus_list", "0-2")
    fs.write(f"{b}/cpus_list", "1,3")
    assert cpus(fs, a, b) == ["0,2\n", "1,3\n"]
    fs.write(f"{b}/cpus", "c")
    assert cpus(fs, a, b, "") == ["0\n", "2-3\n", "0-3\n"]


@pytest.mark.allocation
def test_a_control_group_takes_cpus_from_root(fs: Resctrl, rest: str) -> None:
    """A control group has its CPUs exclusively; an empty list and rmdir return them to root."""
    before = cpus(fs, "")
    fs.create("class")
    for _ in range(2):
        assert fs.try_write("class/cpus_list", "0\n") == ("OK", "ok\n")
        assert cpus(fs, "class", "") == ["0\n", rest]
        assert fs.try_write("class/cpus_list", "\n") == ("OK", "ok\n")
        assert cpus(fs, "class", "") == ["\n", *before]
    fs.write("class/cpus_list", "0\n")
    fs.rmdir("class")
    assert cpus(fs, "") == before


@pytest.mark.allocation
def test_a_control_group_takes_cpus_from_monitoring_groups(fs: Resctrl, a: str) -> None:
    """A monitoring group of root loses a CPU that a control group gets, and cannot get it back."""
    fs.create("class")
    fs.write(f"{a}/cpus_list", "0")
    fs.write("class/cpus_list", "0")
    assert cpus(fs, a) == ["\n"]
    assert fs.try_write(f"{a}/cpus_list", "0") == NOT_THE_PARENTS


@pytest.mark.allocation
def test_root_takes_cpus_from_a_control_group(fs: Resctrl) -> None:
    """A write to root moves CPUs to root from the control group and its monitoring groups."""
    before = cpus(fs, "")
    fs.create("class")
    fs.create("class/mon_groups/m")
    fs.write("class/cpus_list", "0")
    fs.write("class/mon_groups/m/cpus_list", "0")
    assert fs.try_write("cpus_list", before[0]) == ("OK", "ok\n")
    assert cpus(fs, "class", "class/mon_groups/m", "") == ["\n", "\n", *before]


@pytest.mark.allocation
def test_a_monitoring_group_takes_only_its_control_groups(fs: Resctrl) -> None:
    """A CPU of another control group is refused, and one of its own is accepted."""
    fs.create("class")
    fs.create("class/mon_groups/m")
    assert fs.try_write("class/mon_groups/m/cpus_list", "0\n") == NOT_THE_PARENTS
    fs.write("class/cpus_list", "0")
    fs.clear()
    assert fs.try_write("class/mon_groups/m/cpus_list", "0\n") == ("OK", "ok\n")
    assert cpus(fs, "class", "class/mon_groups/m") == ["0\n", "0\n"]


@pytest.mark.allocation
@pytest.mark.parametrize("text", ["0", "\n"])
def test_a_write_to_a_control_group_empties_its_monitoring_groups(fs: Resctrl, text: str) -> None:
    """The monitoring groups in a control group lose all CPUs when its mask is written, even the same one."""
    fs.create("class")
    fs.create("class/mon_groups/m")
    fs.write("class/cpus_list", "0")
    fs.write("class/mon_groups/m/cpus_list", "0")
    fs.write("class/cpus_list", text)
    assert cpus(fs, "class", "class/mon_groups/m") == [text.strip() + "\n", "\n"]


@pytest.mark.allocation
def test_the_control_group_keeps_the_cpus_of_a_removed_monitoring_group(fs: Resctrl, rest: str) -> None:
    """After rmdir of the monitoring group, the control group still has the CPU."""
    fs.create("class")
    fs.create("class/mon_groups/m")
    fs.write("class/cpus_list", "0")
    fs.write("class/mon_groups/m/cpus_list", "0")
    fs.rmdir("class/mon_groups/m")
    assert cpus(fs, "class", "") == ["0\n", rest]


@pytest.mark.allocation
def test_a_group_with_cpus_stays_with_its_parent(fs: Resctrl, a: str) -> None:
    """A group that monitors CPUs cannot move to another control group, and can get a new name."""
    fs.create("class")
    fs.write(f"{a}/cpus_list", "0\n")
    assert outcome(lambda: os.rename(fs.path(a), fs.path("class/mon_groups/a"))) == "EPERM"
    assert fs.status == "Cannot move a MON group that monitors CPUs\n"
    os.rename(fs.path(a), fs.path("mon_groups/b"))
    assert cpus(fs, "mon_groups/b") == ["0\n"]


def test_a_removed_group_gives_its_cpus_back(fs: Resctrl, a: str) -> None:
    """After rmdir another group can take the CPU."""
    fs.write(f"{a}/cpus_list", "0\n")
    fs.rmdir(a)
    b = fs.create("mon_groups/b")
    assert cpus(fs, b) == ["\n"]
    fs.write(f"{b}/cpus_list", "0\n")
    assert cpus(fs, b) == ["0\n"]


def test_an_unmount_returns_all_cpus_to_root(fs: Resctrl, a: str) -> None:
    """After unmount and mount, root has all CPUs."""
    before = cpus(fs, "")
    fs.create("class" if fs.can_allocate else "mon_groups/b")
    fs.write("class/cpus_list" if fs.can_allocate else "mon_groups/b/cpus_list", "0")
    assert fs.unmount() == "OK"
    fs.mount()
    assert cpus(fs, "") == before


def test_tasks_stay_where_they_are(fs: Resctrl, a: str) -> None:
    """A task on a group's CPU is not a member of the group."""
    fs.write(f"{a}/cpus_list", "0")
    assert fs.members(a) == set()
    assert fs.groups_of(os.getpid()) == ("/", "")


def test_old_descriptors(fs: Resctrl, a: str) -> None:
    """After rmdir an open cpus is ENODEV."""
    fd = os.open(fs.path(a, "cpus_list"), os.O_RDWR)
    try:
        fs.rmdir(a)
        assert outcome(lambda: os.write(fd, b"0\n")) == "ENODEV"
        assert outcome(lambda: os.pread(fd, 64, 0)) == "ENODEV"
    finally:
        os.close(fd)
