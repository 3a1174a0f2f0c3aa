# SPDX-License-Identifier: Apache-2.0
"""Finding the processes of a container by its control group: unreported pids, reused pids, missed starts."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from resctrlmond.client import VarlinkError
from resctrlmond.nri import place
from resctrlmond.nri.manager import Manager
from resctrlmond.nri.messages import Event, Pod
from resctrlmond.nri.pods import Pods
from resctrlmond.nri.search import CONFIRM_S, Search
from resctrlmond.nri.updater import Updater
from resctrlmond.resctrl.mounts import mounts
from tests.nri.conftest import UID, Node, an_id
from tests.resctrl.puppets import Puppet, pause_for_start_time


def settled(directory: str, *pids: int) -> str:
    """Return a control group that holds these processes."""
    os.makedirs(directory, exist_ok=True)
    for pid in pids:
        Path(directory, "cgroup.procs").write_text(str(pid))
    return directory


def inner(cgroup: str) -> str:
    """Return the path below the root of the hierarchy, as runtimes report it."""
    top = next(mount.point for mount in mounts() if mount.fstype == "cgroup2")
    return cgroup.removeprefix(top)


@pytest.mark.parametrize("nested", ["", "/container"], ids=["runc", "crun"])
def test_runtime_that_does_not_report_pids(node: Node, pod_cgroup: str, nested: str) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod, name, pid = node.pod(), an_id(), node.process()
        own = f"{pod_cgroup}/crio-{name}"
        settled(own + nested, pid)
        container = node.container(
            pod, 0, id=name, linux={"cgroups_path": f"{inner(pod_cgroup)}/crio-{name}"}, state=1
        )
        plugin.send_event(Event.START_CONTAINER, pod, container)
        assert node.machine.tasks(UID) == {pid}
        member = node.member(name)
        assert (member["pid"], member["cgroup"]) == (pid, own)
        assert node.group()["baseline"] == "exact"


def test_process_that_joins_the_control_group_later_is_added(node: Node, pod_cgroup: str) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod, name, pid, session = node.pod(), an_id(), node.process(), node.process()
        own = settled(f"{pod_cgroup}/{name}", pid)
        plugin.send_event(Event.START_CONTAINER, pod, node.container(pod, pid, id=name))
        settled(own, session)
        node.until(lambda: node.machine.tasks(UID) == {pid, session}, "the exec session")


def test_running_container_is_added_with_all_its_processes(node: Node, pod_cgroup: str) -> None:
    with node.connected() as plugin:
        pod, name, pids = node.pod(), an_id(), [node.process() for _ in range(3)]
        settled(f"{pod_cgroup}/cri-containerd-{name}.scope", *pids)
        plugin.greet([pod], [node.container(pod, pids[0], id=name)])
        node.until(lambda: node.living() == {pod.id, name}, "the container")
        node.until(lambda: node.machine.tasks(UID) == set(pids), "all of them")
        assert node.member(name)["late"]


def test_post_start_without_a_start_adds_the_container_as_late(node: Node, pod_cgroup: str) -> None:
    with node.connected() as plugin:
        plugin.greet()
        pod, name, pid = node.pod(), an_id(), node.process()
        settled(f"{pod_cgroup}/{name}", pid)
        plugin.send_event(Event.POST_START_CONTAINER, pod, node.container(pod, pid, id=name))
        assert node.machine.tasks(UID) == {pid}
        assert node.member(name)["late"]


def test_reused_pid_outside_the_control_group_is_not_assigned(node: Node, pod_cgroup: str) -> None:
    with node.connected() as plugin:
        pod, other = node.pod(), node.process()
        gone = node.container(pod, other, linux={"cgroups_path": f"{inner(pod_cgroup)}/gone"})
        there = node.container(pod, node.process())
        plugin.greet([pod], [gone, there])
        node.until(lambda: there.id in node.living(), "the container whose process exists")
        node.until(lambda: node.machine.tasks(UID) == {there.pid}, "it, and it alone")


def test_pid_reused_before_assign_is_not_assigned(node: Node) -> None:
    puppet, nursery = Puppet(), Puppet()
    try:
        with node.connected() as plugin:
            plugin.greet()
            pod = node.pod()
            assert node.machine.stop() == 0
            plugin.send_event(Event.START_CONTAINER, pod, node.container(pod, puppet.pid))
            other = node.container(pod, node.process())
            plugin.send_event(Event.START_CONTAINER, pod, other)
            puppet.kill()
            pause_for_start_time()
            assert nursery.make(f"fork-as {puppet.pid}") == puppet.pid, "the number could not be had again"
            node.machine.start()
            node.until(lambda: other.id in node.living(), "the container that still runs")
            node.until(lambda: node.machine.tasks(UID) == {other.pid}, "it, and it alone")
    finally:
        puppet.kill()
        nursery.kill()


def test_unreported_container_is_found_beside_its_sandbox(node: Node, pod_cgroup: str) -> None:
    with node.connected() as plugin:
        holder, pid, name = node.process(), node.process(), an_id()
        pod = node.pod(pid=holder)
        settled(f"{pod_cgroup}/{pod.id}", holder)
        settled(f"{pod_cgroup}/{name}", pid)
        settled(f"{pod_cgroup}/crio-conmon-{an_id()}.scope", node.process())
        settled(f"{pod_cgroup}/{an_id()}")
        plugin.greet([pod])
        node.until(lambda: node.living() == {pod.id, name}, "the container")
        node.until(lambda: node.machine.tasks(UID) == {pid}, "its task")
        assert node.member(name)["late"]
        assert "without a report" in node.log_text()


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "ended"])
def test_control_group_beside_an_ended_sandbox_is_not_a_container(
    node: Node, pod_cgroup: str, is_running: bool
) -> None:
    """The pod gets a new sandbox. On a busy host, its control group exists seconds before its event."""
    holder, name = node.process(), an_id()
    settled(f"{pod_cgroup}/{name}", node.process())
    pods = Pods()
    pods.add_sandbox(Pod(an_id(), UID, pid=holder)).cgroup = pod_cgroup
    search = Search(Updater(Manager(node.machine.socket), pods))
    if not is_running:
        node.end(holder)

    async def run() -> None:
        for now in (0.0, 2 * CONFIRM_S):
            async for _ in search.run(now):
                pass

    asyncio.run(run())
    assert set(pods.members) == ({name} if is_running else set())


def test_pod_ends_with_its_control_group_without_a_report(node: Node, pod_cgroup: str) -> None:
    with node.connected() as plugin:
        holder, pid, name = node.process(), node.process(), an_id()
        pod = node.pod(pid=holder)
        settled(f"{pod_cgroup}/{pod.id}", holder)
        settled(f"{pod_cgroup}/{name}", pid)
        plugin.greet([pod], [node.container(pod, pid, id=name)])
        node.until(lambda: node.living() == {pod.id, name}, "the container")
        for one in (holder, pid):
            node.end(one)
        for directory in (f"{pod_cgroup}/{pod.id}", f"{pod_cgroup}/{name}", pod_cgroup):
            node.until(partial(emptied, directory), "the control group to be empty")
        node.until(lambda: node.group()["state"] == "completed", "the end of the pod")
        assert "control group is gone" in node.log_text()


def test_pod_without_a_pid_is_found_by_its_declared_control_group(node: Node, pod_cgroup: str) -> None:
    """containerd 1.7.24 reports no pid for the sandboxes from before its own restart."""
    with node.connected() as plugin:
        pod = node.pod(linux={"cgroup_parent": inner(pod_cgroup)})
        plugin.greet([pod])
        node.until(lambda: node.living() == {pod.id}, "the pod")
        rescans = node.log_text().count("rescan of")
        node.until(lambda: node.log_text().count("rescan of") > rescans, "a rescan")
        assert node.group()["state"] == "idle"
        assert emptied(pod_cgroup)
        node.until(lambda: node.group()["state"] == "completed", "the end of the pod")


@pytest.mark.parametrize(
    ("parent", "wanted"),
    [
        (f"/kubepods/burstable/pod{UID}", f"kubepods/burstable/pod{UID}"),
        (
            f"kubepods-burstable-pod{UID.replace('-', '_')}.slice",
            f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice",
        ),
        (f"/a.slice/pod{UID}.slice", f"a.slice/pod{UID}.slice"),
        (f"/../../pod{UID}", f"pod{UID}"),
        ("/nrilab", ""),
        ("", ""),
        ("machine.slice", ""),
        ("/kubepods/pod11111111-2222-4333-8444-555555555555", ""),
    ],
)
def test_declared_parent_is_recognized_as_the_pods_own(parent: str, wanted: str) -> None:
    assert place.pod_path(parent, UID) == wanted


def emptied(cgroup: str) -> bool:
    """Whether the control group could be removed."""
    try:
        os.rmdir(cgroup)
    except OSError:
        return False
    return True


def test_paths_of_the_kubelet_and_systemd() -> None:
    name = "4d" * 32
    paths = {
        f"/kubepods/burstable/pod{UID}/{name}": f"kubepods/burstable/pod{UID}/{name}",
        f"kubepods-burstable-pod1.slice:cri-containerd:{name}": "kubepods.slice/kubepods-burstable.slice/"
        f"kubepods-burstable-pod1.slice/cri-containerd-{name}.scope",
        f"system.slice:crio:{name}": f"system.slice/crio-{name}.scope",
        f":crio:{name}": f"crio-{name}.scope",
        f"-.slice::{name}": f"{name}.scope",
        "a.slice:x:b.slice": "a.slice/b.slice",
        "/../../etc": "etc",
        "../../../../etc": "etc",
        "a.slice:../../..:x": "..-x.scope",
        "a.slice:x:../../../y.slice": "y.slice",
    }
    for given, wanted in paths.items():
        assert place.inner_path(given) == wanted


@pytest.mark.parametrize("given", ["", "/", ":::", "::", "\0", "/no/such", "x" * 10_000])
def test_invalid_paths_are_empty(given: str) -> None:
    assert place.declared_cgroup(given, "x") == ""


def test_control_group_of_a_runtime_without_the_systemd_driver_of_its_kubelet(node: Node, pod_cgroup: str) -> None:
    """Its name is the text that is meant for systemd. The pod was late: "has no control group of its own"."""
    pid, name = node.process(), an_id()
    own = settled(f"{pod_cgroup}/kubepods-pod1.slice:cri-containerd:{name}", pid)
    assert place.own_cgroup(pid, name) == own
    assert place.own_cgroup(pid, an_id()) == ""


def test_own_control_group_without_the_process_is_refused(node: Node, pod_cgroup: str) -> None:
    other = settled(f"{pod_cgroup}/other", node.process())
    with pytest.raises(VarlinkError, match="InvalidRequest"):
        node.machine.call("Assign", key=UID, pid=node.process(), ownCgroup=other)
    with pytest.raises(VarlinkError, match="NoSuchCgroup"):
        node.machine.call("Assign", key=UID, pid=node.process(), ownCgroup="/tmp")
    assert node.machine.groups() == []
