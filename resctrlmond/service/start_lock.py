# SPDX-License-Identifier: Apache-2.0
"""The lock that a daemon holds while it starts or stops, so that a hook can distinguish this from a hanging daemon.

This module imports little, because the daemon takes the lock before it loads other modules.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

# The hook has a copy of this suffix of the socket's path.
SUFFIX = ".starting"

# The first descriptor that systemd passes (sd_listen_fds(3)).
_FIRST_PASSED = 3
# FileDescriptorName= of the socket that hooks connect to.
_NAME = "varlink"


def path_for_passed_socket() -> str:
    """Return the path of the lock for the socket "varlink" that systemd passed to this process; "" if there is none.

    Callers wait only on a passed socket while the daemon does not run. Other sockets refuse connections at once.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return ""
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    if _NAME not in names:
        return ""
    try:
        # systemd passes the sockets of several units in any order.
        passed = socket.socket(fileno=os.dup(_FIRST_PASSED + names.index(_NAME)))
    except OSError:
        return ""
    with passed:
        path = passed.getsockname() if passed.family == socket.AF_UNIX else ""
    return f"{path}{SUFFIX}" if path and isinstance(path, str) else ""


class StartLock:
    """A record lock (lockf(3)) on the file ``path``; without a path it does nothing. Can be used from any thread.

    The kernel releases a record lock when the process ends, for any reason.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1
        self._guard = threading.Lock()
        self._timer: threading.Timer | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this object holds the lock."""
        return self._file >= 0

    def take(self) -> None:
        """Take the lock until ``release``. Errors are ignored: without the lock, hooks only wait less."""
        if not self._path or self.is_held:
            return
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self._path, flags, 0o600)
            try:
                os.lockf(file, os.F_TLOCK, 0)
            except OSError:
                os.close(file)
                raise
            self._file = file

    def release_after(self, seconds: float) -> None:
        """Release the lock after ``seconds``, in case the caller hangs. A further call restarts the time."""
        with self._guard:
            if not self.is_held:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(seconds, self.release)
            self._timer.daemon = True
            self._timer.start()

    def release(self) -> None:
        """Release the lock if it is held."""
        with self._guard:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self.is_held:
                os.close(self._file)
                self._file = -1
