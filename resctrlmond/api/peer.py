# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a unix socket, as the kernel says."""

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

# Python's getsockopt() reads no more; 256 groups of 4 bytes.
_GROUPS_SIZE = 1024


class Presence:
    """Whether the other end of a connection still waits for its answer. Asked from any thread.

    It does while its process lives (by the pidfd) and has the connection open. So whatever it holds back until the
    answer comes, such as a container, is still held back at that moment. An end of file alone says nothing: a peer
    that sends no more calls may read on.
    """

    def __init__(self, connection: socket.socket | None = None, pidfd: int = -1) -> None:
        """Without a ``connection`` nobody waits."""
        # A descriptor that was closed may be another one's by now: nothing is asked after close().
        self._guard = threading.Lock()
        self._ends: select.poll | None = None
        if connection is not None:
            self._ends = select.poll()
            # POLLHUP, which comes unasked: the peer has closed it, or shut both directions (unix_poll()).
            self._ends.register(connection, 0)
            if pidfd >= 0:
                self._ends.register(pidfd, select.POLLIN)

    def waits(self) -> bool:
        """Whether it waits now."""
        with self._guard:
            return self._ends is not None and not self._ends.poll(0)

    def close(self) -> None:
        """To be called before one of the descriptors is closed: from here on nobody waits."""
        with self._guard:
            self._ends = None


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, with its credentials at that moment.

    ``pid`` may name another process by now. ``pidfd`` never does (-1: the kernel is older than 6.5, or the
    process is gone); it belongs to the connection and is closed with it: who needs it longer duplicates it.
    Only a trusted peer has one. ``groups`` are the supplementary ones; a process with more than 256 of them counts as
    having none.
    ``pid_namespaces`` is as in ``access.Caller``. ``descriptors`` came with the message that is being answered.
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
        """The peer of a connected unix socket. Raises OSError where the kernel does not tell its credentials."""
        pid, uid, gid = credentials(connection)
        if not is_trusted(uid):
            # A few system calls less for each connection of a flood. Only verbs that change something need the rest.
            return cls(pid, uid, gid, _groups(connection), presence=Presence(connection))
        pidfd = _pidfd(connection)
        namespaces = _pid_namespaces(pid, pidfd)
        return cls(pid, uid, gid, _groups(connection), pidfd, Presence(connection, pidfd), namespaces)

    def unheard(self) -> Peer:
        """The peer of a call to which it wants no answer."""
        return replace(self, presence=Presence())

    def close(self) -> None:
        """Close the pidfd. The peer is not to be used afterwards."""
        self.presence.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """The pid, uid and gid of the peer. Raises OSError where the kernel does not tell them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("iII", raw)
    return pid, uid, gid


def is_trusted(uid: int) -> bool:
    """Whether the user is root or the server's own: others may only read."""
    return uid in (0, os.geteuid())


def _groups(connection: socket.socket) -> frozenset[int]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_SIZE)
    except OSError:
        # ERANGE: too many. Fewer groups never mean more rights.
        return frozenset()
    return frozenset(struct.unpack(f"{len(raw) // 4}I", raw))


def _pid_namespaces(pid: int, pidfd: int) -> int:
    # Looked for at once: a caller that has ended has no numbers any more.
    if pidfd >= 0:
        try:
            return len(processes.pidfd_numbers(pidfd))
        except ValueError:
            return 0  # EMFILE: not known
    try:
        return processes.pid_namespaces(pid)
    except NotRead:
        return 0


def _pidfd(connection: socket.socket) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1
