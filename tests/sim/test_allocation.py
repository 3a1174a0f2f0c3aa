# SPDX-License-Identifier: Apache-2.0
"""Exclusive classes and masks without gaps. No guest shows them, because its hardware uses the whole cache.

After fs/resctrl/rdtgroup.c and ctrlmondata.c of Linux 7; what a guest does show is in tests/conformance.
"""

from __future__ import annotations

import errno

import pytest

from resctrlmond.sim.profiles import profile_named
from tests.sim.virtual import VirtualResctrl


@pytest.fixture
def resctrl() -> VirtualResctrl:
    made = VirtualResctrl("intel-rdt", domains=2, cbm_bits=8)
    made.mkdir("x")
    return made


def refusal(resctrl: VirtualResctrl, path: str, text: str) -> tuple[str, str]:
    with pytest.raises(OSError) as caught:
        resctrl.write(path, text)
    return errno.errorcode[caught.value.errno or 0], resctrl.status


def apart(resctrl: VirtualResctrl) -> None:
    """Return a model in which the class x has the low half of both caches exclusively."""
    resctrl.write("schemata", "L3:0=f0;1=f0\n")
    resctrl.write("x/schemata", "L3:0=f;1=f\n")


def test_a_class_that_shares_nothing_can_be_exclusive(resctrl: VirtualResctrl) -> None:
    apart(resctrl)
    resctrl.write("x/mode", "exclusive\n")
    assert (resctrl.read("x/mode"), resctrl.read("mode"), resctrl.status) == ("exclusive\n", "shareable\n", "ok\n")
    assert resctrl.read("info/L3/bit_usage") == "0=SSSSEEEE;1=SSSSEEEE\n"
    resctrl.write("x/mode", "exclusive\n")
    resctrl.write("x/mode", "shareable\n")
    assert resctrl.read("info/L3/bit_usage") == "0=SSSSSSSS;1=SSSSSSSS\n"


def test_one_cache_that_is_shared_is_too_much(resctrl: VirtualResctrl) -> None:
    resctrl.write("schemata", "L3:0=f0\n")
    resctrl.write("x/schemata", "L3:0=f;1=f\n")
    assert refusal(resctrl, "x/mode", "exclusive\n") == ("EINVAL", "Schemata overlaps\n")


def test_no_class_may_use_bits_of_an_exclusive_class(resctrl: VirtualResctrl) -> None:
    apart(resctrl)
    resctrl.write("x/mode", "exclusive\n")
    assert refusal(resctrl, "schemata", "L3:0=18\n") == ("EINVAL", "Overlaps with exclusive group\n")
    assert refusal(resctrl, "x/schemata", "L3:0=1f\n") == ("EINVAL", "Overlaps with other group\n")
    resctrl.write("x/schemata", "L3:0=3\n")
    assert resctrl.read("info/L3/bit_usage") == "0=SSSS00EE;1=SSSSEEEE\n"


def test_a_new_class_begins_with_the_lowest_piece_that_is_free_or_shared(resctrl: VirtualResctrl) -> None:
    resctrl.write("schemata", "L3:0=c0;1=f0\n")
    resctrl.write("x/schemata", "L3:0=6;1=f\n")
    resctrl.write("x/mode", "exclusive\n")
    resctrl.mkdir("y")
    assert resctrl.read("y/schemata") == "L3:0=1;1=f0\n"


def test_class_without_free_bits_is_not_created(resctrl: VirtualResctrl) -> None:
    apart(resctrl)
    resctrl.write("mode", "exclusive\n")
    resctrl.write("x/mode", "exclusive\n")
    before = resctrl.model.rmid_counts()
    with pytest.raises(OSError) as caught:
        resctrl.mkdir("y")
    assert (caught.value.errno, resctrl.status) == (errno.ENOSPC, "No space on L3:0\n")
    assert "y" not in resctrl.model.root.children
    # Its RMID goes the way of all that were given out: into limbo.
    assert (before, resctrl.model.rmid_counts()) == ("used=2 limbo=0 free=62\n", "used=2 limbo=1 free=61\n")


def test_removed_exclusive_class_frees_its_bits(resctrl: VirtualResctrl) -> None:
    apart(resctrl)
    resctrl.write("x/mode", "exclusive\n")
    resctrl.rmdir("x")
    resctrl.mkdir("y")
    assert (resctrl.read("y/schemata"), resctrl.read("y/mode")) == ("L3:0=ff;1=ff\n", "shareable\n")


def test_masks_have_no_holes_unless_the_machine_allows_them(resctrl: VirtualResctrl) -> None:
    assert refusal(resctrl, "x/schemata", "L3:0=5\n") == ("EINVAL", "The mask 5 has non-consecutive 1-bits\n")
    assert refusal(resctrl, "x/schemata", "L3:0=c3\n") == ("EINVAL", "The mask c3 has non-consecutive 1-bits\n")
    resctrl.write("x/schemata", "L3:0=18\n")
    sparse = VirtualResctrl("intel-rdt", sparse_masks=1)
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
def test_invalid_masks_of_a_machine_are_refused(profile: str, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"simulated: give|has no masks"):
        profile_named(profile, cbm_bits=numbers.get("cbm_bits"), shareable_bits=numbers.get("shareable_bits"))
        profile_named(profile, sparse_masks=numbers.get("sparse_masks"))


def test_events_can_be_chosen() -> None:
    resctrl = VirtualResctrl("monitoring-only", events="mbm_local_bytes,llc_occupancy")
    assert resctrl.read("info/L3_MON/mon_features") == "llc_occupancy\nmbm_local_bytes\n"
    with pytest.raises(ValueError, match="energy cannot be simulated: give some of llc_occupancy"):
        profile_named("intel-rdt", events="energy")
