# SPDX-License-Identifier: Apache-2.0
"""The life of pods, as a runtime reports it and the daemon has it."""

from __future__ import annotations

import pytest

from resctrlmond.nri import nri_pb2
from resctrlmond.nri.messages import Event
from tests.nri.conftest import UID, Node, an_id


@pytest.mark.parametrize("dedicated", [False, True], ids=["StateChange", "dedicated"])
def test_the_life_of_a_pod_with_two_containers(node: Node, dedicated: bool) -> None:
    with node.connected() as plugin:
        assert plugin.greet() == 0x677
        assert plugin.name == "90-resctrlmond"
        plugin.dedicated = dedicated
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        assert node.group()["state"] == "idle", "a pod without a container has its group"
        assert (node.living(), node.owners()) == ({pod.id}, {"nri"})
        first = node.start_container(plugin, pod)
        assert first.pid in node.machine.tasks(UID), "in its group when the runtime receives the response"
        plugin.send_event(Event.POST_START_CONTAINER, pod, first)
        second = node.start_container(plugin, pod)
        assert {first.pid, second.pid} <= node.machine.tasks(UID)
        group = node.group()
        assert (group["state"], group["baseline"]) == ("active", "exact")
        assert group["attributes"] == {
            "pod.name": "web-0",
            "pod.namespace": "shop",
            "pod.uid": UID,
            "pod.label.app": "web",
            "pod.containers": "app",
        }
        assert node.living() == {pod.id, first.id, second.id}
        assert node.member(first.id)["kind"] == "container"

        for one in (first, second):
            node.end(one.pid)
            plugin.send_event(Event.STOP_CONTAINER, pod, one)
            one.pid = 0
            plugin.send_event(Event.REMOVE_CONTAINER, pod, one)
        assert node.living() == {pod.id}
        plugin.send_event(Event.STOP_POD_SANDBOX, pod)
        assert node.owners() == {"nri"}, "a stopped sandbox may have containers again"
        plugin.send_event(Event.REMOVE_POD_SANDBOX, nri_pb2.PodSandbox(id=pod.id))
        assert node.group()["state"] == "completed"
        assert UID not in node.machine.groups()
        snapshot = node.machine.run / "groups" / UID
        assert (snapshot / "completed_at").exists()
        assert list(snapshot.glob("mon_data/*/*.end"))


def test_a_container_that_is_restarted_keeps_the_group_and_its_baseline(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        before = node.start_container(plugin, pod)
        created = node.group()["createdAt"]
        node.end(before.pid)
        plugin.send_event(Event.STOP_CONTAINER, pod, before)
        after = node.start_container(plugin, pod)
        group = node.group()
        assert (group["createdAt"], group["generation"], group["baseline"]) == (created, 1, "exact")
        assert node.machine.tasks(UID) == {after.pid}


def test_a_replaced_sandbox_keeps_the_group_until_the_last_one_is_removed(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        old, new = node.pod(), node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, old)
        plugin.send_event(Event.STOP_POD_SANDBOX, old)
        plugin.send_event(Event.RUN_POD_SANDBOX, new)
        container = node.start_container(plugin, new)
        plugin.send_event(Event.REMOVE_POD_SANDBOX, old)
        assert node.living() == {new.id, container.id}
        assert node.machine.tasks(UID) == {container.pid}
        plugin.send_event(Event.REMOVE_POD_SANDBOX, new)
        assert node.group()["state"] == "completed"


def test_claims_of_two_owners_end_separately(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        container = node.container(pod, node.process())
        # The hook runs before the runtime sends the event.
        node.assign_as_hook(container)
        plugin.send_event(Event.START_CONTAINER, pod, container)
        assert node.owners() == {"engine", "nri"}
        assert node.member(container.id)["owner"] == "engine", (
            "the hook's member stays the hook's: its claim ends with it"
        )
        plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        assert node.owners() == {"engine"}
        assert node.group()["state"] == "idle"


def test_list_of_a_new_connection_replaces_the_known_containers(node: Node) -> None:
    gone_uid = "11111111-2222-4333-8444-555555555555"
    with node.connected() as plugin:
        plugin.greet()
        pod, gone = node.pod(), node.pod(gone_uid)
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        plugin.send_event(Event.RUN_POD_SANDBOX, gone)
        kept = node.start_container(plugin, pod)
        ended = node.start_container(plugin, pod)
        node.start_container(plugin, gone)
    running = node.running(pod)
    stopped = node.container(pod, node.process(), state=4)
    kept.state, ended.state = 3, 4
    with node.connected() as plugin:
        plugin.greet([pod], [kept, running, stopped, ended])
        node.until(lambda: node.living() == {pod.id, kept.id, running.id}, "the containers of the list")
        node.until(lambda: node.group(gone_uid)["state"] == "completed", "the end of the pod that is gone")
        node.until(lambda: node.machine.tasks(UID) == {kept.pid, running.pid, ended.pid}, "the tasks")
        assert node.member(running.id)["late"], "it ran before it was in its group"
        assert not node.member(kept.id).get("late"), "it was always in the group"
        assert node.group()["baseline"] == "late"


def test_list_in_chunks_is_complete_and_older_than_events(node: Node) -> None:
    with node.connected() as plugin:
        plugin.registered()
        plugin.configure()
        pods = [node.pod(f"0000000{number}-2222-4333-8444-555555555555") for number in range(4)]
        containers = [node.container(pod, node.process()) for pod in pods]
        removed, late = pods[0], node.pod()
        plugin.send("Synchronize", nri_pb2.SynchronizeRequest(pods=pods[:2], more=True).SerializeToString())
        assert nri_pb2.SynchronizeResponse.FromString(plugin.answer()[1].payload).more
        plugin.send_event(Event.RUN_POD_SANDBOX, late)
        plugin.send_event(Event.REMOVE_POD_SANDBOX, removed)
        plugin.synchronize(
            nri_pb2.SynchronizeRequest(pods=pods[2:], containers=containers[1:2]),
            nri_pb2.SynchronizeRequest(containers=containers[2:]),
        )
        listed = {pod.uid: {pod.id, one.id} for pod, one in zip(pods[1:], containers[1:], strict=True)}
        node.until(lambda: {uid: node.living(uid) for uid in listed} == listed, "the pods of the list")
        assert node.living() == {late.id}
        assert node.owners(removed.uid) == set()


def test_start_in_an_unreported_pod_adds_the_pod(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        container = node.start_container(plugin, node.pod())
        assert node.machine.tasks(UID) == {container.pid}
        assert container.pod_sandbox_id in node.living()


def test_ends_of_unknown_containers_are_ignored(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        for event in (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER):
            plugin.send_event(event, pod, node.container(pod, 0))
        plugin.send_event(Event.REMOVE_POD_SANDBOX, node.pod("11111111-2222-4333-8444-555555555555"))
        plugin.send_event(Event.STOP_CONTAINER)
        plugin.send_event(Event.START_CONTAINER, pod)
        plugin.send_event(Event.START_CONTAINER, None, node.container(pod, 0, pod_sandbox_id="f" * 64))
        assert "to a sandbox that the runtime has not reported" in node.log_text()


def test_late_end_does_not_add_a_removed_pod_again(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        container = node.start_container(plugin, pod)
        plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        node.end(container.pid)
        for event in (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER, Event.STOP_POD_SANDBOX):
            plugin.send_event(event, pod, container)
        rescans = node.log_text().count("rescan")
        node.until(lambda: node.log_text().count("rescan") > rescans, "a rescan")
        assert node.group()["state"] == "completed"
        assert node.machine.groups() == []


def test_the_same_start_again_changes_nothing(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        container = node.start_container(plugin, pod)
        before = node.group()
        plugin.send_event(Event.START_CONTAINER, pod, container)
        plugin.send_event(Event.POST_START_CONTAINER, pod, container)
        assert node.group()["members"] == before["members"]
    with node.connected() as plugin:
        container.state = 3
        plugin.greet([pod], [container])
        plugin.send_event(Event.START_CONTAINER, pod, container)
        assert node.group()["members"] == before["members"]
        assert node.group()["baseline"] == "exact"


def test_pods_of_the_same_uid_in_other_spellings_are_one(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod(UID.upper()))
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod(UID.replace("-", "")))
        assert len(node.living()) == 2
        assert node.machine.groups() == [UID]


@pytest.mark.parametrize(
    "fields",
    [
        {"uid": "../../etc"},
        {"uid": "x" * 5000},
        {"uid": "tasks"},
        {"id": "../x"},
        {"id": ""},
    ],
    ids=["path", "long", "tasks", "id-path", "id-empty"],
)
def test_a_pod_with_a_hostile_name_starts_unmonitored_and_the_next_is_served(
    node: Node, fields: dict[str, str]
) -> None:
    with node.connected() as plugin:
        plugin.greet([node.pod(**{"id": an_id()} | fields)])
        bad = node.pod(**fields)
        plugin.send_event(Event.RUN_POD_SANDBOX, bad)
        plugin.send_event(Event.START_CONTAINER, bad, node.container(bad, node.process()))
        container = node.start_container(plugin, node.pod())
        assert node.machine.groups() == [UID]
        assert node.machine.tasks(UID) == {container.pid}
        assert "unmonitored" in node.log_text()


def test_containers_in_the_process_of_their_sandbox_are_counted_with_it_and_logged(node: Node) -> None:
    """Kata Containers and gVisor report the process of the virtual machine or of their kernel for each container."""
    with node.connected() as plugin:
        plugin.greet()
        machine = node.process()
        pod = node.pod(pid=machine, runtime_handler="kata-qemu")
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        first, second = (node.container(pod, machine, state=1) for _ in range(2))
        for container in (first, second):
            plugin.send_event(Event.START_CONTAINER, pod, container)
        assert node.machine.tasks(UID) == {machine}
        assert node.living() == {pod.id, first.id, second.id}
        attributes = node.group()["attributes"]
        assert attributes["pod.runtime_handler"] == "kata-qemu"
        assert attributes["pod.counted"].startswith("as a whole")
        plugin.send_event(Event.STOP_CONTAINER, pod, first)
        assert node.machine.tasks(UID) == {machine}, "the other container runs in the same process"


def test_labels_above_the_limits_are_omitted_and_the_pod_is_monitored(node: Node) -> None:
    labels = {f"l{number:03}": "v" for number in range(100)} | {"a" * 300: "long", "b": "x" * 5000, "c": "1\n2"}
    with node.connected() as plugin:
        plugin.greet()
        plugin.send_event(Event.RUN_POD_SANDBOX, node.pod(labels=labels | {"io.kubernetes.pod.name": "again"}))
        attributes = node.group()["attributes"]
        assert len(attributes) == 62, "two are reserved for attributes of containers"
        assert attributes["pod.label.b"] == "x" * 4096
        assert attributes["pod.label.c"] == "12"
        assert attributes["pod.label.l000"] == "v"
        assert "pod.label.io.kubernetes.pod.name" not in attributes
