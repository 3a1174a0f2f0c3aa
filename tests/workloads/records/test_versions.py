# SPDX-License-Identifier: Apache-2.0
"""The format of records. Those of a later version wait for it, untouched."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.workloads.figures.verdict import baseline_of
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import (
    Claim,
    Doubt,
    EndRule,
    Group,
    GroupState,
    Member,
    Nested,
    NestedTotal,
    Part,
    PriorRuns,
    State,
    Workload,
    replace,
)
from resctrlmond.workloads.records.record_format import VERSION, UnreadableRecord, decode
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.create import create
from tests.workloads.builders import workload
from tests.workloads.conftest import Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]

WHOLE = """\
{
 "version": 1,
 "key": "0f8fad5b-d9cb-469f-a165-70867728950e",
 "groups": [
  {
   "class": "gold", "name": "0f8fad5b-d9cb-469f-a165-70867728950e", "state": "created", "reason": "why",
   "inLimbo": true, "nonce": 1795190400123456789, "bootId": "b1946ac9-2492-4d23-8f0e-0123456789ab",
   "hasBegin": true, "doubts": [{"reason": "CHANGED", "values": {"file": "f"}, "events": ["mbm_total_bytes"]}],
   "inodes": {"mon_L3_00": 7}, "transactions": {"L3_MON/EVENT_config": "0=0x7f"},
   "unassigned": [["mon_L3_00", "mbm_local_bytes"]], "createdAt": "2026-11-21T10:00:00Z",
   "createdNs": 3600000000000, "completedAt": "2026-11-21T11:00:00Z", "completedNs": 7200000000000
  },
  {"folder": "silver", "class": "silver", "name": "g", "state": "pending"}
 ],
 "generation": 2,
 "followsClass": true,
 "isActive": true,
 "priority": -5,
 "podCgroup": "/sys/fs/cgroup/kubepods.slice/pod",
 "claims": [{"owner": "oci", "since": "2026-11-21T10:00:00Z", "ends": "container"}],
 "members": [
  {
   "id": "c1", "kind": "container", "owner": "oci", "pid": 4711, "startTime": 99, "cgroup": "/sys/fs/cgroup/c1",
   "startedAt": "2026-11-21T10:00:00Z", "endedAt": "2026-11-21T10:00:01Z", "late": true, "tasksOutside": 3,
   "reason": "ended", "folder": "silver"
  }
 ],
 "attributes": {"pod": "web-0"},
 "attributeOwners": {"pod": "oci"},
 "otherCpuNs": {"c1": 5},
 "idleNs": 77,
 "priorRuns": {"totals": {"mbm_total_bytes": "12"}, "reason": "its group was lost", "losses": 2},
 "partOf": ["outer", "outermost"],
 "leftTasks": true,
 "nested": {
  "living": [{"key": "inner", "nonce": 7}],
  "totals": {"core_energy": {"value": "1.5", "quality": "late", "reason": "why"}},
  "count": 3,
  "missing": "gone",
  "has_gap": true
 }
}
"""
LEAST = '{"version": 1, "key": "k", "groups": [{"name": "k"}]}\n'


@pytest.mark.parametrize(
    ("old", "new"),
    [('"CHANGED"', '"changed"'), ('"values": {"file": "f"}, ', ""), ('{"file": "f"}', '{"files": "f"}')],
)
def test_record_with_a_doubt_that_has_no_text_is_damaged(old: str, new: str) -> None:
    with pytest.raises(UnreadableRecord, match="a doubt of the reason"):
        decode(WHOLE.replace(old, new).encode(), "file")


def test_totals_of_a_record_without_a_known_begin_are_unknown() -> None:
    """As a record from before it was there."""
    assert baseline_of(decode(WHOLE.replace('"hasBegin": true, ', "").encode(), "file")) is Quality.UNKNOWN


def test_every_field_is_read() -> None:
    uid = "0f8fad5b-d9cb-469f-a165-70867728950e"
    time = "2026-11-21T10:00:00Z"
    first = Group(
        class_="gold",
        name=uid,
        state=GroupState.CREATED,
        reason="why",
        in_limbo=True,
        nonce=1795190400123456789,
        boot_id="b1946ac9-2492-4d23-8f0e-0123456789ab",
        has_begin=True,
        doubts=(Doubt("CHANGED", {"file": "f"}, ("mbm_total_bytes",)),),
        inodes={"mon_L3_00": 7},
        transactions={"L3_MON/EVENT_config": "0=0x7f"},
        unassigned=(("mon_L3_00", "mbm_local_bytes"),),
        created_at=time,
        created_ns=3600 * 10**9,
        completed_at="2026-11-21T11:00:00Z",
        completed_ns=7200 * 10**9,
    )
    member = Member(
        id="c1",
        kind="container",
        owner="oci",
        pid=4711,
        start_time=99,
        cgroup="/sys/fs/cgroup/c1",
        started_at=time,
        ended_at=time[:-2] + "1Z",
        late=True,
        tasks_outside=3,
        reason="ended",
        folder="silver",
    )
    assert decode(WHOLE.encode(), "file") == Workload(
        key=uid,
        groups=(first, Group(folder="silver", class_="silver", name="g")),
        generation=2,
        follows_class=True,
        is_active=True,
        priority=-5,
        pod_cgroup="/sys/fs/cgroup/kubepods.slice/pod",
        claims=(Claim("oci", time, EndRule.CONTAINER),),
        members=(member,),
        attributes={"pod": "web-0"},
        attribute_owners={"pod": "oci"},
        idle_ns=77,
        prior_runs=PriorRuns({"mbm_total_bytes": "12"}, "its group was lost", 2),
        part_of=("outer", "outermost"),
        left_tasks=True,
        nested=Nested(
            living=(Part("inner", 7),),
            totals={"core_energy": NestedTotal("1.5", Quality.LATE, "why")},
            count=3,
            missing="gone",
            has_gap=True,
        ),
    )
    assert decode(LEAST.encode(), "file") == workload("k", State.PENDING)


def rewritten(host: Host, old: int, new: int) -> bytes:
    path = Path(host.run, "records", "k.json")
    path.write_bytes(path.read_bytes().replace(b'"version": %d' % old, b'"version": %d' % new))
    return path.read_bytes()


@pytest.mark.parametrize("has_task", [True, False])
def test_records_of_a_later_version_are_not_changed(host: Host, process: Start, has_task: bool) -> None:
    if has_task:
        assign(host.ctx, assignment("k", process().pid))
    else:
        create(host.ctx, "k", owner="a")
    before, files, group = host.get("k"), host.files("k"), host.marked_groups()
    later = rewritten(host, VERSION, VERSION + 1)

    manager = host.restart()
    problems = [problem for problem in manager.problems if f"format {VERSION + 1}, not {VERSION}" in problem]
    assert len(problems) == 1
    assert str(Path(host.run, "records", "k.json")) in problems[0]
    assert any("another version wrote its record: not changed" in problem for problem in manager.problems)
    manager.maintenance.tick()
    assert manager.context.store.all() == []
    assert host.folder("records") == ["k.json"]
    assert Path(host.run, "records", "k.json").read_bytes() == later
    assert (host.files("k"), host.marked_groups()) == (files, group)

    rewritten(host, VERSION + 1, VERSION)
    assert host.restart().context.store.known("k") == before
    host.check()


def test_call_for_the_key_gets_a_new_run_and_the_later_record_is_kept(host: Host, process: Start) -> None:
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    later = rewritten(host, VERSION, VERSION + 1)
    manager = host.restart()
    assert baseline_of(create(manager.context, "k", owner="a")) is Quality.UNKNOWN
    assert assign(manager.context, assignment("k", child.pid)).workload.state is State.ACTIVE
    assert Path(host.run, "records", "k.json.unreadable").read_bytes() == later
    host.check()


@pytest.mark.parametrize("prefix", ["", "rm-"])
def test_take_over_from_a_workload_of_a_later_version_is_marked(host: Host, process: Start, prefix: str) -> None:
    """Its record cannot be changed, and said exact when that version was back."""
    host.settings = host.ctx.config.settings = replace(host.settings, group_prefix=prefix)
    child = process()
    assign(host.ctx, assignment("k", child.pid))
    rewritten(host, VERSION, VERSION + 1)
    host.restart()
    assign(host.ctx, assignment("another", child.pid, take_over=True))
    child.kill()
    child.wait()
    rewritten(host, VERSION + 1, VERSION)
    host.restart()
    assert baseline_of(host.get("k")) is Quality.ESTIMATED


def test_take_over_marks_no_other_workload_of_a_later_version(host: Host, process: Start) -> None:
    assign(host.ctx, assignment("k", process().pid))
    child = process()
    assign(host.ctx, assignment("other", child.pid))
    rewritten(host, VERSION, VERSION + 1)
    host.restart()
    assign(host.ctx, assignment("another", child.pid, take_over=True))
    rewritten(host, VERSION + 1, VERSION)
    host.restart()
    assert baseline_of(host.get("k")) is Quality.EXACT
    assert baseline_of(host.get("other")) is Quality.LATE
