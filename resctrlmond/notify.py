# SPDX-License-Identifier: Apache-2.0
"""What the daemon tells the service manager: ready, reloading, stopping, alive, and one line of status."""

from __future__ import annotations

import os
import time
from collections import deque

import sdnotify

# On a starved machine the imports alone take longer than TimeoutStartSec=, which bounds the time for which a start
# that hangs delays the container runtimes at boot.
EXTENSION_S = 60
# The manager reads 4096 bytes (NOTIFY_BUFFER_MAX of systemd) and drops what is longer.
_MAX_STATUS = 1024
# More than that is kept for a manager that does not read at all; the oldest goes first.
_MAX_WAITING = 64


class Notify:
    """Messages of sd_notify(3), in their order and without ever waiting; silent without $NOTIFY_SOCKET.

    A message that the manager does not take at once is sent before the next one, at the latest with the next
    ``watchdog()``: no READY=1 is lost to a full socket.
    """

    def __init__(self) -> None:
        self._waiting: deque[str] = deque(maxlen=_MAX_WAITING)
        self._notifier: sdnotify.SystemdNotifier | None = None
        if not os.environ.get("NOTIFY_SOCKET"):
            return
        try:
            self._notifier = sdnotify.SystemdNotifier(debug=True)
        except OSError:
            # A stale variable must not keep the daemon from running.
            return
        # sdnotify's socket blocks: a manager that is busy would stop the event loop.
        self._notifier.socket.setblocking(False)

    def ready(self, status: str = "") -> None:
        """The daemon serves, for the first time or again after ``reloading()``."""
        self._send("READY=1", *([_status(status)] if status else []))

    def status(self, text: str) -> None:
        """One line for people; characters outside ASCII become "?", which is all that sdnotify can carry safely."""
        self._send(_status(text))

    def reloading(self) -> None:
        """The daemon reads its configuration anew: Type=notify-reload wants the time in the same message."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The daemon ends."""
        self._send("STOPPING=1")

    def extend_start(self) -> None:
        """The start makes progress, and may take EXTENSION_S from now on, whatever TimeoutStartSec= says."""
        self._send(f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1_000_000}")

    def watchdog(self) -> None:
        """The daemon lives; due every ``watchdog_interval_s()``."""
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        if self._notifier is None:
            return
        self._waiting.append("\n".join(assignments))
        try:
            while self._waiting:
                self._notifier.notify(self._waiting[0])
                self._waiting.popleft()
        except OSError:
            # Full (EAGAIN) or gone (ECONNREFUSED): both are tried again with the next message.
            return


def watchdog_interval_s() -> float | None:
    """Half of the time after which the manager takes us for dead, in seconds; None if it does not watch us."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        microseconds = int(os.environ.get("WATCHDOG_USEC", "0"))
    except ValueError:
        return None
    return microseconds / 2_000_000 if microseconds > 0 else None


def _status(text: str) -> str:
    """STATUS= on one line: a newline would begin another assignment."""
    line = " ".join(text.split())[:_MAX_STATUS]
    return "STATUS=" + "".join(letter if " " <= letter <= "~" else "?" for letter in line)
