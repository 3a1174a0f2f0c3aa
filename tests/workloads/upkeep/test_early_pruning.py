# SPDX-License-Identifier: Apache-2.0
"""Ended runs whose files take too much memory: the oldest are pruned before snapshot_ttl."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host


def run_and_end(host: Host, key: str) -> None:
    create(host.ctx, key, owner="a")
    release(host.ctx, key, owner="a")


def size(host: Host, key: str) -> int:
    """The memory of a run's files: their pages, and 1 KiB for each inode."""
    found = {one.st_ino: one for one in (path.lstat() for path in Path(host.run, "groups", key).rglob("*"))}
    return sum(one.st_blocks * 512 + 1024 for one in found.values())


def test_oldest_ended_runs_are_pruned_while_all_exceed_the_limit(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    create(host.ctx, "lives", owner="a")
    for key in ("z-first", "second", "third"):
        run_and_end(host, key)
    host.manager.maintenance.early_pruner.most_bytes = size(host, "second") + size(host, "third")
    host.manager.tick()
    assert host.folder("groups") == ["lives", "second", "third"]
    assert host.folder("records") == ["lives.json", "second.json", "third.json"]
    assert caplog.text.count("removed 1 ended run before snapshot_ttl") == 1
    host.manager.tick()
    assert host.folder("groups") == ["lives", "second", "third"]
    run_and_end(host, "fourth")
    host.manager.tick()
    assert host.folder("groups") == ["fourth", "lives", "third"]
    assert caplog.text.count("before snapshot_ttl") == 1, "logged more often than once a minute"


def test_earlier_runs_of_a_key_count_and_are_pruned(host: Host) -> None:
    for _ in range(3):
        run_and_end(host, "again")
    assert sorted(os.listdir(Path(host.run, "completed", "again"))) == ["1", "2"]
    host.manager.maintenance.early_pruner.most_bytes = 2 * size(host, "again")
    host.manager.tick()
    assert os.listdir(Path(host.run, "completed", "again")) == ["2"]
    host.manager.maintenance.early_pruner.most_bytes = 0
    for _ in range(2):
        host.manager.tick()
    assert (host.folder("groups"), host.folder("completed"), host.folder("records")) == ([], [], [])


def test_lost_run_that_will_be_resumed_is_not_pruned(host: Host) -> None:
    record = create(host.ctx, "lost", owner="a")
    os.rmdir(host.tree.full_path(record.first.ref))
    host.manager.maintenance.early_pruner.most_bytes = 0
    host.manager.tick()
    assert host.get("lost").is_interrupted
    assert "lost.json" in host.folder("records")


def test_ended_runs_are_checked_again_only_after_a_change(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        run_and_end(host, "again")
    host.manager.tick()
    looks: list[int] = []
    pruning = host.manager.maintenance.early_pruner
    prune = pruning._prune

    def counted() -> bool:
        looks.append(1)
        return prune()

    monkeypatch.setattr(pruning, "_prune", counted)
    host.manager.tick()
    assert looks == []
    run_and_end(host, "again")
    pruning.most_bytes = size(host, "again")
    host.manager.tick()
    assert looks == [1]
    assert os.listdir(Path(host.run, "completed")) == ["again"]
    assert os.listdir(Path(host.run, "completed", "again")) == []
