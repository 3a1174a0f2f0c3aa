# SPDX-License-Identifier: Apache-2.0
"""Points in time as the files and doors have them: RFC 3339 in UTC, to the microsecond."""

from __future__ import annotations

import functools
import time
from datetime import UTC, datetime

# A few for each workload that has ended; one that was forgotten is worked out anew.
_REMEMBERED = 16_384


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
    text = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    _on_the_steady_clock(text)
    return text


def seconds_since(text: str) -> float:
    """How long ago that point in time was, in seconds, at least 0; infinite for what is no time at all.

    What this process has stamped or asked about before goes by a clock that nobody sets and that counts while the
    machine is suspended: no step of the time of day makes it old or young.
    """
    then = _on_the_steady_clock(text)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - then


@functools.lru_cache(_REMEMBERED)
def _on_the_steady_clock(text: str) -> float:
    try:
        then = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:
        return float("-inf")
    # What seems to lie ahead was just now: the clock was set back since.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - max(0.0, (datetime.now(UTC) - then).total_seconds())
