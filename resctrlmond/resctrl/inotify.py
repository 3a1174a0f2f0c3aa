# SPDX-License-Identifier: Apache-2.0
"""Use inotify(7) through ctypes: Python has no module for it, and Debian's packages start threads."""

from __future__ import annotations

import ctypes
import os
import struct

import msgspec

# linux/inotify.h
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_UNMOUNT = 0x2000
IN_Q_OVERFLOW = 0x4000
IN_IGNORED = 0x8000
IN_ONLYDIR = 0x1000000
IN_ISDIR = 0x40000000
# struct inotify_event: wd, mask, cookie, len; then a name of len bytes, padded with NULs.
_EVENT = struct.Struct("iIII")
# Room for hundreds of events with the longest name.
_BUFFER = 1 << 16
# An event with a name of NAME_MAX bytes and its NUL (inotify(7)). read() stops before an event that does not fit.
_LARGEST = _EVENT.size + 256

_libc = ctypes.CDLL(None, use_errno=True)


class Event(msgspec.Struct, frozen=True):
    """An event: the watch, its mask, and the name in the watched directory ("" for the directory itself)."""

    wd: int
    mask: int
    name: str


class Inotify:
    """An inotify instance. ``fd`` is readable while there are events.

    ``is_drained``: the last ``read`` has returned all events until then. Raises OSError if the host gives no instance
    (fs.inotify.max_user_instances).
    """

    def __init__(self) -> None:
        self.fd = _called(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self.is_drained = False

    def add(self, path: str, mask: int) -> int:
        """Watch a directory and return the watch. An inode that is watched already keeps its watch.

        Raises OSError.
        """
        return _called(_libc.inotify_add_watch(self.fd, os.fsencode(path), mask | IN_ONLYDIR), path)

    def remove(self, wd: int) -> None:
        """End a watch, if it has not ended already."""
        _libc.inotify_rm_watch(self.fd, wd)

    def read(self) -> list[Event]:
        """Return the next events in order; [] if there are none."""
        self.is_drained = True
        try:
            data = os.read(self.fd, _BUFFER)
        except BlockingIOError:
            return []
        self.is_drained = len(data) <= _BUFFER - _LARGEST
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
