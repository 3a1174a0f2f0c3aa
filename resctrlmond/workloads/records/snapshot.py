# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the begin and end values of every workload, as files that ``cat`` can show."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import math
import operator
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from resctrlmond.resctrl import errors
from resctrlmond.resctrl.counters import IN_ORDER, Reading, Status, Value, parse_value
from resctrlmond.workloads.figures import checkpoint
from resctrlmond.workloads.figures.checkpoint import Checkpoint
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.records.atomic_files import make_folders, read_file, read_text, remove, write_file, writing
from resctrlmond.workloads.records.completed_runs import CompletedRuns

_BEGIN = ".begin"
_END = ".end"
_CHECKPOINT = "checkpoint"
_QUALITY = "quality"
_NESTED = "nested"
# The values of events that the workload's profile leaves out: for the sums of the machine and of outer workloads, and
# because the meaning of one event's "Unavailable" depends on the others. In the format of a checkpoint.
_UNLISTED = "unlisted"
# The runs whose begin values are kept decoded: those that begin or end now.
_MOST_DECODED = 16


class KeptReadings(NamedTuple):
    """The outcome of ``Snapshots.keep_read``.

    ``number`` is another one after each write, 0 if the readings were not written. ``checkpoint`` is the one to
    compare them with: it has these readings, or newer ones; None if they are those of another run.
    """

    number: int = 0
    checkpoint: Checkpoint | None = None


class Snapshots:
    """The folders ``groups/KEY/`` of current runs. ``completed`` has those of earlier runs.

    A ``subfolder`` is the path of a group's folder below ``groups/``: KEY for the first group of a workload,
    ``KEY/classes/FOLDER`` for each other group (see ``Workload.subfolder``).

    Each folder has the files ``created_at``; ``completed_at``, which is written last: if it exists, all end values
    do; ``quality``, of the whole workload, so only in the folder of the first group;
    ``mon_data/DOMAIN/EVENT{,.begin,.end}``, where ``EVENT`` is a link to the live counter until the run ends;
    ``unlisted{.begin,.end}``, the values of all other events, if the workload's profile selects events;
    ``checkpoint``, the last readings; and, in the folder of the first group, ``nested/KEY.NONCE``, the totals
    of a nested workload that has ended, until the record includes them.
    """

    def __init__(self, groups: str, completed: str) -> None:
        self.groups = os.path.normpath(groups)
        self.completed = CompletedRuns(completed)
        # The mode of every folder. Users without access to a folder cannot open its files.
        self._mode = 0o755
        # Protects the checkpoint and the file ``quality``, which threads without a transaction of the key change too.
        # Held only while files on a tmpfs are read or written, never during an access to resctrl.
        self.lock = threading.RLock()
        # By subfolder: the time.monotonic_ns() after the readings of its checkpoint; infinite after the last reading.
        self._read_until: dict[str, float] = {}
        # By subfolder: the readings that keep_read() has last written (as a digest), their file, and their number. If
        # no checkpoint is skipped, an idle minute takes 1.5 times the CPU time without it (and the kept numbers).
        self._kept: dict[str, tuple[bytes, tuple[int, int], int]] = {}
        self._writes = 0
        # By subfolder: the begin values of a run that has not ended. Each total needs them, and each is in a file of
        # its own. Without it, a createRuntime takes 1.04 times the CPU time, and the end of a container 1.15 times.
        self._begin: dict[str, _Begin] = {}
        # The begin values, decoded, of the subfolders that were used last. Without it, a createRuntime takes 1.03
        # times the CPU time.
        self._decoded: dict[str, tuple[_Begin, list[Reading]]] = {}

    def set_mode(self, mode: int) -> None:
        """Set the mode of all existing and all future folders. Raises NotWritten."""
        self._mode = mode
        for top in (self.groups, self.completed.folder):
            with writing(top), contextlib.suppress(FileNotFoundError):
                before = stat.S_IMODE(os.lstat(top).st_mode)
                if before == mode:
                    continue  # it is the last, so all below it have the mode
                os.chmod(top, before & mode)
                for _, entry in _entries(top):
                    # A workload may end meanwhile, and its folder be removed.
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            os.chmod(entry.path, mode)
                os.chmod(top, mode)

    def path(self, subfolder: str) -> str:
        """Return the absolute path of a subfolder."""
        return f"{self.groups}/{subfolder}"

    def exists(self, subfolder: str) -> bool:
        """Return whether the subfolder has a snapshot, complete with all begin values. Raises NotRead."""
        return stat.S_ISDIR(_mode(self.path(subfolder)))

    def path_if_exists(self, subfolder: str) -> str | None:
        """Return the path of a subfolder that has a snapshot; None if it has none. Raises NotRead."""
        return self.path(subfolder) if self.exists(subfolder) else None

    def is_bare(self, subfolder: str) -> bool:
        """Return whether the begin values are missing because they were removed from outside. Raises NotRead."""
        return not any(_mode(os.path.join(self.path(subfolder), name)) for name in ("created_at", "mon_data"))

    def make_anew(self, subfolder: str) -> None:
        """Create a subfolder again, without begin values, after it was removed from outside.

        Raises NotWritten.
        """
        with writing(self.path(subfolder)):
            self._make_folder(self.path(subfolder), set())

    def is_complete(self, subfolder: str) -> bool:
        """Return whether all end values are written. Raises NotRead."""
        return stat.S_ISREG(_mode(os.path.join(self.path(subfolder), "completed_at")))

    def begin(
        self,
        subfolder: str,
        created_at: str,
        live: str,
        readings: Sequence[Reading],
        is_listed: Callable[[str], bool] = lambda _event: True,
    ) -> None:
        """Write the begin values in one step; ``live`` is the path of the group's directory in resctrl.

        Only events that are listed have files of their own. The files of an interrupted run in the subfolder are
        replaced. Raises NotWritten.
        """
        new = f"{self.groups}/.{subfolder.partition('/')[0]}.new"
        path = self.path(subfolder)
        with writing(new):
            try:
                self._forget(subfolder)
                _make_new_folder(new, self._mode)
                write_file(f"{new}/created_at", created_at.encode() + b"\n", is_new=True)
                os.mkdir(f"{new}/mon_data", self._mode)
                written: dict[str, str] = {}
                listed = [reading for reading in readings if is_listed(reading.event)]
                _write_unlisted(new, _BEGIN, [one for one in readings if not is_listed(one.event)])
                for domain, of_domain in itertools.groupby(listed, operator.attrgetter("domain")):
                    folder = f"{new}/mon_data/{domain}"
                    make_folders(folder, self._mode)
                    links = f"{live}/mon_data/{domain}"
                    for reading in of_domain:
                        _write_value(folder, reading, _BEGIN, written)
                        os.symlink(f"{links}/{reading.event}", f"{folder}/{reading.event}")
                self._make_folder(os.path.dirname(path), set())
                _replace_folder(new, path)
            except OSError:
                remove(new)
                raise
        self._keep_begin(subfolder, self._begin_identity(subfolder), readings)

    def load_begin(self, subfolder: str) -> None:
        """Keep the begin values of a run that the last daemon began. Raises NotRead."""
        # Before the values: a thread without a transaction may read them while the next run begins.
        folder = self._begin_identity(subfolder)
        self._keep_begin(subfolder, folder, self._values(subfolder, _BEGIN))

    def _begin_identity(self, subfolder: str) -> tuple[int, int]:
        return _identity(f"{self.path(subfolder)}/mon_data")

    def _keep_begin(self, subfolder: str, folder: tuple[int, int], readings: Sequence[Reading]) -> None:
        begin = _Begin(folder, checkpoint.encode(checkpoint.of_baseline(readings, {})))
        self._begin[subfolder] = begin
        ordered = sorted(readings, key=IN_ORDER)
        self._keep_decoded(subfolder, begin, [Reading(one.domain, one.event, one.value) for one in ordered])

    def _keep_decoded(self, subfolder: str, begin: _Begin, readings: list[Reading]) -> None:
        self._decoded[subfolder] = begin, readings
        for other in list(self._decoded)[:-_MOST_DECODED]:
            self._decoded.pop(other, None)

    def _forget(self, subfolder: str) -> None:
        for known in (self._begin, self._decoded, self._read_until, self._kept):
            known.pop(subfolder, None)

    def relink(self, subfolder: str, live: str, is_listed: Callable[[str], bool] = lambda _event: True) -> None:
        """Point the links to the live counters at the group's directory, which may have moved to another class.

        A correct link is kept, so the call can be repeated after an error. Raises NotWritten, NotRead.
        """
        with writing(self.path(subfolder)):
            top, to = os.path.join(self.path(subfolder), "mon_data"), os.path.join(live, "mon_data")
            for reading in self.begin_values(subfolder):
                if not is_listed(reading.event):
                    continue
                folder = f"{top}/{reading.domain}"
                link, target = f"{folder}/{reading.event}", f"{to}/{reading.domain}/{reading.event}"
                if _target(link) == target:
                    continue
                new = os.path.join(folder, f".{reading.event}.new")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(new)
                os.symlink(target, new)
                os.rename(new, link)

    def checkpoint(
        self, subfolder: str, time: str, readings: Iterable[Reading], inodes: Mapping[str, int] | None = None
    ) -> Checkpoint:
        """Save readings that were taken at ``time`` in the checkpoint, and return it.

        Domains without a new reading keep their last ones. ``inodes`` are those of the domains' directories at the
        baseline. Raises NotWritten.
        """
        path = os.path.join(self.path(subfolder), _CHECKPOINT)
        with self.lock, writing(path):
            last = self.last_read_with(subfolder, time, readings, inodes or {})
            write_file(path, checkpoint.encode(last))
        return last

    def keep_read(
        self, created_at: str, begun_ns: int, subfolder: str, readings: Sequence[Reading], inodes: Mapping[str, int]
    ) -> KeptReadings:
        """Save readings in the checkpoint if the run that was created at ``created_at`` still goes on.

        Readings that are those of the checkpoint are not written again: the checkpoint keeps its time.

        For callers without a transaction of the workload's key. ``begun_ns`` is the time.monotonic_ns() before the
        reading began: readings that may be older than the checkpoint are not written, because they would look like a
        counter that went back. The reply has the checkpoint's counts instead of the older ones. Raises NotWritten,
        NotRead.
        """
        ended_ns = time.monotonic_ns()
        with self.lock:
            if self.created_at(subfolder) != created_at:
                return KeptReadings()
            if begun_ns < self._read_until.get(subfolder, 0) or self.is_complete(subfolder):
                newest = checkpoint.newest(self.last_read(subfolder), readings)
                return KeptReadings(0, self.last_read_with(subfolder, "", newest, inodes))
            self._read_until[subfolder] = ended_ns
            return self._keep_changed(subfolder, readings, inodes)

    def _keep_changed(self, subfolder: str, readings: Sequence[Reading], inodes: Mapping[str, int]) -> KeptReadings:
        path = os.path.join(self.path(subfolder), _CHECKPOINT)
        digest, (known, file, number) = _digest(readings), self._kept.get(subfolder, (b"", (0, 0), 0))
        if known == digest and file == _identity(path):
            return KeptReadings(number, self.last_read(subfolder))
        last = self.checkpoint(subfolder, utc_now(), readings, inodes)
        number = self._writes = self._writes + 1
        self._kept[subfolder] = digest, _identity(path), number
        return KeptReadings(number, last)

    def keep_no_more(self, subfolder: str) -> None:
        """Let later calls of ``keep_read`` write nothing, because the final reading begins."""
        with self.lock:
            self._read_until[subfolder] = math.inf

    def last_read_with(
        self, subfolder: str, time: str, readings: Iterable[Reading], inodes: Mapping[str, int]
    ) -> Checkpoint:
        """Return the checkpoint as it would be with these readings added, without writing it. Raises NotRead."""
        return checkpoint.with_readings(
            self.last_read(subfolder),
            time,
            readings,
            lambda: checkpoint.of_baseline(self.begin_values(subfolder), inodes),
        )

    def note_gaps(self, subfolder: str, readings: Sequence[Reading], inodes: Mapping[str, int]) -> None:
        """Save which events cannot be exact because of these readings, but not their values. Raises NotWritten."""
        path = os.path.join(self.path(subfolder), _CHECKPOINT)
        with self.lock, writing(path):
            before = self.last_read(subfolder)
            after = self.last_read_with(subfolder, "", readings, inodes)
            if gaps := checkpoint.new_gaps(before, after, readings, self.begin_values(subfolder)):
                write_file(path, checkpoint.encode(checkpoint.with_gaps(before, gaps)))

    def last_read(self, subfolder: str) -> Checkpoint:
        """Return the checkpoint, which includes domains that are offline; {} if there is none. Raises NotRead."""
        try:
            return checkpoint.decode(read_file(os.path.join(self.path(subfolder), _CHECKPOINT)))
        except OSError:
            return {}

    def end(
        self,
        subfolder: str,
        completed_at: str,
        readings: Sequence[Reading],
        sealing: AbstractContextManager[None] | None = None,
        is_listed: Callable[[str], bool] = lambda _event: True,
    ) -> None:
        """Write the end values, remove the links to the live counters, and write ``completed_at`` last.

        ``completed_at`` is written within the context ``sealing``. Raises NotWritten.
        """
        top = self.path(subfolder)
        listed = [reading for reading in readings if is_listed(reading.event)]
        # The totals at the end are those of the files.
        self._begin.pop(subfolder, None)
        with writing(top):
            folders = {reading.domain: os.path.join(top, "mon_data", reading.domain) for reading in listed}
            there: set[str] = set()
            for folder in folders.values():
                self._make_folder(folder, there)
            _write_unlisted(top, _END, [one for one in readings if not is_listed(one.event)])
            written: dict[str, str] = {}
            for reading in listed:
                _write_value(folders[reading.domain], reading, _END, written)
            entries = [entry for _, entry in _entries(os.path.join(top, "mon_data"))]
            for link in [entry.path for entry in entries if entry.is_symlink()]:
                os.unlink(link)
            self._make_folder(top, there)
            with sealing or contextlib.nullcontext():
                write_file(os.path.join(top, "completed_at"), completed_at.encode() + b"\n")
        self._begin.pop(subfolder, None)
        self._decoded.pop(subfolder, None)

    def quality(self, subfolder: str) -> str:
        """Return the text of the run's file ``quality``, "" if there is none. Raises NotRead."""
        try:
            return read_file(os.path.join(self.path(subfolder), _QUALITY)).decode("utf-8", "replace")
        except OSError:
            return ""

    def write_quality(self, subfolder: str, text: str) -> None:
        """Replace the run's file ``quality``. Raises NotWritten."""
        path = f"{self.path(subfolder)}/{_QUALITY}"
        with writing(path):
            write_file(path, text.encode())

    def remove_quality(self, subfolder: str) -> None:
        """Remove the run's file ``quality``; ignore errors."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path(subfolder), _QUALITY))

    def write_nested(self, key: str, name: str, data: bytes) -> None:
        """Write the file ``nested/NAME`` of a run, if the run has a folder. Raises NotWritten."""
        if not self.exists(key):
            return
        folder = os.path.join(self.path(key), _NESTED)
        with writing(folder):
            self._make_folder(folder, set())
            write_file(os.path.join(folder, name), data)

    def read_nested(self, key: str, name: str) -> bytes:
        """Return the content of the file ``nested/NAME`` of a run, b"" if there is none. Raises NotRead."""
        try:
            return read_file(os.path.join(self.path(key), _NESTED, name))
        except OSError:
            return b""

    def remove_nested(self, key: str, name: str) -> None:
        """Remove the file ``nested/NAME`` of a run; ignore errors: a file that no record lists is not read."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path(key), _NESTED, name))

    def created_at(self, subfolder: str) -> str:
        """Return the time at which the begin values were read; "" if there are none. Raises NotRead."""
        return read_text(os.path.join(self.path(subfolder), "created_at"))

    def completed_at(self, subfolder: str) -> str:
        """Return the time at which the end values were read; "" if there are none yet. Raises NotRead."""
        return read_text(os.path.join(self.path(subfolder), "completed_at"))

    def begin_values(self, subfolder: str) -> list[Reading]:
        """Return the readings of the baseline; [] if there is none. Raises NotRead."""
        begin = self._begin.get(subfolder)
        if begin is None or begin.folder != self._begin_identity(subfolder):
            return self._values(subfolder, _BEGIN)
        known, readings = self._decoded.get(subfolder, (None, []))
        if known is not begin:
            readings = checkpoint.readings_of(checkpoint.decode(begin.values))
            self._keep_decoded(subfolder, begin, readings)
        return readings.copy()

    def end_values(self, subfolder: str) -> list[Reading]:
        """Return the final readings; [] if there are none. Raises NotRead."""
        return self._values(subfolder, _END)

    def _values(self, subfolder: str, suffix: str) -> list[Reading]:
        top = os.path.join(self.path(subfolder), "mon_data")
        found: list[Reading] = []
        with errors.reading("list the saved values", top):
            # A folder in the place of a value's file is reported as a value with an error.
            for domain, entry in _entries(top):
                if entry.name.endswith(suffix) and not entry.name.startswith("."):
                    found.append(Reading(domain, entry.name.removesuffix(suffix), _value(entry.path)))
        with contextlib.suppress(OSError):
            unlisted = read_file(f"{self.path(subfolder)}/{_UNLISTED}{suffix}")
            found += checkpoint.readings_of(checkpoint.decode(unlisted))
        return sorted(found, key=IN_ORDER)

    def set_aside(self, key: str, generation: int, completed_ns: int = 0) -> None:
        """Move the files of an ended run to ``completed/``, so that the next run can use the key. Raises NotWritten.

        ``completed_ns`` is the time at which the run was completed (``clock.boot_ns()``), 0 if unknown.
        """
        if self.exists(key):
            self.completed.add(key, generation, self.path(key), completed_ns, self._mode)

    def bring_back(self, key: str, generation: int) -> None:
        """Undo ``set_aside``: move the files of the run back to ``groups/``. Raises NotWritten."""
        self._forget(key)
        self.completed.take_out(key, generation, self.path(key))

    def delete(self, subfolder: str) -> None:
        """Remove the snapshot in a subfolder, and all below it, if there is one. Raises NotWritten."""
        for known in {*self._begin, *self._read_until}:
            if (known + "/").startswith(subfolder + "/"):
                self._forget(known)
        with writing(self.path(subfolder)):
            remove(self.path(subfolder))

    def _make_folder(self, path: str, there: set[str]) -> None:
        """Create a folder and its parents below ``groups/``, and remove a file or link in the place of any of them.

        Such a file would prevent the end of the run, and so the release of its RMID. Folders that are ``there`` have
        been checked, and are added.
        """
        if path == self.groups or path in there:
            return
        there.add(path)
        self._make_folder(os.path.dirname(path), there)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                return
            os.unlink(path)
        os.mkdir(path, self._mode)

    def remove_incomplete(self) -> None:
        """Remove incomplete snapshots. Call it only while no other thread writes. Raises NotWritten."""
        with writing(self.groups):
            for name in os.listdir(self.groups):
                # A key cannot begin with a dot.
                if name.startswith(".") and name.endswith(".new"):
                    remove(os.path.join(self.groups, name))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Begin:
    """Begin values in memory: encoded, because decoded ones take several times as much.

    ``folder`` is the identity of the folder mon_data.
    """

    folder: tuple[int, int]
    values: bytes


def _make_new_folder(path: str, mode: int) -> None:
    """Create an empty folder. What an interrupted run has left at the path is removed."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        remove(path)
        os.mkdir(path, mode)


def _replace_folder(new: str, path: str) -> None:
    """Rename a folder, and remove what is in its place."""
    try:
        os.rename(new, path)
    except OSError as error:
        # A folder with files, or something else than a folder (rename(2)).
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        remove(path)
        os.rename(new, path)


def _write_value(folder: str, reading: Reading, suffix: str, written: dict[str, str]) -> None:
    """Write a value to its file; ``written`` has a file of this run for each text that was written before.

    Equal values, as the 0 of most L3 caches, are links to one file: each file takes a page of memory in /run, and its
    inode 1 KiB more, which is 2.5 GiB for 4096 workloads on a machine with 32 L3 caches.
    """
    path = f"{folder}/{reading.event}{suffix}"
    first = written.setdefault(reading.value.text, path)
    if first != path:
        # It exists if an earlier end was interrupted. EMLINK, EPERM: the filesystem of groups_dir refuses the link.
        with contextlib.suppress(OSError):
            os.link(first, path)
            return
    write_file(path, reading.value.text.encode() + b"\n", is_new=suffix == _BEGIN)


def _write_unlisted(folder: str, suffix: str, readings: Sequence[Reading]) -> None:
    """Write the values of the events that have no files of their own, if there are any."""
    if readings:
        write_file(f"{folder}/{_UNLISTED}{suffix}", checkpoint.encode(checkpoint.of_baseline(readings, {})))


def _value(path: str) -> Value:
    """Return the value in a file. A file that cannot be read has a value without a number, with the error as text."""
    try:
        return parse_value(read_file(path).decode("utf-8", "replace"))
    except FileNotFoundError:
        raise  # the run ended meanwhile
    except OSError as error:
        return Value(Status.ERROR, os.strerror(error.errno or 0))


def _entries(top: str, domain: str = ".") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield each file, link and folder below the folder ``top``, with the path of its folder below ``top``.

    Raises OSError if a folder cannot be listed; one that does not exist is empty. Links are not followed, because
    they lead to counters of the kernel.
    """
    try:
        with os.scandir(os.path.join(top, domain)) as opened:
            entries = list(opened)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        yield domain, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(top, os.path.normpath(os.path.join(domain, entry.name)))


def _mode(path: str) -> int:
    """Return the st_mode of a path without following links; 0 if it does not exist. Raises NotRead."""
    with errors.reading("look for the saved values", path):
        try:
            return os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _target(path: str) -> str:
    """Return the target of a symbolic link; "" if the path is not one. Raises NotRead."""
    try:
        return os.readlink(path)
    except OSError as error:
        # EINVAL: it is something else (readlink(2)).
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return ""
        raise errors.not_read(error, "look for the saved values") from error


def _digest(readings: Iterable[Reading]) -> bytes:
    """Return a digest of everything that a checkpoint keeps of the readings: they take too much memory themselves."""
    texts = [f"{reading.inode} {reading.domain}/{reading.event} {reading.value.text!r}\n" for reading in readings]
    return hashlib.sha256("".join(texts).encode("utf-8", "surrogateescape")).digest()


def _identity(path: str) -> tuple[int, int]:
    """Return the inode of a file and its time of modification (ns); (0, 0) if it cannot be read."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns
