# SPDX-License-Identifier: Apache-2.0
"""Kinds of events, of values and of bandwidth counters. Clients import this module, so it imports little."""

from __future__ import annotations

import enum


class Kind(enum.StrEnum):
    """The meaning of the difference of two values."""

    GAUGE = "gauge"
    """The difference has no meaning."""
    CUMULATIVE = "cumulative"
    """The difference is the use between the two readings."""
    UNKNOWN = "unknown"
    """This version does not know the event."""


class Status(enum.StrEnum):
    """Whether a value is a number, or the reason why not. A value that is not a number is not 0."""

    OK = "ok"
    """The value is a number."""
    UNAVAILABLE = "unavailable"
    """The kernel wrote "Unavailable": it has no number now."""
    ERROR = "error"
    """The kernel wrote "Error" or a text that is not a number, or the file could not be read."""
    UNASSIGNED = "unassigned"
    """The kernel wrote "Unassigned": the group has no counter for this event."""


class Mode(enum.StrEnum):
    """The way in which RMIDs get bandwidth counters."""

    DEDICATED = "dedicated"
    """Each RMID has its own counter."""
    ASSIGNED = "assigned"
    """The kernel assigns counters to groups (_mbm_event_)."""
    REALLOCATED = "reallocated"
    """The processor takes counters from one RMID for another and resets them, so no total is exact."""
