# SPDX-License-Identifier: Apache-2.0
"""Services that 'resctrlctl units exact' makes exact, on a real kernel and with a real systemd.

Services start in pairs: a command waits for two seconds, in which the emulated processor of a guest serves the calls
of two services, and not always those of six. RESCTRLMOND_TYPES=all (make exact-all) adds more types of services.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from resctrlmond.host.unit_exec import SOCKET

from .host import Host
from .machine import Guest
from .services import OWNER, READY, write_programs

UNITS = "/run/systemd/system"
# The service tells systemd that it is ready, and remains the main process.
NOTIFY = "sh -c 'systemd-notify --ready; exec sleep 600'"
SANDBOX = (
    "ProtectSystem=strict\nPrivateTmp=yes\nPrivateDevices=yes\nProtectHome=yes\nNoNewPrivileges=yes\n"
    "RestrictAddressFamilies=AF_UNIX\nRestrictNamespaces=yes\nMemoryDenyWriteExecute=yes\n"
    "SystemCallFilter=@system-service\nCapabilityBoundingSet="
)
FILES = {
    # systemd runs ExecReload= in a control group below that of the service.
    "x-simple.service": "Delegate=yes\nExecStartPre=true\nExecStart=@sleep other-name 600\n"
    "ExecReload=kill -CONT $MAINPID",
    "x-fork.service": "Type=forking\nExecStart=sh -c 'sleep 600 & exit 0'",
    "x-hard.service": f"DynamicUser=yes\nExecStart=sh -c 'id -u; exec sleep 600'\n{SANDBOX}",
    "x-notify.service": f"Type=notify\nNotifyAccess=all\nExecStart={NOTIFY}",
    "x-reload.service": f"Type=notify-reload\nSetCredential=word:given\nLoadCredential=host:/etc/hostname\n"
    f"ExecStart=python3 {READY}",
    "x-once.service": "Type=oneshot\nExecStart=true\nExecStart=sh -c 'exit 0'\nExecStart=sleep 1\n"
    "RemainAfterExit=yes",
}
# Not in each run, because a slow guest takes seconds for each.
MORE = {
    "x-exec.service": "Type=exec\nExecStart=sleep 600",
    "x-dbus.service": f"Type=dbus\nBusName=org.resctrlmon.Test\nExecStart=python3 {OWNER}",
    "x-idle.service": "Type=idle\nExecStart=sleep 600",
    "x-post.service": "ExecStartPost=true\nExecStart=sleep 600\nExecStop=true\nExecStopPost=true",
    "x@.service": "ExecStart=sleep 60%i",
}
if os.environ.get("RESCTRLMOND_TYPES") == "all":
    FILES |= MORE


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    """A host with the daemon and exact services, none of which runs yet."""
    host = Host(installed_guest)
    for name, text in FILES.items():
        host.guest.write(f"{UNITS}/{name}", f"[Service]\n{text}\n")
    write_programs(host)
    host.run("systemctl daemon-reload")
    host.run(f"resctrlctl units exact {' '.join(FILES)}", timeout=100)
    host.start()
    return host


def total(host: Host, unit: str) -> dict[str, Any]:
    totals = {one["event"]: one for one in host.call("Read", key=unit)["totals"]}
    found: dict[str, Any] = totals["mbm_total_bytes"]
    return found


def test_services_of_all_types_are_exact(host: Host) -> None:
    names = [name.replace("@.", "@1.") for name in FILES]
    pairs = [names[begin : begin + 2] for begin in range(0, len(names), 2)]
    for some in pairs:
        host.run(f"systemctl start {' '.join(some)}", timeout=100)
        for name in some:
            host.until(lambda name=name: host.state(name) in ("active", "completed"), name)  # type: ignore[misc]
    host.run("systemctl reload x-simple.service x-reload.service")
    assert host.out("systemctl show -P StatusText x-reload.service") == "reloaded"
    credentials = (
        f"/proc/{host.out('systemctl show -P MainPID x-reload.service')}/root/run/credentials/x-reload.service"
    )
    assert host.out(f"cat {credentials}/word {credentials}/host") == "given" + host.out("cat /etc/hostname")
    found = {name: total(host, name) for name in names}
    assert {name: one.get("reason") for name, one in found.items()} == dict.fromkeys(names)
    assert {name: one["quality"] for name, one in found.items()} == dict.fromkeys(names, "exact")
    main = host.out("systemctl show -P MainPID x-simple.service")
    assert host.out(f"tr '\\0' ' ' </proc/{main}/cmdline") == "other-name 600 "
    assert host.membership(main)[1] == "x-simple.service"
    assert host.out("journalctl -o cat -u x-hard.service -g '^[0-9]+$'").isdecimal()
    for some in pairs:
        host.run(f"systemctl stop {' '.join(some)}", timeout=100)
    for name in names:
        host.until(lambda name=name: host.state(name) == "completed", name)  # type: ignore[misc]
        one = total(host, name)
        assert (name, one["quality"], one.get("reason")) == (name, "exact", None)


def test_service_that_restarts_without_a_pause_stays_exact(host: Host) -> None:
    text = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=sleep 1\nRestart=always\nRestartSec=0\n"
    host.guest.write(f"{UNITS}/x-loop.service", text)
    host.run("systemctl daemon-reload; resctrlctl units exact x-loop.service", timeout=100)
    host.run("systemctl start x-loop.service")
    host.until(lambda: int(host.out("systemctl show -P NRestarts x-loop.service")) >= 3, "three restarts")
    # While a process is being put into the group, which the next start begins, a reply is late.
    host.until(lambda: total(host, "x-loop.service")["quality"] == "exact", "a reply between two starts")
    host.run("systemctl stop x-loop.service")


def test_short_service_is_exact_unless_a_command_did_not_reach_the_daemon(host: Host) -> None:
    """systemd unloads both when they have ended, and then states nothing about their commands any more."""
    work = "sh -c 'for i in $(seq 20000); do :; done'"
    for name, first in (("x-short", "true"), ("x-lost", f"mv {SOCKET} {SOCKET}.away")):
        text = f"[Service]\nType=oneshot\nExecStart={first}\nExecStart={work}\n"
        host.guest.write(f"{UNITS}/{name}.service", text)
    host.run("systemctl daemon-reload; resctrlctl units exact x-short.service x-lost.service", timeout=100)
    host.run(
        f"systemctl start x-short.service; systemctl start x-lost.service; mv {SOCKET}.away {SOCKET}", timeout=100
    )
    for name, quality in (("x-short.service", "exact"), ("x-lost.service", "late")):
        host.until(lambda name=name: host.state(name) == "completed", name)  # type: ignore[misc]
        assert (name, total(host, name)["quality"]) == (name, quality)
    assert "outside the group" in total(host, "x-lost.service")["reason"]


def test_start_that_came_and_went_without_the_daemon_makes_the_service_late(host: Host) -> None:
    """systemd has removed its control group when the daemon starts, and the service does not run."""
    work = "for i in $(seq 20000); do :; done"
    text = f"[Service]\nExecStart=sh -c 'if [ -e /run/work ]; then {work}; else exec sleep 600; fi'\n"
    for name in ("x-gone", "x-kept"):
        host.guest.write(f"{UNITS}/{name}.service", text)
    host.run("systemctl daemon-reload; resctrlctl units exact x-gone.service x-kept.service", timeout=100)
    host.run("systemctl start x-gone.service x-kept.service", timeout=100)
    for name in ("x-gone.service", "x-kept.service"):
        host.until(lambda name=name: host.state(name) == "active", name)  # type: ignore[misc]
        assert total(host, name).get("reason") is None
    host.run("systemctl stop resctrlmond-unit.socket resctrlmond.socket resctrlmond.service")
    host.run("systemctl stop x-gone.service x-kept.service; touch /run/work; systemctl start x-gone.service")
    host.until(lambda: host.out("systemctl is-active x-gone.service || :") == "inactive", "the end of the start")
    assert host.out("find /sys/fs/cgroup -name x-gone.service") == ""
    host.run("rm /run/work")
    host.start()
    for name, quality in (("x-gone.service", "late"), ("x-kept.service", "exact")):
        host.until(lambda name=name: host.state(name) == "completed", name)  # type: ignore[misc]
        assert (name, total(host, name)["quality"]) == (name, quality)
    assert "outside the group" in total(host, "x-gone.service")["reason"]


def test_daemon_reload_hides_no_command_that_was_missed(host: Host) -> None:
    names = ("x-simple.service", "x-hard.service")
    host.run(f"systemctl start {' '.join(names)}", timeout=100)
    for name in names:
        host.until(lambda name=name: host.state(name) == "active", name)  # type: ignore[misc]
    assert [total(host, name).get("reason") for name in names] == [None, None]
    host.run("systemctl daemon-reload; systemctl restart resctrlmond.service")
    assert "pid=0" in host.out("systemctl show -P ExecStart x-simple.service")
    host.run("systemctl stop resctrlmond-unit.socket resctrlmond.socket resctrlmond.service")
    host.run("systemctl reload x-simple.service; systemctl daemon-reload")
    host.start()
    host.until(lambda: total(host, "x-simple.service")["quality"] == "late", "the missed reload")
    assert "outside the group" in total(host, "x-simple.service")["reason"]
    assert total(host, "x-hard.service").get("reason") is None
    host.run(f"systemctl stop {' '.join(names)}", timeout=100)


def test_service_starts_without_the_daemon_and_is_inexact_again(host: Host) -> None:
    host.run("systemctl stop resctrlmond-unit.socket resctrlmond.socket resctrlmond.service")
    host.run("systemctl start x-simple.service x-hard.service")
    assert host.out("systemctl is-active x-simple.service x-hard.service") == "active\nactive"
    host.start()
    host.until(lambda: host.state("x-simple.service") == "active", "the service")
    assert total(host, "x-simple.service")["quality"] == "late"
    host.run("resctrlctl units inexact '*' && ! ls /etc/systemd/system/*.d/zz-resctrlmon-exact.conf")
    assert "unit-exec" not in host.out("systemctl show -P ExecStart x-simple.service")
