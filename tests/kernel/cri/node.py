# SPDX-License-Identifier: Apache-2.0
"""A host with a real containerd, which is controlled as by the kubelet."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kernel.host import WHERE, Host, parse_where
from tests.kernel.machine import Guest
from tests.kernel.machine.tools import tool

from .containerd import DROP_IN, Containerd, programs

HERE = Path(__file__).parent
SERVICES = ("resctrlmond.socket", "resctrlmond", "resctrlmon-nri", "containerd")
THERE = "/root/cri"
LOGS = "/run/pod-logs"
# The socket of call.py, and a client for it without imports.
CALLS = "/run/cri-calls.sock"
ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect(sys.argv[1])
    with peer.makefile("rwb") as stream:
        stream.write(sys.stdin.buffer.read())
        stream.flush()
        sys.stdout.buffer.write(stream.read())
"""

_SERIAL = itertools.count(1)


@dataclass
class Pod:
    """A running pod; ``config`` is its request, for that runtime of containerd, "" for the default one."""

    uid: str
    config: dict[str, Any]
    runtime: str = ""
    sandbox: str = ""
    containers: list[str] = field(default_factory=list)


class Node(Host):
    """A host with containerd and the adapter; ``use`` starts a containerd."""

    def __init__(self, guest: Guest) -> None:
        super().__init__(guest)
        # The sandboxes that were not removed.
        self.sandboxes: set[str] = set()

    def renew(self) -> None:
        """Start everything that a previous test stopped."""
        self.run(f"systemctl start {' '.join(SERVICES)}", timeout=100)

    def tidy(self) -> None:
        """Remove the remaining pods."""
        if self.sandboxes:
            self.renew()
        for sandbox in [*self.sandboxes]:
            self.remove_sandbox(sandbox)

    def cri(self, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        """Make calls of CRI, one after the other. Return their replies in one object."""
        request = json.dumps(calls).encode() + b"\n"
        done = self.guest.run(f"python3 -IS -c {shlex.quote(ASK)} {CALLS}", timeout=100, stdin=request)
        answer: dict[str, Any] = json.loads(done.stdout)
        assert "error" not in answer, answer["error"]
        return answer

    def images(self) -> set[str]:
        """Return the images that CRI knows."""
        return {tag for image in self.cri(("ListImages", {})).get("images", ()) for tag in image.get("repoTags", ())}

    def pod(self, *, systemd: bool = False, annotations: dict[str, str] | None = None) -> Pod:
        """Run a pod, without a container."""
        number = next(_SERIAL)
        uid = f"7a1d4c52-90b1-4d5f-8a6e-{number:012x}"
        cgroup = f"/kubepods/burstable/pod{uid}"
        if systemd:
            cgroup = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        config = {
            "metadata": {"name": f"web-{number}", "uid": uid, "namespace": "shop"},
            "logDirectory": f"{LOGS}/{uid}",
            "labels": {"app": "web"},
            "annotations": annotations or {},
            "linux": {
                "cgroupParent": cgroup,
                "securityContext": {"namespaceOptions": {"network": 2, "pid": 1}},
            },
        }
        pod = Pod(uid, config, "systemd" if systemd else "")
        self.sandbox(pod)
        return pod

    def sandbox(self, pod: Pod) -> str:
        """Create a sandbox for the pod, or replace it."""
        pod.config["metadata"]["attempt"] = pod.config["metadata"].get("attempt", -1) + 1
        request = {"config": pod.config, "runtimeHandler": pod.runtime}
        pod.sandbox = self.cri(("RunPodSandbox", request))["podSandboxId"]
        self.sandboxes.add(pod.sandbox)
        return pod.sandbox

    def container(
        self, pod: Pod, command: str = f"{WHERE}; exec sleep 600", name: str = ""
    ) -> tuple[str, tuple[str, str]]:
        """Start a container. Return its ID, and the class and group of its own first instruction.

        ``name``: its name, "" for app-N.
        """
        log = f"{len(pod.containers)}.log"
        config = {
            "metadata": {"name": name or f"app-{len(pod.containers)}"},
            "image": {"image": "localhost/busybox:1"},
            "command": ["/bin/sh", "-c", command],
            "logPath": log,
        }
        request = {"podSandboxId": pod.sandbox, "config": config, "sandboxConfig": pod.config}
        container: str = self.cri(
            ("CreateContainer", request),
            ("StartContainer", {"containerId": "$containerId"}),
        )["containerId"]
        pod.containers.append(container)
        path = f"{LOGS}/{pod.uid}/{log}"
        self.until(lambda: "mon:" in self.out(f"cat {path}"), "the container's first words")
        # Each line is "<time> stdout F <text>".
        return container, parse_where(self.out(f"cut -d' ' -f4- {path}"))

    def remove_container(self, container: str) -> None:
        """Stop the container and remove it."""
        self.cri(*((method, {"containerId": container}) for method in ("StopContainer", "RemoveContainer")))

    def remove_sandbox(self, sandbox: str) -> None:
        """Stop the sandbox and remove it, with its containers."""
        self.sandboxes.discard(sandbox)
        self.cri(*((method, {"podSandboxId": sandbox}) for method in ("StopPodSandbox", "RemovePodSandbox")))

    def group(self, pod: Pod) -> dict[str, Any]:
        """Return the pod's workload as the daemon has it."""
        found: dict[str, Any] = self.call("Get", key=pod.uid)["workload"]
        return found

    def living(self, pod: Pod) -> set[str]:
        """Return the IDs of its living members."""
        return {one["id"] for one in self.group(pod)["members"] if not one.get("endedAt")}

    def member(self, pod: Pod, name: str) -> dict[str, Any]:
        """Return one of its members."""
        found: dict[str, Any] = next(one for one in self.group(pod)["members"] if one["id"] == name)
        return found

    def registrations(self) -> int:
        """Return how often containerd has registered the adapter."""
        return int(
            self.out("journalctl -t resctrlmon-nri --no-pager -q | grep -c 'registered with containerd' || true")
        )

    def registered_again(self, before: int) -> None:
        """Wait until containerd has registered the adapter once more."""
        self.until(lambda: self.registrations() > before, "the adapter's registration", 60)

    def use(self, containerd: Containerd) -> None:
        """Start that containerd, and wait for the adapter's registration."""
        before = self.registrations()
        self.guest.write("/etc/containerd/config.toml", containerd.config)
        if containerd.drop_in:
            here, there = programs()
            self.guest.put(here, there)
            self.guest.write(DROP_IN, containerd.drop_in)
            self.run("systemctl daemon-reload")
        self.run("systemctl restart containerd", timeout=100)
        self.registered_again(before)


@contextmanager
def serving(guest: Guest, place: Path, containerd: Containerd) -> Iterator[Node]:
    """Yield a node whose containerd has the adapter and an image of busybox; ``place`` is a temporary directory."""
    for name in ("call.py", "image.py"):
        shutil.copy(HERE / name, place)
    tool(["protoc", f"--proto_path={HERE}", f"--python_out={place}", "cri.proto"])
    guest.put(place, THERE)
    guest.run(f"systemd-run --quiet --unit cri-calls python3 {THERE}/call.py {CALLS}")
    node = Node(guest)
    node.start()
    node.guest.write(
        "/run/systemd/system/resctrlmon-nri.service.d/debug.conf",
        "[Service]\nExecStart=\nExecStart=/usr/bin/resctrlmon-nri --log-level debug\n",
    )
    node.run("systemctl daemon-reload && systemctl start resctrlmon-nri")
    node.use(containerd)
    log = node.out("journalctl -t resctrlmon-nri --no-pager -q")
    assert f"registered with containerd {containerd.series}" in log, log
    node.run(f"python3 {THERE}/image.py /bin/busybox {THERE}/image.tar")
    node.run(f"ctr -n k8s.io images import --snapshotter native {THERE}/image.tar", timeout=100)
    node.until(lambda: node.run(f"test -S {CALLS}", check=False).returncode == 0, "the caller of CRI")
    node.until(lambda: len(node.images()) == 2, "containerd's images")
    yield node
    assert "Traceback" not in node.out("journalctl -t resctrlmon-nri --no-pager -q")
