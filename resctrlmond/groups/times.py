# SPDX-License-Identifier: Apache-2.0
"""Points in time as the files and doors have them: RFC 3339 in UTC, to the microsecond."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> str:
    """The time now, such as ``2026-11-21T11:16:06.123456Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_since(text: str) -> float:
    """How long ago that point in time was, in seconds; infinite for what is no time at all.

    Negative where the clock was set back since.
    """
    try:
        then = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:
        return float("inf")
    return (datetime.now(UTC) - then).total_seconds()
