# SPDX-License-Identifier: Apache-2.0
"""The exporter as a service: without privileges and network, it reads from the daemon and serves its socket."""

from __future__ import annotations

import importlib.metadata
import re
import tarfile
from pathlib import Path

import pytest

from .host import SOCKET, Host
from .machine import Guest

UNIT = "resctrlmon-exporter"
URL = "http://127.0.0.1:10133/metrics"
GET = f"python3 -c 'from urllib.request import urlopen; print(urlopen(\"{URL}\").read().decode())'"
EXAMPLE = Path(__file__).parents[2] / "packaging" / "examples" / "resctrlmon-otlp.service"
PLACE = "/opt/resctrlmon-otlp"
# Writes the path of each request, and the attributes of the resources in it.
RECEIVER = """\
import http.server

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open("/run/received", "a") as file:
            for of in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                print(self.path, {one.key: one.value.string_value for one in of.resource.attributes}, file=file)
        self.send_response(200)
        self.end_headers()


http.server.HTTPServer(("127.0.0.1", 4318), Handler).serve_forever()
"""
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


def pack_sdk(path: Path) -> None:
    """Write an archive of OpenTelemetry's SDK and what its HTTP exporter needs, from the environment of the tests."""
    wanted, packed = ["opentelemetry-exporter-otlp-proto-http"], set[str]()
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        while wanted:
            distribution = importlib.metadata.distribution(wanted.pop())
            if distribution.name in packed:
                continue
            packed.add(distribution.name)
            required = [of for of in distribution.requires or () if ";" not in of]
            wanted += [found[0] for of in required if (found := re.match(r"[\w.-]+", of))]
            for file in distribution.files or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    archive.add(str(file.locate()), str(file))


def test_example_service_pushes_from_its_sandbox(host: Host, tmp_path: Path) -> None:
    host.start()
    host.call("Create", key="pushed", claim="me", attributes={"unit": "web.service"})
    unit = "resctrlmon-otlp"
    host.guest.put(EXAMPLE, f"/run/systemd/system/{unit}.service")
    host.run(f"mkdir -p {PLACE}/bin && ln -s /usr/bin/python3 {PLACE}/bin/python")
    slow = f"[Service]\nTimeoutStartSec=300\nEnvironment=PYTHONPATH={PLACE}/lib\n"
    host.guest.write(f"/run/systemd/system/{unit}.service.d/slow.conf", slow)
    host.run("systemctl daemon-reload")
    assert host.run(f"systemd-analyze verify --man=no {unit}.service", timeout=100).output == ""
    host.run(f"systemd-analyze security --offline=yes --threshold=17 {unit}.service", timeout=100)
    # Debian 13 does not have the SDK.
    assert host.run(f"systemctl start {unit}", check=False, timeout=300).returncode != 0
    assert host.out(f"systemctl show -P ExecMainStatus {unit}") == "2"
    assert host.out(f"systemctl show -P ActiveState {unit}") == "failed"
    assert "install opentelemetry-exporter-otlp with pip" in host.out(f"journalctl --no-pager -u {unit}")
    pack_sdk(tmp_path / "sdk.tar.gz")
    host.guest.put(tmp_path / "sdk.tar.gz", "/run/sdk.tar.gz")
    host.guest.write("/run/receiver.py", RECEIVER)
    host.run(f"mkdir {PLACE}/lib && tar -x -f /run/sdk.tar.gz -C {PLACE}/lib", timeout=100)
    host.run(f"systemd-run --unit=otlp-receiver -E PYTHONPATH={PLACE}/lib python3 /run/receiver.py")
    host.run(f"systemctl start {unit}", timeout=300)
    # The first push waits for the import of the SDK only. If the receiver is not ready, the exporter tries again.
    host.run("until grep -q web.service /run/received; do sleep 0.2; done", timeout=200)
    (line, *_) = (line for line in host.out("cat /run/received").splitlines() if "web.service" in line)
    assert line.startswith("/v1/metrics ")
    assert "'systemd.unit.name': 'web.service'" in line
    assert "'host.id': '" in line
    assert host.out(f"stat -c %a /run/{unit}/state") == "600"
    host.run(f"systemctl stop {unit} otlp-receiver", timeout=200)
    assert host.out(f"systemctl show -P ExecMainStatus {unit}") == "0"
    host.call("Release", key="pushed", claim="me")
