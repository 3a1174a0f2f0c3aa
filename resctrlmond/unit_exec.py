# SPDX-License-Identifier: Apache-2.0
"""The program resctrlmon-unit-exec: its path, its socket, and whether a command of a unit runs through it."""

from __future__ import annotations

import os

# ``resctrlctl units exact`` writes this path into the drop-ins of units.
PROGRAM = "/usr/libexec/resctrlmon-unit-exec"
# ListenStream= of resctrlmond-unit.socket. The program is compiled with this path.
SOCKET = "/run/resctrlmond/org.resctrlmon.Unit"
# The program executes the command of the unit after this time at the latest (hook/unit_exec.c, LONGEST).
LONGEST_WAIT_S = 2.0


def is_program(path: str) -> bool:
    """Return whether this is the path of the program, which a drop-in of the administrator may run elsewhere."""
    return os.path.basename(path) == os.path.basename(PROGRAM)
