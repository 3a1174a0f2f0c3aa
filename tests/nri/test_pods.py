# SPDX-License-Identifier: Apache-2.0
"""The state from the runtime's reports: lists against events, ends, and attributes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.nri.messages import Container, Pod
from resctrlmond.nri.pods import Pods, attributes, container_names
from resctrlmond.nri.selection import Selection
from resctrlmond.workloads.model.errors import InvalidKey
from resctrlmond.workloads.model.pods import ContainerState
from resctrlmond.workloads.model.validation import check_attributes

UID = "0f8fad5b-d9cb-469f-a165-70867728950e"
OTHER = "11111111-2222-4333-8444-555555555555"


def test_list_replaces_all_but_ids_in_earlier_events() -> None:
    pods = Pods()
    pods.replace_all([Pod("old", OTHER)], [Container("c-old", "old")])
    pods.begin()
    pods.record_ids("new")
    pods.add_sandbox(Pod("new", UID))
    pods.record_ids("gone")
    assert pods.replace_all([Pod("gone", OTHER), Pod("listed", OTHER)], [Container("c", "listed")]) == []
    assert set(pods.sandboxes) == {"new", "listed"}
    assert set(pods.members) == {"c"}


def test_events_after_the_list_are_not_remembered() -> None:
    pods = Pods()
    pods.replace_all([], [])
    pods.record_ids("a", "b")
    pods.replace_all([Pod("a", UID)], [])
    assert set(pods.sandboxes) == {"a"}


def test_settled_entries_stay_settled_after_a_list() -> None:
    pods = Pods()
    pods.add_sandbox(Pod("s", UID)).is_settled = True
    pods.add_member(Container("c", "s")).is_settled = True
    pods.begin()
    pods.replace_all([Pod("s", UID), Pod("t", UID)], [Container("c", "s"), Container("d", "t")])
    assert [one.is_settled for one in pods.sandboxes.values()] == [True, False]
    assert [one.is_settled for one in pods.members.values()] == [True, False]


def test_container_that_is_a_workload_of_its_own_stays_one_after_a_list() -> None:
    """Its end belongs to that workload, and it is not assigned again."""
    pods = Pods()
    pods.add_sandbox(Pod("s", UID))
    pods.add_member(Container("own", "s")).key = "own"
    pods.add_member(Container("c", "s"))
    pods.begin()
    pods.replace_all([Pod("s", UID)], [Container("own", "s"), Container("c", "s")])
    assert {name: one.key for name, one in pods.members.items()} == {"own": "own", "c": UID}


def test_invalid_entries_are_reported_and_others_accepted() -> None:
    pods = Pods()
    given = [Pod("good", UID), Pod("bad", "../etc"), Pod("")]
    wrong = pods.replace_all(given, [Container("c", "nowhere"), Container("d", "good"), Container("..", "good")])
    assert len(wrong) == 4
    assert (set(pods.sandboxes), set(pods.members)) == ({"good"}, {"d"})


def test_later_report_adds_fields_and_removes_none() -> None:
    pods = Pods()
    pods.add_sandbox(Pod("s", UID, pid=5))
    assert pods.add_sandbox(Pod("s")).pod == Pod("s", UID, pid=5)
    pods.add_member(Container("c", "s", pid=7, cgroups_path="/x"))
    member = pods.add_member(Container("c", "s", state=ContainerState.RUNNING))
    assert (member.container.pid, member.container.cgroups_path, member.key) == (7, "/x", UID)


def test_a_workload_lives_with_any_of_its_sandboxes() -> None:
    pods = Pods()
    for name in ("a", "b"):
        pods.add_sandbox(Pod(name, UID))
    pods.add_member(Container("c", "a"))
    assert pods.remove_sandbox("a") == ["c"]
    assert pods.has_selected_sandbox(UID)
    assert pods.remove_sandbox("b") == []
    assert not pods.has_selected_sandbox(UID)


def test_without_a_uid_the_sandbox_is_the_workload() -> None:
    assert Pods().add_sandbox(Pod("4d" * 32)).key == "4d" * 32


@given(st.text(max_size=5000), st.dictionaries(st.text(max_size=200), st.text(max_size=200), max_size=90))
def test_attributes_are_limited_for_any_name_of_the_pod(name: str, labels: dict[str, str]) -> None:
    pods = Pods(Selection(annotations=frozenset(labels)))
    sandbox = pods.add_sandbox(Pod("id", UID, name=name, namespace=name, labels=labels, annotations=labels))
    for number in range(60):
        pods.add_member(Container(f"c{number}", "id", name=f"{number}{name}"))
    found = attributes(sandbox) | container_names(sandbox) | {"pod.counted": "as a whole"}
    check_attributes(found)
    assert found["pod.uid"] == UID


def test_attributes_that_are_long_together_fit_the_daemons_limit() -> None:
    long = {f"l{number:02}": "ä" * 4000 for number in range(70)}
    pods = Pods()
    pods.replace_all([Pod("s", UID, name="web", labels=long, annotations=long)], [])
    (sandbox,) = pods.sandboxes.values()
    found = attributes(sandbox)
    check_attributes({**found, "pod.containers": "ä" * 4096, "pod.counted": "no"})
    assert found["pod.name"] == "web"
    assert len(found) > 3


def test_start_time_is_dropped_if_a_list_has_another_pid_for_the_id() -> None:
    """A container restarted while no connection existed: its new process was mistaken for one that has ended."""
    pods = Pods()
    pods.replace_all([Pod("s", UID, pid=10), Pod("same", OTHER, pid=11)], [Container("c", "s", pid=20)])
    for one in (pods.sandboxes["s"], pods.sandboxes["same"], pods.members["c"]):
        one.started = 4711
    pods.begin()
    pods.replace_all([Pod("s", UID, pid=12), Pod("same", OTHER, pid=11)], [Container("c", "s", pid=22)])
    assert pods.sandboxes["s"].started == 0
    assert pods.members["c"].started == 0
    assert pods.sandboxes["same"].started == 4711
    # A sandbox that is reported without a pid is still the known one.
    pods.begin()
    pods.replace_all([Pod("s", UID, pid=12), Pod("same", OTHER)], [Container("c", "s", pid=22)])
    assert pods.sandboxes["same"].started == 4711


def test_sandbox_found_before_its_event_becomes_a_sandbox() -> None:
    pods = Pods()
    pods.add_sandbox(Pod("old", UID))
    pods.add_member(Container("new", "old")).is_found = True
    assert pods.add_sandbox(Pod("new", UID)).key == UID
    assert (set(pods.sandboxes), set(pods.members)) == ({"old", "new"}, set())


def test_reported_container_does_not_become_a_sandbox() -> None:
    pods = Pods()
    pods.add_sandbox(Pod("old", UID))
    pods.add_member(Container("new", "old")).is_found = True
    pods.add_member(Container("new", "old"))
    with pytest.raises(InvalidKey, match="has the id of a container"):
        pods.add_sandbox(Pod("new", UID))
