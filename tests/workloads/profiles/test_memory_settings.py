# SPDX-License-Identifier: Apache-2.0
"""The files of a control group that a profile and annotations set, as a table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.workloads.profiles.memory_settings import (
    MEMORY_HIGH,
    SWAP_MAX,
    UNLIMITED,
    MemorySettings,
    Swap,
    files_of,
    memory_annotations,
    parse_amount,
    text_of,
)

SWAP, HIGH = f"{SWAP_MAX}.memtierd.nri.io", f"{MEMORY_HIGH}.memtierd.nri.io"
MIB = 1 << 20
BOTH = {SWAP_MAX: UNLIMITED, MEMORY_HIGH: 64 * MIB}


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("1", 1),
        ("4096", 4096),
        ("1k", 1024),
        ("512M", 512 * MIB),
        ("2G", 2048 * MIB),
        ("1T", 1 << 40),
        ("max", UNLIMITED),
        (str(UNLIMITED - 1), UNLIMITED - 1),
    ],
)
def test_amounts_are_read_as_by_the_kernel(text: str, amount: int) -> None:
    assert parse_amount(text) == amount
    assert parse_amount(text_of(amount)) == amount


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "+1",
        "1.5G",
        "1Gi",
        "1GB",
        "0x10",
        "010",
        "MAX",
        "max ",
        "1\n",
        "٣",
        "1 G",
        "8E",
        str(UNLIMITED),
        "9" * 99,
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount of memory"):
        parse_amount(text)


@given(st.text(max_size=30))
def test_any_text_is_an_amount_or_refused(text: str) -> None:
    try:
        amount = parse_amount(text)
    except ValueError:
        return
    assert 0 <= amount <= UNLIMITED
    assert parse_amount(text_of(amount)) == amount


@pytest.mark.parametrize(
    ("settings", "annotations", "files"),
    [
        ({}, {}, {}),
        ({"swap": Swap.ALLOW}, {}, {SWAP_MAX: "max"}),
        ({"swap": Swap.DENY}, {}, {SWAP_MAX: "0"}),
        ({"high": 4096}, {}, {MEMORY_HIGH: "4096"}),
        ({"swap": Swap.DENY, "high": UNLIMITED}, {}, {SWAP_MAX: "0", MEMORY_HIGH: "max"}),
        ({"allowed": BOTH}, {}, {}),
        ({"allowed": BOTH}, {SWAP: "max"}, {SWAP_MAX: "max"}),
        ({"allowed": BOTH}, {SWAP: "1M", HIGH: "1M"}, {SWAP_MAX: str(MIB), MEMORY_HIGH: str(MIB)}),
        # For the container before that for the pod, and both before the profile's own.
        ({"allowed": BOTH}, {SWAP: "1M", f"{SWAP}/app": "2M"}, {SWAP_MAX: str(2 * MIB)}),
        ({"allowed": BOTH}, {SWAP: "1M", f"{SWAP}/other": "2M"}, {SWAP_MAX: str(MIB)}),
        ({"allowed": BOTH, "swap": Swap.ALLOW}, {SWAP: "0"}, {SWAP_MAX: "0"}),
    ],
)
def test_files_are_set(settings: dict[str, Any], annotations: dict[str, str], files: dict[str, str]) -> None:
    found, wrong = files_of(MemorySettings(**settings), annotations, "app")
    assert {name: text_of(amount) for name, amount in found.items()} == files
    assert wrong == []


@pytest.mark.parametrize(
    ("settings", "annotations", "files", "why"),
    [
        ({"swap": Swap.DENY}, {SWAP: "max"}, {SWAP_MAX: "0"}, "the profile does not allow it"),
        ({"allowed": {SWAP_MAX: 0}}, {HIGH: "1M"}, {}, "the profile does not allow it"),
        ({"allowed": BOTH}, {HIGH: "1G"}, {MEMORY_HIGH: str(64 * MIB)}, f"which is {64 * MIB}"),
        ({"allowed": BOTH}, {HIGH: "max"}, {MEMORY_HIGH: str(64 * MIB)}, "has the value max"),
        ({"allowed": BOTH, "high": 4096}, {HIGH: "lots"}, {MEMORY_HIGH: "4096"}, "'lots' is not an amount of memory"),
        ({"allowed": BOTH}, {f"{HIGH}/app": ""}, {}, f"annotation {HIGH}/app has no effect"),
    ],
)
def test_annotations_stay_within_the_limits_of_the_profile(
    settings: dict[str, Any], annotations: dict[str, str], files: dict[str, str], why: str
) -> None:
    found, (wrong,) = files_of(MemorySettings(**settings), annotations, "app")
    assert {name: text_of(amount) for name, amount in found.items()} == files
    assert why in wrong


_TEXTS = st.sampled_from(["0", "-1", "1e9", "max", str(2**64), "1 Ki", "1K", "nan", "8E", "7E", "MAX"]) | st.text()


@given(
    st.dictionaries(st.sampled_from([HIGH, SWAP, f"{HIGH}/app", f"{SWAP}/app", f"{HIGH}/b"]), _TEXTS),
    st.dictionaries(st.sampled_from([MEMORY_HIGH, SWAP_MAX]), st.integers(0, UNLIMITED)),
)
def test_any_annotations_stay_within_the_limits(annotations: dict[str, str], allowed: dict[str, int]) -> None:
    files, wrong = files_of(MemorySettings(allowed=allowed), annotations, "app")
    assert files.keys() <= allowed.keys()
    assert all(0 <= amount <= allowed[name] for name, amount in files.items())
    assert all(parse_amount(text_of(amount)) == amount for amount in files.values())
    assert len(wrong) <= 2


def test_only_annotations_of_the_files_are_kept() -> None:
    kept = {SWAP: "1", f"{HIGH}/app": "2"}
    assert memory_annotations({**kept, "memory.max.memtierd.nri.io": "3", f"{SWAP}x": "4", "a": "5"}) == kept
