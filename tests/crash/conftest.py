# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests in this directory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.workloads.conftest import MARK


@pytest.fixture
def marked() -> Iterator[None]:
    """Run with the group id of the mark, as the daemon does."""
    before = os.getegid()
    os.setegid(MARK)
    yield
    os.setegid(before)
