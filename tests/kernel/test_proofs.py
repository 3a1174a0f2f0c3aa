# SPDX-License-Identifier: Apache-2.0
"""Proofs by the witness in the kernel: use outside the groups, and of others in them, that no search finds."""

from __future__ import annotations

import json
import shlex

import pytest

from .host import TREE, Host
from .machine import Guest

CGROUPS = "/sys/fs/cgroup"
WORK = "i=0; while [ $i -lt {} ]; do i=$((i+1)); done"
UID = "0b5c1d2e-6f70-4a81-9b92-a3b4c5d6e7f8"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with a witness."""
    host = Host(installed_guest)
    host.make_root()
    host.enable_hooks()
    host.start()
    assert host.out("cat /run/resctrlmond/witness/state") == "state loaded"
    return host


def joined(path: str, count: int) -> str:
    """Return a command that joins a control group, and uses CPU time."""
    return f"sh -c {shlex.quote(f'echo $$ >{path}/cgroup.procs; {WORK.format(count)}')}"


class Container:
    """A container of crun, whose program waits for work: "echo N >FIFO" makes it use CPU time."""

    def __init__(self, host: Host, name: str, cgroup: str = "", annotations: dict[str, str] | None = None) -> None:
        self.host = host
        self.name = name
        self.cgroup = cgroup or f"/{name}"
        self.path = CGROUPS + self.cgroup
        bundle = host.bundle(name, "while :; do sleep 1; done", annotations or {}, self.cgroup)
        host.run(f"crun run -d --bundle {bundle} {name} </dev/null >/dev/null 2>&1")

    def read(self) -> tuple[set[str], str]:
        """Return the qualities of the totals of its workload now, and their reasons."""
        return read(self.host, self.name)

    def end(self) -> tuple[set[str], str]:
        """End it, and return the final qualities and reasons."""
        self.host.run(f"crun delete --force {self.name}")
        self.host.until(lambda: self.host.state(self.name) == "completed", "the container's end")
        return self.read()


def read(host: Host, key: str) -> tuple[set[str], str]:
    totals = host.call("Read", key=key)["totals"]
    return {total["quality"] for total in totals}, " ".join({total.get("reason", "") for total in totals})


def proof(host: Host, key: str) -> dict[str, object]:
    """Return the proof in the record of a workload."""
    found: dict[str, object] = json.loads(host.out(f"cat /run/resctrlmond/records/{key}.json")).get("proof", {})
    return found


def test_undisturbed_container_is_exact(host: Host) -> None:
    container = Container(host, "quiet")
    assert container.read() == ({"exact"}, "")
    host.until(lambda: proof(host, "quiet").get("cgroups") is not None, "the proof")
    assert container.end() == ({"exact"}, "")


def test_short_container_is_exact(host: Host) -> None:
    bundle = host.bundle("short", WORK.format(3000), {}, "/short")
    host.run(f"crun run --bundle {bundle} short </dev/null >/dev/null 2>&1")
    host.until(lambda: host.state("short") == "completed", "the container's end")
    assert read(host, "short") == ({"exact"}, "")
    inside = proof(host, "short")["inside"]
    assert isinstance(inside, dict)
    assert sum(inside.values()) > 1_000_000, inside
    workload = host.call("Read", key="short")["workload"]
    assert workload["cpuTimeNs"] == sum(inside.values())
    assert workload["cpuTimeOutsideNs"] < 1_000_000
    assert "CPU time" in host.out("resctrlctl show short", timeout=120)


def test_start_without_its_hook_in_the_same_control_group_is_late(host: Host) -> None:
    """Its control group is removed before the next look."""
    host.call("Create", key="twice", claim="me")
    bundle = host.bundle("twice", WORK.format(3000), {}, "/twice")
    run = f"crun run --bundle {bundle} twice </dev/null >/dev/null 2>&1"
    host.run(run)
    host.until(lambda: host.state("twice") == "idle", "the container's end")
    assert read(host, "twice") == ({"exact"}, "")
    spec = json.loads(host.guest.read(f"{bundle}/config.json"))
    del spec["hooks"]
    host.guest.write(f"{bundle}/config.json", json.dumps(spec))
    host.run(run)
    qualities, why = read(host, "twice")
    assert qualities == {"late"}
    assert "of CPU time outside the group" in why


def test_process_that_joined_and_ended_between_two_looks_is_late_by_its_use(host: Host) -> None:
    container = Container(host, "joined")
    host.out(joined(container.path, 20000))
    qualities, why = container.read()
    assert qualities == {"late"}, why
    assert "of CPU time outside the group" in why
    qualities, why = container.end()
    assert qualities == {"late"}
    assert "of CPU time outside the group" in why


def test_process_that_joins_while_the_daemon_stands_still_is_late(host: Host) -> None:
    container = Container(host, "still")
    pid = host.pid()
    host.run(f"kill -STOP {pid}")
    host.out(joined(container.path, 20000))
    host.run("crun kill still KILL")
    host.run("sleep 1")
    host.run(f"kill -CONT {pid}")
    host.until(lambda: host.state("still") == "completed", "the container's end")
    host.run("crun delete --force still")
    qualities, why = read(host, "still")
    assert qualities == {"late"}, why


def test_stranger_in_the_group_that_ended_unseen_makes_it_estimated(host: Host) -> None:
    container = Container(host, "visited")
    group = f"{TREE}/mon_groups/visited"
    pid = host.pid()
    host.run(f"kill -STOP {pid}")
    host.out(f"sh -c {shlex.quote(f'echo $$ >{group}/tasks; {WORK.format(20000)}')}")
    host.run(f"kill -CONT {pid}")
    qualities, why = container.read()
    assert qualities == {"estimated"}, why
    assert "tasks of other control groups used up to" in why
    assert container.end()[0] == {"estimated"}


def test_container_without_a_call_makes_its_pod_late(host: Host) -> None:
    folder = f"/kubepods/pod{UID}"
    annotations = {
        "io.kubernetes.pod.uid": UID,
        "io.kubernetes.pod.name": "web-0",
        "io.kubernetes.pod.namespace": "shop",
        "io.kubernetes.container.name": "app",
        "io.kubernetes.cri-o.ContainerType": "container",
    }
    container = Container(host, "app", f"{folder}/app", annotations)
    assert read(host, UID) == ({"exact"}, "")
    # Its control group has a name of a form that the daemon does not know.
    other = f"{CGROUPS}{folder}/run-u12.scope"
    host.run(f"mkdir -p {other}")
    host.out(joined(other, 20000))
    qualities, why = read(host, UID)
    host.run(f"rmdir {other}")
    assert qualities == {"late"}, why
    assert "of CPU time outside the group" in why
    host.run(f"crun delete --force {container.name}")
    host.run(f"rmdir {CGROUPS}{folder}")


def test_container_beside_writes_of_another_program_stays_exact(host: Host) -> None:
    """A foreign program's moves of its own tasks leave the containers of the host exact."""
    container = Container(host, "beside")
    host.run(f"mkdir {TREE}/mon_groups/theirs")
    for _ in range(3):
        host.out(f"sh -c {shlex.quote(f'echo $$ >{TREE}/mon_groups/theirs/tasks; true')}")
    host.run(f"rmdir {TREE}/mon_groups/theirs")
    assert container.read() == ({"exact"}, "")
    assert container.end() == ({"exact"}, "")


def test_group_whose_witness_was_loaded_again_is_not_exact(host: Host) -> None:
    container = Container(host, "gap")
    assert container.read() == ({"exact"}, "")
    host.run("resctrlmond-witness unload && resctrlmond-witness load")
    qualities, why = container.read()
    assert qualities == {"estimated"}, why
    assert "tasks may have used CPU time outside the group, or others in it" in why
    assert container.end()[0] == {"estimated"}
