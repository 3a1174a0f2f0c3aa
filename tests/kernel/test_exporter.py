# SPDX-License-Identifier: Apache-2.0
"""The exporter as a service: without privileges and network, it reads from the daemon and serves its socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from .host import SOCKET, Host
from .machine import Guest

UNIT = "resctrlmon-exporter"
URL = "http://127.0.0.1:10133/metrics"
GET = f"python3 -c 'from urllib.request import urlopen; print(urlopen(\"{URL}\").read().decode())'"
ASK = f"varlinkctl call -j {SOCKET} org.resctrlmon.Manager."


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    host = Host(installed_guest)
    host.guest.write(f"/run/systemd/system/{UNIT}.service.d/emulated.conf", "[Service]\nTimeoutStartSec=300\n")
    # An emulated processor takes seconds for a scrape.
    path = f"/run/systemd/system/{UNIT}.service.d/slow.conf"
    host.guest.write(path, f"[Service]\nExecStart=\nExecStart=/usr/bin/{UNIT} --timeout 100\n")
    host.run("systemctl daemon-reload")
    return host


def scrape(host: Host) -> str:
    return host.out(GET, timeout=200)


def test_members_of_the_reading_group_read_and_change_nothing(host: Host) -> None:
    host.start()
    host.run("useradd meter -G resctrlmon-read")
    assert "workloads" in host.out(f"runuser -u meter -- {ASK}List '{{}}'")
    assert "mounted" in host.out(f"runuser -u meter -- {ASK}Status '{{}}'")
    denied = host.run(f'runuser -u meter -- {ASK}Create \'{{"key":"x"}}\'', check=False)
    assert "PermissionDenied" in denied.output
    bus = "busctl call org.resctrlmon1 /org/resctrlmon1 org.resctrlmon1.Manager"
    assert host.run(f"runuser -u meter -- {bus} Status").stdout
    denied = host.run(f"runuser -u meter -- {bus} Create 'sa{{sv}}' x 0", check=False)
    assert "may not call" in denied.output
    host.run("useradd other")
    assert host.run(f"runuser -u other -- {ASK}List '{{}}'", check=False).returncode != 0
    # The group is not the mark: it cannot read the records, and other groups keep theirs.
    assert host.run("runuser -u meter -- ls /run/resctrlmond/records", check=False).returncode != 0
    assert host.out(f"stat -c '%a %U %G' {SOCKET}") == "660 root resctrlmon"


def test_service_serves_the_socket_of_systemd(host: Host) -> None:
    host.start()
    host.run(f"systemctl start {UNIT}.socket")
    host.call("Create", key="exported", claim="me", attributes={"pod.name": "web"})
    text = scrape(host)
    assert "resctrlmond_up 1.0" in text
    assert "resctrlmond_simulation 0.0" in text
    assert 'resctrlmond_workload_info{generation="1",key="exported",pod="web"} 1.0' in text
    assert 'resctrlmond_memory_bandwidth_bytes_total{domain="0",key="exported",scope="total"} 0.0' in text
    assert 'resctrlmond_machine_memory_bandwidth_bytes_total{domain="0",pool="untracked",scope="local"}' in text
    host.call("Release", key="exported", claim="me")


def test_service_has_no_privileges(host: Host) -> None:
    host.run(f"systemctl start {UNIT}")
    status = dict(
        line.split(":", 1) for line in host.out(f"cat /proc/$(systemctl show -P MainPID {UNIT})/status").splitlines()
    )
    assert set(status["CapEff"].strip() + status["CapBnd"].strip()) == {"0"}
    assert int(status["Uid"].split()[0]) >= 61184  # systemd's range of DynamicUser=
    reading = host.out("getent group resctrlmon-read").split(":")[2]
    assert reading in status["Groups"].split()
    assert host.out("getent group resctrlmon").split(":")[2] not in status["Groups"].split()
    assert status["NoNewPrivs"].strip() == "1"
    # The network namespace has no interface but its own loopback; the socket that it serves is that of the host.
    devices = host.out(f"nsenter --net --target $(systemctl show -P MainPID {UNIT}) ip -o link")
    assert len(devices.splitlines()) == 1


def test_daemon_that_is_stopped_is_reported_and_found_again(host: Host) -> None:
    host.start()
    host.run(f"systemctl start {UNIT}")
    pid = host.out(f"systemctl show -P MainPID {UNIT}")
    host.run("systemctl stop resctrlmond.socket resctrlmond.service")
    assert "resctrlmond_up 0.0" in scrape(host)
    # The new socket has the rights of the reading group, too.
    host.start()
    assert "resctrlmond_up 1.0" in scrape(host)
    assert host.out(f"systemctl show -P MainPID {UNIT}") == pid


def test_textfile_and_drop_in_of_the_manual_page(host: Host) -> None:
    page = (Path(__file__).parents[2] / "man" / f"{UNIT}.8.scd").read_text(encoding="utf-8")
    drop_in = next(block for block in page.split("```\n") if "RUNTIME_DIRECTORY" in block)
    host.guest.write(f"/run/systemd/system/{UNIT}.service.d/zz-textfile.conf", drop_in)
    host.start()
    host.run(f"systemctl daemon-reload && systemctl restart {UNIT}", timeout=200)
    file = f"/run/{UNIT}/resctrlmond.prom"
    assert "resctrlmond_build_info" in host.out(f"runuser -u nobody -- cat {file}")
    host.run(f"systemctl stop {UNIT}.service")
    assert host.run(f"test -e {file}", check=False).returncode == 1
    host.run(f"rm /run/systemd/system/{UNIT}.service.d/zz-textfile.conf && systemctl daemon-reload")
