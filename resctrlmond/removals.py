# SPDX-License-Identifier: Apache-2.0
"""Tells at once which directories are removed, by inotify(7) on their parents.

By ctypes: Python has no inotify of its own, and what Debian packages of it waits in loops and threads of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

# linux/inotify.h, and inotify_init1's flags, which are those of open(2).
_IN_DELETE = 0x200
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x1000000
# struct inotify_event: wd, mask, cookie, len; a name of len bytes follows, filled up with NULs.
_EVENT = struct.Struct("iIII")
# Of an event with the longest name there is room for hundreds.
_BUFFER = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Removals:
    """``removed`` is called with a watched path once its directory may be gone: at its removal, and where events were
    missed.

    ``fd`` is readable when ``read`` has something to tell. Raises OSError where the host gives no inotify
    (fs.inotify.max_user_instances).
    """

    def __init__(self, removed: Callable[[str], None]) -> None:
        self._removed = removed
        self.fd = _called(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._parents: dict[str, _Parent] = {}
        self._by_wd: dict[int, _Parent] = {}

    def watch(self, path: str) -> None:
        """Watch a directory, whether it is there or not. Raises OSError where the parent cannot be watched.

        Once more, where the parent may have been made anew: not every kernel tells that a control group is gone with
        the watch on it (Linux 7.3 does, 6.18 does not).
        """
        above, name = os.path.split(path)
        # The same one for a directory that is watched already (inotify_add_watch(2)).
        wd = _called(_libc.inotify_add_watch(self.fd, os.fsencode(above), _IN_DELETE | _IN_ONLYDIR), above)
        parent = self._parents.get(above)
        if parent is None:
            parent = self._parents[above] = self._by_wd[wd] = _Parent(above, wd)
        elif parent.wd != wd:
            before, parent = parent, _Parent(above, wd, parent.names)
            self._end(before)
            self._parents[above] = self._by_wd[wd] = parent
            for other in parent.paths:
                self._removed(other)  # with the one before; what was told of that is read no more
        parent.names.add(name)

    def forget(self, path: str) -> None:
        """Watch it no more; its parent neither, if that was the last one there."""
        above, name = os.path.split(path)
        parent = self._parents.get(above)
        if parent is None:
            return  # it could not be watched, or is gone
        parent.names.discard(name)
        if not parent.names:
            self._end(parent)

    def read(self) -> None:
        """Tell what was removed since the last time."""
        with contextlib.suppress(BlockingIOError):
            events = os.read(self.fd, _BUFFER)
            at = 0
            while at < len(events):
                wd, mask, _, length = _EVENT.unpack_from(events, at)
                name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                for path in self._gone(wd, mask, os.fsdecode(name)):
                    self._removed(path)

    def close(self) -> None:
        """Let go of the descriptor, and with it of every watch."""
        os.close(self.fd)

    def _gone(self, wd: int, mask: int, name: str) -> list[str]:
        """The watched paths that an event is about."""
        if mask & _IN_Q_OVERFLOW:
            return [path for parent in self._by_wd.values() for path in parent.paths]
        parent = self._by_wd.get(wd)
        if parent is None:
            return []  # of a watch that has ended since
        if mask & _IN_IGNORED:
            # The parent is gone, with everything in it. One that comes in its place is another directory.
            self._drop(parent)
            return parent.paths
        return [os.path.join(parent.path, name)] if name in parent.names else []

    def _end(self, parent: _Parent) -> None:
        self._drop(parent)
        _libc.inotify_rm_watch(self.fd, parent.wd)

    def _drop(self, parent: _Parent) -> None:
        del self._parents[parent.path]
        del self._by_wd[parent.wd]


@dataclass
class _Parent:
    path: str
    wd: int
    names: set[str] = field(default_factory=set)

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.path, name) for name in sorted(self.names)]


def _called(result: int, path: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
