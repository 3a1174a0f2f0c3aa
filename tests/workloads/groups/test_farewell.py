# SPDX-License-Identifier: Apache-2.0
"""release_all() writes the ends and removes every marked group, and no foreign group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.workloads.model.workload import State
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from tests.workloads.conftest import MARK, UID, Host, assignment

CTR = "4d" * 32
Start = Callable[[], "subprocess.Popen[bytes]"]


def test_living_and_idle_and_classed_workloads_all_end_with_their_values(host: Host, process: Start) -> None:
    host.make_class("gold")
    child = process()
    assign(host.ctx, assignment(CTR, child.pid, "oci", member="c1"))
    create(host.ctx, UID, owner="nri")
    create(host.ctx, "web", owner="cli", class_="gold")
    foreign = [host.make_foreign("theirs"), host.make_foreign("7" * 36, "gold")]
    manager = host.restart()
    assert manager.release_all() == []
    assert host.marked_groups() == []
    assert sorted(found.ref for found in host.tree.scan()) == sorted(foreign)
    for key in (CTR, UID, "web"):
        record = manager.context.store.known(key)
        assert (record.state, record.reason, record.claims) == (
            State.COMPLETED,
            "resctrlmond released all its groups",
            (),
        )
        assert any(name.endswith(".end") for name in host.files(key))
    assert child.poll() is None, "a task was ended"
    host.check()


def test_group_without_a_record_is_removed_too(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("lost", child.pid))
    os.unlink(os.path.join(host.run, "records", "lost.json"))
    unnameable = host.tree.full_path(GroupRef("", ".no key"))
    os.mkdir(unnameable)
    assert host.tree.find(GroupRef("", ".no key")).gid == MARK  # type: ignore[union-attr]
    with open(os.path.join(unnameable, "tasks"), "w", encoding="ascii") as tasks:
        tasks.write(str(process().pid))
    manager = host.restart()
    assert len(host.marked_groups()) == 2
    assert manager.release_all() == []
    assert host.marked_groups() == []
    assert manager.context.store.known("lost").state is State.COMPLETED


def test_lost_workload_is_not_resumed_by_a_later_start(
    host: Host, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost run waits for a new group: the next start created it although the package was gone."""
    monkeypatch.setattr("resctrlmond.workloads.groups.resumption.RESUME_S", 0.0)
    seen, unseen = (assign(host.ctx, assignment(key, process().pid)).workload for key in ("seen", "unseen"))
    os.rmdir(host.tree.full_path(seen.first.ref))
    host.manager.maintenance.tick()
    os.rmdir(host.tree.full_path(unseen.first.ref))
    assert host.manager.release_all() == []
    host.restart().maintenance.tick()
    assert host.marked_groups() == []
    states = {record.key: (record.state, record.claims) for record in host.ctx.store.all()}
    assert states == {"seen": (State.LOST, ()), "unseen": (State.LOST, ())}
    host.check()


def test_failed_write_is_reported_and_the_other_workloads_end(host: Host) -> None:
    create(host.ctx, "blocked", owner="cli")
    create(host.ctx, "web", owner="cli")
    manager = host.restart()
    # An ended run's seal cannot take the place of a folder.
    os.mkdir(os.path.join(host.run, "groups", "blocked", "completed_at"))
    (problem,) = manager.release_all()
    assert "completed_at" in problem
    assert manager.context.store.known("web").state is State.COMPLETED
    assert host.marked_groups() == [], "an RMID is worth more than an end that cannot be written"


def test_second_call_changes_nothing(host: Host) -> None:
    create(host.ctx, "web", owner="cli")
    assert host.restart().release_all() == []
    assert host.restart().release_all() == []
    host.check()
