# SPDX-License-Identifier: Apache-2.0
"""Recovery on the real kernel: kill -9, stop and start, groups of other programs, an unmount."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .host import BUSYBOX, TREE, Host
from .machine import Guest

FOREIGN = "11111111-2222-4333-8444-555555555555"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with the daemon, the hooks, and a foreign group with a pod UID as its name."""
    host = Host(installed_guest)
    host.make_root()
    host.enable_hooks()
    host.run(f"mkdir {TREE}/mon_groups/{FOREIGN} {TREE}/mon_groups/by-hand")
    host.start()
    return host


@pytest.fixture
def foreign(host: Host) -> Iterator[None]:
    """Return the foreign groups, which survive the test."""
    before = [host.identity(name) for name in (FOREIGN, "by-hand")]
    yield
    assert [host.identity(name) for name in (FOREIGN, "by-hand")] == before
    assert {one["name"] for one in host.call("List")["foreign"]} == {FOREIGN, "by-hand"}
    assert host.state(FOREIGN) == "", "a foreign group is listed as a workload"


def container(host: Host, name: str, seconds: int = 60) -> str:
    command = f"podman run -d --name {name} --network none --rootfs {BUSYBOX} sleep {seconds}"
    return host.out(command, timeout=100)


def test_service_that_systemd_restarts_continues_late_and_is_logged(host: Host) -> None:
    host.guest.write("/run/systemd/system/batch.service", "[Service]\nExecStart=/bin/sleep 600\n")
    host.run("systemctl daemon-reload && systemctl start batch")
    first = host.out("systemctl show -P MainPID batch")
    host.run("resctrlctl assign batch --cgroup /sys/fs/cgroup/system.slice/batch.service")
    assert host.membership(first) == ("/", "batch")
    identity = host.identity("batch")
    host.run("systemctl restart batch")
    second = host.out("systemctl show -P MainPID batch")
    assert second != first
    host.until(lambda: host.membership(second) == ("/", "batch"), "the new process in the group")
    host.until(lambda: host.state("batch") == "active", "the workload to be active again")
    workload = host.call("Get", key="batch")["workload"]
    log = host.out("journalctl -u resctrlmond --no-pager -q | grep batch")
    after = host.identity("batch")
    why = host.out("resctrlctl show --why batch; cat /run/resctrlmond/groups/batch/quality")
    host.run("resctrlctl release batch; systemctl stop batch")
    assert after == identity, "the service kept its group"
    assert (workload["baseline"], [member["late"] for member in workload["members"]]) == ("late", [True]), why
    assert "has tasks again" in log or "moved 1 task" in log


def test_pools_of_the_machine_continue_after_a_kill_and_a_restart(host: Host) -> None:
    """The service has another mount namespace after each start, and a class does not change the times of the root."""
    before = host.call("Machine")
    host.run(f"mkdir {TREE}/gold && rmdir {TREE}/gold")
    host.kill()
    after_kill = host.call("Machine")
    host.run("systemctl restart resctrlmond")
    after_restart = host.call("Machine")
    assert [found["since"] for found in (after_kill, after_restart)] == [before["since"]] * 2
    for then, now in zip(before["pools"], after_restart["pools"], strict=True):
        is_seen = then["pool"] == "tracked" or then["event"] == "llc_occupancy"
        assert now["quality"] == (then["quality"] if is_seen else "estimated"), now


def test_pools_of_the_machine_continue_after_a_change_of_the_root_directory(host: Host) -> None:
    """It changes the ctime of the directory, which names the mount in the file, and then each class does."""
    before = host.call("Machine")

    def is_written() -> bool:
        seconds, _, fraction = host.out(f"stat -c %.9Z {TREE}").partition(".")
        root: object = json.loads(host.out("cat /run/resctrlmond/machine.json"))["root"][1]
        return root == int(seconds + fraction)

    for change in (f"chmod 0755 {TREE}", f"mkdir {TREE}/gold && rmdir {TREE}/gold"):
        host.run(change)
        host.until(is_written, "the new ctime in the file")
        host.kill()
        assert host.call("Machine")["since"] == before["since"]


@pytest.mark.usefixtures("foreign")
def test_restarted_daemon_keeps_group_and_baseline_and_writes_the_end(host: Host) -> None:
    key = container(host, "killed")
    identity, before = host.identity(key), host.snapshot(key)
    host.kill()
    assert host.state(key) == "active"
    assert host.identity(key) == identity
    assert {name: text for name, text in host.snapshot(key).items() if name != "checkpoint"} == {
        name: text for name, text in before.items() if name != "checkpoint"
    }
    host.run("podman rm -f -t 0 killed")
    host.until(lambda: host.state(key) == "completed", "the end after the kill")
    assert key not in host.groups()
    after = host.snapshot(key)
    assert {name: text for name, text in after.items() if name.endswith(".begin")} == {
        name: text for name, text in before.items() if name.endswith(".begin")
    }
    assert {name.removesuffix(".end") for name in after if name.endswith(".end")} == {
        name.removesuffix(".begin") for name in before if name.endswith(".begin")
    }


@pytest.mark.usefixtures("foreign")
def test_the_end_of_a_container_that_ended_while_the_daemon_was_stopped_is_still_written(host: Host) -> None:
    key = container(host, "stopped")
    host.run("systemctl stop resctrlmond.service resctrlmond.socket")
    assert key in host.groups(), "stopping the daemon is not the end of anything"
    host.run("podman rm -f -t 0 stopped")
    host.run("sleep 0.5")
    assert key in host.groups()
    host.start()
    host.until(lambda: host.state(key) == "completed", "the end at the start")
    assert key not in host.groups()
    assert "completed_at" in host.snapshot(key)


@pytest.mark.usefixtures("foreign")
def test_upgrade_does_not_change_the_counts_of_a_running_container(host: Host) -> None:
    """Stop, replace the code, and start: the group, its baseline and its totals are the same."""
    key = container(host, "upgraded", 600)
    pid = host.out("podman inspect -f '{{.State.Pid}}' upgraded")
    identity, begins = host.identity(key), host.begins(key)
    totals = host.call("Read", key=key)["totals"]
    assert {total["quality"] for total in totals} == {"exact"}
    old = host.call("Status")["version"]
    host.run("systemctl stop resctrlmond.service resctrlmond.socket")
    assert host.identity(key) == identity
    code = "/usr/lib/python3/dist-packages/resctrlmond"
    host.run(f"cp -a {code} {code}.new && rm -r {code} && mv {code}.new {code}")
    host.run(f"sed -i 's/^__version__ = .*/__version__ = \"{old}.next\"/' {code}/__init__.py")
    host.start()
    assert host.call("Status")["version"] == f"{old}.next"
    assert host.state(key) == "active"
    assert host.membership(pid) == ("/", key)
    assert (host.identity(key), host.begins(key)) == (identity, begins)
    after = host.call("Read", key=key)
    assert (after["totals"], after["workload"]["generation"], after["workload"]["baseline"]) == (totals, 1, "exact")
    host.run("podman rm -f -t 0 upgraded")
    host.until(lambda: host.state(key) == "completed", "the end after the upgrade")
    assert {total["quality"] for total in host.call("Read", key=key)["totals"]} == {"exact"}
    assert host.begins(key) == begins


@pytest.mark.usefixtures("foreign")
def test_group_without_a_record_is_adopted_or_removed(host: Host) -> None:
    pid = host.process("sleep 600")
    host.call("Create", key="empty", claim="me")
    host.call("Assign", key="busy", pid=pid, claim="me")
    host.run("systemctl stop resctrlmond.service resctrlmond.socket && rm -r /run/resctrlmond")
    host.start()
    assert "empty" not in host.groups()
    workload = host.call("Get", key="busy")["workload"]
    assert (workload["state"], workload["baseline"]) == ("active", "unknown")
    assert host.membership(pid) == ("/", "busy")
    host.run(f"kill {pid}")
    host.until(lambda: host.state("busy") == "completed", "the end of the adopted workload")


@pytest.mark.usefixtures("foreign")
def test_workload_gets_a_new_group_after_a_removal(host: Host) -> None:
    host.call("Create", key="robbed", claim="me")
    host.run(f"rmdir {TREE}/mon_groups/robbed")

    def begun_anew() -> bool:
        workload = host.call("Get", key="robbed")["workload"]
        return (workload["state"], workload["generation"]) == ("idle", 2)

    host.until(begun_anew, "the loss to be seen, and a new group")
    assert "another program" in host.call("Get", key="robbed")["workload"]["loss"]
    assert "robbed" in host.groups()
    assert host.call("Release", key="robbed", claim="me")["completed"]


def test_umount_is_always_possible_and_a_new_mount_is_used(host: Host) -> None:
    host.call("Create", key="unmounted", claim="me")
    pid = host.process("sleep 600")
    host.call("Assign", key="living", pid=pid, claim="me")
    host.unmount()
    try:
        host.until(lambda: host.state("unmounted") == "lost", "the unmount to be seen")
        assert host.call("Status")["mounted"] is False
        assert "NotMounted" in host.refused("Create", key="nowhere", claim="me")
        assert host.state("nowhere") == ""
    finally:
        host.run(f"mount -t resctrl resctrl {TREE}")
    host.call("Create", key="again", claim="me")
    assert "again" in host.groups()
    # A task that survived is added to its group again, without a request.
    host.until(lambda: host.membership(pid) == ("/", "living"), "what lives to be in its group again")
    host.until(lambda: host.state("unmounted") == "idle", "the next group of the claimed workload")
    workload = host.call("Get", key="living")["workload"]
    assert (workload["state"], workload["generation"], workload["baseline"]) == ("active", 2, "late")
    assert "unmounted" in workload["loss"]
    for key in ("unmounted", "living"):
        assert host.call("Release", key=key, claim="me")["completed"]
    host.run(f"kill {pid}")
    assert host.call("Release", key="again", claim="me")["completed"]


def test_quick_remount_is_not_reported_as_interference(host: Host) -> None:
    host.call("Create", key="went", claim="me")
    host.unmount(f"mount -t resctrl resctrl {TREE}")
    host.until(lambda: host.call("Get", key="went")["workload"]["generation"] == 2, "a new group")
    assert "another program" not in host.call("Get", key="went")["workload"]["loss"]
    assert "mounted" in host.call("Get", key="went")["workload"]["loss"]
    assert host.call("Release", key="went", claim="me")["completed"]
