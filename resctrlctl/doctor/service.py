# SPDX-License-Identifier: Apache-2.0
"""The daemon: its configuration, its unit, its socket, its bus policy and the problems that it reports."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import xml.etree.ElementTree as ET
from collections.abc import Iterator

from resctrlctl.base.defaults import SOCKET
from resctrlctl.base.errors import CommandError
from resctrlctl.connection.daemon import Daemon
from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host
from resctrlctl.doctor.resctrl import settings
from resctrlctl.screen.format import format_count
from resctrlmond.api import signatures
from resctrlmond.configuration import config
from resctrlmond.configuration.config_file import ConfigError

UNIT = "resctrlmond.service"
_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "Result",
    "ExecMainStatus",
    "InactiveEnterTimestamp",
    "NRestarts",
)
_POLICIES = tuple(f"{folder}/dbus-1/system.d/org.resctrlmon1.conf" for folder in ("/usr/share", "/etc"))
_REINSTALL = "Install resctrlmond again (package, or 'make install' in the source)"
_RESTART = "systemctl restart resctrlmond.socket resctrlmond.service"
_OTHER_SOCKET = "Start the daemon of that socket, or omit --socket and RESCTRLMOND_SOCKET to examine this machine"
# A workload with all its files takes less, and more if it has many members.
_LEAST_FREE_BYTES = 1 << 20
_LEAST_FREE_FILES = 100
# A daemon that answers later than this does not answer.
_TIMEOUT_S = 5.0


def check_configuration(host: Host) -> Iterator[Finding]:
    """Check the daemon's configuration."""
    try:
        config.parse(host.read(config.DEFAULT_PATH).encode(), config.DEFAULT_PATH)
    except ConfigError as error:
        yield Finding(
            Severity.ERROR,
            "configuration",
            str(error),
            "The daemon does not start with a wrong configuration.",
            ("resctrlmond --check-config  # after the change",),
        )
    else:
        yield Finding(Severity.OK, "configuration", f"{config.DEFAULT_PATH} is valid or missing")


def unit_state(host: Host, unit: str) -> dict[str, str]:
    """Return properties of a unit; {} if there is no service manager to ask."""
    output = host.run("systemctl", "show", unit, f"--property={','.join(_PROPERTIES)}")
    lines = (output or "").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def check_unit(host: Host) -> Iterator[Finding]:
    """Check that the daemon runs and starts at boot."""
    state = unit_state(host, UNIT)
    if not state:
        yield Finding(
            Severity.NOTE, "daemon", f"the state of {UNIT} was not examined: systemctl does not answer", "", ()
        )
        return
    since = state.get("InactiveEnterTimestamp", "")
    match state.get("LoadState"), state.get("ActiveState"):
        case "loaded", "active" | "reloading":
            yield Finding(Severity.OK, "daemon", f"{UNIT} is active")
            if state.get("NRestarts", "0") != "0":
                yield Finding(
                    Severity.WARNING,
                    "daemon",
                    f"{UNIT} failed and was restarted {state['NRestarts']} times, the last time at {since}",
                    "What happened while it was stopped may be missing in the totals.",
                    (f"journalctl -u {UNIT} --grep 'Failed|error'", f"systemctl restart {UNIT}  # resets the count"),
                )
            if state.get("UnitFileState") == "disabled":
                yield Finding(
                    Severity.NOTE,
                    "daemon",
                    f"{UNIT} is not started at boot",
                    "Containers that start before it are not monitored.",
                    (f"systemctl enable {UNIT}",),
                )
        case "loaded", "failed":
            result = f"{state.get('Result', '')}, exit status {state.get('ExecMainStatus', '')}"
            yield Finding(
                Severity.ERROR,
                "daemon",
                f"{UNIT} failed at {since} ({result})",
                "No new workload is monitored. Existing groups continue to count.",
                (f"journalctl -u {UNIT} -n 20", f"systemctl restart {UNIT}"),
            )
        case "loaded", "activating":
            yield Finding(
                Severity.WARNING,
                "daemon",
                f"{UNIT} is starting ({state.get('SubState', '')})",
                "No new workload is monitored until it has started.",
                (f"journalctl -u {UNIT} -n 20",),
            )
        case "loaded", active:
            yield Finding(
                Severity.ERROR,
                "daemon",
                f"{UNIT} is {active}" + (f" since {since}" if since else ""),
                "No new workload is monitored. Existing groups continue to count.",
                (f"systemctl enable --now {UNIT}",),
            )
        case "masked", _:
            yield Finding(
                Severity.ERROR,
                "daemon",
                f"{UNIT} is masked",
                "The daemon cannot be started, so no workload is monitored.",
                (f"systemctl unmask {UNIT} && systemctl enable --now {UNIT}",),
            )
        case _:
            yield Finding(
                Severity.ERROR,
                "daemon",
                f"{UNIT} is not installed",
                "Without the daemon, no workload is monitored.",
                (_REINSTALL, f"systemctl daemon-reload && systemctl enable --now {UNIT}"),
            )


def check_space(host: Host) -> Iterator[Finding]:
    """Check that the filesystem of the records has free space and inodes."""
    path = settings(host).runtime_dir
    try:
        free = os.statvfs(host.path(path))
    except FileNotFoundError:
        return  # the daemon creates it at its start
    missing = ""
    if free.f_bavail * free.f_frsize < _LEAST_FREE_BYTES:
        missing = "space"
    elif free.f_files and free.f_favail < _LEAST_FREE_FILES:  # f_files is 0 without a limit
        missing = "inodes"
    if missing:
        yield Finding(
            Severity.ERROR,
            "space",
            f"the filesystem of {path} has no free {missing}",
            "The daemon cannot write the state of a workload, so new workloads are not monitored.",
            (f"df -h {path}; df -i {path}  # then remove what fills it, or enlarge it",),
        )


def check_socket(host: Host) -> Iterator[Finding]:
    """Check that the socket exists, that its group may use it, and that a daemon answers on it."""
    path = host.socket or SOCKET
    restart = _OTHER_SOCKET if host.socket else _RESTART
    try:
        status = os.stat(host.daemon_socket)
    except FileNotFoundError:
        yield Finding(
            Severity.ERROR,
            "socket",
            f"{path} does not exist",
            "resctrlctl, the hook and the NRI plugin cannot call the daemon.",
            # A start creates no new file if systemd still listens on the removed one.
            (restart,),
        )
        return
    except PermissionError as error:
        yield _denied(host, path, error)
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield Finding(
            Severity.ERROR,
            "socket",
            f"{path} is not a socket",
            "resctrlctl, the hook and the NRI plugin cannot call the daemon.",
            # A file in the place of another socket is not the daemon's: it may be a mistyped path.
            (restart if host.socket else f"rm {path} && {restart}",),
        )
        return
    yield from _rights(host, path, status)
    # A connection would start a stopped daemon (sd_listen_fds(3)).
    if host.socket or unit_state(host, UNIT).get("ActiveState", "active") in ("active", "reloading"):
        yield from _answer(host, path, restart)


def _rights(host: Host, path: str, status: os.stat_result) -> Iterator[Finding]:
    if host.socket:
        return  # the administrator's own socket has any rights
    group = settings(host).group
    try:
        expected = group if isinstance(group, int) else grp.getgrnam(group).gr_gid
    except KeyError:
        yield Finding(
            Severity.ERROR,
            "socket",
            f"there is no Unix group {group}",
            "It marks the monitoring groups of the daemon, and its members may read. The daemon does not start.",
            ("systemd-sysusers",),
        )
        return
    mode = stat.S_IMODE(status.st_mode)
    if status.st_gid != expected or mode & 0o060 != 0o060:
        yield Finding(
            Severity.WARNING,
            "socket",
            f"the members of {group} cannot use {path} (mode {mode:04o}, group {status.st_gid})",
            "Only root can read figures.",
            (f"chgrp {group} {path} && chmod 0660 {path}",),
        )


def _answer(host: Host, path: str, restart: str) -> Iterator[Finding]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(host.daemon_socket)
        except PermissionError as error:
            yield _denied(host, path, error)
            return
        except OSError as error:
            yield Finding(
                Severity.ERROR,
                "socket",
                f"no daemon accepts connections on {path}: {error.strerror or error}",
                "resctrlctl, the hook and the NRI plugin cannot call the daemon.",
                (restart,),
            )
            return
    try:
        reply = Daemon(host.daemon_socket, _TIMEOUT_S).call("ask for the status", signatures.STATUS)
    except CommandError as error:
        yield Finding(Severity.ERROR, "socket", str(error), "The daemon does not answer.", (restart,))
        return
    yield Finding(Severity.OK, "socket", f"resctrlmond {reply.version} answers on {path}")
    if reply.pending:
        count = f"{format_count(reply.pending, 'workload')} {'waits' if reply.pending == 1 else 'wait'} for an RMID"
        yield Finding(
            Severity.WARNING,
            "rmids",
            f"{count}; freed RMIDs are in limbo" if reply.in_limbo else count,
            "What a workload uses until it has an RMID is not counted.",
            ("resctrlctl list --filter state=pending",),
        )
    for problem in reply.problems:
        # The catalog of the journal explains each message that requires an administrator.
        command = "journalctl -x -b -p warning -u 'resctrlmond*.service'  # explains what to do"
        fix = () if host.socket else (command,)
        yield Finding(Severity.WARNING, "problem", problem, "The daemon reports this.", fix)


def _denied(host: Host, path: str, error: OSError) -> Finding:
    user = pwd.getpwuid(os.geteuid()).pw_name
    why = "Only root and the user who started that daemon may read figures."
    fix = "Run resctrlctl as one of them"
    if not host.socket:
        names = [str(group) for group in (settings(host).read_group, settings(host).group) if _is_group(group)]
        why = f"Only root and the members of the Unix group {' or '.join(names)} may read figures."
        fix = f"usermod -aG {names[0]} {user}  # as root; then log in again" if names else "Run resctrlctl as root"
    return Finding(Severity.WARNING, "socket", f"{user} may not use {path}: {error.strerror}", why, (fix,))


def _is_group(group: str | int) -> bool:
    try:
        grp.getgrgid(group) if isinstance(group, int) else grp.getgrnam(group)
    except KeyError:
        return False
    return True


def check_bus(host: Host) -> Iterator[Finding]:
    """Check the policy of the system bus for org.resctrlmon1."""
    if not settings(host).dbus:
        return
    path = next((path for path in _POLICIES if host.exists(path)), "")
    if not path:
        yield Finding(
            Severity.WARNING,
            "bus",
            f"there is no bus policy {_POLICIES[0]}",
            "The system bus does not let the daemon own the name org.resctrlmon1: clients of D-Bus are refused.",
            (_REINSTALL, "systemctl reload dbus && systemctl restart resctrlmond"),
        )
        return
    try:
        ET.parse(host.path(path))  # noqa: S314
    except ET.ParseError as error:
        yield Finding(
            Severity.ERROR,
            "bus",
            f"{path} is not valid XML: {error}",
            "The system bus ignores the file, so that the daemon cannot own the name org.resctrlmon1.",
            (_REINSTALL, "systemctl reload dbus && systemctl restart resctrlmond"),
        )
        return
    yield Finding(Severity.OK, "bus", f"the bus policy is {path}")
