# SPDX-License-Identifier: Apache-2.0
"""Detect the removal of directories by inotify(7) on their parents."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from resctrlmond.resctrl.inotify import IN_DELETE, IN_IGNORED, IN_Q_OVERFLOW, Event, Inotify


class Removals:
    """Calls ``removed`` with a watched path when its directory was removed, or if events were lost.

    ``fd`` is readable when ``read`` has events. Raises OSError if there is no free inotify instance
    (fs.inotify.max_user_instances).
    """

    def __init__(self, removed: Callable[[str], None]) -> None:
        self._removed = removed
        self._inotify = Inotify()
        self._parents: dict[str, _Parent] = {}
        self._by_wd: dict[int, _Parent] = {}

    @property
    def fd(self) -> int:
        """Return the descriptor to wait for."""
        return self._inotify.fd

    def watch(self, path: str) -> None:
        """Watch a directory, which need not exist. Raises OSError if its parent cannot be watched.

        Call this again if the parent may have been created again: not every kernel reports that a watched control
        group was removed (Linux 7.3 does, 6.18 does not).
        """
        above, name = os.path.split(path)
        # For a directory that is watched already, the same watch descriptor (inotify_add_watch(2)).
        wd = self._inotify.add(above, IN_DELETE)
        parent = self._parents.get(above)
        if parent is None:
            parent = self._parents[above] = self._by_wd[wd] = _Parent(above, wd)
        elif parent.wd != wd:
            before, parent = parent, _Parent(above, wd, parent.names)
            self._end(before)
            self._parents[above] = self._by_wd[wd] = parent
            for other in parent.paths:
                self._removed(other)  # its events of the former parent are not read any more
        parent.names.add(name)

    def forget(self, path: str) -> None:
        """Stop watching a directory, and its parent if no other directory in it is watched."""
        above, name = os.path.split(path)
        parent = self._parents.get(above)
        if parent is None:
            return  # it could not be watched, or was removed
        parent.names.discard(name)
        if not parent.names:
            self._end(parent)

    def read(self) -> None:
        """Read events, and call ``removed`` for each directory that was removed."""
        for event in self._inotify.read():
            for path in self._removed_paths(event):
                self._removed(path)

    def close(self) -> None:
        """Close the descriptor, which ends all watches."""
        self._inotify.close()

    def _removed_paths(self, event: Event) -> list[str]:
        """Return the watched paths that were removed according to an event."""
        if event.mask & IN_Q_OVERFLOW:
            return [path for parent in self._by_wd.values() for path in parent.paths]
        parent = self._by_wd.get(event.wd)
        if parent is None:
            return []  # the watch has ended since
        if event.mask & IN_IGNORED:
            # The parent was removed with everything in it. A new one at its path is another directory.
            self._drop(parent)
            return parent.paths
        return [os.path.join(parent.path, event.name)] if event.name in parent.names else []

    def _end(self, parent: _Parent) -> None:
        self._drop(parent)
        self._inotify.remove(parent.wd)

    def _drop(self, parent: _Parent) -> None:
        del self._parents[parent.path]
        del self._by_wd[parent.wd]


class _Parent(msgspec.Struct):
    path: str
    wd: int
    names: set[str] = msgspec.field(default_factory=set)

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.path, name) for name in sorted(self.names)]
