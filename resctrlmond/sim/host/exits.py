# SPDX-License-Identifier: Apache-2.0
"""Subscribe to all exits of the host with the CPU time of the thread, as the kernel's taskstats report it."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Self

from resctrlmond.sim.host import netlink
from resctrlmond.sim.kernel.tasks import Exit

_NETLINK_GENERIC = 16
_NLMSG_ERROR = 2
_NLM_F_REQUEST, _NLM_F_ACK = 1, 4
_GENL_ID_CTRL, _CTRL_CMD_GETFAMILY, _CTRL_ATTR_FAMILY_ID, _CTRL_ATTR_FAMILY_NAME = 0x10, 3, 1, 2  # linux/genetlink.h
# linux/taskstats.h
_TASKSTATS_CMD_GET, _TASKSTATS_CMD_ATTR_REGISTER_CPUMASK = 1, 3
_TASKSTATS_TYPE_PID, _TASKSTATS_TYPE_STATS, _TASKSTATS_TYPE_AGGR_PID = 1, 3, 4
_CPU_RUN_VIRTUAL_TOTAL = 72  # its offset in struct taskstats: the scheduler's count, in nanoseconds
_BROKEN_LAYOUT = 15  # the only version with other fields before it

_GENERIC_HEADER = struct.Struct("=BBH")  # command, version, reserved
_ATTRIBUTE_HEADER = struct.Struct("=HH")  # length, type
_PAYLOAD_OFFSET = netlink.HEADER.size + _GENERIC_HEADER.size


def _message(family: int, flags: int, command: int, attribute: int, value: bytes) -> bytes:
    """Return a generic netlink request with one attribute, which ends in a NUL."""
    value += b"\0"
    body = _GENERIC_HEADER.pack(command, 1, 0) + _ATTRIBUTE_HEADER.pack(
        _ATTRIBUTE_HEADER.size + len(value), attribute
    )
    body += value + b"\0" * (-len(value) % 4)
    return netlink.HEADER.pack(netlink.HEADER.size + len(body), family, flags, 0, 0) + body


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the netlink attributes in ``data`` as (type, value), up to the first that is truncated or malformed."""
    while len(data) >= _ATTRIBUTE_HEADER.size:
        length, kind = _ATTRIBUTE_HEADER.unpack_from(data)
        if not _ATTRIBUTE_HEADER.size <= length <= len(data):
            return
        yield kind & 0x3FFF, data[_ATTRIBUTE_HEADER.size : length]
        data = data[length + -length % 4 :]


def parse_exit(message: bytes) -> Exit | None:
    """Decode the exit of a thread in a TASKSTATS_CMD_NEW message; None for other messages or an unknown layout."""
    for kind, value in attributes(message[_PAYLOAD_OFFSET:]):
        if kind != _TASKSTATS_TYPE_AGGR_PID:
            continue
        inner = dict(attributes(value))
        number, stats = inner.get(_TASKSTATS_TYPE_PID, b""), inner.get(_TASKSTATS_TYPE_STATS, b"")
        if len(number) != 4 or len(stats) < _CPU_RUN_VIRTUAL_TOTAL + 8:
            return None
        (version,) = struct.unpack_from("=H", stats)
        if version == _BROKEN_LAYOUT:
            return None
        (cpu_ns,) = struct.unpack_from("=Q", stats, _CPU_RUN_VIRTUAL_TOTAL)
        return Exit(int.from_bytes(number, sys.byteorder), cpu_ns)
    return None


class ExitRecords(netlink.Subscription):
    """A subscription to the exits on all CPUs (kernel/taskstats.c).

    The record of an exit is in the queue before any process can wait for the thread. It does not have the work of the
    kernel after that, such as freeing its memory.
    """

    @classmethod
    def open(cls) -> Self | None:
        """Subscribe. Return None if the kernel refuses: without CAP_NET_ADMIN, or not in the host's namespace."""
        return cls._open(_NETLINK_GENERIC, 0, cls._register)

    @staticmethod
    def _register(records: socket.socket) -> None:
        """Request the number of the family TASKSTATS, then the exits on every possible CPU."""
        records.settimeout(5)
        ask = _message(_GENL_ID_CTRL, _NLM_F_REQUEST, _CTRL_CMD_GETFAMILY, _CTRL_ATTR_FAMILY_NAME, b"TASKSTATS")
        records.send(ask)
        answer = records.recv(netlink.MAX_BYTES)
        family = dict(attributes(answer[_PAYLOAD_OFFSET:])).get(_CTRL_ATTR_FAMILY_ID)
        if family is None or netlink.HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        (number,) = struct.unpack("=H", family)
        cpus = f"0-{os.sysconf('SC_NPROCESSORS_CONF') - 1}".encode()
        flags = _NLM_F_REQUEST | _NLM_F_ACK
        records.send(_message(number, flags, _TASKSTATS_CMD_GET, _TASKSTATS_CMD_ATTR_REGISTER_CPUMASK, cpus))
        while True:
            answer = records.recv(netlink.MAX_BYTES)
            if netlink.HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:  # success is reported as error 0
                (code,) = struct.unpack_from("=i", answer, netlink.HEADER.size)
                if code:
                    raise OSError(-code, os.strerror(-code))
                return

    def drain(self) -> list[Exit]:
        """Return the exits since the last call, in order."""
        return [found for message in self._received() if (found := parse_exit(message))]
