# SPDX-License-Identifier: Apache-2.0
"""Subscribe to all forks of the host (the kernel's process connector), for exact inheritance of groups."""

from __future__ import annotations

import socket
import struct
from typing import Self

from resctrlmond.sim.host import netlink
from resctrlmond.sim.kernel.tasks import Fork

_NETLINK_CONNECTOR = 11
_CN_IDX_PROC = _CN_VAL_PROC = 1  # linux/cn_proc.h
_PROC_CN_MCAST_LISTEN = 1
_PROC_EVENT_FORK = 1
_NLMSG_DONE = 3

_CONNECTOR_HEADER = struct.Struct("=IIIIHH")  # idx, val, sequence, ack, length, flags
_EVENT = struct.Struct("=IIQIIII")  # event, cpu, timestamp; for a fork: parent, its process, child, its process
_EVENT_OFFSET = netlink.HEADER.size + _CONNECTOR_HEADER.size
# In replies of older kernels, which have no number of their own.
_NO_CPU = 0xFFFFFFFF


class ForkEvents(netlink.Subscription):
    """A subscription to the process connector (drivers/connector/cn_proc.c).

    The event of a fork is in the queue before fork(2) returns. For a new process, it names the thread that forked it
    or, after CLONE_PARENT, the parent of that thread.

    The kernel numbers the messages of each CPU without gaps. It drops one without another sign if it has no memory
    for it at once (GFP_NOWAIT).
    """

    def __init__(self, messages: socket.socket) -> None:
        super().__init__(messages)
        # CPU -> the number of its last message.
        self._last: dict[int, int] = {}

    @classmethod
    def open(cls) -> Self | None:
        """Subscribe. Return None if the kernel refuses: without CAP_NET_ADMIN, or not in the host's namespace."""
        return cls._open(_NETLINK_CONNECTOR, _CN_IDX_PROC, cls._listen)

    @staticmethod
    def _listen(events: socket.socket) -> None:
        listen = struct.pack("=I", _PROC_CN_MCAST_LISTEN)
        message = _CONNECTOR_HEADER.pack(_CN_IDX_PROC, _CN_VAL_PROC, 0, 0, len(listen), 0) + listen
        events.send(netlink.HEADER.pack(netlink.HEADER.size + len(message), _NLMSG_DONE, 0, 0, 0) + message)

    def drain(self) -> list[Fork]:
        """Return the forks since the last call, in order."""
        forks: list[Fork] = []
        for message in self._received():
            if len(message) >= _EVENT_OFFSET + _EVENT.size:
                what, cpu, _, parent, _, child, tgid = _EVENT.unpack_from(message, _EVENT_OFFSET)
                self._check_number(cpu, _CONNECTOR_HEADER.unpack_from(message, netlink.HEADER.size)[2])
                if what == _PROC_EVENT_FORK:
                    forks.append(Fork(parent, child, tgid, cpu))
        return forks

    def _check_number(self, cpu: int, number: int) -> None:
        """Record that messages were lost if the number does not follow that of the last message of the CPU."""
        if cpu == _NO_CPU:
            return
        if (last := self._last.get(cpu)) is not None and number != (last + 1) & 0xFFFFFFFF:
            self.has_missed = True
        self._last[cpu] = number
