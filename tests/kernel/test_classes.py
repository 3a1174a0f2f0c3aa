# SPDX-License-Identifier: Apache-2.0
"""Classes and threads on the real kernel: a group follows its first task, and allocations change only on request."""

from __future__ import annotations

import shlex

import pytest

from .host import TREE, Host
from .machine import Guest

_SPAWN = "import threading, time; [threading.Thread(target=time.sleep, args=(300,)).start() for _ in range(7)]"
THREADS = f"python3 -c '{_SPAWN}'"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host with the daemon and the class c1 of an administrator."""
    host = Host(installed_guest)
    host.run(f"mkdir {TREE}/c1")
    host.start()
    return host


@pytest.fixture
def pid(host: Host) -> int:
    return host.process("sleep 300")


def in_c1(host: Host, pid: int) -> int:
    host.run(f"echo {pid} >{TREE}/c1/tasks")
    return pid


def test_a_process_in_a_class_gets_its_group_there(host: Host, pid: int) -> None:
    reply = host.call("Assign", key="follows", pid=in_c1(host, pid), claim="me")
    assert reply["workload"]["class"] == "c1"
    assert host.membership(pid) == ("c1", "follows")
    assert host.groups("c1") == ["follows"]
    host.call("Release", key="follows", claim="me")
    assert host.membership(pid) == ("c1", ""), "the task stays in its class"


def test_group_created_in_the_root_moves_to_the_class_of_its_first_task(host: Host, pid: int) -> None:
    host.call("Create", key="early", claim="me")
    identity = host.identity("early")
    assert host.call("Assign", key="early", pid=in_c1(host, pid), claim="me")["workload"]["class"] == "c1"
    assert host.membership(pid) == ("c1", "early")
    assert host.identity("early", "c1") == identity, "renamed, with its RMID, not made anew"
    assert "early" not in host.groups()
    host.call("Release", key="early", claim="me")


def test_another_class_is_refused_with_the_kernels_message_and_leaves_nothing(host: Host, pid: int) -> None:
    refusal = host.refused("Assign", key="wrong", pid=pid, claim="me", **{"class": "c1"})
    assert "ClassMismatch" in refusal
    assert "Can't move task to different control group" in refusal
    assert host.membership(pid) == ("/", "")
    assert host.groups("c1") == []
    assert host.state("wrong") == ""


def test_class_changes_only_if_it_is_requested_by_name(host: Host, pid: int) -> None:
    reply = host.call("Assign", key="changed", pid=pid, claim="me", allowClassChange=True, **{"class": "c1"})
    assert reply["workload"]["class"] == "c1"
    assert host.membership(pid) == ("c1", "changed")
    host.call("Release", key="changed", claim="me")


def test_missing_class_is_not_created(host: Host, pid: int) -> None:
    refusal = host.refused("Assign", key="classless", pid=pid, claim="me", **{"class": "nope"})
    assert "NoSuchClass" in refusal
    assert host.run(f"test -e {TREE}/nope", check=False).returncode != 0
    assert host.state("classless") == ""


def test_all_threads_of_a_process_are_in_the_group(host: Host) -> None:
    pid = host.process(THREADS)
    host.until(lambda: host.out(f"ls /proc/{pid}/task | wc -l") == "8", "eight threads")
    reply = host.call("Assign", key="threads", pid=pid, claim="me")
    assert (reply["moved"], reply["tasksOutside"]) == (8, 0)
    tids = host.out(f"ls /proc/{pid}/task").split()
    assert {host.membership(f"{pid}/task/{tid}") for tid in tids} == {("/", "threads")}
    assert sorted(host.out(f"cat {TREE}/mon_groups/threads/tasks").split()) == sorted(tids)
    host.run(f"kill {pid}")
    host.call("Release", key="threads", claim="me")


def test_control_group_is_assigned_with_all_children_and_threads(host: Host) -> None:
    host.run("mkdir -p /sys/fs/cgroup/sweep/inner")
    one, two = host.process(THREADS), host.process("sleep 300")
    host.run(f"echo {one} >/sys/fs/cgroup/sweep/cgroup.procs; echo {two} >/sys/fs/cgroup/sweep/inner/cgroup.procs")
    host.until(lambda: host.out(f"ls /proc/{one}/task | wc -l") == "8", "eight threads")
    reply = host.call("Assign", key="sweep", cgroup="/sys/fs/cgroup/sweep", claim="me")
    assert (reply["moved"], reply["tasksOutside"], reply["workload"]["baseline"]) == (9, 0, "late")
    assert host.membership(two) == ("/", "sweep")
    host.run(f"kill {one} {two}")
    host.until(lambda: host.call("Get", key="sweep")["workload"]["state"] == "idle", "the control group to be empty")
    host.call("Release", key="sweep", claim="me")
    host.run("rmdir /sys/fs/cgroup/sweep/inner /sys/fs/cgroup/sweep")


# Create threads and children until the process is stopped; some of them stay and create threads themselves.
_GROW = """
import os, threading, time
def threads(number):
    for _ in range(number):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
threads(3)
stays = 0
while not os.path.exists("/run/grow.stop"):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.wait()
    if stays < 30 and os.fork() == 0:
        threads(2)
        time.sleep(600)
    stays += 1
    open("/run/grow.stays", "w").write(str(stays))
open("/run/grow.stays", "w").write("whole")
time.sleep(600)
"""


def test_process_tree_that_continues_to_fork_is_assigned_completely_and_late(host: Host) -> None:
    cgroup = "/sys/fs/cgroup/grows"
    host.guest.write("/run/grow.py", _GROW)
    host.run(f"mkdir {cgroup}")
    host.process(f"sh -c 'echo $$ >{cgroup}/cgroup.procs; exec python3 /run/grow.py'")
    host.until(lambda: host.out("cat /run/grow.stays 2>/dev/null || :") not in ("", "1"), "the first children")
    reply = host.call("Assign", key="grows", cgroup=cgroup, claim="me")
    host.run("touch /run/grow.stop")
    assert reply["moved"] >= 4 + 1
    assert (reply["tasksOutside"], reply["workload"]["baseline"]) == (0, "late")
    host.until(lambda: host.out("cat /run/grow.stays") == "whole", "the tree to stop growing")
    threads = f"$(cat {cgroup}/cgroup.threads)"
    assert host.out(f"cd /proc && for t in {threads}; do grep -L '^mon:grows$' $t/cpu_resctrl_groups; done") == ""
    host.run(f"echo 1 >{cgroup}/cgroup.kill")
    host.until(lambda: host.call("Get", key="grows")["workload"]["state"] == "idle", "the control group to be empty")
    totals = host.call("Release", key="grows", claim="me")["totals"]
    assert {total["quality"] for total in totals} == {"late"}
    host.run(f"rmdir {cgroup} && rm /run/grow.*")


def test_move_moves_the_group_to_another_class(host: Host, pid: int) -> None:
    host.call("Assign", key="moves", pid=pid, claim="me")
    identity = host.identity("moves")
    host.call("Move", key="moves", **{"class": "c1"})
    assert host.membership(pid) == ("c1", "moves")
    assert host.identity("moves", "c1") == identity
    assert host.call("Read", key="moves")["workload"]["class"] == "c1"
    link = host.out("readlink /run/resctrlmond/groups/moves/mon_data/mon_L3_00/llc_occupancy")
    assert link == f"{TREE}/c1/mon_groups/moves/mon_data/mon_L3_00/llc_occupancy"
    host.call("Release", key="moves", claim="me")


def test_group_follows_a_workload_that_another_program_moves_to_another_class(host: Host, pid: int) -> None:
    host.call("Assign", key="taken", pid=pid, claim="me")
    identity = host.identity("taken")
    # The kernel drops a task from its monitoring group when its class changes; the daemon may have looked already.
    assert host.membership(in_c1(host, pid)) in {("c1", ""), ("c1", "taken")}
    host.until(lambda: host.membership(pid) == ("c1", "taken"), "its group to follow")
    assert host.identity("taken", "c1") == identity, "renamed, with its RMID, not made anew"
    workload = host.call("Get", key="taken")["workload"]
    assert (workload["class"], workload["baseline"]) == ("c1", "late")
    host.call("Release", key="taken", claim="me")
    assert "taken" not in host.groups("c1")


def test_part_of_a_workload_that_another_program_moves_gets_a_second_group(host: Host) -> None:
    stays, moved = host.process("sleep 300"), host.process("sleep 300")
    for member, pid in (("a", stays), ("b", moved)):
        host.call("Assign", key="parted", pid=pid, claim="me", member=member)
    in_c1(host, moved)
    host.until(lambda: host.membership(moved) == ("c1", "parted"), "the part to have a group")
    assert host.membership(stays) == ("/", "parted")
    assert host.call("Get", key="parted")["workload"]["classes"] == ["", "c1"]
    assert host.call("Release", key="parted", claim="me")["completed"]
    assert "parted" not in host.groups() + host.groups("c1")
    host.run(f"kill {stays} {moved}")


def test_task_in_a_foreign_group_is_taken_over_only_on_request(host: Host, pid: int) -> None:
    host.run(f"mkdir {TREE}/mon_groups/theirs && echo {pid} >{TREE}/mon_groups/theirs/tasks")
    assert "AlreadyMonitored" in host.refused("Assign", key="thief", pid=pid, claim="me")
    assert host.membership(pid) == ("/", "theirs")
    assert "ForeignGroup" in host.refused("Create", key="theirs", claim="me")
    host.call("Assign", key="thief", pid=pid, claim="me", takeOver=True)
    assert host.membership(pid) == ("/", "thief")
    host.call("Release", key="thief", claim="me")
    host.run(f"rmdir {TREE}/mon_groups/theirs")


def test_run_puts_the_command_and_its_children_into_the_group_and_keeps_its_status(host: Host) -> None:
    script = f"sleep 1 & cat /proc/$!/cpu_resctrl_groups {TREE}/mon_groups/ran/tasks; echo $$ $!; wait; exit 7"
    done = host.run(f"resctrlctl run --key ran -- sh -c {shlex.quote(script)}", check=False)
    assert done.returncode == 7, done.output
    lines = done.stdout.splitlines()
    assert lines[1] == "mon:ran"
    shell, child = lines[-1].split()
    assert {shell, child} <= set(lines[2:-1])
    assert "mbm total" in done.stderr
    assert host.state("ran") == "completed"


@pytest.mark.parametrize("class_", ["", "c1"])
def test_nested_run_has_its_own_group_and_returns_its_tasks_to_the_outer_one(host: Host, class_: str) -> None:
    """Tasks in another class than the outer run stay there, and the outer run is late."""
    inside = "cat /proc/$$/cpu_resctrl_groups; (while :; do /bin/true; done) >/dev/null 2>&1 & echo $!"
    option = f"--class {class_}" if class_ else ""
    inner = f"resctrlctl run -q {option} --key inner -- sh -c {shlex.quote(inside)}"
    script = (
        f"{inner} >/run/nested; cat /run/nested; cat /proc/$(tail -n1 /run/nested)/cpu_resctrl_groups;"
        f" cat {TREE}/mon_groups/*/tasks >/dev/null; cat /proc/$$/cpu_resctrl_groups"
    )
    done = host.run(f"resctrlctl run --key outer -- sh -c {shlex.quote(script)}")
    child = done.stdout.splitlines()[2]
    assert child.isdecimal(), done.stdout
    lines = done.stdout.replace(f"{child}\n", "").split()
    home = [f"res:{class_}", "mon:"] if class_ else ["res:/", "mon:outer"]
    assert lines == [f"res:{class_ or '/'}", "mon:inner", *home, "res:/", "mon:outer"]
    assert "The totals include 1 nested workload." in done.stderr
    host.run(f"kill {child}")
    reply = host.call("Read", key="outer")
    assert {one["event"] for one in reply["nested"]} == {one["event"] for one in reply["totals"]} != set()
    assert {one["quality"] for one in reply["nested"]} == {"exact"}
    assert {one["quality"] for one in reply["totals"]} == {"late" if class_ else "exact"}
    assert host.call("Get", key="inner")["workload"]["partOf"] == ["outer"]
    assert {"inner", "outer"}.isdisjoint(host.groups() + host.groups("c1"))


def has_reason(host: Host, pool: str, reason: str) -> bool:
    pools = host.call("Machine")["pools"]
    return any(reason in use.get("reason", "") for use in pools if use["pool"] == pool)


def test_pools_of_the_machine_notice_what_other_programs_create_and_remove(host: Host, pid: int) -> None:
    host.kill()
    host.start()
    host.call("Machine")
    host.call("Assign", key="pooled", pid=pid, claim="me")
    host.call("Release", key="pooled", claim="me")
    # A reading that is half a second old may be returned.
    host.until(lambda: has_reason(host, "tracked", "ended while its tasks ran"), "the reading after the end")
    pools = host.call("Machine")["pools"]
    assert {use["pool"] for use in pools} == {"tracked", "foreign", "untracked"}
    assert {use["event"] for use in pools} == {"llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"}
    # The process that ran on counts as untracked from then on, and what it used at the end is in no pool.
    reasons = {use.get("reason") for use in pools if use["pool"] == "tracked"}
    assert reasons == {None, "a workload ended while its tasks ran"}
    assert {use["quality"] for use in pools if use["pool"] != "tracked"} == {"exact"}
    changes = (
        (
            f"mkdir {TREE}/mon_groups/brief && rmdir {TREE}/mon_groups/brief",
            "foreign",
            "mon_groups/brief was created",
        ),
        (f"rmdir {TREE}/c1 && mkdir {TREE}/c1", "untracked", "class c1 was removed between two readings"),
    )
    for command, pool, reason in changes:
        host.run(command)
        host.until(lambda pool=pool, reason=reason: has_reason(host, pool, reason), reason)  # type: ignore[misc]
    assert "untracked  tasks in no group" in host.out("resctrlctl machine")
