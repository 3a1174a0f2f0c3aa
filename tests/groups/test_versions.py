# SPDX-License-Identifier: Apache-2.0
"""Records of other versions: those of each released one are read, those of a later one wait for it, untouched."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.groups.accounting import Quality
from resctrlmond.groups.record import VERSION, Claim, EndRule, Member, Record, State, decode
from tests.groups.conftest import Host, assignment

Start = Callable[[], "subprocess.Popen[bytes]"]

# Files as versions wrote them, to the byte: one here for each version of the format, never to be edited. A new
# version of the format brings the code that reads these.
WHOLE_1 = """\
{
 "version": 1,
 "key": "0f8fad5b-d9cb-469f-a165-70867728950e",
 "class": "gold",
 "follows": true,
 "groupName": "0f8fad5b-d9cb-469f-a165-70867728950e",
 "state": "active",
 "reason": "why",
 "inLimbo": true,
 "generation": 2,
 "nonce": 1795190400123456789,
 "bootId": "b1946ac9-2492-4d23-8f0e-0123456789ab",
 "baseline": "late",
 "priority": -5,
 "podCgroup": "/sys/fs/cgroup/kubepods.slice/pod",
 "claims": [{"owner": "oci", "since": "2026-11-21T10:00:00Z", "ends": "container"}],
 "members": [
  {
   "id": "c1", "kind": "container", "owner": "oci", "pid": 4711, "startTime": 99, "cgroup": "/sys/fs/cgroup/c1",
   "startedAt": "2026-11-21T10:00:00Z", "endedAt": "2026-11-21T10:00:01Z", "late": true, "left": 3,
   "reason": "ended", "part": "silver"
  }
 ],
 "attributes": {"pod": "web-0"},
 "createdAt": "2026-11-21T10:00:00Z",
 "completedAt": "2026-11-21T11:00:00Z",
 "createdNs": 3600000000000,
 "completedNs": 7200000000000,
 "idleNs": 77,
 "further": [
  {"version": 1, "key": "0f8fad5b-d9cb-469f-a165-70867728950e", "class": "silver", "groupName": "g", "state": "idle",
   "part": "silver"}
 ]
}
"""
LEAST_1 = '{"version": 1, "key": "k", "groupName": "k", "state": "pending", "attributes": {}}\n'


def test_every_field_of_version_1_is_read() -> None:
    uid = "0f8fad5b-d9cb-469f-a165-70867728950e"
    time = "2026-11-21T10:00:00Z"
    member = Member("c1", "container", "oci", 4711, 99, "/sys/fs/cgroup/c1", time, time[:-2] + "1Z")
    member = Member(*(getattr(member, name) for name in Member.__struct_fields__[:8]), True, 3, "ended", "silver")
    assert decode(WHOLE_1.encode(), "file") == Record(
        key=uid,
        class_="gold",
        follows=True,
        group_name=uid,
        state=State.ACTIVE,
        reason="why",
        in_limbo=True,
        generation=2,
        nonce=1795190400123456789,
        boot_id="b1946ac9-2492-4d23-8f0e-0123456789ab",
        baseline=Quality.LATE,
        priority=-5,
        pod_cgroup="/sys/fs/cgroup/kubepods.slice/pod",
        claims=(Claim("oci", time, EndRule.CONTAINER),),
        members=(member,),
        attributes={"pod": "web-0"},
        created_at=time,
        completed_at="2026-11-21T11:00:00Z",
        created_ns=3600 * 10**9,
        completed_ns=7200 * 10**9,
        idle_ns=77,
        further=(Record(key=uid, class_="silver", group_name="g", state=State.IDLE, part="silver"),),
    )
    assert decode(LEAST_1.encode(), "file") == Record(key="k", group_name="k", state=State.PENDING)


def test_there_is_a_file_of_every_version() -> None:
    kept = {int(name.removeprefix("WHOLE_")) for name in globals() if name.startswith("WHOLE_")}
    assert kept == set(range(1, VERSION + 1))


def rewritten(host: Host, old: int, new: int) -> bytes:
    path = Path(host.run, "records", "k.json")
    path.write_bytes(path.read_bytes().replace(b'"version": %d' % old, b'"version": %d' % new))
    return path.read_bytes()


@pytest.mark.parametrize("has_task", [True, False])
def test_what_a_later_version_wrote_is_left_alone_until_that_is_back(
    host: Host, process: Start, has_task: bool
) -> None:
    if has_task:
        host.manager.assign(assignment("k", process().pid))
    else:
        host.manager.create("k", owner="a")
    before, files, group = host.manager.get("k"), host.files("k"), host.ours()
    later = rewritten(host, VERSION, VERSION + 1)

    manager = host.restart()
    told = [problem for problem in manager.problems if f"format {VERSION + 1}, not {VERSION}" in problem]
    assert len(told) == 1
    assert str(Path(host.run, "records", "k.json")) in told[0]
    assert any("another version wrote its record: not changed" in problem for problem in manager.problems)
    manager.upkeep.tick()
    assert manager.records() == []
    assert host.folder("records") == ["k.json"]
    assert Path(host.run, "records", "k.json").read_bytes() == later
    assert (host.files("k"), host.ours()) == (files, group)

    rewritten(host, VERSION + 1, VERSION)
    assert host.restart().get("k") == before
    host.check()


def test_who_asks_for_the_key_gets_a_new_run_and_the_later_record_is_kept(host: Host, process: Start) -> None:
    child = process()
    host.manager.assign(assignment("k", child.pid))
    later = rewritten(host, VERSION, VERSION + 1)
    manager = host.restart()
    assert manager.create("k", owner="a").baseline is Quality.UNKNOWN
    assert manager.assign(assignment("k", child.pid)).record.state is State.ACTIVE
    assert Path(host.run, "records", "k.json.unreadable").read_bytes() == later
    host.check()
