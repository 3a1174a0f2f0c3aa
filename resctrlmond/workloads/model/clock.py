# SPDX-License-Identifier: Apache-2.0
"""Times: RFC 3339 in UTC to the microsecond for files and interfaces, nanoseconds since boot for decisions."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def boot_ns() -> int:
    """Return the nanoseconds since boot (CLOCK_BOOTTIME), which include suspend and cannot be set.

    All durations and orders are computed from this clock. Its times are valid until the next boot, like the records.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def seconds_since_ns(then: int) -> float:
    """Return the seconds since a time of ``boot_ns()``; infinite if it is in the future, so from another boot."""
    passed = boot_ns() - then
    return passed / 1e9 if passed >= 0 else float("inf")


def utc_now() -> str:
    """Return the current time, such as ``2026-11-21T11:16:06.123456Z``."""
    # Not strftime(), which takes ten times as long.
    return datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def boot_ns_at(text: str) -> int | None:
    """Convert a time of ``utc_now()`` to one of ``boot_ns()``, by the current system clock; None if it is not a time.

    A time in the future becomes the current time, because the system clock was set back since.
    """
    try:
        then = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return boot_ns() - max(0, int((datetime.now(UTC) - then).total_seconds() * 1e9))
