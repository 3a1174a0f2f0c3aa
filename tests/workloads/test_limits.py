# SPDX-License-Identifier: Apache-2.0
"""Callers can add only a limited amount to a workload and to all workloads, and every record can be read back."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.errors import InvalidAttributes, LimitExceeded, NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.validation import MAX_ATTRIBUTE_LENGTH, MAX_ATTRIBUTES, merged_attributes
from resctrlmond.workloads.records import atomic_files, store
from resctrlmond.workloads.records.store import Store
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.members import add_member, remove_member
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import drop, save
from tests.workloads.conftest import Host, assignment

Process = Callable[[], subprocess.Popen[bytes]]


def _many(prefix: str, size: int = MAX_ATTRIBUTE_LENGTH, count: int = 8) -> dict[str, str]:
    return {f"{prefix}-{number}": "ä" * (size // 2) for number in range(count)}


def test_attributes_of_several_calls_are_limited_together(host: Host) -> None:
    """17 Creates with 64 new names each made a record that the next start could not read."""
    create(host.ctx, "grows", owner="agent", attributes=_many("first"))
    with pytest.raises(InvalidAttributes, match=r"more than 65536.*already"):
        for number in range(17):
            create(host.ctx, "grows", owner="agent", attributes=_many(str(number)))
    with pytest.raises(InvalidAttributes, match=r"more than 64 .*already"):
        for number in range(3):
            create(host.ctx, "many", owner="agent", attributes=_many(str(number), 2, 60))
    before = {one.key: one for one in host.ctx.store.all()}
    host.restart()
    assert {one.key: one for one in host.ctx.store.all()} == before
    assert before["grows"].is_claimed_by("agent")
    assert baseline_of(before["grows"]) is Quality.EXACT
    assert release(host.ctx, "grows", owner="agent").completed


def test_a_known_name_can_be_given_a_new_value_at_the_limit(host: Host) -> None:
    create(host.ctx, "full", owner="agent", attributes={f"n{number}": "" for number in range(MAX_ATTRIBUTES)})
    record = create(host.ctx, "full", owner="agent", attributes={"n0": "new"})
    assert record.attributes["n0"] == "new"


def test_attributes_of_a_hook_are_omitted_if_they_exceed_the_limit(host: Host, process: Process) -> None:
    create(host.ctx, "pod", owner="agent", attributes={f"n{number}": "" for number in range(MAX_ATTRIBUTES - 1)})
    coming = assignment("pod", process().pid, attributes={"pod.name": "web", "pod.uid": "x"}, is_from_runtime=True)
    done = assign(host.ctx, coming)
    assert done.moved.moved == 1
    assert len(done.workload.attributes) == MAX_ATTRIBUTES
    assert done.workload.attributes["pod.name"] == "web"


def test_merge_keeps_existing_attributes() -> None:
    before = {"a": "1", "b": "2"}
    assert merged_attributes(before, {"b": "3", "c": "4"}) == {"a": "1", "b": "3", "c": "4"}
    full = {f"n{number}": "" for number in range(MAX_ATTRIBUTES)}
    assert merged_attributes(full, {"other": "", "n1": "x"}, fitting=True) == full | {"n1": "x"}


def test_claims_are_limited(host: Host) -> None:
    for number in range(store.MAX_CLAIMS):
        create(host.ctx, "claimed", owner=f"owner-{number}")
    with pytest.raises(LimitExceeded, match="64 claims already"):
        create(host.ctx, "claimed", owner="one-too-many")
    assert create(host.ctx, "claimed", owner="owner-1").is_claimed_by("owner-1")


def test_living_members_are_limited(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_LIVING_MEMBERS", 3)
    create(host.ctx, "crowd", owner="agent")
    for number in range(3):
        add_member(host.ctx, "crowd", f"sandbox-{number}", owner="agent")
    with pytest.raises(LimitExceeded, match="3 living members already"):
        add_member(host.ctx, "crowd", "one-too-many", owner="agent")
    remove_member(host.ctx, "crowd", "sandbox-1")
    assert add_member(host.ctx, "crowd", "another", owner="agent").member("another")


def test_a_process_over_a_limit_is_put_back(host: Host, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = process().pid
    assign(host.ctx, assignment("tight", process().pid))
    monkeypatch.setattr(store, "MAX_RECORD_BYTES", 100)
    with pytest.raises(LimitExceeded, match="more than 100"):
        assign(host.ctx, assignment("tight", pid))
    assert host.tree.membership(pid).group == ""
    with pytest.raises(LimitExceeded):
        assign(host.ctx, assignment("new", pid))
    assert [one.key for one in host.ctx.store.all()] == ["tight"]
    host.check()


def test_size_of_all_records_is_limited_with_a_reserve_for_the_hook(
    host: Host, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(host.ctx, "first", owner="agent")
    monkeypatch.setattr(store, "MAX_BYTES", 1200)
    with pytest.raises(LimitExceeded, match="more than 1200"):
        for number in range(10):
            create(host.ctx, f"leak-{number}", owner="agent")
    host.check()
    done = assign(host.ctx, assignment("container", process().pid, is_from_runtime=True))
    assert done.moved.moved == 1
    # Ends are still recorded, and make room when the workloads are forgotten.
    for one in host.ctx.store.all():
        for claim in one.claims:
            release(host.ctx, one.key, owner=claim.owner)
        drop(host.ctx.store, one.key)
    create(host.ctx, "again", owner="agent")


def test_ended_run_is_restored_if_the_new_run_exceeds_a_limit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    create(host.ctx, "web", owner="agent")
    release(host.ctx, "web", owner="agent")
    before = (host.get("web"), host.files("web"))
    monkeypatch.setattr(store, "MAX_RECORD_BYTES", 100)
    with pytest.raises(LimitExceeded):
        create(host.ctx, "web", owner="agent")
    assert (host.get("web"), host.files("web")) == before


def test_a_file_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_files.write_file(str(path), bytes(4 << 20))
    with pytest.raises(OSError) as caught:
        atomic_files.write_file(str(path), bytes((4 << 20) + 1))
    assert caught.value.errno == errno.EFBIG
    assert len(atomic_files.read_file(str(path))) == 4 << 20
    assert os.listdir(tmp_path) == ["file"]


def test_a_record_that_could_not_be_read_back_is_not_written(host: Host) -> None:
    made = create(host.ctx, "whole", owner="agent")
    records = Store(os.path.join(host.run, "records"))
    with pytest.raises(NotWritten, match="EFBIG"):
        save(records, msgspec.structs.replace(made, attributes=_many("huge", count=2000)))
    assert list(records.read_all()) == [made]
