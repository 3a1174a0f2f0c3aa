# SPDX-License-Identifier: Apache-2.0
"""Pods of real containerds, which call the adapter; the first instruction of a container shows its group.

Tests that depend on the version run with both, one guest after the other, the others with Debian 13's; ``make
nri-all`` runs all tests with both. Both versions have the same results.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .conftest import Guests
from .cri.containerd import SID, TRIXIE, Containerd
from .cri.node import Node, Pod, serving
from .host import RUN, TREE, WHERE, parse_where
from .test_companions import EXAMPLE, MEMTIERD

# The first test of a version includes the start of the guest, the installation and the start of containerd.
pytestmark = pytest.mark.timeout(500)


VERSIONS = {"1.7": TRIXIE, "2.1": SID}


def with_versions(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test that runs with these versions of containerd."""
    return pytest.mark.parametrize("served", [VERSIONS[name] for name in names], ids=names, indirect=True)


with_each_version = with_versions(*VERSIONS)
with_one_version = with_each_version if os.environ.get("RESCTRLMOND_CONTAINERD") == "all" else with_versions("1.7")


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, module_guests: Guests, staged: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """Yield a node with the containerd of Debian 13 or unstable."""
    containerd: Containerd = request.param
    guest = module_guests.start_installed(staged)
    try:
        with serving(guest, tmp_path_factory.mktemp("cri"), containerd) as made:
            yield made
    finally:
        module_guests.end(guest)


@pytest.fixture
def node(served: Node) -> Iterator[Node]:
    """Return a node on which everything runs, also after a test that has stopped a part."""
    served.renew()
    yield served
    served.tidy()


def listed(node: Node, pod: Pod) -> list[tuple[str, str, str, bool]]:
    """Return the containers of the only pod, as *resctrlctl list* shows them."""
    [entry] = json.loads(node.out("resctrlctl list --pods --json=short"))["pods"]
    assert (entry["key"], entry["namespace"], entry["labels"]) == (pod.uid, "shop", {"app": "web"})
    return [(one["id"], one["name"], one["state"], one["monitored"]) for one in entry["containers"]]


@with_each_version
def test_two_containers_of_a_pod_are_in_its_group_from_their_first_instruction(node: Node) -> None:
    pod = node.pod()
    assert node.group(pod)["state"] == "idle"
    first, where = node.container(pod)
    assert where == ("/", pod.uid)
    second, where = node.container(pod)
    assert where == ("/", pod.uid)
    workload = node.group(pod)
    assert (workload["state"], workload["baseline"]) == ("active", "exact")
    assert [claim["owner"] for claim in workload["claims"]] == ["nri"]
    assert workload["attributes"]["pod.label.app"] == "web"
    assert workload["attributes"]["pod.namespace"] == "shop"
    assert workload["attributes"]["pod.containers"] == "app-0, app-1"
    assert node.living(pod) == {pod.sandbox, first, second}
    identity = node.identity(pod.uid)

    node.remove_container(first)
    assert node.living(pod) == {pod.sandbox, second}
    node.until(
        lambda: listed(node, pod) == [(second, "app-1", "running", True)], "the list without the first container"
    )
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


PROFILES = """\
profiles:
  tight: {swap: deny, memory_high: 64M}
  asked: {allow_memory_annotations: {memory.high: 1G}}
"""
LIMITS = ("memory.swap.max", "memory.high")


def limits(node: Node, pod: Pod, container: str) -> tuple[str, ...]:
    """Return the limits of a container's memory, as its control group has them."""
    directory = f"/sys/fs/cgroup/kubepods/burstable/pod{pod.uid}/{container}"
    return tuple(node.out(f"cd {directory} && cat {' '.join(LIMITS)}").split())


@with_one_version
def test_profile_limits_the_memory_of_a_container_before_it_runs(node: Node) -> None:
    usual = node.pod()
    plain, _ = node.container(usual)
    path = "/etc/resctrlmond/profiles.d/20-memory.yaml"
    before = node.registrations()
    node.guest.write(path, PROFILES)
    try:
        node.run("resctrlctl profiles check " + path)
        node.run("systemctl reload resctrlmond")
        node.registered_again(before)
        tight = node.pod(annotations={"class.memtierd.nri.io": "tight"})
        first, where = node.container(tight)
        assert where == ("/", tight.uid)
        assert limits(node, tight, first) == ("0", str(64 << 20))
        asked = node.pod(
            annotations={
                "profile.resctrlmon.org": "asked",
                "memory.high.memtierd.nri.io": "9G",
                "memory.high.memtierd.nri.io/app-1": "8M",
                "memory.swap.max.memtierd.nri.io": "0",
            }
        )
        for wanted in ("1073741824", str(8 << 20)):
            container, _ = node.container(asked)
            assert limits(node, asked, container) == ("max", wanted)
        assert limits(node, usual, plain) == ("max", "max")
    finally:
        before = node.registrations()
        node.run(f"rm {path} && systemctl reload resctrlmond")
        node.registered_again(before)
    assert (node.group(tight)["baseline"], node.group(tight)["profile"]) == ("exact", "tight")


@with_one_version
def test_container_starts_if_two_plugins_set_the_same_file(node: Node) -> None:
    """NRI fails the creation of a container for which a plugin sets what another one has set."""
    other = "profiles: {other: {memory_high: 32M}}\ndefault_profile: other\n"
    node.run("mkdir -p /run/other")
    node.guest.write("/run/other/10.yaml", other)
    node.guest.write("/etc/resctrlmond/profiles.d/20-memory.yaml", PROFILES + "default_profile: tight\n")
    plugin = "resctrlmon-nri --name other --index 10 --manager-socket /nonexistent --profiles-dir /run/other"
    try:
        node.run(f"systemd-run --unit other-plugin -p SyslogIdentifier=other {plugin}")
        node.until(lambda: "registered" in node.out("journalctl -u other-plugin --no-pager -q"), "the other plugin")
        before = node.registrations()
        node.run("systemctl reload resctrlmond")
        node.registered_again(before)
        pod = node.pod()
        container, _ = node.container(pod)
        assert limits(node, pod, container) == ("0", str(32 << 20))
        reason = "memory.high is not set to 67108864: the runtime's client or another plugin sets it"
        assert reason in node.out("journalctl -u resctrlmon-nri --no-pager -q")
        node.remove_container(container)
    finally:
        before = node.registrations()
        node.run("systemctl stop other-plugin; rm -r /run/other /etc/resctrlmond/profiles.d/20-memory.yaml")
        node.run("systemctl reload resctrlmond")
        node.registered_again(before)


POD = EXAMPLE.parent / "pods" / "memtierd-pod.yaml"


@with_one_version
def test_containers_get_the_memtierd_of_the_class_in_the_annotations_of_its_plugin(node: Node) -> None:
    manifest = yaml.safe_load(POD.read_text(encoding="utf-8"))
    path = "/etc/resctrlmond/profiles.d/40-memtierd.yaml"
    before = node.registrations()
    node.guest.write(path, EXAMPLE.read_text(encoding="utf-8"))
    node.guest.write("/usr/local/bin/memtierd", MEMTIERD)
    node.run("chmod 755 /usr/local/bin/memtierd")
    try:
        node.run(f"resctrlctl profiles check {path}")
        node.run("systemctl reload resctrlmond")
        node.registered_again(before)
        pod = node.pod(annotations=manifest["metadata"]["annotations"])
        names = [container["name"] for container in manifest["spec"]["containers"]]
        started = [node.container(pod, name=name) for name in names]
        ids = [container for container, _ in started]
        assert [where for _, where in started] == [("/", ids[0]), ("/", ids[1]), ("/", pod.uid)]
        assert [limits(node, pod, container) for container in ids] == [("max", "max"), ("0", "max"), ("max", "max")]
        for container in ids[:2]:
            seen = f"{RUN}/companions/{container}/seen"
            node.until(lambda file=seen: node.run(f"test -s {file}", check=False).returncode == 0, "memtierd")  # type: ignore[misc]
            own = f"/sys/fs/cgroup/kubepods/burstable/pod{pod.uid}/{container}"
            assert f"- {own}" in [line.strip() for line in node.out(f"cat {seen}").splitlines()]
        assert node.out(f"ls {RUN}/companions").split() == sorted(ids[:2])
        node.remove_container(ids[0])
        node.until(lambda: node.out(f"ls {RUN}/companions").split() == [ids[1]], "the end of its memtierd")
        unit = f"resctrlmon-companion-{ids[1]}.service"
        assert node.out(f"systemctl is-active {unit}") == "active"
    finally:
        before = node.registrations()
        node.run(f"rm {path} && systemctl reload resctrlmond")
        node.registered_again(before)


ANNOTATION = "profile.resctrlmon.org"
CHOICES = """\
profiles:
  usual: {snapshot_ttl: 1h}
  gold: {class: gold}
  split: {watch: container}
  quiet: {watch: none}
default_profile: usual
"""


@with_one_version
def test_annotations_of_a_pod_choose_its_profile(node: Node) -> None:
    path = "/etc/resctrlmond/profiles.d/30-choices.yaml"
    reloads = "journalctl -u resctrlmon-nri --no-pager -q | grep -c 'profiles reloaded' || true"

    def reload() -> None:
        before = node.out(reloads)
        node.run("systemctl reload resctrlmond")
        node.until(lambda: node.out(reloads) != before, "the adapter's reload", 60)

    node.guest.write(path, CHOICES)
    node.run(f"mkdir {TREE}/gold")
    try:
        node.run(f"resctrlctl profiles check {path}")
        reload()

        gold = node.pod(annotations={ANNOTATION: "gold"})
        _, where = node.container(gold)
        assert where == ("gold", gold.uid), "it is in the class of its profile from its first instruction"
        assert (node.group(gold)["profile"], node.group(gold)["baseline"]) == ("gold", "exact")

        opted_out = node.pod(annotations={ANNOTATION: ""})
        _, where = node.container(opted_out)
        assert where == ("/", opted_out.uid)
        assert node.group(opted_out).get("profile", "") == ""

        unknown = node.pod(annotations={ANNOTATION: "glod"})
        _, where = node.container(unknown)
        assert (where, node.group(unknown)["profile"]) == (("/", unknown.uid), "usual")
        warned = f"{unknown.uid}: annotation {ANNOTATION} names the profile 'glod', which does not exist"
        assert warned in node.out("journalctl -u resctrlmond -u resctrlmon-nri --no-pager -q")

        quiet = node.pod(annotations={ANNOTATION: "quiet"})
        container, where = node.container(quiet)
        assert where == ("/", "")
        assert container in {one["id"] for one in node.call("ListUnwatched")["containers"]}

        split = node.pod(annotations={ANNOTATION: "gold", f"{ANNOTATION}/app-1": "split"})
        assert node.container(split)[1] == ("gold", split.uid)
        container, where = node.container(split)
        assert where == ("/", container), "the annotation for the container overrides that of the pod"
    finally:
        node.run(f"rm {path}")
        reload()
        node.tidy()
        node.run(f"rmdir {TREE}/gold")


@with_one_version
def test_a_replaced_sandbox_keeps_the_group(node: Node) -> None:
    pod = node.pod()
    old = pod.sandbox
    node.container(pod)
    identity = node.identity(pod.uid)
    node.cri(("StopPodSandbox", {"podSandboxId": old}))
    new = node.sandbox(pod)
    container, where = node.container(pod)
    assert where == ("/", pod.uid)
    node.remove_sandbox(old)
    assert node.living(pod) == {new, container}
    assert node.identity(pod.uid) == identity
    node.remove_sandbox(new)
    assert node.state(pod.uid) == "completed"


@with_one_version
def test_exec_session_is_added_to_the_group(node: Node) -> None:
    pod = node.pod()
    container, _ = node.container(pod)
    done = node.cri(("ExecSync", {"containerId": container, "cmd": ["/bin/sh", "-c", f"sleep 12; {WHERE}"]}))
    assert parse_where(base64.b64decode(done["stdout"]).decode()) == ("/", pod.uid)
    node.remove_sandbox(pod.sandbox)


@with_each_version
def test_containers_stay_in_their_group_over_all_restarts(node: Node) -> None:
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
    # Neither version reports the removal of a sandbox from before its restart; the kubelet then removes the pod's
    # control group, which shows the end.
    node.remove_sandbox(pod.sandbox)
    node.until(lambda: node.living(pod) <= {pod.sandbox}, "the end of its container")
    node.run(f"rmdir /sys/fs/cgroup/kubepods/burstable/pod{pod.uid}")
    node.until(lambda: node.state(pod.uid) == "completed", "the end of the pod", 100)


@with_one_version
def test_container_starts_without_the_daemon_and_is_added_later(node: Node) -> None:
    pod = node.pod()
    before, _ = node.container(pod)
    node.run("systemctl stop resctrlmond.socket resctrlmond.service")
    try:
        missed, where = node.container(pod)
        assert where == ("/", ""), "unmonitored, but it runs"
        lone = node.pod()
    finally:
        node.run("systemctl start resctrlmond.socket resctrlmond.service")
    node.until(lambda: missed in node.living(pod), "the container in the workload")
    member = node.member(pod, missed)
    assert member["late"]
    pid = node.out(f"head -1 {member['cgroup']}/cgroup.procs")
    node.until(lambda: node.membership(pid) == ("/", pod.uid), "its task in the group")
    assert node.group(pod)["baseline"] == "late"
    node.until(lambda: node.state(lone.uid) == "idle", "the group of the pod")
    assert node.living(pod) == {pod.sandbox, before, missed}
    node.remove_sandbox(pod.sandbox)
    node.remove_sandbox(lone.sandbox)
    assert "unmonitored for now" in node.out("journalctl -t resctrlmon-nri --no-pager -q")


@with_one_version
def test_events_without_a_running_adapter_are_recovered(node: Node) -> None:
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


@with_each_version
def test_with_control_groups_by_systemd(node: Node) -> None:
    pod = node.pod(systemd=True)
    container, where = node.container(pod)
    assert where == ("/", pod.uid)
    assert node.member(pod, container)["cgroup"].endswith(f"/cri-containerd-{container}.scope")
    assert node.group(pod)["attributes"]["pod.runtime_handler"] == "systemd"
    node.remove_sandbox(pod.sandbox)
    assert node.state(pod.uid) == "completed"


EXPOSING = """\
profiles:
  seen: {expose: true}
  unseen: {priority: 1}
"""
MOUNT = "/run/resctrlmon"


def words(node: Node, container: str, command: str) -> list[str]:
    """Return the words that a command in a container prints; its exit status is ignored."""
    done = node.cri(("ExecSync", {"containerId": container, "cmd": ["/bin/sh", "-c", f"{{ {command}; }} 2>&1"]}))
    return base64.b64decode(done.get("stdout", "")).decode().split()


@with_one_version
def test_container_reads_its_own_figures(node: Node) -> None:
    path = "/etc/resctrlmond/profiles.d/20-expose.yaml"
    before = node.registrations()
    node.guest.write(path, EXPOSING)
    node.guest.write("/etc/resctrlmond/resctrlmond.d/20-expose.yaml", "expose_interval: 1s\n")
    try:
        node.run("systemctl reload resctrlmond")
        node.registered_again(before)
        pod = node.pod(annotations={"profile.resctrlmon.org": "seen", "profile.resctrlmon.org/app-1": "unseen"})
        container, where = node.container(pod)
        assert where == ("/", pod.uid)
        node.until(lambda: "active" in words(node, container, f"cat {MOUNT}/live"), "the figures in the container")
        assert node.member(pod, container)["exposed"] == f"mounted at {MOUNT}"
        # In few sessions, each of which takes seconds in a busy guest.
        shown = words(node, container, f"ls {MOUNT}; find {MOUNT} -type l; cat {MOUNT}/begin {MOUNT}/live")
        assert shown[:3] == ["begin", "live", "time"]
        assert shown[shown.index("mbm_total_bytes") - 2 :][:2] == ["value", "mon_L3_00"]
        total = shown[shown.index("total") :]
        total = total[total.index("mbm_total_bytes") :]
        # A session that ends before the daemon sees it makes the figures late.
        assert total[2] in ("exact", "late")
        options = words(node, container, f"grep ' {MOUNT} ' /proc/self/mounts")[3].split(",")
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(options)
        refused = words(node, container, f"echo x > {MOUNT}/live; touch {MOUNT}/new; rm {MOUNT}/begin")
        assert refused.count("Read-only") == 3

        # The other container of the pod has another profile.
        plain, _ = node.container(pod)
        assert "exposed" not in node.member(pod, plain)
        assert words(node, plain, f"ls -d {MOUNT}")[-1] != MOUNT

        # The container keeps resctrl free: an unmount is not refused, and the figures go on in the same mount.
        # The daemon may just read the counters: then the kernel takes a moment to end the old mount (EBUSY).
        mount = f"mount -t resctrl resctrl {TREE}"
        node.unmount(f"{{ for i in $(seq 50); do {mount} && break; sleep 0.1; done; mountpoint -q {TREE}; }}")
        node.until(lambda: node.group(pod)["generation"] == 2, "the next run", 60)
        started = node.group(pod)["createdAt"]
        node.until(
            lambda: started in words(node, container, f"cat {MOUNT}/begin"), "the begin values of the next run"
        )
        assert "estimated" in words(node, container, f"grep 'total mbm_total_bytes' {MOUNT}/live")

        # A container that starts without the daemon has no mount.
        node.run("systemctl stop resctrlmond.socket resctrlmond.service")
        try:
            missed, _ = node.container(pod)
            assert words(node, missed, f"ls -d {MOUNT}")[-1] != MOUNT
            assert "active" in words(node, container, f"cat {MOUNT}/live")
        finally:
            node.run("systemctl start resctrlmond.socket resctrlmond.service")
        node.until(lambda: missed in node.living(pod), "the container in the workload")
        assert node.member(pod, missed)["exposed"].startswith("not mounted: ")
        # The daemon goes on with the mount of the container from before.
        last = words(node, container, f"head -1 {MOUNT}/live")
        node.until(lambda: words(node, container, f"head -1 {MOUNT}/live") != last, "the next figures")
        node.remove_sandbox(pod.sandbox)
    finally:
        before = node.registrations()
        node.run(f"rm {path} /etc/resctrlmond/resctrlmond.d/20-expose.yaml && systemctl reload resctrlmond")
        node.registered_again(before)
