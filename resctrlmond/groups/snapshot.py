# SPDX-License-Identifier: Apache-2.0
"""The begin and end values of every workload, as files that a reader needs nothing but ``cat`` for."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from resctrlmond.groups import checkpoint
from resctrlmond.groups.checkpoint import Checkpoint
from resctrlmond.groups.files import read_file, write_file, writing
from resctrlmond.groups.times import boot_ns_at, seconds_since_ns, utc_now
from resctrlmond.resctrl import errors
from resctrlmond.resctrl.counters import Reading, Status, Value, parse_value

_BEGIN = ".begin"
_END = ".end"
_CHECKPOINT = "checkpoint"
_QUALITY = "quality"


class Snapshots:
    """``groups/KEY/`` for the current run of each workload, ``completed/KEY/GENERATION/`` for earlier ones.

    A ``place`` is a key, or ``KEY/classes/PART`` for a further group of that workload (see ``Record.place``).

    Below each: ``created_at``, ``completed_at`` (the last file written: where it stands, all ends do), ``quality``
    (of the workload as a whole: not in the folder of a further group),
    ``mon_data/DOMAIN/EVENT{,.begin,.end}``, where the bare name links to the live counter until the end, and
    ``checkpoint``, the values last read.
    """

    def __init__(self, groups: str, completed: str) -> None:
        self.groups = os.path.normpath(groups)
        self.completed = completed
        # Of every folder here; whoever cannot enter a folder cannot open what is in it.
        self._mode = 0o755
        # When the set-aside runs were completed, by path (times.boot_ns()): no step of the time of day makes a run
        # old or young that this daemon has ended or seen before.
        self._completed_ns: dict[str, int] = {}
        # How often a run was set aside or brought back.
        self.changes = 0
        # For what readers without the key change too: the checkpoint and the file ``quality``. Held while files in
        # memory are read and written, never during a call on resctrl.
        self.lock = threading.RLock()
        # By place: until when (time.monotonic_ns()) the readings in the checkpoint were taken; infinite at the end.
        self._read_until: dict[str, float] = {}

    def set_mode(self, mode: int) -> None:
        """Give all folders this mode, those that are there and those to come. Raises NotWritten."""
        self._mode = mode
        for top in (self.groups, self.completed):
            with writing(top):
                for directory, _, _ in os.walk(top, onerror=_refused):
                    # A workload may end meanwhile, and its folder go.
                    with contextlib.suppress(FileNotFoundError):
                        os.chmod(directory, mode)

    def path(self, place: str) -> str:
        """The directory of the current run."""
        return os.path.join(self.groups, place)

    def exists(self, place: str) -> bool:
        """Whether the run has a snapshot: its begin files stand, all of them. Raises NotRead."""
        return stat.S_ISDIR(_mode(self.path(place)))

    def is_bare(self, place: str) -> bool:
        """Whether nothing is left of the begin values, for somebody removed them. Raises NotRead."""
        return not any(_mode(os.path.join(self.path(place), name)) for name in ("created_at", "mon_data"))

    def make_anew(self, place: str) -> None:
        """Give a run a folder again that somebody removed, begin values and all. Raises NotWritten."""
        with writing(self.path(place)):
            self._make_folder(self.path(place))

    def is_complete(self, place: str) -> bool:
        """Whether all end files are written. Raises NotRead."""
        return stat.S_ISREG(_mode(os.path.join(self.path(place), "completed_at")))

    def begin(
        self, place: str, created_at: str, live: str, readings: Iterable[Reading], quality: str | None = None
    ) -> None:
        """Write the begin values, in one step; ``live`` is the group's directory in resctrl.

        ``quality`` is the text of that file; a further group of a workload has none.
        What an interrupted run left at the place is replaced. Raises NotWritten.
        """
        new = os.path.join(self.groups, f".{place.partition('/')[0]}.new")
        path = self.path(place)
        with writing(new):
            try:
                self._read_until.pop(place, None)
                self._begin(new, created_at, live, readings)
                if quality is not None:
                    write_file(os.path.join(new, _QUALITY), quality.encode())
                _remove(path)
                self._make_folder(os.path.dirname(path))
                os.rename(new, path)
            except OSError:
                _remove(new)
                raise

    def _begin(self, new: str, created_at: str, live: str, readings: Iterable[Reading]) -> None:
        _remove(new)
        os.mkdir(new, self._mode)
        write_file(os.path.join(new, "created_at"), created_at.encode() + b"\n")
        written: dict[str, str] = {}
        for reading in readings:
            folder = os.path.join(new, "mon_data", reading.domain)
            _make_folders(folder, self._mode)
            _write_value(folder, reading, _BEGIN, written)
            os.symlink(_live(live, reading), os.path.join(folder, reading.event))

    def relink(self, place: str, live: str) -> None:
        """Point the links at the group's directory, which may have moved to another class.

        A link that leads there already is left as it is, so this can be called again after an error. Raises
        NotWritten, NotRead.
        """
        with writing(self.path(place)):
            for reading in self.begin_values(place):
                folder = os.path.join(self.path(place), "mon_data", reading.domain)
                link, target = os.path.join(folder, reading.event), _live(live, reading)
                with contextlib.suppress(FileNotFoundError):
                    if _is_link(link) and os.readlink(link) == target:
                        continue
                new = os.path.join(folder, f".{reading.event}.new")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(new)
                os.symlink(target, new)
                os.rename(new, link)

    def checkpoint(
        self, place: str, time: str, readings: Iterable[Reading], inodes: Mapping[str, int] | None = None
    ) -> list[Reading]:
        """Keep values that were read at ``time``; what is known of other domains stays. Raises NotWritten.

        ``inodes`` are the domains' at the baseline. Returns the last values of all domains.
        """
        path = os.path.join(self.path(place), _CHECKPOINT)
        with self.lock, writing(path):
            last = self.last_read_with(place, time, readings, inodes or {})
            write_file(path, checkpoint.encode(last))
        return checkpoint.readings_of(last)

    def keep_read(
        self, created_at: str, begun_ns: int, place: str, readings: Sequence[Reading], inodes: Mapping[str, int]
    ) -> None:
        """Keep values that were just read, without the workload's key, of the run that was created at ``created_at``.

        ``begun_ns`` is the time.monotonic_ns() before they were read: values that may be older than those of the
        checkpoint would look like a counter that went back, and are dropped. Raises NotWritten, NotRead.
        """
        ended_ns = time.monotonic_ns()
        with self.lock:
            is_newer = begun_ns >= self._read_until.get(place, 0)
            if is_newer and not self.is_complete(place) and self.created_at(place) == created_at:
                self.checkpoint(place, utc_now(), readings, inodes)
                self._read_until[place] = ended_ns

    def keep_no_more(self, place: str) -> None:
        """Drop what ``keep_read`` is given from now on: the last values are about to be read."""
        with self.lock:
            self._read_until[place] = math.inf

    def last_read_with(
        self, place: str, time: str, readings: Iterable[Reading], inodes: Mapping[str, int]
    ) -> Checkpoint:
        """What ``last_read`` would be after these readings. Raises NotRead."""
        return checkpoint.with_readings(
            self.last_read(place), time, readings, lambda: checkpoint.of_baseline(self.begin_values(place), inodes)
        )

    def note_gaps(self, place: str, readings: Sequence[Reading], inodes: Mapping[str, int]) -> None:
        """Keep of readings that are no checkpoint only which events they keep from being exact. Raises NotWritten."""
        path = os.path.join(self.path(place), _CHECKPOINT)
        with self.lock, writing(path):
            before = self.last_read(place)
            after = self.last_read_with(place, "", readings, inodes)
            if gaps := checkpoint.new_gaps(before, after, readings, self.begin_values(place)):
                write_file(path, checkpoint.encode(checkpoint.with_gaps(before, gaps)))

    def last_read(self, place: str) -> Checkpoint:
        """The values last read, of every domain that ever was; {} if they were never read. Raises NotRead."""
        try:
            return checkpoint.decode(read_file(os.path.join(self.path(place), _CHECKPOINT)))
        except OSError:
            return {}

    def end(
        self,
        place: str,
        completed_at: str,
        readings: Sequence[Reading],
        sealing: AbstractContextManager[None] | None = None,
    ) -> None:
        """Write the end values, take the links away, and write ``completed_at`` as the seal, within ``sealing``.

        Raises NotWritten.
        """
        top = self.path(place)
        with writing(top):
            folders = {reading.domain: os.path.join(top, "mon_data", reading.domain) for reading in readings}
            for folder in folders.values():
                self._make_folder(folder)
            written: dict[str, str] = {}
            for reading in readings:
                _write_value(folders[reading.domain], reading, _END, written)
            for directory, _, names in os.walk(os.path.join(top, "mon_data"), onerror=_refused):
                for name in names:
                    # os.path.islink() would take an error for "not a link", and the link would stay for ever.
                    if _is_link(os.path.join(directory, name)):
                        os.unlink(os.path.join(directory, name))
            self._make_folder(top)
            with sealing or contextlib.nullcontext():
                write_file(os.path.join(top, "completed_at"), completed_at.encode() + b"\n")

    def quality(self, place: str) -> str:
        """The text of the run's file ``quality``, "" if there is none. Raises NotRead."""
        try:
            return read_file(os.path.join(self.path(place), _QUALITY)).decode("utf-8", "replace")
        except OSError:
            return ""

    def write_quality(self, place: str, text: str) -> None:
        """Replace the run's file ``quality``. Raises NotWritten."""
        path = os.path.join(self.path(place), _QUALITY)
        with writing(path):
            write_file(path, text.encode())

    def remove_quality(self, place: str) -> None:
        """Remove the run's file ``quality``, if it can be removed."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path(place), _QUALITY))

    def created_at(self, place: str) -> str:
        """When the begin values were read; "" if there are none. Raises NotRead."""
        return _text(os.path.join(self.path(place), "created_at"))

    def completed_at(self, place: str) -> str:
        """When the end values were read; "" while there are none. Raises NotRead."""
        return _text(os.path.join(self.path(place), "completed_at"))

    def begin_values(self, place: str) -> list[Reading]:
        """The baseline as it was written; [] if there is none. Raises NotRead."""
        return self._values(place, _BEGIN)

    def end_values(self, place: str) -> list[Reading]:
        """The last values as they were written; [] if there are none. Raises NotRead."""
        return self._values(place, _END)

    def _values(self, place: str, suffix: str) -> list[Reading]:
        top = os.path.join(self.path(place), "mon_data")
        found = []
        with errors.reading("list the saved values", top):
            for directory, folders, names in os.walk(top, onerror=_refused):
                domain = os.path.relpath(directory, top)
                # A file of ours that somebody made a folder of is still to be told.
                for name in [*names, *folders]:
                    if name.endswith(suffix) and not name.startswith("."):
                        value = _value(os.path.join(directory, name))
                        found.append(Reading(domain, name.removesuffix(suffix), value))
        return sorted(found, key=lambda reading: (reading.domain, reading.event))

    def set_aside(self, key: str, generation: int, completed_ns: int = 0) -> None:
        """Move an ended run out of the way of the next one under its key, whole. Raises NotWritten.

        ``completed_ns`` is when it was completed (``times.boot_ns()``), if that is known.
        """
        if not self.exists(key):
            return
        target = self.aside(key, generation)
        with writing(target):
            _make_folders(os.path.dirname(target), self._mode)
            _remove(target)
            os.rename(self.path(key), target)
        self._completed_ns.pop(target, None)
        if completed_ns:
            self._completed_ns[target] = completed_ns
        self.changes += 1

    def bring_back(self, key: str, generation: int) -> None:
        """Undo ``set_aside``: the run stands under its key again. Raises NotWritten."""
        source = self.aside(key, generation)
        with writing(source), contextlib.suppress(FileNotFoundError):
            os.rename(source, self.path(key))
        self._completed_ns.pop(source, None)
        self.changes += 1

    def aside(self, key: str, generation: int) -> str:
        """The directory of an earlier run that was set aside."""
        return os.path.join(self.completed, key, str(generation))

    def delete(self, place: str) -> None:
        """Remove the current run's snapshot, if there is one. Raises NotWritten."""
        for known in [known for known in self._read_until.copy() if (known + "/").startswith(place + "/")]:
            del self._read_until[known]
        with writing(self.path(place)):
            _remove(self.path(place))

    def has_set_aside(self, key: str) -> bool:
        """Whether earlier runs of that key were set aside."""
        return os.path.isdir(os.path.join(self.completed, key))

    def set_aside_keys(self) -> list[str]:
        """The keys under which earlier runs were set aside. Raises NotWritten."""
        with writing(self.completed):
            try:
                with os.scandir(self.completed) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return []  # somebody removed it; the next run that is set aside makes it anew

    def set_aside_runs(self) -> Iterator[tuple[str, int, int]]:
        """The runs that were set aside: key, generation, and when each was completed (``times.boot_ns()``; 0 if its
        files do not say). Raises NotWritten.
        """
        for key in self.set_aside_keys():
            with writing(key), contextlib.suppress(FileNotFoundError):
                for name in os.listdir(os.path.join(self.completed, key)):
                    if name.isdecimal():
                        yield key, int(name), self._completed_at_ns(os.path.join(self.completed, key, name)) or 0

    def delete_set_aside(self, key: str, generation: int) -> None:
        """Remove a run that was set aside. Raises NotWritten."""
        run = self.aside(key, generation)
        with writing(run):
            _remove(run)
            self._completed_ns.pop(run, None)

    def prune(self, key: str, ttl_s: float) -> None:
        """Remove the set-aside runs of that key that were completed longer than ``ttl_s`` seconds ago.

        Raises NotWritten.
        """
        folder = os.path.join(self.completed, key)
        with writing(folder):
            for generation in os.listdir(folder):
                run = os.path.join(folder, generation)
                if self._completed_since_s(run) >= ttl_s:
                    _remove(run)
                    self._completed_ns.pop(run, None)
            if not os.listdir(folder):
                os.rmdir(folder)

    def _completed_since_s(self, run: str) -> float:
        """How long ago the set-aside run was completed, in seconds; infinite if its files do not say when."""
        then = self._completed_at_ns(run)
        return math.inf if then is None else seconds_since_ns(then)

    def _completed_at_ns(self, run: str) -> int | None:
        """When the set-aside run was completed (``times.boot_ns()``); None if its files do not say."""
        then = self._completed_ns.get(run)
        if then is None:
            then = boot_ns_at(_text(os.path.join(run, "completed_at")))
        if then is not None:
            self._completed_ns[run] = then
        return then

    def _make_folder(self, path: str) -> None:
        """Make a folder of ours, with those that it is in. A file or link that somebody put in its place goes: the
        run could not end for it, and its RMID not be given back.
        """
        if path == self.groups:
            return
        self._make_folder(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                return
            os.unlink(path)
        os.mkdir(path, self._mode)

    def sweep(self) -> None:
        """Remove what was begun and never finished; only while nobody else writes. Raises NotWritten."""
        with writing(self.groups):
            for name in os.listdir(self.groups):
                # No key begins with a dot.
                if name.startswith(".") and name.endswith(".new"):
                    _remove(os.path.join(self.groups, name))


def _make_folders(path: str, mode: int) -> None:
    """Make a folder and those that it is in, unlike os.makedirs() all with that mode."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_folders(os.path.dirname(path), mode)
        os.mkdir(path, mode)


def _live(group: str, reading: Reading) -> str:
    return os.path.join(group, "mon_data", reading.domain, reading.event)


def _write_value(folder: str, reading: Reading, suffix: str, written: dict[str, str]) -> None:
    """Write a value to its file; ``written`` has a file of this run for each text that was written before.

    Equal values, as the 0 of most L3 caches, are links to one file: each file takes a page of memory in /run, and its
    inode 1 KiB more, which is 2.5 GiB for 4096 workloads on a machine with 32 L3 caches.
    """
    path = os.path.join(folder, reading.event + suffix)
    first = written.setdefault(reading.value.text, path)
    if first != path:
        # It exists if an earlier end was interrupted. EMLINK, EPERM: the filesystem of groups_dir refuses the link.
        with contextlib.suppress(OSError):
            os.link(first, path)
            return
    write_file(path, reading.value.text.encode() + b"\n")


def _value(path: str) -> Value:
    """The value in a file of ours; what somebody made of that file is no number, and says why."""
    try:
        return parse_value(read_file(path).decode("utf-8", "replace"))
    except FileNotFoundError:
        raise  # the run ended under our eyes
    except OSError as error:
        return Value(Status.ERROR, os.strerror(error.errno or 0))


def _refused(error: OSError) -> None:
    """For os.walk(): what is no folder has no files; of one that cannot be listed nobody knows."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _mode(path: str) -> int:
    """What stands there, as st_mode, links not followed; 0 for nothing."""
    with errors.reading("look for the saved values", path):
        try:
            return os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _is_link(path: str) -> bool:
    """Whether a symbolic link is there. Raises NotRead."""
    return stat.S_ISLNK(_mode(path))


def _text(path: str) -> str:
    try:
        return read_file(path).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _remove(path: str) -> None:
    """Remove a folder of ours, or what somebody put in its place."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
