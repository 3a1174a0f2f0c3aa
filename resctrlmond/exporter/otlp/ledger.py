# SPDX-License-Identifier: Apache-2.0
"""Record what the receiver has: the last value of each counter, and the runs whose final values it has got.

The file also has the ends that wait for the receiver, which the daemon may not list any more.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

import msgspec

from resctrlmond.exporter.otlp.figures import Figures, Run, Use, check, check_value, nanoseconds
from resctrlmond.resctrl.counters import EXACTLY
from resctrlmond.workloads.model.states import Quality

log = logging.getLogger(__name__)

# A run is forgotten when its figures have not been expected for this time: Watch may report an end after ReadAll.
_FORGET_S = 60.0
# Receivers with milliseconds need another time for another value.
_TICK_NS = 1_000_000

# A run has 1 KB, and some thousands are known at most.
_MAX_BYTES = 256 << 20


class Temporality(enum.StrEnum):
    """Whether a point has the use since the start, or since the point before."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"


class Omission(enum.StrEnum):
    """Why the receiver does not get the final figures of a run.

    FULL: too many ends waited for it. INVALID: they cannot be converted to points. UNSEEN: the run is not listed any
    more, and its end was not seen.
    """

    FULL = "full"
    INVALID = "invalid"
    UNSEEN = "unseen"


class Counted(msgspec.Struct):
    """The value of a counter at a time, since its ``start``."""

    start: str
    value: Decimal
    time_ns: int


class Known(msgspec.Struct):
    """A run that was seen: its start, its resource as it was at first, its counters, and whether it is done with.

    ``is_given_up``: its final figures are counted as missing already.
    A resource that changed would be another one, and the use since the start would be counted for both.
    """

    start: str
    attributes: dict[str, str | int]
    counters: dict[str, Counted] = msgspec.field(default_factory=dict)
    is_final: bool = False
    is_given_up: bool = False


# The file has types of its own, so that a new field of the interface or of Figures does not make it unreadable. Give
# each new field here a default. Unknown fields are ignored.


class _Entry(msgspec.Struct):
    key: str
    created_at: str
    known: Known


class _Run(msgspec.Struct):
    key: str
    created_at: str


class _Use(msgspec.Struct, omit_defaults=True):
    event: str
    quality: Quality
    value: str | None = None


class _End(msgspec.Struct):
    run: _Run
    start: str
    read_at: str
    continues: bool
    attributes: dict[str, str | int]
    totals: list[_Use]


class _File(msgspec.Struct):
    version: int
    temporality: Temporality
    runs: list[_Entry]
    host: dict[str, Counted]
    ends: list[_End]


class _Header(msgspec.Struct):
    """The part of a file that is read first. Later versions have it too."""

    version: int
    ends: msgspec.Raw = msgspec.Raw(b"[]")


_VERSION = 1


def _end(of: Figures) -> _End:
    totals = [_Use(each.event, each.quality, each.value) for each in of.totals]
    run = _Run(of.run.key, of.run.created_at)
    return _End(run, of.start, of.read_at, of.continues, dict(of.attributes), totals)


def _figures(of: _End) -> Figures:
    totals = [Use(each.event, each.value, each.quality) for each in of.totals]
    run = Run(of.run.key, of.run.created_at)
    return Figures(run, of.start, of.read_at, True, of.continues, of.attributes, totals, ())


@dataclass(frozen=True, slots=True)
class Step:
    """The next point of a counter, and its state once the point is delivered.

    ``excess``: by how much the held former value exceeds the counter; 0 if the counter has not fallen.
    """

    start_ns: int
    time_ns: int
    value: Decimal
    excess: Decimal
    kept: Counted


def step(before: Counted | None, now: Counted, start_ns: int, temporality: Temporality) -> Step:
    """Return the next point of a counter, which has the value ``now`` since ``start_ns``.

    A value that falls while the start stays is held: a receiver would take it for a new start from 0.
    """
    if before is None or before.start != now.start:
        time_ns = max(now.time_ns, start_ns)
        return Step(start_ns, time_ns, now.value, Decimal(0), Counted(now.start, now.value, time_ns))
    value = max(before.value, now.value)
    time_ns = max(now.time_ns, before.time_ns + (_TICK_NS if value > before.value else 0))
    kept = Counted(now.start, value, time_ns)
    with localcontext(EXACTLY):
        excess = value - now.value
        if temporality is Temporality.CUMULATIVE:
            return Step(start_ns, time_ns, value, excess, kept)
        return Step(before.time_ns, time_ns, value - before.value, excess, kept)


class Ledger:
    """The runs and the counters of the host that were pushed. With a ``path``, they are kept in this file.

    ``ends`` are those that waited for the receiver when the file was written.

    Raises OSError and ValueError that name the file, if it cannot be read or written.
    """

    def __init__(self, temporality: Temporality, path: str | None = None) -> None:
        self.temporality = temporality
        self.host: dict[str, Counted] = {}
        self.runs: dict[Run, Known] = {}
        self.ends: Sequence[Figures] = ()
        # Since the start of the exporter.
        self.missing = Counter(dict.fromkeys(Omission, 0))
        # Since when the figures of these runs are not expected (time.monotonic()).
        self._unexpected_s: dict[Run, float] = {}
        self._path = path
        if path is not None:
            self._load(path)
            self.save(self.ends)

    def enter(self, figures: Figures, ended: Collection[Run] = ()) -> Known:
        """Enter a run, if it is new, and return its entry, with the attributes that it had at first.

        A run after a loss takes over the entry of the lost one. ``ended``: the runs whose ends wait for the receiver,
        which no other run continues.
        """
        run = figures.run
        known = self.runs.get(run)
        if known is None and figures.continues:
            known = self._interrupted(run, ended)
        if known is None:
            known = Known(figures.start, dict(figures.attributes))
        self.runs[run] = known
        self._unexpected_s.pop(run, None)
        return known

    def _interrupted(self, run: Run, ended: Collection[Run]) -> Known | None:
        """Return the last run of the key that has no end: it was lost, and the new run continues its counters."""
        earlier = [
            of
            for of, known in self.runs.items()
            if of.key == run.key and of not in ended and not (known.is_final or known.is_given_up)
        ]
        return self.runs.pop(max(earlier, key=lambda of: of.created_at)) if earlier else None

    def forget(self, listed: Mapping[str, str | None]) -> None:
        """Forget the runs whose figures have not been expected for a while.

        ``listed``: the keys of all workloads that are listed, also if they could not be read, with the start of their
        runs; None for a run that has not begun.
        """
        now = time.monotonic()
        unexpected = [run for run in self.runs if not self._is_expected(run, listed)]
        # The time counts from the first push that does not expect the run: an interval can be longer than _FORGET_S.
        self._unexpected_s = {run: self._unexpected_s.get(run, now) for run in unexpected}
        for run, since_s in list(self._unexpected_s.items()):
            if now - since_s >= _FORGET_S:
                del self._unexpected_s[run]
                known = self.runs.pop(run)
                self.missing[Omission.UNSEEN] += not known.is_final and not known.is_given_up

    def _is_expected(self, run: Run, listed: Mapping[str, str | None]) -> bool:
        """Whether the run is listed, or the run of its key that is listed may continue it."""
        if run.key not in listed:
            return False
        created_at, known = listed[run.key], self.runs[run]
        if run.created_at == created_at:
            return True
        is_next_known = created_at is not None and Run(run.key, created_at) in self.runs
        return not (is_next_known or known.is_final or known.is_given_up)

    def give_up(self, runs: Mapping[Run, Omission]) -> None:
        """Count the final figures of these runs as missing. They are pushed if the daemon still lists the runs."""
        for run, omission in runs.items():
            self.missing[omission] += 1
            if (known := self.runs.get(run)) is not None:
                known.is_given_up = True

    def _load(self, path: str) -> None:
        content = b""
        try:
            content = _content(path)
            version = msgspec.json.decode(content, type=_Header).version
            if version != _VERSION:
                raise ValueError(
                    f"its format is {version}, and this version of the exporter reads the format {_VERSION}."
                    " The version that wrote it can use it"
                )
            found = msgspec.json.decode(content, type=_File)
            if found.temporality is not self.temporality:
                raise ValueError(f"it has the temporality {found.temporality}")
            _check(found)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            text = error.strerror if isinstance(error, OSError) else error
            raise ValueError(
                f"cannot use the state {path}: {text}. Remove it to push all use since the starts of the counters "
                f"again{_loss(content)}"
            ) from error
        self.host = found.host
        self.runs = {Run(entry.key, entry.created_at): entry.known for entry in found.runs}
        self.ends = list({of.run: of for of in map(_figures, found.ends)}.values())

    def save(self, ends: Sequence[Figures] = ()) -> None:
        """Write the file, if there is one, with the ends that wait. Raises OSError that names the file."""
        if self._path is None:
            return
        entries = [_Entry(run.key, run.created_at, known) for run, known in self.runs.items()]
        data = msgspec.json.encode(_File(_VERSION, self.temporality, entries, self.host, [*map(_end, ends)]))
        temporary = f"{self._path}.new"
        try:
            # Left by an exporter that was killed, or put there by another user: a link must not lead the exporter
            # to another file, and a FIFO must not block it.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                # Without it, the file may be empty after a loss of power.
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            # On a full disk, a part of it would take the space of the next one.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Free some space there" if is_full else "Check that its directory exists and can be written to"
            raise OSError(f"cannot write the state {self._path}: {error.strerror or error}. {remedy}") from error


def _content(path: str) -> bytes:
    """Return the content of a regular file, which cannot block or be without end. Raises OSError and ValueError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
    return data


def _loss(content: bytes) -> str:
    """Return the end of a message: how many final figures are lost if a file with this content is removed."""
    try:
        header = msgspec.json.decode(content, type=_Header)
        ends = len(msgspec.json.decode(header.ends, type=list[msgspec.Raw]))
    except (ValueError, RecursionError):
        return ""
    return f", without the final figures of the {ends} runs that wait in it" if ends else ""


def _check(found: _File) -> None:
    """Raise ValueError if the file has a figure that no point can have."""
    for known in (entry.known for entry in found.runs):
        nanoseconds(known.start)
        for counted in known.counters.values():
            _check_counted(counted)
    for counted in found.host.values():
        _check_counted(counted)
    for end in found.ends:
        check(_figures(end))


def _check_counted(counted: Counted) -> None:
    check_value(counted.value)
    if not 0 <= counted.time_ns < 2**63:
        raise ValueError(f"{counted.time_ns} is not a time in nanoseconds")
