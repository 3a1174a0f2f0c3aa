# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a unix socket, as the kernel says."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

# include/uapi/asm-generic/socket.h, which x86, Arm and RISC-V use; Python has no names for them.
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77

# Python's getsockopt() reads no more; 256 groups of 4 bytes.
_GROUPS_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, with its credentials at that moment.

    ``pid`` may name another process by now. ``pidfd`` never does (-1: the kernel is older than 6.5, or the
    process is gone); it belongs to the connection and is closed with it: who needs it longer duplicates it.
    ``groups`` are the supplementary ones; a process with more than 256 of them counts as having none.
    """

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    pidfd: int = -1

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """The peer of a connected unix socket. Raises OSError where the kernel does not tell its credentials."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("iII", raw)
        return cls(pid, uid, gid, _groups(connection), _pidfd(connection))

    def close(self) -> None:
        """Close the pidfd. The peer is not to be used afterwards."""
        if self.pidfd >= 0:
            os.close(self.pidfd)


def _groups(connection: socket.socket) -> frozenset[int]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_SIZE)
    except OSError:
        # ERANGE: too many. Fewer groups never mean more rights.
        return frozenset()
    return frozenset(struct.unpack(f"{len(raw) // 4}I", raw))


def _pidfd(connection: socket.socket) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1
