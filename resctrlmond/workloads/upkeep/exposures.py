# SPDX-License-Identifier: Apache-2.0
"""Exposures: the figures of a workload as regular files, in a folder that its containers have as a read-only mount.

A container cannot follow the links of a snapshot into resctrl, and must not keep a run's folder, which is replaced at
each run. So an exposed workload has a folder of its own, which lives as long as any container has it: it is created
before the runtime creates the container, and stays at its path over runs of the workload and restarts of the daemon.

The files have no reasons, because these may name other workloads of the host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from resctrlmond.resctrl import cgroups
from resctrlmond.resctrl.counters import IN_ORDER, Reading
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.workloads.figures.accounting import Total, digits
from resctrlmond.workloads.groups.target import MAX_PATH_LENGTH
from resctrlmond.workloads.model.clock import utc_now
from resctrlmond.workloads.model.errors import LimitExceeded
from resctrlmond.workloads.model.validation import canonical_key, check_member_id, check_word
from resctrlmond.workloads.model.workload import Workload
from resctrlmond.workloads.records.atomic_files import read_file, remove_tree, write_file, writing
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.totals import summed
from resctrlmond.workloads.records.usage import Usage

log = logging.getLogger(__name__)

MAX_EXPOSED = 2000
# A runtime creates the control group of a container some time after the folder; a busy host needs seconds.
GRACE_S = 300.0
# How often folders without a workload are looked at.
LOOK_S = 30.0

_FILES = "files"
_CONTAINERS = "containers"
_BEGIN, _LIVE, _END = "begin", "live", "end"


class _Written(msgspec.Struct):
    """The content of the files of a workload, and when ``live`` was written (time.monotonic()).

    ``run`` identifies the run, ``groups`` its groups, and ``state`` its state. All are empty without files.
    ``exposed_at``: when each container got the folder from this daemon (time.monotonic()).
    """

    run: tuple[int, int] | None = None
    groups: tuple[int, ...] = ()
    state: str = ""
    at: float = 0.0
    exposed_at: dict[str, float] = msgspec.field(default_factory=dict)


class Exposures:
    """The folders ``exposed/KEY/``: ``files/`` is mounted; ``containers/ID`` has the control group of a container.

    ``find`` returns a workload by its key, and ``read`` its use. Only exposed workloads cost anything. A tick ends
    early if ``is_stopping``.
    """

    def __init__(
        self,
        folder: str,
        snapshots: Snapshots,
        find: Callable[[str], Workload | None],
        read: Callable[[str], Usage],
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self._find = find
        self._read = read
        self._is_stopping = is_stopping
        # Protects the folders and ``_written``. Held while files on a tmpfs are written, never during other accesses.
        self._lock = threading.Lock()
        self._written: dict[str, _Written] = {}
        self._looked = 0.0
        # The containers of the last daemon count as new, because its times are not known.
        self._started = time.monotonic()
        # By key: the error that was logged last.
        self._errors: dict[str, str] = {}

    def start(self) -> None:
        """Continue with the folders that the last daemon left."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries, self._lock:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._written.setdefault(entry.name, _Written())

    def expose(self, key: str, container: str, cgroup: str = "") -> str:
        """Return the path of the folder to mount into a container, which exists now.

        The workload need not exist yet. ``cgroup`` is the path of the container's control group below the mount
        point, "" if it is not known: the folder stays as long as the control group exists, or the workload. Raises
        InvalidKey, InvalidRequest, LimitExceeded, NotWritten.
        """
        key = canonical_key(key)
        check_member_id(container)
        if cgroup:
            check_word("cgroup", cgroup, MAX_PATH_LENGTH)
        top = f"{self._folder}/{key}"
        with self._lock, writing(top):
            if key not in self._written and len(self._written) >= MAX_EXPOSED:
                raise LimitExceeded(
                    f"the files of {len(self._written)} workloads are exposed already",
                    remedy="Expose fewer of them ('expose' in resctrlmond-profiles(5))",
                )
            for folder in (self._folder, top, f"{top}/{_CONTAINERS}", f"{top}/{_FILES}"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o755)
            written = self._written.get(key, _Written())
            # A pod may restart its containers over and over.
            self._forget_containers(top, written)
            write_file(f"{top}/{_CONTAINERS}/{container}", os.fsencode(cgroup))
            written.exposed_at[container] = time.monotonic()
            self._written[key] = written
        return f"{top}/{_FILES}"

    def tick(self, interval_s: float) -> None:
        """Write ``live`` if it is older than the interval, or if a run has begun, ended or changed its state."""
        if not self._written:
            return
        now = time.monotonic()
        is_look = now - self._looked >= LOOK_S
        for key, written in list(self._written.items()):
            if self._is_stopping():
                return
            try:
                self._refresh(key, written, now, interval_s, is_look=is_look)
            except (ResctrlError, OSError) as error:
                if self._errors.get(key) != str(error):
                    log.warning("%s: the files for its containers are not up to date: %s", key, error)
                self._errors[key] = str(error)
            else:
                self._errors.pop(key, None)
        if is_look:
            self._looked = now

    def _refresh(self, key: str, written: _Written, now: float, interval_s: float, *, is_look: bool) -> None:
        workload = self._find(key)
        if workload is None:
            if written.run is not None or is_look:
                self._clear(key, written)
            return
        is_over = workload.state.is_over
        if _identity(workload) == (written.run, written.groups, written.state) and (
            is_over or now - written.at < interval_s
        ):
            return
        usage = self._read(key)
        if usage.error:
            return  # another call changes the workload, or resctrl is not mounted: ``live`` states its age
        workload, is_over = usage.workload, usage.workload.state.is_over
        run, groups, state = _identity(workload)
        folder = f"{self._folder}/{key}/{_FILES}"
        has_new_begin = (run, groups) != (written.run, written.groups)
        begin = self._summed(workload, self._snapshots.begin_values) if has_new_begin else []
        readings = self._summed(workload, self._snapshots.end_values) if is_over else usage.readings
        now_text = _text(_lines(usage.read_at or utc_now(), state, usage.totals, readings))
        with self._lock, writing(folder):
            if run != written.run:
                _remove(f"{folder}/{_END}", f"{folder}/{_BEGIN}")
            if begin:
                write_file(f"{folder}/{_BEGIN}", _text(_lines(workload.first.created_at, "", (), begin)))
            write_file(f"{folder}/{_LIVE}", now_text)
            if is_over:
                write_file(f"{folder}/{_END}", now_text)
            written.run, written.groups, written.state, written.at = run, groups, state, now

    def _summed(self, workload: Workload, values: Callable[[str], list[Reading]]) -> list[Reading]:
        """Return saved values, summed over the groups of the workload."""
        found = summed(values(place) for place in map(workload.subfolder, workload.groups))
        return [reading for reading in found if workload.shows(reading.event)]

    def _clear(self, key: str, written: _Written) -> None:
        """Remove the files of a workload that is not known any more, and its folder if no container has it."""
        top = f"{self._folder}/{key}"
        with self._lock, writing(top):
            _remove(*(f"{top}/{_FILES}/{name}" for name in (_BEGIN, _LIVE, _END)))
            written.run, written.groups, written.state = None, (), ""
            self._forget_containers(top, written)
            with contextlib.suppress(FileNotFoundError):
                if os.listdir(f"{top}/{_CONTAINERS}"):
                    return
            with contextlib.suppress(OSError):
                remove_tree(top)
            self._written.pop(key, None)

    def _forget_containers(self, top: str, written: _Written) -> None:
        """Forget the containers of a folder whose control group is gone.

        The times of the files are not used: the clock may be set while a runtime creates a container, and the runtime
        fails if the folder is gone then.
        """
        new_from = time.monotonic() - GRACE_S
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{top}/{_CONTAINERS}") as entries:
            old = [one for one in entries if written.exposed_at.get(one.name, self._started) <= new_from]
            points = _hierarchies() if old else []
            for entry in old:
                inner = os.fsdecode(read_file(entry.path)).strip("/")
                # One that is not known does not keep the folder.
                if not inner or not any(cgroups.is_there(os.path.join(point, inner)) for point in points):
                    _remove(entry.path)
                    written.exposed_at.pop(entry.name, None)


def _hierarchies() -> list[str]:
    """Return where the hierarchies of control groups are mounted."""
    return [mount.point for mount in mounts() if mount.fstype in ("cgroup2", "cgroup") and mount.root == "/"]


def _identity(workload: Workload) -> tuple[tuple[int, int], tuple[int, ...], str]:
    run = workload.generation, workload.first.nonce
    return run, tuple(group.nonce for group in workload.groups if group.inodes), str(workload.state)


def _lines(at: str, state: str, totals: Iterable[Total], readings: Sequence[Reading]) -> Iterator[str]:
    yield f"time {at}"
    if state:
        yield f"state {state}"
    for total in totals:
        yield f"total {total.event.name} {'-' if total.number is None else digits(total.number)} {total.quality}"
    for reading in sorted(readings, key=IN_ORDER):
        yield f"value {reading.domain} {reading.event} {' '.join(reading.value.text.split())}"


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def _remove(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
