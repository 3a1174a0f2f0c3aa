# SPDX-License-Identifier: Apache-2.0
"""The begin and end values of every workload, as files that a reader needs nothing but ``cat`` for."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable

from resctrlmond.groups.files import read_file, write_file, writing
from resctrlmond.groups.times import seconds_since
from resctrlmond.resctrl.counters import Reading, parse_value

_BEGIN = ".begin"
_END = ".end"


class Snapshots:
    """``groups/KEY/`` for the current run of each workload, ``completed/KEY/GENERATION/`` for earlier ones.

    Below each: ``created_at``, ``completed_at`` (the last file written: where it stands, all ends do),
    and ``mon_data/DOMAIN/EVENT{,.begin,.end}``, where the bare name links to the live counter until the end.
    """

    def __init__(self, groups: str, completed: str) -> None:
        self.groups = groups
        self.completed = completed

    def path(self, key: str) -> str:
        """The directory of the current run."""
        return os.path.join(self.groups, key)

    def exists(self, key: str) -> bool:
        """Whether the run has a snapshot: its begin files stand, all of them."""
        return os.path.isdir(self.path(key))

    def is_complete(self, key: str) -> bool:
        """Whether all end files are written."""
        return os.path.isfile(os.path.join(self.path(key), "completed_at"))

    def begin(self, key: str, created_at: str, live: str, readings: Iterable[Reading]) -> None:
        """Write the begin values, in one step; ``live`` is the group's directory in resctrl.

        What an interrupted run left under the key is replaced. Raises NotWritten.
        """
        new = os.path.join(self.groups, f".{key}.new")
        with writing(new):
            try:
                self._begin(new, created_at, live, readings)
                _remove(self.path(key))
                os.rename(new, self.path(key))
            except OSError:
                _remove(new)
                raise

    def _begin(self, new: str, created_at: str, live: str, readings: Iterable[Reading]) -> None:
        _remove(new)
        os.mkdir(new, 0o755)
        write_file(os.path.join(new, "created_at"), created_at.encode() + b"\n")
        for reading in readings:
            place = os.path.join(new, "mon_data", reading.domain)
            os.makedirs(place, 0o755, exist_ok=True)
            _write_value(place, reading, _BEGIN)
            os.symlink(_live(live, reading), os.path.join(place, reading.event))

    def relink(self, key: str, live: str) -> None:
        """Point the links at the group's new directory after it moved to another class. Raises NotWritten."""
        with writing(self.path(key)):
            for reading in self.begin_values(key):
                place = os.path.join(self.path(key), "mon_data", reading.domain)
                link = os.path.join(place, f".{reading.event}.new")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(link)
                os.symlink(_live(live, reading), link)
                os.rename(link, os.path.join(place, reading.event))

    def end(self, key: str, completed_at: str, readings: Iterable[Reading]) -> None:
        """Write the end values, take the links away, and write ``completed_at`` as the seal. Raises NotWritten."""
        top = self.path(key)
        with writing(top):
            for reading in readings:
                place = os.path.join(top, "mon_data", reading.domain)
                os.makedirs(place, 0o755, exist_ok=True)
                _write_value(place, reading, _END)
            for directory, _, names in os.walk(os.path.join(top, "mon_data")):
                for name in names:
                    if os.path.islink(os.path.join(directory, name)):
                        os.unlink(os.path.join(directory, name))
            os.makedirs(top, 0o755, exist_ok=True)
            write_file(os.path.join(top, "completed_at"), completed_at.encode() + b"\n")

    def begin_values(self, key: str) -> list[Reading]:
        """The baseline as it was written; [] if there is none."""
        return self._values(key, _BEGIN)

    def end_values(self, key: str) -> list[Reading]:
        """The last values as they were written; [] if there are none."""
        return self._values(key, _END)

    def _values(self, key: str, suffix: str) -> list[Reading]:
        top = os.path.join(self.path(key), "mon_data")
        found = []
        for directory, _, names in os.walk(top):
            domain = os.path.relpath(directory, top)
            for name in names:
                if name.endswith(suffix) and not name.startswith("."):
                    text = read_file(os.path.join(directory, name)).decode("utf-8", "replace")
                    found.append(Reading(domain, name.removesuffix(suffix), parse_value(text)))
        return sorted(found, key=lambda reading: (reading.domain, reading.event))

    def set_aside(self, key: str, generation: int) -> None:
        """Move an ended run out of the way of the next one under its key, whole. Raises NotWritten."""
        if not self.exists(key):
            return
        target = self._aside(key, generation)
        with writing(target):
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            _remove(target)
            os.rename(self.path(key), target)

    def bring_back(self, key: str, generation: int) -> None:
        """Undo ``set_aside``: the run stands under its key again. Raises NotWritten."""
        source = self._aside(key, generation)
        with writing(source), contextlib.suppress(FileNotFoundError):
            os.rename(source, self.path(key))

    def _aside(self, key: str, generation: int) -> str:
        return os.path.join(self.completed, key, str(generation))

    def delete(self, key: str) -> None:
        """Remove the current run's snapshot, if there is one. Raises NotWritten."""
        with writing(self.path(key)):
            _remove(self.path(key))

    def set_aside_keys(self) -> list[str]:
        """The keys under which earlier runs were set aside. Raises NotWritten."""
        with writing(self.completed), os.scandir(self.completed) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def prune(self, key: str, ttl_s: float) -> None:
        """Remove the set-aside runs of that key that were completed longer than ``ttl_s`` seconds ago.

        Raises NotWritten.
        """
        folder = os.path.join(self.completed, key)
        with writing(folder):
            for generation in os.listdir(folder):
                run = os.path.join(folder, generation)
                if seconds_since(_text(os.path.join(run, "completed_at"))) >= ttl_s:
                    _remove(run)
            if not os.listdir(folder):
                os.rmdir(folder)

    def sweep(self) -> None:
        """Remove what was begun and never finished; only while nobody else writes. Raises NotWritten."""
        with writing(self.groups):
            for name in os.listdir(self.groups):
                # No key begins with a dot.
                if name.startswith(".") and name.endswith(".new"):
                    _remove(os.path.join(self.groups, name))


def _live(group: str, reading: Reading) -> str:
    return os.path.join(group, "mon_data", reading.domain, reading.event)


def _write_value(place: str, reading: Reading, suffix: str) -> None:
    write_file(os.path.join(place, reading.event + suffix), reading.value.text.encode() + b"\n")


def _text(path: str) -> str:
    try:
        return read_file(path).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
