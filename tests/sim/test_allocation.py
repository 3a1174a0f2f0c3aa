# SPDX-License-Identifier: Apache-2.0
"""Exclusive classes and masks without holes: what no guest shows, since its hardware claims all of the cache.

After fs/resctrl/rdtgroup.c and ctrlmondata.c of Linux 7; what a guest does show is in tests/conformance.
"""

from __future__ import annotations

import errno

import pytest

from resctrlmond.sim.profiles import profile_named
from tests.sim.virtual import Lab


@pytest.fixture
def lab() -> Lab:
    made = Lab("intel-rdt", domains=2, cbm_bits=8)
    made.mkdir("x")
    return made


def refusal(lab: Lab, path: str, text: str) -> tuple[str, str]:
    with pytest.raises(OSError) as caught:
        lab.write(path, text)
    return errno.errorcode[caught.value.errno or 0], lab.status


def apart(lab: Lab) -> None:
    """x has the low half of both caches to itself."""
    lab.write("schemata", "L3:0=f0;1=f0\n")
    lab.write("x/schemata", "L3:0=f;1=f\n")


def test_a_class_that_shares_nothing_can_be_exclusive(lab: Lab) -> None:
    apart(lab)
    lab.write("x/mode", "exclusive\n")
    assert (lab.read("x/mode"), lab.read("mode"), lab.status) == ("exclusive\n", "shareable\n", "ok\n")
    assert lab.read("info/L3/bit_usage") == "0=SSSSEEEE;1=SSSSEEEE\n"
    lab.write("x/mode", "exclusive\n")
    lab.write("x/mode", "shareable\n")
    assert lab.read("info/L3/bit_usage") == "0=SSSSSSSS;1=SSSSSSSS\n"


def test_one_cache_that_is_shared_is_too_much(lab: Lab) -> None:
    lab.write("schemata", "L3:0=f0\n")
    lab.write("x/schemata", "L3:0=f;1=f\n")
    assert refusal(lab, "x/mode", "exclusive\n") == ("EINVAL", "Schemata overlaps\n")


def test_nobody_takes_of_an_exclusive_class(lab: Lab) -> None:
    apart(lab)
    lab.write("x/mode", "exclusive\n")
    assert refusal(lab, "schemata", "L3:0=18\n") == ("EINVAL", "Overlaps with exclusive group\n")
    assert refusal(lab, "x/schemata", "L3:0=1f\n") == ("EINVAL", "Overlaps with other group\n")
    lab.write("x/schemata", "L3:0=3\n")
    assert lab.read("info/L3/bit_usage") == "0=SSSS00EE;1=SSSSEEEE\n"


def test_a_new_class_begins_with_the_lowest_piece_that_is_free_or_shared(lab: Lab) -> None:
    lab.write("schemata", "L3:0=c0;1=f0\n")
    lab.write("x/schemata", "L3:0=6;1=f\n")
    lab.write("x/mode", "exclusive\n")
    lab.mkdir("y")
    assert lab.read("y/schemata") == "L3:0=1;1=f0\n"


def test_a_class_without_room_is_not_made(lab: Lab) -> None:
    apart(lab)
    lab.write("mode", "exclusive\n")
    lab.write("x/mode", "exclusive\n")
    before = lab.model.rmid_counts()
    with pytest.raises(OSError) as caught:
        lab.mkdir("y")
    assert (caught.value.errno, lab.status) == (errno.ENOSPC, "No space on L3:0\n")
    assert "y" not in lab.model.root.children
    # Its RMID goes the way of all that were given out: into limbo.
    assert (before, lab.model.rmid_counts()) == ("used=2 limbo=0 free=62\n", "used=2 limbo=1 free=61\n")


def test_an_exclusive_class_that_goes_leaves_its_part(lab: Lab) -> None:
    apart(lab)
    lab.write("x/mode", "exclusive\n")
    lab.rmdir("x")
    lab.mkdir("y")
    assert (lab.read("y/schemata"), lab.read("y/mode")) == ("L3:0=ff;1=ff\n", "shareable\n")


def test_masks_have_no_holes_unless_the_machine_allows_them(lab: Lab) -> None:
    assert refusal(lab, "x/schemata", "L3:0=5\n") == ("EINVAL", "The mask 5 has non-consecutive 1-bits\n")
    assert refusal(lab, "x/schemata", "L3:0=c3\n") == ("EINVAL", "The mask c3 has non-consecutive 1-bits\n")
    lab.write("x/schemata", "L3:0=18\n")
    sparse = Lab("intel-rdt", sparse_masks=1)
    sparse.write("schemata", "L3:0=5\n")
    assert sparse.read("schemata") == "L3:0=5\n"


@pytest.mark.parametrize(
    ("profile", "numbers"),
    [
        ("monitoring-only", {"cbm_bits": 4}),
        ("intel-rdt", {"cbm_bits": 0}),
        ("intel-rdt", {"cbm_bits": 33}),
        ("intel-rdt", {"cbm_bits": 4, "shareable_bits": 16}),
        ("intel-rdt", {"sparse_masks": 2}),
    ],
)
def test_masks_that_no_machine_has(profile: str, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"simulated: give|has no masks"):
        profile_named(profile, cbm_bits=numbers.get("cbm_bits"), shareable_bits=numbers.get("shareable_bits"))
        profile_named(profile, sparse_masks=numbers.get("sparse_masks"))


def test_events_can_be_chosen() -> None:
    lab = Lab("monitoring-only", events="mbm_local_bytes,llc_occupancy")
    assert lab.read("info/L3_MON/mon_features") == "llc_occupancy\nmbm_local_bytes\n"
    with pytest.raises(ValueError, match="energy cannot be simulated: give some of llc_occupancy"):
        profile_named("intel-rdt", events="energy")
