# SPDX-License-Identifier: Apache-2.0
"""The packages on a fresh Debian 13 and on sid, as an administrator uses them: install, upgrade, remove, purge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.api.varlink.metrics import FAMILIES
from tests.package.build import packages
from tests.package.readme import commands
from tests.package.source import DEBIAN, changelog, next_entry, version

from .conftest import Guests
from .host import BUSYBOX, RUN, TREE, Host, parse_where
from .install import PATIENCE
from .test_exporter import EXAMPLE, PLACE, pack_sdk

# The first run downloads a Debian system to build the packages in.
pytestmark = pytest.mark.timeout(1800)
PING = "busctl call org.resctrlmon1 /org/resctrlmon1 org.freedesktop.DBus.Peer Ping"
FOREIGN = "11111111-2222-4333-8444-555555555555"
REPOSITORIES = "/srv"
# The guest's dpkg excludes documentation, and its apt has archives that need a network.
APT = (
    "DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dir::Etc::sourcelist=/srv/sources.list "
    "-o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root -o Dpkg::Options::=--path-include=/usr/share/man/*"
)
LONG = 600.0
# The guest's apt installs no recommended packages.
DAEMON = "resctrlmond resctrlmond-witness"
WITNESS = "/sys/fs/bpf/resctrlmond"
CONFFILES = ("resctrlmond", "nri")
LATER = "\n# Of a later version.\n"
OTLP = "resctrlmon-otlp"
# Writes the start and the end of each point of a counter of a workload.
RECEIVER = """\
import http.server

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open("/run/received", "a") as file:
            for of in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                key = {one.key: one.value.string_value for one in of.resource.attributes}.get("resctrl.workload.key")
                for metric in (metric for scope in of.scope_metrics for metric in scope.metrics if key):
                    for point in metric.sum.data_points:
                        words = [key, metric.name, *sorted(one.value.string_value for one in point.attributes)]
                        print("/".join(words), point.start_time_unix_nano, point.time_unix_nano, file=file)
        self.send_response(200)
        self.end_headers()


http.server.HTTPServer(("127.0.0.1", 4318), Handler).serve_forever()
"""
DROP_INS = "/etc/resctrlmond/resctrlmond.d /etc/systemd/system/shop.service.d"
REPORT = "/usr/lib/systemd/systemd-report --no-pager"
METERED = "org.resctrlmon.Workload"
PROFILES = """\
profiles:
  gold: {class: theirs, linger: 5min}
  quiet: {watch: none}
rules:
  - {profile: gold, owner: systemd, unit: shop.service}
  - {profile: quiet, owner: systemd, unit: quiet.service}
"""


@pytest.fixture(scope="session")
def first() -> Path:
    """Return the packages of this tree."""
    return packages()


@pytest.fixture(scope="session")
def second() -> Path:
    """Return the same packages, built again with a higher version and other sample configurations."""
    return packages(next_entry(changelog(), "+next"), {f"systemd/{name}.yaml": LATER for name in CONFFILES})


class Administrator(Host):
    """A Debian host with one or two archives of the project, and a class and groups of another program with tasks."""

    def __init__(self, guests: Guests, profile: str, **archives: Path) -> None:
        super().__init__(guests.start(profile))
        for name, folder in archives.items():
            self.guest.put(folder, f"{REPOSITORIES}/{name}")
        self.make_root()
        self.run(f"mkdir {TREE}/theirs {TREE}/mon_groups/{FOREIGN} {TREE}/theirs/mon_groups/inner")
        self.tasks = {place: self.process("sleep 1000") for place in ("theirs", f"mon_groups/{FOREIGN}")}
        for place, pid in self.tasks.items():
            self.run(f"echo {pid} >{TREE}/{place}/tasks")
        self.schemata = self.out(f"cat {TREE}/theirs/schemata")
        self.foreign = self.identities()

    def identities(self) -> list[str]:
        return [self.identity(FOREIGN), self.identity("inner", "theirs")]

    def check_foreign(self) -> None:
        """Check that the objects of others are unchanged."""
        assert self.identities() == self.foreign
        assert self.out(f"cat {TREE}/theirs/schemata") == self.schemata
        for place, pid in self.tasks.items():
            assert str(pid) in self.out(f"cat {TREE}/{place}/tasks").split(), f"a task of {place} was moved"

    def apt(self, archive: str, command: str) -> str:
        self.guest.write("/srv/sources.list", f"deb [trusted=yes] file:{REPOSITORIES}/{archive} ./\n")
        return self.run(f"{APT} update && {APT} {command}", timeout=LONG).output

    def container(self, name: str) -> str:
        """Start a container in the background. Return its ID, which is its key."""
        command = f"podman run -d --name {name} --network none --rootfs {BUSYBOX} sleep 1000"
        return self.out(command, timeout=LONG)


@pytest.fixture(params=["cat", "cat-sid"])
def upgraded(request: pytest.FixtureRequest, guests: Guests, first: Path, second: Path) -> Iterator[Administrator]:
    yield Administrator(guests, request.param, first=first, second=second)


def install(host: Administrator) -> None:
    """Run the first session of the README."""
    host.apt("first", f"install {DAEMON}")
    host.run("systemctl enable --now resctrlmond && resctrlctl hooks enable", timeout=LONG)


# The guest has no network: 'make deb' was run on the host, and a local image has the name of Debian's.
MAKE = '#!/bin/sh\ntest "$*" = deb && mkdir -p build && cp -r /srv/deb build/\n'
NO_NETWORK = '[containers]\nnetns = "none"\n'
IMAGE = f"tar -C {BUSYBOX} -c . | podman import - docker.io/library/debian:13"


def test_the_first_session_of_the_readme_works_word_for_word(guests: Guests, first: Path) -> None:
    host = Host(guests.start("cat"))
    host.guest.put(first, "/srv/deb")
    host.guest.write("/usr/local/bin/make", MAKE, 0o755)
    host.guest.write("/etc/containers/containers.conf", NO_NETWORK)
    host.guest.write(PATIENCE, "[Service]\nTimeoutStartSec=300\n")
    host.make_root()
    host.run(IMAGE, timeout=LONG)
    host.run(f"umount {TREE}")
    session = commands("A first session on a host with the hardware")
    host.guest.write("/root/clone/session", session)
    output = host.run("cd /root/clone && bash -eu session 2>&1", timeout=LONG).stdout

    # The program of the first container prints its own group; the second container was shown and removed.
    found = re.search(r"^res:/\nmon:([0-9a-f]{64})$", output, re.MULTILINE)
    assert found, output
    assert host.state(found[1]) == "completed"
    assert len(host.out(f"ls {RUN}/groups | grep -xE '[0-9a-f]{{64}}'").split()) == 2
    assert {"mbm_total_bytes.begin", "mbm_total_bytes.end"} <= {
        line.strip("=> <").rpartition("/")[2] for line in output.splitlines() if line.startswith("==> ")
    }
    assert host.out("systemctl is-active resctrlmond resctrlmon-nri").split() == ["active"] * 2
    assert "Unknown group" not in host.out("journalctl -b --no-pager -u dbus"), (
        "dbus-daemon read the policy too early"
    )
    host.run("DEBIAN_FRONTEND=noninteractive apt-get -y remove resctrlmond", timeout=LONG)
    assert host.groups() == []


def test_installation_starts_nothing_and_the_services_work_when_started(upgraded: Administrator) -> None:
    host = upgraded
    host.apt("first", f"install {DAEMON}")
    assert host.out("dpkg-query -W -f '${Version}' resctrlmond") == version(changelog())
    assert host.out("systemctl is-enabled resctrlmond.service resctrlmond.socket || :").split() == ["disabled"] * 2
    assert host.out("systemctl is-active resctrlmond.service resctrlmond.socket || :").split() == ["inactive"] * 2
    assert host.run(f"test -e {RUN} || test -e {WITNESS}", check=False).returncode == 1
    assert host.out("ls /usr/share/containers/oci/hooks.d 2>/dev/null || :") == ""
    assert host.run("ls /usr/share/man/man8/resctrlmond.8.gz /usr/share/man/man1/resctrlctl.1.gz").stdout
    refused = host.run("resctrlmond --simulate /tmp/simulated", check=False, timeout=LONG)
    assert refused.returncode == 1
    assert "pip install" in refused.output
    # A call on the bus does not start a service that the administrator has disabled.
    called = host.run(PING, check=False)
    assert called.returncode != 0
    assert host.out("systemctl is-active resctrlmond.service || :") == "inactive"

    # The package's own test of the service, which autopkgtest runs on a separate machine.
    host.guest.put(DEBIAN / "tests" / "service", "/root/service")
    host.run("sh -x /root/service", timeout=LONG)
    host.check_foreign()

    host.run("systemctl enable --now resctrlmond && resctrlctl hooks enable", timeout=LONG)
    assert host.run(f"test -e {WITNESS}", check=False).returncode == 0
    where = host.out(f"podman run --rm --network none --rootfs {BUSYBOX} cat /proc/self/cpu_resctrl_groups", LONG)
    key = parse_where(where)[1]
    host.until(lambda: host.state(key) == "completed", "the container's end")
    assert "completed_at" in host.snapshot(key)
    assert host.out(PING) == ""
    host.check_foreign()


def test_running_container_is_not_affected_by_restarts_and_reloads(upgraded: Administrator) -> None:
    host = upgraded
    install(host)
    key = host.container("upgraded")
    before = host.identity(key), host.begins(key), host.pid()
    host.guest.write("/etc/resctrlmond/resctrlmond.yaml", "log_level: debug\n")
    host.run("systemctl reload resctrlmond", timeout=LONG)
    assert host.pid() == before[2]

    host.apt("second", "-o Dpkg::Options::=--force-confold dist-upgrade")
    assert host.out("dpkg-query -W -f '${Version}' resctrlmond python3-resctrlmond").count("+next") == 2
    assert host.out("systemctl is-active resctrlmond.service") == "active"
    assert host.pid() != before[2], "the old code still runs"
    assert host.out("cat /etc/resctrlmond/resctrlmond.yaml") == "log_level: debug"
    assert (host.identity(key), host.begins(key)) == before[:2]
    assert host.state(key) == "active"

    host.run("systemctl stop resctrlmond.service resctrlmond.socket")
    assert host.identity(key) == before[0]
    host.start()
    assert (host.identity(key), host.begins(key)) == before[:2]

    host.run("systemctl daemon-reexec", timeout=LONG)
    assert host.state(key) == "active"
    host.run("systemctl restart dbus.service", timeout=LONG)
    host.until(lambda: host.run(PING, check=False).returncode == 0, "the daemon to be back on the bus", LONG)
    pid = host.pid()
    host.run(f"kill -STOP {pid}")
    host.until(lambda: host.pid() not in (0, pid) and host.state(key) == "active", "the watchdog's bite", LONG)
    assert (host.identity(key), host.begins(key)) == before[:2]
    host.check_foreign()
    host.run("podman rm -f -t 0 upgraded", timeout=LONG)
    host.until(lambda: host.state(key) == "completed", "the container's end")
    host.check_foreign()


def test_upgrade_keeps_units_profiles_configuration_and_pushed_counters(
    guests: Guests, first: Path, second: Path, tmp_path: Path
) -> None:
    host = Administrator(guests, "cat", first=first, second=second)
    host.apt("first", f"install {DAEMON} resctrlmon-nri")
    host.guest.write(PATIENCE, "[Service]\nTimeoutStartSec=300\n")
    host.guest.write("/etc/resctrlmond/resctrlmond.yaml", "log_level: debug\n")
    host.guest.write("/etc/resctrlmond/profiles.d/shop.yaml", PROFILES)
    for name in ("shop", "quiet", "plain"):
        host.guest.write(f"/etc/systemd/system/{name}.service", "[Service]\nExecStart=sleep 100000\n")
    host.run("systemctl enable --now resctrlmond && systemctl daemon-reload", timeout=LONG)
    host.run("resctrlctl units exact shop.service", timeout=LONG)
    host.run("resctrlctl units enable quiet.service plain.service", timeout=LONG)
    host.run("systemctl start shop.service quiet.service plain.service")
    host.until(lambda: host.state("plain.service") == "active", "a service", LONG)
    host.until(lambda: host.state("shop.service") == "active", "the exact service", LONG)
    start_pusher(host, tmp_path)
    before = facts(host)
    assert before["shop"] == ("exact", "theirs", "shop.service")
    assert before["unwatched"] == ["quiet.service"]
    daemon = host.pid()

    host.apt("second", "-o Dpkg::Options::=--force-confold dist-upgrade")
    assert host.out("dpkg-query -W -f '${Version}' resctrlmond resctrlmon-nri").count("+next") == 2
    assert host.pid() not in (0, daemon)
    assert facts(host) == before
    # The administrator has changed one file, so that the other one is replaced.
    assert host.out("cat /etc/resctrlmond/resctrlmond.yaml") == "log_level: debug"
    for name in ("resctrlmond.yaml.dpkg-dist", "nri.yaml"):
        assert host.out(f"tail -n 1 /etc/resctrlmond/{name}") == LATER.strip()

    # Each push goes on where the one before ended, also after a restart with the code of the later version.
    count = len(pushed(host))
    host.run(f"systemctl restart {OTLP}", timeout=LONG)
    host.until(lambda: len(pushed(host)) > count, "another push", LONG)
    check_points(host)

    # The next start of the service is exact too, and in the class of its profile.
    host.run("systemctl stop shop.service", timeout=LONG)
    host.run("systemctl start shop.service", timeout=LONG)
    host.until(lambda: shop(host) == before["shop"], "the service to be exact", LONG)
    host.check_foreign()


def facts(host: Administrator) -> dict[str, Any]:
    """Return what an upgrade does not change."""
    services = ("shop.service", "plain.service")
    return {
        "shop": shop(host),
        "processes": [host.out(f"systemctl show -P MainPID,InvocationID {name}") for name in (*services, OTLP)],
        "groups": [host.identity("shop.service", "theirs"), host.identity("plain.service")],
        "begins": [host.begins(name) for name in services],
        "runs": [(of["key"], of["generation"], of["state"]) for of in host.call("List")["workloads"]],
        "unwatched": [of["id"] for of in host.call("ListUnwatched")["containers"]],
        "drop-ins": host.out(f"grep -r . {DROP_INS} /etc/resctrlmond/profiles.d"),
        "enabled": host.out("systemctl is-enabled resctrlmond.socket resctrlmond.service"),
    }


def shop(host: Administrator) -> tuple[str, str, str]:
    """Return the quality of the exact service, and the class and the group of its process."""
    totals = {one["event"]: one for one in host.call("Read", key="shop.service")["totals"]}
    where = host.membership(host.out("systemctl show -P MainPID shop.service"))
    return totals["mbm_total_bytes"]["quality"], *where


def start_pusher(host: Administrator, folder: Path) -> None:
    """Start the example service that pushes over OTLP, with OpenTelemetry's SDK and a receiver."""
    pack_sdk(folder / "sdk.tar.gz")
    host.guest.put(folder / "sdk.tar.gz", "/run/sdk.tar.gz")
    host.guest.write("/run/receiver.py", RECEIVER)
    host.guest.put(EXAMPLE, f"/etc/systemd/system/{OTLP}.service")
    host.run(f"mkdir -p {PLACE}/bin {PLACE}/lib && ln -s /usr/bin/python3 {PLACE}/bin/python")
    host.run(f"tar -x -f /run/sdk.tar.gz -C {PLACE}/lib", timeout=LONG)
    (command,) = re.findall(r"^ExecStart=.*", EXAMPLE.read_text(), re.MULTILINE)
    slow = f"[Service]\nTimeoutStartSec=300\nEnvironment=PYTHONPATH={PLACE}/lib\n"
    more = f"ExecStart=\n{command} --otlp-temporality delta --interval 5\n"
    host.guest.write(f"/etc/systemd/system/{OTLP}.service.d/slow.conf", slow + more)
    host.run(f"systemd-run --unit=otlp-receiver -E PYTHONPATH={PLACE}/lib python3 /run/receiver.py")
    host.run(f"systemctl daemon-reload && systemctl start {OTLP}", timeout=LONG)
    wanted = {"shop.service", "plain.service"}
    host.until(lambda: wanted <= {series.partition("/")[0] for series, *_ in pushed(host)}, "a push", LONG)


def check_points(host: Administrator) -> None:
    """Check that each point of a series begins where the one before ended: nothing was lost, or pushed twice."""
    last: dict[str, str] = {}
    for series, start, end in pushed(host):
        assert start == last.get(series, start), series
        last[series] = end


def pushed(host: Administrator) -> list[tuple[str, str, str]]:
    """Return the series, the start and the end of each point that the receiver has got, in their order."""
    lines = host.run("cat /run/received", check=False).stdout.splitlines()
    return [(series, start, end) for series, start, end in map(str.split, lines)]


def test_systemd_report_shows_the_workloads(guests: Guests, first: Path) -> None:
    """Only sid has systemd-report. test_interfaces.py makes its calls on Debian 13, with varlinkctl."""
    host = Administrator(guests, "cat-sid", first=first)
    host.apt("first", f"install {DAEMON}")
    host.run("systemctl enable --now resctrlmond", timeout=LONG)
    address = f"unix:/run/systemd/report/{METERED}"
    assert [METERED, address] in table(host, "list-sources")
    assert {"source": METERED, "address": address} in report(host, "list-sources")

    families = {of.name: (of.type, of.description) for of in FAMILIES.values()}
    assert {of["name"]: (of["type"], of["description"]) for of in report(host, f"describe {METERED}")} == families
    rows = table(host, f"describe {METERED}")
    assert {name: (kind, " ".join(text)) for name, kind, *text in rows} == families

    # Without a workload, the daemon replies with an error.
    assert report(host, f"metrics {METERED}") == []
    for key, is_late in (("whole", False), ("part", True)):
        host.call("Assign", key=key, claim="me", pid=host.process("sleep 1000"), late=is_late)
    found = report(host, f"metrics {METERED}")
    assert {(of["object"], of["name"], of.get("fields", {}).get("quality")) for of in found} == {
        ("whole", f"{METERED}.LlcOccupancyBytes", None),
        ("whole", f"{METERED}.MbmLocalBytes", "exact"),
        ("whole", f"{METERED}.MbmTotalBytes", "exact"),
        ("part", f"{METERED}.LlcOccupancyBytes", None),
        ("part", f"{METERED}.MbmLocalBytes", "late"),
        ("part", f"{METERED}.MbmTotalBytes", "late"),
    }
    # All counters of the guest read 0.
    assert [of["value"] for of in found] == [0] * 6
    everything = report(host, "metrics")
    assert [of for of in found if of not in everything] == []
    assert any(of["name"].startswith("io.systemd.Manager.") for of in everything)

    of_family = f"metrics {METERED}.MbmTotalBytes"
    assert report(host, of_family) == [of for of in found if of["name"] == f"{METERED}.MbmTotalBytes"]
    assert sorted(table(host, of_family)) == [
        [f"{METERED}.MbmTotalBytes", "part", '{"quality":"late"}', "0"],
        [f"{METERED}.MbmTotalBytes", "whole", '{"quality":"exact"}', "0"],
    ]

    host.run("useradd meter -G resctrlmon-read; useradd foreigner")
    assert report(host, f"metrics {METERED}", user="meter") == found
    assert report(host, f"metrics {METERED}", user="foreigner") == []
    host.check_foreign()


def report(host: Administrator, command: str, user: str = "root") -> list[dict[str, Any]]:
    """Return the JSON objects that systemd-report prints: a list, or one after each record separator (RFC 7464)."""
    output = host.out(f"runuser -u {user} -- {REPORT} --json=short {command}", LONG)
    found = [json.loads(line.lstrip("\x1e")) for line in output.split("\n") if line]
    return found[0] if found and isinstance(found[0], list) else found


def table(host: Administrator, command: str) -> list[list[str]]:
    """Return the words of each row of the table that systemd-report prints."""
    return [line.split() for line in host.out(f"{REPORT} --no-legend {command}", LONG).splitlines()]


def test_remove_and_purge_leave_no_files(upgraded: Administrator) -> None:
    host = upgraded
    before = listing(host)
    install(host)
    key = host.container("left")
    host.run("resctrlctl create web --class theirs")
    pid = host.out("podman inspect -f '{{.State.Pid}}' left", LONG)
    assert host.membership(pid) == ("/", key)

    output = host.apt("first", "remove resctrlmond")
    assert "still stand" not in output
    assert host.groups() == [FOREIGN]
    assert host.groups("theirs") == ["inner"]
    assert host.membership(pid) == ("/", ""), "the container lost its group and runs on"
    assert "completed_at" in host.snapshot(key), "its end was not written"
    # The links that enabled them are kept until the purge, as for every package of Debian.
    assert host.out("systemctl list-units --all --plain --no-legend --state=loaded 'resctrlmond*' || :") == ""
    assert host.out(f"find {RUN} -type s") == ""
    assert host.out("ls -A /usr/share/containers/oci/hooks.d 2>/dev/null || :") == ""
    assert host.run(f"podman run --rm --network none --rootfs {BUSYBOX} true", timeout=LONG).returncode == 0
    assert host.out("cat /etc/resctrlmond/resctrlmond.yaml"), "a removal does not purge the configuration"
    assert host.run(f"mountpoint {TREE}").returncode == 0, "the daemon does not unmount resctrl"
    host.check_foreign()

    host.run("podman rm -f -t 0 left", timeout=LONG)
    host.apt("first", "purge resctrlmond resctrlmond-witness python3-resctrlmond")
    assert listing(host) - before == set()
    host.check_foreign()


def listing(host: Administrator) -> set[str]:
    """Return all files that a package may leave on a disk and in /run, without those of podman and apt."""
    folders = "/etc /run /usr /var/lib/systemd /var/lib/dpkg/info /sys/fs/resctrl /sys/fs/bpf"
    others = " -o ".join(
        f"-path {path}"
        for path in ("/run/crun", "/run/libpod", "/run/containers", "/run/systemd", "/run/lock", "/sys/fs/bpf/crun")
    )
    found = host.out(
        f"find {folders} \\( {others} -o -name '*.pyc' -o -path '{TREE}/theirs*' \\) -prune -o -print", LONG
    )
    # As every Debian package, this one keeps its system group, so that its number is not used again.
    allowed = ("/etc/group", "/etc/gshadow", "/etc/ld.so.cache")
    # systemd makes the directories of its registry for the first socket that has a link there, and keeps them.
    registry = {"/run/varlink", "/run/varlink/registry"}
    return {line for line in found.splitlines() if not line.startswith(allowed)} - registry
