# SPDX-License-Identifier: Apache-2.0
"""Get the credentials of the peer of a unix socket from the kernel, and detect whether the peer still waits."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading

from resctrlmond.api.access import Caller, is_privileged
from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import NotRead

# include/uapi/asm-generic/socket.h, which x86, Arm and RISC-V use; Python has no names for them.
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77

# The limit of Python's getsockopt(): 256 groups of 4 bytes.
_GROUPS_SIZE = 1024


class Presence:
    """Whether the peer of a connection still waits for its reply. Can be used from any thread.

    A peer waits while its process lives (pidfd) and has the connection open. A container that the peer keeps from
    running until the reply arrives has therefore not run yet. An end of file proves nothing: a peer that sends no
    more calls may still read.
    """

    def __init__(self, connection: socket.socket, pidfd: int = -1) -> None:
        """Own ``pidfd``, which is -1 if there is none."""
        # After close(), the numbers of the descriptors may belong to other files.
        self._guard = threading.Lock()
        self._pidfd = pidfd
        # None: closed.
        self._poll: select.poll | None = select.poll()
        # poll(2) always reports POLLHUP: the peer has closed the connection or shut down both directions.
        self._poll.register(connection, 0)
        if pidfd >= 0:
            self._poll.register(pidfd, select.POLLIN)

    def waits(self) -> bool:
        """Return whether the peer waits now."""
        with self._guard:
            return self._poll is not None and not self._poll.poll(0)

    def close(self) -> None:
        """Return False from ``waits`` from now on, and close the pidfd. Call this before the connection is closed."""
        with self._guard:
            self._poll = None
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1


def caller_of(
    connection: socket.socket, peer: tuple[int, int, int], *, holds_all: bool = False
) -> tuple[Caller, Presence]:
    """Return the process that connected, with its ``credentials`` at that moment, and its presence.

    ``holds_all``: hold the process of each user by a pidfd, not only those of root.

    A peer with more than 256 supplementary groups has only its primary group. Raises OSError if the credentials
    cannot be read.
    """
    pid, uid, gid = peer
    pidfd, namespaces = -1, 0
    # Other users may only read: saves system calls in a flood of connections.
    if holds_all or is_privileged(uid):
        pidfd = _pidfd(connection)
        namespaces = _pid_namespaces(pid, pidfd)
    presence = Presence(connection, pidfd)
    groups = _groups(connection) | {gid}
    is_held = pidfd >= 0
    return Caller(uid, groups, pid, waits=presence.waits, pid_namespaces=namespaces, is_held=is_held), presence


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return the pid, uid and gid of the peer. Raises OSError if they cannot be read."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("iII", raw)
    return pid, uid, gid


def _groups(connection: socket.socket) -> frozenset[int]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_SIZE)
    except OSError:
        # ERANGE: too many groups. Fewer groups never give more rights.
        return frozenset()
    return frozenset(struct.unpack(f"{len(raw) // 4}I", raw))


def _pid_namespaces(pid: int, pidfd: int) -> int:
    # Read at once: the numbers of a process cannot be read after its end.
    if pidfd >= 0:
        try:
            return len(processes.pidfd_numbers(pidfd))
        except ValueError:
            return 0  # EMFILE: unknown
    try:
        return processes.pid_namespaces(pid)
    except NotRead:
        return 0


def _pidfd(connection: socket.socket) -> int:
    # -1: Linux before 6.5, or the process has ended.
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1
