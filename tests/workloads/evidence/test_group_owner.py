# SPDX-License-Identifier: Apache-2.0
"""The workload of a group that was found is known by the nonce, or by the path while the group is being created."""

from __future__ import annotations

from pathlib import Path

import pytest

from resctrlmond.resctrl.tree import Found, GroupRef
from resctrlmond.workloads.evidence.group_owner import owner_of
from resctrlmond.workloads.model.mark import Mark
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.records.store import Store
from tests.workloads.builders import save, workload

MARK = Mark(gid=7, boot_id="boot")


@pytest.mark.parametrize(
    ("name", "nonce", "owner"),
    [("b", 99, "b"), ("c", 3, "c"), ("renamed", 3, "c"), ("c", 99, None), ("renamed", 99, None)],
)
def test_owner_of_a_group_that_was_found(tmp_path: Path, name: str, nonce: int, owner: str | None) -> None:
    store = Store(str(tmp_path))
    for key in ("a", "b"):
        save(store, workload(key, State.PENDING))
    save(store, workload("c", nonce=3))
    ref = GroupRef("", name)
    for gid, expected in ((MARK.gid, owner), (8, None)):
        found = owner_of(store, MARK, ref, Found(ref, gid, nonce, "/", 1))
        assert (found and found[0].key) == expected


def test_record_decides_about_a_group_that_is_gone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    save(store, workload("c", nonce=3))
    found = [owner_of(store, MARK, GroupRef("", name), None) for name in ("c", "other")]
    assert [one and one[0].key for one in found] == ["c", None]
