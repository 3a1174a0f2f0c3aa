# SPDX-License-Identifier: Apache-2.0
"""The output of list --pods, in each form, with the in-memory manager."""

from __future__ import annotations

import json
import subprocess

import pytest

from resctrlmond.api.types import Member
from resctrlmond.workloads.model.pods import ContainerState, ReportedContainer, ReportedSandbox, Sandbox
from resctrlmond.workloads.model.workload import State
from tests.ctl.conftest import Ctl, command
from tests.ctl.fake_manager import NOW, FakeManager

POD = "6ca11e00-5ad0-4c0b-9f0e-0123456789ab"
OTHER = "7ca11e00-5ad0-4c0b-9f0e-0123456789ab"


def report(
    manager: FakeManager, key: str, name: str, *containers: ReportedContainer, reason: str | None = None
) -> None:
    """Add a pod as an adapter reports it."""
    sandbox = Sandbox(
        id=f"box-{name}",
        uid=key,
        name=name,
        namespace="shop",
        labels={},
        containers=list(containers),
        reason=reason,
    )
    manager.sandboxes.append(ReportedSandbox(key, sandbox))


def populate(manager: FakeManager) -> None:
    """Add a pod with a group, a pod that is not selected, and a pod that no adapter reported."""
    running = ReportedContainer(id="c1" * 32, name="app", state=ContainerState.RUNNING, pid=4711)
    refused = ReportedContainer(
        id="c2" * 32, name="side", state=ContainerState.RUNNING, reason="it is in another group"
    )
    done = ReportedContainer(id="c3" * 32, name="init", state=ContainerState.STOPPED)
    report(manager, POD, "cart-0", running, refused, done)
    report(
        manager,
        OTHER,
        "debug",
        ReportedContainer(id="c4", name="sh", state=ContainerState.RUNNING),
        reason="not selected",
    )
    by_nri = Member(running.id, "container", "nri", pid=4711, started_at=NOW)
    manager.add(POD, class_="gold", members=(by_nri,))
    by_hook = Member("c5" * 32, "container", "oci", pid=4712, started_at=NOW)
    attributes = {"pod.namespace": "web", "pod.name": "old", "pod.uid": "x", "pod.label.app": "o"}
    manager.add("x", attributes=attributes, members=(by_hook,))
    manager.add("batch", attributes={"command": "make"})
    manager.add("y", attributes={"pod.uid": "y"}, state=State.COMPLETED)


def test_list_pods_prints_a_table(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    done = ctl("list", "--pods", "--full")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "POD          CONTAINER     STATE    GROUP   CLASS  KEY                                   NOTE\n"
        f"shop/cart-0  app           running  active  gold   {POD}  -\n"
        f"shop/cart-0  side          running  active  gold   {POD}  it is in another group\n"
        f"shop/cart-0  init          stopped  active  gold   {POD}  -\n"
        f"shop/debug   sh            running  -       -      {OTHER}  not selected\n"
        "web/old      c5c5c5c5c5c5  running  active  /      x                                     -\n"
        "\n"
        "3 pods, 5 containers, 2 unmonitored. nri reported at 2026-11-21 11:20:00.\n"
    )


def test_list_pods_quiet_and_as_json(manager: FakeManager, ctl: Ctl) -> None:
    populate(manager)
    assert ctl("list", "--pods", "-q").stdout == f"{POD}\n{OTHER}\nx\n"
    reply = json.loads(ctl("list", "--pods", "--json").stdout)
    pods = {pod["key"]: pod for pod in reply["pods"]}
    assert [one["monitored"] for one in pods[POD]["containers"]] == [True, False, False]
    assert pods[POD]["containers"][0]["pid"] == 4711
    assert pods[POD]["workload"]["class"] == "gold"
    assert "workload" not in pods[OTHER]
    assert pods[OTHER]["reason"] == "not selected"
    assert pods["x"]["labels"] == {"app": "o"}
    assert reply["reported"] == [{"owner": "nri", "reportedAt": "2026-11-21T11:20:00Z"}]


def test_pending_pods_with_and_without_containers(manager: FakeManager, ctl: Ctl) -> None:
    report(manager, POD, "cart-0")
    report(manager, OTHER, "cart-1", ReportedContainer(id="c", name="app", state=ContainerState.RUNNING))
    for key in (POD, OTHER):
        manager.add(key, state=State.PENDING, reason="no RMID is free")
    lines = ctl("list", "--pods", "--no-legend", "--full").stdout.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["shop/cart-0", "-", "-", "pending"],
        ["shop/cart-1", "app", "running", "pending"],
    ]
    assert all(line.endswith("no RMID is free") for line in lines)


def test_two_sandboxes_of_a_pod_are_listed_as_one_pod(manager: FakeManager, ctl: Ctl) -> None:
    for attempt, state in (("a", ContainerState.STOPPED), ("b", ContainerState.RUNNING)):
        report(manager, POD, f"cart-{attempt}", ReportedContainer(id=attempt, name="app", state=state))
    [pod] = json.loads(ctl("list", "--pods", "--json").stdout)["pods"]
    assert (pod["name"], pod["sandboxes"]) == ("cart-b", ["box-cart-a", "box-cart-b"])
    assert [one["state"] for one in pod["containers"]] == ["stopped", "running"]
    assert pod["containers"][1]["reason"] == "its pod has no group"


def test_hostile_names_cannot_control_the_terminal(manager: FakeManager, ctl: Ctl) -> None:
    hostile = "\x1b]0;owned\x07\n"
    report(
        manager, POD, hostile, ReportedContainer(id="c", name=hostile, state=ContainerState.RUNNING, reason=hostile)
    )
    shown = ctl("list", "--pods").stdout
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert len(shown.splitlines()) == 4


def test_pods_are_listed_again_with_watch(manager: FakeManager, environment: dict[str, str]) -> None:
    populate(manager)
    words = command(manager.socket, "list", "--pods", "-j", "--watch=0.5")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        first, second = json.loads(listing.stdout.readline()), json.loads(listing.stdout.readline())
        listing.terminate()
    assert first == second
    assert [pod["name"] for pod in first["pods"]] == ["cart-0", "debug", "old"]


@pytest.mark.parametrize("is_reported", [False, True])
def test_observed_container_is_listed_with_its_pod(manager: FakeManager, ctl: Ctl, is_reported: bool) -> None:
    populate(manager)
    of_runtime, key = "c9" * 32, "8ca11e00-5ad0-4c0b-9f0e-0123456789ab"
    sandbox = Member("box", "sandbox", "oci", pid=4713, started_at=NOW)
    manager.add(key, members=(sandbox,), attributes={"pod.name": "web-0", "pod.namespace": "shop", "pod.uid": key})
    member = Member(of_runtime, "container", "oci", pid=4714, started_at=NOW)
    attributes = {"pod.name": "web-0", "pod.namespace": "shop", "pod.uid": key.upper().replace("-", "")}
    manager.add(of_runtime, observed=True, members=(member,), attributes=attributes)
    manager.add("odd", observed=True, attributes={"pod.uid": "no uid"})
    if is_reported:
        report(manager, key, "web-0", ReportedContainer(id=of_runtime, name="app", state=ContainerState.RUNNING))
    pods = {pod["key"]: pod for pod in json.loads(ctl("list", "--pods", "--json").stdout)["pods"]}
    assert of_runtime not in pods
    (container,) = pods[key]["containers"]
    assert (container["id"], container["monitored"]) == (of_runtime, False)
    assert container["reason"] == f"observed: its runtime has its own group for it; see workload {of_runtime}"
