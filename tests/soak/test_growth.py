# SPDX-License-Identifier: Apache-2.0
"""make soak fails if memory, descriptors, groups or the duration of a hook grow."""

from __future__ import annotations

import dataclasses

import pytest

from tests.soak.__main__ import Sample, growth

SAMPLE = Sample(
    at_s=10, memory=40e6, descriptors=70, groups=20, records=500, snapshots=500, hooks=[0.01, 0.02], lost=0, reads=9
)


def test_equal_samples_show_no_growth() -> None:
    assert growth([SAMPLE] * 9) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"memory": 50e6}, "memory grew from 40000000 to 50000000"),
        ({"descriptors": 190}, "descriptors grew from 70 to 190"),
        ({"groups": 60}, "groups grew from 20 to 60"),
        ({"hooks": [0.05]}, "a hook took 15.0 ms, then 50.0 ms"),
        ({"hooks": []}, "a hook took longer than a third of the time without kills"),
        ({"reads": 0}, "the reader failed for a third of the time without kills"),
    ],
)
def test_growth_in_the_last_third_is_found(changes: dict[str, object], text: str) -> None:
    later = dataclasses.replace(SAMPLE, **changes)  # type: ignore[arg-type]
    assert growth([SAMPLE] * 6 + [later] * 3) == [text]
