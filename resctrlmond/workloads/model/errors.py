# SPDX-License-Identifier: Apache-2.0
"""Errors of requests on workloads: invalid names, exceeded limits, groups of other owners, files not written."""

from __future__ import annotations

from resctrlmond.resctrl.errors import NoSuchGroup, ResctrlError


class NoSuchWorkload(NoSuchGroup):
    """There is no workload with the key, or its run has ended. It has no group either."""


class InvalidKey(ResctrlError):
    """The text is not a valid key or member id: it is empty, too long, reserved, or has a forbidden character."""


class InvalidClass(ResctrlError):
    """The text is not a valid name of a class (control group)."""


class InvalidAttributes(ResctrlError):
    """The attributes of a workload are too many, too long, or hold control or format characters."""


class LimitExceeded(ResctrlError):
    """The request would exceed a limit on the data that the daemon keeps, for one workload or for all."""


class AlreadyMonitored(ResctrlError):
    """The process is in another monitoring group already. A task has one RMID, so it cannot count in both groups."""


class ForeignGroup(ResctrlError):
    """The directory does not have the daemon's mark (its group id), so the daemon does not write to or remove it."""


class InvalidRequest(ResctrlError):
    """The parameters contradict each other, or a parameter has an invalid value."""


class NoSuchClaim(ResctrlError):
    """That owner has no claim on the workload."""


class NotWritten(ResctrlError):
    """A file of the daemon under /run cannot be written: /run is full or read-only, or the folder was removed."""


class NotWatched(ResctrlError):
    """The profile of the container or pod excludes it from a group, or the configuration does not select the unit."""


class TooSlow(ResctrlError):
    """The client of a stream did not read its replies in time."""
