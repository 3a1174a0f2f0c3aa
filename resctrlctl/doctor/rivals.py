# SPDX-License-Identifier: Apache-2.0
"""Other programs on this machine that manage monitoring groups or RMIDs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host
from resctrlmond.host.known_programs import NRI_RESCTRL_MON, PROGRAMS, Program, ProgramProcess, find_processes

_PLUGINS = "/opt/nri/plugins"
_UNIT_FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
_TWO_OWNERS = "Two owners of monitoring groups on one machine interfere with each other: run only one."


def check(host: Host) -> Iterator[Finding]:
    """Find processes, enabled units and NRI plugins of programs that are known to manage monitoring groups."""
    findings = [*_hidden(host), *_processes(host), *_units(host), *_plugins(host)]
    yield from findings
    if not findings:
        yield Finding(Severity.OK, "rivals", "no other program that manages monitoring groups was found")


def _hidden(host: Host) -> Iterator[Finding]:
    """Find whether /proc hides the processes of root, of which one always exists (hidepid= in proc(5))."""
    if not host.read("/proc/1/comm"):
        yield Finding(
            Severity.NOTE,
            "rivals",
            "processes were not examined: /proc hides those of root",
            "Another program that manages monitoring groups may be running.",
            ("sudo resctrlctl doctor",),
        )


def _processes(host: Host) -> Iterator[Finding]:
    for process in find_processes(proc=host.path("/proc")):
        unit = _unit_of(host, process)
        yield Finding(
            Severity.WARNING,
            "rivals",
            f"{process.program.name} runs as process {process.pid} ({process.comm}); it {process.program.effect}",
            _TWO_OWNERS,
            (f"systemctl stop {unit}" if unit else f"kill {process.pid}",),
        )


def _unit_of(host: Host, process: ProgramProcess) -> str:
    """Return the service of a process; "" if it is not in one of its own."""
    found = re.search(r"/([^/]+\.service)$", host.read(f"/proc/{process.pid}/cgroup"), re.MULTILINE)
    return found[1] if found and not found[1].startswith(("user@", "init.")) else ""


def _units(host: Host) -> Iterator[Finding]:
    enabled = {
        name
        for folder in _UNIT_FOLDERS
        for wants in host.names(folder, "*.wants")
        for name in host.names(f"{folder}/{wants}", "*.service")
    }
    for name in sorted(enabled):
        text = next(filter(None, (host.read(f"{folder}/{name}") for folder in _UNIT_FOLDERS)), "")
        program = _started_by(text)
        if program is not None:
            yield Finding(
                Severity.WARNING,
                "rivals",
                f"{name} is enabled and starts {program.name}; it {program.effect}",
                _TWO_OWNERS,
                (f"systemctl disable --now {name}",),
            )


def _started_by(text: str) -> Program | None:
    """Return the known program that the text of a unit starts."""
    commands = re.findall(r"^Exec\w+=[-@:+!|]*(\S+)", text, re.MULTILINE)
    names = [os.path.basename(command)[:15] for command in commands]  # as the kernel cuts them
    return next((program for program in PROGRAMS for name in names if program.comm.fullmatch(name)), None)


def _plugins(host: Host) -> Iterator[Finding]:
    for name in host.names(_PLUGINS):
        if NRI_RESCTRL_MON.comm.fullmatch(name):
            yield Finding(
                Severity.WARNING,
                "rivals",
                f"the runtime launches {NRI_RESCTRL_MON.name} ({_PLUGINS}/{name}); it {NRI_RESCTRL_MON.effect}",
                _TWO_OWNERS,
                (f"rm {_PLUGINS}/{name}, then restart the runtime",),
            )
