# SPDX-License-Identifier: Apache-2.0
"""The errors of resctrlctl, its exit statuses, and messages on standard error. Imports almost nothing."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from resctrlmond.api.exit_codes import FAILURE
from resctrlmond.resctrl.errors import printable

PROGRAM = "resctrlctl"

# The other exit statuses are in resctrlmond.api.exit_codes.
OK = 0
# The verb profiles: the daemon accepts a file that names a class that does not exist.
MISSING_CLASS = 8
# The verb doctor: the severity of its worst finding.
DOCTOR_WARNING = 8
DOCTOR_ERROR = 9
# The verb run: resctrlctl fails before the command starts, as with env(1), nice(1) and timeout(1).
OWN_FAILURE = 125

# For a number of another version of the daemon, or of a program that is not resctrlmond.
INVALID_NUMBER = "resctrlmond replied with a number that is not valid. Restart it: systemctl restart resctrlmond"


class CommandError(Exception):
    """An error message of one sentence, and the exit status of resctrlctl.

    ``name`` is the name of the varlink error without its interface; "" if the daemon did not return one.
    """

    def __init__(self, message: str, status: int = FAILURE, name: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.name = name


class DaemonDown(CommandError):
    """No process listens on the socket."""


class NoAnswer(CommandError):
    """The daemon did not answer in time. It carries out the call later if it continues."""


class RemoteError(Exception):
    """The daemon of another host cannot be called: why, and the exit status of resctrlctl."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class Disconnected(CommandError):
    """The daemon closed the connection before its reply: it was stopped, or it refuses further connections."""


def print_error(text: str, out: TextIO | None = None) -> None:
    """Print the program's name and a message, made printable, as one line on standard error. Ignore errors."""
    with contextlib.suppress(OSError):  # EBADF if it is closed, EIO after a hang-up of the terminal
        print(f"{PROGRAM}: {printable(text)}", file=out or sys.stderr, flush=True)
