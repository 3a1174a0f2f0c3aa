# SPDX-License-Identifier: Apache-2.0
"""Notify the service manager of the daemon's state (sd_notify(3)): ready, reloading, stopping, alive, status."""

from __future__ import annotations

import os
import time
from collections import deque

import sdnotify

# On a busy machine the imports alone can take longer than TimeoutStartSec=, which limits the time for which a start
# that hangs delays the container runtimes at boot.
EXTENSION_S = 60
# The manager reads 4096 bytes (NOTIFY_BUFFER_MAX of systemd) and drops what is longer.
_MAX_STATUS = 1024
# The most messages that are kept for a manager that does not read; the oldest is dropped first.
_MAX_WAITING = 64


class Notify:
    """Sends messages of sd_notify(3) in order, without waiting. Does nothing without $NOTIFY_SOCKET.

    A message that the socket does not accept at once is sent before the next message, at the latest before the next
    ``watchdog()``, so that READY=1 is not lost.
    """

    def __init__(self) -> None:
        self._waiting: deque[str] = deque(maxlen=_MAX_WAITING)
        self._notifier: sdnotify.SystemdNotifier | None = None
        if not os.environ.get("NOTIFY_SOCKET"):
            return
        try:
            self._notifier = sdnotify.SystemdNotifier(debug=True)
        except OSError:
            # An outdated variable must not keep the daemon from running.
            return
        # The socket of sdnotify blocks: a busy manager would block the event loop.
        self._notifier.socket.setblocking(False)

    def ready(self, status: str = "") -> None:
        """Report that the daemon is ready, after the start or after ``reloading()``."""
        self._send("READY=1", *([_status(status)] if status else []))

    def status(self, text: str) -> None:
        """Set the status line. Characters outside ASCII become "?", because sdnotify supports only ASCII."""
        self._send(_status(text))

    def reloading(self) -> None:
        """Report a reload. Type=notify-reload requires the time in the same message."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the daemon stops."""
        self._send("STOPPING=1")

    def extend_start(self) -> None:
        """Extend the start time-out to EXTENSION_S from now on, whatever TimeoutStartSec= is."""
        self._send(f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1_000_000}")

    def watchdog(self) -> None:
        """Report that the daemon works. Call this every ``watchdog_interval_s()``."""
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
            # EAGAIN: the socket is full; ECONNREFUSED: the manager restarts. Retried with the next message.
            return


def watchdog_interval_s() -> float | None:
    """Return half of the watchdog time-out in seconds; None if the manager has no watchdog for this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        microseconds = int(os.environ.get("WATCHDOG_USEC", "0"))
    except ValueError:
        return None
    return microseconds / 2_000_000 if microseconds > 0 else None


def _status(text: str) -> str:
    """Return STATUS= on one line: a newline would begin another assignment."""
    line = " ".join(text.split())[:_MAX_STATUS]
    return "STATUS=" + "".join(letter if " " <= letter <= "~" else "?" for letter in line)
