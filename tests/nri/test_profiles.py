# SPDX-License-Identifier: Apache-2.0
"""Profiles of pods and containers that the NRI adapter reports, with the real daemon."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.nri import nri_pb2
from resctrlmond.nri.messages import Event, EventReport, decode
from resctrlmond.nri.pods import Pods, facts
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.profiles.profile import Profile, Profiles, select
from tests.nri.conftest import UID, Node
from tests.nri.runtime import Plugin

ANNOTATION = "profile.resctrlmon.org"
KINDS = (ANNOTATION, "class.memtierd.nri.io")
PROFILES = """\
profiles:
  plain: {priority: 5}
  quiet: {watch: none}
  apart: {watch: container}
  gold: {class: gold}
rules:
  - {profile: quiet, owner: nri, namespace: kube-*}
  - {profile: gold, labels: "app in (web)", image: registry/*}
  - {profile: plain, labels: {app: web}}
"""


@pytest.fixture
def profiled(node: Node) -> Node:
    """A node whose daemon has profiles and the class gold."""
    directory = node.machine.top / "profiles.d"
    directory.mkdir()
    (directory / "10.yaml").write_text(PROFILES)
    (node.machine.top / "resctrl" / "gold").mkdir()
    node.machine.options = ("--profiles-dir", str(directory))
    node.machine.stop()
    node.machine.start()
    return node


def annotated(node: Node, **annotations: str) -> nri_pb2.PodSandbox:
    """Return a sandbox of a pod with annotations that name profiles: ``pod``, and the names of containers."""
    pod = node.pod(labels={"app": "other"})
    for name, value in annotations.items():
        text = ANNOTATION if name == "pod" else f"{ANNOTATION}/{name}"
        pod.annotations.add(name=text.encode(), value=value.encode())
    return pod


def image(name: str) -> list[nri_pb2.Annotation]:
    """Return the annotation with which containerd names the image of a container."""
    return [nri_pb2.Annotation(name=b"io.kubernetes.cri.image-name", value=name.encode())]


def listed(node: Node) -> dict[str, Any]:
    """Return the pod in the daemon's list, with its containers by name."""
    pod: dict[str, Any]
    (pod,) = node.machine.call("ListPods")["pods"]
    return pod | {"containers": {one["name"]: one for one in pod["containers"]}}


def start_pod(plugin: Plugin, pod: nri_pb2.PodSandbox) -> None:
    """Report the start of a pod."""
    plugin.greet()
    plugin.send_event(Event.RUN_POD_SANDBOX, pod)


def test_rules_on_labels_and_image_select(profiled: Node) -> None:
    with profiled.connected() as plugin:
        pod = profiled.pod()
        start_pod(plugin, pod)
        group = profiled.group()
        assert (group["profile"], group["priority"]) == ("plain", 5)
        assert group["profileSource"].startswith("rule at ")
        one = profiled.start_container(plugin, pod, annotations=image("registry/web:1"))
        two = profiled.start_container(plugin, pod, annotations=image("other/web:1"))
        assert (profiled.member(one.id)["profile"], profiled.member(two.id)["profile"]) == ("gold", "plain")
        group = profiled.group()
        assert (group["profile"], group["baseline"]) == ("plain", "exact")
        assert group["classes"] == ["gold", ""]
        tasks = profiled.machine.top / "resctrl" / "gold" / "mon_groups" / UID / "tasks"
        assert tasks.read_text().split() == [str(one.pid)]


def test_pod_that_is_not_watched_has_no_group_and_is_listed_with_the_reason(profiled: Node) -> None:
    with profiled.connected() as plugin:
        pod = profiled.pod(namespace="kube-system")
        start_pod(plugin, pod)
        profiled.start_container(plugin, pod)
        assert profiled.group() == {}
        assert profiled.machine.groups() == []
        directory = profiled.machine.top / "profiles.d"
        reason = f"it is in no group, because of its profile quiet (rule at {directory}/10.yaml:7)"

        def reasons() -> list[str]:
            found = listed(profiled)
            return [one.get("reason", "") for one in (found, *found["containers"].values())]

        profiled.until(lambda: [reason in text for text in reasons()] == [True, True], "the reason")
        found = listed(profiled)
        assert found["containers"]["app"]["monitored"] is False
        assert [one["reason"] for one in profiled.machine.call("ListUnwatched")["containers"]] == [reason]
        assert "WARNING" not in profiled.log_text()


def test_one_container_opts_out_of_its_pod(profiled: Node) -> None:
    with profiled.connected() as plugin:
        pod = annotated(profiled, pod="plain", sidecar="quiet")
        start_pod(plugin, pod)
        app = profiled.start_container(plugin, pod)
        assert profiled.group()["baseline"] == "exact"
        sidecar = profiled.container(pod, profiled.process(), state=1, name="sidecar")
        plugin.send_event(Event.START_CONTAINER, pod, sidecar)
        assert profiled.living() == {pod.id, app.id}
        assert profiled.machine.tasks(UID) == {app.pid}
        assert profiled.group()["baseline"] == "late", "a part of the pod is not counted"
        totals = profiled.machine.call("Read", key=UID)["totals"]
        assert {total["reason"] for total in totals} == {f"{sidecar.id} is not included: its profile is quiet"}


def test_containers_that_are_workloads_of_their_own_live_and_end(profiled: Node) -> None:
    with profiled.connected() as plugin:
        pod = annotated(profiled, pod="apart")
        start_pod(plugin, pod)
        assert profiled.group() == {}
        one, two = (profiled.start_container(plugin, pod) for _ in range(2))
        for container in (one, two):
            group = profiled.group(container.id)
            assert (group["state"], group["baseline"], group["profile"]) == ("active", "exact", "apart")
            assert profiled.machine.tasks(container.id) == {container.pid}
            assert profiled.owners(container.id) == {"oci"}
            assert (
                group["attributes"].items() >= {"pod.uid": UID, "pod.name": "web-0", "container.name": "app"}.items()
            )
        assert profiled.group() == {}
        profiled.end(one.pid)
        plugin.send_event(Event.STOP_CONTAINER, pod, one)
        assert profiled.group(one.id)["state"] in ("idle", "completed")
        profiled.until(lambda: profiled.group(one.id)["state"] == "completed", "the end of the container")
        totals = profiled.machine.call("Read", key=one.id)["totals"]
        assert {total["quality"] for total in totals} == {"exact"}
        assert profiled.group(two.id)["state"] == "active"
        plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        profiled.end(two.pid)
        profiled.until(lambda: profiled.group(two.id)["state"] == "completed", "the end of the other container")


def test_adapter_that_is_restarted_finds_the_containers_again(profiled: Node) -> None:
    with profiled.connected() as plugin:
        pod = annotated(profiled, pod="apart")
        start_pod(plugin, pod)
        container = profiled.start_container(plugin, pod)
    before = profiled.group(container.id)
    profiled.stop_adapter()
    profiled.start_adapter()
    container.state = 3
    with profiled.connected() as plugin:
        plugin.greet([pod], [container])
        profiled.until(lambda: "app" in listed(profiled)["containers"], "the list")
        profiled.until(lambda: "resctrlmond was not updated" not in profiled.log_text(), "the comparison")
        assert profiled.group() == {}
        group = profiled.group(container.id)
        assert (group["baseline"], group["generation"]) == ("exact", before["generation"])
        why = f"it has its own group, because of its profile apart; see workload {container.id}"
        assert listed(profiled)["containers"]["app"]["reason"] == why


def test_unwatched_containers_are_listed_again_after_a_restart_of_the_daemon(profiled: Node) -> None:
    with profiled.connected() as plugin:
        pod = annotated(profiled, pod="quiet")
        start_pod(plugin, pod)
        container = profiled.start_container(plugin, pod)
        profiled.machine.stop()
        profiled.machine.start()

        def ids() -> list[str]:
            return [one["id"] for one in profiled.machine.call("ListUnwatched")["containers"]]

        profiled.until(lambda: ids() == [container.id], "the container in the list of the new daemon")


def test_large_annotations_do_not_hide_the_profile() -> None:
    pod = nri_pb2.PodSandbox(id="p")
    pod.annotations.add(name=b"a", value=b"x" * 65000)
    pod.annotations.add(name=b"b", value=b"x" * 530)
    pod.annotations.add(name=ANNOTATION.encode(), value=b"quiet")
    request = nri_pb2.StateChangeEvent(event=int(Event.RUN_POD_SANDBOX), pod=pod)
    report = decode("StateChange", request.SerializeToString())
    sandbox = Pods().add_sandbox(report.pod)  # type: ignore[union-attr, arg-type]
    assert sandbox.choosing == {ANNOTATION: "quiet"}
    assert sandbox.pod.annotations == {}, "only configured annotations become attributes"


def facts_of_started(annotations: Iterable[tuple[bytes, bytes]], name: str = "app") -> Facts:
    """Return the facts about a container of a pod with these annotations, as the adapter sends them."""
    pod = nri_pb2.PodSandbox(id="p", uid=UID)
    for key, value in annotations:
        pod.annotations.add(name=key, value=value)
    container = nri_pb2.Container(id="c", pod_sandbox_id="p", name=name)
    request = nri_pb2.StateChangeEvent(event=int(Event.START_CONTAINER), pod=pod, container=container)
    report = decode("StateChange", request.SerializeToString())
    assert isinstance(report, EventReport)
    assert report.pod
    return facts(Pods().add_sandbox(report.pod), report.container)


@pytest.mark.parametrize("others", ["class.memtierd.nri.io/c{:05}", "profile.resctrlmon.org/{:05}"])
@pytest.mark.parametrize("mine", [ANNOTATION, f"{ANNOTATION}/app"])
def test_other_annotations_do_not_displace_the_one_that_chooses(others: str, mine: str) -> None:
    """A user of the pod replaced what a policy of the cluster had set."""
    many = [(others.format(number).encode(), b"gold") for number in range(5000)]
    found = facts_of_started([*many, (mine.encode(), b"quiet")])
    assert found.annotations == {mine: "quiet"}


@pytest.mark.parametrize("length", [64, 65, 70_000, 250_000])
def test_annotation_that_is_too_long_for_a_name_is_not_ignored(length: int) -> None:
    found = facts_of_started([(ANNOTATION.encode(), b"x" * length), (b"class.memtierd.nri.io", b"gold")])
    profiles = Profiles({"gold": Profile("gold")})
    choice = select(profiles, found, owner="nri", cgroup="")
    assert choice.name == ""
    assert choice.unknown == f"annotation {ANNOTATION} names the profile {'x' * 64!a}, which does not exist"


NAMES = st.sampled_from([b"app", b"", b"other", b"a/b", b"../app", b"\xff", b"app\0"]) | st.binary(max_size=20)
KEYS = st.builds(
    lambda prefix, name: prefix + name,
    st.sampled_from([b"profile.resctrlmon.org", b"class.memtierd.nri.io", b"memory.high.memtierd.nri.io", b"x"]),
    st.just(b"") | NAMES.map(lambda name: b"/" + name),
)
VALUES = st.sampled_from([b"gold", b"quiet", b"", b"gold\n", b"../gold", b"$KEY", b"\xed\xa0\x80"]) | st.binary()


@given(
    st.lists(st.tuples(KEYS, VALUES), max_size=20), st.sampled_from(["app", "", "a/b", "../app", "\x1b", "x" * 300])
)
def test_any_annotations_only_choose_among_the_profiles(annotations: list[tuple[bytes, bytes]], name: str) -> None:
    found = facts_of_started(annotations, name)
    assert len(found.annotations) <= 4
    assert msgspec.json.decode(msgspec.json.encode(found), type=Facts) == found
    profiles = Profiles({known: Profile(known) for known in ("gold", "quiet", "usual")}, default="usual")
    choice = select(profiles, found, owner="nri", cgroup="")
    given_ = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in annotations}
    in_order = [f"{kind}{of}" for kind in KINDS for of in ([f"/{name}", ""] if 0 < len(name) < 254 else [""])]
    first = next((given_[key] for key in in_order if key in given_), "usual")
    assert choice.name == (first if first in ("gold", "quiet", "usual", "") else "usual")
    assert choice.source.isprintable()


def test_workload_of_a_call_without_facts_is_watched_without_a_profile(profiled: Node) -> None:
    profiled.machine.call("Create", key=UID, claim="nri", attributes={"pod.namespace": "kube-system"})
    pid = profiled.process()
    profiled.machine.call("Assign", key=UID, pid=pid, member="c", kind="container", claim="nri", late=False)
    assert profiled.machine.tasks(UID) == {pid}
    assert profiled.group().get("profile") is None
    assert Path(f"/proc/{pid}").exists()
