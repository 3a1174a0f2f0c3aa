# SPDX-License-Identifier: Apache-2.0
"""Detect writes of other programs to files of resctrl, with inotify(7).

These are the tasks and cpus files of classes and groups, and the files that reset bandwidth counters: those of the
counters of one group (mbm_L3_assignments), and of all groups (mbm_assign_mode, and what an event counts).

A write to a file of kernfs raises IN_MODIFY, in every mount namespace. The event does not name the process that
wrote, so the daemon counts its own writes: if a file has more events than these, another program wrote to it.

Limits:
- inotify merges an event with an equal one right before it. So several writes through one open file count as one.
- A write that the kernel refuses raises no event. Opening a file with O_TRUNC raises one (``echo 1 >tasks``), also if
  the kernel refuses the write that follows.
- Since Linux 6.7 a program can write a list of tasks (``1,2``). The kernel refuses it at the first task that it
  cannot move, and has moved the tasks before that one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager

import msgspec

from resctrlmond.resctrl.inotify import (
    IN_CLOSE_WRITE,
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
from resctrlmond.resctrl.processes import TICKS_PER_S

TASKS = "tasks"
COUNTERS = "mbm_L3_assignments"
# Only the files of bandwidth events are in these; each event has a directory in the second.
_CONFIGURATION = os.path.join("info", "L3_MON")
_EVENT_CONFIGURATIONS = os.path.join(_CONFIGURATION, "event_configs")
_MODE, _FILTER, _CONFIG = "mbm_assign_mode", "event_filter", "_config"
_MON_GROUPS = "mon_groups"
_NOT_CLASSES = frozenset({"info", "mon_data", _MON_GROUPS})
_CPUS = frozenset({"cpus", "cpus_list"})
# IN_CLOSE_WRITE shows that a write is complete, and separates two writes whose events the kernel would merge.
_MASK = IN_MODIFY | IN_CLOSE_WRITE | IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO
# A program that writes continuously must not keep the daemon reading for ever.
_MAX_READS = 16
# The directory was removed meanwhile.
_REMOVED = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)
# Moves that are older than this are dropped once there are so many.
_MAX_MOVES = 10_000
_MOVE_AGE_S = 600
# If more directories were removed or renamed, any may have been.
_MAX_GONE = 10_000


def boot_ticks() -> int:
    """Return the time since boot in clock ticks, the unit of field 22 of /proc/PID/stat."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) * TICKS_PER_S // 10**9


class OwnWrites:
    """Counts the daemon's own writes, by directory relative to the tree. Thread-safe.

    A write to the tasks file has the name of its directory, a write to COUNTERS its own path.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._begun: dict[str, int] = {}
        self._running = 0
        self._sequence = 0
        # By thread and directory: the last move (clock ticks since boot).
        self._moved: dict[int, dict[str, int]] = {}

    @contextlib.contextmanager
    def counted(self, directory: str, tid: int = 0) -> Iterator[None]:
        """Count one write, unless it raises: a write that the kernel refuses raises no event."""
        with self._guard:
            self._begun[directory] = self._begun.get(directory, 0) + 1
            self._sequence += 1
            self._running += 1
            if tid:
                self._record_move(tid, directory)
        try:
            yield
        except BaseException:
            with self._guard:
                self._begun[directory] -= 1
                self._running -= 1
            raise
        with self._guard:
            self._running -= 1

    def moved_since(self, tid: int, ticks: int, directory: str | None = None) -> bool:
        """Whether the daemon has moved the thread, to ``directory`` if given, since then (clock ticks since boot)."""
        moved = self._moved.get(tid, {}).copy()
        return any(at >= ticks for name, at in moved.items() if directory in (None, name))

    def begun(self, directory: str) -> int:
        """Return how many writes to the directory have begun since the count was last reset."""
        with self._guard:
            return self._begun.get(directory, 0)

    def checkpoint(self) -> int | None:
        """Return a number for ``pop`` if no write is running, None otherwise."""
        with self._guard:
            return None if self._running else self._sequence

    def pop(self, checkpoint: int | None) -> tuple[dict[str, int], bool]:
        """Return the writes begun since the count was last reset, by directory, and whether it is reset now.

        The count is reset if no write has begun since ``checkpoint`` was taken: then all their events have been read.
        """
        with self._guard:
            is_reset = checkpoint is not None and checkpoint == self._sequence and not self._running
            begun = self._begun
            self._begun = {} if is_reset else begun.copy()
            return begun, is_reset

    def _record_move(self, tid: int, directory: str) -> None:
        now = boot_ticks()
        if len(self._moved) >= _MAX_MOVES:
            oldest = now - _MOVE_AGE_S * TICKS_PER_S
            self._moved = {tid: moved for tid, moved in self._moved.items() if max(moved.values()) > oldest}
        self._moved[tid] = {**self._moved.get(tid, {}), directory: now}


class Written(msgspec.Struct):
    """The changes that other programs have made, by directory relative to the tree.

    ``tasks``: how often each tasks file was opened and written to; 0 for a further write through a file that was open
    before. ``cpus``: the directories whose cpus files were written to.
    ``counters``: the directories whose COUNTERS were written to. ``configuration``: the files of bandwidth events,
    below ``info``, that were written to.
    ``created``, ``renamed``: new directories, and new names of directories.
    ``missed``: directories that were removed, and that were written to or not watched since their creation.
    ``is_incomplete``: events are missing, or a directory was not watched since its creation.
    ``is_lost``: the event queue overflowed, or could not be read.
    """

    tasks: Counter[str] = msgspec.field(default_factory=Counter)
    cpus: set[str] = msgspec.field(default_factory=set)
    counters: set[str] = msgspec.field(default_factory=set)
    configuration: set[str] = msgspec.field(default_factory=set)
    created: set[str] = msgspec.field(default_factory=set)
    renamed: set[str] = msgspec.field(default_factory=set)
    missed: set[str] = msgspec.field(default_factory=set)
    is_incomplete: bool = False
    is_lost: bool = False

    def __bool__(self) -> bool:
        files = self.tasks or self.cpus or self.counters or self.configuration
        return bool(files or self.renamed or self.missed or self.is_incomplete)


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
        # How often each tasks file was opened and written to, and the directories whose file is still open since.
        self._sessions: Counter[str] = Counter()
        self._being_written: set[str] = set()
        # The directories that were created during this call of _read().
        self._new: set[str] = set()
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

    @property
    def watches(self) -> int:
        """The number of watched directories."""
        return len(self._watches)

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

    @property
    def directories(self) -> set[str]:
        """The watched classes and groups."""
        return {path for path in self._watches.copy() if not path or _has_tasks_file(path)}

    @property
    def being_written(self) -> set[str]:
        """The directories whose tasks file was written to and has not been closed since."""
        return self._being_written.copy()

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
            self._written.is_incomplete |= had_trouble and not self.trouble
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
        continued = self._being_written.copy()
        self._new.clear()
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
        for directory, number in self._modified.items():
            own = begun.get(directory, 0)
            if number <= own:
                continue
            if os.path.basename(directory) == COUNTERS:
                self._written.counters.add(os.path.dirname(directory))
                self._modified[directory] = own
            else:
                least = 0 if directory in continued else 1
                self._written.tasks[directory] += max(self._sessions[directory] - own, least)
                self._modified[directory] = self._sessions[directory] = own
        if is_reset:
            self._modified.clear()
            self._sessions.clear()

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
        elif event.mask & IN_MODIFY and event.name == TASKS:
            self._modified[directory] += 1
            if directory not in self._being_written:
                self._being_written.add(directory)
                self._sessions[directory] += 1
        elif event.mask & IN_CLOSE_WRITE and event.name == TASKS:
            self._being_written.discard(directory)
        elif event.mask & IN_MODIFY and event.name in _CPUS:
            self._written.cpus.add(directory)
        elif event.mask & IN_MODIFY and event.name == COUNTERS:
            self._modified[os.path.join(directory, COUNTERS)] += 1
        elif event.mask & IN_MODIFY and _is_configuration(directory, event.name):
            self._written.configuration.add(os.path.join(directory, event.name))

    def _lose_events(self) -> None:
        """Record that events are missing, and watch all directories anew."""
        self._modified.clear()
        self._sessions.clear()
        self._gone = None
        self._forget_below("")
        self._watch_all()
        self._written.is_incomplete = self._written.is_lost = True

    def _process_directory(self, event: Event, path: str) -> None:
        if event.mask & (IN_CREATE | IN_MOVED_TO) and path not in self._watches:
            if path in self._expected:
                self._expected[path].append(event)
                return
            self._watch_new(path)
            if _has_tasks_file(path):
                self._process_new(event, path)
        elif event.mask & IN_DELETE:
            if path in self._new:
                self._written.missed.add(path)
            self._add_gone(path)
            self._forget_below(path)
        elif event.mask & IN_MOVED_FROM:
            # The watch continues; IN_MOVED_TO sets its new path.
            self._add_gone(path)
            self._watches.pop(path, None)

    def _process_new(self, event: Event, path: str) -> None:
        if event.mask & IN_MOVED_TO:
            self._written.renamed.add(path)
            return
        self._new.add(path)
        # It may have been written to before it was watched, and may be removed already.
        self._written.is_incomplete = True
        if path in self._watches:
            self._written.created.add(path)
            self._written.created.update(below for below in self.directories if below.startswith(f"{path}/"))
        else:
            self._written.missed.add(path)

    def _watch_all(self) -> None:
        if self._add(""):
            self._watch_groups("")
            if self._add(_CONFIGURATION):
                for name in self._names(_EVENT_CONFIGURATIONS):
                    self._add(os.path.join(_EVENT_CONFIGURATIONS, name))
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
        if self._modified.pop(directory, 0) > self._own.begun(directory):
            self._written.missed.add(directory)
        self._modified.pop(os.path.join(directory, COUNTERS), None)
        self._sessions.pop(directory, None)
        self._being_written.discard(directory)
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
    """Whether a file has the mode of the bandwidth counters, or what a bandwidth event counts."""
    if directory == _CONFIGURATION:
        return name == _MODE or name.endswith(_CONFIG)
    return os.path.dirname(directory) == _EVENT_CONFIGURATIONS and name == _FILTER


def _has_tasks_file(path: str) -> bool:
    """Whether the path is that of a class or a group, below the root of the tree."""
    above, name = os.path.split(path)
    return os.path.basename(above) == _MON_GROUPS or not (above or name in _NOT_CLASSES)
