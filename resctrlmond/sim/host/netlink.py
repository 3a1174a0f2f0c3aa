# SPDX-License-Identifier: Apache-2.0
"""Subscribe to messages of the kernel over netlink."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Self

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 64 << 20
MAX_BYTES = 16 << 10


def numbers_are_the_hosts() -> bool:
    """Whether the kernel's thread numbers are valid here: only in the host's PID namespace (PROC_PID_INIT_INO)."""
    return os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC


class Subscription:
    """A netlink socket with a queue of 64 MiB.

    Messages are lost while the queue is full; ``has_missed`` states that some were.
    """

    def __init__(self, messages: socket.socket) -> None:
        self._messages = messages
        self.has_missed = False

    @classmethod
    def _open(cls, family: int, groups: int, request: Callable[[socket.socket], None]) -> Self | None:
        """Open a socket of the family, bind it to the multicast ``groups``, and call ``request`` to subscribe.

        Return None if the kernel refuses: without CAP_NET_ADMIN, or not in the host's PID namespace.
        """
        if not numbers_are_the_hosts():
            return None
        try:
            messages = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
        except OSError:
            return None
        try:
            messages.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
            messages.bind((0, groups))
            request(messages)
            messages.setblocking(False)
        except OSError:
            messages.close()
            return None
        return cls(messages)

    def _received(self) -> Iterator[bytes]:
        """Yield the messages of the kernel since the last call, in order."""
        while True:
            try:
                message, (sender, _groups) = self._messages.recvfrom(MAX_BYTES)
            except BlockingIOError:
                return
            except OSError as failure:
                if failure.errno != errno.ENOBUFS:  # ENOBUFS reports once that messages were lost
                    raise
                self.has_missed = True
                continue
            if sender == 0:
                yield message

    def close(self) -> None:
        """End the subscription."""
        self._messages.close()
