# SPDX-License-Identifier: Apache-2.0
"""Wait for a condition of another process or thread."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Much longer than any of the tests needs on a busy machine: only a failing test waits this long.
TIMEOUT_S = 60.0


def wait_until(
    condition: Callable[[], object],
    *,
    interval_s: float = 0.01,
    timeout_s: float = TIMEOUT_S,
    failure: str = "the condition does not hold",
) -> None:
    """Return as soon as the condition holds. Raise AssertionError with ``failure`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{failure} after {timeout_s:.0f} s"
        time.sleep(interval_s)


def wait_until_equal(read: Callable[[], T], expected: T, *, interval_s: float = 0.01) -> None:
    """Return as soon as ``read()`` returns the expected value. Raise AssertionError with its value after a minute."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: read() == expected, interval_s=interval_s)
    assert read() == expected


def wait_until_served(path: str | os.PathLike[str]) -> None:
    """Return as soon as a process listens at a path, which exists already between its bind() and its listen()."""

    def is_served() -> bool:
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            client.connect(os.fspath(path))
            return True
        return False

    wait_until(is_served, failure=f"no process listens at {os.fspath(path)}")
