# SPDX-License-Identifier: Apache-2.0
"""The lists of classes and groups that other threads begin and drop at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl.arrivals import Arrivals
from resctrlmond.resctrl.tree import Tree

GROUPS = 2000


@pytest.fixture
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_the_list_of_a_new_group_stays_while_other_lists_are_dropped(tmp_path: Path) -> None:
    arrivals = Arrivals(Tree(str(tmp_path), simulation=""))
    watched: dict[str, None] = {}
    has_begun_all = threading.Event()

    def drop() -> None:
        while not has_begun_all.is_set():
            arrivals.keep(lambda: set(watched.copy()))

    dropping = threading.Thread(target=drop)
    dropping.start()
    for number in range(GROUPS):
        watched[f"mon_groups/{number}"] = None
        arrivals.begin_empty(f"mon_groups/{number}")
    has_begun_all.set()
    dropping.join()
    assert len(arrivals) == GROUPS
    arrivals.keep(lambda: {"mon_groups/7"})
    assert len(arrivals) == 1
