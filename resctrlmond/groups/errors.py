# SPDX-License-Identifier: Apache-2.0
"""The errors of ownership: names that cannot be, groups that belong to somebody else."""

from __future__ import annotations

from resctrlmond.resctrl.errors import ResctrlError


class InvalidKey(ResctrlError):
    """The text can name no workload or member: empty, too long, reserved, or with a forbidden character."""


class InvalidClass(ResctrlError):
    """The text cannot be the name of a class (control group)."""


class InvalidAttributes(ResctrlError):
    """The attributes of a workload are too many, too long, or hold control or format characters."""


class LimitExceeded(ResctrlError):
    """What is to be remembered, of one workload or of all, would exceed a limit of the daemon."""


class AlreadyMonitored(ResctrlError):
    """The process is in another monitoring group already; a task has one RMID and cannot count for both."""


class ForeignGroup(ResctrlError):
    """The directory does not bear our mark (its group id): it is listed, never written to or removed."""


class InvalidRequest(ResctrlError):
    """The parameters contradict each other, or one of them is no value that it may have."""


class NoSuchClaim(ResctrlError):
    """The workload is not claimed by that owner."""


class NotWritten(ResctrlError):
    """A file of ours under /run cannot be written: it is full, read-only, or no longer there."""
