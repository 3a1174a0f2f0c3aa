# SPDX-License-Identifier: Apache-2.0
"""Points in time as the files and doors have them: RFC 3339 in UTC, to the microsecond."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def boot_ns() -> int:
    """The time now by the clock that nobody sets and that counts while the machine is suspended, in ns since boot.

    What is decided by time is decided by this one. It says nothing in another boot, and neither does a record.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def seconds_since_ns(then: int) -> float:
    """How long ago that time of ``boot_ns()`` was, in seconds; infinite for one that lies ahead, of another boot."""
    passed = boot_ns() - then
    return passed / 1e9 if passed >= 0 else float("inf")


def utc_now() -> str:
    """The time now, such as ``2026-11-21T11:16:06.123456Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def boot_ns_at(text: str) -> int | None:
    """The time of ``boot_ns()`` at that time of day, by how the clock is set now; None for what is not a time.

    A time that lies ahead was just now: the clock was set back since.
    """
    try:
        then = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return boot_ns() - max(0, int((datetime.now(UTC) - then).total_seconds() * 1e9))
