# SPDX-License-Identifier: Apache-2.0
"""The one table that gives every typed error its name at each door and its exit code."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from resctrlmond.api.oci import InvalidState
from resctrlmond.groups.errors import (
    AlreadyMonitored,
    ForeignGroup,
    InvalidAttributes,
    InvalidClass,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    NoSuchClaim,
    NotWritten,
)
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

VARLINK_PREFIX = "org.resctrlmon.Manager."
DBUS_PREFIX = "org.resctrlmon1.Error."

FAILURE = 1
NOT_RUNNING = 3
NO_SUCH_WORKLOAD = 4
NO_RMID = 5
DENIED = 77


@dataclass(frozen=True, slots=True)
class ErrorName:
    """An error's name without the door's prefix, and what resctrlctl exits with for it."""

    name: str
    exit_code: int = FAILURE

    @property
    def varlink(self) -> str:
        """The name at the varlink door."""
        return VARLINK_PREFIX + self.name

    @property
    def dbus(self) -> str:
        """The name at the D-Bus door."""
        return DBUS_PREFIX + self.name


# A new error is one row here, and one line in the IDL.
ERRORS: dict[type[ResctrlError], ErrorName] = {
    NoSuchGroup: ErrorName("NoSuchGroup", NO_SUCH_WORKLOAD),
    InvalidKey: ErrorName("InvalidKey"),
    InvalidClass: ErrorName("InvalidClass"),
    InvalidAttributes: ErrorName("InvalidAttributes"),
    InvalidState: ErrorName("InvalidState"),
    InvalidRequest: ErrorName("InvalidRequest"),
    LimitExceeded: ErrorName("LimitExceeded"),
    NoSuchClass: ErrorName("NoSuchClass"),
    NoSuchClaim: ErrorName("NoSuchClaim", NO_SUCH_WORKLOAD),
    ClassMismatch: ErrorName("ClassMismatch"),
    AlreadyMonitored: ErrorName("AlreadyMonitored"),
    RmidsExhausted: ErrorName("RmidsExhausted", NO_RMID),
    NoSuchProcess: ErrorName("NoSuchProcess", NO_SUCH_WORKLOAD),
    NoSuchCgroup: ErrorName("NoSuchCgroup", NO_SUCH_WORKLOAD),
    ProcessChanged: ErrorName("ProcessChanged"),
    NotMounted: ErrorName("NotMounted", NOT_RUNNING),
    MonitoringUnavailable: ErrorName("MonitoringUnavailable", NOT_RUNNING),
    GroupExists: ErrorName("GroupExists"),
    ForeignGroup: ErrorName("ForeignGroup"),
    PermissionDenied: ErrorName("PermissionDenied", DENIED),
    KernelRefused: ErrorName("KernelRefused"),
    OutOfResources: ErrorName("OutOfResources"),
    NotWritten: ErrorName("NotWritten"),
    NotRead: ErrorName("NotRead"),
}

_EXIT_CODES = {row.name: row.exit_code for row in ERRORS.values()} | {"InternalError": FAILURE}


def name_of(error: ResctrlError) -> ErrorName:
    """The row of an error's type."""
    return ERRORS[type(error)]


def exit_code(name: str) -> int:
    """What resctrlctl exits with for the error of that name, with or without a door's prefix; 1 for others."""
    return _EXIT_CODES.get(name.removeprefix(VARLINK_PREFIX).removeprefix(DBUS_PREFIX), FAILURE)


def parameters(error: ResctrlError) -> dict[str, Any]:
    """The fields of the error at the doors, as text for people; those that have nothing to say are left out."""
    fields: dict[str, Any] = {"message": printable(error.message)}
    if error.path:
        fields["path"] = printable(error.path)
    if error.errno:
        fields["errno"] = errno.errorcode.get(error.errno, str(error.errno))
    if error.status:
        fields["status"] = printable(error.status)
    if error.remedy:
        fields["remedy"] = printable(error.remedy)
    if isinstance(error, RmidsExhausted):
        fields["inLimbo"] = error.in_limbo
    return fields
