# SPDX-License-Identifier: Apache-2.0
"""The exit codes of resctrlctl by the names of errors. Without imports, because resctrlctl is started often."""

VARLINK_PREFIX = "org.resctrlmon.Manager."
DBUS_PREFIX = "org.resctrlmon1.Error."

FAILURE = 1
USAGE = 2
NOT_RUNNING = 3
NO_SUCH_WORKLOAD = 4
NO_RMID = 5
DENIED = 77

# All other errors exit with FAILURE.
EXIT_CODES = {
    # The text is part of the command line.
    "InvalidKey": USAGE,
    "InvalidClass": USAGE,
    "InvalidAttributes": USAGE,
    "InvalidRequest": USAGE,
    "NotMounted": NOT_RUNNING,
    "MonitoringUnavailable": NOT_RUNNING,
    "NoSuchWorkload": NO_SUCH_WORKLOAD,
    "NoSuchGroup": NO_SUCH_WORKLOAD,
    "NoSuchClaim": NO_SUCH_WORKLOAD,
    "NoSuchProcess": NO_SUCH_WORKLOAD,
    "NoSuchCgroup": NO_SUCH_WORKLOAD,
    "RmidsExhausted": NO_RMID,
    "PermissionDenied": DENIED,
}


def exit_code(name: str) -> int:
    """Return resctrlctl's exit code for an error name, with or without the prefix of an interface; 1 if unknown."""
    return EXIT_CODES.get(name.removeprefix(VARLINK_PREFIX).removeprefix(DBUS_PREFIX), FAILURE)
