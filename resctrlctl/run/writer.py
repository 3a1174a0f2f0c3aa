# SPDX-License-Identifier: Apache-2.0
"""Write the intervals and the report of ``run``."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

from msgspec.structs import replace

from resctrlctl.base.errors import OWN_FAILURE, CommandError, print_error
from resctrlctl.run.report import RepeatedReport, Report, as_fields, as_text, figures, interval_lines, is_selected
from resctrlctl.run.samples import Interval, LevelSummary
from resctrlctl.screen.output import Json, Output, encode
from resctrlctl.screen.width import has_blocks, terminal_width
from resctrlmond.api import types

T = TypeVar("T", types.Total, types.Level, LevelSummary)


@contextlib.contextmanager
def report_file(path: str | None, *, is_appended: bool) -> Iterator[TextIO]:
    """Open the file of the report; yield stderr if it has no path. Raises CommandError."""
    if path is None:
        yield sys.stderr
        return
    try:
        # Opened before the command starts, because an error after hours of work would lose the report.
        opened = open(path, "a" if is_appended else "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise CommandError(
            f"cannot write the report to {path}: {error.strerror}. Name another file with -o", OWN_FAILURE
        ) from error
    try:
        yield opened
    finally:
        with contextlib.suppress(OSError):  # Writer.write() has reported the error
            opened.close()


class Writer:
    """Writes the intervals and the report to ``file``, in the form that the options select.

    ``is_hidden``: it writes nothing, so only the exit status and the problem of a report are needed.
    """

    def __init__(self, args: argparse.Namespace, output: Output, file: TextIO) -> None:
        self._args = args
        self._output = output
        self._file = file
        self._is_json = output.json is not Json.OFF
        # The report is for programs.
        self._is_data = self._is_json or args.field_separator is not None
        self.is_hidden = output.quiet and file is sys.stderr and not self._is_data

    def interval_writer(self, run_number: int) -> Callable[[Interval], None] | None:
        """Return the function that writes an interval; None if there is none. ``run_number``: Interval.run."""
        if self._args.interval_ms is None:
            return None

        def write(interval: Interval) -> None:
            totals, levels = self._selected(interval.totals), self._selected(interval.levels)
            chosen = replace(interval, totals=totals, levels=levels, run=run_number)
            if self._is_json:
                self._file.write(encode(chosen, Json.SHORT) + "\n")
            else:
                self._file.write(interval_lines(chosen, self._args.field_separator))
            self._file.flush()

        return write

    def write(self, reports: Sequence[Report]) -> None:
        """Write the report of these runs. An error is printed."""
        # The text for people, on the terminal.
        has_problems = self._file is sys.stderr and not (self._is_data or self.is_hidden)
        try:
            for report in reports:
                if report.workload and report.problem and not has_problems:
                    print_error(report.problem)
            if self.is_hidden:
                return
            self._file.write(self._text([self._with_selected(report) for report in reports]))
            self._file.flush()
        except OSError as error:
            keys = [shlex.quote(report.workload.key) for report in reports if report.workload]
            remedy = f". The totals are also in: resctrlctl show {' '.join(keys)}" if keys else ""
            print_error(f"cannot write the report: {error.strerror}{remedy}")

    def _text(self, reports: Sequence[Report]) -> str:
        if self._is_json:
            all_runs = RepeatedReport(reports[0].command, reports, figures(reports))
            return encode(reports[0] if self._args.repeat == 1 else all_runs, self._output.json) + "\n"
        if self._args.field_separator is not None:
            return as_fields(reports, self._args.field_separator)
        # A file has no width, as the output of other verbs.
        width = terminal_width() if self._file is sys.stderr and sys.stderr.isatty() else None
        return as_text(reports, width, is_ascii=not has_blocks())

    def _with_selected(self, report: Report) -> Report:
        return replace(
            report,
            totals=self._selected(report.totals),
            nested=self._selected(report.nested),
            levels=self._selected(report.levels),
        )

    def _selected(self, entries: Iterable[T]) -> list[T]:
        """Return the entries whose event matches."""
        return [one for one in entries if is_selected(one.event, self._args.events)]
