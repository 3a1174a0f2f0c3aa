# SPDX-License-Identifier: Apache-2.0
"""The interfaces under a real systemd: busctl, varlinkctl, socket activation, reload, and failed starts."""

from __future__ import annotations

import json

import pytest

from .host import SOCKET, TREE, Host
from .machine import Guest

CONFIG = "/etc/resctrlmond/resctrlmond.yaml"
BUS = "org.resctrlmon1 /org/resctrlmon1 org.resctrlmon1.Manager"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """Return a host on which only the socket is started."""
    host = Host(installed_guest)
    host.run("systemctl start resctrlmond.socket")
    return host


def bus(host: Host, call: str) -> str:
    return host.out(f"busctl call -j {BUS} {call}")


def test_the_first_call_on_the_socket_starts_the_daemon(host: Host) -> None:
    assert host.out("systemctl show -P ActiveState resctrlmond") == "inactive"
    assert host.call("Status")["rmids"] == 64
    # The daemon answers before it reports READY=1.
    host.until(lambda: host.out("systemctl show -P ActiveState resctrlmond") == "active", "the start of the unit")
    assert host.out("systemctl show -P StatusText resctrlmond") == "0 groups"


def test_create_assign_release_by_busctl(host: Host) -> None:
    pid = host.process("sleep 300")
    assert '"idle"' in bus(host, "Create 'sa{sv}' viabus 1 claim s me")
    assert '"active"' in bus(host, f"Assign 'sa{{sv}}' viabus 2 claim s me pid i {pid}")
    assert host.membership(pid) == ("/", "viabus")
    assert "viabus" in bus(host, "List")
    assert '"completed"' in bus(host, "Release 'sa{sv}' viabus 1 claim s me")
    assert host.membership(pid) == ("/", "")
    host.run(f"kill {pid}")


def test_errors_have_their_names_at_the_bus(host: Host) -> None:
    done = host.run(f"busctl call {BUS} Get s missing", check=False)
    assert done.returncode != 0
    assert "there is no workload missing" in done.output


def test_varlinkctl_introspects_both_interfaces(host: Host) -> None:
    listed = host.out(f"varlinkctl list-interfaces {SOCKET}").split()
    assert {"org.resctrlmon.Manager", "org.resctrlmon.Hook", "org.varlink.service"} <= set(listed)
    for interface in ("org.resctrlmon.Manager", "org.resctrlmon.Hook"):
        shown = host.out(f"varlinkctl introspect {SOCKET} {interface}")
        assert f"interface {interface}" in shown
        assert "# How many tasks were moved into the group." in shown
        host.run(f"varlinkctl introspect {SOCKET} {interface} >/tmp/shown && varlinkctl validate-idl /tmp/shown")
        file = f"$(python3 -c 'import resctrlmond; print(resctrlmond.__path__[0])')/api/{interface}.varlink"
        host.run(f'varlinkctl validate-idl "{file}"')
    assert "resctrlmond" in host.out(f"varlinkctl info {SOCKET}")


def test_systemd_report_can_read_the_metrics(host: Host) -> None:
    """Debian 13 has no systemd-report: varlinkctl makes its calls here, and test_package.py runs that of sid."""
    report = "/run/systemd/report/org.resctrlmon.Workload"
    assert host.out(f"stat -c '%a %U:%G' {report}") == "660 root:resctrlmon-read"
    shown = host.out(f"varlinkctl introspect {report} io.systemd.Metrics")
    assert "method List" in shown
    host.run(f"varlinkctl introspect {report} io.systemd.Metrics >/tmp/shown && varlinkctl validate-idl /tmp/shown")
    call = f"varlinkctl call --more -j {report} io.systemd.Metrics"
    families = [json.loads(line.lstrip("\x1e")) for line in host.out(f"{call}.Describe '{{}}'").split("\n")]
    assert "org.resctrlmon.Workload.CoreEnergyJoules" in [family["name"] for family in families]
    pid = host.process("sleep 300")
    host.call("Assign", key="metered", claim="me", pid=pid)
    metrics = [json.loads(line.lstrip("\x1e")) for line in host.out(f"{call}.List '{{}}'").split("\n")]
    names = {metric["name"].rpartition(".")[2] for metric in metrics if metric["object"] == "metered"}
    assert {"LlcOccupancyBytes", "MbmTotalBytes"} <= names
    host.run("useradd meter -G resctrlmon-read; useradd foreigner", check=False)
    assert "metered" in host.out(f"runuser -u meter -- {call}.List '{{}}'")
    assert host.run(f"runuser -u foreigner -- {call}.List '{{}}'", check=False).returncode != 0
    host.call("Release", key="metered", claim="me")
    host.run(f"kill {pid}")
    assert host.out("readlink -f /run/varlink/registry/org.resctrlmon.Manager") == SOCKET
    assert "cannot connect" not in host.out("journalctl -u resctrlmond --no-pager")


def test_report_socket_starts_and_stops_with_the_other_one(host: Host) -> None:
    host.run("systemctl stop resctrlmond.socket resctrlmond.service")
    assert host.run("ls /run/systemd/report/org.resctrlmon.Workload", check=False).returncode != 0
    assert host.run("ls /run/varlink/registry/org.resctrlmon.Manager", check=False).returncode != 0
    host.run("systemctl start resctrlmond.socket")
    report = "/run/systemd/report/org.resctrlmon.Workload"
    assert "interface" in host.out(f"varlinkctl introspect {report} io.systemd.Metrics")
    assert host.out("systemctl show -P ActiveState resctrlmond") in ("active", "activating")
    host.start()


def test_varlinkctl_follows_what_happens(host: Host) -> None:
    follow = f"varlinkctl call --more -j {SOCKET} org.resctrlmon.Manager.Watch {{}}"
    host.run(f"{follow} >/tmp/followed 2>&1 & {{ resctrlctl watch 'fol*' >/tmp/watched 2>&1 & }}")
    # resctrlctl prints nothing before something happens, and must not connect after the end.
    host.call("Create", key="folder", claim="me")
    host.until(lambda: '"listed":true' in host.out("cat /tmp/followed"), "the workloads that are present")
    host.until(lambda: "folder" in host.out("cat /tmp/watched"), "the connection of resctrlctl")
    pid = host.process("sleep 300")
    host.call("Assign", key="followed", claim="me", pid=pid)
    host.call("Release", key="followed", claim="me")
    host.run(f"kill {pid}")
    host.until(lambda: '"ended"' in host.out("cat /tmp/followed"), "the end")
    # With --more, each reply begins with a record separator (RFC 7464).
    replies = [json.loads(line.lstrip("\x1e")) for line in host.out("cat /tmp/followed").split("\n")]
    changes = [one for reply in replies for one in reply["changes"] if one["key"] == "followed"]
    assert changes[0]["change"] == "added"
    assert changes[-1]["change"] == "ended"
    assert {total["quality"] for total in changes[-1]["totals"]} == {"late"}
    host.until(lambda: " ended " in host.out("cat /tmp/watched"), "the line of the end")
    host.call("Release", key="folder", claim="me")
    host.run("systemctl stop resctrlmond")
    host.until(lambda: "connection" in host.out("cat /tmp/watched"), "the end of resctrlctl watch")
    assert host.run("pgrep -f Manager.Watch", check=False).stdout == ""


def test_members_of_the_group_read_others_do_not_and_only_root_writes(host: Host) -> None:
    host.run("useradd reader -G resctrlmon; useradd stranger", check=False)
    ask = f"varlinkctl call -j {SOCKET} org.resctrlmon.Manager."
    assert "workloads" in host.out(f"runuser -u reader -- {ask}List '{{}}'")
    denied = host.run(f'runuser -u reader -- {ask}Create \'{{"key":"x"}}\'', check=False)
    assert "PermissionDenied" in denied.output
    assert host.run(f"runuser -u stranger -- {ask}List '{{}}'", check=False).returncode != 0
    assert "List" not in host.run(f"runuser -u stranger -- busctl call {BUS} List", check=False).stdout
    assert host.run("runuser -u reader -- resctrlctl create x", check=False).returncode == 77


def test_reload_applies_a_valid_file_and_ignores_an_invalid_one(host: Host) -> None:
    host.start()
    pid = host.pid()
    host.run(f"echo 'snapshot_ttl: 1s' >>{CONFIG} && systemctl reload resctrlmond")
    host.call("Create", key="short", claim="me")
    host.call("Release", key="short", claim="me")
    host.until(lambda: host.state("short") == "", "the snapshot to be pruned after a second")
    host.run(f"echo 'snapshot_tll: 1s' >>{CONFIG}")
    failed = host.run("systemctl reload resctrlmond", check=False)
    assert failed.returncode != 0, "a reload with an invalid configuration succeeded"
    assert "the new configuration is wrong" in host.out("resctrlctl status")
    line = host.out(f"wc -l <{CONFIG}")
    journal = host.out("journalctl -u resctrlmond --no-pager -n 20")
    assert f"{CONFIG}:{line}" in journal
    assert "snapshot_ttl" in journal, "the journal names the key"
    assert host.pid() == pid
    host.run(f"sed -i /^snapshot/d {CONFIG} && systemctl reload resctrlmond")
    assert "the new configuration is wrong" not in host.out("resctrlctl status")


def test_systemctl_sets_and_shows_the_log_level(host: Host) -> None:
    host.start()
    assert host.out("systemctl service-log-target resctrlmond") == "journal"
    host.run("systemctl service-log-level resctrlmond debug")
    assert host.out("systemctl service-log-level resctrlmond") == "debug"
    host.run("systemctl reload resctrlmond")
    assert host.out("systemctl service-log-level resctrlmond") == "info"


def test_the_journal_has_structured_fields(host: Host) -> None:
    entries = host.out("journalctl -u resctrlmond -o json --no-pager -n 50 SYSLOG_IDENTIFIER=resctrlmond")
    fields = [json.loads(line) for line in entries.splitlines()]
    assert any("RESCTRLMON_PATH" in entry for entry in fields)
    # The entries of ended workloads come from no line of code.
    assert all("CODE_FILE" in entry for entry in fields if "RESCTRLMON_RUN" not in entry)


@pytest.mark.parametrize(
    ("prepare", "undo", "status", "words"),
    [
        (f"umount {TREE}", f"mount -t resctrl resctrl {TREE}", 69, "mount -t resctrl"),
        (f"echo 'nonsense: 1' >>{CONFIG}", f"sed -i /^nonsense/d {CONFIG}", 78, "nonsense"),
        (f"echo 'group: nogroupatall' >>{CONFIG}", f"sed -i /^group:/d {CONFIG}", 67, "nogroupatall"),
    ],
    ids=["not-mounted", "bad-configuration", "no-group"],
)
def test_impossible_start_fails_with_its_exit_code_and_a_message(
    host: Host, prepare: str, undo: str, status: int, words: str
) -> None:
    host.run("systemctl stop resctrlmond.service resctrlmond.socket")
    host.run(prepare)
    try:
        done = host.run("/usr/bin/resctrlmond", check=False)
        assert done.returncode == status, done.output
        assert words in done.output
        assert "Traceback" not in done.output
    finally:
        host.run(undo)
    host.start()


def test_a_second_daemon_is_refused(host: Host) -> None:
    done = host.run("setpriv --regid resctrlmon --clear-groups /usr/bin/resctrlmond", check=False)
    assert done.returncode == 75, done.output
    assert "another resctrlmond is running" in done.output


def test_list_and_show_read_the_tree_when_the_daemon_is_down(host: Host) -> None:
    pid = host.process("sleep 300")
    host.call("Assign", key="readonly", pid=pid, claim="me")
    host.run("systemctl stop resctrlmond.service resctrlmond.socket")
    listed = host.run("resctrlctl list")
    assert "readonly" in listed.stdout
    assert "not running" in listed.stderr
    assert "mbm_total_bytes" in host.out("resctrlctl show readonly")
    assert host.run("resctrlctl status", check=False).returncode == 3
    host.start()
    host.call("Release", key="readonly", claim="me")
    host.run(f"kill {pid}")


def test_watchdog_restarts_a_stopped_daemon(host: Host) -> None:
    short = "/run/systemd/system/resctrlmond.service.d/short.conf"
    host.guest.write(short, "[Service]\nWatchdogSec=10\nRestartSec=0\n")
    host.run("systemctl daemon-reload && systemctl restart resctrlmond")
    old = host.pid()
    host.run(f"kill -STOP {old}")
    host.until(
        lambda: host.pid() not in (0, old) and host.out("systemctl show -P ActiveState resctrlmond") == "active",
        "the watchdog",
        300,
    )
    assert host.call("Status")["mounted"] is True
    host.run(f"rm {short} && systemctl daemon-reload")
