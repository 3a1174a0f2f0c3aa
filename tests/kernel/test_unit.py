# SPDX-License-Identifier: Apache-2.0
"""The units as systemd sees them: valid, restricted, and open only with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from resctrlmond.service.message_ids import MessageId

from .host import RUN, SOCKET, TREE, Host
from .machine import Guest

PROJECT = Path(__file__).parents[2]
SYSTEMD = PROJECT / "systemd"
UNITS = (
    "resctrlmond.service resctrlmond.socket resctrlmond-report.socket resctrlmon-nri.service "
    "resctrlmon-exporter.service resctrlmon-exporter.socket sys-fs-resctrl.mount resctrlmond-witness.service"
)
EXAMPLE = PROJECT / "packaging" / "examples" / "nri-resctrl-mon.conf"
ELSEWHERE = "/run/nri-resctrl-mon"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    return Host(installed_guest)


def test_systemd_analyze_verify_accepts_the_units(host: Host) -> None:
    done = host.run(f"cd /usr/lib/systemd/system && systemd-analyze verify --man=no {UNITS}", timeout=100)
    assert done.output == ""


@pytest.mark.parametrize(
    ("unit", "most"),
    [
        ("resctrlmond.service", 15),
        ("resctrlmon-nri.service", 13),
        ("resctrlmon-exporter.service", 7),
        ("resctrlmond-witness.service", 15),
    ],
)
def test_service_is_restricted_and_exceptions_have_a_reason(host: Host, unit: str, most: int) -> None:
    # The scale is from 0 (restricted) to 10; here, tenths are whole numbers.
    exposure = f"systemd-analyze security --offline=yes --threshold={most} {unit}"
    done = host.run(exposure, check=False, timeout=100)
    assert done.returncode == 0, done.output
    report = json.loads(host.out(f"{exposure} --json=short", timeout=100))
    left_open = {re.sub("(Or|_).*", "", row["json_field"]) for row in report if row["exposure"]}
    comments = re.findall(r"^#(.*)$", (SYSTEMD / unit).read_text(), re.MULTILINE)
    given = {name for comment in comments for name in re.findall(r"\b(\w+)=", comment)}
    assert left_open <= given, "the unit does not restrict these, without a reason"
    # Only the comments of these lists are about directives that are left out.
    left_out = {name for comment in comments if ": " in comment for name in re.findall(r"^ ([A-Z]\w+)=", comment)}
    assert left_out - left_open <= {"PrivateUsers", "PrivatePIDs", "MemoryHigh"}, (
        "a reason for a setting that the unit restricts"
    )


def test_resctrl_can_be_mounted_again_beside_all_services(host: Host) -> None:
    """A service with a sysfs of its own would keep the old mount, and the kernel would refuse a new one."""
    host.start()
    host.run("systemctl start resctrlmon-nri resctrlmon-exporter", timeout=200)
    # The daemon may just read the counters: then the kernel takes a moment to end the old mount.
    mount = f"mount -t resctrl resctrl {TREE}"
    host.unmount(f"{{ for i in $(seq 50); do {mount} && break; sleep 0.1; done; mountpoint -q {TREE}; }}")
    for unit in ("resctrlmond", "resctrlmon-nri", "resctrlmon-exporter"):
        host.out(f"nsenter -m -t $(systemctl show -P MainPID {unit}) grep '{TREE} ' /proc/self/mounts")
    host.run("systemctl stop resctrlmon-nri resctrlmon-exporter resctrlmon-exporter.socket")


def test_users_outside_the_services_id_range_are_served(host: Host) -> None:
    """PrivateUsers=identity gives the service the IDs below 65536; it sees all others as the user nobody."""
    far = "setpriv --reuid 100000 --regid 100000 --groups resctrlmon"
    host.start()
    task = host.process(f"{far} sleep 300")
    host.until(lambda: host.out(f"stat -c %u /proc/{task}") == "100000", "the user's process")
    host.call("Assign", key="far", claim="me", pid=task)
    assert host.membership(task) == ("/", "far")
    read = f'{far} varlinkctl call -j {SOCKET} org.resctrlmon.Manager.Get \'{{"key":"far"}}\''
    assert '"far"' in host.out(read)
    refused = host.run(read.replace("Get", "Release"), check=False)
    assert "PermissionDenied" in refused.output
    host.run(f"kill {task}")
    host.until(lambda: host.call("Get", key="far")["workload"]["members"][0].get("endedAt") is not None, "the end")
    host.call("Release", key="far", claim="me")


def test_journal_explains_events_that_require_an_operator(host: Host) -> None:
    listed = host.out("journalctl --list-catalog")
    assert {line.split()[0] for line in listed.splitlines() if "resctrlmond:" in line} == set(MessageId)
    host.start()
    host.call("Create", key="taken", claim="me")
    host.run(f"rmdir {TREE}/mon_groups/taken")
    host.until(lambda: host.state("taken") == "lost", "the loss to be seen")
    shown = host.out(
        f"journalctl --no-pager -x -u resctrlmond MESSAGE_ID={MessageId.GROUP_LOST} RESCTRLMON_KEY=taken"
    )
    assert "Subject: The monitoring group of taken was removed by another program" in shown
    assert "Documentation: man:resctrlmond(7)" in shown
    assert "resctrlmond creates the group again after a" in shown


def test_files_of_earlier_starts_get_the_group_of_a_changed_configuration(host: Host) -> None:
    """The service has no CAP_CHOWN, and most system call filters refuse chown(2)."""
    drop_in = "/etc/systemd/system/resctrlmond.service.d/group.conf"
    host.start()
    host.call("Create", key="stays", claim="me")
    host.run("groupadd --system meter")
    host.guest.write(drop_in, "[Service]\nGroup=meter\n")
    host.guest.write("/etc/resctrlmond/resctrlmond.yaml", "group: meter\n")
    host.run("systemctl daemon-reload && systemctl restart resctrlmond")
    assert set(host.out(f"find {RUN}/records {RUN}/groups ! -type l -printf '%g\n'").split()) == {"meter"}
    host.run(f"rm {drop_in} /etc/resctrlmond/resctrlmond.yaml && systemctl daemon-reload")
    host.run("systemctl restart resctrlmond")


def test_begin_and_end_values_can_be_in_the_directory_of_nri_resctrl_mon(host: Host) -> None:
    host.guest.put(EXAMPLE, "/etc/systemd/system/resctrlmond.service.d/nri-resctrl-mon.conf")
    host.guest.write("/etc/resctrlmond/resctrlmond.yaml", f"groups_dir: {ELSEWHERE}\n")
    host.run("systemctl daemon-reload && systemctl restart resctrlmond")
    for generation in (1, 2):
        assert host.call("Create", key="web", claim="me")["workload"]["generation"] == generation
        assert host.run(f"cat {ELSEWHERE}/web/mon_data/mon_L3_00/*.begin").stdout
        host.call("Release", key="web", claim="me")
        assert host.run(f"cat {ELSEWHERE}/web/mon_data/mon_L3_00/*.end").stdout
    assert host.out(f"ls {RUN}/completed/web") == "1"
