# SPDX-License-Identifier: Apache-2.0
"""A boot with the daemon enabled: which units of it are counted, and from when on."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from .host import Host
from .machine import Guest

UNITS = "/etc/systemd/system"
# As PATIENCE in install.py, and still there after the boot.
PATIENCE = f"{UNITS}/resctrlmond.service.d/emulated.conf"
BUSY = "i=0; while test $i -lt 20000; do i=$((i+1)); done"
EARLY = "[Unit]\nDefaultDependencies=no\nBefore=sysinit.target\n[Install]\nWantedBy=sysinit.target"
# It has started when its shell runs, so that its program has executed the shell before the daemon starts.
BEFORE = (
    "[Unit]\nBefore=resctrlmond.service\n[Service]\nType=notify\nNotifyAccess=all\n"
    "ExecStart=sh -c 'systemd-notify --ready; exec sleep 600'"
)
AFTER = "[Unit]\nAfter=resctrlmond.service"
FILES = {
    "w-early.service": f"{EARLY}\n[Service]\nType=exec\nExecStart=sh -c '{BUSY}; exec sleep 600'",
    "w-gone.service": f"{EARLY}\n[Service]\nType=oneshot\nExecStart=sh -c '{BUSY}'",
    "w-after.service": f"{AFTER}\n[Service]\nExecStart=sleep 600",
    "x-early.service": f"{EARLY}\n[Service]\nType=exec\nExecStart=sleep 600",
    "x-before.service": BEFORE,
    "x-after.service": f"{AFTER}\n[Service]\nExecStart=sleep 600",
}
EXACT = [name for name in FILES if name.startswith("x-")]


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """A host that has booted with the daemon, which watches all services."""
    host = Host(installed_guest)
    host.guest.write(PATIENCE, "[Service]\nTimeoutStartSec=300\n")
    for name, text in FILES.items():
        install = "" if "[Install]" in text else "\n[Install]\nWantedBy=multi-user.target"
        host.guest.write(f"{UNITS}/{name}", f"{text}{install}\n")
    host.run("systemctl daemon-reload; resctrlctl units enable '*.service'", timeout=100)
    host.run(f"resctrlctl units exact {' '.join(EXACT)}", timeout=100)
    host.run(f"systemctl enable sys-fs-resctrl.mount resctrlmond {' '.join(FILES)}", timeout=100)
    host.guest.reboot()
    assert host.run("systemctl is-system-running --wait", check=False, timeout=600).stdout == "running\n"
    for name in (*FILES, "resctrlmond.service"):
        if name != "w-gone.service":
            host.until(lambda name=name: host.state(name) == "active", name)  # type: ignore[misc]
    return host


def total(host: Host, unit: str) -> dict[str, Any]:
    totals = {one["event"]: one for one in host.call("Read", key=unit)["totals"]}
    found: dict[str, Any] = totals["mbm_total_bytes"]
    return found


def shown(host: Host, unit: str, *names: str) -> list[str]:
    """Return properties of a unit."""
    return [host.out(f"systemctl show -P {name} {unit}") for name in names]


@pytest.mark.timeout(1200)
def test_unit_that_starts_before_the_daemon_at_boot_is_late_with_its_use_until_then(host: Host) -> None:
    for unit in ("w-early.service", "systemd-journald.service", "dbus.service"):
        found = total(host, unit)
        assert (unit, found["quality"]) == (unit, "late")
        (bound,) = re.findall(r"([0-9.]+) s of CPU time before", found["reason"])
        (used,) = shown(host, unit, "CPUUsageNSec")
        # The bound is rounded.
        assert 0 < float(bound) <= int(used) / 1e9 + 0.001


def test_unit_that_ends_before_the_daemon_starts_at_boot_has_no_figures(host: Host) -> None:
    for unit in ("w-gone.service", "systemd-sysctl.service", "systemd-tmpfiles-setup.service"):
        ended, ready = shown(host, unit, "ExecMainExitTimestampMonotonic")[0], "ActiveEnterTimestampMonotonic"
        assert 0 < int(ended) < int(shown(host, "resctrlmond.service", ready)[0])
        assert host.state(unit) == ""
    workloads = {workload["key"] for workload in host.call("List")["workloads"]}
    running = host.out("systemctl list-units --type=service --state=running --plain --no-legend").splitlines()
    assert {line.split()[0] for line in running} <= workloads


def test_no_task_of_a_running_service_is_outside_its_group_after_the_boot(host: Host) -> None:
    top = "/sys/fs/cgroup/system.slice"
    # A process that is about to end may be gone.
    script = f"cd {top} && for unit in *.service; do for pid in $(cat $unit/cgroup.procs); do "
    script += 'sed -n "s:^mon\\::$unit :p" /proc/$pid/cpu_resctrl_groups 2>/dev/null; done; done; true'

    def wrong() -> list[str]:
        pairs = [line.split(" ") for line in host.out(script).splitlines()]
        assert len(pairs) > len(FILES)
        return [unit for unit, group in pairs if group != unit]

    host.until(lambda: not wrong(), "the tasks in their groups")


def test_exact_service_at_boot_is_exact_if_it_starts_after_the_daemon(host: Host) -> None:
    after = total(host, "x-after.service")
    assert (after["quality"], after.get("reason")) == ("exact", None)
    # The socket does not exist yet, or nobody accepts: the program executes the command, which starts outside.
    for unit in ("x-early.service", "x-before.service"):
        assert shown(host, unit, "ActiveState", "NRestarts") == ["active", "0"]
        assert total(host, unit)["quality"] == "late"
    assert total(host, "w-after.service")["quality"] == "late"


def test_sums_begin_at_the_start_of_the_daemon(host: Host) -> None:
    since = datetime.fromisoformat(json.loads(host.out("resctrlctl sums --json"))["since"])
    begun, ready = (
        datetime.fromtimestamp(int(host.out(f'date -d "$(systemctl show -P {name} resctrlmond)" +%s')), UTC)
        for name in ("InactiveExitTimestamp", "ActiveEnterTimestamp")
    )
    assert begun <= since.replace(microsecond=0) <= ready


def test_service_that_is_ordered_after_the_daemon_starts_though_the_daemon_fails(host: Host) -> None:
    broken = "/etc/resctrlmond/resctrlmond.d/broken.yaml"
    host.run("systemctl stop resctrlmond x-after.service", timeout=100)
    host.guest.write(broken, "reserve: none\n")
    done = host.run("systemctl start resctrlmond x-after.service", check=False, timeout=200)
    assert done.returncode != 0
    assert shown(host, "x-after.service", "ActiveState") == ["active"]
    # The call of the service activates the daemon again, which fails again.
    host.run(
        f"rm {broken}; systemctl stop resctrlmond; systemctl reset-failed; systemctl start resctrlmond", timeout=200
    )
    host.until(lambda: total(host, "x-after.service")["quality"] == "late", "the service that started alone")
