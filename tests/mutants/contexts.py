# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that names the test that runs to coverage.py, and writes how long each test took.

Tests are named without their parameters, because these change more often. Other processes that a test starts find its
name in PYTEST_CURRENT_TEST.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_SECONDS: defaultdict[str, float] = defaultdict(float)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the test by its name, with its fixtures."""
    if measured := coverage.Coverage.current():
        measured.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a part of a test."""
    _SECONDS[report.nodeid.partition("[")[0]] += report.duration


def pytest_sessionfinish() -> None:
    """Write the seconds of each test."""
    Path(os.environ["MUTANTS_SECONDS"]).write_text(json.dumps(_SECONDS))
