# SPDX-License-Identifier: Apache-2.0
"""The daemon lists all pods and containers that the runtime has reported, monitored or not."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from resctrlmond.api import signatures, types
from resctrlmond.api.signatures import Signature
from resctrlmond.client import VarlinkError
from resctrlmond.nri import inventory
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.messages import Container, Event, Pod
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.updater import Updater
from resctrlmond.workloads.model.errors import InvalidAttributes, InvalidKey, InvalidRequest, LimitExceeded
from resctrlmond.workloads.model.pods import MAX_SANDBOXES, ContainerState, Inventory, ReportedContainer, Sandbox
from tests.nri.conftest import UID, Node

OTHER = "11111111-2222-4333-8444-555555555555"


def listed(node: Node) -> dict[str, dict[str, Any]]:
    """Return the pods that the daemon lists, by key."""
    return {pod["key"]: pod for pod in node.machine.call("ListPods")["pods"]}


def states(node: Node, key: str = UID) -> dict[str, str]:
    """Return the containers of a pod that the daemon lists: name or ID, and state."""
    return {one["name"] or one["id"]: one["state"] for one in listed(node).get(key, {}).get("containers", ())}


def test_containers_from_created_to_removed(node: Node) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        container = node.container(pod, 0, state=1)
        plugin.send_event(Event.POST_CREATE_CONTAINER, pod, container)
        node.until(lambda: states(node) == {"app": "created"}, "the container that was created")
        container.pid = node.process()
        plugin.send_event(Event.START_CONTAINER, pod, container)
        node.until(lambda: states(node) == {"app": "running"}, "the container that runs")
        [entry] = listed(node).values()
        assert (entry["name"], entry["namespace"], entry["labels"]) == (
            "web-0",
            "shop",
            {"app": "web"},
        )
        assert entry["sandboxes"] == [pod.id]
        assert entry["workload"] == node.group()
        [one] = entry["containers"]
        assert (one["monitored"], one["pid"], one["sandbox"]) == (True, container.pid, pod.id)
        node.end(container.pid)
        plugin.send_event(Event.STOP_CONTAINER, pod, container)
        node.until(lambda: states(node) == {"app": "stopped"}, "the container that stopped")
        plugin.send_event(Event.REMOVE_CONTAINER, pod, container)
        node.until(lambda: states(node) == {}, "no container")
        plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        node.until(lambda: listed(node) == {}, "no pod")


def test_restarted_daemon_gets_the_inventory_again(node: Node) -> None:
    with node.connected() as plugin:
        pods = [node.pod(), node.pod(OTHER, name="web-1")]
        plugin.greet(pods, [node.container(pods[0], 0, state=4, name="init")])
        node.until(lambda: states(node) == {"init": "stopped"}, "both pods")
        [at] = node.machine.call("ListPods")["reported"]
        node.until(
            lambda: node.machine.call("ListPods")["reported"] != [at], "the adapter to have nothing new to report"
        )
        assert node.machine.stop() == 0
        node.machine.start()
        node.until(lambda: states(node) == {"init": "stopped"}, "the second report to the daemon")
        assert {report["owner"] for report in node.machine.call("ListPods")["reported"]} == {"nri"}


def test_why_a_container_is_not_monitored(node: Node) -> None:
    (node.machine.top / "resctrl" / "mon_groups" / OTHER).mkdir()
    with node.connected() as plugin:
        plugin.greet()
        pod, foreign = node.pod(), node.pod(OTHER)
        plugin.send_event(Event.START_CONTAINER, pod, node.container(pod, 0, name="unfound"))
        plugin.send_event(Event.START_CONTAINER, foreign, node.container(foreign, node.process()))
        node.until(lambda: "another program created it" in listed(node).get(OTHER, {}).get("reason", ""), "both pods")
        [unfound] = listed(node)[UID]["containers"]
        assert (unfound["monitored"], unfound["reason"]) == (False, "it is not in its pod's group")
        [refused] = listed(node)[OTHER]["containers"]
        assert "another program created it" in refused["reason"]


def test_daemon_without_an_inventory_is_supported(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.stop_adapter()
    unknown = Signature("NoSuchVerb", types.ReportPodsRequest, types.ReportPodsReply)
    monkeypatch.setattr(signatures, "REPORT_PODS", unknown)
    updater = Updater(Manager(node.machine.socket), Pods())
    updater.pods.replace_all([Pod("a" * 64, UID)], [])

    async def resync() -> None:
        with closing(updater):
            for _ in range(2):
                async for _step in updater.resync():
                    pass

    asyncio.run(resync())
    assert node.living() == {"a" * 64}
    assert caplog.text.count("list --pods is incomplete") == 1


# -- the daemon's inventory


def sandbox(id_: str, **fields: Any) -> Sandbox:
    given = {"id": id_, "uid": "", "name": "n", "namespace": "s", "labels": {}, "containers": []} | fields
    return Sandbox(**given)


def test_inventory_of_one_owner_replaces_only_its_own_entries() -> None:
    kept = Inventory()
    assert kept.report("nri", [sandbox("a"), sandbox("b")]) == 2
    assert kept.report("other", [sandbox("a")]) == 1
    assert kept.report("nri", [sandbox("a", name="new")], removed=["b", "never"]) == 1
    sandboxes, reports = kept.all()
    assert [(one.key, one.sandbox.name) for one in sandboxes] == [("a", "new"), ("a", "n")]
    assert [one.owner for one in reports] == ["nri", "other"]
    assert kept.report("nri", [sandbox("c")], replace_all=True) == 1
    assert kept.report("nri") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../x"},
        {"uid": "../x"},
        {"name": "\x1b[2J"},
        {"labels": {f"l{number}": "" for number in range(65)}},
        {"labels": {"a": "x" * 5000}},
        {"reason": "a\nb"},
        {"containers": [ReportedContainer(id="/", name="", state=ContainerState.RUNNING)]},
        {"containers": [ReportedContainer(id="c", name="\0", state=ContainerState.RUNNING)]},
        {"containers": [ReportedContainer(id=f"c{n}", name="", state=ContainerState.RUNNING) for n in range(1001)]},
    ],
    ids=str,
)
def test_inventory_with_unprintable_text_is_refused_as_a_whole(wrong: dict[str, Any]) -> None:
    kept = Inventory()
    with pytest.raises((InvalidKey, InvalidAttributes, InvalidRequest)):
        kept.report("nri", [sandbox("good"), sandbox("bad", **wrong)])
    assert kept.all() == ([], [])


def test_inventory_above_the_limits_is_refused() -> None:
    kept = Inventory()
    with pytest.raises(InvalidRequest, match="more than 2000"):
        kept.report("nri", [sandbox(f"s{number}") for number in range(MAX_SANDBOXES + 1)])
    for number in range(16):
        kept.report(f"owner{number}")
    with pytest.raises(InvalidRequest, match="16 owners"):
        kept.report("one more")


def test_sum_of_all_owners_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resctrlmond.workloads.model.pods.MAX_BYTES", 1000)
    book = Inventory()
    assert book.report("one", [sandbox("a", labels={"x": "y" * 300})]) == 1
    assert book.report("two", [sandbox("b", labels={"x": "y" * 300})]) == 1
    with pytest.raises(LimitExceeded, match="more than 1000"):
        book.report("three", [sandbox("c", labels={"x": "y" * 300})])
    assert [report.owner for report in book.all()[1]] == ["one", "two"]
    # A replacement counts instead of the entry that it replaces.
    assert book.report("one", [sandbox("a", labels={"x": "z" * 300})]) == 1
    assert book.report("one", removed=["a"]) == 0
    assert book.report("three", [sandbox("c", labels={"x": "y" * 300})]) == 1


def test_invalid_inventory_is_refused(node: Node) -> None:
    with pytest.raises(VarlinkError, match="InvalidParameter"):
        node.machine.call("ReportPods", claim="nri", sandboxes=[{"id": "a", "nonsense": 1}])


# -- the adapter's inventory


def test_large_inventory_is_sent_in_several_requests() -> None:
    pods = Pods()
    labels = {f"l{number:02}": "v" * 700 for number in range(60)}
    pods.replace_all([Pod(f"s{number}", "", labels=labels) for number in range(200)], [])
    everything = list(inventory.inventory(pods, {}).values())
    parts = list(inventory.chunks(everything))
    assert len(parts) > 3
    assert [one for part in parts for one in part] == everything
    assert list(inventory.chunks([])) == [[]]
    kept = Inventory()
    assert [kept.report("nri", part) for part in parts][-1] == 200


def test_inventory_is_limited_to_what_the_daemon_accepts() -> None:
    pods = Pods()
    pods.replace_all([Pod(f"s{number}") for number in range(MAX_SANDBOXES + 5)], [])
    sandboxes = inventory.inventory(pods, {})
    assert Inventory().report("nri", sandboxes.values()) == MAX_SANDBOXES
    assert "s5" in sandboxes
    assert "s4" not in sandboxes


def test_hostile_names_are_cleaned() -> None:
    pods = Pods()
    pod = Pod("s", UID, name="\x1b]0;x\x07", namespace="a\nb", labels={"\0": "x", "ok": "\x9b1m", "y" * 200: "z"})
    pods.replace_all([pod], [Container(f"c{number}", "s", name="\x00n" * 3000) for number in range(1200)])
    sandboxes = inventory.inventory(pods, {"c0": "why\n" * 9, UID: "\x1b"})
    assert Inventory().report("nri", sandboxes.values()) == 1
    assert sandboxes["s"].labels == {"ok": "1m"}
    assert len(sandboxes["s"].containers) == 1000
