# SPDX-License-Identifier: Apache-2.0
"""Another program writes to the kernel's resctrl: the workload is not exact any more, if that changed its tasks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import aio

from .host import TREE, Host
from .machine import Guest

TAKEN = "tasks were moved out of the group"
ADDED = "tasks of others were moved into the group"
WROTE = "another program gave the group CPUs"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with the daemon and the class c1 of an administrator."""
    host = Host(installed_guest)
    host.run(f"mkdir {TREE}/c1")
    host.start()
    return host


@pytest.fixture
def workload(host: Host, request: pytest.FixtureRequest) -> tuple[str, int, int]:
    """An exact workload without a control group: its key, its process, and a child of that."""
    key = re.sub("[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")
    pid = host.process("sh -c 'sleep 1000 & wait; sleep 1000; true'")
    host.until(lambda: host.out(f"pgrep -P {pid} || true") != "", "a child")
    child = int(host.out(f"pgrep -P {pid}"))
    # The child first: a descendant outside would not be exact.
    for task in (child, pid):
        host.call("Assign", key=key, pid=task, claim="me", late=False)
    assert host.call("Get", key=key)["workload"]["baseline"] == "exact"
    return key, pid, child


def becomes(host: Host, key: str, baseline: str) -> str:
    """The reason of each total once the workload's baseline is that."""
    host.until(
        lambda: host.call("Get", key=key)["workload"]["baseline"] == baseline, f"a baseline that is {baseline}"
    )
    (reason,) = {total["reason"] for total in host.call("Read", key=key)["totals"]}
    return str(reason)


Workload = tuple[str, int, int]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda write: write,
        lambda write: f"unshare --mount sh -c '{write}'",
        lambda write: f"mkdir -p /tmp/bound; unshare --mount sh -c 'mount --bind {TREE} /tmp/bound; {write}'".replace(
            f">{TREE}", ">/tmp/bound"
        ),
    ],
    ids=["plain", "mount-namespace", "bind-mount"],
)
def test_a_fork_that_is_moved_to_a_class_makes_its_workload_late(
    host: Host, workload: Workload, wrapped: Callable[[str], str]
) -> None:
    key, pid, child = workload
    host.run(f"kill {child}")
    host.until(lambda: host.out(f"pgrep -P {pid} || true") not in ("", str(child)), "the next child")
    fork = host.out(f"pgrep -P {pid}")
    assert host.membership(fork) == ("/", key)
    host.run(wrapped(f"echo {fork} >{TREE}/c1/tasks"))
    assert TAKEN in becomes(host, key, "late")


def test_a_task_that_is_moved_out_and_ends_at_once_makes_its_workload_late(host: Host, workload: Workload) -> None:
    key, pid, child = workload
    host.run(f"kill {child}")
    host.until(lambda: host.out(f"pgrep -P {pid} || true") not in ("", str(child)), "the next child")
    fork = host.out(f"pgrep -P {pid}")
    assert host.membership(fork) == ("/", key)
    # While the daemon is stopped, it cannot see the task alive.
    host.run(f"kill -STOP {host.pid()}; echo {fork} >{TREE}/c1/tasks; kill -9 {fork}; kill -CONT {host.pid()}")
    assert TAKEN in becomes(host, key, "late")


def test_a_task_that_is_moved_out_and_put_back_makes_its_workload_estimated(host: Host, workload: Workload) -> None:
    key, _, child = workload
    host.run(f"echo {child} >{TREE}/tasks; echo {child} >{TREE}/mon_groups/{key}/tasks")
    assert ADDED in becomes(host, key, "estimated")


def test_an_asynchronous_write_is_found(host: Host, workload: Workload) -> None:
    """It raises no event of inotify."""
    key, _, child = workload
    host.guest.write("/tmp/aio.py", Path(aio.__file__).read_text())
    # By one program: the daemon puts the task back in time otherwise.
    host.run(f"python3 /tmp/aio.py {TREE}/tasks {child} {TREE}/mon_groups/{key}/tasks {child}")
    assert host.membership(str(child)) == ("/", key)
    assert ADDED in becomes(host, key, "estimated")


def test_a_task_that_is_moved_in_is_in_the_final_quality(host: Host, workload: Workload) -> None:
    key, _, _ = workload
    host.run(f"echo $$ >{TREE}/mon_groups/{key}/tasks")
    totals = host.call("Release", key=key, claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"estimated"}
    assert all(ADDED in total["reason"] for total in totals)


@pytest.mark.parametrize("write", ["echo 1 >{}/cpus", "echo 0 >{}/cpus_list"])
def test_a_group_that_gets_cpus_makes_its_workload_estimated(host: Host, workload: Workload, write: str) -> None:
    key, _, _ = workload
    host.run(write.format(f"{TREE}/mon_groups/{key}"))
    assert "CPUs" in becomes(host, key, "estimated") or WROTE in becomes(host, key, "estimated")


def test_cpus_that_are_given_and_taken_back_while_no_daemon_runs_are_known(host: Host, workload: Workload) -> None:
    key, _, _ = workload
    give = f"for cpus in 0 ''; do echo $cpus >{TREE}/mon_groups/{key}/cpus_list; done"
    host.run(
        f"systemctl stop resctrlmond.socket resctrlmond && {give}; systemctl start resctrlmond.socket resctrlmond"
    )
    totals = host.call("Release", key=key, claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"estimated"}
    assert all(WROTE in total["reason"] for total in totals)


def test_writes_through_another_mount_are_seen(host: Host, workload: Workload) -> None:
    """So a second mount takes nothing away, and resctrlctl doctor does not warn of it."""
    key, _, child = workload
    host.run(f"mkdir -p /mnt/other && mount --bind {TREE} /mnt/other")
    try:
        host.run(f"echo {child} >/mnt/other/tasks")
        assert TAKEN in becomes(host, key, "late")
        host.run(f"echo 0 >/mnt/other/mon_groups/{key}/cpus_list")
        assert WROTE in becomes(host, key, "estimated")
    finally:
        host.run("umount /mnt/other")


@pytest.mark.parametrize("redirection", [">", "1<>"])
def test_a_refused_write_marks_nothing(host: Host, workload: Workload, redirection: str) -> None:
    key, _, _ = workload
    host.run(f"! echo 2147483647 {redirection}{TREE}/c1/tasks 2>/dev/null")
    totals = host.call("Release", key=key, claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"exact"}


def test_moves_of_an_earlier_daemon_are_not_of_others(host: Host, workload: Workload) -> None:
    key, _, _ = workload
    host.kill()
    assert host.call("Read", key=key)["workload"]["baseline"] == "exact"
    totals = host.call("Release", key=key, claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"exact"}


def test_tasks_of_others_that_change_class_mark_nothing(host: Host, workload: Workload) -> None:
    key, _, _ = workload
    for other in [host.process("sleep 1000") for _ in range(3)]:
        host.run(f"echo {other} >{TREE}/c1/tasks")
    assert host.call("Read", key=key)["workload"]["baseline"] == "exact"
    totals = host.call("Release", key=key, claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"exact"}


def test_resctrl_can_be_unmounted_while_it_is_watched(host: Host, workload: Workload) -> None:
    key, _, _ = workload
    host.unmount(f"mount -t resctrl resctrl {TREE}")
    host.until(lambda: host.state(key) in ("lost", "active"), "the loss")
    host.until(lambda: host.state(key) == "active", "the group again")
    host.run(f"mkdir {TREE}/c1")
    other = host.process("sleep 1000")
    host.call("Assign", key="after", pid=other, claim="me", late=False)
    host.run(f"echo $$ >{TREE}/mon_groups/after/tasks")
    assert ADDED in becomes(host, "after", "estimated")
