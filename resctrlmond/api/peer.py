# SPDX-License-Identifier: Apache-2.0
"""Get the credentials of the peer of a unix socket from the kernel, and detect whether the peer still waits."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from dataclasses import dataclass, field, replace

from resctrlmond.resctrl import processes
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.processes import Descriptor

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

    def __init__(self, connection: socket.socket | None = None, pidfd: int = -1) -> None:
        """Without a ``connection``, no peer waits."""
        # After close(), the numbers of the descriptors may belong to other files.
        self._guard = threading.Lock()
        self._poll: select.poll | None = None
        if connection is not None:
            self._poll = select.poll()
            # poll(2) always reports POLLHUP: the peer has closed the connection or shut down both directions.
            self._poll.register(connection, 0)
            if pidfd >= 0:
                self._poll.register(pidfd, select.POLLIN)

    def waits(self) -> bool:
        """Return whether the peer waits now."""
        with self._guard:
            return self._poll is not None and not self._poll.poll(0)

    def close(self) -> None:
        """Return False from ``waits`` from now on. Call this before one of the descriptors is closed."""
        with self._guard:
            self._poll = None


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, with its credentials at that moment.

    ``pid`` may belong to another process by now. ``pidfd`` always refers to the same process (-1: the kernel is older
    than 6.5, the process has ended, or the peer is not trusted). It is closed with the connection, so a user that
    needs it longer must duplicate it. ``groups`` are the supplementary groups; none if there are more than 256.
    ``pid_namespaces`` has the meaning of ``access.Caller``. ``descriptors`` came with the current message.
    """

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    pidfd: int = -1
    presence: Presence = field(default_factory=Presence, compare=False)
    pid_namespaces: int = 0
    descriptors: tuple[Descriptor, ...] = ()

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Return the peer of a connected unix socket. Raises OSError if its credentials cannot be read."""
        pid, uid, gid = credentials(connection)
        if not is_trusted(uid):
            # Saves system calls in a flood of connections. Only verbs that change something need the other fields.
            return cls(pid, uid, gid, _groups(connection), presence=Presence(connection))
        pidfd = _pidfd(connection)
        namespaces = _pid_namespaces(pid, pidfd)
        return cls(pid, uid, gid, _groups(connection), pidfd, Presence(connection, pidfd), namespaces)

    def without_presence(self) -> Peer:
        """Return the peer of a oneway call, which does not wait for a reply."""
        return replace(self, presence=Presence())

    def close(self) -> None:
        """Close the pidfd. The peer must not be used afterwards."""
        self.presence.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return the pid, uid and gid of the peer. Raises OSError if they cannot be read."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("iII", raw)
    return pid, uid, gid


def is_trusted(uid: int) -> bool:
    """Return whether the user is root or the server's own user. Other users may only read."""
    return uid in (0, os.geteuid())


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
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1
