# SPDX-License-Identifier: Apache-2.0
"""Subscribe to all forks of the host (the kernel's process connector), for exact inheritance of groups."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Self

from resctrlmond.sim.kernel.tasks import Fork

_NETLINK_CONNECTOR = 11
_CN_IDX_PROC = _CN_VAL_PROC = 1  # linux/cn_proc.h
_PROC_CN_MCAST_LISTEN = 1
_PROC_EVENT_FORK = 1
_NLMSG_DONE = 3
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 64 << 20

_NETLINK_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_CONNECTOR_HEADER = struct.Struct("=IIIIHH")  # idx, val, sequence, ack, length, flags
_EVENT = struct.Struct("=IIQIIII")  # event, cpu, timestamp; for a fork: parent, its process, child, its process
_EVENT_OFFSET = _NETLINK_HEADER.size + _CONNECTOR_HEADER.size


def numbers_are_the_hosts() -> bool:
    """Whether the kernel's thread numbers are valid here: only in the host's PID namespace (PROC_PID_INIT_INO)."""
    return os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC


class ForkEvents:
    """A subscription to the process connector (drivers/connector/cn_proc.c).

    The event of a fork is in the queue before fork(2) returns. For a new process, it names the thread that forked it
    or, after CLONE_PARENT, the parent of that thread. Events are lost while the queue of 64 MiB is full;
    ``has_missed`` states that some were.
    """

    def __init__(self, events: socket.socket) -> None:
        self._events = events
        self.has_missed = False

    @classmethod
    def open(cls) -> Self | None:
        """Subscribe. Return None if the kernel refuses: without CAP_NET_ADMIN, or not in the host's namespace."""
        if not numbers_are_the_hosts():
            return None
        try:
            events = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_CONNECTOR)
        except OSError:
            return None
        try:
            events.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
            events.bind((0, _CN_IDX_PROC))
            listen = struct.pack("=I", _PROC_CN_MCAST_LISTEN)
            message = _CONNECTOR_HEADER.pack(_CN_IDX_PROC, _CN_VAL_PROC, 0, 0, len(listen), 0) + listen
            events.send(_NETLINK_HEADER.pack(_NETLINK_HEADER.size + len(message), _NLMSG_DONE, 0, 0, 0) + message)
            events.setblocking(False)
        except OSError:
            events.close()
            return None
        return cls(events)

    def drain(self) -> list[Fork]:
        """Return the forks since the last call, in order."""
        forks: list[Fork] = []
        while True:
            try:
                message, (sender, _groups) = self._events.recvfrom(4096)
            except BlockingIOError:
                return forks
            except OSError as failure:
                if failure.errno != errno.ENOBUFS:  # ENOBUFS reports once that events were lost
                    raise
                self.has_missed = True
                continue
            if sender == 0 and len(message) >= _EVENT_OFFSET + _EVENT.size:
                what, cpu, _, parent, _, child, tgid = _EVENT.unpack_from(message, _EVENT_OFFSET)
                if what == _PROC_EVENT_FORK:
                    forks.append(Fork(parent, child, tgid, cpu))

    def close(self) -> None:
        """End the subscription."""
        self._events.close()
