# SPDX-License-Identifier: Apache-2.0
"""The table of all errors: their names over varlink and D-Bus, descriptions and fields."""

from __future__ import annotations

import errno
import re
from typing import Any, cast

import msgspec

from resctrlmond.api.exit_codes import DBUS_PREFIX, VARLINK_PREFIX, exit_code
from resctrlmond.api.oci_state import InvalidOciState
from resctrlmond.api.types import ErrorParameters, ExhaustedParameters
from resctrlmond.resctrl.cgroups import NoSuchCgroup
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    GroupExists,
    KernelRefused,
    MonitoringUnavailable,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    NotRead,
    OutOfResources,
    PermissionDenied,
    ProcessChanged,
    ResctrlError,
    RmidsExhausted,
    printable,
)
from resctrlmond.workloads.model.errors import (
    AlreadyMonitored,
    ForeignGroup,
    InvalidAttributes,
    InvalidClass,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    NoSuchClaim,
    NoSuchWorkload,
    NotWatched,
    NotWritten,
    TooSlow,
)

# The messages of msgspec end in "... - at `$.keys[0].name`" or "... field `pid`". The path is searched first: if a
# nested field is missing, the invalid parameter is the one at the top.
_PATH = re.compile(r" - at `\$\.([^.\[`]+)[^`]*`\Z")
_FIELD = re.compile(r" field `(.*)`\Z", re.DOTALL)


class ErrorName(msgspec.Struct, frozen=True):
    """An error: its name without the prefix of an interface, its meaning and its fields."""

    name: str
    description: str
    parameters: type[ErrorParameters] = ErrorParameters

    @property
    def exit_code(self) -> int:
        """Return resctrlctl's exit code."""
        return exit_code(self.name)

    @property
    def varlink(self) -> str:
        """Return the name over varlink."""
        return VARLINK_PREFIX + self.name

    @property
    def dbus(self) -> str:
        """Return the name over D-Bus."""
        return DBUS_PREFIX + self.name


# To add an error, add a row here, and its exit code to exit_codes.py. The name of the error is the name of the class.
ERRORS: dict[type[ResctrlError], ErrorName] = {
    NoSuchWorkload: ErrorName(
        "NoSuchWorkload",
        "There is no such workload, or it has ended (*Get*, *Read* and *Release* answer until _snapshot_ttl_ is "
        "over).",
    ),
    NoSuchGroup: ErrorName(
        "NoSuchGroup",
        "There is no such monitoring group, or it was removed during the call.",
    ),
    InvalidKey: ErrorName(
        "InvalidKey",
        "The text is not a valid key or member id.",
    ),
    InvalidClass: ErrorName(
        "InvalidClass",
        "The text is not a valid name of a class.",
    ),
    InvalidAttributes: ErrorName(
        "InvalidAttributes",
        "There are too many attributes, or an attribute is too long or contains control or format characters (such "
        "as U+202E). A workload has at most 64 attributes, which take at most 64 KiB together; a name has at most "
        "128 characters, a value at most 4096.",
    ),
    InvalidOciState: ErrorName(
        "InvalidOciState",
        "The text that the hook sent is not the state of an OCI container.",
    ),
    InvalidRequest: ErrorName(
        "InvalidRequest",
        "The parameters contradict each other, or the value of one of them is not valid.",
    ),
    LimitExceeded: ErrorName(
        "LimitExceeded",
        "A limit was reached. A workload has at most 64 claims, 1,000 living members and a record of 1 MiB. All "
        "records together take at most 32 MiB, or 48 MiB for requests of the OCI hook; those of ended workloads "
        "count until _snapshot_ttl_ is over. A list in one reply takes at most 2 MiB.",
    ),
    NoSuchClass: ErrorName(
        "NoSuchClass",
        "The class does not exist. *resctrlmond* never creates one.",
    ),
    NoSuchClaim: ErrorName(
        "NoSuchClaim",
        "The workload exists, but the owner has no claim on it.",
    ),
    ClassMismatch: ErrorName(
        "ClassMismatch",
        "The task is in another class than the group. A monitoring group accepts only tasks of its own class.",
    ),
    AlreadyMonitored: ErrorName(
        "AlreadyMonitored",
        "The process is in another monitoring group. A task can be in one monitoring group only.",
    ),
    RmidsExhausted: ErrorName(
        "RmidsExhausted",
        "No RMID is free.",
        parameters=ExhaustedParameters,
    ),
    NoSuchProcess: ErrorName(
        "NoSuchProcess",
        "The process does not exist.",
    ),
    NoSuchCgroup: ErrorName(
        "NoSuchCgroup",
        "There is no such control group.",
    ),
    ProcessChanged: ErrorName(
        "ProcessChanged",
        "The process ended while it was being moved, and its id may belong to another process now.",
    ),
    NotMounted: ErrorName(
        "NotMounted",
        "resctrl is not mounted.",
    ),
    MonitoringUnavailable: ErrorName(
        "MonitoringUnavailable",
        "resctrl is mounted but does not monitor.",
    ),
    GroupExists: ErrorName(
        "GroupExists",
        "A directory with that name exists already.",
    ),
    ForeignGroup: ErrorName(
        "ForeignGroup",
        "A monitoring group with that name belongs to another program. It is not changed.",
    ),
    PermissionDenied: ErrorName(
        "PermissionDenied",
        "The caller may not do this, or the process cannot be monitored for any caller: process 1, a kernel "
        "thread or *resctrlmond* itself.",
    ),
    KernelRefused: ErrorName(
        "KernelRefused",
        "The kernel refused the operation; *status* has its explanation.",
    ),
    OutOfResources: ErrorName(
        "OutOfResources",
        "*resctrlmond* or the machine lacks file descriptors or memory. A later call may succeed.",
    ),
    NotWritten: ErrorName(
        "NotWritten",
        "A file below _/run/resctrlmond_ cannot be written. Nothing was begun.",
    ),
    NotRead: ErrorName(
        "NotRead",
        "A file that the reply requires cannot be read: in _/proc_, in a control group, or below _/run/resctrlmond_.",
    ),
    NotWatched: ErrorName(
        "NotWatched",
        "The profile of the container or pod excludes it (*resctrlmond-profiles*(5)), or *units* in "
        "*resctrlmond.yaml*(5) does not select the unit: no group was created, and nothing is counted.",
    ),
    TooSlow: ErrorName(
        "TooSlow",
        "The client of *Watch* did not read in time. No change was lost for other clients.",
    ),
}
INTERNAL_ERROR = "InternalError"
INTERNAL_ERROR_DESCRIPTION = "A bug in *resctrlmond*. The error has no fields; the journal has the details."


def name_of(error: ResctrlError) -> ErrorName:
    """Return the row for the type of an error."""
    return ERRORS[type(error)]


def parameters(error: ResctrlError) -> dict[str, Any]:
    """Return the fields of an error reply as printable text, without empty ones."""
    limbo = {"in_limbo": error.in_limbo} if isinstance(error, RmidsExhausted) else {}
    fields = name_of(error).parameters(
        message=printable(error.message),
        path=printable(error.path) or None,
        errno=errno.errorcode.get(error.errno, str(error.errno)) if error.errno else None,
        status=printable(error.status) or None,
        remedy=printable(error.remedy) or None,
        **limbo,
    )
    return cast(dict[str, Any], msgspec.to_builtins(fields))


def parameter_at_fault(error: msgspec.ValidationError) -> str:
    """Return the name of the top-level parameter that a validation error is about."""
    text = str(error)
    found = _PATH.search(text) or _FIELD.search(text)
    return found[1] if found else "parameters"
