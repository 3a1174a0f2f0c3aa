# SPDX-License-Identifier: Apache-2.0
"""Profiles that annotations of containers of Podman, and of pods of CRI-O, choose, on the real kernel."""

from __future__ import annotations

import json

import pytest

from .host import BUSYBOX, TREE, WHERE, Host, parse_where
from .machine import Guest

FILE = "/etc/resctrlmond/profiles.d/10-test.yaml"
ANNOTATION = "profile.resctrlmon.org"
POD = "5f0c2d1e-1b2a-4c3d-9e8f-0a1b2c3d4e5f"
# The ids of the containers of a pod: the sandbox, and those named app and sidecar.
SANDBOX, APP, SIDECAR = ("01" * 32, "02" * 32, "03" * 32)
PROFILES = """\
profiles:
  usual: {snapshot_ttl: 1h}
  quiet: {watch: none}
  gold: {class: gold}
  missing: {class: platinum}
  small: {memory_high: 64M, swap: deny}
  apart: {watch: container}
rules:
  - {profile: quiet, container: quiet-*}
  - {profile: quiet, labels: tier=batch}
default_profile: usual
"""


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with profiles and the class gold, on which the daemon and the hooks are enabled."""
    host = Host(installed_guest)
    host.make_root()
    host.enable_hooks()
    host.guest.write(FILE, PROFILES)
    host.start()
    host.run(f"mkdir {TREE}/gold")
    return host


def write(host: Host, profiles: str) -> None:
    """Replace the profiles of the running daemon."""
    host.guest.write(FILE, profiles)
    host.run("systemctl reload resctrlmond", timeout=100)


def run(host: Host, options: str, command: str = WHERE) -> str:
    """Run a container with Podman, and return its output."""
    return host.out(f"podman run {options} --network none --rootfs {BUSYBOX} {command}", timeout=100)


def explained(host: Host, key: str) -> dict[str, str]:
    """Return the profile of a workload or container, and why it has that."""
    found: dict[str, str] = json.loads(host.out(f"resctrlctl profiles explain {key} --json"))
    return {name: found[name] for name in ("profile", "source")}


def test_container_sees_the_class_of_its_profile_from_its_first_instruction(host: Host) -> None:
    class_, group = parse_where(run(host, f"--rm --name moved --annotation {ANNOTATION}=gold"))
    assert class_ == "gold"
    assert len(group) == 64
    host.until(lambda: host.state(group) == "completed", "the container's end")
    assert group not in host.groups("gold")
    assert explained(host, group) == {"profile": "gold", "source": f"annotation {ANNOTATION}"}
    assert {total["quality"] for total in host.call("Read", key=group)["totals"]} == {"exact"}


def test_check_reports_a_class_that_does_not_exist(host: Host) -> None:
    path = "/etc/resctrlmond/profiles.d/10-test.yaml"
    said = host.out(f"resctrlctl profiles check {path} 2>&1; echo $?").splitlines()
    assert (said[-1], len(said)) == ("8", 3)
    problem = "profile missing names the class platinum, which does not exist"
    assert f"{path}:5: {problem}" in said[1]
    assert problem in host.out("journalctl -u resctrlmond --no-pager -q")
    assert "names the class gold, which" in host.out("journalctl -u resctrlmond --no-pager -q"), "it came later"


def test_class_that_does_not_exist_is_reported_and_the_container_runs(host: Host) -> None:
    class_, group = parse_where(run(host, f"--rm --annotation {ANNOTATION}=missing"))
    assert (class_, len(group)) == ("/", 64)
    assert "its profile missing names the class platinum: there is no such class" in host.out(
        "journalctl -u resctrlmond"
    )


def test_annotation_for_the_container_overrides_the_other_one(host: Host) -> None:
    options = f"--rm --name app --annotation {ANNOTATION}=quiet --annotation {ANNOTATION}/app=gold"
    assert parse_where(run(host, options))[0] == "gold"


def test_scope_of_a_container_has_the_memory_settings_of_its_profile_until_that_has_none(host: Host) -> None:
    limits = "--memory 128m --memory-swap 160m"
    container = run(host, f"-d --name small {limits} --annotation {ANNOTATION}=small", "sleep 600")
    scope = f"libpod-{container}.scope"
    values = f"cd $(find /sys/fs/cgroup -type d -name {scope}) && cat memory.high memory.swap.max"
    properties = f"systemctl show -P MemoryHigh,MemorySwapMax {scope}"
    # crun gives the scope the sum of memory and swap, and the control group below it the amount of swap.
    swap = host.out(f"sed -n s/^MemorySwapMax=//p /run/systemd/transient/{scope}")
    assert int(swap) in (32 << 20, 160 << 20)
    host.until(lambda: host.out(values).split() == [str(64 << 20), "0"], "the memory settings of its profile")
    assert host.out(properties).split() == [str(64 << 20), "0"]
    assert "Memory: set: memory.high: 67108864, memory.swap.max: 0" in host.out(f"resctrlctl show {container}")
    below = f"cat $(find /sys/fs/cgroup -type d -name {scope})/container/memory.swap.max"
    assert host.out(below) == str(32 << 20), "the limit of Podman applies as well"
    write(host, PROFILES.replace("small: {memory_high: 64M, swap: deny}", "small: {}"))
    host.until(lambda: host.out(values).split() == ["max", swap], "both values from before")
    assert host.out(properties).split() == ["infinity", swap]
    write(host, PROFILES)
    host.until(lambda: host.out(values).split() == [str(64 << 20), "0"], "the memory settings of its profile")
    host.run("podman rm -f -t 0 small", timeout=100)
    host.until(lambda: host.state(container) == "completed", "the container's end")
    host.until(lambda: host.out("ls /run/resctrlmond/unit-memory.json || true") == "", "the end of the record")


def test_labels_of_podman_select_no_profile(host: Host) -> None:
    refused = "rules: [{profile: quiet, owner: oci, labels: tier=batch}]\n"
    host.guest.write("/run/refused.yaml", refused)
    checked = host.run("resctrlctl profiles check /run/refused.yaml", check=False)
    assert checked.returncode != 0
    assert "the rule can never match: Podman and CRI-O do not pass labels to the OCI hook" in checked.output
    _, group = parse_where(run(host, "--rm --name labelled --label tier=batch"))
    line = PROFILES.splitlines().index("default_profile: usual") + 1
    assert explained(host, group) == {"profile": "usual", "source": f"default_profile at {FILE}:{line}"}


def test_container_that_is_not_watched_is_listed_with_the_rule(host: Host) -> None:
    container = run(host, "-d --name quiet-1", "sleep 600")
    pid = host.out("podman inspect quiet-1 --format '{{.State.Pid}}'", timeout=100)
    assert host.membership(pid) == ("/", "")
    assert host.state(container) == ""
    (listed,) = host.call("ListUnwatched")["containers"]
    assert (listed["id"], listed["name"], listed["profile"]) == (container, "quiet-1", "quiet")
    assert explained(host, "quiet-1")["source"].startswith("rule at /etc/resctrlmond/profiles.d/10-test.yaml:")
    host.run("podman rm -f -t 0 quiet-1", timeout=100)
    assert host.call("ListUnwatched")["containers"] == []


def test_empty_annotation_opts_out_and_an_unknown_one_gets_the_default(host: Host) -> None:
    class_, group = parse_where(run(host, f"--rm --name quiet-2 --annotation {ANNOTATION}="))
    assert (class_, len(group)) == ("/", 64), "the rule does not apply"
    assert explained(host, group) == {"profile": "", "source": f"annotation {ANNOTATION} is empty"}
    _, group = parse_where(run(host, f"--rm --name quiet-3 --annotation {ANNOTATION}=glod"))
    assert explained(host, group)["profile"] == "usual"
    log = host.out("journalctl -u resctrlmond")
    assert f"{group}: annotation {ANNOTATION} names the profile 'glod', which does not exist" in log


def start_in_pod(host: Host, id_: str, name: str, annotations: dict[str, str]) -> tuple[str, str]:
    """Start a container of a pod with crun, as CRI-O does; return the class and group of its first instruction."""
    crio = {
        "io.kubernetes.pod.uid": POD,
        "io.kubernetes.pod.name": "web-0",
        "io.kubernetes.pod.namespace": "shop",
        "io.kubernetes.container.name": name,
        "io.kubernetes.cri-o.ContainerType": "container" if name else "sandbox",
    }
    where, output = f"/kubepods/burstable/pod{POD}/crio-{id_}", f"/run/{id_}.out"
    bundle = host.bundle(id_, f"{WHERE}; exec sleep 600", crio | annotations, where)
    host.run(f"crun run -d --bundle {bundle} {id_} </dev/null >{output} 2>&1")
    host.until(lambda: "mon:" in host.out(f"cat {output}"), "the container's first line")
    return parse_where(host.out(f"cat {output}"))


def end_pod(host: Host, *ids: str) -> None:
    """Delete the containers of the pod, and its control group."""
    for id_ in ids:
        host.run(f"crun delete --force {id_}")
    host.run(f"rmdir /sys/fs/cgroup/kubepods/burstable/pod{POD}")


def reasons(host: Host, key: str) -> set[tuple[str, str]]:
    """Return the quality of each total of a workload, with its reason."""
    return {(total["quality"], total.get("reason", "")) for total in host.call("Read", key=key)["totals"]}


def lacks_app(host: Host) -> bool:
    """Whether the totals of the pod state that a container is not included. The witness adds how much it used."""
    why = f"{APP} is not included: its profile is apart"
    return all(quality == "late" and why in reason for quality, reason in reasons(host, POD))


def test_container_of_a_pod_of_crio_has_a_group_of_its_own_from_its_first_instruction(host: Host) -> None:
    annotations = {f"{ANNOTATION}/app": "apart"}
    assert start_in_pod(host, SANDBOX, "", annotations) == ("/", POD)
    assert host.call("Get", key=POD)["workload"]["baseline"] == "exact"
    assert start_in_pod(host, APP, "app", annotations) == ("/", APP)
    assert start_in_pod(host, SIDECAR, "sidecar", annotations) == ("/", POD)
    own = host.call("Get", key=APP)["workload"]
    assert (own["baseline"], own["attributes"]["pod.uid"], own["attributes"]["container.name"]) == (
        "exact",
        POD,
        "app",
    )
    assert explained(host, APP) == {"profile": "apart", "source": f"annotation {ANNOTATION}/app"}
    pid = json.loads(host.out(f"crun state {APP}"))["pid"]
    assert host.membership(pid) == ("/", APP)
    assert lacks_app(host), reasons(host, POD)
    assert {member["id"] for member in host.call("Get", key=POD)["workload"]["members"]} == {SANDBOX, SIDECAR}

    host.kill()
    assert (host.membership(pid), lacks_app(host)) == (("/", APP), True), "also after a kill of the daemon"
    host.run(f"crun delete --force {APP}")
    host.until(lambda: host.state(APP) == "completed", "the container's end")
    assert reasons(host, APP) == {("exact", "")}
    assert (host.state(POD), APP in host.groups()) == ("active", False)
    end_pod(host, SIDECAR, SANDBOX)
    host.until(lambda: host.state(POD) == "completed", "the end of the pod after its control group")
    assert lacks_app(host), reasons(host, POD)


def test_pod_of_crio_whose_containers_have_groups_of_their_own_has_none(host: Host) -> None:
    annotations = {ANNOTATION: "apart"}
    assert start_in_pod(host, SANDBOX, "", annotations) == ("/", "")
    assert start_in_pod(host, APP, "app", annotations) == ("/", APP)
    assert start_in_pod(host, SIDECAR, "sidecar", annotations) == ("/", SIDECAR)
    (listed,) = host.call("ListUnwatched")["containers"]
    assert (listed["id"], listed["pod"], listed["profile"]) == (SANDBOX, POD, "apart")
    assert POD not in host.groups()
    end_pod(host, APP, SIDECAR, SANDBOX)
    for id_ in (APP, SIDECAR):
        host.until(lambda key=id_: host.state(key) == "completed", "the container's end")  # type: ignore[misc]
        assert reasons(host, id_) == {("exact", "")}
    assert host.call("ListUnwatched")["containers"] == []
