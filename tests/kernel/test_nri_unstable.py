# SPDX-License-Identifier: Apache-2.0
"""The same with the containerd of Debian unstable, which differs from 1.7 in what it tells when."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .cri.containerd import SID
from .cri.node import Node, serving
from .machine import Guest


@pytest.fixture(scope="module")
def node(installed_guest: Guest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with unstable's containerd."""
    with serving(installed_guest, tmp_path_factory.mktemp("cri"), SID) as made:
        yield made


@pytest.mark.timeout(500)
def test_the_life_of_a_pod_and_what_is_told_of_it(node: Node) -> None:
    pod = node.pod()
    first, where = node.container(pod)
    assert where == ("/", pod.uid)
    second, where = node.container(pod)
    assert where == ("/", pod.uid)
    assert (node.group(pod)["state"], node.group(pod)["baseline"]) == ("active", "exact")
    assert node.living(pod) == {pod.sandbox, first, second}
    node.remove_container(first)
    [told] = json.loads(node.out("resctrlctl list --pods --json=short"))["pods"]
    assert (told["key"], told["namespace"], told["labels"]) == (pod.uid, "shop", {"app": "web"})
    assert [(one["id"], one["name"], one["state"], one["monitored"]) for one in told["containers"]] == [
        (second, "app-1", "running", True)
    ]
    node.remove_sandbox(pod.sandbox)
    assert node.state(pod.uid) == "completed"
    assert pod.uid not in node.groups()


@pytest.mark.timeout(500)
def test_containers_live_on_over_restarts_of_containerd_and_adapter(node: Node) -> None:
    pod = node.pod()
    old, _ = node.container(pod)
    identity, before = node.identity(pod.uid), node.group(pod)
    for service in ("containerd", "resctrlmon-nri"):
        count = node.registrations()
        node.run(f"systemctl restart {service}", timeout=100)
        node.registered_again(count)
        new, where = node.container(pod)
        assert where == ("/", pod.uid), f"after a restart of {service}"
        node.remove_container(new)
        assert node.living(pod) == {pod.sandbox, old}
        assert node.identity(pod.uid) == identity
    after = node.group(pod)
    assert (after["createdAt"], after["baseline"]) == (before["createdAt"], "exact")
    assert after["members"][:2] == before["members"]
    # As 1.7, it tells nothing of the removal of a sandbox from before its restart.
    node.remove_sandbox(pod.sandbox)
    node.until(lambda: node.living(pod) <= {pod.sandbox}, "the end of its container")
    node.run(f"rmdir /sys/fs/cgroup/kubepods/burstable/pod{pod.uid}")
    node.until(lambda: node.state(pod.uid) == "completed", "the end of the pod", 100)
