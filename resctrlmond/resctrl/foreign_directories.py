# SPDX-License-Identifier: Apache-2.0
"""Detect directories that other programs create in resctrl, and those that are removed or renamed, with inotify(7).

resctrlmond-witness reports writes to files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

import msgspec

from resctrlmond.resctrl.inotify import (
    IN_CREATE,
    IN_DELETE,
    IN_IGNORED,
    IN_ISDIR,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    IN_Q_OVERFLOW,
    IN_UNMOUNT,
    Event,
    Inotify,
)
from resctrlmond.resctrl.mounts import Mounting

_MON_GROUPS = "mon_groups"
_NOT_CLASSES = frozenset({"info", "mon_data", _MON_GROUPS})
_MASK = IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO
# A program that creates groups continuously must not keep the daemon reading for ever.
_MAX_READS = 16
# The directory was removed meanwhile.
_REMOVED = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)
# If more directories were removed or renamed, any may have been.
_MAX_GONE = 10_000


class Changes(msgspec.Struct):
    """The changes that other programs have made.

    ``created``: new directories, by path relative to the tree, also those that were removed again, and new names of
    directories. ``is_lost``: events are missing, because the queue overflowed, it could not be read, or it could not
    be filled.
    """

    created: set[str] = msgspec.field(default_factory=set)
    is_lost: bool = False

    def __bool__(self) -> bool:
        return bool(self.created or self.is_lost)


class ForeignDirectories:
    """Watches every class and every monitoring group of a tree. Thread-safe.

    ``trouble`` is the reason why some changes are not detected, "" if all are; ``update_watches`` tries again.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._guard = threading.Lock()
        self._paths: dict[int, str] = {}
        self._watches: dict[str, int] = {}
        self._changes = Changes()
        # The directories that are not at their path any more since the last take_gone(); None if any may be.
        self._gone: set[str] | None = None
        # The groups that the daemon is creating, each with the events of its creation that were read meanwhile.
        self._expected: dict[str, list[Event]] = {}
        self._mounting: Mounting | None = None
        self._inotify: Inotify | None = None
        self._is_closed = False
        self.trouble = ""

    def close(self) -> None:
        """Close the descriptor, and with it every watch."""
        with self._guard:
            self._is_closed = True
            if self._inotify is not None:
                self._inotify.close()
                self._inotify = None

    def __del__(self) -> None:
        self.close()

    def is_watched(self, directory: str) -> bool:
        """Whether the removal of a group is detected, and that of the classes above it."""
        groups = os.path.dirname(directory)
        return not self.trouble and groups in self._watches and "" in self._watches

    def take_gone(self, mounting: Mounting) -> set[str] | None:
        """Return the directories of which ``take`` has read since the last call that they were removed or renamed.

        None if any may have been: after a mount, if events were lost, or with ``trouble``.
        """
        with self._guard:
            is_known = mounting == self._mounting and any(mounting) and not self.trouble
            gone, self._gone = self._gone, set()
            return gone if is_known else None

    def update_watches(self, mounting: Mounting) -> bool:
        """Watch all directories after a mount or an error. Returns whether this has completed the watches."""
        with self._guard:
            if self._is_closed or (mounting == self._mounting and not self.trouble):
                return False
            had_trouble = bool(self.trouble)
            self.trouble = ""
            self._gone = None
            if self._inotify is None:
                try:
                    self._inotify = Inotify()
                except OSError as error:
                    hint = "raise fs.inotify.max_user_instances or LimitNOFILE="
                    self.trouble = f"no inotify ({error.strerror}; {hint})"
                    return False
            self._mounting = mounting
            self._watch_all()
            # Changes in directories that were not watched until now were not detected.
            self._changes.is_lost |= had_trouble and not self.trouble
            return not self.trouble

    @contextlib.contextmanager
    def expecting(self, directory: str) -> Iterator[None]:
        """Expect that the daemon creates this group in the block, and calls ``watch`` for it.

        Without that, a thread that reads events meanwhile would take it for a group of another program.
        """
        with self._guard:
            self._expected[directory] = []
        try:
            yield
        finally:
            with self._guard:
                # Without a call of watch() the daemon has not created it, but another program may have.
                for event in self._expected.pop(directory, ()):
                    self._process_directory(event, directory)

    def watch(self, directory: str) -> None:
        """Watch a new group of the daemon, from its creation on."""
        with self._guard:
            self._expected.setdefault(directory, [])
            # First read the removal of an earlier group with this name.
            self._read()
            del self._expected[directory]
            self._add(directory)

    def take(self) -> Changes:
        """Return the changes since the last call."""
        with self._guard:
            self._read()
            changes, self._changes = self._changes, Changes()
            return changes

    def _read(self) -> None:
        if self._inotify is None:
            return
        for _ in range(_MAX_READS):
            try:
                events = self._inotify.read()
            except OSError:
                self._lose_events()
                return
            is_drained = self._inotify.is_drained
            for event in events:
                self._process(event)
            if is_drained:
                return

    def _process(self, event: Event) -> None:
        if event.mask & IN_Q_OVERFLOW:
            self._lose_events()
            return
        directory = self._paths.get(event.wd)
        if directory is None:
            return  # the watch has ended meanwhile
        if event.mask & (IN_IGNORED | IN_UNMOUNT):
            self._forget(directory)
        elif event.mask & IN_ISDIR:
            self._process_directory(event, os.path.join(directory, event.name))

    def _lose_events(self) -> None:
        """Record that events are missing, and watch all directories anew."""
        self._gone = None
        self._forget_below("")
        self._watch_all()
        self._changes.is_lost = True

    def _process_directory(self, event: Event, path: str) -> None:
        if event.mask & (IN_CREATE | IN_MOVED_TO) and path not in self._watches:
            if path in self._expected:
                self._expected[path].append(event)
                return
            self._watch_new(path)
            if _has_tasks_file(path):
                # Groups that were in it before it was watched have no events of their own.
                below = {other for other in self._watches if other.startswith(f"{path}/") and _has_tasks_file(other)}
                self._changes.created.update(below, {path})
        elif event.mask & IN_DELETE:
            self._add_gone(path)
            self._forget_below(path)
        elif event.mask & IN_MOVED_FROM:
            # The watch continues; IN_MOVED_TO sets its new path.
            self._add_gone(path)
            self._watches.pop(path, None)

    def _watch_all(self) -> None:
        if self._add(""):
            self._watch_groups("")
            for name in self._names(""):
                self._watch_new(name)

    def _watch_new(self, path: str) -> None:
        """Watch a group, or a class and its groups."""
        if _has_tasks_file(path) and self._add(path) and "/" not in path:
            self._watch_groups(path)

    def _watch_groups(self, class_: str) -> None:
        groups = os.path.join(class_, _MON_GROUPS)
        if self._add(groups):
            for name in self._names(groups):
                self._add(os.path.join(groups, name))

    def _names(self, directory: str) -> list[str]:
        try:
            with os.scandir(os.path.join(self._root, directory)) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []

    def _add(self, directory: str) -> bool:
        if self._inotify is None:
            return False
        try:
            wd = self._inotify.add(os.path.join(self._root, directory), _MASK)
        except OSError as error:
            if error.errno not in _REMOVED:
                hint = "raise fs.inotify.max_user_watches" if error.errno == errno.ENOSPC else "see inotify(7)"
                self.trouble = f"{error.filename} cannot be watched ({error.strerror}; {hint})"
            return False
        before = self._watches.get(directory)
        if before is not None and before != wd:
            self._forget(directory)
        self._watches[directory] = wd
        self._paths[wd] = directory
        return True

    def _forget(self, directory: str) -> None:
        wd = self._watches.pop(directory, None)
        if wd is None:
            return
        self._add_gone(directory)
        if self._paths.get(wd) == directory:
            del self._paths[wd]
            assert self._inotify is not None
            self._inotify.remove(wd)

    def _add_gone(self, directory: str) -> None:
        if self._gone is not None and len(self._gone) < _MAX_GONE:
            self._gone.add(directory)
        else:
            self._gone = None

    def _forget_below(self, directory: str) -> None:
        for path in [path for path in self._watches if not directory or f"{path}/".startswith(f"{directory}/")]:
            self._forget(path)


def _has_tasks_file(path: str) -> bool:
    """Whether the path is that of a class or a group, below the root of the tree."""
    above, name = os.path.split(path)
    return os.path.basename(above) == _MON_GROUPS or not (above or name in _NOT_CLASSES)
