# SPDX-License-Identifier: Apache-2.0
"""Services that end at once and restart without a pause, beside reloads of systemd and restarts of the daemon."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import pytest

from resctrlmond.service.message_ids import MessageId

from .host import RUN, Host
from .machine import Guest

UNITS = "/run/systemd/system"
DROP_IN = "/etc/resctrlmond/resctrlmond.d/storm.yaml"
FOLDER = "/run/storm"
EXACT = ["storm-exact-1.service", "storm-exact-2.service"]
WATCHED = ["storm-watched-1.service"]
SECONDS = 10.0
# Python does not return all memory. A leak of each restart would be larger.
GROWTH_KIB = 3072
# Whether each exact service has started in its group.
IN_GROUPS = " && ".join(f"grep -qx mon:{unit} {FOLDER}/{unit} 2>/dev/null" for unit in EXACT)
COMMAND = "/run/storm-command"
# Adds the group of its process to the file of the service, without another process.
SCRIPT = f"""\
while read -r line; do
    case $line in mon:*) echo "$line" >>{FOLDER}/$1 ;; esac
done </proc/self/cpu_resctrl_groups
"""


@dataclass(frozen=True)
class Storm:
    """The group of each process of one storm, in the order of the starts, and the number of restarts, by service."""

    groups: dict[str, list[str]]
    restarts: dict[str, int]

    def starts_outside(self, unit: str) -> int:
        """Return how many processes ran outside the group after the first one in it."""
        groups = self.groups[unit]
        begun = groups.index(unit) if unit in groups else len(groups)
        return sum(group != unit for group in groups[begun:])


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """A host whose daemon watches the services, none of which runs yet."""
    host = Host(installed_guest)
    write_units(host)
    host.guest.write(DROP_IN, json.dumps({"units": ["storm-*.service"]}) + "\n")
    host.run(f"resctrlctl units exact {' '.join(EXACT)}", timeout=100)
    host.start()
    return host


def write_units(host: Host) -> None:
    host.guest.write(COMMAND, SCRIPT)
    # With Nice=, because the restarts use all of an emulated processor: the daemon is to reply within 2 s.
    text = f"ExecStart=sh {COMMAND} %n\nRestart=always\nRestartSec=0\nNice=19\n"
    text = f"[Unit]\nStartLimitIntervalSec=0\n[Service]\n{text}"
    for name in EXACT + WATCHED:
        host.guest.write(f"{UNITS}/{name}", text)
    host.run(f"mkdir -p {FOLDER} && systemctl daemon-reload")


def storm(host: Host, *commands: str, seconds: float = SECONDS) -> Storm:
    """Let all services restart for some time, and then stop them. ``commands`` run meanwhile."""
    names = EXACT + WATCHED
    host.run(f"rm -f {FOLDER}/*; systemctl start --no-block {' '.join(names)}")
    begun = time.monotonic()
    host.run(f"until {IN_GROUPS}; do sleep 0.2; done", timeout=200)
    for command in commands:
        host.run(command, timeout=200)
    restarts_each = 3
    while time.monotonic() - begun < seconds or min(_restarts(host, names).values()) < restarts_each:
        time.sleep(0.2)
        assert time.monotonic() - begun < 300, "the services do not restart"
    restarts = _restarts(host, names)
    host.run(f"systemctl stop {' '.join(names)}", timeout=200)
    printed = {name: host.out(f"cat {FOLDER}/{name}").splitlines() for name in names}
    groups = {name: [line.removeprefix("mon:") for line in lines] for name, lines in printed.items()}
    return Storm(groups, restarts)


def _restarts(host: Host, names: list[str]) -> dict[str, int]:
    return {name: int(host.out(f"systemctl show -P NRestarts {name}")) for name in names}


def until_over(host: Host) -> None:
    """Wait until no storm service has a workload that runs; then no group, claim or other record of it is left."""

    def running() -> list[str]:
        listed = host.call("List")["workloads"]
        return [one["key"] for one in listed if one["key"].startswith("storm-") and one["state"] != "completed"]

    host.until(lambda: not running(), "the ends", 100)
    assert [group for group in host.groups() if group.startswith("storm-")] == []
    records = {name for name in host.out(f"ls {RUN}/records").split() if name.startswith("storm-")}
    assert records <= {f"{name}.json" for name in EXACT + WATCHED}


def ended(host: Host, unit: str, since: str) -> list[dict[str, Any]]:
    """Return the journal's entries of the ends of a unit's runs."""
    host.run("journalctl --sync")
    query = f"journalctl -o json --after-cursor='{since}' MESSAGE_ID={MessageId.ENDED} RESCTRLMON_KEY={unit}"
    return [json.loads(line) for line in host.out(query, 100).splitlines()]


def cursor(host: Host) -> str:
    """Return the place of the last entry of the journal."""
    return host.out("journalctl --sync; journalctl -n 0 --show-cursor | sed -n 's/^-- cursor: //p'", 100)


def memory_kib(host: Host) -> int:
    return int(host.out(f"sed -n 's/^VmRSS:[^0-9]*\\([0-9]*\\).*/\\1/p' /proc/{host.pid()}/status"))


def check(host: Host, found: Storm, since: str) -> None:
    """Check that each exact service had one run, which is not exact if a process of it ran outside."""
    until_over(host)
    for unit in EXACT:
        runs = ended(host, unit, since)
        qualities = {total["quality"] for total in host.call("Read", key=unit)["totals"]}
        assert len(runs) == 1, (unit, len(runs))
        if found.starts_outside(unit):
            assert "exact" not in qualities, (unit, found.groups[unit])
    for unit in WATCHED:
        assert len(ended(host, unit, since)) <= found.restarts[unit] + 1
        if host.state(unit):
            assert {total["quality"] for total in host.call("Read", key=unit)["totals"]} <= {"late", "estimated"}


@pytest.mark.timeout(900)
def test_storm_of_restarts_beside_reloads_leaves_nothing_and_memory_stays(host: Host) -> None:
    sizes = []
    for _ in range(2):
        since = cursor(host)
        found = storm(host, "systemctl daemon-reload", "systemctl daemon-reload")
        check(host, found, since)
        sizes.append(memory_kib(host))
    assert sizes[1] - sizes[0] < GROWTH_KIB, sizes


@pytest.mark.timeout(900)
def test_storm_of_restarts_while_the_daemon_restarts_is_not_exact(host: Host) -> None:
    sockets = "resctrlmond.socket resctrlmond-unit.socket"
    since = cursor(host)
    lines = f"cat {FOLDER}/{{{','.join(EXACT)}}} 2>/dev/null | wc -l"
    # Each service has started in its group before the daemon stops, and starts outside it meanwhile.
    found = storm(
        host,
        f"systemctl stop {sockets} resctrlmond && systemctl daemon-reload",
        f"before=$({lines}); until test $({lines}) -gt $((before + 9)); do sleep 0.2; done",
        f"systemctl start {sockets} resctrlmond",
        "kill -9 $(systemctl show -P MainPID resctrlmond); systemctl daemon-reload",
    )
    host.until(lambda: host.out("systemctl is-active resctrlmond || true") == "active", "the daemon", 200)
    assert all(found.starts_outside(unit) for unit in EXACT)
    check(host, found, since)
