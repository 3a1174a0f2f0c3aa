# SPDX-License-Identifier: Apache-2.0
"""The verb ``record``: write what workloads use, again and again, as lines of JSON, or at the end as Parquet."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import msgspec

from resctrlctl.base.errors import OK, CommandError
from resctrlctl.connection.daemon import Daemon
from resctrlctl.live.recording import FORMAT, Amount, AnyLine, Header, Outage, Reading, Used, is_selected
from resctrlctl.screen.format import format_count
from resctrlctl.screen.output import Output, escaped
from resctrlctl.workloads import workload_table
from resctrlctl.workloads.selectors import name_of
from resctrlctl.workloads.workload_table import Line
from resctrlmond.api import signatures
from resctrlmond.api.exit_codes import FAILURE, USAGE
from resctrlmond.api.types import ReadAllRequest
from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.clock import utc_now

_ACTION = "read what the workloads use"
_STANDARD_OUTPUT = "-"


class _Interrupt(Exception):
    """A signal asks the program to end."""


class _Run(NamedTuple):
    """One run of a workload. Generations begin again once the daemon has forgotten the ended runs of a key."""

    key: str
    generation: int
    created_at: str | None


class _Source:
    """The workloads to record, read from the daemon."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._daemon = Daemon(args.socket)
        self._patterns: list[str] = args.key
        self._filters = args.filter
        # The keys and generations that were in the last reading and had not ended; and the runs that need no further
        # line.
        self._living: set[tuple[str, int]] = set()
        self._ended: set[_Run] | None = None

    def header(self, interval_s: float) -> Header:
        """Return the first line of a recording. Raises CommandError."""
        status = self._daemon.call(_ACTION, signatures.STATUS)
        names = sorted({name for resource in status.capacity for name in resource.events})
        return Header(
            read_at=utc_now(),
            format=FORMAT,
            version=status.version,
            host=self._daemon.host,
            simulation=status.simulation,
            interval_s=interval_s,
            events={name: EVENTS[name].unit if name in EVENTS else "" for name in names},
        )

    def read(self) -> Reading:
        """Read now. A run that has ended since the last reading is in it, with its final totals. Raises CommandError.

        Reading twice returns the same ended runs until ``keep``.
        """
        pages = self._daemon.stream(_ACTION, signatures.READ_ALL, ReadAllRequest(with_ended=True))
        lines = workload_table.lines([usage for page in pages for usage in page.usages])
        if self._ended is None:
            self._ended = {_run(line) for line in lines if _has_ended(line)}
        chosen = {_run(line) for line in workload_table.selected(lines, self._filters) if self._is_named(line)}
        # A filter, such as state=active, may not match the end of a run that it matched before.
        chosen |= {run for run in map(_run, lines) if (run.key, run.generation) in self._living}
        chosen -= self._ended
        return Reading(read_at=utc_now(), workloads=[_used(line) for line in lines if _run(line) in chosen])

    def reconnect(self) -> None:
        """Open a new connection for the next reading: Ctrl-C on the terminal ends ssh too."""
        self._daemon.disconnect()

    def keep(self, reading: Reading) -> None:
        """Keep which runs have ended: the reading was written."""
        ended = [used for used in reading.workloads if used.completed_at is not None]
        self._living = {(used.key, used.generation) for used in reading.workloads if used.completed_at is None}
        self._ended = (self._ended or set()) | {_Run(used.key, used.generation, used.created_at) for used in ended}

    def _is_named(self, line: Line) -> bool:
        names = (
            line.workload.key,
            line.selector,
            name_of(line.workload.attributes),
            line.attribute("container.name"),
        )
        return is_selected(self._patterns, names)


def _run(line: Line) -> _Run:
    return _Run(line.workload.key, line.workload.generation, line.workload.created_at)


def _has_ended(line: Line) -> bool:
    # If another call changes it now, the next reading has its totals.
    return line.workload.state.is_over and not line.usage.error


def _used(line: Line) -> Used:
    workload, usage = line.workload, line.usage
    return Used(
        key=workload.key,
        generation=workload.generation,
        name=_name(line),
        state=str(workload.state),
        read_at=usage.read_at,
        created_at=workload.created_at,
        completed_at=(workload.completed_at or usage.read_at or utc_now()) if _has_ended(line) else None,
        totals={total.event: Amount(value=total.value, quality=str(total.quality)) for total in usage.totals},
        levels={level.event: level.value for level in usage.levels},
        error=usage.error,
    )


def _name(line: Line) -> str:
    """Return the name by which people know the workload: the command if ``run`` chose the key."""
    command = line.attribute("command") if line.workload.key.startswith("run-") else ""
    return name_of(line.workload.attributes) or command or line.selector


class _File:
    """The file of a recording: a context manager. After an error, it ends with a complete line."""

    def __init__(self, path: str) -> None:
        self.readings = 0
        self._size = 0
        self._name = "standard output" if path == _STANDARD_OUTPUT else printable(path)
        self._descriptor = 1
        if path != _STANDARD_OUTPUT:
            with self._explained():
                # Names can be command lines, which the daemon shows only to root and to its group.
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        # Other programs may write to standard output too: it is never cut.
        self._can_cut = path != _STANDARD_OUTPUT and stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor != 1:
            with self._explained():
                os.close(self._descriptor)

    def write(self, line: AnyLine) -> None:
        """Write a line. Raises CommandError, and BrokenPipeError if the reader of a pipe has closed it."""
        data = escaped(msgspec.json.encode(line).decode()).encode() + b"\n"
        try:
            with self._explained():
                left = memoryview(data)
                while left:
                    left = left[os.write(self._descriptor, left) :]
        except BaseException:
            if self._can_cut:
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += len(data)
        self.readings += isinstance(line, Reading)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            kept = f". It has {format_count(self.readings, 'reading')}" if self.readings else ""
            raise CommandError(f"cannot write {self._name}: {error.strerror}{kept}", FAILURE) from error


class _Recorder:
    """Writes readings, and reports outages of the daemon. ``status`` is the exit status of the last reading."""

    def __init__(self, source: _Source, file: _File, output: Output) -> None:
        self._source = source
        self._file = file
        self._output = output
        self.status = OK

    def take(self) -> None:
        """Read and write. Raises CommandError if the file cannot be written."""
        try:
            reading = self._source.read()
        except CommandError as error:
            if self.status == OK:
                self._file.write(Outage(read_at=utc_now(), reason=str(error)))
                self._output.note(f"{error}. The recording continues when resctrlmond answers")
            self.status = error.status
            return
        self.write(reading)
        if self.status != OK:
            self._output.note("resctrlmond answers again: the recording continues")
            self.status = OK

    def write(self, reading: Reading) -> None:
        """Write a reading."""
        self._file.write(reading)
        self._source.keep(reading)


def record(args: argparse.Namespace, output: Output) -> int:
    """Record until a signal, or ``args.count`` readings; return the exit status of the last reading."""
    if args.parquet:
        return _record_parquet(args, output)
    recorder, readings = _record_lines(args, output, args.output)
    if args.output != _STANDARD_OUTPUT:
        output.note(f"{readings} written to {args.output}. To show them: resctrlctl plot {args.output}")
    return recorder.status


def _record_parquet(args: argparse.Namespace, output: Output) -> int:
    """Record lines, because a Parquet file is readable only when it is complete, and then convert them."""
    if args.output == _STANDARD_OUTPUT:
        raise CommandError("a Parquet file cannot be written to standard output: give --output a file", USAGE)
    from resctrlctl.live.parquet import convert  # noqa: PLC0415  # pyarrow is optional, and slow to import

    lines = f"{args.output}.jsonl"
    if os.path.lexists(lines):
        name = printable(lines)
        raise CommandError(
            f"{name} exists: it may be what is left of a recording that was killed. To show it: resctrlctl plot "
            f"{name}. Remove or rename it"
        )
    recorder, readings = _record_lines(args, output, lines)
    convert(lines, args.output)
    os.unlink(lines)
    output.note(f"{readings} written to {args.output}")
    return recorder.status


def _record_lines(args: argparse.Namespace, output: Output, path: str) -> tuple[_Recorder, str]:
    """Record to a file of lines. Return what recorded, and the number of readings in words."""
    source = _Source(args)
    # An earlier recording in the file is kept if there is nothing to record.
    header, first = source.header(args.delay), source.read()
    if (args.key or args.filter) and not first.workloads:
        output.note("no workload matches now; those that match later are recorded")
    with _File(path) as file:
        recorder = _Recorder(source, file, output)
        file.write(header)
        try:
            with _interrupted_by_signals():
                recorder.write(first)
                _repeat(recorder, args)
        except _Interrupt:
            # The last reading has the workloads that ended since the one before. A second signal ends it.
            source.reconnect()
            recorder.take()
    return recorder, format_count(file.readings, "reading")


def _repeat(recorder: _Recorder, args: argparse.Namespace) -> None:
    left = None if args.count is None else args.count - 1
    next_at = time.monotonic()
    while left is None or left > 0:
        # After a delay, such as a suspend, the readings that were missed are not made up for.
        next_at = max(next_at + args.delay, time.monotonic())
        time.sleep(max(next_at - time.monotonic(), 0.0))
        recorder.take()
        left = None if left is None else left - 1


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Have signals that end the program raise _Interrupt, unless they are ignored, as in a background job."""

    def interrupt(_number: int, _frame: object) -> NoReturn:
        raise _Interrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
