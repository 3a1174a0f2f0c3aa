# SPDX-License-Identifier: Apache-2.0
"""inotify(7), by ctypes: Python has none of its own, and Debian's packages of it wait in threads of their own."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass

# linux/inotify.h
IN_MODIFY = 0x2
IN_CLOSE_WRITE = 0x8
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_UNMOUNT = 0x2000
IN_Q_OVERFLOW = 0x4000
IN_IGNORED = 0x8000
IN_ONLYDIR = 0x1000000
IN_ISDIR = 0x40000000
# struct inotify_event: wd, mask, cookie, len; a name of len bytes follows, filled up with NULs.
_EVENT = struct.Struct("iIII")
# Of an event with the longest name there is room for hundreds.
_BUFFER = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Event:
    """One event: the watch, the bits of its mask, and the name in the watched directory ("" for that itself)."""

    wd: int
    mask: int
    name: str


class Inotify:
    """An inotify instance. ``fd`` is readable while there are events.

    Raises OSError if the host gives no instance (fs.inotify.max_user_instances).
    """

    def __init__(self) -> None:
        self.fd = _called(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def add(self, path: str, mask: int) -> int:
        """Watch the directory and return the watch: the same one for an inode that is watched already.

        Raises OSError.
        """
        return _called(_libc.inotify_add_watch(self.fd, os.fsencode(path), mask | IN_ONLYDIR), path)

    def remove(self, wd: int) -> None:
        """End a watch; one that has ended already is not an error."""
        _libc.inotify_rm_watch(self.fd, wd)

    def read(self) -> list[Event]:
        """Return the next events, in their order; [] if there are none."""
        try:
            data = os.read(self.fd, _BUFFER)
        except BlockingIOError:
            return []
        events = []
        at = 0
        while at < len(data):
            wd, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            events.append(Event(wd, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))))
            at += length
        return events

    def close(self) -> None:
        """Close the descriptor, and with it every watch."""
        os.close(self.fd)


def _called(result: int, path: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
