# SPDX-License-Identifier: Apache-2.0
"""Each section of the benchmark ends and has figures; none of them is compared with anything."""

from __future__ import annotations

import json
import math

import pytest

from tests.bench.measure import p99, table
from tests.bench.sections import SAMPLE, SECTIONS, measured


@pytest.mark.parametrize("name", SECTIONS)
def test_every_row_of_a_section_has_figures(name: str) -> None:
    rows = list(measured(name, SAMPLE))
    assert rows
    for row in rows:
        assert row.ours
        assert len(row.ours) == len(row.bare)
        assert all(map(math.isfinite, row.ours + row.ratios))
        assert json.loads(json.dumps(row.as_json()))["row"] == row.what
    lines = table(rows).splitlines()
    assert all(line.startswith(row.what) for line, row in zip(lines[1:], rows, strict=True))


def test_99th_percentile_is_the_nearest_rank() -> None:
    assert p99([float(number) for number in range(200, 0, -1)]) == 198
    assert p99([1.0, 3.0, 2.0]) == 3
