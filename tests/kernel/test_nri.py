# SPDX-License-Identifier: Apache-2.0
"""Pods of a real containerd, which calls the adapter; a container's first instruction tells which group it is in."""

from __future__ import annotations

import base64
import itertools
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .host import WHERE, Host, parse_where
from .machine import Guest
from .machine.tools import tool

HERE = Path(__file__).parent / "cri"
THERE = "/root/cri"
LOGS = "/run/pod-logs"

# Of containerd 1.7, where NRI is off unless asked for. The native snapshotter needs nothing of the filesystem below.
CONFIG = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = {systemd}
[plugins."io.containerd.nri.v1.nri"]
  disable = false
  # The guest may be a slow one.
  plugin_request_timeout = "20s"
"""

_SERIAL = itertools.count(1)


@dataclass
class Pod:
    """A pod that runs; ``config`` is how it was asked for."""

    uid: str
    config: dict[str, Any]
    sandbox: str = ""
    containers: list[str] = field(default_factory=list)


class Node(Host):
    """A host with containerd, driven as the kubelet does it."""

    def cri(self, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        """Calls of CRI, one after the other, and their answers in one."""
        words = [word for method, parameters in calls for word in (method, json.dumps(parameters))]
        answer: dict[str, Any] = json.loads(
            self.out(f"cd {THERE} && python3 call.py {shlex.join(words)}", timeout=100)
        )
        return answer

    def images(self) -> set[str]:
        """The images that CRI knows of."""
        return {tag for image in self.cri(("ListImages", {})).get("images", ()) for tag in image.get("repoTags", ())}

    def pod(self, *, systemd: bool = False) -> Pod:
        """Run a pod, without a container yet."""
        number = next(_SERIAL)
        uid = f"7a1d4c52-90b1-4d5f-8a6e-{number:012x}"
        cgroup = f"/kubepods/burstable/pod{uid}"
        if systemd:
            cgroup = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        config = {
            "metadata": {"name": f"web-{number}", "uid": uid, "namespace": "shop"},
            "logDirectory": f"{LOGS}/{uid}",
            "labels": {"app": "web"},
            "linux": {
                "cgroupParent": cgroup,
                "securityContext": {"namespaceOptions": {"network": 2, "pid": 1}},
            },
        }
        pod = Pod(uid, config)
        self.sandbox(pod)
        return pod

    def sandbox(self, pod: Pod) -> str:
        """Give the pod a sandbox, another one if it had one."""
        pod.config["metadata"]["attempt"] = pod.config["metadata"].get("attempt", -1) + 1
        pod.sandbox = self.cri(("RunPodSandbox", {"config": pod.config}))["podSandboxId"]
        return pod.sandbox

    def container(self, pod: Pod, command: str = f"{WHERE}; exec sleep 600") -> tuple[str, tuple[str, str]]:
        """Start a container; its id, and class and group as its own first instruction saw them."""
        log = f"{len(pod.containers)}.log"
        config = {
            "metadata": {"name": f"app-{len(pod.containers)}"},
            "image": {"image": "localhost/busybox:1"},
            "command": ["/bin/sh", "-c", command],
            "logPath": log,
        }
        asked = {"podSandboxId": pod.sandbox, "config": config, "sandboxConfig": pod.config}
        container: str = self.cri(
            ("CreateContainer", asked),
            ("StartContainer", {"containerId": "$containerId"}),
        )["containerId"]
        pod.containers.append(container)
        path = f"{LOGS}/{pod.uid}/{log}"
        self.until(lambda: "mon:" in self.out(f"cat {path}"), "the container's first words")
        # Each line is "<time> stdout F <text>".
        return container, parse_where(self.out(f"cut -d' ' -f4- {path}"))

    def remove_container(self, container: str) -> None:
        """Stop it and remove it."""
        self.cri(*((method, {"containerId": container}) for method in ("StopContainer", "RemoveContainer")))

    def remove_sandbox(self, sandbox: str) -> None:
        """Stop it and remove it, and what is in it."""
        self.cri(*((method, {"podSandboxId": sandbox}) for method in ("StopPodSandbox", "RemovePodSandbox")))

    def group(self, pod: Pod) -> dict[str, Any]:
        """The pod's workload as the daemon has it."""
        found: dict[str, Any] = self.call("Get", key=pod.uid)["group"]
        return found

    def living(self, pod: Pod) -> set[str]:
        """The ids of its living members."""
        return {one["id"] for one in self.group(pod)["members"] if not one.get("endedAt")}

    def member(self, pod: Pod, name: str) -> dict[str, Any]:
        """One of its members."""
        found: dict[str, Any] = next(one for one in self.group(pod)["members"] if one["id"] == name)
        return found

    def registrations(self) -> int:
        """How often containerd has taken the adapter in."""
        return int(
            self.out("journalctl -t resctrlmon-nri --no-pager -q | grep -c 'registered with containerd' || true")
        )

    def registered_again(self, before: int) -> None:
        """Wait until containerd has taken the adapter in once more."""
        self.until(lambda: self.registrations() > before, "the adapter's registration", 60)

    def configure(self, *, systemd: bool) -> None:
        """Start containerd with that driver of control groups, and wait for the adapter to be in it."""
        before = self.registrations()
        self.guest.write("/etc/containerd/config.toml", CONFIG.format(systemd=str(systemd).lower()))
        self.run("systemctl restart containerd", timeout=100)
        self.registered_again(before)


@pytest.fixture(scope="module")
def node(installed_guest: Guest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose containerd has the adapter and an image of busybox."""
    place = tmp_path_factory.mktemp("cri")
    for name in ("call.py", "image.py"):
        shutil.copy(HERE / name, place)
    tool(["protoc", f"--proto_path={HERE}", f"--python_out={place}", "cri.proto"])
    installed_guest.put(place, THERE)
    node = Node(installed_guest)
    node.start()
    node.guest.write(
        "/run/systemd/system/resctrlmon-nri.service.d/debug.conf",
        "[Service]\nExecStart=\nExecStart=/usr/bin/resctrlmon-nri --log-level debug\n",
    )
    node.run("systemctl daemon-reload && systemctl start resctrlmon-nri")
    node.configure(systemd=False)
    node.run(f"python3 {THERE}/image.py /bin/busybox {THERE}/image.tar")
    node.run(f"ctr -n k8s.io images import --snapshotter native {THERE}/image.tar", timeout=100)
    node.until(lambda: len(node.images()) == 2, "containerd's images")
    yield node
    assert "Traceback" not in node.out("journalctl -t resctrlmon-nri --no-pager -q")


@pytest.mark.timeout(500)
def test_two_containers_of_a_pod_are_in_its_group_from_their_first_instruction(node: Node) -> None:
    pod = node.pod()
    assert node.group(pod)["state"] == "idle"
    first, where = node.container(pod)
    assert where == ("/", pod.uid)
    second, where = node.container(pod)
    assert where == ("/", pod.uid)
    group = node.group(pod)
    assert (group["state"], group["baseline"]) == ("active", "exact")
    assert [claim["owner"] for claim in group["claims"]] == ["nri"]
    assert group["attributes"]["pod.label.app"] == "web"
    assert group["attributes"]["pod.namespace"] == "shop"
    assert node.living(pod) == {pod.sandbox, first, second}
    identity = node.identity(pod.uid)

    node.remove_container(first)
    assert node.living(pod) == {pod.sandbox, second}
    third, where = node.container(pod)
    assert where == ("/", pod.uid), "a container that is restarted is in the same group"
    node.remove_container(second)
    node.remove_container(third)
    assert (node.identity(pod.uid), node.group(pod)["generation"]) == (identity, 1)

    node.remove_sandbox(pod.sandbox)
    assert node.state(pod.uid) == "completed"
    assert pod.uid not in node.groups()
    snapshot = node.snapshot(pod.uid)
    assert "completed_at" in snapshot
    assert "mon_data/mon_L3_00/mbm_total_bytes.end" in snapshot


@pytest.mark.timeout(500)
def test_a_replaced_sandbox_keeps_the_group(node: Node) -> None:
    pod = node.pod()
    old = pod.sandbox
    node.container(pod)
    identity = node.identity(pod.uid)
    node.cri(("StopPodSandbox", {"podSandboxId": old}))
    new = node.sandbox(pod)
    container, where = node.container(pod)
    assert where == ("/", pod.uid)
    node.cri(("RemovePodSandbox", {"podSandboxId": old}))
    assert node.living(pod) == {new, container}
    assert node.identity(pod.uid) == identity
    node.remove_sandbox(new)
    assert node.state(pod.uid) == "completed"


@pytest.mark.timeout(500)
def test_an_exec_session_is_taken_in(node: Node) -> None:
    pod = node.pod()
    container, _ = node.container(pod)
    done = node.cri(("ExecSync", {"containerId": container, "cmd": ["/bin/sh", "-c", f"sleep 12; {WHERE}"]}))
    assert parse_where(base64.b64decode(done["stdout"]).decode()) == ("/", pod.uid)
    node.remove_sandbox(pod.sandbox)


@pytest.mark.timeout(500)
def test_containers_live_on_in_their_group_over_restarts_of_everybody(node: Node) -> None:
    pod = node.pod()
    old, _ = node.container(pod)
    identity, before = node.identity(pod.uid), node.group(pod)
    for service in ("containerd", "resctrlmon-nri", "resctrlmond"):
        count = node.registrations()
        node.run(f"systemctl restart {service}", timeout=100)
        if service != "resctrlmond":
            node.registered_again(count)
        new, where = node.container(pod)
        assert where == ("/", pod.uid), f"after a restart of {service}"
        node.remove_container(new)
        assert node.living(pod) == {pod.sandbox, old}
        assert node.identity(pod.uid) == identity
    after = node.group(pod)
    assert (after["createdAt"], after["baseline"]) == (before["createdAt"], "exact")
    assert after["members"][:2] == before["members"]
    # Of a sandbox from before its restart, containerd 1.7 does not tell that it is removed; what the kubelet then
    # does with the pod's control group tells.
    node.remove_sandbox(pod.sandbox)
    node.until(lambda: node.living(pod) <= {pod.sandbox}, "the end of its container")
    node.run(f"rmdir /sys/fs/cgroup/kubepods/burstable/pod{pod.uid}")
    node.until(lambda: node.state(pod.uid) == "completed", "the end of the pod", 100)


@pytest.mark.timeout(500)
def test_without_the_daemon_a_container_starts_all_the_same_and_is_taken_in_when_it_is_back(node: Node) -> None:
    pod = node.pod()
    before, _ = node.container(pod)
    node.run("systemctl stop resctrlmond.socket resctrlmond.service")
    try:
        missed, where = node.container(pod)
        assert where == ("/", ""), "unmonitored, but it runs"
        lone = node.pod()
    finally:
        node.run("systemctl start resctrlmond.socket resctrlmond.service")
    node.until(lambda: missed in node.living(pod), "the container to be taken in")
    member = node.member(pod, missed)
    assert member["late"]
    pid = node.out(f"head -1 {member['cgroup']}/cgroup.procs")
    node.until(lambda: node.membership(pid) == ("/", pod.uid), "its task in the group")
    assert node.group(pod)["baseline"] == "late"
    node.until(lambda: node.state(lone.uid) == "idle", "the pod to be taken in")
    assert node.living(pod) == {pod.sandbox, before, missed}
    node.remove_sandbox(pod.sandbox)
    node.remove_sandbox(lone.sandbox)
    assert "unmonitored for now" in node.out("journalctl -t resctrlmon-nri --no-pager -q")


@pytest.mark.timeout(500)
def test_what_happens_while_the_adapter_is_away_is_made_up_for(node: Node) -> None:
    pod, removed = node.pod(), node.pod()
    node.container(removed)
    node.run("systemctl kill -s KILL resctrlmon-nri && systemctl stop resctrlmon-nri")
    missed, where = node.container(pod)
    assert where == ("/", "")
    node.remove_sandbox(removed.sandbox)
    assert pod.uid in node.groups()
    node.run("systemctl start resctrlmon-nri")
    node.until(lambda: missed in node.living(pod), "the container that was missed")
    node.until(lambda: node.state(removed.uid) == "completed", "the end that was missed")
    assert removed.uid not in node.groups()
    node.remove_sandbox(pod.sandbox)


@pytest.mark.timeout(500)
def test_with_control_groups_by_systemd(node: Node) -> None:
    node.configure(systemd=True)
    try:
        pod = node.pod(systemd=True)
        container, where = node.container(pod)
        assert where == ("/", pod.uid)
        assert node.member(pod, container)["cgroup"].endswith(f"/cri-containerd-{container}.scope")
        node.remove_sandbox(pod.sandbox)
        assert node.state(pod.uid) == "completed"
    finally:
        node.configure(systemd=False)
