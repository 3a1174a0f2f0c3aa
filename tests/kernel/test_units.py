# SPDX-License-Identifier: Apache-2.0
"""Systemd units that the configuration selects: watched from start to end, over restarts and reloads."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from resctrlmond.service.message_ids import MessageId

from .host import TREE, Host, parse_where
from .machine import Guest
from .services import OWNER, READY, write_programs
from .units_budget import DROP_IN as BUDGET_DROP_IN
from .units_budget import OVERFLOW, RMIDS, Budget, play

DROP_IN = "/etc/resctrlmond/resctrlmond.d/test.yaml"
UNITS = "/run/systemd/system"
GLOBS = ["shop*.service", "late@*.service", "caller.service", "shop.slice", "user@*.service", "user-*:*.service"]

FILES = {
    "shop-simple.service": "[Service]\nExecStart=sleep 600\nExecReload=kill -CONT $MAINPID\nSlice=shop.slice\n"
    "MemoryHigh=512M\nMemorySwapMax=1G",
    "shop-fork.service": "[Service]\nType=forking\nExecStart=sh -c 'sleep 600 & exit 0'",
    "shop-crash.service": "[Service]\nExecStart=sh -c 'sleep 600; exit 1'\nRestart=on-failure\nRestartSec=100ms",
    "shop-once.service": "[Service]\nType=oneshot\nExecStart=sh -c 'while test ! -e /run/once; do sleep 0.1; done'",
    "shop-stays.service": "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=sleep 1",
    "shop-delegate.service": "[Service]\nDelegate=yes\nExecStart=sh -c 'cd /sys/fs/cgroup/system.slice/"
    "shop-delegate.service && mkdir below && (echo 0 >below/cgroup.procs; exec sleep 601) & exec sleep 600'",
    **{
        f"shop-{type_}.service": f"[Service]\nType={type_}\n{text}"
        for type_, text in {
            "exec": "ExecStart=sleep 600",
            "idle": "ExecStart=sleep 600",
            "notify": "NotifyAccess=all\nExecStart=sh -c 'systemd-notify --ready; exec sleep 600'",
            "notify-reload": f"ExecStart=python3 {READY}",
            "dbus": f"BusName=org.resctrlmon.Test\nExecStart=python3 {OWNER}",
        }.items()
    },
    "late@.service": "[Service]\nExecStart=sleep 60%i",
    "unseen.service": "[Service]\nExecStart=sleep 600\nSlice=shop.slice",
    "shop-socket.socket": "[Socket]\nListenStream=/run/shop.socket\nAccept=no",
    "shop-socket.service": "[Service]\nExecStart=sleep 600",
    "caller.service": "[Service]\nExecStart=sh -c 'while test ! -e /run/call; do sleep 0.1; done; "
    "systemd-run --scope --unit=session sleep 600'",
}

PROFILES = """\
profiles:
  gold: {class: gold, memory_high: 64M, swap: deny}
  quiet: {watch: none}
rules:
  - {profile: gold, owner: systemd, unit: shop-simple.service}
  - {profile: quiet, owner: systemd, cgroup: /system.slice/shop-fork.service}
"""


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """A host with the daemon, which watches these units."""
    host = Host(installed_guest)
    for name, text in FILES.items():
        host.guest.write(f"{UNITS}/{name}", text + "\n")
    host.run("useradd --create-home --uid 1000 shopper && systemctl daemon-reload")
    select(host, GLOBS)
    host.start()
    return host


def select(host: Host, globs: list[str]) -> None:
    host.guest.write(DROP_IN, json.dumps({"units": globs}) + "\n")
    if host.out("systemctl is-active resctrlmond || true") == "active":
        host.run("systemctl reload resctrlmond", timeout=100)


def workload(host: Host, key: str) -> dict[str, Any]:
    found: dict[str, Any] = host.call("Get", key=key)["workload"]
    return found


def group_of(host: Host, unit: str) -> str:
    return parse_where(host.out(f"cat /proc/$(systemctl show -P MainPID {unit})/cpu_resctrl_groups"))[1]


def until_in_its_group(host: Host, unit: str) -> None:
    host.until(lambda: group_of(host, unit) == unit, f"{unit} in its group")
    host.until(lambda: host.state(unit) == "active", f"the state of {unit}")


def until_ended(host: Host, *keys: str) -> None:
    for key in keys:
        host.until(lambda key=key: host.state(key) == "completed", f"the end of {key}")  # type: ignore[misc]
    assert not set(keys) & set(host.groups())


def test_service_keeps_its_workload_over_reload_restart_and_failure_until_it_stops(host: Host) -> None:
    simple, crash, fork = "shop-simple.service", "shop-crash.service", "shop-fork.service"
    host.run(f"systemctl start {simple} {crash} {fork}")
    for unit in (simple, crash):
        until_in_its_group(host, unit)
    host.until(lambda: host.state(fork) == "active", "the forking service")
    (sleeper,) = host.out("cat /sys/fs/cgroup/system.slice/shop-fork.service/cgroup.procs").split()
    assert host.membership(sleeper)[1] == fork
    found = workload(host, simple)
    assert found["attributes"] == {"unit": simple}
    assert [claim["owner"] for claim in found["claims"]] == ["systemd"]
    totals = {total["event"]: total for total in host.call("Read", key=simple)["totals"]}
    assert totals["mbm_total_bytes"]["quality"] == "late"
    assert "of CPU time before" in totals["mbm_total_bytes"]["reason"]

    host.run(f"systemctl reload {simple}")
    assert group_of(host, simple) == simple
    host.run(f"systemctl restart {simple}")
    until_in_its_group(host, simple)
    old = host.out(f"systemctl show -P MainPID {crash}")
    host.run(f"pkill -P {old} sleep")
    host.until(lambda: host.out(f"systemctl show -P MainPID {crash}") not in (old, "0"), "the automatic restart")
    until_in_its_group(host, crash)
    assert [workload(host, unit)["generation"] for unit in (simple, crash, fork)] == [1, 1, 1]

    host.run(f"systemctl stop {simple} {fork}; systemctl set-property --runtime {crash} TasksMax=20")
    host.run(f"systemctl kill --signal=KILL {crash}; systemctl stop {crash}")
    until_ended(host, simple, fork, crash)
    host.run("journalctl --sync")
    query = f"journalctl --no-pager -o json -u {simple} MESSAGE_ID={MessageId.ENDED}"
    (entry,) = map(json.loads, host.out(query).splitlines())
    assert (entry["RESCTRLMON_UNIT"], entry["OBJECT_SYSTEMD_UNIT"]) == (simple, simple)


def test_services_of_the_other_types_keep_their_workloads_until_they_stop(host: Host) -> None:
    units = [f"shop-{type_}.service" for type_ in ("exec", "idle", "notify", "notify-reload", "dbus")]
    reloads, fails = "shop-notify-reload.service", "shop-dbus.service"
    write_programs(host)
    host.run(f"systemctl start {' '.join(units)}", timeout=100)
    for unit in units:
        until_in_its_group(host, unit)
    for key in units:
        totals = {total["event"]: total for total in host.call("Read", key=key)["totals"]}
        assert totals["mbm_total_bytes"]["quality"] == "late"
        assert "of CPU time before" in totals["mbm_total_bytes"]["reason"]
    host.run(f"systemctl reload {reloads}")
    assert "reloaded" in host.out(f"systemctl show -P StatusText {reloads}")
    host.run(f"systemctl restart {' '.join(units)}", timeout=100)
    for unit in units:
        until_in_its_group(host, unit)
    assert {workload(host, unit)["generation"] for unit in units} == {1}
    host.run(f"systemctl kill --signal=KILL {fails}")
    until_ended(host, fails)
    assert host.out(f"systemctl is-failed {fails}") == "failed"
    host.run(f"systemctl stop {' '.join(units)}; systemctl reset-failed {fails}", timeout=100)
    until_ended(host, *units)


def test_oneshot_socket_activated_template_and_delegated_services(host: Host) -> None:
    once, stays, late, by_socket = "shop-once.service", "shop-stays.service", "late@1.service", "shop-socket.service"
    delegate = "shop-delegate.service"
    host.run(f"systemctl start --no-block {once}; systemctl start {late} {delegate} shop-socket.socket")
    until_in_its_group(host, once)
    until_in_its_group(host, late)
    assert host.state(by_socket) == ""
    host.run("python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"/run/shop.socket\")'")
    until_in_its_group(host, by_socket)
    below = f"/sys/fs/cgroup/system.slice/{delegate}/below/cgroup.procs"
    host.until(lambda: bool(host.out(f"cat {below}")), "the delegated control group")
    for pid in host.out(f"cat {below}").split():
        host.until(lambda pid=pid: host.membership(pid)[1] == delegate, "its process")  # type: ignore[misc]
    host.run(f"touch /run/once; systemctl start {stays}")
    assert host.out(f"systemctl show -P ActiveState,SubState {stays}").split() == ["active", "exited"]
    until_ended(host, once, stays)
    host.run(f"systemctl stop shop-socket.socket {by_socket} {late} {delegate}")
    until_ended(host, late, by_socket, delegate)


def test_slice_counts_services_without_a_workload(host: Host) -> None:
    host.run("systemctl start shop-simple.service unseen.service")
    until_in_its_group(host, "shop-simple.service")
    host.until(lambda: group_of(host, "unseen.service") == "shop.slice", "the task of the slice", 100)
    (member,) = workload(host, "shop.slice")["members"]
    assert "tasksOutside" not in member
    host.run("systemctl stop shop-simple.service unseen.service")
    until_ended(host, "shop-simple.service")
    assert host.state("shop.slice") in ("active", "idle")
    host.run("systemctl stop shop.slice")
    until_ended(host, "shop.slice")


def test_process_that_leaves_its_service_is_not_counted_there(host: Host) -> None:
    host.run("rm -f /run/call; systemctl start caller.service")
    until_in_its_group(host, "caller.service")
    host.run("touch /run/call")
    scope = "/sys/fs/cgroup/system.slice/session.scope/cgroup.procs"
    host.until(lambda: bool(host.run(f"cat {scope}", check=False).stdout), "the scope")
    (pid,) = host.out(f"cat {scope}").split()
    host.until(lambda: host.membership(pid)[1] == "", "the process out of the service's group")
    totals = host.call("Read", key="caller.service")["totals"]
    assert {total["quality"] for total in totals if "mbm" in total["event"]} == {"estimated"}
    host.run("systemctl stop caller.service session.scope")
    until_ended(host, "caller.service")


@pytest.mark.timeout(600)
def test_status_has_the_exit_codes_of_systemctl_and_the_reasons(host: Host) -> None:
    simple, unseen, fork = "shop-simple.service", "unseen.service", "shop-fork.service"
    host.run(f"systemctl start {simple} {unseen}")
    until_in_its_group(host, simple)
    host.until(lambda: group_of(host, unseen) == "shop.slice", "the task of the slice", 100)
    shown: dict[str, str] = {}
    for unit in (simple, unseen, fork, "absent.service", "shop.slice", "shop-socket.socket", "-.slice"):
        expected = host.run(f"systemctl status -- {unit}", check=False).returncode
        done = host.run(f"resctrlctl status -- {unit}", check=False)
        assert done.returncode == expected, unit
        shown[unit] = done.stdout
    both = host.out("resctrlctl status --json=short 'shop-si*.service' 'shop*.slice'").splitlines()
    found, slice_ = map(json.loads, both)
    assert [one["unit"]["name"] for one in (found, slice_)] == [simple, "shop.slice"]
    assert (found["glob"], found["globPath"], found["absence"], found["tasks"]) == (GLOBS[0], DROP_IN, None, 1)
    assert found["use"]["workload"]["members"][0]["cgroup"] == found["unit"]["cgroup"]
    assert found["unit"]["since"].endswith("Z")
    late = r"^ *Watched: yes, late: it was already running when it was put into the group"
    assert re.search(late, shown[simple], re.MULTILINE)
    counted = "no glob in the configuration selects it; its tasks are counted in the workload shop.slice"
    assert counted in shown[unseen]
    host.run(f"systemctl stop {simple} {unseen} shop.slice")
    until_ended(host, simple, "shop.slice")
    host.run("journalctl --sync")
    ended = host.run(f"resctrlctl status --json {simple}", check=False)
    assert ended.returncode == 3
    found = json.loads(ended.stdout)
    assert (found["unit"]["active"], found["absence"]["reason"]) == ("inactive", "it is not running")
    assert found["runs"][-1]["quality"] == "late"
    assert found["problems"] == []


@pytest.mark.timeout(600)
def test_units_of_a_user(host: Host) -> None:
    key = "user-1000:mine.service"
    run = "systemd-run --machine=1000@.host --user --quiet --collect --unit=mine sleep 600"
    host.run("systemctl start user@1000.service", timeout=100)
    host.run(
        "setpriv --reuid 1000 --regid 1000 --clear-groups env XDG_RUNTIME_DIR=/run/user/1000 "
        + run.replace(" --machine=1000@.host", ""),
        timeout=100,
    )
    host.until(lambda: host.state(key) == "active", "the unit of the user")
    path = host.out("find /sys/fs/cgroup/user.slice -name mine.service")
    (pid,) = host.out(f"cat {path}/cgroup.procs").split()
    host.until(lambda: host.membership(pid)[1] == key, "its process in the group")
    assert workload(host, key)["attributes"] == {"unit": key, "user": "1000"}
    assert host.state("user@1000.service") == "active"
    found = json.loads(host.out("resctrlctl status --json user-1000:mine"))
    assert (found["unit"]["cgroup"], found["use"]["workload"]["key"], found["glob"]) == (
        path,
        key,
        "user-*:*.service",
    )
    host.run(f"kill {pid}")
    until_ended(host, key)
    host.run("systemctl stop user@1000.service", timeout=100)
    until_ended(host, "user@1000.service")


def test_units_that_change_while_no_daemon_runs_and_globs_that_are_removed(host: Host) -> None:
    host.run("systemctl start shop-simple.service shop-fork.service")
    until_in_its_group(host, "shop-simple.service")
    host.until(lambda: host.state("shop-fork.service") == "active", "the forking service")
    generation = workload(host, "shop-simple.service")["generation"]
    host.run("systemctl stop resctrlmond resctrlmond.socket")
    host.run(
        "systemctl stop shop-fork.service; systemctl restart shop-simple.service; systemctl start late@2.service"
    )
    host.run("systemctl start resctrlmond.socket")
    host.start()
    until_ended(host, "shop-fork.service")
    for unit in ("shop-simple.service", "late@2.service"):
        until_in_its_group(host, unit)
    assert workload(host, "shop-simple.service")["generation"] == generation
    select(host, ["late@*"])
    until_ended(host, "shop-simple.service")
    host.run("systemctl daemon-reexec", timeout=100)
    host.run("systemctl stop late@2.service; systemctl start late@3.service")
    until_ended(host, "late@2.service")
    until_in_its_group(host, "late@3.service")
    host.guest.write(DROP_IN, "units:\n- late\n")
    refused = host.run("systemctl reload resctrlmond", check=False, timeout=100)
    assert refused.returncode != 0
    assert "test.yaml:2: units: 'late' is not a glob" in host.out("journalctl --no-pager -u resctrlmond")
    assert host.state("late@3.service") == "active"
    select(host, [])
    until_ended(host, "late@3.service")
    host.run("systemctl stop late@3.service shop-simple.service")


def test_profiles_apply_to_units(host: Host) -> None:
    simple, fork = "shop-simple.service", "shop-fork.service"
    host.run(f"cat >/etc/resctrlmond/profiles.d/10-test.yaml <<'E'\n{PROFILES}E")
    host.run(f"mkdir {TREE}/gold")
    select(host, GLOBS)
    host.run(f"systemctl start {simple} {fork}")
    pid = f"systemctl show -P MainPID {simple}"
    host.until(lambda: host.membership(host.out(pid)) == ("gold", simple), "the service in its class")
    properties = f"systemctl show -P MemoryHigh,MemorySwapMax {simple}"
    values = f"cd /sys/fs/cgroup/shop.slice/{simple} && cat memory.high memory.swap.max"
    limited, before = [str(64 << 20), "0"], [str(512 << 20), str(1 << 30)]
    host.until(lambda: host.out(values).split() == limited, "the memory settings of its profile")
    assert host.out(properties).split() == limited
    assert "Memory: set: memory.high: 67108864, memory.swap.max: 0" in host.out(f"resctrlctl show {simple}")
    host.run(f"systemctl stop {simple}")
    host.until(lambda: host.out(properties).split() == before, "the values of the unit file after its end")
    host.run(f"systemctl start {simple}")
    host.until(lambda: host.membership(host.out(pid)) == ("gold", simple), "the service in its class again")
    host.until(lambda: host.out(values).split() == limited, "the memory settings of its profile again")
    generation = workload(host, simple)["generation"]
    host.run(f"systemctl restart {simple}")
    host.until(lambda: host.membership(host.out(pid)) == ("gold", simple), "the service in its class after a restart")
    assert workload(host, simple)["generation"] == generation
    host.until(lambda: host.call("ListUnwatched")["containers"], "the unit that is not watched")
    (unwatched,) = host.call("ListUnwatched")["containers"]
    assert (unwatched["id"], unwatched["isUnit"]) == (fork, True)
    # A run of an earlier test may still be listed.
    assert host.state(fork) in ("", "completed")
    for key, profile in ((simple, "gold"), (fork, "quiet")):
        assert json.loads(host.out(f"resctrlctl profiles explain {key} --json"))["profile"] == profile
    host.run("rm /etc/resctrlmond/profiles.d/10-test.yaml")
    select(host, GLOBS)
    host.until(lambda: host.state(fork) == "active", "the unit without a profile")
    assert host.call("ListUnwatched")["containers"] == []
    assert host.membership(host.out(pid)) == ("gold", simple)
    host.until(lambda: host.out(values).split() == before, "the values of the unit file")
    assert host.out(properties).split() == before
    host.run(f"systemctl stop {simple} {fork}")
    until_ended(host, simple, fork)
    host.run(f"rmdir {TREE}/gold")


@pytest.mark.timeout(900)
def test_units_without_an_rmid_share_groups_and_each_task_is_counted(host: Host) -> None:
    """A sample of make units-budget-kernel: six units get an RMID of their own."""
    select(host, [])
    lines: list[str] = []
    budget = Budget(host, units=12, reserve=RMIDS - 1 - OVERFLOW - 6)
    budget.select()
    play(budget, 1, lines.append)
    assert budget.wrong == [], lines
    host.run(f"rm {BUDGET_DROP_IN} && systemctl reload resctrlmond", timeout=100)


@pytest.mark.timeout(600)
def test_every_service_also_the_daemon_itself(host: Host) -> None:
    host.run("resctrlctl units enable '*.service'", timeout=100)
    for unit in ("resctrlmond.service", "dbus.service", "systemd-journald.service"):
        until_in_its_group(host, unit)
    listed = host.out("resctrlctl list --units --full")
    assert re.search(r"^system\.slice .*\n(?:.|\n)*^(?:├─|\|-)dbus\.service ", listed, re.MULTILINE), listed
    units = json.loads(host.out("resctrlctl list --units --json"))["units"]
    slice_ = next(unit for unit in units if unit["path"] == ["system.slice"])
    assert {"dbus.service", "resctrlmond.service"} <= set(slice_["workloads"])
    host.run("systemctl restart resctrlmond", timeout=200)
    until_in_its_group(host, "resctrlmond.service")
    host.run("resctrlctl units disable '*.service'", timeout=100)
    until_ended(host, "resctrlmond.service", "dbus.service", "systemd-journald.service")
