# SPDX-License-Identifier: Apache-2.0
"""A part of ``make views``: every verb with no and with some workloads, which end and begin meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.views.screens import all_faults, is_too_wide, site


@pytest.mark.parametrize("count", [0, 30])
def test_each_screen_keeps_the_rules_while_workloads_end_and_begin(count: int, tmp_path: Path) -> None:
    with site(tmp_path, count) as of:
        found = all_faults(of, [80], print)
        assert not found, "\n".join(found)
        assert of.begun > count or not count, "no workload ended meanwhile"


def test_line_with_a_long_name_is_allowed_and_another_one_is_not() -> None:
    assert is_too_wide("word " * 20, 80)
    assert not is_too_wide("word " * 10 + "n" * 50, 80)
    assert not is_too_wide("word " * 16, 80)
