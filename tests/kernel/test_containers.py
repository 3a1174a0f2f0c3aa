# SPDX-License-Identifier: Apache-2.0
"""Containers on the real kernel: in their group from their first instruction, with end values."""

from __future__ import annotations

import json
import shlex

import pytest

from .host import BUSYBOX, HOOKS, RUN, TREE, WHERE, Host, parse_where
from .machine import Guest
from .starved import start_at_once

POD = "0b5c1d2e-6f70-4a81-9b92-a3b4c5d6e7f8"
COMPACT = POD.replace("-", "").upper()
PODMAN = f"podman run --network none --rootfs {BUSYBOX}"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host on which the daemon and the hooks are enabled."""
    host = Host(installed_guest)
    host.make_root()
    host.enable_hooks()
    host.start()
    return host


def podman(host: Host, options: str, command: str) -> str:
    return host.out(f"{PODMAN.replace('run', f'run {options}', 1)} sh -c {shlex.quote(command)}", timeout=100)


def test_podman_container_is_in_its_group_from_its_first_instruction(host: Host) -> None:
    printed = host.out(f"{PODMAN.replace('run', 'run --rm --name first', 1)} {WHERE}", timeout=100)
    class_, group = parse_where(printed)
    assert class_ == "/"
    assert len(group) == 64, "the group is named by the container's id"
    host.until(lambda: host.state(group) == "completed", "the container's end")
    assert group not in host.groups(), "the RMID was not given back"
    snapshot = host.snapshot(group)
    begins = {name.removesuffix(".begin") for name in snapshot if name.endswith(".begin")}
    assert begins == {f"mon_data/mon_L3_00/{event}" for event in host.out(f"ls {TREE}/mon_data/mon_L3_00").split()}
    assert begins == {name.removesuffix(".end") for name in snapshot if name.endswith(".end")}
    assert snapshot.keys() >= {"created_at", "completed_at"}
    assert "LINK" not in snapshot.values(), "a link to a counter that is gone"


def test_list_and_show_display_a_running_container(host: Host) -> None:
    container = podman(host, "-d --name named", "sleep 600")
    listed = json.loads(host.out("resctrlctl list --json"))
    (usage,) = [usage for usage in listed["usages"] if usage["workload"]["key"] == container]
    workload = usage["workload"]
    assert workload["state"] == "active"
    assert {total["event"] for total in usage["totals"]} >= {"mbm_total_bytes"}
    assert [member["id"] for member in workload["members"]] == [container]
    (line,) = [line for line in host.out("resctrlctl list").splitlines() if line.startswith("named ")]
    assert line.endswith(" exact")
    shown = host.out("resctrlctl show named")
    assert host.out(f"resctrlctl show {container[:12]}").startswith(container)
    assert f"{TREE}/mon_groups/{container}" in shown
    assert "mbm_total_bytes" in shown
    assert host.snapshot(container)["mon_data/mon_L3_00/llc_occupancy"] == "LINK"
    host.run("podman rm -f -t 0 named")
    host.until(lambda: host.state(container) == "completed", "the container's end")


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_a_podman_container_is_listed_by_its_name(host: Host, runtime: str) -> None:
    name = f"shop-{runtime}"
    command = PODMAN.replace("podman run", f"podman --runtime {runtime} run -d --name {name}")
    container = host.out(f"{command} sleep 600", timeout=100)
    (listed,) = [
        line for line in host.out("resctrlctl list -a --columns key,workload").splitlines() if container in line
    ]
    workload = host.call("Get", key=container)["workload"]
    host.run(f"podman rm -f -t 0 {name}")
    assert name in listed
    assert workload["attributes"]["container.name"] == name
    assert [member["kind"] for member in workload["members"]] == ["container"]


@pytest.mark.timeout(600)
def test_the_infra_container_of_a_podman_pod_is_a_sandbox(host: Host) -> None:
    host.run(f"tar -C {BUSYBOX} -c . | podman import - localhost/box", timeout=200)
    create = "podman pod create --network none --infra-image localhost/box --infra-command 'sleep 600' shop"
    host.run(create, timeout=200)
    app = host.out("podman run -d --pod shop --name app localhost/box sleep 600", timeout=200)
    infra = host.out("podman pod inspect shop --format '{{.InfraContainerID}}'", timeout=100)
    kinds = {key: host.call("Get", key=key)["workload"]["members"][0]["kind"] for key in (app, infra)}
    names = host.call("Get", key=infra)["workload"]["attributes"]["container.name"]
    host.run("podman pod rm -f -t 0 shop", timeout=200)
    assert kinds == {app: "container", infra: "sandbox"}
    assert names.endswith("-infra")


CRIO = {
    "io.kubernetes.pod.uid": "",
    "io.kubernetes.pod.name": "web-0",
    "io.kubernetes.pod.namespace": "shop",
    "io.kubernetes.container.name": "app",
    "io.kubernetes.cri-o.ContainerType": "container",
}
CONTAINERD = {
    "io.kubernetes.cri.sandbox-uid": "",
    "io.kubernetes.cri.sandbox-name": "web-0",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.container-name": "app",
    "io.kubernetes.cri.container-type": "container",
}


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_two_containers_of_a_pod_share_its_group_for_each_uid_format(host: Host, runtime: str) -> None:
    pod_cgroup = f"/kubepods/burstable/pod{POD}"
    running = {}
    for name, given, uid in (("crio", CRIO, POD), ("containerd", CONTAINERD, COMPACT)):
        field = next(iter(given))
        bundle = host.bundle(
            f"{runtime}-{name}", f"{WHERE}; sleep 600", given | {field: uid}, f"{pod_cgroup}/{runtime}-{name}"
        )
        output = f"/run/{runtime}-{name}.out"
        host.run(f"{runtime} run -d --bundle {bundle} {runtime}-{name} </dev/null >{output} 2>&1")
        host.until(lambda path=output: "mon:" in host.out(f"cat {path}"), "the container's first line")  # type: ignore[misc]
        running[name] = parse_where(host.out(f"cat {output}"))
    assert running == {"crio": ("/", POD), "containerd": ("/", POD)}
    workload = host.call("Get", key=COMPACT)["workload"]
    assert sorted(member["id"] for member in workload["members"]) == [f"{runtime}-containerd", f"{runtime}-crio"]
    assert workload["attributes"]["pod.name"] == "web-0"
    assert workload["attributes"]["pod.uid"] == COMPACT, "the given form is kept"
    identity = host.identity(POD)

    for name in running:
        host.run(f"{runtime} delete --force {runtime}-{name}")
    host.until(lambda: host.state(POD) == "idle", "the containers' ends")
    assert host.identity(POD) == identity, "a pod's group outlives its containers"
    assert "completed_at" not in host.snapshot(POD)
    assert parent_is_watched(host, pod_cgroup), "its removal is reported by an event, and not only found by a check"
    host.run(f"rmdir /sys/fs/cgroup{pod_cgroup}")
    host.until(lambda: host.state(POD) == "completed", "the end of the pod after its control group")
    host.until(lambda: not parent_is_watched(host, pod_cgroup), "the end of the watch")
    assert POD not in host.groups()
    assert "completed_at" in host.snapshot(POD)


def parent_is_watched(host: Host, cgroup: str) -> bool:
    """Whether the daemon, as its unit runs it, has an inotify watch on the control group's parent."""
    inode = int(host.out(f"stat -c %i $(dirname /sys/fs/cgroup{cgroup})"))
    return f" ino:{inode:x} " in host.run(f"grep -hs ^inotify /proc/{host.pid()}/fdinfo/*", check=False).stdout


def test_a_pod_that_restarts_keeps_its_group_and_begin_values(host: Host) -> None:
    """The kubelet starts a new container with the pod's UID: the same directory, the same RMID, and one run."""
    pod_cgroup = f"/kubepods/burstable/pod{POD}"
    begun = []
    for name in ("first", "second"):
        bundle = host.bundle(
            name, f"{WHERE}; sleep 600", CRIO | {"io.kubernetes.pod.uid": POD}, f"{pod_cgroup}/{name}"
        )
        host.run(f"crun run -d --bundle {bundle} {name} </dev/null >/run/{name}.out 2>&1")
        host.until(lambda path=f"/run/{name}.out": "mon:" in host.out(f"cat {path}"), "its first line")  # type: ignore[misc]
        assert parse_where(host.out(f"cat /run/{name}.out")) == ("/", POD)
        workload = host.call("Get", key=POD)["workload"]
        assert workload["baseline"] == "exact"
        begun.append((host.identity(POD), workload["createdAt"], host.begins(POD)))
        host.run(f"crun delete --force {name}")
        host.until(lambda: host.state(POD) == "idle", "the container's end")
    assert begun[0] == begun[1]
    assert [member["id"] for member in host.call("Get", key=POD)["workload"]["members"]] == ["first", "second"]
    host.run(f"rmdir /sys/fs/cgroup{pod_cgroup}")
    host.until(lambda: host.state(POD) == "completed", "the end of the pod")


def test_member_with_remaining_children_has_not_ended(host: Host) -> None:
    # Without a PID namespace, the end of the first process ends no other process: the control group shows them.
    bundle = host.bundle("left", "sleep 4321 & sleep 0.1", {}, "/left")
    spec = json.loads(host.guest.read(f"{bundle}/config.json"))
    spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] != "pid"]
    host.guest.write(f"{bundle}/config.json", json.dumps(spec))
    host.run(f"crun run -d --bundle {bundle} left </dev/null >/run/left.out 2>&1 || cat /run/left.out >&2")
    pid = host.call("Get", key="left")["workload"]["members"][0]["pid"]
    runs = f"test -d /proc/{pid} && ! grep -q '^State:.Z' /proc/{pid}/status"
    host.until(lambda: host.run(runs, check=False).returncode != 0, "the end of the first process")
    # Longer than the interval at which members are looked at.
    host.run("sleep 1.5")
    assert host.state("left") == "active", "the child still runs"
    host.run("pkill -f 'sleep [4]321'")
    host.until(lambda: host.state("left") == "completed", "the end of the child")
    host.run("crun delete --force left", check=False)


HOSTILE = {
    "no-uid-at-all": {"io.kubernetes.pod.uid": "../../../etc"},
    "empty-uid": {"io.kubernetes.pod.uid": ""},
    "long-uid": {"io.kubernetes.cri.sandbox-uid": "f" * 5000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_container_with_a_hostile_annotation_is_counted_and_the_journal_has_the_reason(host: Host, name: str) -> None:
    bundle = host.bundle(name, WHERE, HOSTILE[name], f"/{name}")
    printed = host.out(f"crun run --bundle {bundle} {name}")
    assert parse_where(printed) == ("/", name)
    logged = host.out("journalctl -u resctrlmond --no-pager -g 'counted as a workload of its own'")
    assert f"of container {name} is not a pod UID" in logged
    host.until(lambda: name not in host.groups(), "the end of the group")


@pytest.mark.parametrize("pid", ["0", "1", "2", "-1", "99999999999999999999", "daemon"])
def test_a_state_that_names_a_process_of_the_host_changes_nothing(host: Host, pid: str) -> None:
    number = str(host.pid()) if pid == "daemon" else pid
    before = host.groups()
    where = host.membership(1), host.membership(2), host.membership(host.pid())
    state = f'{{"ociVersion":"1.2.0","id":"hostile","status":"creating","pid":{number},"bundle":"/"}}'
    done = host.run(f"echo {shlex.quote(state)} | env -i /usr/libexec/resctrlmon-oci-hook createRuntime")
    assert done.output == ""
    assert host.groups() == before
    assert (host.membership(1), host.membership(2), host.membership(host.pid())) == where
    assert host.state("hostile") == ""


def test_a_hook_from_another_pid_namespace_is_refused(host: Host) -> None:
    state = '{"ociVersion":"1.2.0","id":"elsewhere","status":"creating","pid":5,"bundle":"/"}'
    host.run(
        f"echo {shlex.quote(state)} | unshare --pid --fork --mount-proc "
        "/usr/libexec/resctrlmon-oci-hook createRuntime"
    )
    assert host.state("elsewhere") == ""
    assert "PID namespace" in host.out("journalctl -t resctrlmon-oci-hook --no-pager -n 3")


def test_rootless_runtime_starts_without_a_message(host: Host) -> None:
    before = host.out("journalctl -t resctrlmon-oci-hook --no-pager -q | wc -l")
    state = '{"ociVersion":"1.2.0","id":"rootless","status":"creating","pid":5,"bundle":"/"}'
    done = host.run(
        f"echo {shlex.quote(state)} | runuser -u nobody -- /usr/libexec/resctrlmon-oci-hook createRuntime"
    )
    assert done.output == ""
    assert host.out("journalctl -t resctrlmon-oci-hook --no-pager -q | wc -l") == before


@pytest.mark.timeout(600)
def test_the_first_container_after_a_stop_of_the_service_is_in_its_group(host: Host) -> None:
    """The socket still accepts it, and systemd starts the daemon for it."""
    hook = json.loads(HOOKS["createRuntime"].read_text())
    # An emulated processor needs many times longer for a start than the default allows.
    hook["hook"]["args"] += ["--timeout", "15", "--start-timeout", "300"]
    host.run("mkdir -p /run/patient && systemctl stop resctrlmond.service")
    assert host.out("systemctl is-active resctrlmond.socket") == "active"
    host.guest.write("/run/patient/hook.json", json.dumps(hook))
    command = PODMAN.replace("podman run", "podman --hooks-dir /run/patient run --rm")
    class_, group = parse_where(host.out(f"{command} {WHERE}", timeout=400))
    assert (class_, len(group)) == ("/", 64)
    assert host.call("Get", key=group)["workload"]["baseline"] == "exact"


def test_every_container_starts_on_a_host_too_busy_to_schedule_the_hook_for_many_seconds(host: Host) -> None:
    # 5 % of an emulated CPU: the interpreter alone would exceed a short timeout of the runtime.
    outcome = start_at_once(host, 2, prefix="systemd-run --quiet --scope --property=CPUQuota=5%")
    assert outcome.started == outcome.deleted == 2, f"{outcome}: {outcome.errors}"


def test_containers_start_without_the_daemon_and_are_logged_as_unmonitored(host: Host) -> None:
    host.run("systemctl stop resctrlmond.socket resctrlmond.service")
    try:
        assert parse_where(podman(host, "--rm", WHERE)) == ("/", "")
        assert "unmonitored" in host.out("journalctl -t resctrlmon-oci-hook --no-pager -n 2")
    finally:
        host.start()
    assert host.run(f"ls {RUN}").stdout
