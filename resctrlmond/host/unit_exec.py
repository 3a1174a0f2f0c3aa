# SPDX-License-Identifier: Apache-2.0
"""The program resctrlmon-unit-exec: its path, its socket, and whether a command of a unit runs through it."""

from __future__ import annotations

import os
import re

# ``resctrlctl units exact`` writes this path into the drop-ins of units.
PROGRAM = "/usr/libexec/resctrlmon-unit-exec"
# ListenStream= of resctrlmond-unit.socket. The program is compiled with this path.
SOCKET = "/run/resctrlmond/org.resctrlmon.Unit"
# The program waits so long for the daemon, or for its next notice, and so long in all (hook/unit_exec.c).
WAIT_S = 2.0
LONGEST_WAIT_S = 30.0
# Names in /proc/PID/comm, which the kernel cuts to 15 characters: of the program, and of systemd's own process before
# it executes the program. Shortly before that, its name is that of the program in brackets (src/core/exec-invoke.c,
# rename_process_from_path()).
_COMMS = (b"resctrlmon-unit", b"systemd", b"systemd-executo")
# Before that, systemd-executor may have the name of the descriptor by which systemd executes it, as "/proc/self/fd/9"
# (src/core/execute.c, exec_spawn()).
_DESCRIPTOR = re.compile(rb"[0-9]{1,10}\n?")
# The process that systemd keeps beside the commands of a service with PAMName= never executes one, and never calls.
_PAM = b"(sd-pam)\n"


def is_program(path: str) -> bool:
    """Return whether this is the path of the program, which a drop-in of the administrator may run elsewhere."""
    return os.path.basename(path) == os.path.basename(PROGRAM)


def may_call(pid: int) -> bool:
    """Return whether the process has not executed the command of a service yet, by its name.

    A service can choose such a name too. That only delays when its process is found outside the group.
    """
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            comm = file.read()
    except OSError:
        return False
    is_of_systemd = comm.startswith(b"(") and comm != _PAM
    return is_of_systemd or comm.removesuffix(b"\n") in _COMMS or bool(_DESCRIPTOR.fullmatch(comm))
