# SPDX-License-Identifier: Apache-2.0
"""Detect changes that other programs make in resctrl, with inotify(7).

These are new directories and removed ones, and writes: to the cpus files of groups, and to the files that reset
bandwidth counters, which are those of the counters of one group (such as mbm_L3_assignments), and of all groups
(mbm_assign_mode, what an event counts, and kernel_mode). resctrlmond-witness reports writes to the tasks files.

A write to a file of kernfs raises IN_MODIFY, in every mount namespace. The event does not name the process that
wrote, so the daemon counts its own writes to mbm_L3_assignments and the like: if there are more events than these,
another program wrote to the file. A write that the kernel refuses raises no event, but opening a file with O_TRUNC
raises one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager

import msgspec

from resctrlmond.resctrl.inotify import (
    IN_CREATE,
    IN_DELETE,
    IN_IGNORED,
    IN_ISDIR,
    IN_MODIFY,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    IN_Q_OVERFLOW,
    IN_UNMOUNT,
    Event,
    Inotify,
    Readiness,
)
from resctrlmond.resctrl.mounts import Mounting

# The file of a group that assigns counters of one resource.
_COUNTERS = re.compile(r"mbm_.+_assignments")
_INFO = "info"
# Only the files of bandwidth events are in the directories of resources, such as L3_MON. In it, each event has a
# directory in this one.
_EVENT_CONFIGURATIONS = "event_configs"
# The files that select the group in which the kernel counts its work for a task.
KERNEL_MODES = frozenset({os.path.join(_INFO, name) for name in ("kernel_mode", "kernel_mode_assignment")})
_MODE, _FILTER, _CONFIG = "mbm_assign_mode", "event_filter", "_config"
_MON_GROUPS = "mon_groups"
_NOT_CLASSES = frozenset({"info", "mon_data", _MON_GROUPS})
_CPUS = frozenset({"cpus", "cpus_list"})
_MASK = IN_MODIFY | IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO
# A program that writes continuously must not keep the daemon reading for ever.
_MAX_READS = 16
# The directory was removed meanwhile.
_REMOVED = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)
# If more directories were removed or renamed, any may have been.
_MAX_GONE = 10_000


class OwnWrites:
    """Counts the daemon's own writes to files that assign counters, by path relative to the tree. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._begun: dict[str, int] = {}
        self._running = 0
        self._sequence = 0

    @contextlib.contextmanager
    def counted(self, file: str) -> Iterator[None]:
        """Count one write, unless it raises: a write that the kernel refuses raises no event."""
        with self._guard:
            self._begun[file] = self._begun.get(file, 0) + 1
            self._sequence += 1
            self._running += 1
        try:
            yield
        except BaseException:
            with self._guard:
                self._begun[file] -= 1
                self._running -= 1
            raise
        with self._guard:
            self._running -= 1

    def checkpoint(self) -> int | None:
        """Return a number for ``pop`` if no write is running, None otherwise."""
        with self._guard:
            return None if self._running else self._sequence

    def pop(self, checkpoint: int | None) -> tuple[dict[str, int], bool]:
        """Return the writes begun since the count was last reset, by file, and whether it is reset now.

        The count is reset if no write has begun since ``checkpoint`` was taken: then all their events have been read.
        """
        with self._guard:
            is_reset = checkpoint is not None and checkpoint == self._sequence and not self._running
            begun = self._begun
            self._begun = {} if is_reset else begun.copy()
            return begun, is_reset


class Written(msgspec.Struct):
    """The changes that other programs have made, by path relative to the tree.

    ``cpus``: the directories whose cpus files were written to. ``counters``: the files that assign counters of a
    group, and ``configuration``: those below ``info``, that were written to. ``created``: new directories, also
    those that were removed again, and new names of directories.
    ``is_lost``: events are missing, because the queue overflowed, it could not be read, or it could not be filled.
    """

    cpus: set[str] = msgspec.field(default_factory=set)
    counters: set[str] = msgspec.field(default_factory=set)
    configuration: set[str] = msgspec.field(default_factory=set)
    created: set[str] = msgspec.field(default_factory=set)
    is_lost: bool = False

    def __bool__(self) -> bool:
        return bool(self.cpus or self.counters or self.configuration or self.created or self.is_lost)


class ForeignWrites:
    """Watches every class and every monitoring group of a tree. Thread-safe.

    ``fd`` is readable when ``take`` may return something; -1 if the host gives no inotify instance, and then nothing
    is detected. ``trouble`` is the reason why some writes are not detected, "" if all are; ``update_watches`` tries
    again.
    """

    def __init__(self, root: str, own: OwnWrites) -> None:
        self._root = root
        self._own = own
        self._guard = threading.Lock()
        self._paths: dict[int, str] = {}
        self._watches: dict[str, int] = {}
        self._modified: Counter[str] = Counter()
        self._written = Written()
        # The directories that are not at their path any more since the last take_gone(); None if any may be.
        self._gone: set[str] | None = None
        # The groups that the daemon is creating, each with the events of its creation that were read meanwhile.
        self._expected: dict[str, list[Event]] = {}
        self._mounting: Mounting | None = None
        self._inotify: Inotify | None = None
        self._readiness: Readiness | None = None
        self._is_closed = False
        self.trouble = ""

    def close(self) -> None:
        """Close the descriptor, and with it every watch."""
        with self._guard:
            self._is_closed = True
            if self._readiness is not None:
                self._readiness.close()
                self._readiness = None
            if self._inotify is not None:
                self._inotify.close()
                self._inotify = None

    def __del__(self) -> None:
        self.close()

    @property
    def fd(self) -> int:
        """The descriptor that is readable for events; -1 if there is none."""
        return self._readiness.fd if self._readiness is not None else -1

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
                    inotify = Inotify()
                    try:
                        self._readiness = Readiness(inotify.fd)
                    except OSError:
                        inotify.close()
                        raise
                    self._inotify = inotify
                except OSError as error:
                    hint = "raise fs.inotify.max_user_instances or LimitNOFILE="
                    self.trouble = f"no inotify ({error.strerror}; {hint})"
                    return False
            self._mounting = mounting
            self._watch_all()
            # Writes to directories that were not watched until now were not detected.
            self._written.is_lost |= had_trouble and not self.trouble
            return not self.trouble

    def unreported(self) -> AbstractContextManager[None]:
        """Keep ``fd`` from becoming readable in the block, which reads the events of the daemon's own changes."""
        return self._readiness.unreported() if self._readiness is not None else contextlib.nullcontext()

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

    def take(self) -> Written:
        """Return the changes since the last call."""
        with self._guard:
            self._read()
            written, self._written = self._written, Written()
            return written

    def _read(self) -> None:
        if self._inotify is None:
            return
        checkpoint = self._own.checkpoint()
        for _ in range(_MAX_READS):
            try:
                events = self._inotify.read()
            except OSError:
                self._lose_events()
                checkpoint = None  # its events are still to be read
                break
            is_drained = self._inotify.is_drained
            for event in events:
                self._process(event)
            if is_drained:
                break
        else:
            checkpoint = None  # events of the daemon's own writes may be among those that are not read yet
        begun, is_reset = self._own.pop(checkpoint)
        for file, number in self._modified.items():
            own = begun.get(file, 0)
            if number > own:
                self._written.counters.add(file)
                self._modified[file] = own
        if is_reset:
            self._modified.clear()

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
        elif event.mask & IN_MODIFY and event.name in _CPUS:
            self._written.cpus.add(directory)
        elif event.mask & IN_MODIFY and _COUNTERS.fullmatch(event.name):
            self._modified[os.path.join(directory, event.name)] += 1
        elif event.mask & IN_MODIFY and _is_configuration(directory, event.name):
            self._written.configuration.add(os.path.join(directory, event.name))

    def _lose_events(self) -> None:
        """Record that events are missing, and watch all directories anew."""
        self._modified.clear()
        self._gone = None
        self._forget_below("")
        self._watch_all()
        self._written.is_lost = True

    def _process_directory(self, event: Event, path: str) -> None:
        if event.mask & (IN_CREATE | IN_MOVED_TO) and path not in self._watches:
            if path in self._expected:
                self._expected[path].append(event)
                return
            self._watch_new(path)
            if _has_tasks_file(path):
                # Groups that were in it before it was watched have no events of their own.
                below = {other for other in self._watches if other.startswith(f"{path}/") and _has_tasks_file(other)}
                self._written.created.update(below, {path})
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
            self._add(_INFO)
            for resource in self._names(_INFO):
                configurations = os.path.join(_INFO, resource, _EVENT_CONFIGURATIONS)
                if resource.endswith("_MON") and self._add(os.path.join(_INFO, resource)):
                    for name in self._names(configurations):
                        self._add(os.path.join(configurations, name))
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
        for file in [file for file in self._modified if os.path.dirname(file) == directory]:
            del self._modified[file]
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


def _is_configuration(directory: str, name: str) -> bool:
    """Whether a file has the mode of the counters or of the kernel, or states what a bandwidth event counts."""
    above, last = os.path.split(directory)
    if above == _INFO:
        return last.endswith("_MON") and (name == _MODE or name.endswith(_CONFIG))
    if directory == _INFO:
        return os.path.join(directory, name) in KERNEL_MODES
    return os.path.basename(above) == _EVENT_CONFIGURATIONS and name == _FILTER


def _has_tasks_file(path: str) -> bool:
    """Whether the path is that of a class or a group, below the root of the tree."""
    above, name = os.path.split(path)
    return os.path.basename(above) == _MON_GROUPS or not (above or name in _NOT_CLASSES)
