# SPDX-License-Identifier: Apache-2.0
"""Tells at once which directories are removed, by inotify(7) on their parents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from resctrlmond.resctrl.inotify import IN_DELETE, IN_IGNORED, IN_Q_OVERFLOW, Event, Inotify


class Removals:
    """``removed`` is called with a watched path once its directory may be gone: at its removal, and where events were
    missed.

    ``fd`` is readable when ``read`` has something to tell. Raises OSError where the host gives no inotify
    (fs.inotify.max_user_instances).
    """

    def __init__(self, removed: Callable[[str], None]) -> None:
        self._removed = removed
        self._inotify = Inotify()
        self._parents: dict[str, _Parent] = {}
        self._by_wd: dict[int, _Parent] = {}

    @property
    def fd(self) -> int:
        """The descriptor to wait for."""
        return self._inotify.fd

    def watch(self, path: str) -> None:
        """Watch a directory, whether it is there or not. Raises OSError where the parent cannot be watched.

        Once more, where the parent may have been made anew: not every kernel tells that a control group is gone with
        the watch on it (Linux 7.3 does, 6.18 does not).
        """
        above, name = os.path.split(path)
        # The same one for a directory that is watched already (inotify_add_watch(2)).
        wd = self._inotify.add(above, IN_DELETE)
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
        for event in self._inotify.read():
            for path in self._gone(event):
                self._removed(path)

    def close(self) -> None:
        """Let go of the descriptor, and with it of every watch."""
        self._inotify.close()

    def _gone(self, event: Event) -> list[str]:
        """The watched paths that an event is about."""
        if event.mask & IN_Q_OVERFLOW:
            return [path for parent in self._by_wd.values() for path in parent.paths]
        parent = self._by_wd.get(event.wd)
        if parent is None:
            return []  # of a watch that has ended since
        if event.mask & IN_IGNORED:
            # The parent is gone, with everything in it. One that comes in its place is another directory.
            self._drop(parent)
            return parent.paths
        return [os.path.join(parent.path, event.name)] if event.name in parent.names else []

    def _end(self, parent: _Parent) -> None:
        self._drop(parent)
        self._inotify.remove(parent.wd)

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
